//! A connection to a backend.
//!
//! Only the task of the client's response drives the connection: it waits for the head, reads
//! frames and drops the connection. So no second task handles a frame. If the client does not read,
//! the backend's socket is not read either. If the client disconnects, the backend's connection is
//! closed.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use forebay_api::BackendUrl;
use http::{Request, Response};
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use tokio::net::TcpStream;

use crate::payload::Payload;

/// The largest number of idle connections per backend and thread.
const MAX_IDLE: usize = 1024;
/// The largest head of a response, and the largest trailers, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// The largest number of headers of a response.
const MAX_HEADERS: usize = 100;
/// The largest chunk of a response that is read at once, in bytes.
const MAX_PIECE: usize = 256 << 10;

/// A connection to a backend, and the hyper future that drives it.
pub(crate) struct Link {
    sender: SendRequest<Payload>,
    connection: Pin<Box<Connection<TokioIo<TcpStream>, Payload>>>,
    closed: bool,
    /// True if the connection has delivered a response before.
    used: bool,
}

/// The error for a failed connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("no connection: {0}")]
    Connect(std::io::Error),
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
    #[error("the answer is longer than {0} bytes")]
    Excess(usize),
}

impl LinkError {
    /// True if the address refuses connections.
    pub(crate) fn is_refused(&self) -> bool {
        match self {
            Self::Connect(error) => error.kind() == ErrorKind::ConnectionRefused,
            Self::Broken(_) | Self::Excess(_) => false,
        }
    }

    /// True if the remote side caused the failure, rather than a lack of descriptors or ports on
    /// this machine.
    pub(crate) fn is_remote(&self) -> bool {
        match self {
            Self::Connect(error) => matches!(
                error.kind(),
                ErrorKind::TimedOut
                    | ErrorKind::ConnectionReset
                    | ErrorKind::ConnectionAborted
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
            ),
            Self::Broken(_) | Self::Excess(_) => true,
        }
    }
}

impl Link {
    /// Opens a connection.
    pub(crate) async fn open(url: &BackendUrl) -> Result<Self, LinkError> {
        let socket = TcpStream::connect(url.address()).await.map_err(LinkError::Connect)?;
        socket.set_nodelay(true).map_err(LinkError::Connect)?;
        let (sender, connection) = Builder::new()
            .max_headers(MAX_HEADERS)
            .max_header_size(MAX_HEAD)
            .max_buf_size(MAX_PIECE)
            .handshake(TokioIo::new(socket))
            .await?;
        Ok(Self { sender, connection: Box::pin(connection), closed: false, used: false })
    }

    /// True if the connection has delivered a response before. The backend may have closed it
    /// since, so a failure does not mean that the backend has failed.
    pub(crate) fn is_used(&self) -> bool {
        self.used
    }

    fn drive(&mut self, context: &mut Context<'_>) {
        // The result is not needed: callers that wait for a head or a frame get the error too.
        self.closed = self.closed || self.connection.as_mut().poll(context).is_ready();
    }

    /// True if another request can be sent.
    fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.closed && self.sender.is_ready()
    }

    /// Sends a request and waits for the response's head.
    pub(crate) async fn send(
        &mut self,
        request: Request<Payload>,
    ) -> hyper::Result<Response<Incoming>> {
        let mut response = Box::pin(self.sender.send_request(request));
        let response = poll_fn(|context| {
            self.drive(context);
            response.as_mut().poll(context)
        });
        let response = response.await?;
        self.used = true;
        Ok(response)
    }

    /// Polls for the next frame of a response's body.
    pub(crate) fn poll_frame(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        if let ready @ Poll::Ready(_) = Pin::new(&mut *body).poll_frame(context) {
            return ready;
        }
        self.drive(context);
        Pin::new(body).poll_frame(context)
    }
}

/// Idle connections, by backend. Each thread has its own set.
#[derive(Default)]
pub(crate) struct Idle(Mutex<HashMap<u32, Vec<Link>, FxBuildHasher>>);

impl Idle {
    /// Returns a connection that can be used.
    pub(crate) fn take(&self, backend: u32) -> Option<Link> {
        let mut idle = self.0.lock();
        let links = idle.get_mut(&backend)?;
        while let Some(mut link) = links.pop() {
            if link.is_ready() {
                return Some(link);
            }
        }
        None
    }

    /// Stores a connection whose response has been read completely.
    pub(crate) fn put(&self, backend: u32, mut link: Link) {
        if link.is_ready() {
            let mut idle = self.0.lock();
            let links = idle.entry(backend).or_default();
            if links.len() < MAX_IDLE {
                links.push(link);
            }
        }
    }

    /// Removes connections that their backend has closed, and connections to backends that are not
    /// `wanted` any more.
    pub(crate) fn prune(&self, wanted: impl Fn(u32) -> bool) {
        self.0.lock().retain(|&backend, links| {
            links.retain_mut(Link::is_ready);
            wanted(backend) && !links.is_empty()
        });
    }
}
