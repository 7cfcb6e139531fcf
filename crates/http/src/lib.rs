//! The HTTP layer of a server: its connections, and the checks on clients before their requests are
//! read. It does not depend on models or APIs.
//!
//! [`Connections`] accepts connections within a listener's limit, and serves requests with the
//! routes of a [`ConnectionSetup`]. [`Tls`] encrypts a connection. A connection is closed if its
//! client reads nothing for too long. A [`Line`] lets another thread write the chunks of a response
//! without hyper. [`Keys`] and [`Clients`] identify the client, and a [`ByteBudget`] limits its
//! memory. A [`Guard`] detects panics of threads.
//!
//! ```
//! use forebay_http::{ByteBudget, ClientId, Refusal};
//!
//! let budget = ByteBudget::new(800);
//! let charge = budget.charge(ClientId(1), 500)?;
//! assert_eq!(budget.used(), 500);
//! assert!(matches!(budget.charge(ClientId(1), 900), Err(Refusal::TooLarge { .. })));
//! drop(charge);
//! assert_eq!(budget.used(), 0, "what is charged is given back");
//! # Ok::<(), Refusal>(())
//! ```

mod budget;
mod client;
mod connection;
mod connections;
mod guard;
mod keys;
mod line;
mod places;
mod socket;
mod stall;
mod thread;
mod tls;
mod unread;

pub use budget::{ByteBudget, Charge};
pub use client::{ClientId, Clients, HasClients, KeyId, Remote, TrustedProxies};
pub use connection::ConnectionSetup;
pub use connections::Connections;
pub use forebay_fair::Refusal;
pub use guard::{Guard, contained, panic_message};
pub use keys::Keys;
pub use line::{Line, LineIo, WriteOutcome};
pub use socket::{Listener, Socket};
pub use thread::ListenerThread;
pub use tls::Tls;
pub use unread::{RequestBody, answer};
