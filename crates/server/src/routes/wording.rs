//! Finish reasons and tokens, as several APIs encode them.

use forebay_api::{StopReason, TokenOutput};
use forebay_egress::End;
use forebay_text::Tokenizer;

/// vLLM's `stop_reason`: the stop string or token, but not end-of-sequence.
pub(super) fn stop_reason(end: &End) -> Option<StopReason> {
    match end {
        End::Token(id) => Some(StopReason::Token(*id)),
        End::Text(text) => Some(StopReason::Text(text.clone())),
        End::Eos(_) | End::Length | End::Call | End::Error(_) => None,
    }
}

/// SGLang's `matched_stop`: the stop string or token, including end-of-sequence.
pub(super) fn matched_stop(end: &End) -> Option<StopReason> {
    match end {
        End::Eos(id) => Some(StopReason::Token(*id)),
        end => stop_reason(end),
    }
}

/// Returns the name of a token in log-probabilities.
pub(super) fn token_name(tokenizer: &Tokenizer, id: i32, output: TokenOutput) -> String {
    if output.as_ids { format!("token_id:{id}") } else { tokenizer.token_text(id) }
}
