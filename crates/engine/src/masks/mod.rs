//! Computes masks: jobs, the threads that run them, and the inboxes for their results.
//!
//! A job accepts a request's new tokens and fills its next mask. All jobs wait in one queue, where
//! clients take turns ([`turns`]). The engine's thread runs cheap ones, for as long as a step may
//! wait for masks. Mask threads run all jobs. A job that has begun always finishes, but no step
//! waits for it beyond that time.

mod deferred;
mod job;
mod threads;
mod turns;

pub(crate) use deferred::deferred;
pub(crate) use job::{Job, Made, RowMasks, guarded, is_cheap};
pub(crate) use threads::{Inbox, MaskThreads};
