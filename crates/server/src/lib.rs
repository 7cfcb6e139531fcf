//! The HTTP server: routes, admission, streams, health, metrics and drain.
//!
//! The path of a request: [`serve`] accepts the connection, `limits` reads the body, and `intake`
//! parses large bodies on other threads. `forebay-api` validates, and the text pool tokenises.
//! `call` registers each choice with the egress thread and submits it to the engine. The answer
//! goes through [`EgressSink`] to the egress thread, which turns outputs into text and writes
//! chunks of streams directly to the socket ([`forebay_http::Line`]). Everything else goes through
//! the request's mailbox to the response (`sse`): non-streamed answers, chunks for slow readers,
//! and every end. A dropped response aborts its requests. The outputs of a pooling model are
//! vectors, and take another path ([`PooledSink`], `pooling`).
//!
//! A server of several models has an [`AppState`] for each, and a [`ModelServer`] in front that
//! finds a request's model and loads it (`fleet`).
//!
//! If a router is in front, `peers` reads its headers and answers with load, blocks, and the facts
//! with which another brain continues a stream.
//!
//! A prefill server computes prompts for decode servers, which take the blocks of their cache over
//! (`pd`).
//!
//! | threads | who | what |
//! |---|---|---|
//! | the caller's runtime (2 to 4) | [`serve`] | connections, parsing, validation, heads and ends of responses |
//! | 1 or more | [`egress()`] | detokenisation, stop strings, chunks, request metrics |
//! | 1, where the model pools | [`pooled()`] | vectors to the requests that wait for them, request metrics |
//! | 1 or more | [`Intake`] | parsing of large bodies, embeddings into the arena |
//! | as many, where the model sees images | [`Intake`] | pixels to patches in the arena |
//! | N | `forebay_text::TextPool` | templates, tokenisation |

mod access;
mod adapters;
mod alive;
mod answer;
mod batches;
mod call;
mod computing;
mod config;
mod constrain;
mod cost;
mod facts;
mod fleet;
mod form;
mod ignored;
mod images;
mod inflated;
mod intake;
mod limits;
mod live;
mod loaded;
mod loading;
mod names;
mod pd;
mod peers;
mod pooling;
mod reply;
mod reserve;
mod routes;
mod routing;
mod serve;
mod shapes;
mod sse;
mod state;
mod store;
mod submission;
mod tensors;
mod text;
mod trainer;
mod weight_files;
mod weights;
mod wire;

pub use adapters::{AdapterFiles, AdapterReader, AdapterSettings, check_adapter_name};
pub use config::{ModelInfo, ServerConfig, Sharing};
pub use facts::ModelFacts;
pub use fleet::{FleetParts, ModelEntry, ModelLoader, ModelServer, StartedModel};
pub use forebay_api::Access;
pub use forebay_batches::{BatchConfig, BatchStore};
pub use forebay_egress::{
    Egress, EgressConfig, EgressMode, EgressSink, Engine, Metrics, Pooled, PooledSink, egress,
    pooled,
};
pub use forebay_fleet::{FleetBounds, FleetModel};
pub use forebay_http::{Guard, Keys, Listener, Tls, TrustedProxies};
pub use images::ImageModel;
pub use intake::{Intake, IntakeMode};
pub use pd::{DecodeConfig, Disaggregation, PdParts};
pub use peers::{BlockLog, ReplicaBlocks};
pub use pooling::{PooledModel, PoolingTask, ScoreFunction};
pub use reserve::HealthThread;
pub use serve::{AnyServer, serve};
pub use state::{AppState, CommonParts, ServerParts};
pub use store::StoreConfig;
pub use weight_files::{
    NamedTensor, ParameterValues, TensorFolder, TensorReceiver, TrainerGroup, WeightFiles,
};
pub use weights::WeightSettings;
