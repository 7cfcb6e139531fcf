//! Computes statistics from the records of a run, by the formulas of `bench_serving`.
//!
//! Known errors of these formulas are avoided. The duration excludes housekeeping. Gaps and peaks
//! count tokens rather than chunks. The first chunk's tokens count for the peak but have no gap;
//! all tokens of later chunks have a gap.

use std::collections::BTreeMap;

use anyhow::Result;
use forebay_text::Tokenizer;

use crate::output::{Details, Histogram, Latencies, Second, Summary};
use crate::record::{Outcome, Record};
use crate::tokens;

/// Statistics of a list of numbers; all 0 for an empty list.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    /// Arithmetic mean.
    pub mean: f64,
    /// The 50th percentile. Percentiles are interpolated between the two nearest values, as in
    /// numpy.
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Stats {
    /// Computes the statistics of `values`, and sorts them.
    pub(crate) fn of(values: &mut [f64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let at = |share| percentile(values, share);
        Self {
            mean,
            median: at(0.5),
            std: variance.sqrt(),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: at(1.0),
        }
    }

    /// The statistics, with their names in the result file.
    pub(crate) fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("mean", self.mean),
            ("median", self.median),
            ("std", self.std),
            ("p90", self.p90),
            ("p95", self.p95),
            ("p99", self.p99),
            ("max", self.max),
        ]
    }

    /// The statistic with this name in the result file.
    pub(crate) fn of_mut(&mut self, name: &str) -> Option<&mut f64> {
        match name {
            "mean" => Some(&mut self.mean),
            "median" => Some(&mut self.median),
            "std" => Some(&mut self.std),
            "p90" => Some(&mut self.p90),
            "p95" => Some(&mut self.p95),
            "p99" => Some(&mut self.p99),
            "max" => Some(&mut self.max),
            _ => None,
        }
    }
}

/// The value below which `share` of the sorted `values` lie. `values` must not be empty.
fn percentile(values: &[f64], share: f64) -> f64 {
    let place = (values.len() - 1) as f64 * share;
    let below = place.floor() as usize;
    let above = (below + 1).min(values.len() - 1);
    values[below] + (values[above] - values[below]) * (place - below as f64)
}

/// Times of one request, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Times {
    e2e: f64,
    /// `None`: there was no token.
    ttft: Option<f64>,
    ttft_intended: Option<f64>,
    /// `None`: there were fewer than two tokens.
    tpot: Option<f64>,
}

impl Times {
    fn of(record: &Record) -> Self {
        let first = record.chunks.first().map(|chunk| chunk.at_us);
        let ttft = first.map(|at| ms(at, record.sent_us));
        let e2e = ms(record.end_us, record.sent_us);
        let tpot = ttft
            .filter(|_| record.output_tokens > 1)
            .map(|ttft| (e2e - ttft) / f64::from(record.output_tokens - 1));
        Self { e2e, ttft, ttft_intended: first.map(|at| ms(at, record.intended_us)), tpot }
    }

    /// True if the request meets all goals. A goal whose time could not be measured counts as met.
    fn meet(&self, goals: &BTreeMap<String, f64>) -> bool {
        goals.iter().all(|(name, goal)| {
            let time = match name.as_str() {
                "ttft" => self.ttft,
                "ttft_intended" => self.ttft_intended,
                "tpot" => self.tpot,
                _ => Some(self.e2e),
            };
            time.is_none_or(|time| time <= *goal)
        })
    }
}

/// The names of possible goals.
pub(crate) const GOALS: [&str; 4] = ["ttft", "ttft_intended", "tpot", "e2el"];

fn ms(later_us: u64, earlier_us: u64) -> f64 {
    later_us.saturating_sub(earlier_us) as f64 / 1e3
}

/// The gaps between tokens in seconds, one for each token after those of the first chunk. The gap
/// before a chunk is divided equally among the chunk's tokens.
fn gaps(record: &Record) -> impl Iterator<Item = f64> + '_ {
    let mut last = record.chunks.first().map_or(0, |chunk| chunk.at_us);
    record.chunks.iter().skip(1).filter(|chunk| chunk.tokens > 0).flat_map(move |chunk| {
        let gap = ms(chunk.at_us, last) / 1e3 / f64::from(chunk.tokens);
        last = chunk.at_us;
        std::iter::repeat_n(gap, chunk.tokens as usize)
    })
}

/// Computes the summary of a run. `goals` are in milliseconds.
///
/// # Errors
/// The tokenizer refuses a generated text.
pub(crate) fn summarise(
    records: &[Record],
    goals: &BTreeMap<String, f64>,
    tokenizer: &Tokenizer,
) -> Result<Summary> {
    let good: Vec<&Record> =
        records.iter().filter(|record| record.outcome == Outcome::Success).collect();
    let start = records.iter().map(|record| record.sent_us).min().unwrap_or(0);
    let end = records.iter().map(|record| record.end_us).max().unwrap_or(0);
    let duration = ms(end, start) / 1e3;
    let per_second = |count: f64| if duration > 0.0 { count / duration } else { 0.0 };
    let times: Vec<Times> = good.iter().map(|record| Times::of(record)).collect();
    let mut retokenized = 0;
    for record in &good {
        retokenized += tokens::count(&record.text, tokenizer)?;
    }
    let input = sum(&good, |record| record.input_tokens);
    let vision = sum(&good, |record| record.vision_tokens);
    let output = sum(&good, |record| record.output_tokens);
    let chunks = good.iter().map(|record| record.chunks.len() as u64).sum();
    let (latencies, histograms) = distributions(&good, &times);
    let timeline = timeline(records, start, end);
    Ok(Summary {
        duration,
        completed: good.len() as u64,
        failed: (records.len() - good.len()) as u64,
        total_input_tokens: input,
        total_input_text_tokens: input - vision,
        total_input_vision_tokens: vision,
        total_output_tokens: output,
        total_output_tokens_retokenized: retokenized,
        request_throughput: per_second(good.len() as f64),
        input_throughput: per_second(input as f64),
        output_throughput: per_second(output as f64),
        total_throughput: per_second((input + output) as f64),
        max_output_tokens_per_s: timeline.iter().map(|at| at.output_tokens).max().unwrap_or(0)
            as f64,
        max_concurrent_requests: timeline.iter().map(|at| at.concurrency).max().unwrap_or(0),
        concurrency: per_second(times.iter().map(|times| times.e2e / 1e3).sum()),
        request_goodput: (!goals.is_empty())
            .then(|| per_second(times.iter().filter(|times| times.meet(goals)).count() as f64)),
        latencies,
        chunks,
        chunks_per_token: if output > 0 { chunks as f64 / output as f64 } else { 0.0 },
        errors: errors(records),
        timeline,
        histograms,
    })
}

fn sum(records: &[&Record], field: impl Fn(&Record) -> u32) -> u64 {
    records.iter().map(|record| u64::from(field(record))).sum()
}

fn distributions(good: &[&Record], times: &[Times]) -> (Latencies, BTreeMap<String, Histogram>) {
    let mut histograms = BTreeMap::new();
    let mut stats = |name: &str, mut values: Vec<f64>| {
        let stats = Stats::of(&mut values);
        histograms.insert(format!("{name}_ms"), histogram(&values));
        stats
    };
    let latencies = Latencies {
        e2e_latency: stats("e2e_latency", times.iter().map(|times| times.e2e).collect()),
        ttft: stats("ttft", times.iter().filter_map(|times| times.ttft).collect()),
        ttft_intended: stats(
            "ttft_intended",
            times.iter().filter_map(|times| times.ttft_intended).collect(),
        ),
        tpot: stats("tpot", times.iter().filter_map(|times| times.tpot).collect()),
        itl: stats(
            "itl",
            good.iter().flat_map(|record| gaps(record)).map(|gap| gap * 1e3).collect(),
        ),
    };
    (latencies, histograms)
}

/// The number of bin edges of a histogram per factor of ten.
const EDGES_A_DECADE: f64 = 20.0;
/// The lowest bin edge, in milliseconds. Smaller values count as this one, since the clock can't
/// distinguish them.
const SMALLEST_EDGE: f64 = 1e-3;

/// Counts sorted values in bins. The edges are on the same grid in every run, so that runs can be
/// drawn on top of each other.
fn histogram(sorted: &[f64]) -> Histogram {
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else {
        return Histogram::default();
    };
    let step = |value: f64| (value.max(SMALLEST_EDGE).log10() * EDGES_A_DECADE).floor();
    let (first, last) = (step(least), step(most) + 1.0);
    let mut counts = vec![0; (last - first) as usize];
    for &value in sorted {
        counts[(step(value) - first) as usize] += 1;
    }
    let edges = (0..=counts.len())
        .map(|index| 10_f64.powf((first + index as f64) / EDGES_A_DECADE))
        .collect();
    Histogram { edges, counts }
}

/// The counts of each second from `start` to `end`, which are in microseconds.
fn timeline(records: &[Record], start: u64, end: u64) -> Vec<Second> {
    if records.is_empty() {
        return Vec::new();
    }
    let second = |at_us: u64| (at_us.saturating_sub(start) / 1_000_000) as usize;
    let mut line: Vec<Second> =
        (0..=second(end) as u64).map(|second| Second { second, ..Second::default() }).collect();
    // Requests started minus requests ended; a request still counts in the second in which it ends.
    let mut changes = vec![0_i64; line.len() + 1];
    for record in records {
        changes[second(record.sent_us)] += 1;
        changes[second(record.end_us) + 1] -= 1;
        line[second(record.sent_us)].sent += 1;
        let last = &mut line[second(record.end_us)];
        last.finished += 1;
        if record.outcome != Outcome::Success {
            last.failed += 1;
            continue;
        }
        let Some(first) = record.chunks.first() else { continue };
        line[second(first.at_us)].output_tokens += u64::from(first.tokens);
        let mut at_us = first.at_us as f64;
        for gap in gaps(record) {
            at_us += gap * 1e6;
            line[second((at_us.round() as u64).min(end))].output_tokens += 1;
        }
    }
    let mut running = 0;
    for (at, change) in line.iter_mut().zip(changes) {
        running += change;
        at.concurrency = u64::try_from(running).unwrap_or(0);
    }
    line
}

/// The number of failures with each message.
fn errors(records: &[Record]) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for record in records {
        if let Outcome::Failed(message) = &record.outcome {
            *errors.entry(message.clone()).or_default() += 1;
        }
    }
    errors
}

/// The data of every request, for the result file.
pub(crate) fn details(records: &[Record]) -> Details {
    let seconds = |us: u64| us as f64 / 1e6;
    let mut details = Details::default();
    for record in records {
        let times = Times::of(record);
        details.input_lens.push(record.input_tokens);
        details.output_lens.push(record.output_tokens);
        details.ttfts.push(times.ttft.unwrap_or(0.0) / 1e3);
        details.itls.push(gaps(record).collect());
        details.start_times.push(seconds(record.sent_us));
        details.intended_times.push(seconds(record.intended_us));
        details.latencies.push(times.e2e / 1e3);
        details.generated_texts.push(record.text.clone());
        details.error_list.push(match &record.outcome {
            Outcome::Success => String::new(),
            Outcome::Failed(message) => message.clone(),
        });
    }
    details
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::Chunk;

    const SECOND: u64 = 1_000_000;

    fn tokenizer() -> Tokenizer {
        let words = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}}"#;
        Tokenizer::from_bytes(words.as_bytes()).unwrap()
    }

    fn record(sent_us: u64, chunks: &[(u64, u32)], end_us: u64) -> Record {
        Record {
            intended_us: sent_us / 2,
            sent_us,
            end_us,
            chunks: chunks
                .iter()
                .map(|&(at_us, tokens)| Chunk { at_us, text_bytes: 1, tokens })
                .collect(),
            input_tokens: 10,
            vision_tokens: 4,
            output_tokens: chunks.iter().map(|(_, tokens)| tokens).sum(),
            text: "a a a".into(),
            outcome: Outcome::Success,
        }
    }

    fn goals(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pairs.iter().map(|&(name, limit)| (name.to_owned(), limit)).collect()
    }

    /// Three records:
    ///
    /// - from 1 s to 3 s with chunks of 1, 2 and 1 tokens,
    /// - from 2 s to 5.5 s with one token,
    /// - one that failed at 6 s.
    fn three() -> Vec<Record> {
        let failed = Outcome::Failed("HTTP 429: full".into());
        vec![
            record(SECOND, &[(1_500_000, 1), (2_100_000, 2), (3 * SECOND, 1)], 3 * SECOND),
            record(2 * SECOND, &[(5 * SECOND, 1)], 5_500_000),
            Record { outcome: failed, ..record(2_500_000, &[(2_600_000, 1)], 6 * SECOND) },
        ]
    }

    #[test]
    fn sums_and_rates_count_what_succeeded() {
        let summary = summarise(&three(), &goals(&[]), &tokenizer()).unwrap();
        assert_eq!((summary.completed, summary.failed), (2, 1));
        assert_eq!(summary.duration, 5.0, "from the first send to the last end, failures included");
        assert_eq!(summary.total_input_tokens, 20);
        assert_eq!((summary.total_input_text_tokens, summary.total_input_vision_tokens), (12, 8));
        assert_eq!(summary.total_output_tokens, 5);
        assert_eq!(summary.total_output_tokens_retokenized, 6);
        assert_eq!(summary.request_throughput, 0.4);
        assert_eq!((summary.input_throughput, summary.output_throughput), (4.0, 1.0));
        assert_eq!(summary.total_throughput, 5.0);
        assert_eq!(summary.concurrency, (2.0 + 3.5) / 5.0);
        assert_eq!((summary.chunks, summary.chunks_per_token), (4, 0.8));
        assert_eq!(summary.errors, [("HTTP 429: full".to_owned(), 1)].into());
        assert_eq!(summary.request_goodput, None);
    }

    #[test]
    fn latencies_by_hand() {
        let latencies = summarise(&three(), &goals(&[]), &tokenizer()).unwrap().latencies;
        assert_eq!(latencies.e2e_latency.mean, 2750.0);
        assert_eq!(latencies.e2e_latency.std, 750.0);
        assert_eq!((latencies.ttft.mean, latencies.ttft.max), (1750.0, 3000.0));
        assert_eq!(latencies.ttft_intended.mean, (1000.0 + 4000.0) / 2.0);
        assert_eq!(latencies.tpot.mean, 500.0, "only the request of more than one token");
        // The gaps are 600 ms for a chunk of two tokens, then 900 ms for one token.
        assert_eq!(latencies.itl.median, 300.0);
        assert_eq!((latencies.itl.mean, latencies.itl.max), (500.0, 900.0));
    }

    #[test]
    fn the_timeline_by_hand() {
        let summary = summarise(&three(), &goals(&[]), &tokenizer()).unwrap();
        let line: Vec<[u64; 5]> = summary
            .timeline
            .iter()
            .map(|at| [at.output_tokens, at.concurrency, at.sent, at.finished, at.failed])
            .collect();
        // Seconds from 1 s on. Tokens arrive at 1.5, 1.8, 2.1, 3 and 5 s. The requests at 1-3,
        // 2-5.5 and 2.5-6 s count in the seconds in which they end.
        assert_eq!(
            line,
            [
                [2, 1, 1, 0, 0],
                [1, 3, 2, 0, 0],
                [1, 3, 0, 1, 0],
                [0, 2, 0, 0, 0],
                [1, 2, 0, 1, 0],
                [0, 1, 0, 1, 1]
            ]
        );
        assert_eq!((summary.max_output_tokens_per_s, summary.max_concurrent_requests), (2.0, 3));
    }

    #[test]
    fn goodput_wants_every_goal() {
        let rate = |pairs: &[(&str, f64)]| {
            summarise(&three(), &goals(pairs), &tokenizer()).unwrap().request_goodput.unwrap() * 5.0
        };
        assert_eq!(rate(&[("ttft", 500.0), ("tpot", 500.0)]), 1.0);
        assert_eq!(rate(&[("tpot", 500.0)]), 2.0, "one token has no time per token to miss");
        assert_eq!(rate(&[("ttft", 500.0), ("tpot", 499.0)]), 0.0);
        assert_eq!(rate(&[("e2el", 2000.0)]), 1.0);
        assert_eq!(rate(&[("ttft_intended", 999.0)]), 0.0);
    }

    #[test]
    fn nothing_gives_zeros_and_not_a_failure() {
        let summary = summarise(&[], &goals(&[("ttft", 1.0)]), &tokenizer()).unwrap();
        assert_eq!(
            summary,
            Summary {
                request_goodput: Some(0.0),
                histograms: summary.histograms.clone(),
                ..Summary::default()
            }
        );
        assert!(summary.histograms.values().all(|histogram| *histogram == Histogram::default()));
    }

    #[test]
    fn a_chunk_without_tokens_leaves_its_gap_to_the_next() {
        let gaps: Vec<f64> =
            gaps(&record(0, &[(SECOND, 1), (2 * SECOND, 0), (4 * SECOND, 2)], SECOND)).collect();
        assert_eq!(gaps, [1.5, 1.5]);
    }

    #[test]
    fn details_are_in_seconds() {
        let details = details(&three());
        assert_eq!(details.ttfts, [0.5, 3.0, 0.1]);
        assert_eq!(details.latencies, [2.0, 3.5, 3.5]);
        assert_eq!(details.start_times, [1.0, 2.0, 2.5]);
        assert_eq!(details.intended_times, [0.5, 1.0, 1.25]);
        assert_eq!(details.itls[0], [0.3, 0.3, 0.9]);
        assert_eq!(details.error_list, ["", "", "HTTP 429: full"]);
    }

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile([15, 20, 35, 40, 50], [50, 90, 95, 99])
        let stats = Stats::of(&mut [50.0, 15.0, 40.0, 20.0, 35.0]);
        assert_eq!(stats.median, 35.0);
        assert!((stats.p90 - 46.0).abs() < 1e-9 && (stats.p95 - 48.0).abs() < 1e-9);
        assert!((stats.p99 - 49.6).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn a_percentile_is_where_its_share_of_the_values_lies(mut values in proptest::collection::vec(-1e6_f64..1e6, 1..200)) {
            let stats = Stats::of(&mut values);
            let naive = |share: f64| {
                // Linear interpolation between the points (i / (n - 1), value i).
                let mut best = values[values.len() - 1];
                for (index, pair) in values.windows(2).enumerate().rev() {
                    let (from, to) = (index as f64, index as f64 + 1.0);
                    let place = share * (values.len() - 1) as f64;
                    if place <= to {
                        best = pair[0] * (to - place) + pair[1] * (place - from);
                    }
                }
                best
            };
            for (name, share) in [("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)] {
                let value = stats.named().iter().find(|(key, _)| *key == name).unwrap().1;
                prop_assert!((value - naive(share)).abs() < 1e-3, "{name}: {value} and {}", naive(share));
            }
        }

        #[test]
        fn a_histogram_has_every_value_between_its_edges(mut values in proptest::collection::vec(0.0_f64..1e7, 1..200)) {
            values.sort_unstable_by(f64::total_cmp);
            let histogram = histogram(&values);
            prop_assert_eq!(histogram.edges.len(), histogram.counts.len() + 1);
            prop_assert_eq!(histogram.counts.iter().sum::<u64>(), values.len() as u64);
            for (edges, count) in histogram.edges.windows(2).zip(&histogram.counts) {
                // A value that equals an edge may be rounded to either side.
                let (low, high) = (edges[0] * (1.0 - 1e-9), edges[1] * (1.0 + 1e-9));
                let within = values.iter().filter(|value| (low..=high).contains(&value.max(SMALLEST_EDGE))).count();
                prop_assert!(within as u64 >= *count);
            }
        }

        #[test]
        fn no_token_is_lost_on_the_timeline(
            requests in proptest::collection::vec((0_u64..5_000_000, proptest::collection::vec((1_u64..900_000, 1_u32..5), 1..8)), 1..10)
        ) {
            let records: Vec<Record> = requests.into_iter().map(|(sent, steps)| {
                let mut at = sent;
                let chunks: Vec<(u64, u32)> = steps.into_iter().map(|(gap, tokens)| { at += gap; (at, tokens) }).collect();
                record(sent, &chunks, at)
            }).collect();
            let summary = summarise(&records, &goals(&[]), &tokenizer()).unwrap();
            let count = |field: fn(&Second) -> u64| summary.timeline.iter().map(field).sum::<u64>();
            prop_assert_eq!(count(|at| at.output_tokens), summary.total_output_tokens);
            prop_assert_eq!(count(|at| at.sent), records.len() as u64);
            prop_assert_eq!(count(|at| at.finished), records.len() as u64);
        }
    }
}
