//! Chooses one of several targets for a request. Pure: no I/O, no clock, no threads. A target is a
//! replica, a backend, or anything else with an index.
//!
//! A dispatcher combines three parts. [`Ledger`] counts the exact work of each target,
//! [`PrefixIndex`] tracks its blocks, and [`Balancer`] applies policies to both. [`preferred`]
//! finds the target of a client's key. [`RoleRule`] narrows the targets where prefill is
//! disaggregated from decode, and [`Pressure`] detects when the decode targets are full. [`Budget`]
//! dispatches by loads that were reported some time ago, without a ledger; it exists for
//! comparison.
//!
//! ```
//! use forebay_balance::{Ask, Balancer, Ledger, Method, Work};
//!
//! let (mut ledger, mut balancer) = (Ledger::new(2), Balancer::new(Method::PrefixAware));
//! ledger.sent(1, 0, Work { prefill: 0, decode: 50 });
//! // The second target has less to do, but the first has most of the prompt in its cache.
//! let ask = Ask { tokens: 1000, cached: &[960, 0] };
//! assert_eq!(balancer.choose(ledger.loads(), |_| true, &ask), Some(0));
//! let ask = Ask { tokens: 1000, cached: &[] };
//! assert_eq!(balancer.choose(ledger.loads(), |_| true, &ask), Some(1));
//! assert_eq!(ledger.ended(1), Some(0));
//! ```

mod balancer;
mod budget;
mod key;
mod ledger;
mod moves;
mod prefix;
mod pressure;
mod roles;

pub use balancer::{Ask, Balancer, Method};
pub use budget::Budget;
pub use key::preferred;
pub use ledger::{Ledger, Load, Work};
pub use moves::{MOST_MOVES, drifted, move_pays};
pub use prefix::PrefixIndex;
pub use pressure::Pressure;
pub use roles::{LocalReason, Role, RoleRule, lender};
