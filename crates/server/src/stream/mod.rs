//! The way out of a request's output: from the engine's steps to the bytes of a response.
//!
//! In the order of the way:
//!
//! - [`egress`]: the threads that take the engine's outputs. Each request belongs to one of them.
//! - [`speller`]: from one choice's tokens to the text that may be sent.
//! - [`tally`]: the tokens of a call, for its usage.
//! - [`delta`]: the new text, log-probabilities and end of a choice.
//! - [`mailbox`]: the place of a delta before its response takes it.
//! - [`events`]: the bytes of server-sent events.
//! - [`outlet`]: the loan by which the egress thread writes a streamed response's events.
//! - [`wire`]: the connection of a request, for its answer.
//! - [`sse`]: the frames of a response body, from the mailbox's content.

pub(crate) mod delta;
pub(crate) mod egress;
pub(crate) mod events;
pub(crate) mod mailbox;
pub(crate) mod mode;
pub(crate) mod outlet;
pub(crate) mod prompt_logprobs;
pub(crate) mod speller;
pub(crate) mod sse;
pub(crate) mod tally;
pub(crate) mod wire;
