//! The result file of a run: one line with a JSON object is appended for each run, with the keys of
//! `bench_serving`.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::summary::Stats;

/// Requests per second: a number, `"inf"` or `"trace"`, since JSON has no infinity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Rate {
    /// A finite rate.
    PerSecond(f64),
    /// `inf`: all requests at once; `trace`: as recorded; or the two rates of a ramp.
    Named(String),
}

impl From<f64> for Rate {
    fn from(rate: f64) -> Self {
        if rate.is_finite() { Self::PerSecond(rate) } else { Self::Named("inf".into()) }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // With a decimal point even for whole numbers, as Python prints floats.
            Self::PerSecond(rate) => write!(out, "{rate:?}"),
            Self::Named(name) => out.write_str(name),
        }
    }
}

/// CPU time of one server process over the measured window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessCpu {
    /// The id of the process.
    pub pid: u32,
    /// The name of the process.
    pub name: String,
    /// Seconds in user mode, including those of exited child processes.
    pub user_seconds: f64,
    /// Seconds in the kernel, including those of exited child processes.
    pub system_seconds: f64,
}

impl ProcessCpu {
    /// The sum of the seconds in user mode and in the kernel.
    pub fn seconds(&self) -> f64 {
        self.user_seconds + self.system_seconds
    }
}

/// The counts of one second of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Second {
    /// Seconds since the first send, rounded down.
    pub second: u64,
    /// Tokens that arrived in this second.
    pub output_tokens: u64,
    /// Requests that were in flight at any time in this second.
    pub concurrency: u64,
    /// Requests that were sent in this second.
    pub sent: u64,
    /// Requests that finished or failed in this second.
    pub finished: u64,
    /// Requests that failed in this second.
    pub failed: u64,
}

/// A histogram: counts of values between consecutive edges.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Histogram {
    /// The edges, evenly spaced on a logarithmic scale with 20 edges per factor of ten. There is
    /// one more edge than counts.
    pub edges: Vec<f64>,
    /// The number of values from each edge up to the next.
    pub counts: Vec<u64>,
}

/// The distributions of a run, in milliseconds, with keys such as `p99_ttft_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Latencies {
    /// The time from sending the request to the end of the response.
    pub e2e_latency: Stats,
    /// The time from sending the request to the first token.
    pub ttft: Stats,
    /// The time from the intended arrival of the request to the first token.
    pub ttft_intended: Stats,
    /// Time per output token after the first.
    pub tpot: Stats,
    /// Gaps between tokens.
    pub itl: Stats,
}

impl Latencies {
    fn named(&self) -> [(&'static str, Stats); 5] {
        [
            ("e2e_latency", self.e2e_latency),
            ("ttft", self.ttft),
            ("ttft_intended", self.ttft_intended),
            ("tpot", self.tpot),
            ("itl", self.itl),
        ]
    }

    fn of_mut(&mut self, name: &str) -> Option<&mut Stats> {
        match name {
            "e2e_latency" => Some(&mut self.e2e_latency),
            "ttft" => Some(&mut self.ttft),
            "ttft_intended" => Some(&mut self.ttft_intended),
            "tpot" => Some(&mut self.tpot),
            "itl" => Some(&mut self.itl),
            _ => None,
        }
    }
}

impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, stats) in self.named() {
            for (statistic, value) in stats.named() {
                map.serialize_entry(&format!("{statistic}_{name}_ms"), &value)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Latencies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Latencies;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("keys such as p99_ttft_ms")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Latencies, A::Error> {
                let mut latencies = Latencies::default();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    let place = key.strip_suffix("_ms").and_then(|key| {
                        let (statistic, name) = key.split_once('_')?;
                        latencies.of_mut(name)?.of_mut(statistic)
                    });
                    if let (Some(place), Some(value)) = (place, value.as_f64()) {
                        *place = value;
                    }
                }
                Ok(latencies)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// The settings of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The label that the user gave the run.
    pub label: Option<String>,
    /// The kind of server.
    pub backend: String,
    /// The address of the server.
    pub base_url: String,
    /// The requested model.
    pub model: String,
    /// The dataset.
    pub dataset_name: String,
    /// The planned number of requests.
    pub num_prompts: u64,
    /// The planned rate of arrivals.
    pub request_rate: Rate,
    /// The shape parameter of the distribution of gaps between requests.
    pub burstiness: f64,
    /// The largest number of requests in flight.
    pub max_concurrency: Option<u64>,
    /// Seed of the dataset and the arrivals.
    pub seed: u64,
    /// When the run ended, in RFC 3339 format.
    pub date: String,
    /// Version of this program.
    pub forebay_version: String,
}

/// The measurements of a run's requests. Times are in seconds unless the name contains a unit.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// The time from the first request to the end of the last response.
    pub duration: f64,
    /// Requests that succeeded.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Prompt tokens of successful requests.
    pub total_input_tokens: u64,
    /// The number of input tokens that encode text.
    pub total_input_text_tokens: u64,
    /// The number of input tokens that encode images.
    pub total_input_vision_tokens: u64,
    /// Generated tokens, by the server's count.
    pub total_output_tokens: u64,
    /// Tokens of the generated text, counted by the client's tokenizer.
    pub total_output_tokens_retokenized: u64,
    /// Requests per second.
    pub request_throughput: f64,
    /// Prompt tokens per second.
    pub input_throughput: f64,
    /// Generated tokens per second.
    pub output_throughput: f64,
    /// Prompt and generated tokens per second.
    pub total_throughput: f64,
    /// The largest number of generated tokens in one second.
    pub max_output_tokens_per_s: f64,
    /// The largest number of requests in flight within one second.
    pub max_concurrent_requests: u64,
    /// The mean number of requests in flight.
    pub concurrency: f64,
    /// Requests per second that met the goals; `None`: no goals were set.
    pub request_goodput: Option<f64>,
    /// The distributions.
    #[serde(flatten)]
    pub latencies: Latencies,
    /// The number of chunks with text.
    pub chunks: u64,
    /// The number of chunks per generated token.
    pub chunks_per_token: f64,
    /// The number of occurrences of each error message.
    pub errors: BTreeMap<String, u64>,
    /// The counts of each second of the run.
    pub timeline: Vec<Second>,
    /// The histograms of `ttft_ms`, `ttft_intended_ms`, `tpot_ms`, `itl_ms` and `e2e_latency_ms`.
    pub histograms: BTreeMap<String, Histogram>,
}

/// The client's lateness, and the CPU time of client and server.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Costs {
    /// Requests that were sent later than planned by more than the threshold, although no
    /// concurrency limit delayed them.
    pub late_sends: u64,
    /// The threshold for late sends, in milliseconds.
    pub late_threshold_ms: f64,
    /// The largest delay of a send, in milliseconds.
    pub max_lateness_ms: f64,
    /// CPU time of this client over the measured window.
    pub client_cpu_seconds: f64,
    /// The client's CPU time per generated token, in microseconds.
    pub client_cpu_us_per_token: f64,
    /// CPU time of the server's processes over the measured window; `None`: not requested.
    pub server_cpu: Option<Vec<ProcessCpu>>,
    /// The server's CPU time per generated token, in microseconds.
    pub server_cpu_us_per_token: Option<f64>,
}

/// All data of a run. In the file, the nested structs are one flat object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFile {
    /// The settings of the run.
    #[serde(flatten)]
    pub settings: Settings,
    /// The goals, in milliseconds.
    pub goodput_slos: BTreeMap<String, f64>,
    /// The measurements of the run's requests.
    #[serde(flatten)]
    pub summary: Summary,
    /// Generated tokens per step of speculative decoding, if the server reports them.
    pub accept_length: Option<f64>,
    /// The client's lateness, and CPU times.
    #[serde(flatten)]
    pub costs: Costs,
    /// The data of every request, with `--output-details`.
    #[serde(flatten)]
    pub details: Option<Details>,
}

/// All requests of a run, in dataset order. Failed requests are included, interrupted ones are not.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Details {
    /// The number of prompt tokens of each request.
    pub input_lens: Vec<u32>,
    /// The number of generated tokens of each request.
    pub output_lens: Vec<u32>,
    /// The times from sending a request to its first token; 0 if there was no token.
    pub ttfts: Vec<f64>,
    /// Gaps between tokens.
    pub itls: Vec<Vec<f64>>,
    /// The times at which the requests were sent, relative to the start of the run.
    pub start_times: Vec<f64>,
    /// The intended arrival times, relative to the start of the run.
    pub intended_times: Vec<f64>,
    /// The times from the send to the end of the response.
    pub latencies: Vec<f64>,
    /// Generated texts.
    pub generated_texts: Vec<String>,
    /// The error messages; empty for a successful request.
    pub error_list: Vec<String>,
}

impl RunFile {
    /// Appends the run to a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&self, path: &Path) -> Result<()> {
        let mut line = serde_json::to_vec(self).context("the run does not fit in JSON")?;
        line.push(b'\n');
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(&line))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(details: Option<Details>) -> RunFile {
        let stats =
            Stats { mean: 1.0, median: 2.0, std: 3.0, p90: 4.0, p95: 5.0, p99: 6.0, max: 7.0 };
        RunFile {
            settings: Settings {
                label: None,
                backend: "openai".into(),
                base_url: "http://x".into(),
                model: "m".into(),
                dataset_name: "random".into(),
                num_prompts: 3,
                request_rate: f64::INFINITY.into(),
                burstiness: 1.0,
                max_concurrency: None,
                seed: 42,
                date: "2020-01-01T00:00:00Z".into(),
                forebay_version: "0".into(),
            },
            goodput_slos: [("ttft".to_owned(), 200.0)].into(),
            summary: Summary {
                latencies: Latencies { e2e_latency: stats, itl: stats, ..Latencies::default() },
                timeline: vec![Second::default()],
                ..Summary::default()
            },
            accept_length: None,
            costs: Costs::default(),
            details,
        }
    }

    #[test]
    fn the_file_is_flat_and_read_back() {
        for run in [run(None), run(Some(Details { input_lens: vec![1], ..Details::default() }))] {
            let value = serde_json::to_value(&run).unwrap();
            assert_eq!(value["p99_e2e_latency_ms"], 6.0);
            assert_eq!(value["std_itl_ms"], 3.0);
            assert_eq!(value["request_rate"], "inf");
            assert_eq!(value["max_concurrency"], json!(null));
            assert_eq!(value["server_cpu"], json!(null));
            assert_eq!(value.get("input_lens").is_some(), run.details.is_some());
            assert_eq!(serde_json::from_value::<RunFile>(value).unwrap(), run);
        }
    }

    #[test]
    fn rates_look_as_python_shows_them() {
        assert_eq!(Rate::from(8.0).to_string(), "8.0");
        assert_eq!(Rate::from(f64::INFINITY).to_string(), "inf");
        assert_eq!(serde_json::to_value(Rate::from(2.5)).unwrap(), json!(2.5));
    }
}
