//! The data of a run for a page: values by name, histograms, timeline, processes and errors.

use serde_json::{Map, Value};

use super::details;
use super::histogram::Histogram;

/// The result of a run: the object that `forebay bench serve --output-file`, `bench_serving` or
/// `vllm bench serve` writes.
#[derive(Debug, Clone)]
pub(super) struct Run {
    source: String,
    value: Value,
}

/// Other clients' names for our keys, as (our key, their name).
const ALIASES: [(&str, &str); 8] = [
    ("label", "tag"),
    ("model", "model_id"),
    ("model", "tokenizer_id"),
    ("backend", "endpoint_type"),
    ("total_throughput", "total_token_throughput"),
    ("random_input_len", "input_len"),
    ("random_output_len", "output_len"),
    ("dataset_name", "dataset"),
];

/// The values of each series for every second of a run, from its start.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Timeline {
    /// Output tokens that arrived in the second.
    pub(super) output_tokens: Vec<f64>,
    /// Requests in flight in the second.
    pub(super) concurrency: Vec<f64>,
    /// Requests sent in the second.
    pub(super) sent: Vec<f64>,
    /// Requests that ended in the second.
    pub(super) finished: Vec<f64>,
    /// Requests that failed in the second.
    pub(super) failed: Vec<f64>,
}

/// The CPU time of one process during a run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Process {
    /// The name and id of the process.
    pub(super) name: String,
    /// Seconds in user mode; for the client, all CPU seconds.
    pub(super) user: f64,
    /// Seconds in the kernel.
    pub(super) system: f64,
}

impl Run {
    /// Creates a run from its result `value`. Without a label in the result, its name is `source`.
    pub(super) fn new(source: impl Into<String>, value: Value) -> Self {
        Self { source: source.into(), value }
    }

    /// The source of the run: a file, or the run that has just finished.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// True if the value is the result of a serving benchmark.
    pub(super) fn is_result(&self) -> bool {
        self.number("output_throughput").is_some()
    }

    /// True if Forebay's own client wrote the result.
    pub(super) fn is_ours(&self) -> bool {
        self.get("forebay_version").is_some()
    }

    /// The label of the run; if there is none, its source.
    pub(super) fn label(&self) -> &str {
        match self.get("label").and_then(Value::as_str) {
            Some(label) if !label.trim().is_empty() => label,
            _ => &self.source,
        }
    }

    /// The value for `key`, under any of its names; null counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let others = ALIASES.iter().filter(|(name, _)| *name == key).map(|(_, alias)| *alias);
        let renamed = key.replace("e2e_latency_ms", "e2el_ms");
        std::iter::once(key)
            .chain(others)
            .chain((renamed != key).then_some(renamed.as_str()))
            .find_map(|name| self.value.get(name).filter(|value| !value.is_null()))
    }

    /// The value for `key`, if it is a number.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    /// The value for `key`, if it is a number above zero.
    pub(super) fn positive(&self, key: &str) -> Option<f64> {
        self.number(key).filter(|&number| number > 0.0)
    }

    /// A setting as text. Null becomes "none"; `None`: the setting is missing.
    pub(super) fn setting(&self, key: &str) -> Option<String> {
        match self.get(key) {
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Object(map)) => Some(pairs(map)),
            Some(value) => Some(value.to_string()),
            None => self.value.get(key).map(|_| "none".to_owned()),
        }
    }

    /// The distribution of a metric ("ttft", "itl", ...): the file's histogram, or a histogram
    /// computed from the values of all requests if the file contains them.
    pub(super) fn histogram(&self, metric: &str) -> Option<Histogram> {
        let stored = self.value.get("histograms").and_then(|all| all.get(format!("{metric}_ms")));
        let mut histogram = match stored {
            Some(stored) => {
                let edges = numbers(stored.get("edges")?)?;
                Histogram::new(edges, &numbers(stored.get("counts")?)?)?
            }
            None => Histogram::of(&details::milliseconds(&self.value, metric))?,
        };
        for (statistic, share) in SHARES {
            if let Some(value) = self.positive(&format!("{statistic}_{metric}_ms")) {
                histogram.refine(value, share);
            }
        }
        Some(histogram)
    }

    /// The timeline of the run; `None`: the file contains no data for one.
    pub(super) fn timeline(&self) -> Option<Timeline> {
        let Some(rows) = self.value.get("timeline").and_then(Value::as_array) else {
            return details::timeline(&self.value);
        };
        let mut timeline = Timeline::default();
        for row in rows {
            // Nothing happened in a second that has no row.
            let second = row.get("second")?.as_u64().filter(|&second| second < MOST_SECONDS)?;
            for (series, key) in timeline.series_mut() {
                series.resize(series.len().max(second as usize + 1), 0.0);
                series[second as usize] = row.get(key).and_then(Value::as_f64).unwrap_or(0.0);
            }
        }
        (!timeline.output_tokens.is_empty()).then_some(timeline)
    }

    /// The server's processes whose CPU time is known, largest first.
    pub(super) fn server_processes(&self) -> Vec<Process> {
        let rows = self.value.get("server_cpu").and_then(Value::as_array);
        let number = |row: &Value, key| row.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let mut processes: Vec<Process> = rows
            .into_iter()
            .flatten()
            .map(|row| {
                let name = row.get("name").and_then(Value::as_str).unwrap_or("process");
                let pid = row.get("pid").and_then(Value::as_u64);
                Process {
                    name: pid.map_or(name.to_owned(), |pid| format!("{name} ({pid})")),
                    user: number(row, "user_seconds"),
                    system: number(row, "system_seconds"),
                }
            })
            .collect();
        processes.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
        processes
    }

    /// The load generator; `None`: its CPU time is unknown.
    pub(super) fn client_process(&self) -> Option<Process> {
        let user = self.number("client_cpu_seconds")?;
        Some(Process { name: "load generator".to_owned(), user, system: 0.0 })
    }

    /// The errors with their counts, the most frequent first.
    pub(super) fn errors(&self) -> Vec<(String, u64)> {
        let mut errors: Vec<(String, u64)> = Vec::new();
        match self.value.get("errors") {
            Some(Value::Object(map)) => {
                errors.extend(
                    map.iter().map(|(text, count)| (text.clone(), count.as_u64().unwrap_or(1))),
                );
            }
            // Other clients store one text per request, which is empty if the request succeeded.
            Some(Value::Array(list)) => {
                for text in list.iter().filter_map(Value::as_str).filter(|text| !text.is_empty()) {
                    match errors.iter_mut().find(|(known, _)| known == text) {
                        Some((_, count)) => *count += 1,
                        None => errors.push((text.to_owned(), 1)),
                    }
                }
            }
            _ => {}
        }
        errors.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        errors
    }
}

/// The keys of percentiles, each with the share of values below it.
const SHARES: [(&str, f64); 5] =
    [("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)];

/// The largest number of seconds in a timeline: a day. The limit prevents that a wrong number in a
/// file exhausts the memory.
pub(super) const MOST_SECONDS: u64 = 24 * 3600;

impl Timeline {
    /// Each series, with its key in a result file.
    pub(super) fn series_mut(&mut self) -> [(&mut Vec<f64>, &'static str); 5] {
        [
            (&mut self.output_tokens, "output_tokens"),
            (&mut self.concurrency, "concurrency"),
            (&mut self.sent, "sent"),
            (&mut self.finished, "finished"),
            (&mut self.failed, "failed"),
        ]
    }
}

impl Process {
    /// The seconds in user mode and in the kernel.
    pub(super) fn seconds(&self) -> f64 {
        self.user + self.system
    }
}

/// The numbers of a list; `None`: a value is not a number.
pub(super) fn numbers(list: &Value) -> Option<Vec<f64>> {
    list.as_array()?.iter().map(Value::as_f64).collect()
}

/// Formats `{"ttft": 200, "tpot": 20}` as "ttft 200, tpot 20".
fn pairs(map: &Map<String, Value>) -> String {
    if map.is_empty() {
        return "none".to_owned();
    }
    let pairs: Vec<String> = map.iter().map(|(key, value)| format!("{key} {value}")).collect();
    pairs.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_other_clients_are_known() {
        let run = Run::new(
            "x",
            json!({"mean_e2el_ms": 5, "total_token_throughput": 7, "model_id": "m",
            "label": null, "max_concurrency": null, "goodput_slos": {}}),
        );
        assert_eq!(run.number("mean_e2e_latency_ms"), Some(5.0));
        assert_eq!(run.number("total_throughput"), Some(7.0));
        assert_eq!(run.setting("model").as_deref(), Some("m"));
        assert_eq!(run.setting("max_concurrency").as_deref(), Some("none"));
        assert_eq!(run.setting("goodput_slos").as_deref(), Some("none"));
        assert_eq!(run.setting("seed"), None);
        assert_eq!(run.label(), "x");
    }

    #[test]
    fn stored_histograms_are_cut_to_where_values_are() {
        let stored = json!({"histograms": {"ttft_ms": {"edges": [0.1, 1, 10, 100, 1000], "counts": [0, 1, 3, 0]}}});
        let histogram = Run::new("x", stored).histogram("ttft").unwrap();
        assert_eq!((histogram.low(), histogram.high()), (1.0, 100.0));
        assert_eq!(histogram.below(10.0), 0.25);
        assert!((histogram.below(10f64.powf(0.5)) - 0.125).abs() < 1e-12);
        assert_eq!((histogram.below(0.5), histogram.below(500.0)), (0.0, 1.0));
    }

    #[test]
    fn what_is_no_histogram_is_left_out() {
        for (edges, counts) in [
            (json!([1, 2]), json!([])),
            (json!([1, 2, 2]), json!([1, 1])),
            (json!([1, 2]), json!([0])),
            (json!([-1, 2]), json!([1])),
            (json!([1, null]), json!([1])),
            (json!([1, 2]), json!([-1])),
            (json!("1"), json!([1])),
        ] {
            let value = json!({"histograms": {"itl_ms": {"edges": edges, "counts": counts}}});
            assert_eq!(Run::new("x", value.clone()).histogram("itl"), None, "{value}");
        }
        assert_eq!(Run::new("x", json!({})).histogram("itl"), None);
    }

    #[test]
    fn seconds_without_a_row_are_empty() {
        let value = json!({"timeline": [{"second": 0, "output_tokens": 5}, {"second": 2, "output_tokens": 7, "sent": 1}]});
        let timeline = Run::new("x", value).timeline().unwrap();
        assert_eq!(timeline.output_tokens, [5.0, 0.0, 7.0]);
        assert_eq!(timeline.sent, [0.0, 0.0, 1.0]);
    }

    #[test]
    fn a_timeline_of_nonsense_is_left_out() {
        for rows in [
            json!([]),
            json!([{}]),
            json!([{"second": -1}]),
            json!([{"second": 1e300}]),
            json!(null),
        ] {
            assert_eq!(Run::new("x", json!({"timeline": rows})).timeline(), None);
        }
        assert_eq!(Run::new("x", json!({"timeline": [{"second": u64::MAX}]})).timeline(), None);
    }

    #[test]
    fn processes_come_by_their_cpu() {
        let run = Run::new(
            "x",
            json!({"client_cpu_seconds": 9, "server_cpu": [
                {"pid": 1, "name": "a", "user_seconds": 1, "system_seconds": 1},
                {"pid": 2, "name": "b", "user_seconds": 3, "system_seconds": 0},
            ]}),
        );
        let names: Vec<String> =
            run.server_processes().into_iter().map(|process| process.name).collect();
        assert_eq!(names, ["b (2)", "a (1)"]);
        assert_eq!(run.client_process().map(|client| client.seconds()), Some(9.0));
        let nothing = Run::new("x", json!({"server_cpu": null}));
        assert_eq!((nothing.server_processes(), nothing.client_process()), (Vec::new(), None));
    }

    #[test]
    fn errors_are_counted() {
        let ours = Run::new("x", json!({"errors": {"a": 1, "b": 5}}));
        assert_eq!(ours.errors(), [("b".to_owned(), 5), ("a".to_owned(), 1)]);
        let theirs = Run::new("x", json!({"errors": ["", "b", "a", "b"]}));
        assert_eq!(theirs.errors(), [("b".to_owned(), 2), ("a".to_owned(), 1)]);
    }
}
