//! The step protocol between the brain and its hands: encodes frames, plans and results. It does no
//! I/O.
//!
//! `docs/protocol.md` is the specification. `python/forebay/protocol` implements the same protocol;
//! both implementations are tested with the files in `tests/wire/`.
//!
//! ```
//! use forebay_protocol::{Frame, FrameError, HEADER_BYTES, Header, Row, StepPlan, Want};
//!
//! let mut plan = StepPlan::default();
//! plan.begin(1);
//! plan.push_row(Row { slot: 3, start: 0, length: 5, want: Want::Tokens(1) });
//! let mut bytes = Vec::new();
//! plan.encode(&mut bytes)?;
//!
//! // The other side reads a header, and then as many words as it says.
//! let (head, body) = bytes.split_at(HEADER_BYTES);
//! let header = Header::decode(head.try_into().expect("a header"))?;
//! let word = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
//! let frame = Frame::new(header, body.chunks_exact(4).map(word).collect())?;
//! assert_eq!(StepPlan::decode(&frame)?, plan);
//! # Ok::<(), FrameError>(())
//! ```

mod adapter;
mod columns;
mod copy;
mod dtype;
mod frame;
mod handshake;
mod masks;
mod plan;
mod result;
mod window;

pub use adapter::{
    AdapterOrder, PLACE_FAILED_DIGEST, PLACE_FAILED_FILES, PLACE_FAILED_MEMORY, PLACE_OK, PlaceEnd,
};
pub use columns::{ColumnSpec, Multiplicity, RecordSpec};
pub use copy::{
    COPY_FAILED, COPY_OK, COPY_WORDS, CopyEnd, CopyTiming, Direction, MAX_WAIT_US, PAGE_NOTE_BYTES,
    PageCopy, STATE_COUNT_BYTES, STATE_NOTE_BYTES, Span,
};
pub use dtype::Dtype;
pub use frame::{
    ENTRY_WORDS, Frame, FrameError, HEADER_BYTES, Header, Kind, MAX_WORDS, VERSION, encode_json,
    encode_place,
};
pub use handshake::{
    DraftModelConfig, Fatal, HandConfig, Hello, Message, PlaceConfig, Progress, Ready, StoreOp,
    StoreReply, StoreRequest,
};
pub use masks::{MaskPlace, ReceivedMasks, RowMask, StepMasks};
pub use plan::{
    FLAG_MASKED, FLAG_POOL, FLAG_SAMPLE, Grid, IMAGE_SPAN_WORDS, ImageSpan, MAX_GROUP, NO_PAGE,
    NewSlot, PAGE_WRITE_WORDS, PlaceWrite, Pooling, PromptLogprobsWant, ROW_WORDS, Row,
    STATE_COPY_WORDS, SamplingParams, SlotSpec, SlotWrite, StateCopy, StepPlan, TowerWork, Want,
    tell_group,
};
pub use result::{
    PromptLogprobs, ROW_NOT_FINITE, ROW_OK, SampledLogprobs, SparseRows, StepResult, StepTiming,
};
pub use window::{least_window_pages, main_page_count, window_page_count};

#[cfg(target_endian = "big")]
compile_error!("the step protocol reads little-endian columns in place");
