//! Batch files: lines of requests, lines of answers, and the batches that a server stores.
//!
//! `forebay run-batch` uses [`BatchInput`], which reads requests, and [`BatchOutput`], which writes
//! answers and can be continued by a later run. [`BatchStore`] stores files and batches on disk for
//! a server's routes, and [`run_batches`] computes them. Lines and objects have OpenAI's formats.

mod folder;
mod input;
mod line;
mod lines;
mod names;
mod objects;
mod output;
mod run;
mod store;

pub use input::{BatchInput, InputCounts};
pub use line::{BatchLine, BatchRequest, LineFault};
pub use names::{BatchNames, LineIdentity, SeenBefore};
pub use objects::{BatchError, BatchErrors, BatchObject, BatchStatus, FileObject, RequestCounts};
pub use output::{AnsweredLines, BatchAnswer, BatchOutput};
pub use run::{BatchModel, BatchOutcome, run_batches};
pub use store::{BatchConfig, BatchStore, NewBatch, Owner, StoreError, Upload};

/// The largest size of an answer in bytes.
pub const ANSWER: usize = 512 << 20;
/// The largest size in bytes of an output line without its answer: ids, and the text of errors.
const ENVELOPE: usize = 128 << 20;
