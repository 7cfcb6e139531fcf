//! The rows of the comparison, in `bench_serving`'s order, and the meaning of a ratio to the first
//! run.

use super::Run;

/// Which of two values is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Better {
    /// The higher value is better.
    Higher,
    /// The lower value is better.
    Lower,
    /// Neither is better: the value describes the workload or the run.
    Neither,
}

/// A row: its label, its key in the result file, and which values are better.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// The label of the row, with its unit.
    pub(super) name: String,
    /// The key in the result file.
    pub(super) key: String,
    /// Whether higher or lower values are better.
    pub(super) better: Better,
}

/// A group of rows under one heading.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Group {
    /// The heading.
    pub(super) name: &'static str,
    /// The rows of the group; never empty.
    pub(super) rows: Vec<Row>,
}

/// A latency that is measured for every request or token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Latency {
    /// The name of the latency in keys: `mean_{key}_ms`.
    pub(super) key: &'static str,
    /// The full name of the latency.
    pub(super) name: &'static str,
    /// The things that the distribution counts, such as requests.
    pub(super) of: &'static str,
    /// An explanation of the latency in one sentence.
    pub(super) meaning: &'static str,
}

/// The latencies, in `bench_serving`'s order.
pub(super) const LATENCIES: [Latency; 5] = [
    Latency {
        key: "e2e_latency",
        name: "End-to-end latency",
        of: "requests",
        meaning: "from sending a request to the end of its answer.",
    },
    Latency {
        key: "ttft",
        name: "Time to first token, from the send",
        of: "requests",
        meaning: "from sending a request to the first text of its answer. A client that is late hides waiting here.",
    },
    Latency {
        key: "ttft_intended",
        name: "Time to first token, from the intended arrival",
        of: "requests",
        meaning: "the same, from when the schedule wanted the request to be sent: what a user would have waited.",
    },
    Latency {
        key: "tpot",
        name: "Time per output token, after the first",
        of: "requests",
        meaning: "a request's time after its first token divided by its further tokens: one value a request.",
    },
    Latency {
        key: "itl",
        name: "Inter-token latency",
        of: "tokens",
        meaning: "the time between one token and the next, of all tokens of all requests.",
    },
];

const STATISTICS: [(&str, &str); 7] = [
    ("mean", "Mean"),
    ("median", "Median"),
    ("std", "Standard deviation"),
    ("p90", "P90"),
    ("p95", "P95"),
    ("p99", "P99"),
    ("max", "Max"),
];

const WORK: [(&str, &str, Better); 17] = [
    ("completed", "Successful requests", Better::Neither),
    ("failed", "Failed requests", Better::Lower),
    ("duration", "Benchmark duration (s)", Better::Neither),
    ("total_input_tokens", "Total input tokens", Better::Neither),
    ("total_input_text_tokens", "Total input text tokens", Better::Neither),
    ("total_input_vision_tokens", "Total input vision tokens", Better::Neither),
    ("total_output_tokens", "Total generated tokens", Better::Neither),
    ("total_output_tokens_retokenized", "Total generated tokens (retokenized)", Better::Neither),
    ("request_throughput", "Request throughput (req/s)", Better::Higher),
    ("input_throughput", "Input token throughput (tok/s)", Better::Higher),
    ("output_throughput", "Output token throughput (tok/s)", Better::Higher),
    ("max_output_tokens_per_s", "Peak output token throughput (tok/s)", Better::Higher),
    ("max_concurrent_requests", "Peak concurrent requests", Better::Neither),
    ("total_throughput", "Total token throughput (tok/s)", Better::Higher),
    ("concurrency", "Concurrency", Better::Neither),
    ("accept_length", "Accept length", Better::Higher),
    ("request_goodput", "Request goodput (req/s)", Better::Higher),
];

const COSTS: [(&str, &str, Better); 7] = [
    ("server_cpu_us_per_token", "Server CPU per output token (µs)", Better::Lower),
    ("client_cpu_us_per_token", "Load generator CPU per output token (µs)", Better::Neither),
    ("client_cpu_seconds", "Load generator CPU (s)", Better::Neither),
    ("late_sends", "Late sends", Better::Neither),
    ("max_lateness_ms", "Latest send (ms)", Better::Neither),
    ("chunks", "Chunks received", Better::Neither),
    ("chunks_per_token", "Chunks per output token", Better::Neither),
];

/// All groups and rows for which at least one run has a value.
pub(super) fn groups(runs: &[Run]) -> Vec<Group> {
    let listed = |rows: &[(&str, &str, Better)]| -> Vec<Row> {
        let row = |(key, name, better): &(&str, &str, Better)| Row {
            name: (*name).to_owned(),
            key: (*key).to_owned(),
            better: *better,
        };
        rows.iter().map(row).collect()
    };
    let times = LATENCIES.map(|latency| Group {
        name: latency.name,
        rows: STATISTICS
            .iter()
            .map(|(key, name)| Row {
                name: format!("{name} (ms)"),
                key: format!("{key}_{}_ms", latency.key),
                better: if *key == "std" { Better::Neither } else { Better::Lower },
            })
            .collect(),
    });
    let mut groups = vec![Group { name: "Work and throughput", rows: listed(&WORK) }];
    groups.extend(times);
    groups.push(Group { name: "Cost and load generator", rows: listed(&COSTS) });
    for group in &mut groups {
        group.rows.retain(|row| runs.iter().any(|run| run.number(&row.key).is_some()));
    }
    groups.retain(|group| !group.rows.is_empty());
    groups
}

/// The verdict on a value, from its ratio to the first run's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Better by more than [`SAME`].
    Better,
    /// Worse by more than [`SAME`].
    Worse,
    /// Equal within [`SAME`].
    Same,
    /// Neither value is better.
    None,
}

/// Ratios that differ from one by at most this count as equal, because repeated runs differ as
/// much.
pub(super) const SAME: f64 = 0.02;

impl Verdict {
    /// The verdict on a value that is `ratio` times the first run's value.
    pub(super) fn of(ratio: f64, better: Better) -> Self {
        match better {
            Better::Neither => Self::None,
            _ if (ratio - 1.0).abs() <= SAME => Self::Same,
            Better::Higher if ratio > 1.0 => Self::Better,
            Better::Lower if ratio < 1.0 => Self::Better,
            _ => Self::Worse,
        }
    }

    /// A symbol and a word, so that readers need not see colours; empty if there is no verdict.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Self::Better => "▲ better",
            Self::Worse => "▼ worse",
            Self::Same => "≈ same",
            Self::None => "",
        }
    }

    /// The CSS class of the verdict.
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same | Self::None => "same",
        }
    }
}

/// `value` divided by the first run's value; `None`: a value is missing, or the first is zero.
pub(super) fn ratio(first: Option<f64>, value: Option<f64>) -> Option<f64> {
    let ratio = value? / first?;
    ratio.is_finite().then_some(ratio)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn verdicts_know_the_direction() {
        assert_eq!(Verdict::of(1.5, Better::Higher), Verdict::Better);
        assert_eq!(Verdict::of(1.5, Better::Lower), Verdict::Worse);
        assert_eq!(Verdict::of(0.5, Better::Lower), Verdict::Better);
        assert_eq!(Verdict::of(0.5, Better::Higher), Verdict::Worse);
        assert_eq!(Verdict::of(1.015, Better::Lower), Verdict::Same);
        assert_eq!(Verdict::of(9.0, Better::Neither), Verdict::None);
    }

    #[test]
    fn ratios_need_two_numbers() {
        assert_eq!(ratio(Some(2.0), Some(3.0)), Some(1.5));
        assert_eq!(ratio(Some(0.0), Some(3.0)), None);
        assert_eq!(ratio(Some(0.0), Some(0.0)), None);
        assert_eq!(ratio(None, Some(3.0)), None);
    }

    #[test]
    fn rows_that_no_run_has_are_left_out() {
        let runs = [
            Run::new("a", json!({"completed": 1})),
            Run::new("b", json!({"p99_itl_ms": 2, "std_itl_ms": 1})),
        ];
        let groups = groups(&runs);
        let keys: Vec<Vec<&str>> = groups
            .iter()
            .map(|group| group.rows.iter().map(|row| row.key.as_str()).collect())
            .collect();
        assert_eq!(keys, [vec!["completed"], vec!["std_itl_ms", "p99_itl_ms"]]);
        assert_eq!(groups[1].rows[0].better, Better::Neither);
        assert_eq!(groups[1].rows[1].better, Better::Lower);
    }
}
