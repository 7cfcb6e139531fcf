//! A simulated rank group: takes real plans, keeps no KV, answers deterministic tokens after the
//! time a device would take.
//!
//! The token at a position is a hash of all tokens before it. So a request gets the same tokens
//! whatever the batch, the chunking, the prefix hits, the lookahead, preemption or replay. A real
//! model has exactly this invariance in exact arithmetic. The vector of a prompt that is pooled is
//! a hash of its tokens in the same way. Time is the machine's or virtual; virtual time jumps from
//! event to event and makes hours of traffic a matter of CPU seconds.
//!
//! A [`Profile`] says the time of a step. It is a TOML file, built in or made by [`fit`] from the
//! notes of a [`Recorder`] about a real device. docs/simulation.md is the user's page.

mod clock;
mod copies;
mod device;
mod executor;
mod fit;
mod load;
mod profile;
mod record;
mod samples;
mod solve;
mod text;
mod timeline;

pub use clock::SimClock;
pub use copies::{CopyEngines, CopyFault, PageBytes};
pub use executor::{SimConfig, SimControl, SimExecutor, SimTower};
pub use fit::{Fit, fit};
pub use load::StepLoad;
pub use profile::{CopyModel, DeviceModel, Jitter, KvModel, Profile, ProfileError};
pub use record::{Recorder, StepRecord};
pub use samples::{FitError, Sample, read_samples};
pub use text::{Script, SimText, next_token, vector};
pub use timeline::{SaveOrder, Span, SparseModel, Timeline, Timing};
