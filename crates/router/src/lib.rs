//! An OpenAI-compatible proxy in front of several brains, or of servers of others: choice, retries,
//! failover.
//!
//! A request's way: `admission` asks for its key, `intake` reads its body, and `ask` picks the few
//! fields that matter. [`Shared::dispatch`](shared) chooses a backend and notes the dispatch in its
//! [`Ledger`]. `reach` sends the request, again and elsewhere as long as nothing was produced. The
//! response comes as a `flow`. The client's own task reads it and gives it as a `relay`. Bytes pass
//! as they come, except in streams of brains: their comments (`tape`) carry load and tokens, so
//! that another brain can go on with a stream that breaks.
//!
//! | threads | who | what |
//! |---|---|---|
//! | `--threads` | `serve` | connections: each thread accepts, and drives the connections to backends that its clients need |
//! | 1 | `watch`, `sources` | health checks, load of idle backends, block events; the list of backends |

mod admission;
mod ask;
mod backend;
mod breaker;
mod config;
mod flow;
mod homes;
mod index;
mod intake;
mod ledger;
mod link;
mod live;
mod loads;
mod past;
mod payload;
mod policy;
mod reach;
mod registry;
mod relay;
mod scan;
mod serve;
mod service;
mod shared;
mod sources;
mod tape;
mod watch;

pub use admission::{AllowedBackends, PatternError};
pub use backend::{BackendUrl, UrlError};
pub use breaker::{Breaker, BreakerConfig};
pub use config::{HealthConfig, RetryConfig, RouterConfig, Sources, Watch};
pub use intake::BodyLimits;
pub use ledger::{Accounting, Ledger};
pub use policy::{Candidate, Chooser, Policy, Thresholds};
pub use serve::{Router, StartError};
