//! The output path of a request, from the engine's steps to the bytes of a response. This crate
//! depends on the engine and on the types of responses, but not on routes.
//!
//! A server registers a request with [`Egress`], passing the [`mailbox::Sender`] of its mailbox. It
//! then submits the request to the [`Engine`], whose sink is an [`EgressSink`]. An egress thread
//! converts the tokens to text ([`Speller`]) and collects the text in a [`Delta`]. It writes the
//! events of a stream directly to the socket, with the [`EventEncoder`] of the response. All other
//! output waits in the mailbox until the response takes it.
//!
//! The modules, in the order of that path:
//!
//! - `threads`: the threads that receive the engine's outputs. Each request belongs to one of them.
//! - `speller`: converts a choice's tokens to the text that may be sent, under the [`Terms`].
//! - `delta`: the new text, log-probabilities and end of a choice.
//! - `tally`: the token counts of a call, for its usage.
//! - [`mailbox`]: holds a delta until its response takes it.
//! - [`events`]: encodes server-sent events.
//! - `outlet`: the encoder and socket that a streamed response lends to the egress thread.
//!
//! The embeddings of a pooling model take another path ([`PooledSink`]). The threads record
//! [`Metrics`] of the requests.
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
