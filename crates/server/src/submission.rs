//! A prompt with its parameters, before it is submitted to the engine.

use std::sync::Arc;

use forebay_api::{ApiError, GenerateRequest, Generation, Limits, MaxTokens, parse_request};
use forebay_egress::{LOGPROB_JSON, Terms, check_tokens};
use forebay_engine::{Embeds, History, PromptImage};
use forebay_http::ClientId;
use serde_json::json;

use crate::cost::Size;
use crate::ignored::note;
use crate::images::ImageFile;
use crate::state::Shared;

/// Up to this many tokens are indexed on the current thread. That takes less than a millisecond.
const INDEXED_AT_ONCE: usize = 1 << 13;

/// Describes how much of a response repeats its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Repetition {
    /// The number of choices that contain this data.
    pub(crate) choices: usize,
    /// Bytes of the prompt itself per choice.
    pub(crate) bytes: usize,
    /// The number of log-probabilities per listed prompt token and choice.
    pub(crate) logprobs: usize,
}

/// One prompt with its parameters.
pub(crate) struct Submission {
    pub(crate) prompt: Arc<[i32]>,
    /// The embeddings that replace the prompt's tokens; `None`: the prompt has tokens.
    pub(crate) embeds: Option<Embeds>,
    /// The positions of the prompt's images.
    pub(crate) images: Arc<[PromptImage]>,
    /// The files of the images, in the same order.
    pub(crate) files: Vec<Arc<ImageFile>>,
    pub(crate) terms: Arc<Terms>,
    /// Tokens of the predicted answer; `None`: no prediction was given.
    pub(crate) prediction: Option<Vec<i32>>,
    /// True if drafts are proposed for the prompt's choices.
    pub(crate) drafts: bool,
    /// The maximum number of tokens to generate.
    pub(crate) max_tokens: u32,
    pub(crate) repetition: Repetition,
}

impl Submission {
    /// Creates a submission. Checks that the prompt, which came in the parameter `param`, fits into
    /// the context, and that its tokens are in the vocabulary. If there is no room for all
    /// requested tokens, fewer are generated, and a header reports the lower number.
    pub(crate) fn new(
        state: &Shared,
        prompt: Vec<i32>,
        terms: Arc<Terms>,
        limits: Limits,
        param: &'static str,
    ) -> Result<Self, ApiError> {
        let max_tokens = terms.generation.room(prompt.len(), limits, param)?;
        if let MaxTokens::Exactly(wanted) = terms.generation.max_tokens
            && wanted > max_tokens
        {
            if state.config.strict_params {
                let (limit, prompt) = (limits.context_length, prompt.len());
                let max_tokens = Some(wanted);
                return Err(ApiError::ContextLength { param, limit, prompt, max_tokens });
            }
            note(format!("max_tokens={max_tokens}"));
        }
        check_tokens(&prompt, limits, param)?;
        let logprobs = told(&terms.generation);
        Ok(Self {
            prompt: prompt.into(),
            embeds: None,
            images: Arc::default(),
            files: Vec::new(),
            terms,
            prediction: None,
            drafts: state.verifies_drafts(),
            max_tokens,
            repetition: Repetition { choices: 1, bytes: 0, logprobs },
        })
    }

    /// Creates the submission of a health check, or of a prompt that a decode server sends to be
    /// prefilled. One token is generated greedily.
    pub(crate) fn of_one_token(
        state: &Shared,
        prompt: Vec<i32>,
        priority: i32,
        limits: Limits,
    ) -> Result<Self, ApiError> {
        const PARAM: &str = "input_ids";
        let request = json!({
            "input_ids": prompt.first().copied().as_slice(),
            "priority": priority,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": true},
        });
        let request =
            parse_request::<GenerateRequest>(request.to_string().as_bytes(), |_| Ok(()))?.request;
        let mut generations = request.validate(&state.model.defaults, limits)?.generations;
        let none = || ApiError::invalid(PARAM, format!("`{PARAM}`: the prompt has no tokens"));
        let generation = generations.pop().ok_or_else(none)?;
        let terms = Arc::new(Terms::new(generation, &state.model.eos, limits));
        Self::new(state, prompt, terms, limits, PARAM)
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }

    /// Returns the number of tokens in which drafts are looked up.
    fn indexed(&self) -> usize {
        self.prompt.len() + self.prediction.as_ref().map_or(0, Vec::len)
    }

    /// Returns an index of the prompt's tokens and of the predicted answer, in which drafts are
    /// looked up; `None`: the request has no drafts.
    pub(crate) async fn history(
        &self,
        state: &Shared,
        client: ClientId,
    ) -> Result<Option<Arc<History>>, ApiError> {
        // Prompts of embeddings have no tokens to look up.
        if !self.drafts || self.embeds.is_some() {
            return Ok(None);
        }
        let (prompt, indexed) = (Arc::clone(&self.prompt), self.indexed());
        let prediction = self.prediction.clone().unwrap_or_default();
        let index = move || Arc::new(History::new(&prediction, &prompt));
        if indexed <= INDEXED_AT_ONCE {
            return Ok(Some(index()));
        }
        let bytes = History::bytes(indexed);
        state.intake.read(client, bytes, move || Ok(index())).await.map(Some)
    }

    /// Returns the number of bytes with which the response repeats the prompt and lists its
    /// log-probabilities.
    pub(crate) fn repeated(&self) -> usize {
        let Repetition { choices, bytes, logprobs } = self.repetition;
        let first = self.terms.generation.prompt_logprobs.map_or(0, |tail| tail.first as usize);
        let tokens = self.prompt.len().saturating_sub(first);
        choices.saturating_mul(bytes + tokens * logprobs * LOGPROB_JSON)
    }

    /// Returns the sizes that determine the request's maximum memory.
    pub(crate) fn size(&self) -> Size {
        let Generation { sampling, n, .. } = &self.terms.generation;
        Size {
            prompt: self.prompt.len(),
            indexed: if self.drafts { self.indexed() } else { 0 },
            max_tokens: self.max_tokens,
            choices: *n as usize,
            candidates: sampling.logprobs.map_or(0, |top| 1 + usize::from(top)),
            allowed: sampling.allowed.as_ref().map_or(0, |ids| ids.len()),
            told: told(&self.terms.generation),
            repeated: self.repeated(),
        }
    }
}

/// Returns the number of log-probabilities per prompt token.
fn told(generation: &Generation) -> usize {
    generation.prompt_logprobs.map_or(0, |tail| 1 + usize::from(tail.most))
}
