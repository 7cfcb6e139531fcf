//! `POST /tokenize` and `POST /detokenize`.

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, DetokenizeRequest, DetokenizeResponse, ErrorBody, Prompt, TokenPiece, TokenPieces,
    TokenizeInput, TokenizeRequest, TokenizeResponse, TokenizedTexts,
};

use crate::answer::AnswerWriter;
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::reply::Failure;
use crate::state::Shared;
use crate::text::{RequestText, encode_chat, encode_prompts, text_error};

/// The minimum of these routes' token limit, for models with a short context. A flag can override
/// the limit.
const MOST_TOKENS: usize = 64 << 10;
/// Bytes of a token in a response: as an id and as JSON.
const NUMBER: usize = 16;
/// Bytes of a token together with its text in a response.
const NAMED: usize = 128;

/// Tokenises text or a conversation.
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
    peer: Peer,
    body: Upload,
) -> Result<Response, Failure> {
    let (request, charge) = limits::read::<TokenizeRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let max_model_len = state.limits()?.context_length;
    let with_strings = request.return_token_strs.unwrap_or(false);
    let with_pieces = request.with_pieces.unwrap_or(false);
    let most = most_tokens(&state)?;
    let text = RequestText::new(&state, &peer, None, &charge);
    let mut many = false;
    let encoded = match request.validate()? {
        TokenizeInput::Texts { texts, many: several, add_special_tokens } => {
            many = several;
            let prompts = texts.into_iter().map(Prompt::Text).collect();
            let special = add_special_tokens;
            encode_prompts(text, prompts, special, Some(most), "prompt").await
        }
        TokenizeInput::Chat(chat) => {
            encode_chat(text, *chat, most, "messages").await.map(|chat| vec![chat.ids])
        }
    };
    let encoded = encoded.map_err(|error| match error {
        ApiError::TextTooLong { param, limit, .. } => too_many(&param, limit),
        other => other,
    })?;
    let tokens: usize = encoded.iter().map(Vec::len).sum();
    charge.at_least(tokens * if with_strings || with_pieces { NAMED } else { NUMBER })?;
    let writer = AnswerWriter::new(state.config.max_unread_bytes, &charge);
    if many {
        let count = encoded.iter().map(Vec::len).collect();
        return writer.value(&TokenizedTexts { tokens: encoded, count, max_model_len });
    }
    let tokens = encoded.concat();
    if with_pieces {
        let piece = |&id: &i32| TokenPiece { id, piece: state.text.tokenizer().token_text(id) };
        return writer.value(&TokenPieces { tokens: tokens.iter().map(piece).collect() });
    }
    let tokenizer = state.text.tokenizer();
    let token_strs = with_strings
        .then(|| tokens.iter().map(|&id| tokenizer.id_to_token(id).unwrap_or_default()).collect());
    let count = tokens.len();
    writer.value(&TokenizeResponse { count, max_model_len, tokens, token_strs })
}

/// Detokenises token ids.
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
    let (request, charge) = limits::read::<DetokenizeRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let with_pieces = request.with_pieces.unwrap_or(false);
    let tokens = request.validate(state.limits()?.vocab_size)?;
    let limit = most_tokens(&state)?;
    if tokens.len() > limit {
        return Err(too_many("tokens", limit).into());
    }
    let named = if with_pieces { tokens.len() * NAMED } else { 0 };
    charge.at_least(named)?;
    let tokenizer = state.text.tokenizer();
    let pieces = with_pieces.then(|| tokens.iter().map(|&id| tokenizer.token_text(id)).collect());
    let decoded = state.text.decode(tokens).await;
    let prompt = decoded.map_err(|error| text_error(error, "tokens"))?;
    // Three copies of the text in memory, and three as JSON.
    charge.at_least(6 * prompt.len() + named)?;
    let (text, content) = (prompt.clone(), prompt.clone());
    AnswerWriter::new(state.config.max_unread_bytes, &charge).value(&DetokenizeResponse {
        prompt,
        text,
        content,
        pieces,
    })
}

fn too_many(param: &str, limit: usize) -> ApiError {
    let reason = format!(
        "`{param}`: more than {limit} tokens at a time; the server's --max-tokenize-tokens allows more"
    );
    ApiError::invalid(param, reason)
}

/// Returns the number of tokens that these routes accept. It exceeds the prompt limit, for clients
/// that split a document by its tokens.
pub(super) fn most_tokens(state: &Shared) -> Result<usize, ApiError> {
    let context = state.limits()?.context_length as usize;
    Ok(state.config.max_tokenize_tokens.unwrap_or((4 * context).max(MOST_TOKENS)))
}
