//! A client's request as one or more engine requests.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use forebay_api::peer::RESUME_HEADER;
use forebay_api::{ApiError, Generation};
use forebay_dialect::Reading;
use forebay_egress::{
    Delta, EgressMode, End, Engine, EventEncoder, Outlet, Registration, Speller, Tally, Terms,
    mailbox::{MailboxBounds, Receiver, Sender, WakeRule, mailbox},
};
use forebay_engine::{
    BlockHash, EngineRequest, History, Loan, Lookup, Past, Picture, Proposer, Request, RequestId,
    SharedText, SlotSpec, SubmitError,
};
use forebay_grammar::Constraints;
use forebay_http::Charge;

use crate::alive::LiveGuard;
use crate::answer::AnswerWriter;
use crate::constrain;
use crate::cost;
use crate::ignored::ignore;
use crate::images::{ImageFile, Shown};
use crate::pd::decode::{DecodeSide, PrefillPrompt};
use crate::pd::side::Pd;
use crate::peers::{Peer, Resume};
use crate::state::Shared;
use crate::submission::Submission;

/// The number of choices submitted before the task yields to other tasks of the HTTP thread.
pub(crate) const CHOICES_A_TURN: usize = 16;

/// The engine requests of one client request: all choices of all prompts. Dropping the call aborts
/// the unfinished engine requests. So the slots and pages of a client that disconnects are freed,
/// whether it streams or not.
pub(crate) struct Call {
    engine: Arc<dyn Engine>,
    /// The engine request of each choice; `None` once it has finished.
    alive: Vec<Option<RequestId>>,
    receiver: Receiver,
    span: tracing::Span,
    /// The part of a resumed stream that another brain has already sent to the client.
    before: Option<Delta>,
    live: LiveGuard,
    /// The charge for the choices and the response.
    charge: Arc<Charge>,
    /// The maximum size of a non-streamed response in bytes.
    limit: usize,
}

/// Data of the client's request, needed to submit each of its choices.
#[derive(Clone, Copy)]
struct Origin<'a> {
    state: &'a Shared,
    peer: &'a Peer,
    streamed: bool,
    arrived: Instant,
    /// The generated tokens that another brain has already sent to the client.
    said: &'a [i32],
    /// True if the call has one prompt.
    alone: bool,
}

impl Call {
    /// Submits every choice of every prompt, or none. `peer` is the sender of the request. Many
    /// choices are submitted in portions, between which other tasks run. Dropping the future aborts
    /// the submitted choices.
    ///
    /// # Errors
    /// The memory budget is exhausted, a parameter is not valid, or the engine rejects a choice.
    pub(crate) async fn start(
        state: &Shared,
        submissions: Vec<Submission>,
        streamed: bool,
        arrived: Instant,
        peer: &Peer,
    ) -> Result<Self, ApiError> {
        let unread = state.config.max_unread_bytes;
        let repeated = submissions.iter().map(Submission::repeated).fold(0, usize::saturating_add);
        if repeated > unread {
            return Err(ApiError::AnswerTooLarge { limit: unread });
        }
        let sizes = submissions.iter().map(Submission::size);
        let charge = Arc::new(state.budget.charge(peer.client(), cost::choices(sizes))?);
        let resume = peer.resume();
        if let Some(resume) = resume {
            check_resume(resume, &submissions, streamed, state)?;
        }
        for submission in &submissions {
            check_priority(submission.terms.generation.priority, state)?;
        }
        // Names of blocks with images are not reported to routers.
        let first = submissions.first().filter(|submission| submission.images.is_empty());
        if let Some(submission) = first {
            let salt = peer.salt(state, submission.terms.generation.cache_salt.as_deref());
            peer.name_blocks(state, salt, &submission.prompt);
        }
        let mut tally = tally(&submissions, state);
        let prompt_tokens = tally.prompt_tokens();
        let wake = match (streamed, state.config.egress) {
            (false, _) => WakeRule::AtEnd,
            (true, EgressMode::Naive) => WakeRule::EveryDelta,
            (true, EgressMode::Direct | EgressMode::Tasks) => WakeRule::Pending,
        };
        let mut resumed = None;
        if let (Some(resume), Some(submission)) = (resume, submissions.first()) {
            let mut speller = spell(state, &submission.terms);
            let before = before(&mut speller, resume, &submission.terms.generation);
            tally.add(0, &before);
            resumed = Some((speller, before));
        }
        let (mut speller, before) = resumed.unzip();
        let said = resume.map_or(&[][..], |resume| &resume.generated);
        let mut restricted = Vec::with_capacity(submissions.len());
        for submission in &submissions {
            let constraints =
                constrain::constraints(state, submission, said, peer.client().0).await?;
            if let Some(constraints) = &constraints {
                charge.add(constraints.bytes)?;
                for keyword in constraints.left_out.iter() {
                    ignore(state, keyword)?;
                }
            }
            restricted.push(constraints);
        }
        let bounds = MailboxBounds { limit: unread, repeated, charge: Arc::clone(&charge) };
        let (senders, receiver) = mailbox(tally, wake, bounds);
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
            live: state.enter(peer),
            charge,
            limit: unread,
        };
        let mut senders = senders.into_iter();
        let alone = submissions.len() == 1;
        let from = Origin { state, peer, streamed, arrived, said, alone };
        for (submission, constraints) in submissions.into_iter().zip(restricted) {
            call.submit(submission, constraints, &mut senders, &mut speller, from).await?;
        }
        Ok(call)
    }

    /// Submits the choices of a prompt, each with the next of `senders`. For a resumed stream,
    /// `speller` has read the part that the client already has. The first choice takes the speller.
    async fn submit(
        &mut self,
        submission: Submission,
        constraints: Option<Constraints>,
        senders: &mut std::vec::IntoIter<Sender>,
        speller: &mut Option<Speller>,
        from: Origin<'_>,
    ) -> Result<(), ApiError> {
        let Origin { state, peer, streamed, arrived, said, .. } = from;
        let mut constraints = constraints.into_iter().flat_map(|constraints| constraints.choices);
        let prompt_tokens = submission.prompt_tokens();
        let salt = peer.salt(state, submission.terms.generation.cache_salt.as_deref());
        let (names, loan) = match &state.pd {
            Some(Pd::Decode(side)) => fetch(side, from, salt, &submission).await,
            Some(Pd::Prefill(_)) | None => (shared_names(state, salt, &submission), None),
        };
        let history = submission.history(state, peer.client()).await?;
        let Submission { prompt, embeds, images, files, terms, max_tokens, .. } = submission;
        let show = |file: &Arc<ImageFile>| -> Arc<dyn Picture> {
            Arc::new(Shown::new(Arc::clone(file), &state.intake))
        };
        let pictures: Vec<Arc<dyn Picture>> = files.iter().map(show).collect();
        let shown: Arc<[String]> = files.iter().map(|file| file.param().to_owned()).collect();
        let generation = &terms.generation;
        let seed = generation.seed.or(peer.tag().map(|tag| tag.seed));
        let seed = seed.unwrap_or_else(rand::random);
        state.metrics.submitted(generation.n);
        if let Some(adapter) = &peer.adapter {
            adapter.load.submitted(generation.n);
        }
        let interval =
            streamed.then(|| generation.stream_interval.unwrap_or(state.config.stream_interval));
        for (choice, sender) in (0..generation.n).zip(&mut *senders) {
            if !self.alive.is_empty() && self.alive.len().is_multiple_of(CHOICES_A_TURN) {
                tokio::task::yield_now().await;
            }
            // Only the first choice of a prompt reports the prompt's log-probabilities, and a
            // resumed stream does not repeat them.
            let told = generation.prompt_logprobs.filter(|_| choice == 0 && said.is_empty());
            let told = told.filter(|tail| (tail.first as usize) < prompt.len());
            if max_tokens == 0 && told.is_none() {
                self.alive.push(None);
                // The choice needs no computation.
                sender.finish(End::Length);
                continue;
            }
            let id = state.next_id();
            state.egress.register(Registration {
                id,
                sender,
                engine: Arc::clone(&state.engine),
                speller: speller.take().unwrap_or_else(|| spell(state, &terms)),
                eos: Arc::clone(&state.model.eos),
                prompt_tokens,
                arrived,
                interval,
                images: Arc::clone(&shown),
                adapter: peer.adapter.as_ref().map(|adapter| Arc::clone(&adapter.load)),
            })?;
            let request = Request {
                id: id.0,
                prompt: Arc::clone(&prompt),
                images: Arc::clone(&images),
                generated: said.to_vec(),
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
                client: peer.client().0,
                background: peer.is_background(),
                probe: peer.is_probe(),
                masked: false,
                proposer: history.as_ref().map(|history| {
                    let answers = state.answers.as_ref();
                    lookup(history, said, answers.map(|answers| answers.text(salt)))
                }),
                prompt_logprobs: told,
                adapter: peer.adapter.as_ref().map(|adapter| adapter.id),
                arrived_us: state.engine.now_us().saturating_sub(elapsed_us(arrived)),
                held: false,
                leaves: false,
                loan: loan.clone(),
                past: Past { handed: loan.is_some(), ..Past::default() },
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
            self.live.submitted(id);
            self.alive.push(Some(id));
        }
        Ok(())
    }

    /// Creates a writer for the non-streamed response.
    pub(crate) fn writer(&self) -> AnswerWriter {
        AnswerWriter::new(self.limit, &self.charge)
    }

    /// Returns the token counts so far.
    pub(crate) fn tally(&self) -> Tally {
        self.receiver.tally()
    }

    /// Takes the part of the stream that another brain has already sent.
    pub(crate) fn take_before(&mut self) -> Option<Delta> {
        self.before.take()
    }

    /// Sends later output through `outlet`.
    pub(crate) fn lend(&self, outlet: Outlet) {
        self.receiver.lend(outlet);
    }

    /// Calls `write` with the encoder of the lent outlet, and returns its result; `None` if no
    /// outlet was lent.
    pub(crate) fn encode<R>(
        &self,
        write: impl FnOnce(&mut dyn EventEncoder, &Tally) -> R,
    ) -> Option<R> {
        self.receiver.encode(write)
    }

    /// Records the response's id in the trace.
    pub(crate) fn named(self, id: &str) -> Self {
        self.span.record("id", id);
        self
    }

    /// Moves the new deltas of each choice into `out`. `Ready(false)`: every choice has finished,
    /// and its last delta was read.
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
    /// The error of the first choice that failed; the other choices are aborted.
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

fn spell(state: &Shared, terms: &Terms) -> Speller {
    Speller::new(state.text.tokenizer(), terms, &state.model.marks)
}

/// Creates a tally of zero tokens for these prompts and their choices.
fn tally(submissions: &[Submission], state: &Shared) -> Tally {
    let prompts = submissions.iter();
    let mut tally =
        Tally::new(prompts.map(|prompt| (prompt.prompt_tokens(), prompt.terms.generation.n)));
    if submissions.iter().any(|prompt| prompt.terms.reading.as_ref().is_some_and(Reading::reasons))
    {
        tally.show_reasoning();
    }
    if submissions.iter().any(|prompt| prompt.drafts && prompt.prediction.is_some()) {
        tally.show_predicted();
    }
    if state.config.hide_cached_tokens {
        tally.hide_cached();
    }
    tally
}

/// Creates a proposer of draft tokens for a choice that continues `said`. `text` is the choice's
/// text in the shared history; `None`: the proposer does not search that history.
fn lookup(history: &Arc<History>, said: &[i32], text: Option<SharedText>) -> Box<dyn Proposer> {
    let mut lookup = Lookup::new(Arc::clone(history));
    if let Some(text) = text {
        lookup = lookup.sharing(text);
    }
    said.iter().for_each(|&token| lookup.push(token));
    Box::new(lookup)
}

/// Returns the names of a prompt's blocks, and a loan of the blocks that a prefill server computed.
async fn fetch(
    side: &DecodeSide,
    Origin { state, peer, said, alone, .. }: Origin<'_>,
    salt: u64,
    submission: &Submission,
) -> (Arc<[BlockHash]>, Option<Arc<Loan>>) {
    let generation = &submission.terms.generation;
    let of_tokens = submission.embeds.is_none() && submission.images.is_empty();
    let handed = of_tokens && peer.adapter.is_none() && generation.prompt_logprobs.is_none();
    if peer.is_probe() || !handed || !alone || submission.max_tokens == 0 {
        peer.fetched(side.stays());
        return (shared_names(state, salt, submission), None);
    }
    let tokens = [&submission.prompt[..], said].concat();
    let names: Arc<[BlockHash]> = state.engine.block_names(salt, &tokens).into();
    let prompt = PrefillPrompt {
        tokens: &tokens,
        names: &names,
        namer: state.config.sharing.namer.id(),
        salt,
        client: peer.client().0,
        priority: generation.priority,
        background: peer.is_background(),
        server: peer.prefill(),
        key: state.config.router_key.as_deref(),
    };
    let (loan, outcome) = side.fetch(&*state.engine, &prompt).await;
    peer.fetched(outcome);
    (names, loan)
}

/// Returns the names of the prompt's blocks if several choices share the prompt; otherwise none.
fn shared_names(state: &Shared, salt: u64, submission: &Submission) -> Arc<[BlockHash]> {
    let named_later = submission.embeds.is_some() || !submission.images.is_empty();
    if submission.terms.generation.n == 1 || named_later {
        return Arc::default();
    }
    state.engine.block_names(salt, &submission.prompt).into()
}

/// Checks that a stream can be resumed: it has one choice, and something is left to generate.
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

/// Feeds `speller` the tokens that the client already has. Returns their text as one delta.
fn before(speller: &mut Speller, resume: &Resume, generation: &Generation) -> Delta {
    let mut before = Delta { tokens: resume.generated.clone(), ..Delta::default() };
    let mut fresh = String::new();
    for &id in &resume.generated {
        speller.push(id, false, &mut fresh, &mut before.parts);
        before.reasoning_tokens += u32::from(speller.reasons());
        if generation.sampling.logprobs.is_some() {
            // Only the token's text matters: its log-probability was sent already.
            before.logprobs.push(&[(id, 0.0)]);
        }
    }
    before
}

/// Rejects a priority outside the range for clients.
pub(crate) fn check_priority(priority: i32, state: &Shared) -> Result<(), ApiError> {
    let most = state.config.max_client_priority.unwrap_or(u32::MAX);
    if priority.unsigned_abs() <= most {
        return Ok(());
    }
    let reason = format!(
        "`priority` must be from -{most} to {most}: the server was started with --max-client-priority {most}"
    );
    Err(ApiError::invalid("priority", reason))
}

/// Converts the engine's rejection of a request to the client's error.
pub(crate) fn submit_error(error: SubmitError) -> ApiError {
    let reason = error.to_string();
    match error {
        SubmitError::QueueFull { retry_after, .. } => ApiError::QueueFull { reason, retry_after },
        SubmitError::TooLarge { param, .. } => ApiError::invalid(param, reason),
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Unavailable(_) => ApiError::Unavailable { reason, code: "unavailable" },
    }
}

/// Returns the microseconds since `since`.
fn elapsed_us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
