//! `POST /tokenize` and `POST /detokenize`.

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    DetokenizeRequest, DetokenizeResponse, ErrorBody, Prompt, TokenizeInput, TokenizeRequest,
    TokenizeResponse,
};

use crate::limits::{self, Upload};
use crate::reply::{self, Failure};
use crate::state::Shared;
use crate::text::{encode_chat, encode_prompts, text_error};

/// Turns text or a conversation into token ids.
#[utoipa::path(
    post,
    path = "/tokenize",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The token ids", body = TokenizeResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn tokenize(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let (request, charge) = limits::read::<TokenizeRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let max_model_len = state.limits()?.context_length;
    let with_strings = request.return_token_strs.unwrap_or(false);
    let tokens = match request.validate()? {
        TokenizeInput::Text { text, add_special_tokens } => {
            let prompts = vec![Prompt::Text(text)];
            let encoded =
                encode_prompts(&state.text, prompts, add_special_tokens, "prompt", &charge);
            encoded.await?.pop().unwrap_or_default()
        }
        TokenizeInput::Chat(chat) => encode_chat(&state.text, chat, &charge).await?,
    };
    let tokenizer = state.text.tokenizer();
    let token_strs = with_strings
        .then(|| tokens.iter().map(|&id| tokenizer.id_to_token(id).unwrap_or_default()).collect());
    Ok(reply::ok(&TokenizeResponse { count: tokens.len(), max_model_len, tokens, token_strs }))
}

/// Turns token ids into text.
#[utoipa::path(
    post,
    path = "/detokenize",
    request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = DetokenizeResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn detokenize(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let (request, _charge) = limits::read::<DetokenizeRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let tokens = request.validate(state.limits()?.vocab_size)?;
    let decoded = state.text.decode(tokens).await;
    let prompt = decoded.map_err(|error| text_error(error, "tokens"))?;
    Ok(reply::ok(&DetokenizeResponse { prompt }))
}
