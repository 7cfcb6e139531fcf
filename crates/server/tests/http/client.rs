//! A small HTTP client that opens one connection per request.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::fake::TestServer;

/// A response whose body has not been read.
pub(crate) struct Pending {
    pub(crate) response: Response<Incoming>,
    connection: JoinHandle<()>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Pending {
    /// Returns the next event of a stream; `None` at its end.
    pub(crate) async fn frame(&mut self) -> Option<String> {
        let frame = self.response.body_mut().frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }

    /// Returns the remaining events of a stream.
    pub(crate) async fn rest(&mut self) -> String {
        let mut rest = String::new();
        while let Some(frame) = self.frame().await {
            rest.push_str(&frame);
        }
        rest
    }

    pub(crate) async fn read(mut self) -> (u16, Vec<u8>) {
        let status = self.response.status().as_u16();
        let body = self.response.body_mut().collect().await.unwrap();
        (status, body.to_bytes().to_vec())
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).map(|value| value.to_str().unwrap())
    }
}

fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::post(path).header("host", "test");
    request.body(Full::new(body.into())).unwrap()
}

pub(crate) async fn send(address: SocketAddr, request: Request<Full<Bytes>>) -> Pending {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(async move {
        connection.await.ok();
    });
    let response = sender.send_request(request).await.unwrap();
    Pending { response, connection }
}

impl TestServer {
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Pending {
        send(self.address, request).await
    }

    /// POSTs JSON in the background, so that the test can drive the engine in the meantime.
    pub(crate) fn connect(&self, path: &str, body: &Value) -> JoinHandle<(u16, Value)> {
        let (address, request) = (self.address, post(path, body.to_string()));
        tokio::spawn(async move {
            let (status, body) = send(address, request).await.read().await;
            (status, serde_json::from_slice(&body).unwrap())
        })
    }

    /// Like `connect`, for tests that check the head of the response.
    pub(crate) fn begin(&self, path: &str, body: &Value) -> JoinHandle<Pending> {
        tokio::spawn(send(self.address, post(path, body.to_string())))
    }

    pub(crate) async fn open(&self, path: &str, body: impl Into<Bytes>) -> Pending {
        self.send(post(path, body)).await
    }

    /// Like `begin`, with an API key.
    #[allow(dead_code, reason = "the resource tests use it")]
    pub(crate) fn begin_as(&self, key: &str, path: &str, body: &Value) -> JoinHandle<Pending> {
        let mut request = post(path, body.to_string());
        let key = format!("Bearer {key}").parse().unwrap();
        request.headers_mut().insert("authorization", key);
        tokio::spawn(send(self.address, request))
    }

    /// POSTs JSON; returns the status and the JSON of the response.
    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.post_bytes(path, body.to_string()).await
    }

    pub(crate) async fn post_bytes(&self, path: &str, body: impl Into<Bytes>) -> (u16, Value) {
        let (status, body) = self.open(path, body).await.read().await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let request = Request::get(path).header("host", "test").body(Full::default()).unwrap();
        let (status, body) = self.send(request).await.read().await;
        (status, String::from_utf8(body).unwrap())
    }

    pub(crate) async fn get_json(&self, path: &str) -> (u16, Value) {
        let (status, body) = self.get(path).await;
        (status, serde_json::from_str(&body).unwrap())
    }

    /// POSTs JSON; returns the events of the response without the last, `[DONE]`.
    pub(crate) async fn events(&self, path: &str, body: Value) -> Vec<Value> {
        let pending = self.open(path, body.to_string()).await;
        assert_eq!(pending.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let (status, body) = pending.read().await;
        assert_eq!(status, 200);
        events(&String::from_utf8(body).unwrap())
    }
}

/// Returns the events of a whole stream without the last, `[DONE]`.
pub(crate) fn events(stream: &str) -> Vec<Value> {
    let stream = stream.strip_suffix("data: [DONE]\n\n").expect("a stream ends with [DONE]");
    stream
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}
