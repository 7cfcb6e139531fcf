//! Hands on other machines.
//!
//! An *outpost* is this program on another machine. It joins the brain, spawns hands as the brain
//! would, and relays frames between their sockets and the brain. A hand does not know that it is
//! far away, and the executor of its group sees a socket like any other:
//!
//! ```text
//! executor -- socket -- Outposts ==TLS== work() -- socket -- hand
//! ```
//!
//! Each rank has a connection of its own, so that no plan stands behind another's. One more
//! connection an outpost carries orders and a ping a second, and one its payloads (`bulk`). An
//! outpost has a mirror of the brain's arena, and the engine plans a request once its bytes are
//! there. Any end of a connection ends the rank: the outpost kills the process, and the brain sees
//! its socket close.
//!
//! Every connection is TLS 1.3. The brain's certificate signs itself, and the [`JoinToken`] names
//! it by its SHA-256; the token's secret opens the connection before anything else is read.

mod aside;
mod brain;
mod bulk;
mod claim;
mod credentials;
#[cfg(test)]
#[path = "../../hand/src/damage.rs"]
mod damage;
#[cfg(test)]
mod fuzz;
mod messages;
mod mirror;
mod rank;
mod relay;
mod strangers;
mod tls;
mod token;
mod work;

pub use brain::Outposts;
pub use credentials::Credentials;
pub use messages::{Collectives, HandOrder};
pub use token::{JoinToken, TokenError};
pub use work::{OutpostEnd, Spawn, WorkSettings, work};
