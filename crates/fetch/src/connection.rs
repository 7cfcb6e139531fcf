//! Sends one HTTP/1.1 request over one connection.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{
    ACCEPT, ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, HOST, USER_AGENT,
};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::error::FetchError;
use crate::place::Place;

/// The timeout of connecting to one address, before the next address is tried.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The smallest allocation for a file in bytes, unless the file is known to be smaller.
const LEAST: usize = 64 << 10;

/// A function that is called before a file's buffer grows to a total number of bytes. It returns
/// false if there is no room.
pub(crate) type Room<'a> = &'a mut (dyn FnMut(usize) -> bool + Send);

/// A response, and the task that reads it from the connection.
#[derive(Debug)]
pub(crate) struct Answer {
    response: Response<Incoming>,
    host: String,
    _driver: Driver,
}

/// A task that is aborted when this handle is dropped.
#[derive(Debug)]
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(crate) fn header(&self, name: hyper::header::HeaderName) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// Reads the body if it has at most `limit` bytes and `room` accepts its size. Whatever length
    /// the response declares, it allocates at most twice the received bytes, or 64 KiB if that is
    /// more.
    pub(crate) async fn body(mut self, limit: usize, room: Room<'_>) -> Result<Bytes, FetchError> {
        let encoding = self.response.headers().get(CONTENT_ENCODING);
        if encoding.is_some_and(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Err(FetchError::Encoded(self.host.clone()));
        }
        let length = self.header(CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
        if length.is_some_and(|length| length > limit as u64) {
            return Err(FetchError::TooLarge(limit));
        }
        let most = length.map_or(limit, |length| length as usize);
        let mut file = BytesMut::new();
        while let Some(frame) = self.response.frame().await {
            let frame = frame.map_err(|_| FetchError::Broken(self.host.clone()))?;
            if let Some(data) = frame.data_ref() {
                if data.len() > limit - file.len() {
                    return Err(FetchError::TooLarge(limit));
                }
                let all = file.len() + data.len();
                if all > file.capacity() {
                    let capacity = (2 * file.capacity()).max(LEAST).min(most).max(all);
                    if !room(capacity) {
                        return Err(FetchError::NoRoom);
                    }
                    file.reserve(capacity - file.len());
                }
                file.extend_from_slice(data);
            }
        }
        Ok(file.freeze())
    }
}

/// Sends the request for `place` to the first address in `addresses` that accepts a connection.
pub(crate) async fn ask(
    place: Place,
    addresses: &[IpAddr],
    tls: &Arc<ClientConfig>,
) -> Result<Answer, FetchError> {
    let stream = connect(&place, addresses).await?;
    if !place.tls {
        return send(place, stream).await;
    }
    // An IPv6 address in a URL has brackets, which are not part of the server's name.
    let name = place.host.trim_matches(['[', ']']).trim_end_matches('.').to_owned();
    let name = ServerName::try_from(name).map_err(|_| FetchError::BadUrl)?;
    let connecting = TlsConnector::from(Arc::clone(tls)).connect(name, stream);
    let stream = connecting.await.map_err(|_| FetchError::Untrusted(place.host.clone()))?;
    send(place, stream).await
}

async fn connect(place: &Place, addresses: &[IpAddr]) -> Result<TcpStream, FetchError> {
    for (number, address) in addresses.iter().enumerate() {
        let connecting = TcpStream::connect(SocketAddr::new(*address, place.port));
        let stream = if number + 1 == addresses.len() {
            connecting.await.ok()
        } else {
            tokio::time::timeout(ATTEMPT, connecting).await.ok().and_then(Result::ok)
        };
        if let Some(stream) = stream {
            return Ok(stream);
        }
    }
    Err(FetchError::Unreachable(place.host.clone()))
}

async fn send<S>(place: Place, stream: S) -> Result<Answer, FetchError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let host = place.host.clone();
    let broken = || FetchError::Broken(host.clone());
    let request = Request::get(&place.target)
        .header(HOST, &place.authority)
        .header(USER_AGENT, concat!("forebay/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, "image/*")
        .header(ACCEPT_ENCODING, "identity")
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|_| FetchError::BadUrl)?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|_| broken())?;
    // An error of the connection also appears as an error of the response.
    let driver = Driver(tokio::spawn(async move { drop(connection.await) }));
    let response = sender.send_request(request).await.map_err(|_| broken())?;
    Ok(Answer { response, host: place.host, _driver: driver })
}
