//! The parameters of a request, which are the same for every choice of every prompt.

use std::sync::Arc;

use forebay_api::{ApiError, Generation, Limits};
use forebay_dialect::{Place, Reading};
use forebay_text::StopTable;

/// The state shared by all prompts with the same parameters, and by their choices.
pub struct Terms {
    /// The parameters of the request. Their stop strings are in `stops`.
    pub generation: Generation,
    /// Ids of tokens that end an answer, ascending, each once.
    pub stop_ids: Arc<[i32]>,
    /// The stop strings.
    pub stops: Arc<StopTable>,
    /// The settings of the answer parser; `None`: answers are plain text.
    pub reading: Option<Reading>,
    /// Whether the prompt leaves a reasoning model in its reasoning; `None`: the tokens show it.
    pub thinks: Option<Place>,
}

impl Terms {
    /// Terms with those end-of-sequence ids that the model of `limits` can generate.
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

/// Refuses a prompt, which came in `param`, with a token that the model does not have. Clients' ids
/// were checked before; this check is for texts, whose tokenizer may have more tokens than the
/// model.
///
/// # Errors
/// The model does not have a token.
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
