//! Connections, and the answers over them.

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

/// The number of bytes that are read at once. All connections of a thread use the same buffer,
/// which stays in the cache.
const READ: usize = 64 << 10;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

/// The number of reads after which a connection counts as long.
const LONG: u32 = 64;

/// A connection, with at most one request in flight.
pub(super) struct Link {
    stream: TcpStream,
    reads: u32,
}

impl Link {
    /// Connects to the first of the addresses that answers.
    ///
    /// # Errors
    /// None of them does.
    pub(super) async fn open(addresses: &[SocketAddr]) -> io::Result<Self> {
        let stream = TcpStream::connect(addresses).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, reads: 0 })
    }

    /// True if, as far as is known, the server has neither closed the connection nor sent
    /// unrequested bytes.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends a request and waits for the head of its answer.
    ///
    /// # Errors
    /// The connection broke, or the bytes are no answer.
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

    /// Reads once, and passes the bytes to `take`; 0 bytes mean the end of the connection.
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
            // The kernel acknowledges every piece that is read, which takes a third of this
            // program's CPU time if the server is on the same machine. This makes it acknowledge
            // every other piece. A server that waits for an acknowledgement may pause once for 40
            // ms, after which the kernel returns to its default. So it is only done under load, and
            // never at the beginning of a connection.
            set_tcp_quickack(&self.stream, false)?;
        }
        Ok(length)
    }
}

/// An answer whose head has come.
pub(super) struct Answer {
    link: Link,
    /// The head.
    pub(super) head: Head,
    /// The bytes of the body that came together with the head.
    early: Vec<u8>,
}

impl Answer {
    /// Passes the next bytes of the body to `data`, once or several times; false: the body has
    /// ended.
    ///
    /// # Errors
    /// The connection broke, or ended before the body did.
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

    /// The connection, if it can be used again.
    pub(super) fn into_link(self) -> Option<Link> {
        (self.head.keep && self.head.body.is_complete()).then_some(self.link)
    }
}

/// The error of a connection that ended too early.
pub(super) const BROKE: &str = "the connection broke";
