//! The work of constraints: jobs, the threads that do them, and the way of their results back.
//!
//! A job accepts a request's new tokens and fills its next mask. Jobs lie in one queue, in turns by
//! client ([`turns`]). The engine's thread takes cheap ones, for as long as a step may wait. Mask
//! threads take any. A job that has begun always ends, and nobody waits for it beyond that time.

mod deferred;
mod job;
mod threads;
mod turns;

pub(crate) use deferred::deferred;
pub(crate) use job::{Job, Made, RowMasks, guarded, is_cheap};
pub(crate) use threads::{Inbox, MaskThreads};
