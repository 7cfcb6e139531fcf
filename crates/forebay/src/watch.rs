//! What an operator sees of a running server: loading, the banner, and the step log line.

use std::time::{Duration, Instant};

use forebay_engine::{Ready, Stats, Status};
use forebay_replicas::Replicas;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::sleep;
use tracing::{error, info};

use crate::dialect::ChatFacts;
use crate::model::Task;
use crate::resolve::Simulated;

const LOADING_POLL: Duration = Duration::from_millis(50);

/// Shows the progress of loading. Returns true once the hand is ready, false if it will not be.
pub(crate) async fn loading(engine: &Replicas) -> bool {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{spinner} loading {msg} {bar:30} {pos}/{len}")
    {
        bar.set_style(style);
    }
    loop {
        match engine.status() {
            Status::Starting(stage) => {
                // The hand reports its progress as "weights 120/272".
                let mut words = stage.split([' ', '/']);
                bar.set_message(words.next().unwrap_or_default().to_owned());
                let mut number = || words.next().and_then(|word| word.parse().ok());
                if let (Some(done), Some(total)) = (number(), number()) {
                    bar.set_length(total);
                    bar.set_position(done);
                }
                bar.tick();
            }
            Status::Failed(reason) => {
                bar.finish_and_clear();
                error!("the model can't be served: {reason}");
                return false;
            }
            Status::Ready | Status::Recovering(_) => {
                bar.finish_and_clear();
                return true;
            }
            Status::Draining => return false,
        }
        sleep(LOADING_POLL).await;
    }
}

/// The banner's line about weights that stay in their file's quantised blocks during computation;
/// empty if there are none.
///
/// `otherwise`: the data type in which these weights would be computed with `--quantization none`.
/// `None`: the line does not mention that flag.
pub(crate) fn blocks_line(blocks: &str, otherwise: Option<&str>) -> String {
    let hint = otherwise.map(|dtype| format!(" (--quantization none: in {dtype})"));
    match blocks {
        "" => String::new(),
        _ => format!("  Computes in the file's blocks{}: {blocks}\n", hint.unwrap_or_default()),
    }
}

/// The banner's line about layers with a sliding window; empty if there are none.
///
/// `why_one_pool`: the reason why these layers have no separate page pool.
pub(crate) fn windows_line(facts: &Ready, why_one_pool: &str) -> String {
    let &Ready { window, window_page_count: pages, page_count, .. } = facts;
    let why = if facts.one_pool.is_empty() { why_one_pool } else { &facts.one_pool };
    match (window, pages) {
        (0, _) => String::new(),
        (_, 0) => {
            format!("  Windows of {window} tokens: all layers share one pool, because {why}\n")
        }
        _ => format!(
            "  Windows of {window} tokens: {pages} pages for their layers, {page_count} for the others\n"
        ),
    }
}

/// The banner's line about speculative decoding with n-grams; empty if that is off.
pub(crate) fn drafts_line(drafts: bool) -> &'static str {
    if !drafts {
        return "";
    }
    "  Speculates with n-grams of each request's text: no token changes (--speculative-algorithm none: off)\n"
}

/// Returns the banner: the first steps for new users.
pub(crate) fn banner(
    url: &str,
    curl: &str,
    model: &str,
    task: Option<Task>,
    chat: Option<&ChatFacts>,
    simulated: Option<&Simulated>,
    hand: &str,
) -> String {
    let warning = simulated.map_or(String::new(), |sim| {
        format!(
            "\n  SIMULATED: the answers are made-up words, in the time of the profile {} ({}).\n",
            sim.profile, sim.content.device
        )
    });
    let reads = chat.map_or(String::new(), |chat| {
        let parts = [("tools", chat.tool_call_parser), ("reasoning", chat.reasoning_parser)];
        let named = parts.iter().filter_map(|(what, name)| Some(format!("{what}: {}", (*name)?)));
        let named: Vec<String> = named.collect();
        if named.is_empty() {
            return String::new();
        }
        let note = match chat.has_generic_tools() {
            true => " (the chat template shows no tools: a system message lists them)",
            false => "",
        };
        format!("  Reads {}{note}\n", named.join(", "))
    });
    let (route, question) = match task {
        None => (
            "v1/chat/completions",
            r#""stream": true, "messages": [{"role": "user", "content": "Why is the sky blue?"}]"#,
        ),
        Some(Task::Embed) => ("v1/embeddings", r#""input": "Why is the sky blue?""#),
        Some(Task::Classify) => ("classify", r#""input": "The sky is blue.""#),
        Some(Task::Score) => (
            "rerank",
            r#""query": "Why is the sky blue?", "documents": ["Light scatters.", "Grass is green."]"#,
        ),
    };
    let body = format!(r#"{{"model": "{model}", {question}}}"#);
    format!(
        "\n  Forebay serves {model} at {url}\n{hand}{reads}{warning}\n  Try it:\n\n    curl -N {curl}{url}/{route} -H 'Content-Type: application/json' \\\n      -d '{body}'\n\n  Metrics: {url}/metrics   API: {url}/openapi.json   Stop: Ctrl-C\n"
    )
}

/// Logs a line about the steps of each interval for each replica, unless nothing happened.
pub(crate) async fn step_log(engine: Replicas, interval: Duration) {
    let stats = || engine.reports().into_iter().map(|report| report.stats);
    let mut last: Vec<Stats> = stats().collect();
    let mut since = Instant::now();
    loop {
        sleep(interval).await;
        let now: Vec<Stats> = stats().collect();
        let seconds = since.elapsed().as_secs_f64();
        for (replica, (last, now)) in last.iter().zip(&now).enumerate() {
            let (is, was) = (&now.scheduler, &last.scheduler);
            if is.steps == was.steps && is.running + is.waiting == 0 {
                continue;
            }
            let line = step_line(last, now, seconds);
            match engine.count() {
                1 => info!("{line}"),
                _ => info!(replica, "{line}"),
            }
        }
        (last, since) = (now, Instant::now());
    }
}

fn step_line(last: &Stats, now: &Stats, seconds: f64) -> String {
    let share =
        |part: u64, whole: u64| if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 };
    let device = now.hand.device_us - last.hand.device_us;
    let gaps = now.hand.gap_us - last.hand.gap_us;
    let (last, now) = (&last.scheduler, &now.scheduler);
    let pages = now.pages_held + now.pages_cached + now.pages_free;
    format!(
        "Running: {} reqs, Waiting: {} reqs, KV cache usage: {:.1}%, Prefix cache hit rate: {:.1}%, \
         Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, \
         Steps: {}, Gaps between steps: {:.1}%, Preemptions: {}",
        now.running,
        now.waiting,
        share(now.pages_held as u64, pages as u64),
        share(now.prefix_hits - last.prefix_hits, now.prefix_queries - last.prefix_queries),
        (now.prompt_tokens - last.prompt_tokens) as f64 / seconds,
        (now.generated_tokens - last.generated_tokens) as f64 / seconds,
        now.steps - last.steps,
        share(gaps, device + gaps),
        now.preemptions - last.preemptions,
    )
}

#[cfg(test)]
mod tests {
    use forebay_engine::HandStats;

    use super::*;

    #[test]
    fn the_line_reports_the_interval_and_not_the_whole_life() {
        let mut last = Stats::default();
        last.scheduler.generated_tokens = 1000;
        last.scheduler.steps = 10;
        last.hand = HandStats { gap_us: 50, device_us: 50, ..HandStats::default() };
        let mut now = last;
        now.scheduler.generated_tokens = 1500;
        now.scheduler.steps = 30;
        now.scheduler.running = 3;
        now.scheduler.pages_held = 1;
        now.scheduler.pages_free = 3;
        now.hand = HandStats { gap_us: 150, device_us: 950, ..now.hand };
        let line = step_line(&last, &now, 5.0);
        for part in [
            "Running: 3 reqs",
            "generation throughput: 100.0",
            "usage: 25.0%",
            "Steps: 20",
            "between steps: 10.0%",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }
}
