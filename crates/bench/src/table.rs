//! Prints the table of `bench_serving`, with the same rows, names and order, and additional rows.

use std::fmt::{self, Display, Write};

use crate::output::RunFile;
use crate::summary::Stats;

const WIDTH: usize = 50;

/// The table of a run.
#[derive(Debug)]
pub(crate) struct Table<'a> {
    /// The run.
    pub(crate) run: &'a RunFile,
    /// True if the route generates tokens; false for embeddings.
    pub(crate) generates: bool,
}

impl Display for Table<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{:=^WIDTH$}", " Serving Benchmark Result ")?;
        self.load(out)?;
        self.throughput(out)?;
        let latencies = &self.run.summary.latencies;
        statistics(out, "End-to-End Latency", "E2E Latency", &latencies.e2e_latency)?;
        if self.generates {
            statistics(out, "Time to First Token", "TTFT", &latencies.ttft)?;
            let title = "Time to First Token from Intended Arrival";
            statistics(out, title, "intended TTFT", &latencies.ttft_intended)?;
            let title = "Time per Output Token (excl. 1st token)";
            statistics(out, title, "TPOT", &latencies.tpot)?;
            statistics(out, "Inter-Token Latency", "ITL", &latencies.itl)?;
            row(out, "Max ITL (ms):", two(latencies.itl.max))?;
        }
        self.costs(out)?;
        self.failures(out)?;
        writeln!(out, "{:=^WIDTH$}", "")
    }
}

impl Table<'_> {
    fn load(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (settings, summary) = (&self.run.settings, &self.run.summary);
        row(out, "Backend:", &settings.backend)?;
        row(out, "Traffic request rate:", &settings.request_rate)?;
        let concurrency =
            settings.max_concurrency.map_or_else(|| "not set".into(), |most| most.to_string());
        row(out, "Max request concurrency:", concurrency)?;
        row(out, "Successful requests:", summary.completed)?;
        if summary.failed > 0 {
            row(out, "Failed requests:", summary.failed)?;
        }
        row(out, "Benchmark duration (s):", two(summary.duration))?;
        row(out, "Total input tokens:", summary.total_input_tokens)?;
        row(out, "Total input text tokens:", summary.total_input_text_tokens)?;
        if summary.total_input_vision_tokens > 0 {
            row(out, "Total input vision tokens:", summary.total_input_vision_tokens)?;
        }
        if self.generates {
            row(out, "Total generated tokens:", summary.total_output_tokens)?;
            let retokenized = summary.total_output_tokens_retokenized;
            row(out, "Total generated tokens (retokenized):", retokenized)?;
        }
        Ok(())
    }

    fn throughput(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let summary = &self.run.summary;
        row(out, "Request throughput (req/s):", two(summary.request_throughput))?;
        if let Some(goodput) = summary.request_goodput {
            row(out, "Request goodput (req/s):", two(goodput))?;
        }
        row(out, "Input token throughput (tok/s):", two(summary.input_throughput))?;
        if self.generates {
            row(out, "Output token throughput (tok/s):", two(summary.output_throughput))?;
            let peak = summary.max_output_tokens_per_s;
            row(out, "Peak output token throughput (tok/s):", two(peak))?;
        }
        row(out, "Peak concurrent requests:", summary.max_concurrent_requests)?;
        row(out, "Total token throughput (tok/s):", two(summary.total_throughput))?;
        row(out, "Concurrency:", two(summary.concurrency))?;
        if let Some(length) = self.run.accept_length {
            row(out, "Accept length:", two(length))?;
        }
        Ok(())
    }

    fn costs(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (costs, summary) = (&self.run.costs, &self.run.summary);
        title(out, "Schedule and CPU")?;
        let late = format!("Late sends (> {} ms):", costs.late_threshold_ms);
        row(out, &late, costs.late_sends)?;
        row(out, "Max lateness (ms):", two(costs.max_lateness_ms))?;
        if self.generates {
            row(out, "Chunks per token:", two(summary.chunks_per_token))?;
        }
        row(out, "Client CPU (s):", two(costs.client_cpu_seconds))?;
        if self.generates {
            row(out, "Client CPU per token (us):", two(costs.client_cpu_us_per_token))?;
        }
        let Some(processes) = &costs.server_cpu else { return Ok(()) };
        row(out, "Server CPU (s):", two(processes.iter().map(|one| one.seconds()).sum()))?;
        if let Some(per_token) = costs.server_cpu_us_per_token.filter(|_| self.generates) {
            row(out, "Server CPU per token (us):", two(per_token))?;
        }
        for process in processes.iter().filter(|process| process.seconds() > 0.0) {
            let name = format!("  {} ({}):", process.name, process.pid);
            row(out, &name, two(process.seconds()))?;
        }
        Ok(())
    }

    fn failures(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors = &self.run.summary.errors;
        if !errors.is_empty() {
            title(out, "Failures")?;
        }
        errors.iter().try_for_each(|(message, count)| writeln!(out, "{count} x {message}"))
    }
}

fn statistics(out: &mut impl Write, heading: &str, name: &str, stats: &Stats) -> fmt::Result {
    title(out, heading)?;
    let values = [
        ("Mean", stats.mean),
        ("Median", stats.median),
        ("P90", stats.p90),
        ("P95", stats.p95),
        ("P99", stats.p99),
    ];
    values.into_iter().try_for_each(|(statistic, value)| {
        row(out, &format!("{statistic} {name} (ms):"), two(value))
    })
}

fn title(out: &mut impl Write, text: &str) -> fmt::Result {
    writeln!(out, "{text:-^WIDTH$}")
}

fn row(out: &mut impl Write, name: &str, value: impl Display) -> fmt::Result {
    let value = value.to_string();
    writeln!(out, "{name:<40} {value:<10}")
}

fn two(value: f64) -> String {
    format!("{value:.2}")
}

#[cfg(test)]
mod tests {
    use crate::output::{Costs, ProcessCpu, RunFile, Settings, Summary};

    use super::*;

    fn run() -> RunFile {
        RunFile {
            settings: Settings {
                label: None,
                backend: "sglang".into(),
                base_url: "http://x".into(),
                model: "m".into(),
                dataset_name: "random".into(),
                num_prompts: 3,
                request_rate: 8.0.into(),
                burstiness: 1.0,
                max_concurrency: Some(100),
                seed: 42,
                date: "2020-01-01T00:00:00Z".into(),
                forebay_version: "0".into(),
            },
            goodput_slos: [("ttft".to_owned(), 200.0)].into(),
            summary: Summary {
                completed: 2,
                failed: 1,
                duration: 1.239,
                total_input_vision_tokens: 7,
                request_goodput: Some(1.0),
                errors: [("HTTP 429: full".to_owned(), 1)].into(),
                ..Summary::default()
            },
            accept_length: Some(2.5),
            costs: Costs {
                late_threshold_ms: 5.0,
                server_cpu: Some(vec![ProcessCpu {
                    pid: 77,
                    name: "forebay".into(),
                    user_seconds: 1.0,
                    system_seconds: 0.5,
                }]),
                ..Costs::default()
            },
            details: None,
        }
    }

    fn names(table: &str) -> Vec<&str> {
        table.lines().map(|line| line.get(..40).unwrap_or(line).trim_end()).collect()
    }

    #[test]
    fn rows_are_those_of_bench_serving_and_in_its_order() {
        let table = Table { run: &run(), generates: true }.to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "============ Serving Benchmark Result ============");
        assert_eq!(lines[1], "Backend:                                 sglang    ");
        assert_eq!(lines[2], "Traffic request rate:                    8.0       ");
        assert_eq!(lines[6], "Benchmark duration (s):                  1.24      ");
        assert!(table.contains("\n----------------End-to-End Latency----------------\n"));
        assert!(table.contains("\n-----Time per Output Token (excl. 1st token)------\n"));
        let names = names(&table);
        let known = [
            "Backend:",
            "Traffic request rate:",
            "Max request concurrency:",
            "Successful requests:",
            "Benchmark duration (s):",
            "Total input tokens:",
            "Total input text tokens:",
            "Total input vision tokens:",
            "Total generated tokens:",
            "Total generated tokens (retokenized):",
            "Request throughput (req/s):",
            "Input token throughput (tok/s):",
            "Output token throughput (tok/s):",
            "Peak output token throughput (tok/s):",
            "Peak concurrent requests:",
            "Total token throughput (tok/s):",
            "Concurrency:",
            "Accept length:",
            "Mean E2E Latency (ms):",
            "Median E2E Latency (ms):",
            "P90 E2E Latency (ms):",
            "P95 E2E Latency (ms):",
            "P99 E2E Latency (ms):",
            "Mean TTFT (ms):",
            "P99 TTFT (ms):",
            "Mean TPOT (ms):",
            "P99 TPOT (ms):",
            "Mean ITL (ms):",
            "Median ITL (ms):",
            "P95 ITL (ms):",
            "P99 ITL (ms):",
            "Max ITL (ms):",
        ];
        let places: Vec<usize> = known
            .iter()
            .map(|row| {
                names.iter().position(|name| name == row).unwrap_or_else(|| panic!("no {row}"))
            })
            .collect();
        assert!(places.is_sorted(), "{places:?}");
        let ours = [
            "Failed requests:",
            "Request goodput (req/s):",
            "Late sends (> 5 ms):",
            "  forebay (77):",
        ];
        for row in ours {
            assert!(names.contains(&row), "no {row}");
        }
        assert!(table.contains("1 x HTTP 429: full\n"));
    }

    #[test]
    fn embeddings_have_no_rows_of_tokens_that_are_generated() {
        let table = Table { run: &run(), generates: false }.to_string();
        for absent in ["TTFT", "TPOT", "ITL", "generated", "Output"] {
            assert!(!table.contains(absent), "{absent}");
        }
        assert!(table.contains("Mean E2E Latency (ms):"));
    }
}
