//! The executor that runs plans on real hands: one process a rank, spawned, fed, watched and killed
//! from here, or by whatever [`Site`] runs it elsewhere.
//!
//! Everything happens on the engine thread that owns the [`HandExecutor`], but for writes to the
//! [`Arena`], which any thread may do: there is no reader thread, and no lock but the one on the
//! list of the arena's free parts. Sockets never block; what they do not take at once is written
//! from [`Executor::wait`](forebay_engine::Executor::wait).
//!
//! A rank group lives and dies together: the first rank that ends takes the others with it, each
//! rank is the leader of a process group of its own, and the kernel kills it when the engine thread
//! ends, however that happens.

mod arena;
mod executor;
mod frames;
#[cfg(test)]
mod fuzz;
mod process;
mod site;
mod slice;
mod space;
mod store;
mod waker;

pub use arena::{Arena, MAX_ARENA_BYTES, Region};
pub use executor::{HandExecutor, HandSpec, RankSpec};
pub use forebay_protocol::HandConfig;
pub use process::{RankProcess, without_keys};
pub use site::{Distant, RankOrder, Remote, Site};
pub use slice::take_short_turns;
