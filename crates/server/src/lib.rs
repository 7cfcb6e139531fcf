//! The HTTP server: routes, admission, streams, health, metrics and drain.
//!
//! The path of a request: [`serve`] accepts the connection, `limits` reads the body, and `intake`
//! parses large bodies on other threads. `forebay-api` validates, and the text pool tokenises.
//! `call` registers each choice with the egress thread and submits it to the engine. The output
//! goes through [`EgressSink`] to the egress thread, which detokenises it and writes chunks of
//! streams directly to the socket ([`forebay_http::Line`]). Everything else goes through the
//! request's mailbox to the response (`sse`): non-streamed responses, chunks for slow readers, and
//! the last chunk of every stream. Dropping a response aborts its requests. The outputs of a
//! pooling model are vectors, and take another path ([`PooledSink`], `pooling`).
//!
//! A server of several models has an [`AppState`] per model. A [`ModelServer`] in front finds the
//! model that a request names, and loads it (`fleet`).
//!
//! If a router is in front, `peers` reads its headers and returns the load, the blocks, and the
//! facts with which another brain continues a stream.
//!
//! A prefill server computes prompts for decode servers, which fetch the resulting blocks of the KV
//! cache (`pd`).
//!
//! | threads | item | work |
//! |---|---|---|
//! | the caller's, 2 to 4 | [`serve`] | connections, parsing, validation, response heads and ends |
//! | 1 or more | [`egress()`] | detokenisation, stop strings, chunks, request metrics |
//! | 1, for a pooling model | [`pooled()`] | vectors to waiting requests, request metrics |
//! | 1 or more | [`Intake`] | parsing of large bodies, embeddings into the arena |
//! | as many again, if the model accepts images | [`Intake`] | decoding of images into the arena |
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
