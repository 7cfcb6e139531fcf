//! Frames on the socket to the brain.

use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use forebay_protocol::{Frame, FrameError, HEADER_BYTES, Header, Kind};
use thiserror::Error;

/// The read size: enough for the frame of an ordinary step, its masks and the next frame.
const AT_ONCE: usize = 1 << 18;

/// Why the connection is unusable.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    /// The brain has died, or has closed the socket in the middle of a frame.
    #[error("the brain has gone: {0}")]
    Gone(#[from] io::Error),
    /// The bytes from the brain are not a valid frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
}

/// Frames from the brain.
pub(crate) struct Incoming(BufReader<UnixStream>);

impl Incoming {
    pub(crate) fn new(socket: &UnixStream) -> io::Result<Self> {
        Ok(Self(BufReader::with_capacity(AT_ONCE, socket.try_clone()?)))
    }

    /// Returns the next frame; `None` if the brain has closed the socket or ordered the exit.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, ConnectionError> {
        Ok(self.first()?.filter(|frame| frame.header().kind != Kind::Shutdown))
    }

    /// The socket on which to wait for the next frame; `None` if part of a frame is already
    /// buffered.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.0.buffer().is_empty().then(|| self.0.get_ref().as_fd())
    }

    /// Returns the next frame of any kind; `None` if the brain has closed the socket.
    pub(crate) fn first(&mut self) -> Result<Option<Frame>, ConnectionError> {
        let mut head = [0; HEADER_BYTES];
        let mut filled = 0;
        while filled < HEADER_BYTES {
            match self.0.read(&mut head[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A killed brain may leave unread data in the socket.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let header = Header::decode(&head)?;
        let mut words = vec![0_i32; header.words as usize];
        self.0.read_exact(bytemuck::cast_slice_mut(&mut words))?;
        Ok(Some(Frame::new(header, words)?))
    }
}

/// Frames to the brain. Threads that load weights also send their progress through it.
pub(crate) struct Outgoing(Mutex<UnixStream>);

impl Outgoing {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self(Mutex::new(socket))
    }

    /// Writes a whole frame.
    pub(crate) fn send(&self, frame: &[u8]) -> Result<(), ConnectionError> {
        let mut socket = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(socket.write_all(frame)?)
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{Hello, Message};

    use super::*;

    #[test]
    fn who_waits_at_the_socket_misses_no_frame_that_is_here_already() {
        let (mut brain, socket) = UnixStream::pair().expect("a socket");
        let mut incoming = Incoming::new(&socket).expect("a reader");
        let frame = Hello { pid: 7 }.encode().expect("a frame");
        brain.write_all(&[&frame[..], &frame[..]].concat()).expect("written");
        assert!(incoming.socket().is_some());
        incoming.next().expect("a frame");
        assert!(incoming.socket().is_none(), "the second frame came with the first");
        incoming.next().expect("a frame");
        assert!(incoming.socket().is_some());
    }
}
