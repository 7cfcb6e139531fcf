//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatRequest,
    ChatTokenLogprob, ChatTopLogprob, ErrorBody, ResponseMessage,
};
use forebay_text::Tokenizer;

use super::stop_reason;
use crate::call::{Call, Submission, Terms, finish_reason};
use crate::delta::{Candidate, Delta, Logprobs};
use crate::limits::{self, Upload};
use crate::outlet::Encoder;
use crate::peers::Peer;
use crate::reply::{self, Failure};
use crate::routing::Routing;
use crate::sse::{self, Chunks, Cut};
use crate::state::Shared;
use crate::tally::Tally;
use crate::text::encode_chat;
use crate::wire::Wire;

/// Answers a conversation. With `stream`, chunks come as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The completion, or a stream of its chunks", body = ChatCompletion),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn chat_completions(
    State(state): State<Shared>,
    wire: Wire,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<ChatRequest>(body, &state).await?;
    let model = state.model_name(request.model.as_deref())?;
    let model_limits = state.admit()?;
    let mut chat = request.validate(&state.model.defaults, model_limits)?;
    routing.fill(&mut chat.generation);
    let most = model_limits.context_length as usize;
    let prompt = encode_chat(&state.text, chat.prompt, most, &charge).await?;
    drop(charge);
    let tokenizer = chat.generation.sampling.logprobs.map(|_| state.text.tokenizer().clone());
    let n = chat.generation.n;
    let terms = Terms::new(chat.generation, &state.model.eos, model_limits);
    let submission = Submission::new(prompt, terms, model_limits, "messages")?;

    let name = peer.name("chatcmpl-");
    let (id, streamed) = (&name.id, chat.streaming.is_some());
    let mut call = Call::start(&state, vec![submission], streamed, arrived, &peer).await?.named(id);
    if let Some(streaming) = chat.streaming {
        let egress = state.config.egress;
        let chunks = Chunks::new(&name, "chat.completion.chunk", &model, streaming, egress)
            .map_err(reply::unwritable)?;
        let choices = (0..n).map(|_| ChoiceState::default()).collect();
        let encoder = ChatEncoder { chunks, tokenizer, choices };
        return sse::stream(&state, call, encoder, wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let choices =
        (0..).zip(deltas).map(|(index, delta)| choice(index, delta, tokenizer.as_deref()));
    Ok(reply::ok(&ChatCompletion {
        id: name.id,
        object: "chat.completion",
        created: name.created,
        model,
        choices: choices.collect::<Result<_, _>>()?,
        usage: call.tally().usage(),
    }))
}

fn choice(index: u32, delta: Delta, tokenizer: Option<&Tokenizer>) -> Result<ChatChoice, ApiError> {
    let end = delta.end.ok_or(ApiError::Aborted)?;
    Ok(ChatChoice {
        index,
        message: ResponseMessage { role: "assistant", content: delta.text, refusal: None },
        logprobs: tokenizer.map(|tokenizer| logprobs(tokenizer, &delta.logprobs)),
        finish_reason: finish_reason(&end).unwrap_or_default(),
        stop_reason: stop_reason(&end),
    })
}

fn logprobs(tokenizer: &Tokenizer, tokens: &Logprobs) -> ChatLogprobs {
    let likely = |&(id, logprob): &Candidate| {
        let (token, bytes) = (tokenizer.token_text(id), tokenizer.token_bytes(id));
        ChatTopLogprob { token, logprob, bytes }
    };
    let entry = |(sampled, top): (Candidate, &[Candidate])| {
        let ChatTopLogprob { token, logprob, bytes } = likely(&sampled);
        ChatTokenLogprob { token, logprob, bytes, top_logprobs: top.iter().map(likely).collect() }
    };
    ChatLogprobs { content: tokens.iter().map(entry).collect() }
}

struct ChatEncoder {
    chunks: Chunks,
    /// To write log-probabilities with, where they are asked for.
    tokenizer: Option<Arc<Tokenizer>>,
    choices: Vec<ChoiceState>,
}

#[derive(Default)]
struct ChoiceState {
    /// The role has been sent.
    opened: bool,
    /// The chunk of a text alone, once the role has been sent.
    content: Option<Cut>,
}

impl Encoder for ChatEncoder {
    fn delta(
        &mut self,
        index: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let Self { chunks, tokenizer, choices } = self;
        let state = &mut choices[index as usize];
        let usage = || tally.usage();
        let chunk = |delta| ChatChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
        };
        if !state.opened {
            state.opened = true;
            let role = ChatDelta { role: Some("assistant"), content: Some("") };
            chunks.choice(&chunk(role), usage, out)?;
        }
        if state.content.is_none() && tokenizer.is_none() {
            let content = ChatDelta { role: None, content: Some("") };
            state.content = chunks.cut(&chunk(content), "content")?;
        }
        if !delta.text.is_empty() || !delta.logprobs.is_empty() {
            if let Some(content) = &state.content {
                content.write(&delta.text, out)?;
            } else {
                let content = ChatChunkChoice {
                    logprobs: tokenizer.as_ref().map(|t| logprobs(t, &delta.logprobs)),
                    ..chunk(ChatDelta { role: None, content: Some(&delta.text) })
                };
                chunks.choice(&content, usage, out)?;
            }
        }
        if let Some(end) = &delta.end {
            let last = ChatChunkChoice {
                finish_reason: finish_reason(end),
                stop_reason: stop_reason(end),
                ..chunk(ChatDelta::default())
            };
            chunks.choice(&last, usage, out)?;
        }
        Ok(())
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.chunks.usage(tally.usage(), out)
    }

    fn resumable(&self) -> bool {
        self.choices.len() == 1
    }

    fn resume(&mut self, before: &Delta) {
        for choice in &mut self.choices {
            // The role went ahead of the first token.
            choice.opened = !before.tokens.is_empty();
        }
    }
}
