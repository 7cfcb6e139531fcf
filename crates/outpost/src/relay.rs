//! Connections, and the relay of bytes between a local socket and a remote one.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, copy, split};
use tokio::net::{TcpStream, UnixStream};

/// The time that sent bytes may stay unacknowledged before the system gives a connection up.
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// Silence of the other side after which it is lost: four pings.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);
/// The time from one ping to the next.
pub(crate) const PING: Duration = Duration::from_secs(1);
/// The time that one side may take to open a connection.
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

/// The reason of a connection's end, in words. A killed process sends no TLS farewell, which TLS
/// reports at length.
pub(crate) fn said(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "its connection ended".to_owned(),
        _ => error.to_string(),
    }
}

/// Copies bytes both ways until one side ends. All that it had sent has then arrived.
pub(crate) async fn relay(near: &mut UnixStream, far: impl AsyncRead + AsyncWrite) -> Side {
    let (mut near_read, mut near_write) = near.split();
    let (mut far_read, mut far_write) = split(far);
    tokio::select! {
        _ = copy(&mut near_read, &mut far_write) => Side::Near,
        _ = copy(&mut far_read, &mut near_write) => Side::Far,
    }
}
