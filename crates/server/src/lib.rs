//! The HTTP server: routes, admission, streams, health, metrics and drain.
//!
//! A request's way in: [`serve`] accepts, `limits` reads the body, `forebay-api` validates, the text pool tokenises,
//! `call` registers each choice with the egress thread and submits it to the engine. Its way out: the engine's outputs go through
//! [`EgressSink`] to the egress thread, which makes text of them. Chunks of a stream it writes to the socket itself (`line`); an answer in one
//! piece, what a slow reader could not take, and every end it leaves in the request's mailbox, from where the response takes it (`sse`).
//! A response that is dropped aborts what it waits for.
//!
//! | threads | who | what |
//! |---|---|---|
//! | the caller's runtime (2 to 4) | [`serve`] | connections, parsing, validation, heads and ends of responses |
//! | 1 or more | [`egress()`] | detokenisation, stop strings, chunks, request metrics |
//! | N | `forebay_text::TextPool` | templates, tokenisation |

mod call;
mod config;
mod delta;
mod egress;
mod engine;
mod limits;
mod line;
mod mailbox;
mod metrics;
mod outlet;
mod reply;
mod routes;
mod serve;
mod sse;
mod state;
mod tally;
mod text;
mod wire;

pub use config::{EgressMode, ModelInfo, ServerConfig};
pub use egress::{Egress, EgressConfig, EgressSink, egress};
pub use engine::Engine;
pub use metrics::Metrics;
pub use serve::serve;
pub use state::AppState;
