//! Drafts: tokens that a request is expected to generate, and how many of them are worth their time
//! in a step. Pure: no clock, no I/O.
//!
//! A hand computes the positions of a request's drafts together with its last token, and samples a
//! token at each position as usual. A draft is accepted if it equals the sampled token, so drafts
//! change no token. They save steps where they are right, and cost time where they are not.
//!
//! - [`Lookup`] finds drafts: the tokens that followed the last occurrence of the last few tokens.
//! - [`SharedHistory`] has the texts of other requests, in which lookups may find drafts too.
//! - [`DraftBudget`] decides how many drafts a step has, by measured times of steps and measured
//!   acceptance.
//!
//! ```
//! use std::sync::Arc;
//! use forebay_draft::{History, Lookup, Proposer};
//!
//! let prompt = [5, 1, 2, 3, 4, 9, 1, 2];
//! let lookup = Lookup::new(Arc::new(History::new(&[], &prompt)));
//! let mut drafts = Vec::new();
//! let found = lookup.propose(3, &mut drafts).expect("1, 2 stands there twice");
//! assert_eq!((found.length, drafts), (2, vec![3, 4, 9]));
//! ```

mod acceptance;
mod budget;
mod costs;
mod lookup;
mod ngram;
mod shared;

pub use acceptance::Acceptance;
pub use budget::{DecodeStep, DraftBudget, DraftOffer};
pub use costs::StepCosts;
pub use lookup::{DraftMatch, DraftSource, History, Lookup, Proposer};
pub use shared::{SharedHistory, SharedText};
