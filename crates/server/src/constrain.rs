//! Builds a constraint for each choice from a request's parameters.

use std::sync::Arc;

use forebay_api::{ApiError, Generation};
use forebay_dialect::Place;
use forebay_egress::Terms;
use forebay_grammar::{Bounds, Constraints, GrammarError, Reasoning, Start, WantedForm};
use forebay_text::Tokenizer;

use crate::state::Shared;
use crate::submission::Submission;

/// Builds the constraints of a submission's choices. The answer already begins with the generated
/// tokens `said`.
/// If a grammar has to be compiled, the compilation is queued as a job of `client`. `None`: nothing
/// restricts the choices.
pub(crate) async fn constraints(
    state: &Shared,
    submission: &Submission,
    said: &[i32],
    client: u64,
) -> Result<Option<Constraints>, ApiError> {
    let Submission { terms, prompt, .. } = submission;
    let generation = &terms.generation;
    let Generation { structure, bad_words, thinking_budget, .. } = generation;
    if structure.is_none() && bad_words.is_empty() && thinking_budget.is_none() {
        return Ok(None);
    }
    let param = match structure {
        Some(structure) => structure.param.as_str(),
        None if bad_words.is_empty() => "thinking_budget",
        None => "bad_words",
    };
    let Some(grammars) = &state.model.grammars else {
        return Err(refused(param, GrammarError::Off));
    };
    let wanted = WantedForm {
        source: structure.as_ref().map(|structure| structure.source.clone()),
        reasoning: reasoning(state, terms, prompt)?,
        bounds: Bounds {
            ends: ends(terms, &state.model.eos),
            min_tokens: generation.sampling.min_tokens,
            allowed: generation.sampling.allowed.clone(),
            bad_words: spelled(state.text.tokenizer(), bad_words)?,
        },
        choices: generation.n as usize,
        said: said.to_vec(),
        client,
    };
    grammars.constraints(wanted).await.map(Some).map_err(|error| refused(param, error))
}

/// Returns the reasoning that the constraint must allow before the answer. `None`: the model is not
/// known to reason, or its reasoning needs no constraint.
fn reasoning(state: &Shared, terms: &Terms, prompt: &[i32]) -> Result<Option<Reasoning>, ApiError> {
    let generation = &terms.generation;
    let budget = generation.thinking_budget;
    let Some(markers) = &state.model.markers else {
        if budget.is_some() {
            let reason = "`thinking_budget`: no reasoning markers are known for this model. If it reasons, start the server with --reasoning-parser";
            return Err(ApiError::invalid("thinking_budget", reason));
        }
        return Ok(None);
    };
    let start = match terms.thinks {
        // A chat's messages may contain marks as text. So the start is not searched in the prompt's
        // tokens, but follows from the end of the rendered prompt.
        Some(Place::Reasoning) => Start::Inside,
        Some(Place::Answer) => Start::Answer,
        Some(Place::Either) => Start::Open,
        None => markers.start(prompt),
    };
    let matters = match generation.structure {
        Some(_) => start != Start::Answer,
        // Even after `Start::Answer` the model may reason again, so a budget always matters.
        None => budget.is_some(),
    };
    Ok(matters.then(|| Reasoning { markers: markers.clone(), start, budget }))
}

/// Returns the token ids that are allowed where an answer is complete.
fn ends(terms: &Terms, eos: &[i32]) -> Arc<[i32]> {
    let mut ends = [&terms.stop_ids, eos].concat();
    ends.sort_unstable();
    ends.dedup();
    ends.into()
}

/// Returns the tokens of each word, once without and once with a leading space.
fn spelled(tokenizer: &Tokenizer, words: &[String]) -> Result<Arc<[Box<[i32]>]>, ApiError> {
    let mut spelled: Vec<Box<[i32]>> = Vec::with_capacity(2 * words.len());
    for (at, word) in words.iter().enumerate() {
        let word = word.trim_start();
        for text in [word.to_owned(), format!(" {word}")] {
            let tokens = tokenizer.encode_as_text(&text).map_err(|error| {
                let param = format!("bad_words[{at}]");
                ApiError::invalid(param.clone(), format!("`{param}`: {error}"))
            })?;
            if !tokens.is_empty() {
                spelled.push(tokens.into());
            }
        }
    }
    spelled.sort_unstable();
    spelled.dedup();
    Ok(spelled.into())
}

/// Converts a grammar error to the client's error for the parameter `param`.
fn refused(param: &str, error: GrammarError) -> ApiError {
    match error {
        GrammarError::Invalid { path, reason } => {
            // An error about a tool call has the whole path of its parameter, since it may concern
            // any tool. Other paths are relative to `param`.
            let whole = !path.is_empty() && !path.starts_with(['.', '[']);
            let param = if whole { path } else { format!("{param}{path}") };
            ApiError::invalid(param.clone(), format!("`{param}`: {reason}"))
        }
        GrammarError::Busy | GrammarError::Overdue { .. } => {
            ApiError::Overloaded { reason: error.to_string() }
        }
        GrammarError::Late { retry_after, .. } => {
            ApiError::QueueTimeout { reason: error.to_string(), retry_after }
        }
        GrammarError::Stuck { .. } => stuck(&error),
        GrammarError::Internal(reason) => ApiError::Internal { reason, code: Some("grammar") },
        GrammarError::Off | GrammarError::Tokenizer(_) => {
            ApiError::invalid(param, format!("`{param}`: {error}"))
        }
    }
}

/// Creates the error for a client while the server can't compile new grammars.
pub(crate) fn stuck(error: &GrammarError) -> ApiError {
    ApiError::Unavailable { reason: error.to_string(), code: "grammar_stuck" }
}
