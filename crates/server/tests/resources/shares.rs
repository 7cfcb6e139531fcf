//! Shares of the byte budget and of outgoing connections, when one of two API keys requests all
//! that it can get.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_api::limits::{CHOICES, LOGPROBS};
use forebay_server::{Keys, ServerConfig};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;

use crate::client::Pending;
use crate::fake::{Event, IMAGE, ModelKind, TestServer};
use crate::{alone, charged};

const CHAT: &str = "/v1/chat/completions";
const BUDGET: usize = 64 << 20;
/// Reserved for clients that use little.
const RESERVE: usize = BUDGET / 8;
const HALF: usize = (BUDGET - RESERVE) / 2;

fn two_keys(config: &mut ServerConfig) {
    config.api_keys = Keys::new(["a", "b"]);
    config.max_request_bytes_in_flight = BUDGET;
}

fn small() -> Value {
    json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": true})
}

/// Returns a body of a few hundred bytes that is charged some MiB.
fn large() -> Value {
    let mut body = small();
    body["n"] = json!(CHOICES);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(LOGPROBS);
    body
}

async fn ask(server: &TestServer, key: &str, body: &Value) -> Result<Pending, u16> {
    let pending = server.begin_as(key, CHAT, body).await.unwrap();
    match pending.response.status().as_u16() {
        200 => Ok(pending),
        status => Err(status),
    }
}

/// Sends requests until one is rejected.
async fn fill(server: &TestServer, key: &str, body: &Value) -> Vec<Pending> {
    let mut all = Vec::new();
    loop {
        match ask(server, key, body).await {
            Ok(pending) => all.push(pending),
            Err(429) => return all,
            Err(other) => panic!("{other}"),
        }
        assert!(all.len() < 1000, "no request is refused");
    }
}

/// Waits until this many engine requests were aborted.
async fn aborted(server: &mut TestServer, mut count: usize) {
    while count > 0 {
        count -= usize::from(matches!(server.event().await, Event::Abort(_)));
    }
}

#[tokio::test]
async fn choices_of_one_key_leave_room_for_another() {
    let _alone = alone().await;
    let mut server = TestServer::of_model(ModelKind::Text, None, two_keys).await;
    let mut greedy = fill(&server, "a", &large()).await;
    let each = charged(&server).await / greedy.len();
    assert!(charged(&server).await > HALF, "a key alone may have more than half");
    // A small request with another API key fits into the reserve; a large one does not.
    let _other = ask(&server, "b", &small()).await.expect("the reserve is for this request");
    assert_eq!(ask(&server, "b", &large()).await.err(), Some(429));
    assert_eq!(
        ask(&server, "a", &small()).await.err(),
        Some(429),
        "the reserve is not for a key that has much"
    );
    // After the first key has released bytes, its charges can grow to at most half of the budget.
    let half = HALF / each;
    let leaving = greedy.split_off(half - 2);
    aborted(&mut server, {
        let choices = leaving.len() * CHOICES as usize;
        drop(leaving);
        choices
    })
    .await;
    while charged(&server).await > (half - 1) * each {
        yield_now().await;
    }
    greedy.extend(fill(&server, "a", &large()).await);
    assert!(greedy.len() <= half, "{} of {half}", greedy.len());
    let other = fill(&server, "b", &large()).await;
    assert!(other.len() + 1 >= half, "{} of {half}", other.len());
}

/// A body that is declared but not sent is charged only for the bytes that arrived.
#[tokio::test]
async fn bodies_that_do_not_come_keep_nobody_out() {
    let _alone = alone().await;
    let server = TestServer::of_model(ModelKind::Text, Some("a"), two_keys).await;
    const SENT: usize = 66 << 10;
    const CONNECTIONS: usize = 100;
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer a\r\nContent-Length: {}\r\n\r\n",
            3 << 20
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&[b' '; SENT]).await.unwrap();
        all.push(stream);
    }
    while charged(&server).await < 4 * SENT * CONNECTIONS * 9 / 10 {
        yield_now().await;
    }
    let taken = charged(&server).await;
    assert!(taken <= 6 * SENT * CONNECTIONS, "{taken} bytes for {} sent", SENT * CONNECTIONS);
    for key in ["a", "b"] {
        let answer = ask(&server, key, &small()).await.unwrap().rest().await;
        assert!(answer.ends_with("[DONE]\n\n"), "{answer}");
    }
    drop(all);
    while charged(&server).await > 0 {
        yield_now().await;
    }
}

/// Starts a server that counts connections and never responds.
async fn silent() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            kept.push(stream);
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    (port, count)
}

/// Images from servers that never respond use no bytes, and only a few connections.
#[tokio::test]
async fn fetches_of_one_key_are_few_and_cost_what_has_come() {
    let _alone = alone().await;
    let server = TestServer::of_model(ModelKind::Sees, Some("a"), |config| {
        config.api_keys = Keys::new(["a", "b"]);
    })
    .await;
    let (port, connections) = silent().await;
    let urls = |count: usize| {
        let url = format!("http://127.0.0.1:{port}/image.png");
        json!({"input_ids": vec![IMAGE; count], "image_data": vec![url; count]})
    };
    let greedy: Vec<_> = (0..10).map(|_| server.begin_as("a", "/generate", &urls(16))).collect();
    while connections.load(Ordering::SeqCst) < 16 {
        yield_now().await;
    }
    let other = server.begin_as("b", "/generate", &urls(1));
    while connections.load(Ordering::SeqCst) < 17 {
        yield_now().await;
    }
    for _ in 0..1000 {
        yield_now().await;
    }
    assert_eq!(connections.load(Ordering::SeqCst), 17, "160 images were requested");
    let taken = charged(&server).await;
    assert!(taken <= 1 << 20, "{taken} bytes for nothing that has come");
    for task in greedy.into_iter().chain([other]) {
        task.abort();
    }
}
