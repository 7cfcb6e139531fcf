//! A request to a prefill server, on a separate connection. The open connection keeps the request
//! alive: when it closes, the prefill server stops.

use std::time::Duration;

use axum::http::header::{CONNECTION, CONTENT_TYPE, HOST};
use axum::http::{Request, Response};
use bytes::Bytes;
use forebay_api::BackendUrl;
use forebay_api::peer::ROUTER_KEY_HEADER;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::wire::PATH;

/// The connect timeout.
const CONNECT: Duration = Duration::from_secs(3);
/// The maximum size of a response's head in bytes.
const MAX_HEAD: usize = 64 << 10;
/// The maximum number of headers of a response.
const MAX_HEADERS: usize = 100;

/// The reason why a prefill server can't be queried.
#[derive(Debug, Error)]
pub(crate) enum AskError {
    #[error("it takes no connection: {0}")]
    Connect(std::io::Error),
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
    #[error("its URL gives no valid request")]
    Url,
}

/// A response whose head has arrived. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct OpenAnswer {
    pub(crate) response: Response<Incoming>,
    _driver: Driver,
}

/// The connection's task, aborted when this is dropped.
#[derive(Debug)]
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends a request to a prefill server, with `key` as the router key.
pub(crate) async fn ask(
    url: &BackendUrl,
    key: Option<&str>,
    body: Vec<u8>,
) -> Result<OpenAnswer, AskError> {
    let connecting = timeout(CONNECT, TcpStream::connect(url.address())).await;
    let late = || std::io::Error::from(std::io::ErrorKind::TimedOut);
    let socket = connecting.unwrap_or_else(|_| Err(late())).map_err(AskError::Connect)?;
    socket.set_nodelay(true).map_err(AskError::Connect)?;
    let mut request = Request::post(PATH)
        .header(HOST, url.authority())
        .header(CONTENT_TYPE, "application/json")
        .header(CONNECTION, "close");
    if let Some(key) = key {
        request = request.header(ROUTER_KEY_HEADER, key);
    }
    let request = request.body(Full::new(Bytes::from(body))).map_err(|_| AskError::Url)?;
    let handshake = Builder::new()
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD)
        .handshake(TokioIo::new(socket));
    let (mut sender, connection) = handshake.await?;
    // An error of the connection is reported by the response too.
    let driver = Driver(tokio::spawn(async move { drop(connection.await) }));
    let response = sender.send_request(request).await?;
    Ok(OpenAnswer { response, _driver: driver })
}
