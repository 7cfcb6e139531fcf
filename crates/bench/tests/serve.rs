//! Tests `forebay bench serve` against scripted servers.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{run, server};

fn list(run: &Value, key: &str) -> Vec<Value> {
    run[key].as_array().expect(key).clone()
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn a_plain_run_counts_what_the_server_counts() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&seen);
    let address = server(move |request, wire| {
        keep.lock().unwrap().push(request.clone());
        wire.completion(3);
        true
    });
    let (result, error) = run(
        address,
        "--num-prompts 4 --random-output-len 9 --random-range-ratio 1 --header x-test=1 --api-key k --label mine \
         --max-concurrency 1 --goodput e2el:3600000,ttft:0 --extra-request-body {\"top_k\":2}",
    );
    assert_eq!(error, None);
    for (key, expected) in [
        ("completed", json!(4)),
        ("failed", json!(0)),
        ("total_input_tokens", json!(44)),
        ("total_output_tokens", json!(12)),
        ("chunks", json!(12)),
        ("label", json!("mine")),
        ("model", json!("served")),
        ("max_concurrency", json!(1)),
        ("request_rate", json!("inf")),
        ("request_goodput", json!(0.0)),
        ("goodput_slos", json!({"e2el": 3_600_000.0, "ttft": 0.0})),
        ("errors", json!({})),
        ("output_lens", json!([3, 3, 3, 3])),
        ("generated_texts", json!([" a a a", " a a a", " a a a", " a a a"])),
    ] {
        assert_eq!(result[key], expected, "{key}");
    }
    assert!(list(&result, "itls").iter().all(|gaps| gaps.as_array().unwrap().len() == 2));
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    assert_eq!(seen[0].path, "/v1/completions");
    assert!(seen[0].headers.contains(&"x-test: 1".into()));
    assert!(seen[0].headers.contains(&"authorization: bearer k".into()));
    let body = &seen[0].body;
    assert_eq!(
        (&body["max_tokens"], &body["top_k"], &body["model"]),
        (&json!(9), &json!(2), &json!("served"))
    );
    assert_eq!(body["ignore_eos"], true);
}

#[test]
fn merged_tokens_give_a_gap_each() {
    let address = server(|_, wire| {
        wire.stream();
        wire.event(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}));
        wire.event(&json!({"choices": [{"delta": {"content": "a"}}]}));
        wire.event(&json!({"choices": [{"delta": {"content": " a a a"}}]}));
        wire.event(&json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}));
        wire.done();
        true
    });
    let (result, error) = run(address, "--backend openai-chat --num-prompts 1");
    assert_eq!(error, None);
    assert_eq!((&result["chunks"], &result["chunks_per_token"]), (&json!(2), &json!(0.25)));
    let gaps = list(&result, "itls")[0].as_array().expect("gaps").len();
    assert!((4..8).contains(&gaps), "the second chunk has most of 8 tokens, not {gaps}");
}

#[test]
fn events_may_be_cut_anywhere() {
    let address = server(|_, wire| {
        wire.stream();
        let events = "data: {\"choices\":[{\"text\":\"\\u00e9\"}]}\r\n\r\n: note\r\n\r\ndata: {\"choices\":[{\"text\":\"b\"}]}\r\n\r\n";
        for byte in events.as_bytes() {
            wire.piece(&[*byte]);
        }
        wire.done();
        true
    });
    let (result, error) =
        run(address, "--num-prompts 2 --random-output-len 2 --random-range-ratio 1");
    assert_eq!(error, None);
    assert_eq!(result["generated_texts"], json!(["éb", "éb"]));
    assert_eq!(
        result["total_output_tokens"], 4,
        "the requested number, as the server reports none"
    );
}

#[test]
fn all_text_so_far_in_each_event_of_generate() {
    let address = server(|request, wire| {
        assert_eq!(request.path, "/generate");
        wire.stream();
        for (text, count) in [("x", 1), ("xy", 2), ("xyzzz", 5)] {
            wire.event(&json!({"text": text, "meta_info": {"prompt_tokens": 7, "completion_tokens": count, "finish_reason": null}}));
        }
        wire.done();
        true
    });
    let (result, error) = run(address, "--backend sglang --num-prompts 1 --random-output-len 5");
    assert_eq!(error, None);
    assert_eq!(result["generated_texts"], json!(["xyzzz"]));
    assert_eq!(
        (&result["total_input_tokens"], &result["total_output_tokens"]),
        (&json!(7), &json!(5))
    );
    assert_eq!(list(&result, "itls")[0].as_array().unwrap().len(), 4);
}

#[test]
fn failures_are_counted_by_their_message_and_the_rest_goes_on() {
    let turn = AtomicUsize::new(0);
    let address = server(move |_, wire| match turn.fetch_add(1, Ordering::SeqCst) {
        0 => {
            wire.completion(2);
            true
        }
        1 => {
            wire.answer("429 Too Many Requests", r#"{"error": {"message": "full"}}"#);
            true
        }
        2 => {
            wire.stream();
            wire.event(&json!({"choices": [{"text": "a"}]}));
            wire.event(&json!({"error": {"message": "the hand died"}}));
            wire.done();
            true
        }
        3 => {
            wire.stream();
            wire.event(&json!({"choices": [{"text": "a"}]}));
            false
        }
        4 => {
            wire.stream();
            wire.event(&json!({"choices": [{"text": "a"}]}));
            wire.raw(b"0\r\n\r\n");
            true
        }
        _ => {
            wire.completion(1);
            true
        }
    });
    let (result, error) = run(address, "--num-prompts 6 --max-concurrency 1");
    assert_eq!(error, None);
    assert_eq!((&result["completed"], &result["failed"]), (&json!(2), &json!(4)));
    assert_eq!(result["total_output_tokens"], 3);
    let errors = list(&result, "error_list");
    assert_eq!(errors[..3], [json!(""), json!("HTTP 429: full"), json!("the hand died")]);
    assert!(errors[3].as_str().unwrap().starts_with("the connection broke"), "{}", errors[3]);
    assert_eq!(errors[4..], [json!("the stream ended without [DONE]"), json!("")]);
}

#[test]
fn a_run_without_success_fails_but_is_written() {
    let address = server(|_, wire| {
        wire.answer("500 Internal Server Error", "oops");
        true
    });
    let (result, error) = run(address, "--num-prompts 2");
    assert_eq!(error.as_deref(), Some("no request succeeded"));
    assert_eq!(result["errors"], json!({"HTTP 500: oops": 2}));
    assert_eq!(result["output_throughput"], 0.0);
}

#[test]
fn answers_in_one_piece() {
    let address = server(|request, wire| {
        assert_eq!(request.body["stream"], false);
        wire.answer(
            "200 OK",
            r#"{"choices": [{"message": {"content": "abc"}}], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}"#,
        );
        true
    });
    let (result, error) = run(address, "--backend vllm-chat --disable-stream --num-prompts 3");
    assert_eq!(error, None);
    assert_eq!((&result["completed"], &result["total_output_tokens"]), (&json!(3), &json!(9)));
    assert_eq!(result["mean_ttft_ms"], result["mean_e2e_latency_ms"]);
}

#[test]
fn embeddings_have_only_an_end() {
    let address = server(|request, wire| {
        assert_eq!(request.path, "/v1/embeddings");
        assert!(request.body["input"].is_array());
        wire.answer("200 OK", r#"{"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 6}}"#);
        true
    });
    let (result, error) =
        run(address, "--backend openai-embeddings --dataset-name embeddings --num-prompts 2");
    assert_eq!(error, None);
    assert_eq!(
        (&result["total_input_tokens"], &result["total_output_tokens"]),
        (&json!(12), &json!(0))
    );
    assert!(number(&result["mean_e2e_latency_ms"]) > 0.0);
}

#[test]
fn an_open_loop_does_not_wait_for_answers() {
    // The server responds only after all requests have arrived.
    let all = Barrier::new(16);
    let address = server(move |_, wire| {
        all.wait();
        wire.completion(1);
        true
    });
    for arrivals in ["", "--request-rate 1000 --fixed-rate"] {
        let (result, error) = run(address, &format!("--num-prompts 16 {arrivals}"));
        assert_eq!((error, &result["completed"]), (None, &json!(16)));
        assert_eq!(result["max_concurrent_requests"], 16);
    }
}

#[test]
fn a_closed_loop_keeps_its_places_full_and_no_fuller() {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (pair, peak) = (Barrier::new(3), Arc::clone(&most));
    let address = server(move |_, wire| {
        peak.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        pair.wait();
        running.fetch_sub(1, Ordering::SeqCst);
        wire.completion(1);
        true
    });
    let (result, error) = run(address, "--num-prompts 30 --max-concurrency 3");
    assert_eq!((error, &result["completed"]), (None, &json!(30)));
    assert_eq!(most.load(Ordering::SeqCst), 3);
    for (intended, sent) in list(&result, "intended_times").iter().zip(list(&result, "start_times"))
    {
        assert!(number(intended) <= number(&sent), "sent before a slot was free");
    }
}

#[test]
fn waiting_for_a_place_is_no_lateness_but_counts_from_the_intended_arrival() {
    let address = server(|_, wire| {
        wire.completion(1);
        true
    });
    let (result, error) = run(
        address,
        "--num-prompts 20 --request-rate 200 --max-concurrency 1 --late-threshold-ms 60000 --seed 3",
    );
    assert_eq!(error, None);
    assert_eq!(result["late_sends"], 0);
    let intended = list(&result, "intended_times");
    assert!(intended.windows(2).all(|pair| number(&pair[0]) <= number(&pair[1])));
    assert!(number(intended.last().unwrap()) > 0.05, "the last of 20 at 200 a second");
    for (intended, sent) in intended.iter().zip(list(&result, "start_times")) {
        assert!(number(intended) <= number(&sent));
    }
    assert!(number(&result["mean_ttft_intended_ms"]) >= number(&result["mean_ttft_ms"]));
    // With a threshold of zero, every request is late.
    let (result, _) = run(address, "--num-prompts 5 --request-rate 100 --late-threshold-ms 0");
    assert!(number(&result["late_sends"]) > 0.0);
    assert!(number(&result["max_lateness_ms"]) > 0.0);
}

#[test]
fn the_duration_is_from_the_first_send_to_the_last_end() {
    let span = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&span);
    let address = server(move |_, wire| {
        let arrived = Instant::now();
        let (first, _) = *keep.lock().unwrap().get_or_insert((arrived, arrived));
        wire.stream();
        wire.event(&json!({"choices": [{"text": "a"}]}));
        *keep.lock().unwrap() = Some((first, Instant::now()));
        wire.done();
        true
    });
    let before = Instant::now();
    let (result, _) =
        run(address, "--num-prompts 3 --max-concurrency 1 --request-rate 20 --fixed-rate");
    let whole = before.elapsed();
    let duration = Duration::from_secs_f64(number(&result["duration"]));
    let (first, last) = span.lock().unwrap().expect("a request came");
    assert!(duration <= whole, "{duration:?} of {whole:?}");
    // Recorded times are rounded down to microseconds.
    assert!(duration + Duration::from_micros(1) >= last - first);
}

#[test]
fn warm_up_is_short_and_does_not_count() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&asked);
    let address = server(move |request, wire| {
        if request.path == "/flush_cache" {
            wire.answer("200 OK", "");
            keep.lock().unwrap().push(json!("flush"));
        } else {
            keep.lock().unwrap().push(request.body["max_tokens"].clone());
            wire.completion(1);
        }
        true
    });
    let (result, error) = run(
        address,
        "--num-prompts 2 --warmup-requests 1 --flush-cache --random-output-len 50 --random-range-ratio 1 --max-concurrency 1",
    );
    assert_eq!((error, &result["completed"]), (None, &json!(2)));
    assert_eq!(*asked.lock().unwrap(), [json!(32), json!("flush"), json!(50), json!(50)]);
}

#[test]
fn a_server_that_is_not_there_or_fails_the_warm_up_ends_the_run() {
    let address = server(|_, wire| {
        wire.answer("503 Service Unavailable", "");
        true
    });
    let (result, error) = run(address, "--num-prompts 2 --warmup-requests 1");
    assert_eq!((result, error.as_deref()), (Value::Null, Some("the warm-up failed: HTTP 503")));
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (_, error) = run(gone, "--num-prompts 2");
    assert!(error.unwrap().starts_with("the server is not ready: cannot connect"));
}

#[test]
fn a_request_that_takes_too_long_fails() {
    let address = server(|_, wire| {
        wire.stream();
        wire.event(&json!({"choices": [{"text": "a"}]}));
        true
    });
    let (result, error) = run(address, "--num-prompts 1 --request-timeout 0.05");
    assert_eq!(error.as_deref(), Some("no request succeeded"));
    assert_eq!(result["errors"], json!({"no complete answer within 0.05 s": 1}));
}

#[test]
fn a_connection_that_the_server_closed_is_replaced() {
    let address = server(|_, wire| {
        wire.completion(1);
        false
    });
    let (result, error) = run(address, "--num-prompts 5 --max-concurrency 1");
    assert_eq!((error, &result["completed"]), (None, &json!(5)));
}

#[test]
fn one_server_one_client_both_cost() {
    let address = server(|_, wire| {
        wire.completion(50);
        true
    });
    let pid = std::process::id();
    let (result, error) = run(
        address,
        &format!("--num-prompts 40 --server-pid {pid} --client-threads 2 --max-concurrency 4"),
    );
    assert_eq!((error, &result["total_output_tokens"]), (None, &json!(2000)));
    assert!(number(&result["client_cpu_seconds"]) > 0.0);
    assert!(number(&result["client_cpu_us_per_token"]) > 0.0);
    assert_eq!(result["server_cpu"][0]["pid"], pid);
    assert!(result["server_cpu_us_per_token"].is_number());
}
