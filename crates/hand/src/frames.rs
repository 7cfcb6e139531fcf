//! Reads and writes frames on a non-blocking socket.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use forebay_protocol::{Frame, FrameError, HEADER_BYTES, Header};
use thiserror::Error;

use crate::store::StoreError;

/// Why a connection is unusable.
#[derive(Debug, Error)]
pub(crate) enum StreamError {
    /// The peer closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed.
    #[error("socket: {0}")]
    Io(#[from] std::io::Error),
    /// Ranks that compute the same plan gave different results.
    #[error("ranks 0 and {rank} disagree in step {step}: {how}")]
    Disagreement {
        /// The first rank that differs from rank 0.
        rank: u32,
        /// The number of the step.
        step: u64,
        /// The difference, with the values of both ranks.
        how: String,
    },
    /// Ranks have page pools of different sizes, so they can't execute the same plans.
    #[error("ranks have different models, or pools: {0:?} pages")]
    Pools(Vec<u32>),
    /// A rank sent an invalid request to the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The peer sent an invalid frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Assembles frames from the bytes that the socket delivers.
#[derive(Default)]
pub(crate) struct FrameReader {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    body: Option<Body>,
}

struct Body {
    header: Header,
    words: Vec<i32>,
    filled: usize,
}

impl FrameReader {
    /// Returns the next frame; `None`: no complete frame has arrived yet.
    pub(crate) fn read(&mut self, socket: &mut UnixStream) -> Result<Option<Frame>, StreamError> {
        loop {
            let target = match &mut self.body {
                None => &mut self.header[self.header_filled..],
                Some(body) => &mut bytemuck::cast_slice_mut(&mut body.words)[body.filled..],
            };
            let got = if target.is_empty() {
                0
            } else {
                match socket.read(target) {
                    Ok(0) => return Err(StreamError::Closed),
                    Ok(n) => n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                    Err(e) if e.kind() == ErrorKind::ConnectionReset => {
                        return Err(StreamError::Closed);
                    }
                    Err(e) => return Err(e.into()),
                }
            };
            if let Some(body) = &mut self.body {
                body.filled += got;
                if body.filled == body.words.len() * 4
                    && let Some(body) = self.body.take()
                {
                    self.header_filled = 0;
                    return Ok(Some(Frame::new(body.header, body.words)?));
                }
            } else {
                self.header_filled += got;
                if self.header_filled == HEADER_BYTES {
                    let header = Header::decode(&self.header)?;
                    let words = vec![0; header.words as usize];
                    self.body = Some(Body { header, words, filled: 0 });
                }
            }
        }
    }
}

/// The capacity in bytes that an empty writer keeps.
const KEPT_BYTES: usize = 1 << 20;

/// Buffers the bytes that the socket has not accepted yet.
#[derive(Default)]
pub(crate) struct FrameWriter {
    waiting: Vec<u8>,
    written: usize,
}

impl FrameWriter {
    /// Writes as many bytes as the socket accepts now, and buffers the rest.
    pub(crate) fn send(
        &mut self,
        socket: &mut UnixStream,
        bytes: &[u8],
    ) -> Result<(), StreamError> {
        if self.is_empty() {
            let taken = write_some(socket, bytes)?;
            self.waiting.extend_from_slice(&bytes[taken..]);
        } else {
            self.waiting.extend_from_slice(bytes);
        }
        Ok(())
    }

    /// Writes as many of the buffered bytes as the socket accepts now.
    pub(crate) fn flush(&mut self, socket: &mut UnixStream) -> Result<(), StreamError> {
        self.written += write_some(socket, &self.waiting[self.written..])?;
        if self.written == self.waiting.len() {
            self.waiting.clear();
            self.waiting.shrink_to(KEPT_BYTES);
            self.written = 0;
        }
        Ok(())
    }

    /// True if no bytes are buffered.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

fn write_some(socket: &mut UnixStream, bytes: &[u8]) -> Result<usize, StreamError> {
    let mut taken = 0;
    while taken < bytes.len() {
        match socket.write(&bytes[taken..]) {
            Ok(n) => taken += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                return Err(StreamError::Closed);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{Row, StepPlan, Want};

    use super::*;

    #[test]
    fn frames_survive_any_cutting() {
        let (mut near, mut far) = UnixStream::pair().expect("socketpair");
        far.set_nonblocking(true).expect("nonblocking");
        let mut plan = StepPlan::default();
        let mut bytes = Vec::new();
        let mut sent = Vec::new();
        for step in 1..4 {
            plan.begin(step);
            for slot in 0..step as u32 {
                plan.push_row(Row { slot, start: 3, length: 1, want: Want::TOKEN });
            }
            let mut one = Vec::new();
            plan.encode(&mut one).expect("within the limit");
            bytes.extend_from_slice(&one);
            sent.push(plan.clone());
        }
        let mut reader = FrameReader::default();
        let mut got = Vec::new();
        for piece in bytes.chunks(7) {
            near.write_all(piece).expect("write");
            while let Some(frame) = reader.read(&mut far).expect("read") {
                got.push(StepPlan::decode(&frame).expect("plan"));
            }
        }
        assert_eq!(got, sent);
        drop(near);
        assert!(matches!(reader.read(&mut far), Err(StreamError::Closed)));
    }

    #[test]
    fn a_full_socket_keeps_the_rest() {
        let (mut near, mut far) = UnixStream::pair().expect("socketpair");
        near.set_nonblocking(true).expect("nonblocking");
        let bytes: Vec<u8> = (0..4_000_000_u32).map(|i| (i % 251) as u8).collect();
        let mut writer = FrameWriter::default();
        writer.send(&mut near, &bytes).expect("send");
        assert!(!writer.is_empty(), "a socket buffer is smaller than this");
        let mut got = vec![0; bytes.len()];
        let mut at = 0;
        while at < got.len() {
            at += far.read(&mut got[at..]).expect("read");
            writer.flush(&mut near).expect("flush");
        }
        assert_eq!(got, bytes);
        assert!(writer.is_empty());
        assert!(writer.waiting.capacity() <= KEPT_BYTES, "a large buffer is freed");
    }
}
