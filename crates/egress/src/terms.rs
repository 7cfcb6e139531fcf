//! The state of a request that is the same for every choice of every prompt.

use std::sync::Arc;

use forebay_api::{ApiError, Generation, Limits};
use forebay_dialect::{Place, Reading};
use forebay_text::StopTable;

/// The state shared by all prompts with the same parameters, and by their choices.
pub struct Terms {
    /// The generation parameters. The stop strings were moved to `stops`.
    pub generation: Generation,
    /// Ids of tokens that end the output, ascending, without duplicates.
    pub stop_ids: Arc<[i32]>,
    /// The stop strings.
    pub stops: Arc<StopTable>,
    /// The settings of the output parser; `None` if the output is plain text.
    pub reading: Option<Reading>,
    /// The part of the answer in which generation starts; `None` if the prompt's tokens determine
    /// it.
    pub thinks: Option<Place>,
}

impl Terms {
    /// Creates the terms. End-of-sequence ids outside the model's vocabulary are left out.
    pub fn new(mut generation: Generation, eos: &[i32], limits: Limits) -> Self {
        let stops = Arc::new(StopTable::new(std::mem::take(&mut generation.stop)));
        let mut stop_ids = generation.stop_ids(eos);
        if first_unknown(&stop_ids, limits.vocab_size).is_some() {
            let known = |id: &i32| first_unknown(&[*id], limits.vocab_size).is_none();
            stop_ids = stop_ids.iter().copied().filter(known).collect();
        }
        Self { generation, stop_ids, stops, reading: None, thinks: None }
    }
}

/// Checks that the model has all tokens of the prompt in `param`. Token ids from clients were
/// checked before. This check is for prompts given as text, because the tokenizer may have more
/// tokens than the model.
///
/// # Errors
/// The model does not have one of the tokens.
pub fn check_tokens(ids: &[i32], limits: Limits, param: &str) -> Result<(), ApiError> {
    let Some(id) = first_unknown(ids, limits.vocab_size) else { return Ok(()) };
    let reason = format!(
        "`{param}`: the text has token {id}, and the model has only those below {}",
        limits.vocab_size
    );
    Err(ApiError::invalid(param, reason))
}

fn first_unknown(ids: &[i32], vocab_size: u32) -> Option<i32> {
    ids.iter().copied().find(|&id| !u32::try_from(id).is_ok_and(|id| id < vocab_size))
}
