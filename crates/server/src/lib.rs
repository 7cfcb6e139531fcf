//! The HTTP server: routes, admission, streams, health, metrics and drain.
//!
//! A request's way in: [`serve`] accepts, `limits` reads the body, and `intake` parses it on other
//! threads if it is large. `forebay-api` validates, and the text pool tokenises. `call` registers
//! each choice with the egress thread and submits it to the engine. Its way out: the engine's
//! outputs go through [`EgressSink`] to the egress thread, which makes text of them. The egress
//! thread writes chunks of a stream to the socket itself (`line`). It leaves everything else in the
//! request's mailbox, from which the response takes it (`sse`). That is an answer in one piece,
//! chunks that a slow reader could not take, and every end. A response that is dropped aborts what
//! it waits for. The outputs of a model that pools are vectors and take another way
//! ([`PooledSink`], `pooling`).
//!
//! Where a router is in front, `peers` reads what it says and answers it: load, blocks, and what
//! another brain needs to go on with a stream.
//!
//! | threads | who | what |
//! |---|---|---|
//! | the caller's runtime (2 to 4) | [`serve`] | connections, parsing, validation, heads and ends of responses |
//! | 1 or more | [`egress()`] | detokenisation, stop strings, chunks, request metrics |
//! | 1, where the model pools | [`pooled()`] | vectors to the requests that wait for them, request metrics |
//! | 1 or more | [`Intake`] | parsing of large bodies, embeddings into the arena |
//! | N | `forebay_text::TextPool` | templates, tokenisation |

mod access;
mod budget;
mod call;
mod client;
mod config;
mod connection;
mod constrain;
mod engine;
mod guard;
mod ignored;
mod images;
mod intake;
mod keys;
mod limits;
mod live;
mod loading;
mod metrics;
mod peers;
mod places;
mod pooling;
mod prompt_logprobs;
mod reply;
mod reserve;
mod routes;
mod routing;
mod serve;
mod shapes;
mod socket;
mod stall;
mod state;
mod store;
mod stream;
mod text;
mod tls;

pub use client::TrustedProxies;
pub use config::{EgressMode, ModelInfo, ServerConfig, Sharing};
pub use engine::Engine;
pub use forebay_api::Access;
pub use guard::Guard;
pub use images::ImageModel;
pub use intake::{Intake, IntakeMode};
pub use keys::Keys;
pub use metrics::Metrics;
pub use peers::{BlockLog, ReplicaBlocks};
pub use pooling::{Pooled, PooledModel, PooledSink, PoolingTask, pooled};
pub use reserve::HealthThread;
pub use serve::serve;
pub use socket::Listener;
pub use state::AppState;
pub use store::StoreConfig;
pub use stream::egress::{Egress, EgressConfig, EgressSink, egress};
pub use tls::Tls;
