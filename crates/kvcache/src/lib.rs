//! Pages of keys and values, and the blocks they hold. Integers only: no I/O, no clock, no device.
//!
//! A *page* is room for a fixed number of token positions in one tier of memory. A *block* is the
//! content of a full page, named by the chained hash of everything up to its end ([`BlockHash`]). A
//! [`PagePool`] tracks for one tier which page holds which block, its leases, and which unused
//! block to evict first. [`Tiers`] combines the device's pool with the host's, and owns the copies
//! between them. A request owns its pages as [`Lease`]s, which it must give back. A [`Loan`] lets
//! one replica read pages of another's host tier. A [`WindowPool`] has the pages of layers that
//! read only the last positions of a request.
//!
//! Every page is in exactly one of three states. A *free* page holds nothing of value. A *cached*
//! page holds a named block without a lease. A *held* page is leased at least once. `free + cached
//! + held` is always the number of pages.
//!
//! ```
//! use forebay_kvcache::{Found, Namer, Tiers};
//!
//! let mut tiers = Tiers::new(2, 0);
//! // A request computes a page, and says what it holds.
//! let lease = tiers.allocate().expect("a free page");
//! let name = Namer::open().chain(0, &[5, 6, 7, 8], 4)[0];
//! assert!(tiers.name(&lease, name));
//! tiers.release(lease);
//! // Another one with the same tokens finds it.
//! let Some(Found::Hot(lease)) = tiers.find(name) else { panic!("it is cached") };
//! assert_eq!((tiers.hot().counts().held, tiers.hot().counts().free), (1, 1));
//! tiers.release(lease);
//! ```

mod event;
mod hash;
mod images;
mod loan;
mod lru;
mod pool;
mod tiers;
mod window;

pub use event::{BlockEvent, Place};
pub use hash::{BlockHash, ImageId, Namer};
pub use images::{ImageLease, ImagePool, ImageTier};
pub use loan::{Loan, LoanId};
pub use pool::{Counts, Evicted, Host, Hot, Lease, PagePool};
pub use tiers::{BackedBlock, Found, Moves, Tiers};
pub use window::{WindowPool, WindowTier};
