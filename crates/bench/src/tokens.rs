//! The client's tokenizer: the interface to find it, and its counts for servers that report none.

use anyhow::Result;
use forebay_text::Tokenizer;

use crate::record::Record;

/// Finds the tokenizer of a model.
pub trait TokenizerFinder {
    /// Returns the tokenizer of `name`: a hub id, a directory, a `tokenizer.json`, a `.gguf` file,
    /// or a built-in model.
    ///
    /// # Errors
    /// The model has no tokenizer, or the tokenizer can't be read.
    fn find(&self, name: &str) -> Result<Tokenizer>;
}

/// The number of tokens of `text` by the client's tokenizer, without special tokens.
///
/// # Errors
/// The tokenizer refuses the text.
pub(crate) fn count(text: &str, tokenizer: &Tokenizer) -> Result<u64> {
    Ok(tokenizer.encode(text, false)?.len() as u64)
}

/// Divides a record's generated tokens among its chunks if the server did not report them per
/// chunk. A chunk's share is proportional to the tokens of its text by the client's tokenizer. The
/// sum equals the server's count.
///
/// # Errors
/// The tokenizer refuses the text.
pub(crate) fn guess_chunk_tokens(record: &mut Record, tokenizer: &Tokenizer) -> Result<()> {
    let mut start = 0;
    let mut weights = Vec::with_capacity(record.chunks.len());
    for chunk in &record.chunks {
        let end = start + chunk.text_bytes as usize;
        weights.push(count(record.text.get(start..end).unwrap_or(""), tokenizer)?);
        start = end;
    }
    for (chunk, tokens) in record.chunks.iter_mut().zip(shares(&weights, record.output_tokens)) {
        chunk.tokens = tokens;
    }
    Ok(())
}

/// Splits `total` into whole numbers proportional to `weights`. Running sums are rounded, so that
/// the parts add up to `total`. The first part is at least 1 unless `total` is 0, since the first
/// chunk contains the first token.
fn shares(weights: &[u64], total: u32) -> Vec<u32> {
    let sum: u64 = weights.iter().sum();
    let (mut seen, mut given) = (0, 0);
    weights
        .iter()
        .map(|weight| {
            seen += weight;
            let up_to = match (u64::from(total) * seen * 2 + sum).checked_div(2 * sum) {
                Some(share) => u32::try_from(share).unwrap_or(total).max(1).min(total),
                None => total,
            };
            let share = up_to - given;
            given = up_to;
            share
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::Chunk;

    #[test]
    fn shares_follow_the_weights() {
        assert_eq!(shares(&[1, 1, 2], 8), [2, 2, 4]);
        assert_eq!(shares(&[1, 1, 1], 4), [1, 2, 1]);
        assert_eq!(shares(&[1, 1000], 3), [1, 2]);
        assert_eq!(shares(&[0, 0], 3), [3, 0]);
        assert_eq!(shares(&[5, 5], 0), [0, 0]);
    }

    #[test]
    fn chunks_get_what_their_text_weighs() {
        let words = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}}"#;
        let tokenizer = Tokenizer::from_bytes(words.as_bytes()).unwrap();
        let chunk = |text_bytes| Chunk { at_us: 0, text_bytes, tokens: 0 };
        let mut record = Record {
            chunks: vec![chunk(1), chunk(7)],
            text: "a a a aa".into(),
            output_tokens: 8,
            ..Record::default()
        };
        guess_chunk_tokens(&mut record, &tokenizer).unwrap();
        assert_eq!(record.chunks.iter().map(|chunk| chunk.tokens).collect::<Vec<_>>(), [2, 6]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_in_sharing(weights in proptest::collection::vec(0_u64..1000, 1..50), total in 0_u32..5000) {
            let shares = shares(&weights, total);
            prop_assert_eq!(shares.iter().sum::<u32>(), total);
            let sum: u64 = weights.iter().sum();
            for (share, weight) in shares.iter().zip(&weights).skip(1) {
                if let Some(fair) = (weight * u64::from(total)).checked_div(sum) {
                    prop_assert!(u64::from(*share).abs_diff(fair) <= 1, "{share} of {fair}");
                }
            }
        }
    }
}
