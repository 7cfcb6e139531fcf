//! Connections beyond the limit, clients that disconnect, Unix sockets, TLS.

use std::path::Path;
use std::sync::Arc;

use forebay_server::{HealthThread, Tls};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::fake::TestServer;

const CHAT: &str = "/v1/chat/completions";
const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
const CLOSING: &[u8] = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

fn chat(stream: bool) -> Vec<u8> {
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream});
    let body = body.to_string();
    let length = body.len();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    (head + &body).into_bytes()
}

fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../http/tests/data").join(name)
}

/// Sends `request`; returns all bytes until the connection closes.
async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &[u8]) -> String {
    stream.write_all(request).await.unwrap();
    rest(stream).await
}

async fn rest(mut stream: impl AsyncRead + Unpin) -> String {
    let mut answer = Vec::new();
    // A connection that is reset counts as closed.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

/// Sends `request`; returns the head of the response.
async fn head(stream: &mut TcpStream, request: &[u8]) -> String {
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    while !answer.windows(4).any(|window| window == b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "the connection has ended");
    }
    String::from_utf8_lossy(&answer).into_owned()
}

impl TestServer {
    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

#[tokio::test]
async fn a_refusal_of_an_unread_body_keeps_its_connection_or_says_that_it_does_not() {
    let server = TestServer::start(None, |_| {}).await;
    let mut stream = server.tcp().await;
    for _ in 0..3 {
        stream
            .write_all(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n")
            .await
            .unwrap();
        let answer = head(&mut stream, &[b'x'; 60_000]).await;
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        assert!(!answer.contains("connection: close"), "{answer}");
        let body = answer.split_once("content-length: ").unwrap().1.lines().next().unwrap();
        let body: usize = body.parse().unwrap();
        let (_, begun) = answer.split_once("\r\n\r\n").unwrap();
        stream.read_exact(&mut vec![0; body - begun.len()]).await.unwrap();
    }
    let long = b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n";
    let answer = head(&mut stream, long).await;
    assert!(answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn the_longest_idle_connection_makes_room() {
    let server = TestServer::start(None, |config| config.max_connections = 3).await;
    // One connection in each idle state: nothing sent, half a head sent, waiting for the next
    // request.
    let silent = server.tcp().await;
    let mut halfway = server.tcp().await;
    halfway.write_all(b"GET /health HTTP/1.1\r\n").await.unwrap();
    let mut waiting = server.tcp().await;
    assert!(head(&mut waiting, HEALTH).await.starts_with("HTTP/1.1 200"));
    assert!(ask(server.tcp().await, CLOSING).await.starts_with("HTTP/1.1 200"));
    assert_eq!(rest(silent).await, "");
    let mut others = Vec::new();
    for _ in 0..3 {
        let mut other = server.tcp().await;
        assert!(head(&mut other, HEALTH).await.starts_with("HTTP/1.1 200"));
        others.push(other);
    }
    assert_eq!(rest(halfway).await, "");
    // This connection has received its response, and is closed too.
    rest(waiting).await;
}

#[tokio::test]
async fn beyond_the_limit_only_health_is_told() {
    let mut server = TestServer::start(None, |config| config.max_connections = 2).await;
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut stream = server.tcp().await;
        stream.write_all(&chat(false)).await.unwrap();
        let id = server.submitted().await.id;
        busy.push((stream, id));
    }
    for path in ["/health", "/livez"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
        let answer = ask(server.tcp().await, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // Connections that send nothing do not keep other clients out.
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(server.tcp().await);
    }
    assert!(ask(server.tcp().await, HEALTH).await.starts_with("HTTP/1.1 200"));
    let answer = ask(server.tcp().await, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("too_many_connections"));
    // Both running requests still get their responses, and then their connections make room.
    for (mut stream, id) in busy {
        server.engine.token(id, 300, true, Some(forebay_engine::FinishReason::Length));
        assert!(head(&mut stream, b"").await.starts_with("HTTP/1.1 200"));
        drop(stream);
    }
    assert_eq!(server.get("/v1/models").await.0, 200);
}

#[tokio::test]
async fn a_client_that_sends_more_and_leaves_is_seen_to_leave() {
    let mut server = TestServer::driven().await;
    for stream in [false, true] {
        let mut client = server.tcp().await;
        client.write_all(&chat(stream)).await.unwrap();
        let id = server.submitted().await.id;
        if stream {
            // The client disconnects in the middle of the response.
            server.engine.token(id, 300, true, None);
            head(&mut client, b"").await;
        }
        // hyper reads this byte with the request or after it, and then reads no more.
        client.write_all(b"G").await.unwrap();
        client.flush().await.unwrap();
        drop(client);
        assert_eq!(server.aborted().await, id);
    }
    // Sends more bytes than hyper reads at a time.
    let mut client = server.tcp().await;
    client.write_all(&chat(false)).await.unwrap();
    let id = server.submitted().await.id;
    client.write_all(&vec![b'G'; 16 << 10]).await.unwrap();
    drop(client);
    assert_eq!(server.aborted().await, id);
}

#[tokio::test]
async fn pipelined_requests_are_answered() {
    let server = TestServer::scripted("a").await;
    let mut client = server.tcp().await;
    client.write_all(&[HEALTH, HEALTH, CLOSING].concat()).await.unwrap();
    assert_eq!(rest(client).await.matches("HTTP/1.1 200").count(), 3);
}

#[tokio::test]
async fn health_has_a_thread_of_its_own() {
    let server = TestServer::driven().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = HealthThread::start(listener, server.state.clone()).unwrap();
    for (path, status) in [("/livez", 200), ("/health", 200), ("/metrics", 200), ("/version", 404)]
    {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let answer = ask(TcpStream::connect(address).await.unwrap(), request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
    }
    drop(thread);
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_unix_socket_is_served_as_an_address_is() {
    let path = std::env::temp_dir().join(format!("forebay-http-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let server = TestServer::listening(listener, Some("a b c"), |_| {}).await;
    let connect = async || UnixStream::connect(&path).await.unwrap();
    assert!(ask(connect().await, CLOSING).await.starts_with("HTTP/1.1 200"));
    let body = json!({"prompt": "a", "stream": true, "max_tokens": 3}).to_string();
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    let answer = ask(connect().await, request.as_bytes()).await;
    assert!(answer.contains("data: [DONE]"), "{answer}");
    drop(server);
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn streams_are_encrypted_whole() {
    let server = TestServer::start(Some("a b c"), |config| {
        let tls = Tls::from_files(&data("certificate.pem"), &data("key.pem"));
        config.tls = Some(tls.unwrap());
    })
    .await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(data("certificate.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    let name = ServerName::try_from("localhost").unwrap();
    for stream in [true, false] {
        let body = json!({"prompt": "a", "stream": stream, "max_tokens": 30}).to_string();
        let length = body.len();
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let tls = connector.connect(name.clone(), server.tcp().await).await.unwrap();
        let answer = ask(tls, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"length\""), "{answer}");
        assert_eq!(answer.contains("data: [DONE]"), stream);
    }
    // A client without TLS gets no response.
    assert!(!ask(server.tcp().await, CLOSING).await.contains("HTTP/1.1"));
}
