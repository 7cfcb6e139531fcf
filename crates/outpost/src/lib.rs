//! Hands on other machines.
//!
//! An *outpost* is this program on another machine. It joins the brain, spawns hands as the brain
//! would, and relays frames between their sockets and the brain. Nothing changes for the hand, and
//! the executor of its group has a socket like any other:
//!
//! ```text
//! executor -- socket -- Outposts ==TLS== work() -- socket -- hand
//! ```
//!
//! Each rank has its own connection, so that no plan waits behind another's. Each outpost has two
//! further connections: one carries orders and a ping every second, the other payloads (`bulk`). An
//! outpost has a mirror of the brain's arena, and the engine plans a request once its bytes are
//! there. When a rank's connection ends, so does the rank: the outpost kills the process, and the
//! brain sees its socket close.
//!
//! Every connection is TLS 1.3. The brain's certificate is self-signed, and the [`JoinToken`]
//! identifies it by its SHA-256. The token's secret is checked before anything else is read.

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
