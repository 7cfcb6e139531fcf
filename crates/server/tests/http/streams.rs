//! Streams under all conditions of their connection.

use std::time::Duration;

use forebay_engine::{FinishReason, Output, RequestId, SampledToken};
use forebay_server::EgressMode;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::events;
use crate::fake::{EOS, TestServer};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "hello wörld, 日本 and more, and more of it";
const HOUR: Duration = Duration::from_secs(3600);

fn hello(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// Returns the non-empty texts of a stream's chunks.
fn pieces(events: &[Value]) -> Vec<&str> {
    let choices = events.iter().filter_map(|event| event["choices"].get(0));
    let pieces = choices.filter_map(|choice| choice["delta"]["content"].as_str());
    pieces.filter(|piece| !piece.is_empty()).collect()
}

impl TestServer {
    /// Delivers the tokens of `text` one by one, and finishes the request with the last token.
    fn speak(&self, id: RequestId, text: &str) {
        let ids = self.encode(text);
        for (index, &token) in ids.iter().enumerate() {
            let finish = (index + 1 == ids.len()).then_some(FinishReason::Length);
            self.engine.token(id, token, index == 0, finish);
        }
    }
}

#[tokio::test]
async fn a_stream_is_the_same_whoever_writes_it() {
    for mode in [EgressMode::Direct, EgressMode::Tasks, EgressMode::Naive] {
        let mut server = match mode {
            EgressMode::Direct => TestServer::driven().await,
            EgressMode::Tasks => TestServer::start(None, |c| c.egress = EgressMode::Tasks).await,
            EgressMode::Naive => TestServer::start(None, |c| c.egress = EgressMode::Naive).await,
        };
        let body = hello(json!({"stream_options": {"include_usage": true}}));
        let mut pending = server.open(CHAT, body.to_string()).await;
        let id = server.submitted().await.id;
        let tokens = server.encode(TEXT);
        let mut stream = String::new();
        // Sends each token after the previous one has arrived, so that no chunks are merged.
        for (index, &token) in tokens.iter().enumerate() {
            server.engine.token(id, token, index == 0, None);
            let mut given = server.tokenizer.decode(&tokens[..=index], true).unwrap();
            while given.ends_with(char::REPLACEMENT_CHARACTER) {
                given.pop();
            }
            while !stream_text(&stream).ends_with(&given) {
                stream.push_str(&pending.frame().await.unwrap());
            }
        }
        server.engine.token(id, EOS, false, Some(FinishReason::Stop { token: EOS }));
        stream.push_str(&pending.rest().await);
        let events = events(&stream);
        assert_eq!(pieces(&events).concat(), TEXT, "{mode:?}");
        let [.., last, usage] = &events[..] else { panic!("{events:?}") };
        assert_eq!(last["choices"][0]["finish_reason"], "stop");
        assert_eq!(usage["usage"]["completion_tokens"], tokens.len() + 1);
        for event in &events {
            assert_eq!((&event["id"], &event["usage"].is_null()), (&last["id"], &(event != usage)));
        }
    }
}

fn stream_text(stream: &str) -> String {
    let events: Vec<Value> = stream
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    pieces(&events).concat()
}

#[tokio::test]
async fn a_slow_reader_gets_everything_in_order_and_in_fewer_pieces() {
    let mut server = TestServer::driven().await;
    let mut pending = server.open(CHAT, hello(json!({})).to_string()).await;
    let id = server.submitted().await.id;
    let tokens: Vec<i32> = (0..60_000).map(|index| 300 + index % 200).collect();
    server.engine.token(id, tokens[0], true, None);
    let mut stream = pending.frame().await.unwrap();
    for &token in &tokens[1..] {
        server.engine.token(id, token, false, None);
    }
    server.engine.token(id, EOS, false, Some(FinishReason::Stop { token: EOS }));
    stream.push_str(&pending.rest().await);
    let events = events(&stream);
    assert_eq!(pieces(&events).concat(), server.tokenizer.decode(&tokens, true).unwrap());
    assert!(events.len() < tokens.len() / 2, "{} events", events.len());
}

/// Reads up to the first `end`, and no further.
async fn read_until(socket: &mut TcpStream, end: &str) -> String {
    let mut text = Vec::new();
    while !text.ends_with(end.as_bytes()) {
        text.push(socket.read_u8().await.expect("more"));
    }
    String::from_utf8(text).unwrap()
}

/// Returns the decoded body of a response in chunked coding, and the bytes after it.
fn dechunk(answer: &str) -> (String, &str) {
    let (head, mut rest) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        body.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").unwrap();
        if size == 0 {
            return (body, rest);
        }
    }
}

fn raw(version: &str, body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!("POST {CHAT} {version}\r\nhost: test\r\ncontent-length: {length}\r\n\r\n{body}")
}

#[tokio::test]
async fn requests_that_share_a_connection_get_their_answers_one_after_the_other() {
    let mut server = TestServer::driven().await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let request = raw("HTTP/1.1", &hello(json!({})));
    // One request at a time, twice, and then two requests at once.
    for together in [1, 1, 2] {
        socket.write_all(request.repeat(together).as_bytes()).await.unwrap();
        for _ in 0..together {
            let id = server.submitted().await.id;
            server.engine.token(id, server.encode("x")[0], true, None);
            let mut answer = read_until(&mut socket, "\r\n\r\n").await;
            while !answer.contains("\"content\":\"x\"") {
                answer.push_str(&read_until(&mut socket, "\r\n").await);
            }
            server.speak(id, TEXT);
            answer.push_str(&read_until(&mut socket, "0\r\n\r\n").await);
            let (body, rest) = dechunk(&answer);
            assert_eq!((pieces(&events(&body)).concat(), rest), (format!("x{TEXT}"), ""));
        }
    }
}

#[tokio::test]
async fn an_old_client_gets_no_chunked_coding() {
    let mut server = TestServer::driven().await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let request = raw("HTTP/1.0", &hello(json!({})));
    socket.write_all(request.as_bytes()).await.unwrap();
    let id = server.submitted().await.id;
    server.engine.token(id, server.encode("x")[0], true, None);
    let mut answer = read_until(&mut socket, "\r\n\r\n").await;
    while !answer.contains("\"content\":\"x\"") {
        answer.push_str(&read_until(&mut socket, "\n\n").await);
    }
    server.speak(id, TEXT);
    socket.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(!head.contains("transfer-encoding"), "{head}");
    assert_eq!(pieces(&events(body)).concat(), format!("x{TEXT}"));
}

#[tokio::test]
async fn an_interval_gathers_tokens_but_not_the_first_and_not_the_last() {
    let mut server = TestServer::start(None, |config| config.stream_interval = 2).await;
    let words = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for (more, expected) in [
        (json!({}), vec!["a", "bc", "de", "fg", "h"]),
        (json!({"stream_interval": 3}), vec!["a", "bcd", "efg", "h"]),
        (json!({"stream_interval": 1}), words.to_vec()),
        (json!({"stream_interval": 100}), vec!["a", "bcdefgh"]),
    ] {
        let mut pending = server.open(CHAT, hello(more).to_string()).await;
        let id = server.submitted().await.id;
        let mut stream = String::new();
        let (mut next, mut sent) = (0, 0);
        for (index, word) in words.iter().enumerate() {
            let finish = (index + 1 == words.len()).then_some(FinishReason::Length);
            server.engine.token(id, server.encode(word)[0], index == 0, finish);
            sent += word.len();
            // Waits for the chunks that are due, so that the connection merges no further chunks.
            let due: usize = expected[..=next].iter().map(|piece| piece.len()).sum();
            if sent == due && next + 1 < expected.len() {
                next += 1;
                while stream_text(&stream).len() < due {
                    stream.push_str(&pending.frame().await.unwrap());
                }
            }
        }
        stream.push_str(&pending.rest().await);
        assert_eq!(pieces(&events(&stream)), expected);
    }
}

#[tokio::test]
async fn a_window_holds_chunks_back_but_not_the_first_and_not_the_end() {
    let mut server = TestServer::start_with(None, HOUR, |_| {}).await;
    let mut pending = server.open(CHAT, hello(json!({})).to_string()).await;
    let id = server.submitted().await.id;
    server.engine.token(id, server.encode("a")[0], true, None);
    let mut stream = String::new();
    while stream_text(&stream) != "a" {
        stream.push_str(&pending.frame().await.unwrap());
    }
    for word in ["b", "c"] {
        server.engine.token(id, server.encode(word)[0], false, None);
    }
    server.engine.token(id, EOS, false, Some(FinishReason::Stop { token: EOS }));
    stream.push_str(&pending.rest().await);
    assert_eq!(pieces(&events(&stream)), ["a", "bc"]);
}

#[tokio::test]
async fn what_a_window_held_back_comes_without_another_token() {
    let mut server = TestServer::start_with(None, Duration::from_millis(20), |_| {}).await;
    let mut pending = server.open(CHAT, hello(json!({})).to_string()).await;
    let id = server.submitted().await.id;
    let mut stream = String::new();
    for (index, word) in ["a", "b", "c"].into_iter().enumerate() {
        server.engine.token(id, server.encode(word)[0], index == 0, None);
    }
    while stream_text(&stream) != "abc" {
        stream.push_str(&pending.frame().await.unwrap());
    }
    drop(pending);
    assert_eq!(server.aborted().await, id);
}

#[tokio::test]
async fn a_thread_that_is_behind_writes_fewer_and_longer_chunks() {
    let mut server = TestServer::driven().await;
    let mut pending = server.open(CHAT, hello(json!({})).to_string()).await;
    let id = server.submitted().await.id;
    let tokens: Vec<i32> = (0..5_000).map(|index| 300 + index % 200).collect();
    // Steps complete faster than the connection can be written.
    for (index, &token) in tokens.iter().enumerate() {
        server.engine.token(id, token, index == 0, None);
    }
    server.engine.token(id, EOS, false, Some(FinishReason::Stop { token: EOS }));
    let stream = pending.rest().await;
    let events = events(&stream);
    assert_eq!(pieces(&events).concat(), server.tokenizer.decode(&tokens, true).unwrap());
    assert!(events.len() < tokens.len(), "{} events", events.len());
}

#[tokio::test]
async fn a_client_that_stops_reading_is_cut_and_its_request_ended() {
    for mode in [EgressMode::Direct, EgressMode::Tasks] {
        let millis = |config: &mut forebay_server::ServerConfig| {
            config.send_timeout = Duration::from_millis(20);
        };
        let mut server = match mode {
            EgressMode::Direct => TestServer::start(None, millis).await,
            _ => {
                let tasks = |config: &mut forebay_server::ServerConfig| {
                    config.send_timeout = Duration::from_millis(20);
                    config.egress = EgressMode::Tasks;
                };
                TestServer::start(None, tasks).await
            }
        };
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        let body = hello(json!({"logprobs": true})).to_string();
        let length = body.len();
        let request =
            format!("POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        socket.write_all(body.as_bytes()).await.unwrap();
        let id = server.submitted().await.id;
        // The stream has more bytes than the socket buffers of both ends hold.
        let tokens = server.encode(&TEXT.repeat(2000));
        for number in 0..100_000 {
            let logprobs = Some(vec![(300, -1.0); 3].into());
            server.engine.deliver(vec![Output {
                predicted: None,
                id,
                admission: None,
                token: Some(SampledToken { id: tokens[number % tokens.len()], logprobs }),
                pooled: None,
                prompt: None,
                finish: None,
            }]);
        }
        assert_eq!(server.aborted().await, id, "{mode:?}");
        // The kernel discards the unsent bytes, so the client gets only the bytes that its socket
        // had received.
        let mut rest = Vec::new();
        let end = socket.read_to_end(&mut rest).await;
        assert!(end.is_err() || !rest.ends_with(b"0\r\n\r\n"), "{mode:?}");
    }
}
