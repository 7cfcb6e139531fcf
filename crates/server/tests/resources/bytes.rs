//! Bytes that are allocated for a request.

use std::sync::Arc;

use forebay_api::ROUTES;
use forebay_api::limits::{
    BIASES, Bound, CHOICES, INPUTS, LOGPROBS, PROMPTS, STOP_BYTES, STOP_IDS, VALUES,
};
use forebay_engine::Request;
use forebay_server::PoolingTask;
use serde_json::{Value, json};

use crate::cases::{Case, cases, values};
use crate::counting::{mark, peak};
use crate::fake::{Event, TestServer};
use crate::{SLACK, alone, charged};

/// Just below the maximum size of a body.
const LARGE: usize = (4 << 20) - 1024;

/// Returns the peak of the bytes that the server allocated for a request, the status, and the
/// response.
async fn cost(server: &TestServer, route: &str, body: String) -> (usize, u16, String) {
    let start = mark();
    let (status, answer) = server.open(route, body).await.read().await;
    let answer = String::from_utf8(answer).unwrap();
    (peak(start), status, answer)
}

/// How the server processes a value of the right type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The value is kept, or converted to something of its size.
    Kept,
    /// The value becomes tokens.
    Tokenised,
    /// The value is compiled, by a thread that only compiles.
    Compiled,
}

fn fate(case: &Case) -> Fate {
    let forms = ["choice", "guided_choice"];
    let last = case.param.rsplit('.').next();
    match case.bound {
        Bound::Form(_) => Fate::Compiled,
        _ if last.is_some_and(|name| forms.contains(&name)) => Fate::Compiled,
        _ if is_tokenised(case) => Fate::Tokenised,
        _ => Fate::Kept,
    }
}

/// True if a value becomes text for the tokenizer.
fn is_tokenised(case: &Case) -> bool {
    let is_prompt = matches!(
        case.bound,
        Bound::Prompt
            | Bound::Prompts(_)
            | Bound::Documents(..)
            | Bound::Content(_)
            | Bound::Messages(..)
    );
    let is_text =
        case.param.starts_with("text_") || case.route == "/tokenize" && case.param == "prompt";
    is_prompt || is_text
}

async fn server_of(route: &str) -> TestServer {
    match route {
        "/v1/embeddings" => TestServer::pooling(PoolingTask::Embed, true).await,
        "/classify" => TestServer::pooling(PoolingTask::Classify, true).await,
        "/rerank" | "/score" => TestServer::pooling(PoolingTask::Score, true).await,
        _ => TestServer::scripted("a").await,
    }
}

async fn every_value(wanted: Fate, bytes: usize, limit: impl Fn(usize) -> usize) {
    let _alone = alone().await;
    let values = values(bytes);
    let (mut failed, mut worst) = (Vec::new(), 0.0_f64);
    // Keep the used servers: the bytes that they free would be missing in the next measurement.
    let mut servers: Vec<(&str, TestServer)> = Vec::new();
    for case in cases().into_iter().filter(|case| fate(case) == wanted) {
        if servers.last().is_none_or(|(route, _)| *route != case.route) {
            servers.push((case.route, server_of(case.route).await));
        }
        let Some((_, server)) = servers.last_mut() else { unreachable!("it was just started") };
        for (shape, value) in &values {
            let body = case.body(value);
            let length = body.len();
            let (bytes, status, answer) = cost(server, case.route, body).await;
            while server.try_event().is_some() {}
            worst = worst.max(bytes as f64 / length as f64);
            let at = format!("{} {} as {shape}", case.route, case.param);
            if bytes > limit(length) + SLACK {
                failed.push(format!("{at}: {bytes} bytes for {length}"));
            }
            if !matches!(status, 200 | 400) || answer.len() > 2048 && status != 200 {
                failed.push(format!("{at}: {status} {}", &answer[..answer.len().min(200)]));
            }
        }
    }
    println!("at most {worst:.1} bytes a byte");
    assert!(failed.is_empty(), "{} of them:\n{}", failed.len(), failed.join("\n"));
}

#[tokio::test]
async fn a_large_value_of_any_parameter_takes_four_times_its_bytes() {
    every_value(Fate::Kept, 1 << 20, |body| 4 * body).await;
}

#[tokio::test]
async fn a_smaller_value_of_any_parameter_does_too() {
    every_value(Fate::Kept, 100_000, |body| 4 * body).await;
}

#[tokio::test]
async fn a_value_that_is_tokenised_takes_160_times_its_bytes() {
    every_value(Fate::Tokenised, 100_000, |body| 160 * body).await;
}

/// Grammars are compiled one at a time, so the number of requests does not multiply these bytes.
#[tokio::test]
async fn a_form_takes_a_bounded_number_of_bytes_to_compile() {
    for bytes in [30_000, 250_000, 1 << 20] {
        every_value(Fate::Compiled, bytes, |body| 4 * body + (24 << 20)).await;
    }
}

/// A prompt is rejected before tokenisation if it has more bytes than any prompt that fits the
/// context.
#[tokio::test]
async fn a_text_that_cannot_fit_is_not_tokenised() {
    let _alone = alone().await;
    let text = "a".repeat(LARGE);
    for (route, body) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]})),
        ("/v1/completions", json!({"prompt": text})),
        ("/generate", json!({"text": text})),
        ("/v1/embeddings", json!({"input": text})),
    ] {
        let server = server_of(route).await;
        let body = body.to_string();
        let length = body.len();
        let (bytes, status, answer) = cost(&server, route, body).await;
        assert_eq!(status, 400, "{answer}");
        assert!(bytes <= 4 * length + SLACK, "{route}: {bytes} bytes for {length}");
    }
}

/// Routes whose bodies have separate limits. A file is written to the disk as it arrives, and a
/// request for a batch is small. A decode server's request for a prefill has the limits of the
/// original request.
const APART: [&str; 16] = [
    "/destroy_weights_update_group",
    "/get_weights_by_name",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/pause_generation",
    "/pd/prefill",
    "/replicas/{replica}/role",
    "/unload_lora_adapter",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/v1/batches",
    "/v1/files",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
];

/// A route that is missing in the table would have no limits and no test cases.
#[tokio::test]
async fn every_route_with_a_body_is_in_the_table() {
    let _alone = alone().await;
    let document = TestServer::scripted("a").await.get_json("/openapi.json").await.1;
    let paths = document["paths"].as_object().unwrap().iter();
    let with_body = paths.filter(|(_, methods)| !methods["post"]["requestBody"].is_null());
    let mut documented: Vec<&str> = with_body.map(|(path, _)| path.as_str()).collect();
    let listed = ROUTES.iter().map(|route| route.path).chain(APART);
    let mut listed: Vec<&str> = listed.collect();
    documented.sort_unstable();
    listed.sort_unstable();
    assert_eq!(documented, listed);
}

/// Takes the requests that the engine has received.
fn submitted(server: &mut TestServer) -> Vec<Request> {
    let mut requests = Vec::new();
    while let Some(event) = server.try_event() {
        if let Event::Submit(request) = event {
            requests.push(request.request);
        }
    }
    requests
}

/// The maximum number of choices, with one parameter at its limit. Each choice is cheap, because
/// all choices share equal parameters.
#[tokio::test]
async fn choices_share_what_is_the_same() {
    let _alone = alone().await;
    let ids: Vec<usize> = (10..10 + STOP_IDS).collect();
    let biases: serde_json::Map<_, _> = (0..BIASES).map(|id| (id.to_string(), json!(1))).collect();
    let stop = vec!["s".repeat(STOP_BYTES / 16); 16];
    let prompt: Vec<i32> = (0..40).map(|id| 10 + id % 7).collect();
    let mut servers = Vec::new();
    for (name, value) in [
        ("stop_token_ids", json!(ids)),
        ("logit_bias", json!(biases)),
        ("allowed_token_ids", json!(ids)),
        ("stop", json!(stop)),
        ("routing_key", json!("k".repeat(512))),
    ] {
        let batch = json!({"prompt": vec![&prompt; PROMPTS], "n": 4, "max_tokens": 1, name: value});
        let chat = json!({
            "messages": [{"role": "user", "content": "a"}], "n": CHOICES, "max_tokens": 1, name: value,
        });
        let sampling = json!({"n": 4, "max_new_tokens": 1, name: value});
        let native = json!({"text": vec!["a"; PROMPTS], "sampling_params": sampling});
        for (route, body, prompts, n) in [
            ("/v1/completions", batch, PROMPTS, 4),
            ("/v1/chat/completions", chat, 1, CHOICES as usize),
            ("/generate", native, PROMPTS, 4),
        ] {
            if route == "/generate" && ["routing_key", "allowed_token_ids"].contains(&name) {
                continue;
            }
            let mut server = TestServer::scripted("a").await;
            let body = body.to_string();
            let length = body.len();
            let (bytes, status, answer) = cost(&server, route, body).await;
            assert_eq!(status, 200, "{name} {route}: {answer}");
            println!("{route} {name}: {bytes} bytes for {length} and {} choices", prompts * n);
            // Each choice has entries in the queue, the egress and the mailbox, whatever its
            // parameters.
            let choices = prompts * n * 4096;
            assert!(bytes <= 4 * length + SLACK + choices, "{name} {route}: {bytes} for {length}");
            assert!(bytes <= 160 * length + SLACK, "{name} {route}: {bytes} for {length}");
            let requests = submitted(&mut server);
            assert_eq!(requests.len(), prompts * n);
            let first = &requests[0];
            for (at, request) in requests.iter().enumerate() {
                assert!(Arc::ptr_eq(&request.spec.stop_ids, &first.spec.stop_ids), "made once");
                let biases = [&request.spec.sampling.logit_bias, &first.spec.sampling.logit_bias];
                assert!(Arc::ptr_eq(biases[0], biases[1]), "made once");
                let allowed = [&request.spec.sampling.allowed, &first.spec.sampling.allowed];
                let [one, other] = allowed.map(|ids| ids.as_ref().map(Arc::as_ptr));
                assert!(
                    one == other && one.is_some() == (name == "allowed_token_ids"),
                    "made once"
                );
                let same = &requests[at / n * n];
                assert!(Arc::ptr_eq(&request.prompt, &same.prompt), "once a prompt");
                assert!(Arc::ptr_eq(&request.names, &same.names), "once a prompt");
            }
            // Keep the server: the bytes that it frees would be missing in the next measurement.
            servers.push(server);
        }
    }
}

/// Values within their limits need no more memory than a body may use.
#[tokio::test]
async fn conversations_at_their_limits() {
    let _alone = alone().await;
    let server = TestServer::scripted("a").await;
    let message = json!({"role": "user", "content": ""});
    let part = json!({"type": "text", "text": ""});
    let cases = [
        json!({"messages": vec![&message; 4096]}),
        json!({"messages": [{"role": "user", "content": vec![&part; VALUES - 10]}]}),
        json!({"messages": [message], "chat_template_kwargs": {"x": vec![0; VALUES - 10]}}),
        json!({"messages": [message], "chat_template_kwargs": {"x": vec![json!({}); VALUES - 10]}}),
        json!({"messages": [{"role": "user", "content": "", "tool_calls": vec![json!({}); VALUES - 10]}]}),
    ];
    for case in cases {
        let body = case.to_string();
        let length = body.len();
        let (bytes, status, answer) = cost(&server, "/v1/chat/completions", body).await;
        assert!(matches!(status, 200 | 400), "{status} {answer}");
        println!("{bytes} bytes for {length}: {:.60}", case.to_string());
        assert!(
            bytes <= 4 * length + SLACK,
            "{bytes} bytes for {length}: {:.80}",
            case.to_string()
        );
    }
}

/// A query is tokenised once per document, so its bytes count once per document.
#[tokio::test]
async fn a_long_query_does_not_go_with_many_documents() {
    let _alone = alone().await;
    let server = TestServer::pooling(PoolingTask::Score, true).await;
    let body = json!({"query": "q".repeat(9000), "documents": vec!["a"; INPUTS]}).to_string();
    let length = body.len();
    let (bytes, status, answer) = cost(&server, "/rerank", body).await;
    assert_eq!((status, answer.contains("all pairs have")), (400, true), "{answer}");
    assert!(bytes <= 4 * length + SLACK, "{bytes} bytes for {length}");
}

/// The echoed prompt text is in memory only once for all choices, until the response is written.
#[tokio::test]
async fn a_prompt_is_echoed_from_one_place() {
    let _alone = alone().await;
    let mut server = TestServer::driven().await;
    let prompt = vec![10; 40];
    let body =
        json!({"prompt": prompt, "echo": true, "n": CHOICES, "stream": true, "max_tokens": 4});
    let start = mark();
    let pending = server.open("/v1/completions", body.to_string()).await;
    for _ in 0..CHOICES {
        server.submitted().await;
    }
    let bytes = peak(start);
    assert!(bytes <= SLACK, "{bytes} bytes");
    drop(pending);
}

/// A request that does not fit the budget is rejected at once. Its charge is released however the
/// request finishes.
#[tokio::test]
async fn the_budget_is_kept_and_given_back() {
    let _alone = alone().await;
    const BUDGET: usize = 8 << 20;
    let mut server =
        TestServer::start(None, |config| config.max_request_bytes_in_flight = BUDGET).await;
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "n": CHOICES, "max_tokens": 9,
        "logprobs": true, "top_logprobs": LOGPROBS, "stream": true,
    });
    let start = mark();
    let (mut pending, mut refused) = (Vec::new(), 0);
    for _ in 0..20 {
        let one = server.open("/v1/chat/completions", body.to_string()).await;
        match one.response.status().as_u16() {
            200 => pending.push(one),
            429 => {
                refused += 1;
                assert!(one.header("retry-after").is_some());
                let answer: Value = serde_json::from_slice(&one.read().await.1).unwrap();
                assert_eq!(answer["error"]["type"], "rate_limit_error");
                assert!(
                    answer["error"]["message"].as_str().unwrap().contains("--max-request-bytes")
                );
            }
            other => panic!("{other}"),
        }
    }
    assert!(!pending.is_empty() && refused > 0, "{} and {refused}", pending.len());
    assert!(peak(start) <= BUDGET + SLACK, "{} bytes", peak(start));
    let charged_now = charged(&server).await;
    assert!(charged_now > 0 && charged_now <= BUDGET);
    // The charge of clients that disconnect is released.
    let choices = pending.len() * CHOICES as usize;
    drop(pending);
    let mut aborted = 0;
    while aborted < choices {
        aborted += usize::from(matches!(server.event().await, Event::Abort(_)));
    }
    loop {
        if charged(&server).await == 0 {
            break;
        }
        tokio::task::yield_now().await;
    }
    // A large request is rejected by the size of its body, before the body is read.
    let large = json!({"messages": [{"role": "user", "content": "a".repeat(3 << 20)}]}).to_string();
    let (status, answer) = server.post_bytes("/v1/chat/completions", large).await;
    assert_eq!((status, &answer["error"]["code"]), (413, &json!("request_too_large")), "{answer}");
}
