//! The HTTP server: routes, admission, streams, health, metrics and drain.
//!
//! A request's way in: [`serve`] accepts, `limits` reads the body, `forebay-api` validates, the text pool tokenises,
//! `call` registers each choice with the egress thread and submits it to the engine. Its way out: the engine's outputs go through
//! [`EgressSink`] to the egress thread, which makes text of them and leaves it in the request's mailbox, from where the response
//! takes it: as a whole, or as events (`sse`). A response that is dropped aborts what it waits for. The outputs of a model that pools are
//! vectors and take another way ([`PooledSink`], `pooling`).
//!
//! | threads | who | what |
//! |---|---|---|
//! | the caller's runtime (2 to 4) | [`serve`] | connections, parsing, validation, encoding of responses |
//! | 1 | [`egress()`] | detokenisation, stop strings, request metrics |
//! | 1, where the model pools | [`pooled()`] | vectors to the requests that wait for them, request metrics |
//! | N | `forebay_text::TextPool` | templates, tokenisation |

mod call;
mod config;
mod egress;
mod engine;
mod limits;
mod mailbox;
mod metrics;
mod pooling;
mod reply;
mod routes;
mod serve;
mod sse;
mod state;
mod text;

pub use config::{ModelInfo, ServerConfig};
pub use egress::{Egress, EgressSink, egress};
pub use engine::Engine;
pub use metrics::Metrics;
pub use pooling::{Pooled, PooledModel, PooledSink, PoolingTask, pooled};
pub use serve::serve;
pub use state::AppState;
