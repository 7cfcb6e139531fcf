//! TCP and Unix stream sockets, and their listeners.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll, ready};

use bytes::BufMut;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::client::Remote;

/// A connection's socket.
#[derive(Debug)]
pub enum Socket {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A connection over a Unix socket.
    Unix(UnixStream),
}

/// Evaluates the same expression for either kind of socket.
macro_rules! either {
    ($socket:expr, $inner:ident => $what:expr) => {
        match $socket {
            Socket::Tcp($inner) => $what,
            Socket::Unix($inner) => $what,
        }
    };
}

impl Socket {
    pub(crate) fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, socket => socket.poll_read_ready(context))
    }

    pub(crate) fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, socket => socket.poll_write_ready(context))
    }

    pub(crate) fn try_read_buf(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        either!(self, socket => socket.try_read_buf(buffer))
    }

    pub(crate) fn try_write(&self, buffer: &[u8]) -> io::Result<usize> {
        either!(self, socket => socket.try_write(buffer))
    }

    pub(crate) fn try_write_vectored(&self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        either!(self, socket => socket.try_write_vectored(buffers))
    }

    /// Waits until the peer has closed its side, even if earlier bytes are unread. It makes no
    /// system calls: it waits for EPOLLRDHUP. tokio reports EPOLLRDHUP and urgent data as the same
    /// event, but no protocol here uses urgent data.
    pub(crate) async fn closed(&self) -> io::Result<()> {
        either!(self, socket => socket.ready(Interest::PRIORITY).await.map(drop))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, socket => socket.as_fd())
    }
}

/// A listener for connections.
#[derive(Debug)]
pub enum Listener {
    /// A TCP listener.
    Tcp(TcpListener),
    /// A listener on a Unix socket.
    Unix(UnixListener),
}

impl Listener {
    /// Waits for the next connection. Dropping the future loses no connection.
    pub(crate) async fn accept(&self) -> io::Result<(Socket, Remote)> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    pub(crate) fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(Socket, Remote)>> {
        Poll::Ready(match self {
            Self::Tcp(listener) => {
                ready!(listener.poll_accept(context)).map(|(socket, address)| {
                    // Events are small and urgent, so Nagle's algorithm is disabled. If this fails,
                    // only latency suffers.
                    let _ = socket.set_nodelay(true);
                    (Socket::Tcp(socket), Remote::Ip(IpAddr::to_canonical(&address.ip())))
                })
            }
            Self::Unix(listener) => ready!(listener.poll_accept(context))
                .map(|(socket, _)| (Socket::Unix(socket), Remote::Local)),
        })
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self::Unix(listener)
    }
}
