//! The executor that runs plans on real hands, with one process per rank. It spawns, supervises and
//! kills the processes, or lets a [`Site`] run them elsewhere.
//!
//! The engine thread that owns the [`HandExecutor`] does everything except writes to the [`Arena`],
//! which any thread may do. There is no reader thread, and no lock except on the arena's list of
//! free ranges. Sockets never block: [`Executor::wait`](forebay_engine::Executor::wait) sends the
//! bytes that they did not accept at once.
//!
//! The ranks of a group end together: when the first rank exits or fails, the others are killed.
//! Each rank is the leader of a separate process group. The operating system kills the rank when
//! the engine thread ends, for any reason.

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
