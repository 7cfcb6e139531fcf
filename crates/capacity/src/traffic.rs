//! Converts a trace for the simulation: times, lengths, and prompt tokens that are equal if the
//! trace's hash ids are equal.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use forebay_protocol::Grid;
use forebay_scheduler::{ImageId, PromptImage};

use forebay_bench::dataset::trace::{BLOCK_TOKENS, TraceEntry};

/// The largest number of blocks whose tokens get distinct values in the non-negative half of the
/// 32-bit integers.
const MAX_BLOCKS: u32 = (1 << 31) / BLOCK_TOKENS;

/// A request of the traffic.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    /// Microseconds since the first request.
    pub(crate) at_us: u64,
    /// The number of prompt tokens.
    pub(crate) input: u32,
    /// The number of tokens to generate.
    pub(crate) output: u32,
    /// The ids of the prompt's blocks of [`BLOCK_TOKENS`] tokens. The ids of a trace count up from
    /// 0 without gaps.
    pub(crate) blocks: Vec<u32>,
    /// The images in the prompt.
    pub(crate) images: Arc<[PromptImage]>,
    /// The id of the client.
    pub(crate) client: u64,
}

impl Arrival {
    /// The prompt tokens. Token `j` of block `b` is `512 b + j`: tokens are equal in equal blocks
    /// only, and cheaper to compute than to store.
    pub(crate) fn prompt(&self) -> Vec<i32> {
        let mut tokens = Vec::with_capacity(self.blocks.len() * BLOCK_TOKENS as usize);
        for &block in &self.blocks {
            let first = (block * BLOCK_TOKENS).cast_signed();
            tokens.extend(first..=first + (BLOCK_TOKENS - 1).cast_signed());
        }
        tokens.truncate(self.input as usize);
        tokens
    }
}

/// The requests of a trace, in order of arrival.
#[derive(Debug, Clone)]
pub(crate) struct Traffic {
    /// The requests, sorted by time.
    pub(crate) arrivals: Vec<Arrival>,
}

impl Traffic {
    /// Converts the first `most` requests of a trace, at `speed` times the recorded speed.
    ///
    /// # Errors
    /// There are more distinct blocks than token values.
    pub(crate) fn new(entries: &[TraceEntry], most: Option<u32>, speed: f64) -> Result<Self> {
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        let mut next = 0;
        let mut fresh = || {
            next += 1;
            next - 1
        };
        let start_ms = entries.first().map_or(0.0, |entry| entry.timestamp_ms);
        let most = most.map_or(entries.len(), |most| most as usize);
        let arrivals: Vec<Arrival> = entries
            .iter()
            .take(most)
            .map(|entry| {
                let blocks = if entry.hash_ids.is_empty() {
                    (0..entry.input_length.div_ceil(BLOCK_TOKENS)).map(|_| fresh()).collect()
                } else {
                    let number = |id| *numbers.entry(id).or_insert_with(&mut fresh);
                    entry.hash_ids.iter().copied().map(number).collect()
                };
                let images = entry.images.iter().map(|image| {
                    let grid = Grid { rows: image.rows, columns: image.columns };
                    (ImageId(image.id.into()), image.position, grid)
                });
                Arrival {
                    images: PromptImage::place(images),
                    at_us: ((entry.timestamp_ms - start_ms) * 1000.0 / speed).round() as u64,
                    input: entry.input_length,
                    output: entry.output_length,
                    blocks,
                    client: entry.client,
                }
            })
            .collect();
        ensure!(next <= MAX_BLOCKS, "the trace has more than {MAX_BLOCKS} different blocks");
        Ok(Self { arrivals })
    }

    /// The number of positions of the largest image; 0: there is no image.
    pub(crate) fn largest_image(&self) -> u32 {
        let images = self.arrivals.iter().flat_map(|arrival| arrival.images.iter());
        images.map(|image| image.span.grid.positions()).max().unwrap_or(0)
    }

    /// Microseconds from the first to the last arrival.
    pub(crate) fn duration_us(&self) -> u64 {
        self.arrivals.last().map_or(0, |last| last.at_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(timestamp_ms: f64, input_length: u32, hash_ids: &[u64]) -> TraceEntry {
        let hash_ids = hash_ids.to_vec();
        let (output_length, images, client) = (1, Vec::new(), 0);
        TraceEntry { timestamp_ms, input_length, output_length, hash_ids, images, client }
    }

    #[test]
    fn prompts_are_equal_as_far_as_their_hash_ids() {
        let big = u64::MAX;
        let entries = [
            entry(100.0, 1030, &[big, 7, 9]),
            entry(350.0, 1100, &[big, 7, 8]),
            entry(400.0, 520, &[]),
            entry(400.0, 520, &[]),
        ];
        let traffic = Traffic::new(&entries, None, 2.0).expect("traffic");
        let prompts: Vec<Vec<i32>> = traffic.arrivals.iter().map(Arrival::prompt).collect();
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        assert_eq!(lengths, [1030, 1100, 520, 520]);
        assert_eq!(prompts[0][..1024], prompts[1][..1024]);
        assert_ne!(prompts[0][1024], prompts[1][1024]);
        assert_ne!(prompts[2][0], prompts[3][0], "without hash ids nothing is shared");
        let times: Vec<u64> = traffic.arrivals.iter().map(|arrival| arrival.at_us).collect();
        assert_eq!(times, [0, 125_000, 150_000, 150_000]);
        assert_eq!(traffic.duration_us(), 150_000);
        let first = Traffic::new(&entries, Some(2), 1.0).expect("traffic");
        assert_eq!(first.arrivals.len(), 2);
    }
}
