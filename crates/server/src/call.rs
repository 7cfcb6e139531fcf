//! A client's request as one or more engine requests.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use forebay_api::{ApiError, Generation, Limits};
use forebay_engine::{EngineRequest, RequestId, SubmitError};

use crate::egress::Registration;
use crate::engine::Engine;
use crate::mailbox::{Delta, End, Receiver, Wake, mailbox};
use crate::state::{LiveGuard, Shared};

/// One prompt with its parameters.
pub(crate) struct Submission {
    pub(crate) prompt: Vec<i32>,
    pub(crate) generation: Generation,
    /// Tokens to generate.
    pub(crate) max_tokens: u32,
}

impl Submission {
    /// Checks that the prompt, which came in `param`, fits.
    pub(crate) fn new(
        prompt: Vec<i32>,
        generation: Generation,
        limits: Limits,
        param: &'static str,
    ) -> Result<Self, ApiError> {
        let max_tokens = generation.room(prompt.len(), limits, param)?;
        Ok(Self { prompt, generation, max_tokens })
    }

    fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }
}

/// Engine requests of one client request, all choices of all prompts. Dropping it aborts those that have not ended: this is how a
/// client that has gone away frees what it held, whether it waited for a stream or for a whole response.
pub(crate) struct Call {
    engine: Arc<dyn Engine>,
    /// By choice; `None` once it has ended.
    alive: Vec<Option<RequestId>>,
    receiver: Receiver,
    tally: Tally,
    span: tracing::Span,
    _live: LiveGuard,
}

/// Tokens of a call so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    /// Prompt tokens of each prompt.
    prompts: Vec<u32>,
    /// Prompt tokens of each prompt found in the prefix cache.
    cached: Vec<u32>,
    /// Generated tokens by choice.
    generated: Vec<u32>,
    /// Prompt that a choice answers.
    prompt_of: Vec<usize>,
}

impl Tally {
    /// Of the whole call: each prompt is counted once.
    pub(crate) fn usage(&self) -> forebay_api::Usage {
        forebay_api::Usage::new(
            self.prompts.iter().sum(),
            self.generated.iter().sum(),
            self.cached.iter().sum(),
        )
    }

    /// Of one choice.
    pub(crate) fn usage_of(&self, choice: u32) -> forebay_api::Usage {
        let prompt = self.prompt_of[choice as usize];
        let generated = self.generated[choice as usize];
        forebay_api::Usage::new(self.prompts[prompt], generated, self.cached[prompt])
    }

    fn add(&mut self, choice: u32, delta: &Delta) {
        let prompt = self.prompt_of[choice as usize];
        self.generated[choice as usize] += u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX);
        if let Some(cached) = delta.cached_tokens {
            // The choices of a prompt share its pages; what one of them found is what the client is told.
            self.cached[prompt] = self.cached[prompt].max(cached);
        }
    }
}

impl Call {
    /// Submits every choice of every prompt, or none.
    ///
    /// # Errors
    /// The engine refuses one of them.
    pub(crate) fn start(
        state: &Shared,
        submissions: Vec<Submission>,
        wake: Wake,
        arrived: Instant,
    ) -> Result<Self, ApiError> {
        let counts = || submissions.iter().map(|submission| submission.generation.n);
        let prompt_of = counts().enumerate().flat_map(|(index, n)| (0..n).map(move |_| index));
        let tally = Tally {
            prompts: submissions.iter().map(Submission::prompt_tokens).collect(),
            cached: vec![0; submissions.len()],
            generated: vec![0; counts().sum::<u32>() as usize],
            prompt_of: prompt_of.collect(),
        };
        let (senders, receiver) = mailbox(counts().sum(), wake);
        let span = tracing::info_span!(
            "request",
            id = tracing::field::Empty,
            model = state.model.served_names.first(),
            prompt_tokens = tally.prompts.iter().sum::<u32>(),
            completion_tokens = tracing::field::Empty,
            finish = tracing::field::Empty,
        );
        let mut call = Self {
            engine: Arc::clone(&state.engine),
            alive: Vec::with_capacity(senders.len()),
            receiver,
            tally,
            span,
            _live: state.enter(),
        };
        let mut senders = senders.into_iter();
        for submission in submissions {
            let prompt_tokens = submission.prompt_tokens();
            let Submission { prompt, generation, max_tokens } = submission;
            let seed = generation.seed.unwrap_or_else(rand::random);
            state.metrics.submitted(generation.n);
            let stop_ids = generation.stop_ids(&state.model.eos);
            for (choice, sender) in (0..generation.n).zip(&mut senders) {
                let id = state.next_id();
                state.egress.register(Registration {
                    id,
                    sender,
                    engine: Arc::clone(&state.engine),
                    stop: generation.stop.clone(),
                    include_stop: generation.include_stop,
                    skip_special_tokens: generation.skip_special_tokens,
                    min_tokens: generation.sampling.min_tokens,
                    eos: Arc::clone(&state.model.eos),
                    prompt_tokens,
                    arrived,
                })?;
                let request = EngineRequest {
                    id,
                    prompt: prompt.clone(),
                    max_tokens,
                    pooling: None,
                    stop_ids: stop_ids.clone(),
                    sampling: generation.params(seed, choice),
                    priority: generation.priority,
                };
                if let Err(error) = state.engine.submit(request) {
                    state.egress.forget(id);
                    return Err(submit_error(error));
                }
                call.alive.push(Some(id));
            }
        }
        Ok(call)
    }

    /// Tokens so far.
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The response's name, for the trace.
    pub(crate) fn named(self, id: &str) -> Self {
        self.span.record("id", id);
        self
    }

    /// Takes what is new of each choice into `out`; `Ready(false)` once every choice has ended and been taken.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
        out: &mut Vec<(u32, Delta)>,
    ) -> Poll<bool> {
        let from = out.len();
        if self.receiver.poll(context, out).is_pending() {
            return Poll::Pending;
        }
        for (choice, delta) in &out[from..] {
            self.tally.add(*choice, delta);
            if let Some(end) = &delta.end {
                self.alive[*choice as usize] = None;
                self.span.record("finish", finish_name(end));
            }
        }
        Poll::Ready(out.len() > from)
    }

    /// Waits for the whole output of each choice.
    ///
    /// # Errors
    /// That of the first choice that was not served to its end; the others are aborted.
    pub(crate) async fn collect(&mut self) -> Result<Vec<Delta>, ApiError> {
        let mut out = Vec::with_capacity(self.alive.len());
        poll_fn(|context| self.poll(context, &mut out)).await;
        out.sort_by_key(|&(choice, _)| choice);
        let error = out.iter_mut().find_map(|(_, delta)| match delta.end.take() {
            Some(End::Error(error)) => Some(error),
            end => {
                delta.end = end;
                None
            }
        });
        match error {
            Some(error) => Err(error),
            None => Ok(out.into_iter().map(|(_, delta)| delta).collect()),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        for id in self.alive.iter().flatten() {
            self.engine.abort(*id);
            self.span.record("finish", "disconnect");
        }
        self.span.record("completion_tokens", self.tally.generated.iter().sum::<u32>());
    }
}

/// OpenAI's word for an end; `None` for an error.
pub(crate) fn finish_reason(end: &End) -> Option<&'static str> {
    match end {
        End::Eos(_) | End::Token(_) | End::Text(_) => Some("stop"),
        End::Length => Some("length"),
        End::Error(_) => None,
    }
}

fn finish_name(end: &End) -> &'static str {
    finish_reason(end).unwrap_or("error")
}

/// What a client is told whose request was not taken.
pub(crate) fn submit_error(error: SubmitError) -> ApiError {
    let reason = error.to_string();
    match error {
        SubmitError::QueueFull { .. } => ApiError::Overloaded { reason },
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Unavailable(_) => ApiError::Unavailable { reason, code: "unavailable" },
    }
}
