//! A connection's socket to which both hyper and the egress thread write.
//!
//! hyper owns the connection. It reads requests, writes the heads and ends of responses, and
//! notices when the client disconnects. Between the head and the end of a streamed response it has
//! nothing to decide. So the egress thread writes those chunks itself: no task is woken, and
//! nothing is copied between threads. The two never write at the same time. A response that waits
//! for output *asks* for the line. The line *opens* once hyper has written all its bytes. It is
//! *shut* before hyper gets more to write, or when the socket is full. The line keeps the bytes
//! that the socket did not accept. They are written before hyper's next bytes.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::socket::Socket;
use crate::stall::Transport;

const SHUT: u8 = 0;
const ASKED: u8 = 1;
const OPEN: u8 = 2;

/// A socket to which another thread can write directly while its gate is open.
#[derive(Debug)]
pub struct Line {
    socket: Socket,
    gate: AtomicU8,
    /// The rest of a chunk that the socket accepted only in part.
    rest: Mutex<Vec<u8>>,
}

/// The outcome of writing a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The socket has accepted the whole chunk.
    Whole,
    /// The line is shut and has unwritten bytes, so the connection's task must be woken to write
    /// them.
    Waiting,
}

impl Line {
    /// Creates the line of a new connection. It is shut at first.
    #[must_use]
    pub fn new(socket: Socket) -> Arc<Self> {
        Arc::new(Self { socket, gate: AtomicU8::new(SHUT), rest: Mutex::default() })
    }

    /// Waits until the client has closed its side, even if earlier bytes are unread. hyper notices
    /// a closed side only when nothing is left to read.
    pub(crate) async fn closed(&self) {
        // A socket that cannot be watched is broken.
        let _ = self.socket.closed().await;
    }

    /// Lets the line open as soon as hyper has written its bytes.
    pub fn ask(&self) {
        let _ = self.gate.compare_exchange(SHUT, ASKED, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Shuts the line: from now on, hyper writes.
    pub fn shut(&self) {
        self.gate.store(SHUT, Ordering::Release);
    }

    /// True if [`Line::write`] may be called.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.gate.load(Ordering::Acquire) == OPEN
    }

    /// Writes without blocking. The line must be open, and no other thread may call [`Line::ask`]
    /// or [`Line::shut`] at the same time.
    pub fn write(&self, chunk: &[u8]) -> WriteOutcome {
        let taken = match self.socket.try_write(chunk) {
            Ok(taken) if taken == chunk.len() => return WriteOutcome::Whole,
            Ok(taken) => taken,
            // hyper gets the same error when it writes the rest, and then closes the connection.
            Err(_) => 0,
        };
        self.rest.lock().extend_from_slice(&chunk[taken..]);
        self.shut();
        WriteOutcome::Waiting
    }

    fn poll_rest(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut rest = self.rest.lock();
        while !rest.is_empty() {
            ready!(self.socket.poll_write_ready(context))?;
            match self.socket.try_write(&rest) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(taken) => drop(rest.drain(..taken)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_with(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&Socket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_rest(context))?;
        loop {
            ready!(self.socket.poll_write_ready(context))?;
            match write(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

/// The I/O through which hyper uses a line.
#[derive(Debug)]
pub struct LineIo(pub Arc<Line>);

impl AsyncRead for LineIo {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.socket.poll_read_ready(context))?;
            match self.0.socket.try_read_buf(buffer) {
                Ok(_) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for LineIo {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_with(context, |socket| socket.try_write(buffer))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_with(context, |socket| socket.try_write_vectored(buffers))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// hyper flushes its I/O only when it has no more bytes to write.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_rest(context))?;
        let gate = &self.0.gate;
        let _ = gate.compare_exchange(ASKED, OPEN, Ordering::AcqRel, Ordering::Acquire);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_rest(context))?;
        Poll::Ready(
            rustix::net::shutdown(&self.0.socket, rustix::net::Shutdown::Write)
                .map_err(io::Error::from),
        )
    }
}

impl Transport for LineIo {
    fn backlog(&self) -> usize {
        self.0.rest.lock().len()
    }

    fn give_up(&self) {
        // If this fails, the system drops the bytes by itself after some minutes.
        let _ = rustix::net::sockopt::set_socket_linger(&self.0.socket, Some(Duration::ZERO));
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns a line and its client.
    async fn pair() -> (Arc<Line>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let socket = listener.accept().await.unwrap().0;
        // The runtime has to register the socket as writable first.
        socket.writable().await.unwrap();
        (Line::new(Socket::Tcp(socket)), client)
    }

    #[tokio::test]
    async fn it_opens_only_when_asked_and_flushed() {
        let (line, _client) = pair().await;
        let mut io = LineIo(Arc::clone(&line));
        io.flush().await.unwrap();
        assert!(!line.is_open());
        line.ask();
        assert!(!line.is_open());
        io.flush().await.unwrap();
        assert!(line.is_open());
        line.ask();
        assert!(line.is_open());
        line.shut();
        io.flush().await.unwrap();
        assert!(!line.is_open());
    }

    #[tokio::test]
    async fn what_a_full_socket_did_not_take_comes_before_what_hyper_writes() {
        let (line, mut client) = pair().await;
        let mut io = LineIo(Arc::clone(&line));
        line.ask();
        io.flush().await.unwrap();
        let mut sent = Vec::new();
        let mut number = 0u32;
        loop {
            let chunk: Vec<u8> = (0..5_000u32).flat_map(|at| (number + at).to_le_bytes()).collect();
            number += 5_000;
            sent.extend_from_slice(&chunk);
            if line.write(&chunk) == WriteOutcome::Waiting {
                break;
            }
        }
        assert!(!line.is_open());
        let flushed = poll_fn(|context| Poll::Ready(Pin::new(&mut io).poll_flush(context))).await;
        assert!(flushed.is_pending() && !line.is_open());

        sent.extend_from_slice(b"the end");
        let expected = sent.len();
        let writing = tokio::spawn(async move {
            io.write_all(b"the end").await.unwrap();
            io
        });
        let mut got = vec![0; expected];
        client.read_exact(&mut got).await.unwrap();
        assert!(got == sent, "bytes are lost or out of order");
        let mut io = writing.await.unwrap();
        line.ask();
        io.flush().await.unwrap();
        assert!(line.is_open());
    }

    #[tokio::test]
    async fn a_client_that_has_gone_is_hypers_to_find() {
        let (line, client) = pair().await;
        let mut io = LineIo(Arc::clone(&line));
        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
        drop(client);
        io.0.closed().await;
        line.ask();
        // Either the flush or the write may notice the reset first.
        let flushed = io.flush().await;
        if flushed.is_ok() && line.is_open() {
            assert_eq!(line.write(b"chunk"), WriteOutcome::Waiting);
        }
        assert!(io.write_all(b"more").await.is_err());
    }
}
