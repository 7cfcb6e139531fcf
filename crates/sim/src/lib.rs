//! A simulated rank group: it takes real plans, has no KV cache, and answers with deterministic
//! tokens after the time that a device would take.
//!
//! The token at a position is a hash of all tokens before it. So a request gets the same tokens
//! with any batch, chunking, prefix hits, lookahead, preemption or replay. A real model has exactly
//! this invariance in exact arithmetic. The vector of a prompt that is pooled is a hash of its
//! tokens in the same way. Time is real or virtual; virtual time jumps from event to event, so
//! hours of traffic take CPU seconds.
//!
//! A [`Profile`] gives the time of a step: a TOML file, built in, or made by [`fit`] from a
//! [`Recorder`]'s file about a real device. docs/simulation.md is the user's page.
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
