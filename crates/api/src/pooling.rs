//! Types and checks that all pooling requests share.

use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::INPUTS;
use crate::sampling::Limits;

/// Checks that a request has no more inputs than allowed.
pub(crate) fn check_inputs(param: &str, count: usize) -> Result<(), ApiError> {
    if count <= INPUTS {
        return Ok(());
    }
    let reason = format!("`{param}`: {count} inputs are more than the limit of {INPUTS}");
    Err(ApiError::invalid(param, reason))
}

/// Returns the number of tokens to which prompts are truncated, or `None` for no truncation.
pub(crate) fn check_truncate(
    asked: Option<i64>,
    limits: Limits,
) -> Result<Option<usize>, ApiError> {
    const NAME: &str = "truncate_prompt_tokens";
    let longest = limits.context_length as usize;
    match asked {
        None => Ok(None),
        Some(-1) => Ok(Some(longest)),
        Some(asked) => match usize::try_from(asked) {
            Ok(count) if (1..=longest).contains(&count) => Ok(Some(count)),
            _ => {
                let reason = format!("`{NAME}`: {asked} is neither -1 nor within 1 to {longest}");
                Err(ApiError::invalid(NAME, reason))
            }
        },
    }
}

/// The token counts of a request whose answer has no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct PoolingUsage {
    /// The number of tokens of all inputs.
    pub prompt_tokens: u32,
    /// Equal to `prompt_tokens`, because nothing is generated.
    pub total_tokens: u32,
}

impl PoolingUsage {
    /// The usage of inputs of `prompt_tokens` tokens.
    pub fn new(prompt_tokens: u32) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens }
    }
}
