//! Hands on other machines.
//!
//! An *outpost* is this program on another machine. It joins the brain, spawns hands as the brain
//! would, and relays frames between their sockets and the brain. The hand does not notice the
//! difference, and the executor of its group uses an ordinary socket:
//!
//! ```text
//! executor -- socket -- Outposts ==TLS== work() -- socket -- hand
//! ```
//!
//! Each rank has its own connection, so that no plan waits for the plan of another rank. Each
//! outpost has two further connections: one carries orders and a ping every second, the other
//! payloads (`bulk`). An outpost has a mirror of the brain's arena, and the engine plans a request
//! once its payload has arrived there. When a rank's connection is closed, the rank ends: the
//! outpost kills the process, and the brain's end of the socket is closed.
//!
//! Every connection is TLS 1.3. The brain's certificate is self-signed, and the [`JoinToken`]
//! contains its SHA-256. The token's secret is checked before anything else is parsed.

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
