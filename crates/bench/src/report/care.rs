//! Warnings for readers who compare runs.

use super::Run;
use super::axis::{percent, plain};
use super::chart::letter;

/// Settings that must be equal in runs that are compared.
const LOAD: [(&str, &str); 9] = [
    ("model", "model"),
    ("dataset_name", "dataset"),
    ("num_prompts", "number of prompts"),
    ("random_input_len", "input length"),
    ("random_output_len", "output length"),
    ("request_rate", "request rate"),
    ("burstiness", "burstiness"),
    ("max_concurrency", "max concurrency"),
    ("goodput_slos", "goodput limits"),
];

/// Runs count as having different work if the lengths of their prompts or answers differ by more
/// than this share.
const SAME_LENGTH: f64 = 0.01;
/// If more than this share of the requests was sent late, the run counts as not having followed its
/// schedule.
const KEPT: f64 = 0.01;
/// If the CPU time of the load generator is more than this share of the server's, the load
/// generator may have slowed the server down.
const LIGHT: f64 = 1.0 / 3.0;

/// The ratio of chunks to tokens below which a warning is given: times between tokens are then
/// mostly times between chunks.
const COARSE: f64 = 0.5;

/// Warnings about failures, late sends, a load generator that uses much CPU time, and runs with
/// different work.
pub(super) fn cautions(runs: &[Run]) -> Vec<String> {
    let mut cautions = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let name = format!("Run {} ({})", letter(index), run.label());
        cautions.extend(of_one(run).into_iter().map(|what| format!("{name} {what}")));
    }
    cautions.extend(differences(runs));
    cautions
}

fn of_one(run: &Run) -> Vec<String> {
    let mut what = Vec::new();
    let completed = run.number("completed").unwrap_or(0.0);
    if let Some(failed) = run.positive("failed") {
        let all = completed + failed;
        what.push(format!(
            "failed {} of {} requests; its numbers are of the others.",
            plain(failed),
            plain(all)
        ));
    }
    if run.number("completed") == Some(0.0) {
        what.push("completed no request.".to_owned());
    }
    let sends = completed + run.number("failed").unwrap_or(0.0);
    if let Some(late) = run.positive("late_sends").filter(|late| *late > sends * KEPT) {
        let worst = run
            .positive("max_lateness_ms")
            .map(|worst| format!(", the latest by {} ms", plain(worst)));
        what.push(format!(
            "did not keep its schedule: {} of requests were sent late{}.",
            percent(late / sends.max(late)),
            worst.unwrap_or_default()
        ));
    }
    let server: f64 = run.server_processes().iter().map(|process| process.seconds()).sum();
    if let Some(client) =
        run.positive("client_cpu_seconds").filter(|client| server > 0.0 && *client > server * LIGHT)
    {
        what.push(format!(
            "was measured by a load generator that used {} of the server's CPU time.",
            percent(client / server)
        ));
    }
    if let Some(chunks) = run.positive("chunks_per_token").filter(|chunks| *chunks < COARSE) {
        what.push(format!(
            "received about {} tokens in each chunk; the time between tokens of one chunk cannot be measured.",
            plain((1.0 / chunks).round())
        ));
    }
    if !run.is_ours() {
        what.push(
            "was measured by another client, whose inter-token latency may be that of chunks and not of tokens.".to_owned(),
        );
    }
    what
}

/// The settings that differ between runs. A setting that only some runs have is not compared.
fn differences(runs: &[Run]) -> Vec<String> {
    let mut differences = Vec::new();
    for (key, name) in LOAD {
        let values: Vec<(usize, String)> = runs
            .iter()
            .enumerate()
            .filter_map(|(index, run)| Some((index, comparable(run, key)?)))
            .collect();
        if values.windows(2).any(|pair| pair[0].1 != pair[1].1) {
            let values: Vec<String> = values
                .into_iter()
                .map(|(index, value)| format!("{} {value}", letter(index)))
                .collect();
            differences.push(format!("The {name} differs: {}.", values.join(", ")));
        }
    }
    for (key, name) in [("total_input_tokens", "input"), ("total_output_tokens", "output")] {
        let lengths: Vec<(usize, f64)> = runs
            .iter()
            .enumerate()
            .filter_map(|(index, run)| Some((index, run.number(key)? / run.positive("completed")?)))
            .collect();
        let lowest = lengths.iter().map(|(_, length)| *length).fold(f64::INFINITY, f64::min);
        if lengths.iter().any(|(_, length)| *length > lowest * (1.0 + SAME_LENGTH)) {
            let lengths: Vec<String> = lengths
                .iter()
                .map(|(index, length)| format!("{} {}", letter(*index), plain(*length)))
                .collect();
            differences
                .push(format!("The {name} tokens a request differ: {}.", lengths.join(", ")));
        }
    }
    differences
}

/// Formats a setting so that equal meanings give equal texts, for example 1.0 and 1.
fn comparable(run: &Run, key: &str) -> Option<String> {
    run.number(key).map(plain).or_else(|| run.setting(key))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn good() -> Value {
        json!({
            "forebay_version": "1", "model": "m", "completed": 100, "failed": 0, "late_sends": 1, "request_rate": "inf",
            "max_concurrency": null, "burstiness": 1, "total_input_tokens": 1000, "total_output_tokens": 1000,
            "client_cpu_seconds": 1, "server_cpu": [{"pid": 1, "name": "s", "user_seconds": 2, "system_seconds": 2}],
        })
    }

    fn with(key: &str, value: Value) -> Run {
        let mut run = good();
        run[key] = value;
        Run::new("x", run)
    }

    #[test]
    fn equal_runs_need_no_care() {
        let runs = [
            Run::new("a", good()),
            with("burstiness", json!(1.0)),
            with("total_output_tokens", json!(1005)),
        ];
        assert_eq!(cautions(&runs), [""; 0]);
    }

    #[test]
    fn what_spoils_a_run_is_said() {
        for (key, value, said) in [
            ("failed", json!(5), "failed 5 of 105 requests"),
            ("completed", json!(0), "completed no request"),
            ("late_sends", json!(2), "2 % of requests were sent late"),
            ("client_cpu_seconds", json!(2), "used 50 % of the server's CPU"),
            ("chunks_per_token", json!(0.05), "received about 20 tokens in each chunk"),
            ("forebay_version", json!(null), "another client"),
        ] {
            let cautions = cautions(&[with(key, value)]);
            assert!(cautions.iter().any(|caution| caution.contains(said)), "{said}: {cautions:?}");
        }
    }

    #[test]
    fn different_work_is_said() {
        for (key, value, said) in [
            ("model", json!("n"), "model differs: A m, B n."),
            ("request_rate", json!(4), "request rate differs: A inf, B 4."),
            ("max_concurrency", json!(8), "max concurrency differs: A none, B 8."),
            ("total_output_tokens", json!(2000), "output tokens a request differ: A 10, B 20."),
        ] {
            let cautions = cautions(&[Run::new("a", good()), with(key, value)]);
            assert_eq!(cautions.len(), 1, "{cautions:?}");
            assert!(cautions[0].contains(said), "{cautions:?}");
        }
        assert_eq!(
            cautions(&[Run::new("a", good()), with("model", json!(null))]).len(),
            1,
            "null counts as absent"
        );
    }
}
