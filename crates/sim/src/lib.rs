//! A simulated rank group: takes real plans, keeps no KV, answers deterministic tokens after the time a device would take.
//!
//! The token at a position is a hash of all tokens before it, so a request gets the same tokens whatever the batch, the chunking, the
//! prefix hits, the lookahead, preemption or replay: exactly the invariance that a real model has in exact arithmetic. Time is
//! the machine's or virtual; virtual time jumps from event to event and makes hours of traffic a matter of CPU seconds.

mod clock;
mod device;
mod executor;

pub use clock::SimClock;
pub use device::{DeviceModel, next_token};
pub use executor::{SimConfig, SimControl, SimExecutor};
