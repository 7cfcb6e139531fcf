//! One connection: serves its requests, one at a time, and closes it.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::Watcher;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;
use tower::ServiceExt;

use crate::client::Remote;
use crate::line::{Line, LineIo};
use crate::places::Seat;
use crate::socket::Socket;
use crate::stall::StallLimit;
use crate::tls::Tls;
use crate::unread;

/// The state that all connections of a listener share.
#[derive(Debug, Clone)]
pub struct ConnectionSetup {
    /// The routes. Each request has the [`Remote`] in its extensions, and the [`Line`] if the
    /// connection is not encrypted.
    pub router: Router,
    /// The time limit for a request's head, and for a TLS handshake.
    pub header_timeout: Duration,
    /// How long a client may leave pending output unread before its connection is closed.
    pub send_timeout: Duration,
    /// True if a connection may carry a second request.
    pub keep_alive: bool,
    /// Certificate and key; `None`: the connections are not encrypted.
    pub tls: Option<Tls>,
}

/// Serves the requests of a connection until it closes, its seat is needed, or the client has
/// disconnected during a request.
pub(crate) async fn run(
    setup: ConnectionSetup,
    socket: Socket,
    remote: Remote,
    seat: Seat,
    watcher: Watcher,
) {
    let (line, seat) = (Line::new(socket), Arc::new(seat));
    let answering = async {
        let io = StallLimit::new(LineIo(Arc::clone(&line)), setup.send_timeout);
        match setup.tls.clone() {
            None => answer(&setup, io, Some(&line), remote, &seat, watcher).await,
            Some(tls) => match timeout(setup.header_timeout, tls.accept(io)).await {
                // An encrypted connection has no line: no other thread may write to it.
                Ok(Ok(io)) => answer(&setup, io, None, remote, &seat, watcher).await,
                Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                Err(_) => tracing::debug!("a TLS handshake took too long"),
            },
        }
    };
    tokio::select! {
        // Poll in this order, so that a request that can be answered at once is answered even if
        // its client has already disconnected.
        biased;
        () = answering => {}
        () = left_alone(&line, &seat) => tracing::debug!("a client has left"),
        () = seat.told_to_go() => tracing::debug!("an idle connection made room"),
    }
}

async fn answer(
    setup: &ConnectionSetup,
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    line: Option<&Arc<Line>>,
    remote: Remote,
    seat: &Arc<Seat>,
    watcher: Watcher,
) {
    let (line, answering) = (line.cloned(), Arc::clone(seat));
    let (router, patience) = (setup.router.clone(), setup.header_timeout);
    let service = service_fn(move |mut request: Request<Incoming>| {
        answering.begin();
        let extensions = request.extensions_mut();
        extensions.insert(remote);
        if let Some(line) = &line {
            extensions.insert(Arc::clone(line));
        }
        let (router, seat) = (router.clone(), Arc::clone(&answering));
        async move {
            let respond = async |request| {
                let Ok(response) = router.oneshot(request).await;
                response
            };
            let response = unread::answer(respond, request, patience).await;
            Ok::<_, Infallible>(response.map(|body| Answer { body, seat }))
        }
    });
    let io = TokioIo::new(WatchedIo { io, seat: Arc::clone(seat) });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(setup.header_timeout)
        .keep_alive(setup.keep_alive)
        .serve_connection(io, service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Completes once the client has closed its side while a request is being answered. hyper notices a
/// closed side only if no bytes are unread. Without this function, a single extra byte of the
/// client would keep the request running.
async fn left_alone(line: &Line, seat: &Seat) {
    let mut closed = pin!(line.closed());
    let mut is_closed = false;
    // This future is polled together with the connection. So it also covers a request that begins
    // after the client has closed its side.
    poll_fn(move |context| {
        is_closed = is_closed || closed.as_mut().poll(context).is_ready();
        if is_closed && seat.is_busy() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A response body that notifies the seat when it is complete.
struct Answer {
    body: Body,
    seat: Arc<Seat>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.seat.end();
    }
}

/// A connection's I/O that notifies the seat when everything is written.
struct WatchedIo<I> {
    io: I,
    seat: Arc<Seat>,
}

impl<I: AsyncRead + Unpin> AsyncRead for WatchedIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for WatchedIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        if let Poll::Ready(Ok(())) = flushed {
            self.seat.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
