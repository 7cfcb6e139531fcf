//! Connections, and the relay of bytes between a local socket and a remote one.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, copy, split};
use tokio::net::{TcpStream, UnixStream};

/// How long sent bytes may stay unacknowledged before the kernel closes a connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// After this long without a message (four pings), the peer counts as lost.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);
/// The interval between pings.
pub(crate) const PING: Duration = Duration::from_secs(1);
/// How long the peer may take to open a connection.
pub(crate) const OPENING: Duration = Duration::from_secs(5);

/// The side that closed a relayed connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The local socket.
    Near,
    /// The network connection.
    Far,
}

/// Configures a connection: small frames are sent immediately, and missing acknowledgements close
/// it.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let limit = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, limit)?)
}

/// Describes why a connection was lost. A killed process does not close its TLS session. The TLS
/// library's long message for that error is replaced by a short one.
pub(crate) fn said(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "its connection ended".to_owned(),
        _ => error.to_string(),
    }
}

/// Copies bytes in both directions until one side closes. All bytes that the closing side had sent
/// are copied first.
pub(crate) async fn relay(near: &mut UnixStream, far: impl AsyncRead + AsyncWrite) -> Side {
    let (mut near_read, mut near_write) = near.split();
    let (mut far_read, mut far_write) = split(far);
    tokio::select! {
        _ = copy(&mut near_read, &mut far_write) => Side::Near,
        _ = copy(&mut far_read, &mut near_write) => Side::Far,
    }
}
