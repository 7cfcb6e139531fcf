//! An OpenAI-compatible proxy in front of several brains or other servers. It chooses backends,
//! retries requests, and continues broken streams.
//!
//! The path of a request: `admission` checks its key, `intake` reads its body, and `ask` parses the
//! few fields that routing needs. `Shared::dispatch` chooses a backend and records the dispatch in
//! its [`Ledger`]. `reach` makes an `attempt` with that backend, and further attempts with others
//! as long as the client has received nothing. The response arrives as a `flow`, which the client's
//! own task reads and forwards as a `relay`. Bytes pass unchanged, except in streams of brains:
//! these contain comments (`tape`) with load and tokens, so that another brain can continue a
//! broken stream.
//!
//! If `pairs` of other servers (vLLM, SGLang) compute requests, `dispatch` chooses two backends.
//! The request to the prefill server is a `leg`, which runs beside the request to the decode
//! server. The client gets the answer of the decode server.
//!
//! | threads | who | what |
//! |---|---|---|
//! | `--threads` | `serve` | connections: each thread accepts, and drives the connections to backends that its clients need |
//! | 1 | `watch`, `sources` | health checks, load of idle backends, block events; the list of backends |
//!
//! ```no_run
//! use std::net::TcpListener;
//!
//! use forebay_router::{Policy, Router, RouterConfig, Sources};
//!
//! let urls = vec!["http://10.0.0.1:8000".to_owned(), "http://10.0.0.2:8000".to_owned()];
//! let config = RouterConfig::default();
//! let sources = Sources { urls, ..config.sources };
//! let config = RouterConfig { policy: Policy::CacheAware, sources, ..config };
//! let router = Router::start(config, TcpListener::bind("0.0.0.0:8080")?)?;
//! // Until somebody asks for its end; then running requests may finish.
//! std::io::stdin().read_line(&mut String::new())?;
//! router.stop(std::future::pending());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod admission;
mod ask;
mod attempt;
mod backend;
mod breaker;
mod budget;
mod config;
mod flow;
mod homes;
mod identify;
mod index;
mod intake;
mod ledger;
mod leg;
mod life;
mod link;
mod live;
mod loads;
mod models;
mod movable;
mod moves;
mod pairs;
mod past;
mod payload;
mod policy;
mod reach;
mod registry;
mod relay;
mod serve;
mod service;
mod shared;
mod sources;
mod splice;
mod tape;
mod trials;
mod used;
mod watch;

pub use admission::{AllowedBackends, PatternError};
pub use breaker::{Breaker, BreakerConfig, FailureOrigin};
pub use config::{HealthConfig, RetryConfig, RouterConfig, Sources, Watch};
pub use forebay_api::{BackendUrl, UrlError};
pub use intake::BodyLimits;
pub use ledger::{Accounting, Ledger};
pub use pairs::{PairConfig, PairEngine, PrefillServer};
pub use policy::{Candidate, Chooser, Policy, Thresholds};
pub use serve::{Router, StartError};
