//! The flags of `forebay bench serve`, named as in `bench_serving` and `vllm bench serve`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value};

use crate::arrival::ArrivalArgs;
use crate::client::ServerFlags;
use crate::dataset::DatasetArgs;
use crate::summary::GOALS;

/// The flags of `forebay bench serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// The server.
    #[command(flatten)]
    pub server: ServerFlags,
    /// The requests.
    #[command(flatten)]
    pub request: RequestFlags,
    /// The dataset.
    #[command(flatten)]
    pub dataset: DatasetArgs,
    /// The arrivals.
    #[command(flatten)]
    pub arrivals: ArrivalArgs,
    /// The run.
    #[command(flatten)]
    pub run: RunFlags,
    /// The result files.
    #[command(flatten)]
    pub result: ResultFlags,
}

/// Flags about the content of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestFlags {
    /// Model [default: the first model that the server lists].
    #[arg(long)]
    pub model: Option<String>,
    /// Name of the model in requests, if it differs from MODEL.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Model, or tokenizer.json file, whose tokenizer counts tokens [default: that of the model].
    #[arg(long, value_name = "NAME")]
    pub tokenizer: Option<String>,
    /// Let answers end at an end-of-sequence token. Without the flag they end only at the requested
    /// length.
    #[arg(long)]
    pub disable_ignore_eos: bool,
    /// Request answers without streaming.
    #[arg(long)]
    pub disable_stream: bool,
    /// Request the token count in every event from OpenAI routes, for exact times if chunks contain
    /// several tokens.
    #[arg(long, conflicts_with = "disable_stream")]
    pub continuous_usage: bool,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Fields that are added to every request, or replace its fields.
    #[arg(long, alias = "extra-body", value_name = "JSON", value_parser = object)]
    pub extra_request_body: Option<Map<String, Value>>,
    /// Timeout of a request in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "21600", value_parser = seconds)]
    pub request_timeout: Duration,
}

/// Flags about how the run is carried out.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Run")]
pub struct RunFlags {
    /// Largest number of requests in flight. Without --request-rate this makes a closed loop.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Number of warm-up requests before the run: the first prompt, for at most 32 tokens.
    #[arg(long, visible_alias = "num-warmups", value_name = "N", default_value_t = 1)]
    pub warmup_requests: u32,
    /// Seed of the dataset and the arrivals.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Make the server drop its cached prefixes after the warm-up (POST /flush_cache).
    #[arg(long)]
    pub flush_cache: bool,
    /// Seconds to wait for the server before the warm-up.
    #[arg(
        long,
        visible_alias = "ready-check-timeout-sec",
        value_name = "SECONDS",
        default_value = "0",
        value_parser = seconds
    )]
    pub ready_check_timeout: Duration,
    /// Milliseconds after its planned time from which a request counts as sent late.
    #[arg(long, value_name = "MS", default_value_t = 5.0, value_parser = not_negative)]
    pub late_threshold_ms: f64,
    /// Number of threads that send requests and receive responses.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub client_threads: u16,
    /// Never let a busy client sleep before it waits for data. Chunks are timed more precisely, by
    /// up to 0.2 ms, but CPU usage is higher.
    #[arg(long)]
    pub precise: bool,
    /// Id of a process whose CPU time is measured, together with all its descendants; may be
    /// repeated.
    #[arg(long, value_name = "PID", num_args = 1.., value_delimiter = ',')]
    pub server_pid: Vec<u32>,
    /// Do not show progress.
    #[arg(long, visible_alias = "disable-tqdm")]
    pub no_progress: bool,
}

/// Flags about result files.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Result")]
pub struct ResultFlags {
    /// Limits that a request has to meet to count for goodput: ttft, ttft_intended, tpot or e2el,
    /// in milliseconds.
    #[arg(long, value_name = "NAME:MS", num_args = 1.., value_delimiter = ',')]
    pub goodput: Vec<String>,
    /// File to which the result is appended, as one line of JSON.
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Write the measurements of every request to the output file.
    #[arg(long, visible_alias = "save-detailed", requires = "output_file")]
    pub output_details: bool,
    /// Name of the run, for the file and the report.
    #[arg(long, visible_alias = "tag")]
    pub label: Option<String>,
    /// File for an HTML page of charts.
    #[arg(long, value_name = "HTML")]
    pub report: Option<PathBuf>,
    /// Result files of other runs to compare with in the report.
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "report")]
    pub compare: Vec<PathBuf>,
}

impl ResultFlags {
    /// Returns the goals by name, in milliseconds.
    ///
    /// # Errors
    /// A name is not a known goal, or its value is invalid.
    pub(crate) fn goals(&self) -> Result<BTreeMap<String, f64>> {
        self.goodput.iter().flat_map(|text| text.split_whitespace()).map(goal).collect()
    }
}

fn goal(text: &str) -> Result<(String, f64)> {
    let (name, limit) =
        text.split_once(':').with_context(|| format!("--goodput {text}: expected NAME:MS"))?;
    if !GOALS.contains(&name) {
        bail!("--goodput {text}: the names are {}", GOALS.join(", "));
    }
    let limit =
        not_negative(limit).map_err(|error| anyhow::anyhow!("--goodput {text}: {error}"))?;
    Ok((name.to_owned(), limit))
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn not_negative(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text} is no number"))?;
    if number.is_finite() && number >= 0.0 {
        Ok(number)
    } else {
        Err("expected a number that is not negative".into())
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(not_negative(text)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once("x").chain(line.split(' '))).map(|cli| cli.args)
    }

    #[test]
    fn lines_that_users_have_are_taken() {
        let lines = [
            "--backend sglang --host 127.0.0.1 --port 30000 --dataset-name random --random-input 1024 --random-output 1024 \
             --num-prompts 400 --max-concurrency 100 --random-range-ratio 1 --seed 1 --flush-cache --output-file o.jsonl",
            "--backend sglang-oai-chat --dataset-name sharegpt --dataset-path x.json --request-rate 8 --disable-tqdm \
             --warmup-requests 0 --disable-ignore-eos --extra-request-body {\"top_k\":1} --model m --tokenizer t",
            "--backend openai-chat --base-url http://x:1 --endpoint /v1/chat/completions --model m --served-model-name s \
             --num-warmups 2 --request-rate inf --burstiness 0.7 --goodput ttft:200 tpot:20 --ready-check-timeout-sec 9",
        ];
        for line in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            parse(&words.join(" ")).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn goals_are_several_values_or_one_with_commas() {
        let expected: BTreeMap<String, f64> =
            [("tpot".into(), 20.0), ("ttft".into(), 200.5)].into();
        for line in ["--goodput ttft:200.5 tpot:20", "--goodput ttft:200.5,tpot:20"] {
            assert_eq!(parse(line).unwrap().result.goals().unwrap(), expected);
        }
        for line in ["--goodput ttft", "--goodput x:3", "--goodput ttft:-1"] {
            assert!(parse(line).unwrap().result.goals().is_err(), "{line}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            "--max-concurrency 0",
            "--extra-request-body [1]",
            "--compare a.jsonl",
            "--output-details",
            "--header novalue",
            "--base-url http://x --port 3",
            "--request-timeout -1",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
