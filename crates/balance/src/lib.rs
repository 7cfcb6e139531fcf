//! The choice between several targets of a request. Pure: no I/O, no clock, no threads. A target is
//! a replica, a backend, or anything else with a number.
//!
//! Three parts that are put together by whoever dispatches: [`Ledger`], what each target has to do,
//! exactly; [`PrefixIndex`], which target holds which blocks; [`Balancer`], the policies over both.
//! [`preferred`] is where a client's key leads. [`Budget`] is how dispatchers do without a ledger,
//! from loads that were reported some time ago: it is here to be measured against.

mod balancer;
mod budget;
mod key;
mod ledger;
mod prefix;

pub use balancer::{Ask, Balancer, Method};
pub use budget::Budget;
pub use key::preferred;
pub use ledger::{Ledger, Load, Work};
pub use prefix::PrefixIndex;
