//! The executor that runs plans on real hands, one process a rank. It spawns, feeds, supervises and
//! kills them, or lets a [`Site`] run them elsewhere.
//!
//! The engine thread that owns the [`HandExecutor`] does everything except writes to the [`Arena`],
//! which any thread may do. There is no reader thread, and no lock except on the list of the
//! arena's free parts. Sockets never block: [`Executor::wait`](forebay_engine::Executor::wait)
//! writes the bytes that they did not accept at once.
//!
//! A rank group lives and dies together: the first rank that ends takes the others with it. Each
//! rank is the leader of a process group of its own. The operating system kills the rank when the
//! engine thread ends, for any reason.

mod arena;
mod counts;
#[cfg(test)]
mod damage;
mod executor;
mod frames;
#[cfg(test)]
mod fuzz;
mod memory;
mod merger;
mod process;
mod site;
mod slice;
mod space;
mod store;
mod waker;

pub use arena::{Arena, MAX_ARENA_BYTES, Region};
pub use executor::{HandExecutor, HandSpec, RankSpec};
pub use forebay_protocol::{DraftModelConfig, HandConfig, PlaceConfig};
pub use memory::{HostMemories, HostMemory};
pub use process::{Exit, RankProcess, without_keys};
pub use site::{Distant, RankOrder, Remote, Site};
pub use slice::take_short_turns;
