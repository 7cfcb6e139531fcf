//! Connections, and the responses that arrive over them.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Poll, ready};

use anyhow::{Context, Result, bail};
use bytes::{Buf, Bytes};
use rustix::net::sockopt::set_tcp_quickack;
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

use super::load;
use super::wire::{self, Head};

/// The size of the read buffer in bytes. All connections of a thread share one buffer, which stays
/// in the processor's cache.
const READ: usize = 64 << 10;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

/// The number of reads after which a connection counts as long-lived.
const LONG: u32 = 64;

/// A connection, with at most one request in flight.
pub(super) struct Link {
    stream: TcpStream,
    reads: u32,
}

impl Link {
    /// Connects to the first of the addresses that accepts a connection.
    ///
    /// # Errors
    /// No address accepts a connection.
    pub(super) async fn open(addresses: &[SocketAddr]) -> io::Result<Self> {
        let stream = TcpStream::connect(addresses).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, reads: 0 })
    }

    /// True if nothing shows that the server has closed the connection, or has sent bytes without a
    /// request.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends a request and waits for the head of the response.
    ///
    /// # Errors
    /// The connection broke, or the received bytes are not an HTTP response.
    pub(super) async fn send(mut self, head: Bytes, body: Bytes) -> Result<Answer> {
        self.stream.write_all_buf(&mut head.chain(body)).await?;
        let mut bytes = Vec::new();
        loop {
            if self.read(|piece| bytes.extend_from_slice(piece)).await? == 0 {
                bail!("the server closed it before it answered");
            }
            while let Some((head, length)) = wire::head(&bytes)? {
                bytes.drain(..length);
                // Informational responses such as 103 precede the final one.
                if head.status >= 200 {
                    return Ok(Answer { link: self, head, early: bytes });
                }
            }
        }
    }

    /// Reads once, and passes the bytes to `take`. Returns 0 if the server has closed the
    /// connection.
    async fn read(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        let length = poll_fn(|cx| {
            BUFFER.with_borrow_mut(|buffer| {
                let mut buffer = ReadBuf::new(buffer);
                ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
                take(buffer.filled());
                Poll::Ready(io::Result::Ok(buffer.filled().len()))
            })
        })
        .await?;
        self.reads = self.reads.saturating_add(1);
        if load::count_read() && self.reads == LONG {
            // The kernel acknowledges every segment that is read, which takes a third of this
            // program's CPU time if the server is on the same machine. This call makes it
            // acknowledge every second segment. A server that waits for an acknowledgement may then
            // pause once for 40 ms, after which the kernel returns to its default. So the call is
            // only made under load, and never at the beginning of a connection.
            set_tcp_quickack(&self.stream, false)?;
        }
        Ok(length)
    }
}

/// A response whose head has been received.
pub(super) struct Answer {
    link: Link,
    /// The head.
    pub(super) head: Head,
    /// The bytes of the body that arrived together with the head.
    early: Vec<u8>,
}

impl Answer {
    /// Passes the next bytes of the body to `data`, in one or several calls. Returns false at the
    /// end of the body.
    ///
    /// # Errors
    /// The connection broke, or was closed before the end of the body.
    pub(super) async fn next(&mut self, mut data: impl FnMut(&[u8])) -> Result<bool> {
        let body = &mut self.head.body;
        if !self.early.is_empty() {
            body.feed(&std::mem::take(&mut self.early), data)?;
            return Ok(true);
        }
        if body.is_complete() {
            return Ok(false);
        }
        let mut fed = Ok(());
        let length =
            self.link.read(|bytes| fed = body.feed(bytes, &mut data)).await.context(BROKE)?;
        fed?;
        if length == 0 && !body.may_end() {
            bail!("{BROKE}: the answer is not complete");
        }
        Ok(length > 0)
    }

    /// Returns the connection if it can be reused.
    pub(super) fn into_link(self) -> Option<Link> {
        (self.head.keep && self.head.body.is_complete()).then_some(self.link)
    }
}

/// The error for a connection that was closed too early.
pub(super) const BROKE: &str = "the connection broke";
