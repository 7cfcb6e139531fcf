//! The path of a request's output, from the engine's steps to the bytes of a response. This crate
//! depends on engines and answers, but not on routes.
//!
//! A server announces a request to [`Egress`] with the [`mailbox::Sender`] of its mailbox, and
//! submits it to the [`Engine`], whose sink is an [`EgressSink`]. An egress thread turns the tokens
//! into text ([`Speller`]) and collects it in a [`Delta`]. It writes the events of a stream to the
//! socket itself, with the response's [`EventEncoder`]. Everything else waits in the mailbox, from
//! which the response takes it.
//!
//! In the order of that path:
//!
//! - `threads`: the threads that take the engine's outputs. Each request belongs to one of them.
//! - `speller`: from one choice's tokens to the text that may be sent, under the [`Terms`].
//! - `delta`: the new text, log-probabilities and end of a choice.
//! - `tally`: the tokens of a call, for its usage.
//! - [`mailbox`]: where a delta waits until its response takes it.
//! - [`events`]: the bytes of server-sent events.
//! - `outlet`: what the egress thread borrows from a streamed response to write its events.
//!
//! The outputs of a pooling model are vectors, and take another path ([`PooledSink`]). The threads
//! observe requests for [`Metrics`].
//!
//! ```
//! use forebay_egress::events;
//!
//! let mut bytes = Vec::new();
//! events::event(&serde_json::json!({"text": "hi"}), &mut bytes)?;
//! bytes.extend_from_slice(events::DONE);
//! assert_eq!(bytes, b"data: {\"text\":\"hi\"}\n\ndata: [DONE]\n\n");
//! # Ok::<(), serde_json::Error>(())
//! ```

mod delta;
mod engine;
pub mod events;
pub mod mailbox;
mod metrics;
mod mode;
mod outlet;
mod pooled;
pub mod prompt_logprobs;
mod speller;
mod tally;
mod terms;
mod threads;

pub use delta::{Candidate, Delta, End, LOGPROB_JSON, Logprobs};
pub use engine::Engine;
pub use metrics::{
    AdapterCounts, AdapterLoad, FetchCounts, IntakeStats, Metrics, PartStats, PdCounts, SentCounts,
};
pub use mode::EgressMode;
pub use outlet::{EventEncoder, Outlet};
pub use pooled::{Pooled, PooledAnswer, PooledRegistration, PooledSink, pooled};
pub use speller::{EarlyEnd, Speller};
pub use tally::Tally;
pub use terms::{Terms, check_tokens};
pub use threads::{Egress, EgressConfig, EgressSink, Registration, egress};
