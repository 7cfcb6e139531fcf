//! Pages of keys and values, and the blocks they hold. Integers only: no I/O, no clock, no device.
//!
//! A *page* is room for a fixed number of token positions in one tier of memory. A *block* is the
//! content of a full page, named by the chained hash of everything up to its end ([`BlockHash`]).
//! [`PagePool`] knows which page of a tier holds which block, who uses it, and which unused block
//! to give up first. [`Tiers`] joins the device's pool with the host's, and owns the copies between
//! them. A request owns its pages as [`Lease`]s, which it must give back.
//!
//! Every page is in exactly one of three states: *free* (holds nothing worth keeping), *cached*
//! (holds a named block that nobody uses) or *held* (leased at least once). `free + cached + held`
//! is always the number of pages.

mod event;
mod hash;
mod images;
mod lru;
mod pool;
mod tiers;

pub use event::{BlockEvent, Place};
pub use hash::{BlockHash, ImageId, Namer};
pub use images::{ImageLease, ImagePool, Seen};
pub use pool::{Counts, Evicted, Host, Hot, Lease, PagePool};
pub use tiers::{BackedBlock, Direction, Found, Moves, PageCopy, Span, Tiers};
