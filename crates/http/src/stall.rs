//! A time limit for clients that stop reading.
//!
//! A client that stops reading would hold a descriptor, a task and its unsent text for an unlimited
//! time. So a blocked write has a time limit, which every sent byte renews: a slow client is
//! served, a stopped one is not. At the limit, the write fails. The error closes the connection and
//! drops its response, which aborts the request.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// The socket of a connection, or a wrapper of it.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Returns the number of buffered bytes, which are sent before the bytes of a new write. A
    /// blocked write may send some of the buffered bytes. Only a change of this number shows that.
    fn backlog(&self) -> usize;
    /// Makes the system drop unsent bytes when the connection is closed.
    fn give_up(&self);
}

/// A transport with a limit on the time without a sent byte.
pub(crate) struct StallLimit<T> {
    io: T,
    limit: Duration,
    /// The time limit of the blocked write; `None`: no write is blocked.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<T: Transport> StallLimit<T> {
    pub(crate) fn new(io: T, limit: Duration) -> Self {
        Self { io, limit, alarm: None }
    }

    fn watched<R>(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        let before = self.io.backlog();
        let written = write(Pin::new(&mut self.io), context);
        if written.is_ready() || self.io.backlog() < before {
            self.alarm = None;
        }
        if written.is_pending() {
            let limit = self.limit;
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep(limit)));
            ready!(alarm.as_mut().poll(context));
            tracing::debug!(?limit, "a client takes nothing: its connection is cut");
            self.io.give_up();
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        written
    }
}

impl<T: Transport> AsyncRead for StallLimit<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: Transport> AsyncWrite for StallLimit<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.watched(context, |io, context| io.poll_write(context, buffer))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.watched(context, |io, context| io.poll_write_vectored(context, buffers))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.watched(context, |io, context| io.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.watched(context, |io, context| io.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::advance;

    use super::*;

    impl Transport for DuplexStream {
        fn backlog(&self) -> usize {
            0
        }
        fn give_up(&self) {}
    }

    const LIMIT: Duration = Duration::from_secs(60);
    const NEARLY: Duration = Duration::from_secs(59);

    fn poll<T: Transport>(io: &mut StallLimit<T>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(io).poll_write(&mut Context::from_waker(Waker::noop()), bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stops_is_cut_and_a_slow_one_is_not() {
        let (mut client, server) = duplex(8);
        let mut io = StallLimit::new(server, LIMIT);
        io.write_all(b"12345678").await.unwrap();
        for _ in 0..5 {
            assert!(poll(&mut io, b"9").is_pending());
            advance(NEARLY).await;
            assert!(poll(&mut io, b"9").is_pending());
            // Reading one byte is enough.
            client.read_u8().await.unwrap();
            assert!(matches!(poll(&mut io, b"9"), Poll::Ready(Ok(1))));
        }
        // Time does not count while no bytes wait.
        advance(10 * LIMIT).await;
        assert!(poll(&mut io, b"9").is_pending());
        advance(LIMIT).await;
        let Poll::Ready(Err(error)) = poll(&mut io, b"9") else { panic!("the write still waits") };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// The unwritten rest of a chunk, which is written in small parts.
    struct Rest(usize);

    impl Transport for Rest {
        fn backlog(&self) -> usize {
            self.0
        }
        fn give_up(&self) {}
    }

    impl AsyncRead for Rest {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Rest {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            taken: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.0 -= taken.len();
            Poll::Pending
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_ahead_of_a_write_counts_too() {
        let mut io = StallLimit::new(Rest(100), LIMIT);
        for _ in 0..5 {
            assert!(poll(&mut io, b"x").is_pending(), "a byte was written");
            advance(NEARLY).await;
            assert!(poll(&mut io, b"").is_pending());
        }
        advance(NEARLY).await;
        assert!(matches!(poll(&mut io, b""), Poll::Ready(Err(_))));
    }
}
