//! The routes of llama.cpp's server: `POST /completion`, `POST /apply-template`, `GET /slots`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, ErrorBody, LlamaCompletion, LlamaEnd, LlamaProbability, LlamaRequest, LlamaSlot,
    LlamaTimings, TokenizeInput, TokenizeRequest, ValidLlama,
};
use forebay_egress::{Candidate, Delta, End, EventEncoder, Logprobs, Tally, Terms, events};
use forebay_text::Tokenizer;
use serde::Serialize;
use utoipa::ToSchema;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use super::wording::matched_stop;
use crate::answer::AnswerWriter;
use crate::call::Call;
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::reply::{self, Failure};
use crate::sse;
use crate::state::Shared;
use crate::submission::Submission;
use crate::text::{RequestText, encode_chat, encode_prompts};
use crate::wire::Wire;

impl Admissible for LlamaRequest {
    type Valid = ValidLlama;

    fn model(&self) -> Option<&str> {
        None
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidLlama, ApiError> {
        let mut valid = self.validate(&door.state.model.defaults, door.limits)?;
        door.routing.fill(&mut valid.generation);
        Ok(valid)
    }
}

/// Continues a prompt, in the API of llama.cpp's server.
#[utoipa::path(
    post,
    path = "/completion",
    request_body = LlamaRequest,
    responses(
        (status = 200, description = "The completion, a list of them, or a stream", body = LlamaCompletion),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn completion(
    wire: Wire,
    AdmittedRequest { admission, valid }: AdmittedRequest<LlamaRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let writer = Writer {
        arrived,
        model,
        tokenizer: valid.generation.sampling.logprobs.map(|_| state.text.tokenizer().clone()),
        tokens: valid.return_tokens || valid.stream,
    };
    let terms = Arc::new(Terms::new(valid.generation, &state.model.eos, limits));
    let most = Some(limits.context_length as usize);
    let salt = terms.generation.cache_salt.as_deref();
    let text = RequestText::new(&state, &peer, salt, &charge);
    let encoded = encode_prompts(text, valid.prompts, true, most, "prompt").await?;
    drop(charge);
    let submissions = encoded
        .into_iter()
        .map(|ids| Submission::new(&state, ids, Arc::clone(&terms), limits, "prompt"));
    let submissions = submissions.collect::<Result<Vec<_>, _>>()?;
    let name = peer.name("cmpl-");
    let call = Call::start(&state, submissions, valid.stream, arrived, &peer).await?;
    let mut call = call.named(&name.id);
    if valid.stream {
        return sse::stream(&state, call, LlamaEncoder { writer }, wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let tally = call.tally();
    let all = (0..).zip(&deltas).map(|(index, delta)| writer.completion(index, delta, &tally));
    match &deltas[..] {
        [one] if !valid.batch => call.writer().value(&writer.completion(0, one, &tally)),
        _ => call.writer().list(all),
    }
}

/// Builds the objects of responses.
struct Writer {
    arrived: Instant,
    model: String,
    /// The tokenizer for log-probabilities, if requested.
    tokenizer: Option<Arc<Tokenizer>>,
    /// True if token ids are included.
    tokens: bool,
}

impl Writer {
    fn completion(&self, index: u32, delta: &Delta, tally: &Tally) -> LlamaCompletion {
        LlamaCompletion {
            index,
            content: delta.parts.as_content().unwrap_or_default().to_owned(),
            tokens: if self.tokens { delta.tokens.clone() } else { Vec::new() },
            stop: delta.end.is_some(),
            end: delta.end.as_ref().map(|end| self.end(index, end, tally)),
            completion_probabilities: self
                .tokenizer
                .as_deref()
                .map(|tokenizer| probabilities(tokenizer, &delta.logprobs)),
        }
    }

    fn end(&self, index: u32, end: &End, tally: &Tally) -> LlamaEnd {
        let usage = tally.usage_of(index);
        let cached = usage.prompt_tokens_details.map_or(0, |details| details.cached_tokens);
        let seconds = self.arrived.elapsed().as_secs_f64();
        let mut said = LlamaEnd {
            model: self.model.clone(),
            tokens_evaluated: usage.prompt_tokens,
            tokens_predicted: usage.completion_tokens,
            tokens_cached: cached,
            timings: LlamaTimings {
                prompt_n: usage.prompt_tokens.saturating_sub(cached),
                cache_n: cached,
                predicted_n: usage.completion_tokens,
                predicted_ms: seconds * 1e3,
                predicted_per_second: f64::from(usage.completion_tokens) / seconds,
            },
            ..LlamaEnd::default()
        };
        said.stopped(matched_stop(end), matches!(end, End::Eos(_)));
        said
    }
}

fn probabilities(tokenizer: &Tokenizer, tokens: &Logprobs) -> Vec<LlamaProbability> {
    let one = |&(id, logprob): &Candidate| LlamaProbability {
        id,
        token: tokenizer.token_text(id),
        bytes: tokenizer.token_bytes(id),
        logprob,
        top_logprobs: Vec::new(),
    };
    let entry = |(sampled, top): (Candidate, &[Candidate])| LlamaProbability {
        top_logprobs: top.iter().map(one).collect(),
        ..one(&sampled)
    };
    tokens.iter().map(entry).collect()
}

struct LlamaEncoder {
    writer: Writer,
}

impl EventEncoder for LlamaEncoder {
    fn delta(
        &mut self,
        choice: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if delta.parts.is_empty() && delta.tokens.is_empty() && delta.end.is_none() {
            return Ok(());
        }
        events::event(&self.writer.completion(choice, delta, tally), out)
    }

    fn end(&mut self, _: &Tally, _: &mut Vec<u8>) -> serde_json::Result<()> {
        Ok(())
    }

    fn is_said_done(&self) -> bool {
        false
    }

    fn resumable(&self) -> bool {
        // A token whose text is held back is sent together with the next token. Another brain could
        // not reproduce how the tokens were grouped.
        false
    }

    fn resume(&mut self, _: &Delta) {}
}

/// A conversation as the chat template renders it.
#[derive(Serialize, ToSchema)]
pub(crate) struct AppliedTemplate {
    /// The rendered prompt.
    prompt: String,
}

/// Renders a conversation and responds with the text.
#[utoipa::path(
    post,
    path = "/apply-template",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The prompt", body = AppliedTemplate),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn apply_template(
    State(state): State<Shared>,
    peer: Peer,
    body: Upload,
) -> Result<Response, Failure> {
    let (request, charge) = limits::read::<TokenizeRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let most = super::tokenize::most_tokens(&state)?;
    let TokenizeInput::Chat(chat) = request.validate()? else {
        return Err(ApiError::invalid("messages", "`messages`: required and missing").into());
    };
    let text = RequestText::new(&state, &peer, None, &charge);
    let chat = encode_chat(text, *chat, most, "messages").await?;
    AnswerWriter::new(state.config.max_unread_bytes, &charge)
        .value(&AppliedTemplate { prompt: chat.text })
}

/// Lists the slots of the device tables, and which of them are in use.
#[utoipa::path(
    get,
    path = "/slots",
    responses((status = 200, description = "The rows", body = Vec<LlamaSlot>)),
)]
pub(crate) async fn slots(State(state): State<Shared>) -> Result<Response, Failure> {
    let n_ctx = state.limits()?.context_length;
    let mut all = Vec::new();
    for replica in state.engine.replicas() {
        let running = u32::try_from(replica.stats.scheduler.running).unwrap_or(u32::MAX);
        let rows = state.info["slots"].as_u64().unwrap_or_default();
        let rows = u32::try_from(rows).unwrap_or(u32::MAX).max(running);
        let first = u32::try_from(all.len()).unwrap_or(u32::MAX);
        // Only the scheduler has the real slot numbers. So the first slots are shown as in use, one
        // per running request.
        all.extend((0..rows).map(|row| LlamaSlot {
            id: first + row,
            n_ctx,
            is_processing: row < running,
            speculative: state.verifies_drafts(),
        }));
    }
    Ok(reply::ok(&all))
}
