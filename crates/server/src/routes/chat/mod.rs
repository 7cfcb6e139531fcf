//! `POST /v1/chat/completions`.

mod answer;
mod calls;
mod prepare;

use axum::response::Response;
use forebay_api::{ApiError, ChatCompletion, ChatRequest, ErrorBody, ValidChat};
use forebay_egress::events::Chunks;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use crate::call::Call;
use crate::reply::{self, Failure};
use crate::sse;
use crate::wire::Wire;
pub(crate) use answer::CallIds;
use answer::{ChatEncoder, Tokens, choice};
pub(crate) use prepare::{prepare, render};

impl Admissible for ChatRequest {
    type Valid = ValidChat;

    fn model(&self) -> Option<&str> {
        self.model()
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidChat, ApiError> {
        let mut chat = self.validate(&door.state.model.defaults, door.limits)?;
        door.routing.fill(&mut chat.generation);
        Ok(chat)
    }
}

/// Answers a conversation. With `stream`, sends chunks as server-sent events.
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
    wire: Wire,
    AdmittedRequest { admission, valid: chat }: AdmittedRequest<ChatRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let tokenizer = chat.generation.sampling.logprobs.map(|_| state.text.tokenizer().clone());
    let of_prompt = chat.generation.prompt_logprobs;
    let tokens = Tokens { tokenizer, output: chat.tokens };
    let streaming = chat.streaming;
    let n = chat.generation.n;
    let prepared = prepare(&state, chat, limits, (&peer, &charge), "messages").await?;
    drop(charge);
    let prompt_token_ids = tokens.output.ids.then(|| prepared.prompt.to_vec());

    let name = peer.name("chatcmpl-");
    let (id, streamed) = (&name.id, streaming.is_some());
    let mut call = Call::start(&state, vec![prepared], streamed, arrived, &peer).await?.named(id);
    let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
    if let Some(streaming) = streaming {
        let egress = state.config.egress;
        let chunks = Chunks::new(&name, "chat.completion.chunk", &model, streaming, egress)
            .map_err(reply::unwritable)?
            .with_prompt(prompt_token_ids);
        let encoder = ChatEncoder::new(chunks, tokens, ids, n);
        return sse::stream(&state, call, encoder, wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let told = deltas.first().zip(of_prompt);
    if deltas.iter().any(|delta| delta.end.is_none()) {
        return Err(ApiError::Aborted.into());
    }
    let completion = ChatCompletion {
        id: name.id,
        object: "chat.completion",
        created: name.created,
        model,
        choices: Vec::new(),
        usage: call.tally().usage(),
        prompt_token_ids,
        prompt_logprobs: told
            .map(|(first, tail)| first.prompt.listed(tail.most, state.text.tokenizer())),
    };
    let choices = (0..).zip(&deltas).map(|(index, delta)| choice(index, delta, &tokens, &ids));
    call.writer().filled(&completion, "choices", choices)
}
