//! Recorded traffic in Mooncake's format: JSONL with `timestamp` in milliseconds, and
//! `input_length` and `output_length` in tokens. Each of `hash_ids` identifies 512 tokens of the
//! prompt together with all tokens before them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rayon::prelude::*;
use serde::Deserialize;

use super::args::DatasetArgs;
use super::jsonl;
use super::seed::{Purpose, generator};
use super::words::{Drawn, Words};
use crate::WorkItem;

/// The number of prompt tokens that a hash id identifies. The last hash id of a prompt may identify
/// fewer.
pub const BLOCK_TOKENS: u32 = 512;

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TraceEntry {
    /// The time of arrival, in milliseconds from the start of the recording.
    #[serde(rename = "timestamp")]
    pub timestamp_ms: f64,
    /// The number of prompt tokens.
    pub input_length: u32,
    /// The number of generated tokens.
    pub output_length: u32,
    /// The hash ids, one for each [`BLOCK_TOKENS`] of the prompt. Equal ids mean equal tokens.
    /// Empty if they are unknown.
    #[serde(default)]
    pub hash_ids: Vec<u64>,
    /// The images in the prompt, in the order of their positions. Only `forebay plan` reads them;
    /// Mooncake's format does not have them.
    #[serde(default)]
    pub images: Vec<TraceImage>,
    /// The id of the client. Only `forebay plan` reads it; Mooncake's format does not have it.
    #[serde(default)]
    pub client: u64,
}

/// An image in a recorded prompt: it takes `rows * columns` of the prompt's positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct TraceImage {
    /// The id of the image; equal ids mean equal images.
    pub id: u64,
    /// The first position of the image.
    pub position: u32,
    /// The number of rows of positions.
    pub rows: u32,
    /// The number of positions per row.
    pub columns: u32,
}

/// Returns the requests of a trace, sorted by time.
///
/// # Errors
/// The file can't be read, is empty, or has an invalid line. Such a line has no request, a request
/// without tokens, an invalid time, or a wrong number of hash ids for the prompt. The message
/// contains the line number.
pub fn read(path: &Path) -> anyhow::Result<Vec<TraceEntry>> {
    let mut entries = Vec::new();
    for (line, entry) in jsonl::read::<TraceEntry>(path)? {
        entry.check().with_context(|| format!("{}, line {line}", path.display()))?;
        entries.push(entry);
    }
    ensure!(!entries.is_empty(), "{}: the trace has no requests", path.display());
    entries.sort_by(|one, other| one.timestamp_ms.total_cmp(&other.timestamp_ms));
    Ok(entries)
}

impl TraceEntry {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.input_length > 0, "input_length is 0");
        ensure!(self.output_length > 0, "output_length is 0");
        ensure!(
            Duration::try_from_secs_f64(self.timestamp_ms / 1000.0).is_ok(),
            "timestamp {} is not a time in milliseconds",
            self.timestamp_ms
        );
        let blocks = self.input_length.div_ceil(BLOCK_TOKENS) as usize;
        ensure!(
            self.hash_ids.is_empty() || self.hash_ids.len() == blocks,
            "{} tokens are {blocks} blocks of {BLOCK_TOKENS}, but there are {} hash_ids",
            self.input_length,
            self.hash_ids.len()
        );
        let mut free = 0;
        for image in &self.images {
            let (rows, columns) = (u64::from(image.rows), u64::from(image.columns));
            let end = (rows * columns).saturating_add(image.position.into());
            ensure!(
                rows > 0 && columns > 0 && u64::from(image.position) >= free,
                "image {}: images have positions, in ascending order",
                image.id
            );
            ensure!(
                end <= u64::from(self.input_length),
                "image {} ends at {end}, behind the prompt's {} tokens",
                image.id,
                self.input_length
            );
            free = end;
        }
        Ok(())
    }

    /// The time of arrival, relative to `start_ms`.
    fn arrival(&self, start_ms: f64) -> Duration {
        // Not negative, because the entries are sorted; `read` has checked that it is not too
        // large.
        Duration::from_secs_f64(((self.timestamp_ms - start_ms) / 1000.0).max(0.0))
    }

    /// Draws the words of the prompt: the words of each block depend only on its hash id. `index`
    /// is used as the seed of a prompt without hash ids.
    fn draw(&self, words: &Words<'_>, seed: u64, index: u64, tokens: u32) -> Drawn {
        let mut drawn = Drawn::with_capacity(tokens as usize);
        if self.hash_ids.is_empty() {
            words.draw(&mut generator(seed, Purpose::Words, index), tokens, &mut drawn);
        }
        for &hash in &self.hash_ids {
            let count = (tokens - drawn.len() as u32).min(BLOCK_TOKENS);
            words.draw(&mut generator(seed, Purpose::Shared, hash), count, &mut drawn);
        }
        drawn
    }
}

/// Creates the first `count` requests of a trace. Equal hash ids become equal tokens.
///
/// # Errors
/// If a text can't be encoded.
pub(crate) fn items(
    entries: &[TraceEntry],
    args: &DatasetArgs,
    seed: u64,
    words: &Words<'_>,
) -> anyhow::Result<Vec<WorkItem>> {
    let start_ms = entries.first().map_or(0.0, |entry| entry.timestamp_ms);
    let count = args.num_prompts.map_or(entries.len(), |count| count as usize);
    if count > entries.len() {
        tracing::warn!("the trace has {} requests, not {count}", entries.len());
    }
    let work = entries.par_iter().take(count).enumerate().map(|(index, entry)| {
        let longest = args.trace_max_input_len.unwrap_or(u32::MAX);
        let tokens = entry.input_length.min(longest);
        let text = words.text(&entry.draw(words, seed, index as u64, tokens))?;
        Ok(WorkItem {
            text_tokens: text.tokens(),
            prompt: text.prompt(args.tokenize_prompt),
            output_tokens: entry.output_length,
            arrival: Some(entry.arrival(start_ms)),
        })
    });
    work.collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn read_text(text: &str) -> anyhow::Result<Vec<TraceEntry>> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(text.as_bytes())?;
        read(file.path())
    }

    #[test]
    fn entries_come_by_time() {
        let entries = read_text(concat!(
            r#"{"timestamp": 30, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}"#,
            "\n\n",
            r#"{"timestamp": 10.5, "input_length": 512, "output_length": 1, "hash_ids": [1]}"#,
            "\n",
            r#"{"timestamp": 20, "input_length": 9, "output_length": 2}"#,
        ));
        let entries = entries.expect("a trace");
        let times: Vec<f64> = entries.iter().map(|entry| entry.timestamp_ms).collect();
        assert_eq!(times, [10.5, 20.0, 30.0]);
        assert_eq!(entries[2].hash_ids, [1, 2]);
        assert_eq!(entries[1].hash_ids, [0; 0]);
        assert_eq!(entries[2].arrival(10.5), Duration::from_micros(19_500));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good =
            r#"{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]}"#;
        for (wrong, why) in [
            (good.replace("[1, 2]", "[1]"), "2 blocks"),
            (good.replace("513", "0"), "input_length is 0"),
            (good.replace("\"output_length\": 1", "\"output_length\": 0"), "output_length is 0"),
            (good.replace("\"timestamp\": 0", "\"timestamp\": -5"), "not a time"),
            (good.replace("\"timestamp\": 0", "\"timestamp\": 1e300"), "not a time"),
            (good.replace("\"timestamp\": 0, ", ""), "timestamp"),
            (good.replace("513", "-1"), "integer `-1`"),
            ("nonsense".to_owned(), "expected"),
        ] {
            let error = read_text(&format!("{good}\n{wrong}\n")).expect_err(&wrong);
            let message = format!("{error:#}");
            assert!(message.contains("line 2") && message.contains(why), "{message}");
        }
        assert!(read_text("\n").expect_err("empty").to_string().contains("no requests"));
        assert!(read(Path::new("/nowhere/trace.jsonl")).is_err());
    }

    #[test]
    fn images_lie_in_the_prompt_one_after_the_other() {
        let told = |images: &str| {
            let line = format!(
                r#"{{"timestamp": 0, "input_length": 20, "output_length": 1, "images": [{images}]}}"#
            );
            let entry: TraceEntry = serde_json::from_str(&line).expect("an entry");
            entry.check().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let image = |position: u32, rows: u32| {
            format!(r#"{{"id": 7, "position": {position}, "rows": {rows}, "columns": 4}}"#)
        };
        assert_eq!(told(&format!("{}, {}", image(2, 2), image(10, 2))), "");
        assert!(told(&format!("{}, {}", image(2, 2), image(9, 2))).contains("ascending order"));
        assert!(told(&image(2, 0)).contains("have positions"));
        assert!(told(&image(17, 1)).contains("ends at 21"));
        assert!(told(&image(0, u32::MAX)).contains("behind the prompt"));
    }
}
