//! A client's request as one or more engine requests.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use forebay_api::peer::RESUME_HEADER;
use forebay_api::{ApiError, Generation, Limits, MaxTokens};
use forebay_dialect::{Place, Reading};
use forebay_engine::{
    BlockHash, Embeds, EngineRequest, Past, Picture, PromptImage, Request, RequestId, SlotSpec,
    SubmitError,
};
use forebay_text::StopTable;

use crate::budget::Charge;
use crate::config::EgressMode;
use crate::constrain;
use crate::engine::Engine;
use crate::ignored::note;
use crate::images::{ImageFile, Shown};
use crate::peers::{Peer, Resume};
use crate::state::{LiveGuard, Shared};
use crate::stream::delta::{Delta, End};
use crate::stream::egress::Registration;
use crate::stream::mailbox::{Receiver, Sender, Wake, mailbox};
use crate::stream::outlet::{Chunk, Encoder, Outlet};
use crate::stream::speller::Speller;
use crate::stream::tally::Tally;

/// Choices that are submitted before the HTTP thread looks after others.
pub(crate) const CHOICES_A_TURN: usize = 16;

/// The state that prompts with the same parameters share, and all their choices.
pub(crate) struct Terms {
    pub(crate) generation: Generation,
    /// Ascending, each once.
    pub(crate) stop_ids: Arc<[i32]>,
    /// The stop strings.
    pub(crate) stops: Arc<StopTable>,
    /// How answers are read; `None`: they are text.
    pub(crate) reading: Option<Reading>,
    /// Where the prompt leaves a model that reasons; `None`: its tokens tell.
    pub(crate) thinks: Option<Place>,
}

impl Terms {
    /// With the end-of-sequence ids that the model of `limits` can make.
    pub(crate) fn new(mut generation: Generation, eos: &[i32], limits: Limits) -> Self {
        let stops = Arc::new(StopTable::new(std::mem::take(&mut generation.stop)));
        let mut stop_ids = generation.stop_ids(eos);
        if first_unknown(&stop_ids, limits.vocab_size).is_some() {
            let known = |id: &i32| first_unknown(&[*id], limits.vocab_size).is_none();
            stop_ids = stop_ids.iter().copied().filter(known).collect();
        }
        Self { generation, stop_ids, stops, reading: None, thinks: None }
    }
}

/// One prompt with its parameters.
pub(crate) struct Submission {
    pub(crate) prompt: Arc<[i32]>,
    /// In place of the prompt's tokens.
    pub(crate) embeds: Option<Embeds>,
    /// Where its images stand, and their files.
    pub(crate) images: Arc<[PromptImage]>,
    pub(crate) files: Vec<Arc<ImageFile>>,
    pub(crate) terms: Arc<Terms>,
    /// Tokens to generate.
    pub(crate) max_tokens: u32,
}

impl Submission {
    /// Checks that the prompt, which came in `param`, fits, and that the model knows its tokens,
    /// whoever made them. A client that asks for more tokens than there is room for gets those, and
    /// is told.
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
        let images = Arc::default();
        Ok(Self { prompt: prompt.into(), embeds: None, images, files: vec![], terms, max_tokens })
    }

    fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }
}

/// Engine requests of one client request, all choices of all prompts. Dropping it aborts those that
/// have not ended: this is how a client that has gone away frees what it held, whether it waited
/// for a stream or for a whole response.
pub(crate) struct Call {
    engine: Arc<dyn Engine>,
    /// By choice; `None` once it has ended.
    alive: Vec<Option<RequestId>>,
    receiver: Receiver,
    span: tracing::Span,
    /// The part of a stream that the client has already, from another brain.
    before: Option<Delta>,
    _live: LiveGuard,
    _charge: Charge,
}

impl Call {
    /// Submits every choice of every prompt, or none; `peer` is who sent it. Of many choices it
    /// submits some at a time, and others get the thread in between; dropping the future aborts
    /// those it has submitted.
    ///
    /// # Errors
    /// There is no room for them, or the engine refuses one of them.
    pub(crate) async fn start(
        state: &Shared,
        submissions: Vec<Submission>,
        streamed: bool,
        arrived: Instant,
        peer: &Peer,
    ) -> Result<Self, ApiError> {
        let charge = state.budget.choices(&submissions)?;
        let resume = peer.resume();
        if let Some(resume) = resume {
            check_resume(resume, &submissions, streamed, state)?;
        }
        for submission in &submissions {
            check_priority(submission.terms.generation.priority, state)?;
        }
        // Names of blocks with images are not told to routers.
        let first = submissions.first().filter(|submission| submission.images.is_empty());
        if let Some(submission) = first {
            let salt = peer.salt(state, submission.terms.generation.cache_salt.as_deref());
            peer.name_blocks(state, salt, &submission.prompt);
        }
        let prompts = submissions.iter();
        let mut tally =
            Tally::new(prompts.map(|prompt| (prompt.prompt_tokens(), prompt.terms.generation.n)));
        if submissions
            .iter()
            .any(|prompt| prompt.terms.reading.as_ref().is_some_and(Reading::reasons))
        {
            tally.show_reasoning();
        }
        if state.config.hide_cached_tokens {
            tally.hide_cached();
        }
        let prompt_tokens = tally.prompt_tokens();
        let wake = match (streamed, state.config.egress) {
            (false, _) => Wake::AtEnd,
            (true, EgressMode::Naive) => Wake::EveryDelta,
            (true, EgressMode::Direct | EgressMode::Tasks) => Wake::Pending,
        };
        let spell = |terms: &Terms| Speller::new(state.text.tokenizer(), terms, &state.model.marks);
        let mut resumed = None;
        if let (Some(resume), Some(submission)) = (resume, submissions.first()) {
            let mut speller = spell(&submission.terms);
            let before = before(&mut speller, resume, &submission.terms.generation);
            tally.add(0, &before);
            resumed = Some((speller, before));
        }
        let (mut speller, before) = resumed.unzip();
        let said = resume.map_or(&[][..], |resume| &resume.generated);
        let mut restricted = Vec::with_capacity(submissions.len());
        for submission in &submissions {
            restricted.push(constrain::constraints(state, submission, said).await?);
        }
        let (senders, receiver) = mailbox(tally, wake, state.config.max_unread_bytes);
        let span = tracing::info_span!(
            "request",
            id = tracing::field::Empty,
            model = state.model.served_names.first(),
            prompt_tokens,
            completion_tokens = tracing::field::Empty,
            finish = tracing::field::Empty,
        );
        let mut call = Self {
            engine: Arc::clone(&state.engine),
            alive: Vec::with_capacity(senders.len()),
            receiver,
            span,
            before,
            _live: state.enter(peer),
            _charge: charge,
        };
        let mut senders = senders.into_iter();
        for (submission, constraints) in submissions.into_iter().zip(restricted) {
            let mut constraints = constraints.into_iter().flatten();
            let prompt_tokens = submission.prompt_tokens();
            let salt = peer.salt(state, submission.terms.generation.cache_salt.as_deref());
            let names = shared_names(state, salt, &submission);
            let Submission { prompt, embeds, images, files, terms, max_tokens } = submission;
            let show = |file: &Arc<ImageFile>| -> Arc<dyn Picture> {
                Arc::new(Shown::new(Arc::clone(file), &state.intake))
            };
            let pictures: Vec<Arc<dyn Picture>> = files.iter().map(show).collect();
            let generation = &terms.generation;
            let seed = generation.seed.or(peer.tag().map(|tag| tag.seed));
            let seed = seed.unwrap_or_else(rand::random);
            state.metrics.submitted(generation.n);
            let interval = streamed
                .then(|| generation.stream_interval.unwrap_or(state.config.stream_interval));
            for (choice, sender) in (0..generation.n).zip(&mut senders) {
                if !call.alive.is_empty() && call.alive.len().is_multiple_of(CHOICES_A_TURN) {
                    tokio::task::yield_now().await;
                }
                // A prompt is told of once, by the first of its choices, and not again by whoever
                // goes on with a stream.
                let told = generation.prompt_logprobs.filter(|_| choice == 0 && said.is_empty());
                let told = told.filter(|tail| (tail.first as usize) < prompt.len());
                if max_tokens == 0 && told.is_none() {
                    call.alive.push(None);
                    nothing(sender);
                    continue;
                }
                let id = state.next_id();
                state.egress.register(Registration {
                    id,
                    sender,
                    engine: Arc::clone(&state.engine),
                    speller: speller.take().unwrap_or_else(|| spell(&terms)),
                    eos: Arc::clone(&state.model.eos),
                    prompt_tokens,
                    arrived,
                    interval,
                })?;
                let request = Request {
                    id: id.0,
                    prompt: Arc::clone(&prompt),
                    images: Arc::clone(&images),
                    generated: resume.map_or_else(Vec::new, |resume| resume.generated.clone()),
                    names: Arc::clone(&names),
                    max_tokens,
                    spec: SlotSpec {
                        sampling: generation.params(seed, choice),
                        stop_ids: Arc::clone(&terms.stop_ids),
                        pooling: None,
                        embeds: embeds.as_ref().map(|embeds| embeds.offset),
                    },
                    priority: generation.priority,
                    cache_salt: salt,
                    client: peer.client(),
                    probe: peer.is_probe(),
                    masked: false,
                    prompt_logprobs: told,
                    arrived_us: state.engine.now_us().saturating_sub(elapsed_us(arrived)),
                    held: false,
                    past: Past::default(),
                };
                let submitted = EngineRequest {
                    request,
                    constraint: constraints.next(),
                    pictures: pictures.clone(),
                    payloads: embeds.iter().map(|embeds| Arc::clone(&embeds.payload)).collect(),
                    preference: generation.preference.clone(),
                };
                if let Err(error) = state.engine.submit(submitted) {
                    state.egress.forget(id);
                    return Err(submit_error(error));
                }
                call.alive.push(Some(id));
            }
        }
        Ok(call)
    }

    /// Tokens so far.
    pub(crate) fn tally(&self) -> Tally {
        self.receiver.tally()
    }

    /// The part of a stream that the client has already, from another brain.
    pub(crate) fn take_before(&mut self) -> Option<Delta> {
        self.before.take()
    }

    /// Has what comes from now on written through `outlet`.
    pub(crate) fn lend(&self, outlet: Outlet) {
        self.receiver.lend(outlet);
    }

    /// Calls `write` with the encoder that was lent.
    pub(crate) fn encode<R>(&self, write: impl FnOnce(&mut dyn Encoder, &Tally) -> R) -> Option<R> {
        self.receiver.encode(write)
    }

    /// The response's name, for the trace.
    pub(crate) fn named(self, id: &str) -> Self {
        self.span.record("id", id);
        self
    }

    /// Takes what is new of each choice into `out`; `Ready(false)` once every choice has ended and
    /// been taken.
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
            if delta.end.is_some() {
                self.alive[*choice as usize] = None;
                self.span.record("finish", delta.finish_reason().unwrap_or("error"));
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
        self.span.record("completion_tokens", self.receiver.tally().generated_tokens());
    }
}

/// Ends a choice of which no tokens are wanted: nobody has to compute anything.
fn nothing(mut sender: Sender) {
    let mut delta = Delta { end: Some(End::Length), ..Delta::default() };
    sender.send(&mut delta, &mut Chunk::default());
}

/// Names of the prompt's blocks, where several choices would each have them computed.
fn shared_names(state: &Shared, salt: u64, submission: &Submission) -> Arc<[BlockHash]> {
    let named_later = submission.embeds.is_some() || !submission.images.is_empty();
    if submission.terms.generation.n == 1 || named_later {
        return Arc::default();
    }
    state.engine.block_names(salt, &submission.prompt).into()
}

/// Refuses a prompt, which came in `param`, with a token that the model does not have. Clients' ids
/// were checked before: this is for texts, whose tokenizer may know more tokens than the model.
pub(crate) fn check_tokens(ids: &[i32], limits: Limits, param: &str) -> Result<(), ApiError> {
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

/// Only a stream with one choice is gone on with, and only if there is anything left of it.
fn check_resume(
    resume: &Resume,
    submissions: &[Submission],
    streamed: bool,
    state: &Shared,
) -> Result<(), ApiError> {
    let error = |reason: &str| {
        Err(ApiError::invalid(RESUME_HEADER, format!("`{RESUME_HEADER}`: {reason}")))
    };
    let [submission] = submissions else { return error("the request has more than one prompt") };
    if !streamed || submission.terms.generation.n != 1 {
        return error("the request has no stream, or more than one choice");
    }
    let ids = &resume.generated;
    if !ids.is_empty() && ids.len() >= submission.max_tokens as usize {
        return error("the request has all its tokens");
    }
    let vocabulary = 0..i32::try_from(state.limits()?.vocab_size).unwrap_or(i32::MAX);
    let ends = |id: &i32| submission.terms.stop_ids.binary_search(id).is_ok();
    if ids.iter().any(|id| !vocabulary.contains(id) || ends(id)) {
        return error("a token is not in the vocabulary, or ends the request");
    }
    Ok(())
}

/// Has `speller` read what the client has; gives that as one delta.
fn before(speller: &mut Speller, resume: &Resume, generation: &Generation) -> Delta {
    let mut before = Delta { tokens: resume.generated.clone(), ..Delta::default() };
    let mut fresh = String::new();
    for &id in &resume.generated {
        speller.push(id, false, &mut fresh, &mut before.parts);
        before.reasoning_tokens += u32::from(speller.reasons());
        if generation.sampling.logprobs.is_some() {
            // Only the token's text is of use: the number has been sent.
            before.logprobs.push(&[(id, 0.0)]);
        }
    }
    before
}

/// Refuses a priority that clients may not ask for.
pub(crate) fn check_priority(priority: i32, state: &Shared) -> Result<(), ApiError> {
    let most = state.config.max_client_priority;
    if priority.unsigned_abs() <= most {
        return Ok(());
    }
    let reason = format!(
        "`priority` must be from -{most} to {most}: the server was started with --max-client-priority {most}"
    );
    Err(ApiError::invalid("priority", reason))
}

/// The error for a client whose request was not taken.
pub(crate) fn submit_error(error: SubmitError) -> ApiError {
    let reason = error.to_string();
    match error {
        SubmitError::QueueFull { retry_after, .. } => ApiError::QueueFull { reason, retry_after },
        SubmitError::TooLarge { param, .. } => ApiError::invalid(param, reason),
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Unavailable(_) => ApiError::Unavailable { reason, code: "unavailable" },
    }
}

/// Microseconds since a moment.
fn elapsed_us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
