//! A simulated rank group: it takes real plans, has no KV cache, and returns deterministic tokens
//! after the time that a device would take.
//!
//! The token at a position is a hash of all preceding tokens. So a request gets the same tokens
//! with any batch, chunking, prefix hits, lookahead, preemption or replay. A real model has the
//! same invariance if its arithmetic is exact. The embedding of a pooled prompt is a hash of its
//! tokens. Time is real or virtual. Virtual time jumps from event to event, so that hours of
//! traffic take seconds of CPU time.
//!
//! A [`Profile`] determines the time of a step. It is a TOML file, which is built in, or made by
//! [`fit`] from the measurements that a [`Recorder`] wrote on a real device. docs/simulation.md is
//! the documentation for users.
//!
//! ```
//! use forebay_sim::{Profile, ProfileError, SimText, StepLoad, next_token};
//!
//! let profile = Profile::find("h100-llama-3.1-8b")?;
//! let decode = |rows| StepLoad { rows, decode_rows: rows, ..StepLoad::default() };
//! let (one, many) = (profile.time.median_us(&decode(1)), profile.time.median_us(&decode(256)));
//! assert!(one < many && many < 256.0 * one, "a batch is cheaper than its requests one by one");
//!
//! let text = SimText::endless((0..100).collect());
//! assert_eq!(next_token(&text, &[1, 2, 3], 3), next_token(&text, &[1, 2, 3], 3));
//! # Ok::<(), ProfileError>(())
//! ```

mod clock;
mod copies;
mod device;
mod executor;
mod faults;
mod fit;
mod load;
mod profile;
mod record;
mod samples;
mod solve;
mod states;
pub mod testing;
mod text;
mod timeline;

pub use clock::SimClock;
pub use copies::{Bus, CopyEngines, CopyFault, PageBytes};
pub use executor::{SimConfig, SimExecutor, SimTower};
pub use faults::SimControl;
pub use fit::{Fit, fit};
pub use load::StepLoad;
pub use profile::{CopyModel, DeviceModel, Jitter, KvModel, Profile, ProfileError};
pub use record::{Recorder, StepRecord};
pub use samples::{FitError, Sample, read_samples};
pub use states::StateModel;
pub use text::{Script, SimText, next_token, vector};
pub use timeline::{SaveOrder, Span, SparseModel, Timeline, Timing};
