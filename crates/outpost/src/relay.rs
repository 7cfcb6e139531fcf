//! Connections, and the relay of bytes between a local socket and a remote one.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, copy, split};
use tokio::net::{TcpStream, UnixStream};

/// How long sent bytes may stay unacknowledged before the system closes a connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// After this long a silence, four pings, the other side counts as lost.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);
/// The time from one ping to the next.
pub(crate) const PING: Duration = Duration::from_secs(1);
/// How long one side may take to open a connection.
pub(crate) const OPENING: Duration = Duration::from_secs(5);

/// The side whose end ended a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The socket here.
    Near,
    /// The network.
    Far,
}

/// Makes a connection send small frames at once, and notice missing acknowledgements.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let limit = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, limit)?)
}

/// Why a connection ended, as text. A killed process sends no TLS closing message, which TLS
/// reports at length.
pub(crate) fn said(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "its connection ended".to_owned(),
        _ => error.to_string(),
    }
}

/// Copies bytes both ways until one side ends. Everything that it had sent has arrived by then.
pub(crate) async fn relay(near: &mut UnixStream, far: impl AsyncRead + AsyncWrite) -> Side {
    let (mut near_read, mut near_write) = near.split();
    let (mut far_read, mut far_write) = split(far);
    tokio::select! {
        _ = copy(&mut near_read, &mut far_write) => Side::Near,
        _ = copy(&mut far_read, &mut near_write) => Side::Far,
    }
}
