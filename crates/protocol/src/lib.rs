//! The step protocol between the brain and its hands: frames, plans and results as bytes. No I/O.
//!
//! `docs/protocol.md` is the specification. The Python twin is `python/forebay/protocol`; golden fixtures in
//! `tests/wire/` are checked from both languages.

mod dtype;
mod frame;
mod plan;
mod result;

pub use dtype::Dtype;
pub use frame::{Frame, FrameError, HEADER_BYTES, Header, Kind, MAX_WORDS, VERSION, encode_json};
pub use plan::{
    NewSlot, PAGE_WRITE_WORDS, PlanColumn, Pooling, ROW_WORDS, Row, SamplingParams, SlotWrite,
    StepPlan,
};
pub use result::{ROW_NOT_FINITE, ROW_OK, ResultColumn, SampledLogprobs, StepResult};

#[cfg(target_endian = "big")]
compile_error!("the step protocol reads little-endian columns in place");
