//! A client's pooling request as one engine request per input.

use std::sync::Arc;
use std::time::Instant;

use forebay_api::{ApiError, Limits, PoolingUsage};
use forebay_egress::{Engine, PooledAnswer, PooledRegistration, check_tokens};
use forebay_engine::{EngineRequest, Pooling, Preference, Request, RequestId, SlotSpec};
use forebay_http::Charge;
use tokio::sync::oneshot;

use super::inputs::Input;
use super::model::PooledModel;
use crate::alive::LiveGuard;
use crate::call::{CHOICES_A_TURN, check_priority, submit_error};
use crate::cost;
use crate::peers::Peer;
use crate::state::Shared;

/// The engine requests of one client request. Dropping the call aborts the unfinished engine
/// requests. So the slots and pages of a client that disconnects are freed.
pub(crate) struct PooledCall {
    engine: Arc<dyn Engine>,
    /// The inputs that have not finished.
    alive: Vec<RequestId>,
    answer: oneshot::Receiver<PooledAnswer>,
    usage: PoolingUsage,
    span: tracing::Span,
    live: LiveGuard,
    charge: Arc<Charge>,
}

/// Parameters of a call that all its inputs share.
pub(crate) struct Place<'a> {
    /// The request parameter that contains the inputs.
    pub(crate) param: &'a str,
    /// A larger value is scheduled sooner, under the priority policy.
    pub(crate) priority: i32,
    /// Separates the call's cached blocks from those of requests with other salts.
    pub(crate) cache_salt: Option<Arc<str>>,
    /// The requested replica.
    pub(crate) preference: Preference,
}

impl PooledCall {
    /// Submits all inputs, or none after an error. There has to be at least one input. Many inputs
    /// are submitted in portions, between which other tasks run. Dropping the future aborts the
    /// submitted inputs.
    ///
    /// # Errors
    /// An input is too long or has an unknown token, the memory budget is exhausted, or the engine
    /// rejects an input.
    pub(crate) async fn start(
        state: &Shared,
        model: &PooledModel,
        inputs: Vec<Input>,
        limits: Limits,
        Place { param, priority, cache_salt, preference }: Place<'_>,
        arrived: Instant,
        peer: &Peer,
    ) -> Result<Self, ApiError> {
        check_lengths(&inputs, limits.context_length, param)?;
        check_priority(priority, state)?;
        for input in &inputs {
            check_tokens(&input.tokens, limits, param)?;
        }
        let all = inputs.iter().map(|input| input.tokens.len()).sum();
        let cost = cost::inputs(inputs.len(), all, model.size);
        let charge = state.budget.charge(peer.client(), cost)?;
        let ids: Vec<RequestId> = inputs.iter().map(|_| state.next_id()).collect();
        let tokens = |input: &Input| u32::try_from(input.tokens.len()).unwrap_or(u32::MAX);
        let prompt_tokens: Vec<u32> = inputs.iter().map(tokens).collect();
        let usage = PoolingUsage::new(prompt_tokens.iter().sum());
        let span = tracing::info_span!(
            "request",
            id = tracing::field::Empty,
            model = state.model.served_names.first(),
            prompt_tokens = usage.prompt_tokens,
            inputs = ids.len(),
            finish = tracing::field::Empty,
        );
        let (reply, answer) = oneshot::channel();
        let ids_of_call = ids.clone();
        let expected = PooledRegistration { ids: ids_of_call, prompt_tokens, arrived, reply };
        model.outputs.expect(expected)?;
        let mut call = Self {
            engine: Arc::clone(&state.engine),
            alive: Vec::with_capacity(ids.len()),
            answer,
            usage,
            span,
            live: state.enter(peer),
            charge: Arc::new(charge),
        };
        let salt = peer.salt(state, cache_salt.as_deref());
        for (input, &id) in inputs.into_iter().zip(&ids) {
            if !call.alive.is_empty() && call.alive.len().is_multiple_of(CHOICES_A_TURN) {
                tokio::task::yield_now().await;
            }
            let pooling = Some(Pooling { segment: input.segment });
            let request = Request {
                id: id.0,
                prompt: input.tokens.into(),
                spec: SlotSpec { pooling, ..SlotSpec::default() },
                priority,
                cache_salt: salt,
                client: peer.client().0,
                background: peer.is_background(),
                probe: peer.is_probe(),
                ..Request::default()
            };
            let preference = preference.clone();
            let submitted = EngineRequest { request, preference, ..EngineRequest::default() };
            if let Err(error) = state.engine.submit(submitted) {
                model.outputs.forget(ids.clone());
                return Err(submit_error(error));
            }
            call.live.submitted(id);
            call.alive.push(id);
        }
        Ok(call)
    }

    /// Records the response's id in the trace.
    pub(crate) fn named(self, id: &str) -> Self {
        self.span.record("id", id);
        self
    }

    /// Returns the charge for the inputs and the response.
    pub(crate) fn charge(&self) -> Arc<Charge> {
        Arc::clone(&self.charge)
    }

    /// Returns the token counts of all inputs.
    pub(crate) fn usage(&self) -> PoolingUsage {
        self.usage
    }

    /// Waits for the raw vectors of all inputs, in order.
    ///
    /// # Errors
    /// The error of the first input that failed; the other inputs are aborted.
    pub(crate) async fn collect(&mut self) -> PooledAnswer {
        let gone =
            || ApiError::Unavailable { reason: "the engine has ended".into(), code: "failed" };
        let answer = (&mut self.answer).await.unwrap_or_else(|_| Err(gone()));
        if answer.is_ok() {
            self.alive.clear();
        }
        self.span.record("finish", if answer.is_ok() { "stop" } else { "error" });
        answer
    }
}

impl Drop for PooledCall {
    fn drop(&mut self) {
        for &id in &self.alive {
            self.engine.abort(id);
        }
        if !self.alive.is_empty() {
            self.span.record("finish", "disconnect");
        }
    }
}

/// Rejects inputs of `param` that are longer than `limit` tokens.
pub(crate) fn check_lengths(inputs: &[Input], limit: u32, param: &str) -> Result<(), ApiError> {
    let Some(at) = inputs.iter().position(|input| input.tokens.len() > limit as usize) else {
        return Ok(());
    };
    let param = if inputs.len() == 1 { param.to_owned() } else { format!("{param}[{at}]") };
    Err(ApiError::InputTooLong { param, limit, tokens: inputs[at].tokens.len() })
}
