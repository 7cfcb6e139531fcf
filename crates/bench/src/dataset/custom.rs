//! A JSONL file of prompts: `{"prompt": "..", "output_tokens": 100}` on each line, as in `vllm
//! bench serve`.

use std::path::Path;

use anyhow::ensure;
use rayon::prelude::*;
use serde::Deserialize;

use super::args::DatasetArgs;
use super::jsonl;
use super::words::{Text, Words};
use crate::WorkItem;

/// The default number of tokens to generate.
const OUTPUT_TOKENS: u32 = 256;

#[derive(Debug, Deserialize)]
struct Row {
    prompt: String,
    output_tokens: Option<u32>,
}

/// Returns the first `limit` prompts of the file, in file order.
///
/// # Errors
/// If the file can't be read or is empty, or a line is not a prompt.
pub(crate) fn items(
    path: &Path,
    args: &DatasetArgs,
    limit: Option<u32>,
    words: &Words<'_>,
) -> anyhow::Result<Vec<WorkItem>> {
    let rows = jsonl::read::<Row>(path)?;
    ensure!(!rows.is_empty(), "{}: there are no prompts", path.display());
    let limit = limit.map_or(rows.len(), |limit| limit as usize);
    let work = rows.into_par_iter().take(limit).map(|(line, row)| {
        ensure!(!row.prompt.is_empty(), "{}, line {line}: the prompt is empty", path.display());
        let output = args.custom_output_len.or(row.output_tokens).unwrap_or(OUTPUT_TOKENS);
        ensure!(output > 0, "{}, line {line}: output_tokens is 0", path.display());
        let text = Text { ids: words.encode(&row.prompt)?, text: row.prompt };
        Ok(WorkItem {
            text_tokens: text.tokens(),
            prompt: text.prompt(args.tokenize_prompt),
            output_tokens: output,
            arrival: None,
        })
    });
    work.collect()
}
