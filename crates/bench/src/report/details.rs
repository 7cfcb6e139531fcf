//! Distributions and timelines computed from the values of every request. They are for files
//! without histograms, as other clients write them with their options for details.

use serde_json::Value;

use super::run::{MOST_SECONDS, Timeline, numbers};

/// A successful request; times in seconds.
struct Request {
    /// The time of the send, on the client's clock.
    start: Option<f64>,
    ttft: f64,
    /// Times between consecutive chunks.
    gaps: Vec<f64>,
    latency: f64,
    output_tokens: f64,
}

/// The values of a metric, in milliseconds; empty if the file does not contain them.
pub(super) fn milliseconds(value: &Value, metric: &str) -> Vec<f64> {
    let requests = requests(value);
    let seconds: Vec<f64> = match metric {
        "ttft" => requests.iter().map(|request| request.ttft).collect(),
        "itl" => requests.into_iter().flat_map(|request| request.gaps).collect(),
        "e2e_latency" => requests.iter().map(|request| request.latency).collect(),
        "tpot" => requests
            .iter()
            .filter(|request| request.output_tokens > 1.0)
            .map(|request| (request.latency - request.ttft) / (request.output_tokens - 1.0))
            .collect(),
        _ => Vec::new(),
    };
    seconds.into_iter().map(|seconds| seconds * 1e3).collect()
}

/// The counts of each second; `None`: the file does not contain times of requests.
pub(super) fn timeline(value: &Value) -> Option<Timeline> {
    let requests = requests(value);
    let starts: Option<Vec<f64>> = requests.iter().map(|request| request.start).collect();
    let starts = starts?;
    let first = starts.iter().copied().min_by(f64::total_cmp)?;
    let end = |(request, start): (&Request, &f64)| start - first + request.latency;
    let last = requests.iter().zip(&starts).map(end).max_by(f64::total_cmp)?;
    if !(0.0..MOST_SECONDS as f64).contains(&last) {
        return None;
    }
    let seconds = last as usize + 1;
    let mut timeline = Timeline::default();
    for (series, _) in timeline.series_mut() {
        series.resize(seconds, 0.0);
    }
    let second = |time: f64| (time.max(0.0) as usize).min(seconds - 1);
    for (request, start) in requests.iter().zip(&starts) {
        let sent = start - first;
        let ended = sent + request.latency;
        timeline.sent[second(sent)] += 1.0;
        timeline.finished[second(ended)] += 1.0;
        for touched in second(sent)..=second(ended) {
            timeline.concurrency[touched] += 1.0;
        }
        // A chunk may contain several tokens; all chunks are assumed to have equally many.
        let tokens = request.output_tokens / (request.gaps.len() + 1) as f64;
        let mut now = sent + request.ttft;
        timeline.output_tokens[second(now)] += tokens;
        for gap in &request.gaps {
            now += gap;
            timeline.output_tokens[second(now)] += tokens;
        }
    }
    Some(timeline)
}

/// The successful requests; empty if lists are missing or have different lengths.
fn requests(value: &Value) -> Vec<Request> {
    let list = |key: &str| value.get(key).and_then(numbers);
    let (Some(ttfts), Some(tokens)) = (list("ttfts"), list("output_lens")) else {
        return Vec::new();
    };
    let gaps: Option<Vec<Vec<f64>>> = value
        .get("itls")
        .and_then(Value::as_array)
        .map(|all| all.iter().map_while(numbers).collect());
    let count = ttfts.len();
    let Some(gaps) = gaps.filter(|gaps| gaps.len() == count && tokens.len() == count) else {
        return Vec::new();
    };
    let of_each = |key: &str| list(key).filter(|list| list.len() == count);
    let (starts, latencies) = (of_each("start_times"), of_each("latencies"));
    let errors = value.get("errors").and_then(Value::as_array);
    let failed = |index: usize| {
        let text = errors.and_then(|errors| errors.get(index)).and_then(Value::as_str);
        text.is_some_and(|text| !text.is_empty())
    };
    let requests = gaps.into_iter().enumerate().map(|(index, gaps)| Request {
        start: starts.as_ref().map(|starts| starts[index]),
        ttft: ttfts[index],
        latency: match &latencies {
            Some(latencies) => latencies[index],
            None => ttfts[index] + gaps.iter().sum::<f64>(),
        },
        gaps,
        output_tokens: tokens[index],
    });
    let requests = requests.enumerate().filter(|(index, request)| {
        let times = [request.ttft, request.latency, request.output_tokens];
        !failed(*index)
            && times.iter().all(|time| *time > 0.0)
            && request.gaps.iter().all(|gap| *gap >= 0.0)
    });
    requests.map(|(_, request)| request).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file() -> Value {
        json!({
            "ttfts": [0.5, 0.0, 0.25],
            "itls": [[0.25, 0.75], [], [0.25]],
            "output_lens": [3, 0, 3],
            "start_times": [1000.0, 1000.5, 1001.5],
            "errors": ["", "refused", ""],
        })
    }

    #[test]
    fn values_are_those_of_requests_that_succeeded() {
        assert_eq!(milliseconds(&file(), "ttft"), [500.0, 250.0]);
        assert_eq!(milliseconds(&file(), "itl"), [250.0, 750.0, 250.0]);
        assert_eq!(milliseconds(&file(), "e2e_latency"), [1500.0, 500.0]);
        assert_eq!(milliseconds(&file(), "tpot"), [500.0, 125.0]);
        assert_eq!(milliseconds(&file(), "ttft_intended"), [0.0; 0]);
    }

    #[test]
    fn the_timeline_counts_every_token_and_request() {
        let timeline = timeline(&file()).unwrap();
        // The first request's tokens arrive at 0.5, 0.75 and 1.5 s; the three of the second arrive
        // in two chunks at 1.75 and 2 s.
        assert_eq!(timeline.output_tokens, [2.0, 2.5, 1.5]);
        assert_eq!(timeline.sent, [1.0, 1.0, 0.0]);
        assert_eq!(timeline.finished, [0.0, 1.0, 1.0]);
        assert_eq!(timeline.concurrency, [1.0, 2.0, 1.0]);
    }

    #[test]
    fn lists_that_do_not_fit_give_nothing() {
        for key in ["ttfts", "itls", "output_lens"] {
            for broken in [json!(null), json!([1]), json!(["a", "b", "c"]), json!(5)] {
                let mut file = file();
                file[key] = broken;
                assert!(milliseconds(&file, "ttft").is_empty(), "{file}");
                assert_eq!(timeline(&file), None);
            }
        }
        let mut file = file();
        file["start_times"] = json!([1, 2]);
        assert_eq!(timeline(&file), None);
        file["start_times"] = json!([0, 0, 1e18]);
        assert_eq!(timeline(&file), None);
    }
}
