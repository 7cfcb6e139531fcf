//! Parts of all requests of models that pool.

use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::INPUTS;
use crate::sampling::Limits;

/// Refuses more inputs than a request may have.
pub(crate) fn check_inputs(param: &str, count: usize) -> Result<(), ApiError> {
    if count <= INPUTS {
        return Ok(());
    }
    let reason = format!("`{param}`: {count} inputs are more than the limit of {INPUTS}");
    Err(ApiError::invalid(param, reason))
}

/// The tokens that prompts are cut to.
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

/// The numbers of tokens of a request whose answer has no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct PoolingUsage {
    /// Tokens of all inputs.
    pub prompt_tokens: u32,
    /// The number of all tokens. They are the prompts' tokens.
    pub total_tokens: u32,
}

impl PoolingUsage {
    /// The usage of inputs of `prompt_tokens` tokens.
    pub fn new(prompt_tokens: u32) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens }
    }
}
