//! A decode server, with prefill servers that respond, fail, hang or send wrong frames.

use std::sync::Arc;

use axum::http::StatusCode;
use forebay_api::peer::{
    PREFILL_CAME, PREFILL_FAILED, PREFILL_HEADER, ROUTER_HEADER, ROUTER_KEY_HEADER, RouterTag,
};
use forebay_engine::{BlockHash, Namer};
use http_body_util::Full;
use hyper::Request;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::client::Pending;
use crate::fake::{ModelKind, PAGE_BYTES, TestServer};

const KEY: &str = "key";
/// The number of tokens of a prompt: three blocks and one token.
const TOKENS: usize = 49;
const BLOCK: u32 = 1;
const END: u32 = 3;

/// How a prefill server responds to a decode server's request.
#[derive(Debug, Clone, Copy)]
enum Act {
    /// Sends the frames that the function returns for the names of the requested blocks.
    Frames(fn(&[u128]) -> Vec<u8>),
    /// Like `Frames`, but closes the connection before the end of its response.
    Break(fn(&[u128]) -> Vec<u8>),
    /// Like `Frames`, but sends the frames again and again.
    Again(fn(&[u128]) -> Vec<u8>),
    /// Responds with this error status.
    Refuse(StatusCode),
    /// Sends nothing.
    Hang,
}

/// A prefill server and the requests that it received.
struct Prefill {
    url: String,
    asked: Arc<Mutex<Vec<Value>>>,
    serving: JoinHandle<()>,
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn frame(kind: u32, name: u128, bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len() as u32;
    [&kind.to_le_bytes()[..], &length.to_le_bytes(), &name.to_le_bytes(), bytes].concat()
}

/// Returns a frame of a block with this name, whose page has `value` in each byte.
fn block(name: u128, value: u8) -> Vec<u8> {
    frame(BLOCK, name, &vec![value; PAGE_BYTES as usize + 4])
}

fn all(names: &[u128]) -> Vec<u8> {
    let blocks = names.iter().zip(1..).flat_map(|(&name, value)| block(name, value));
    blocks.chain(frame(END, 0, &[])).collect()
}

impl Prefill {
    async fn start(act: Act) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let serving = tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                // A decode server may close the connection at any time.
                tokio::spawn(answer(socket, act, Arc::clone(&seen)));
            }
        });
        Self { url, asked, serving }
    }
}

async fn answer(socket: TcpStream, act: Act, asked: Arc<Mutex<Vec<Value>>>) -> std::io::Result<()> {
    let mut socket = BufReader::new(socket);
    let (mut length, mut key, mut line) = (0, String::new(), String::new());
    while socket.read_line(&mut line).await? > 2 {
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if let Some(value) = lower.strip_prefix(&format!("{ROUTER_KEY_HEADER}:")) {
            key = value.trim().to_owned();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await?;
    let mut question: Value = serde_json::from_slice(&body).unwrap();
    question["key"] = key.into();
    let tokens: Vec<i32> = serde_json::from_value(question["prompt"].clone()).unwrap();
    let names = Namer::open().chain(question["salt"].as_u64().unwrap(), &tokens, 16);
    let skip = question["skip"].as_u64().unwrap() as usize;
    let names: Vec<u128> = names[skip..].iter().map(|name| name.number()).collect();
    asked.lock().push(question);
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk =
        |bytes: &[u8]| [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, &b"\r\n"[..]].concat();
    match act {
        Act::Frames(frames) => {
            socket.write_all(head.as_bytes()).await?;
            socket.write_all(&chunk(&frames(&names))).await?;
            socket.write_all(b"0\r\n\r\n").await?;
        }
        Act::Break(frames) => {
            socket.write_all(head.as_bytes()).await?;
            socket.write_all(&chunk(&frames(&names))).await?;
        }
        Act::Again(frames) => {
            socket.write_all(head.as_bytes()).await?;
            loop {
                socket.write_all(&chunk(&frames(&names))).await?;
            }
        }
        Act::Refuse(status) => {
            let body = r#"{"error": {"message": "no"}}"#;
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            socket.write_all(head.as_bytes()).await?;
        }
        // Waits until the decode server closes the connection.
        Act::Hang => drop(socket.read_u8().await),
    }
    socket.flush().await
}

async fn decoding() -> TestServer {
    let keyed = |config: &mut forebay_server::ServerConfig| config.router_key = Some(KEY.into());
    TestServer::of_model(ModelKind::Decodes, Some("hello"), keyed).await
}

fn body(tokens: usize) -> Value {
    json!({"prompt": (3..3 + tokens as i32).collect::<Vec<_>>(), "max_tokens": 2})
}

/// Sends a request that names a prefill server, with a router key.
async fn routed(server: &TestServer, body: &Value, url: &str, key: &str) -> Pending {
    let tag = RouterTag { router: 7, seq: 1, floor: 1, seed: 99, blocks: false };
    let request = Request::post("/v1/completions")
        .header("host", "test")
        .header(ROUTER_HEADER, tag.encode())
        .header(ROUTER_KEY_HEADER, key)
        .header(PREFILL_HEADER, url);
    server.send(request.body(Full::new(body.to_string().into())).unwrap()).await
}

async fn counted(server: &TestServer, outcome: &str) -> bool {
    let (_, metrics) = server.get("/metrics").await;
    metrics.contains(&format!("forebay:pd_fetches_total{{outcome=\"{outcome}\"}} 1\n"))
}

#[tokio::test]
async fn what_a_prefill_server_has_computed_is_lent_to_the_request() {
    let (mut server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    let pending = routed(&server, &body(TOKENS), &prefill.url, KEY).await;
    assert_eq!(pending.header(PREFILL_HEADER), Some(PREFILL_CAME));
    assert_eq!(pending.read().await.0, 200);
    let request = server.submitted().await;
    let loan = request.loan.as_ref().expect("a loan");
    let names = Namer::open().chain(0, &request.prompt, 16);
    assert_eq!((loan.lender(), loan.blocks(), names.len()), (1, 3, 3));
    assert!(names.iter().all(|&name| loan.page(name).is_some()));
    assert!(request.past.handed && *request.names == names[..]);
    let asked = prefill.asked.lock().clone();
    assert_eq!(asked[0]["key"], KEY);
    assert_eq!(asked[0]["prompt"].as_array().map(Vec::len), Some(TOKENS));
    assert!(asked[0]["layout"].as_str().unwrap().ends_with("model m"), "{}", asked[0]["layout"]);
    assert!(counted(&server, "came").await);
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains("forebay:pd_received_blocks_total 3\n"));
}

#[tokio::test]
async fn only_what_is_not_cached_is_asked_for() {
    let (mut server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    server.engine.cached.store(1, std::sync::atomic::Ordering::Relaxed);
    routed(&server, &body(TOKENS), &prefill.url, KEY).await.read().await;
    assert_eq!(server.submitted().await.loan.as_ref().map(|loan| loan.blocks()), Some(2));
    assert_eq!(prefill.asked.lock()[0]["skip"], 1);
    // The first request has 17 uncached tokens, this one 16: no prefill server is used.
    routed(&server, &body(TOKENS - 17), &prefill.url, KEY).await.read().await;
    assert!(server.submitted().await.loan.is_none());
    assert_eq!(prefill.asked.lock().len(), 1);
    assert!(counted(&server, "short").await);
}

#[tokio::test]
async fn only_routers_with_the_key_name_a_server() {
    let (mut server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    let pending = routed(&server, &body(TOKENS), &prefill.url, "another").await;
    assert_eq!(pending.header(PREFILL_HEADER), None);
    assert_eq!(pending.read().await.0, 200);
    let plain = Request::post("/v1/completions")
        .header("host", "test")
        .header(PREFILL_HEADER, &prefill.url)
        .body(Full::new(body(TOKENS).to_string().into()));
    assert_eq!(server.send(plain.unwrap()).await.read().await.0, 200);
    for _ in 0..2 {
        assert!(server.submitted().await.loan.is_none());
    }
    assert!(prefill.asked.lock().is_empty());
    for wrong in ["https://a:1", "http://a:1/x", "http://u@a:1"] {
        assert_eq!(routed(&server, &body(TOKENS), wrong, KEY).await.read().await.0, 400);
    }
}

#[tokio::test]
async fn without_a_key_nobody_names_a_server() {
    let mut server = TestServer::of_model(ModelKind::Decodes, Some("hello"), |_| {}).await;
    let prefill = Prefill::start(Act::Frames(all)).await;
    let pending = routed(&server, &body(TOKENS), &prefill.url, KEY).await;
    assert_eq!(pending.read().await.0, 200);
    assert!(server.submitted().await.loan.is_none());
    assert!(prefill.asked.lock().is_empty());
}

#[tokio::test]
async fn prompts_of_other_kinds_stay() {
    let (server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    let prompt: Vec<i32> = (3..52).collect();
    let several = json!({"prompt": [prompt, prompt], "max_tokens": 2});
    let told = json!({"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 1});
    for body in [several, told] {
        assert_eq!(routed(&server, &body, &prefill.url, KEY).await.read().await.0, 200);
    }
    assert!(prefill.asked.lock().is_empty());
}

#[tokio::test]
async fn choices_share_what_has_come() {
    let (mut server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    let mut several = body(TOKENS);
    several["n"] = 2.into();
    assert_eq!(routed(&server, &several, &prefill.url, KEY).await.read().await.0, 200);
    for _ in 0..2 {
        assert_eq!(server.submitted().await.loan.as_ref().map(|loan| loan.blocks()), Some(3));
    }
    assert_eq!(prefill.asked.lock().len(), 1);
}

/// Whatever the prefill server does, the request is served with the blocks that arrived.
#[tokio::test]
async fn what_fails_is_computed() {
    fn two(names: &[u128]) -> Vec<u8> {
        [block(names[0], 1), block(names[1], 2)].concat()
    }
    fn half(names: &[u128]) -> Vec<u8> {
        let whole = all(names);
        whole[..whole.len() / 2].to_vec()
    }
    fn long(names: &[u128]) -> Vec<u8> {
        frame(BLOCK, names[0], &[0; PAGE_BYTES as usize + 5])
    }
    fn another(names: &[u128]) -> Vec<u8> {
        [block(names[0], 1), block(names[0] + 1, 2)].concat()
    }
    fn nothing(_: &[u128]) -> Vec<u8> {
        frame(END, 0, &[])
    }
    fn alive(_: &[u128]) -> Vec<u8> {
        frame(0, 0, &[]).repeat(1000)
    }
    let gone = {
        let prefill = Prefill::start(Act::Hang).await;
        let url = prefill.url.clone();
        prefill.serving.abort();
        url
    };
    let cases = [
        (Act::Break(two), "broken", 2),
        (Act::Frames(two), "broken", 2),
        (Act::Break(half), "broken", 1),
        (Act::Frames(long), "wrong", 0),
        (Act::Frames(another), "wrong", 0),
        (Act::Again(alive), "wrong", 0),
        (Act::Frames(nothing), "nothing", 0),
        (Act::Hang, "late", 0),
        (Act::Refuse(StatusCode::BAD_REQUEST), "refused", 0),
        (Act::Refuse(StatusCode::SERVICE_UNAVAILABLE), "busy", 0),
    ];
    for (act, outcome, blocks) in cases {
        let (mut server, prefill) = (decoding().await, Prefill::start(act).await);
        let pending = routed(&server, &body(TOKENS), &prefill.url, KEY).await;
        let told = pending.header(PREFILL_HEADER).map(str::to_owned);
        assert_eq!(pending.read().await.0, 200, "{act:?}");
        let loan = server.submitted().await.all.request.loan.take();
        assert_eq!(loan.map_or(0, |loan| loan.blocks()), blocks, "{act:?}");
        assert!(counted(&server, outcome).await, "{act:?}: {outcome}");
        let blameless = ["nothing", "busy"].contains(&outcome);
        assert_eq!(told.as_deref(), (!blameless).then_some(PREFILL_FAILED), "{act:?}");
    }
    let server = decoding().await;
    assert_eq!(routed(&server, &body(TOKENS), &gone, KEY).await.read().await.0, 200);
    assert!(counted(&server, "unreachable").await);
}

#[tokio::test]
async fn no_more_comes_than_there_is_room_for() {
    let (mut server, prefill) = (decoding().await, Prefill::start(Act::Frames(all)).await);
    // Loans may take half of the eight pages, and the first request keeps three.
    routed(&server, &body(TOKENS), &prefill.url, KEY).await.read().await;
    let first = server.submitted().await;
    let mut other = body(TOKENS);
    other["cache_salt"] = "another".into();
    routed(&server, &other, &prefill.url, KEY).await.read().await;
    assert!(server.submitted().await.loan.is_none());
    assert!(counted(&server, "full").await);
    drop(first);
    routed(&server, &other, &prefill.url, KEY).await.read().await;
    let again = server.submitted().await;
    let names: Vec<BlockHash> = Namer::open().chain(again.cache_salt, &again.prompt, 16);
    assert!(again.loan.as_ref().is_some_and(|loan| loan.page(names[2]).is_some()));
}

#[tokio::test]
async fn a_server_without_the_mode_computes_for_nobody() {
    let server = TestServer::scripted("hello").await;
    let question = json!({"layout": "x", "names": 1, "salt": 0, "prompt": [1, 2]});
    let (status, error) = server.post("/pd/prefill", question).await;
    assert_eq!(status, 501);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("--disaggregation-mode prefill"), "{message}");
    let keyed = TestServer::start(Some("hello"), |config| config.router_key = Some(KEY.into()));
    let keyed = keyed.await;
    let question = json!({"layout": "x", "names": 1, "salt": 0, "prompt": [1, 2]});
    assert_eq!(keyed.post("/pd/prefill", question).await.0, 403);
}
