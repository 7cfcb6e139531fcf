//! Converts texts to prompts, truncated if the client requests that.

use std::sync::Arc;

use forebay_api::{ApiError, Pairs, Prompt};
use forebay_text::TextError;

use crate::text::{RequestText, encode_prompts, text_error};

/// A prompt to pool.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Input {
    /// Token ids.
    pub(crate) tokens: Vec<i32>,
    /// The position at which the second text of a pair begins; 0: there is no second segment.
    pub(crate) segment: u32,
}

impl Input {
    /// Creates the input of a pair of texts. `second` is the position at which the second segment
    /// begins. Some tokenizers give both texts the same segment; then the input has no second
    /// segment.
    fn of_pair(tokens: Vec<i32>, second: u32) -> Self {
        let segment = if (second as usize) < tokens.len() { second } else { 0 };
        Self { tokens, segment }
    }
}

/// Tokenises texts, and truncates inputs to `limit` tokens. If `limit` is `None`, an input of more
/// than `most` tokens is an error.
pub(crate) async fn encode_inputs(
    text: RequestText<'_>,
    mut prompts: Vec<Prompt>,
    add_special_tokens: bool,
    limit: Option<usize>,
    most: usize,
    param: &'static str,
) -> Result<Vec<Input>, ApiError> {
    // Truncation keeps the special tokens around a text. The encoding of an empty text consists of
    // these tokens only.
    let is_text: Vec<bool> = prompts.iter().map(|p| matches!(p, Prompt::Text(_))).collect();
    if limit.is_some() {
        prompts.push(Prompt::Text(String::new()));
    }
    let most = limit.is_none().then_some(most);
    let mut encoded = encode_prompts(text, prompts, add_special_tokens, most, param).await?;
    if let Some(limit) = limit {
        let frame = encoded.pop().unwrap_or_default();
        for (tokens, &is_text) in encoded.iter_mut().zip(&is_text) {
            cut(tokens, if is_text { &frame } else { &[] }, limit, 0);
        }
    }
    let inputs: Vec<Input> =
        encoded.into_iter().map(|tokens| Input { tokens, segment: 0 }).collect();
    match inputs.iter().position(|input| input.tokens.is_empty()) {
        None => Ok(inputs),
        Some(at) => {
            let param = if inputs.len() == 1 { param.to_owned() } else { format!("{param}[{at}]") };
            Err(ApiError::invalid(&param, format!("`{param}`: the text has no tokens")))
        }
    }
}

/// Tokenises pairs of texts. If the request sets a truncation limit, truncates the second text of
/// each longer pair. Otherwise a pair of more than `most` tokens is an error.
pub(crate) async fn encode_pairs(
    text: RequestText<'_>,
    pairs: &Pairs,
    most: usize,
) -> Result<Vec<Input>, ApiError> {
    // The query is tokenised once, and paired with all documents.
    let first: Vec<Arc<str>> = pairs.first.iter().map(|text| text.as_str().into()).collect();
    let first_of = |index: usize| first.get(index).or(first.first()).map_or("".into(), Arc::clone);
    let mut texts: Vec<(Arc<str>, String)> =
        (0..).zip(&pairs.second).map(|(index, second)| (first_of(index), second.clone())).collect();
    if pairs.truncate.is_some() {
        texts.push(("".into(), String::new()));
    }
    let most = pairs.truncate.is_none().then_some(most);
    let encoded = text.within(most).encode_pairs(texts).await;
    let encoded = encoded.map_err(|error| match error {
        TextError::TooLong { text, .. } if pairs.second.len() > 1 => {
            text_error(error, &format!("{}[{text}]", pairs.params[1]))
        }
        error => text_error(error, pairs.params[1]),
    })?;
    let mut inputs: Vec<Input> =
        encoded.into_iter().map(|(tokens, segment)| Input::of_pair(tokens, segment)).collect();
    if let Some(limit) = pairs.truncate {
        let frame = inputs.pop().map_or(Vec::new(), |input| input.tokens);
        for Input { tokens, segment } in &mut inputs {
            cut(tokens, &frame, limit, *segment as usize);
            if tokens.len() > limit {
                let param = "truncate_prompt_tokens";
                let reason =
                    format!("`{param}`: {limit} tokens have no room for the first text of a pair");
                return Err(ApiError::invalid(param, reason));
            }
        }
    }
    Ok(inputs)
}

/// Truncates `tokens` to `limit` tokens. The first `kept` tokens and the suffix that `tokens`
/// shares with `frame` are kept, even if they exceed the limit.
fn cut(tokens: &mut Vec<i32>, frame: &[i32], limit: usize, kept: usize) {
    let excess = tokens.len().saturating_sub(limit);
    let equal = tokens.iter().rev().zip(frame.iter().rev()).take_while(|(a, b)| a == b);
    let end = tokens.len() - equal.count();
    tokens.drain(end.saturating_sub(excess).max(kept).min(end)..end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_one_kind_have_no_second_segment() {
        assert_eq!(Input::of_pair(vec![0, 7, 2, 8, 2], 3).segment, 3);
        assert_eq!(Input::of_pair(vec![0, 7, 2, 2, 8, 2], 6).segment, 0);
    }

    fn cut_to(tokens: &[i32], frame: &[i32], limit: usize, kept: usize) -> Vec<i32> {
        let mut tokens = tokens.to_vec();
        cut(&mut tokens, frame, limit, kept);
        tokens
    }

    #[test]
    fn special_tokens_stay_at_both_ends() {
        let frame = [101, 102];
        assert_eq!(cut_to(&[101, 1, 2, 3, 102], &frame, 4, 0), [101, 1, 2, 102]);
        assert_eq!(cut_to(&[101, 1, 2, 3, 102], &frame, 5, 0), [101, 1, 2, 3, 102]);
        assert_eq!(cut_to(&[101, 1, 102], &frame, 1, 0), [102]);
        assert_eq!(cut_to(&[1, 2, 3], &[], 2, 0), [1, 2], "ids from the client");
    }

    #[test]
    fn of_a_pair_only_the_second_text_is_cut() {
        let (pair, frame) = ([101, 1, 2, 102, 3, 4, 5, 102], [101, 102, 102]);
        assert_eq!(cut_to(&pair, &frame, 6, 4), [101, 1, 2, 102, 3, 102]);
        assert_eq!(
            cut_to(&pair, &frame, 2, 4),
            [101, 1, 2, 102, 102],
            "a text that is still too long is refused"
        );
    }
}
