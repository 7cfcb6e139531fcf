//! Requests, and the tokens that each generates when it runs alone.

use forebay_protocol::{Pooling, PromptLogprobs, SlotSpec};
use forebay_scheduler::{
    DecodeGap, Finish, Namer, Policy, PromptTail, Request, STEP_WORDS, SchedulerConfig,
};

use crate::device::{append, next_token, of_prompt, read_prompt};

/// A small configuration.
pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        slots: 6,
        max_running: 4,
        pages: 16,
        page_size: 4,
        token_budget: 16,
        prefix_cache: true,
        namer: Namer::open(),
        block_events: true,
        policy: Policy::Fcfs,
        fair: false,
        step_shares: false,
        background_share: 100,
        decode_gap: DecodeGap::Off,
        step_words: STEP_WORDS,
        vector_size: 2,
        tokens_a_row: 1,
        drafts: None,
        host: None,
        sparse: None,
        tower: None,
        states: None,
        windows: None,
        places: 0,
    }
}

/// A plain request.
pub(crate) fn request(id: u64, prompt: Vec<i32>, max_tokens: u32) -> Request {
    Request { id, prompt: prompt.into(), max_tokens, ..Request::default() }
}

/// A pooled request, which returns a vector. The second text of a pair begins at `segment`.
pub(crate) fn pooled(id: u64, prompt: Vec<i32>, segment: u32) -> Request {
    let spec = SlotSpec { pooling: Some(Pooling { segment }), ..SlotSpec::default() };
    Request { spec, ..request(id, prompt, 0) }
}

/// The tokens and the end of a request that runs alone. The tokens follow those that it was
/// submitted with.
pub(crate) fn alone(request: &Request) -> (Vec<i32>, Finish) {
    let mut tokens = read_prompt(&request.prompt, request.spec.embeds, &request.images);
    tokens.extend_from_slice(&request.generated);
    let mut given = Vec::new();
    if request.max_tokens == 0 && request.spec.pooling.is_none() {
        // The last token is not computed, since no token after it is needed.
        tokens.pop();
    }
    if request.max_tokens == 0 {
        let finite = next_token(request.adapter, &tokens).is_some();
        return (given, if finite { Finish::Length } else { Finish::NotFinite });
    }
    loop {
        let Some(token) = next_token(request.adapter, &tokens) else {
            return (given, Finish::NotFinite);
        };
        tokens.push(token);
        given.push(token);
        if request.spec.stop_ids.contains(&token) {
            return (given, Finish::Stop { token });
        }
        if request.generated.len() + given.len() == request.max_tokens as usize {
            return (given, Finish::Length);
        }
    }
}

/// A request for log-probabilities of its prompt's tokens from `first` on.
pub(crate) fn telling(id: u64, prompt: Vec<i32>, first: u32, max_tokens: u32) -> Request {
    let prompt_logprobs = Some(PromptTail { first, most: 2 });
    Request { prompt_logprobs, ..request(id, prompt, max_tokens) }
}

/// The log-probabilities of a request's prompt when it runs alone.
pub(super) fn told_alone(request: &Request) -> PromptLogprobs {
    let mut told = PromptLogprobs::default();
    if let Some(PromptTail { first, most }) = request.prompt_logprobs {
        for at in first as usize..request.prompt.len() {
            let given = of_prompt(request.adapter, &request.prompt[..=at], most.into());
            given.into_iter().for_each(|one| append(&mut told, one));
        }
    }
    told
}
