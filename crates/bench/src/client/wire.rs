//! HTTP/1.1 parsing of responses: the head, and where the body ends.
//!
//! This module replaces hyper to save CPU time with busy servers. Hyper's channel between
//! connection and reader, with its buffers and wakers, took as much time as the rest of this
//! program outside the kernel.

use anyhow::{Context, Result, bail};
use memchr::memchr;

/// A response with a longer head, or a longer line in a chunked body, is refused.
const LONGEST: usize = 64 << 10;
const MOST_HEADERS: usize = 100;

/// The head of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    /// HTTP status.
    pub(super) status: u16,
    /// True if the body is a stream of server-sent events.
    pub(super) is_stream: bool,
    /// True if the connection stays open after the body.
    pub(super) keep: bool,
    /// The parser of the body.
    pub(super) body: Body,
}

/// Parses the head of a response. Also returns its length in bytes; `None`: more bytes are needed.
///
/// # Errors
/// The bytes are not an HTTP/1 response.
pub(super) fn head(bytes: &[u8]) -> Result<Option<(Head, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes).context("the answer is not HTTP")? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial if bytes.len() > LONGEST => {
            bail!("the answer's head is too long")
        }
        httparse::Status::Partial => return Ok(None),
    };
    let status = response.code.unwrap_or(0);
    let mut is_stream = false;
    let mut keep = response.version == Some(1);
    let mut state = State::UntilClose;
    for header in response.headers {
        let value = header.value.trim_ascii();
        let has = |word: &[u8]| {
            value.len() >= word.len() && value[..word.len()].eq_ignore_ascii_case(word)
        };
        if header.name.eq_ignore_ascii_case("content-type") {
            is_stream = has(b"text/event-stream");
        } else if header.name.eq_ignore_ascii_case("connection") {
            keep = (keep || has(b"keep-alive")) && !has(b"close");
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") && has(b"chunked") {
            state = State::Size;
        } else if header.name.eq_ignore_ascii_case("content-length") && state != State::Size {
            let text = std::str::from_utf8(value).context("the answer's length is no number")?;
            state = State::of_length(text.parse().context("the answer's length is no number")?);
        }
    }
    if status < 200 || status == 204 || status == 304 {
        state = State::Done;
    }
    keep &= state != State::UntilClose;
    let body = Body { state, line: Vec::new() };
    Ok(Some((Head { status, is_stream, keep, body }, length)))
}

/// The parser of a body: tracks how much is still to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Body {
    state: State,
    /// The incomplete last line of a chunked body.
    line: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    UntilClose,
    Length(u64),
    /// Before the line with a chunk's size.
    Size,
    /// Inside a chunk of which this many bytes are left.
    Chunk(u64),
    /// Before the line end after a chunk's data.
    ChunkEnd,
    /// After the chunk of size 0, in the trailers.
    Trailer,
    Done,
}

impl State {
    fn of_length(length: u64) -> Self {
        if length == 0 { Self::Done } else { Self::Length(length) }
    }
}

impl Body {
    /// Parses the next bytes of the connection, and passes those of the body to `data`.
    ///
    /// # Errors
    /// The bytes are not a valid chunked body.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut data: impl FnMut(&[u8])) -> Result<()> {
        while !bytes.is_empty() {
            match self.state {
                State::UntilClose => {
                    data(bytes);
                    return Ok(());
                }
                State::Length(left) | State::Chunk(left) => {
                    let here =
                        usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
                    let left = left - here as u64;
                    data(&bytes[..here]);
                    bytes = &bytes[here..];
                    self.state = match self.state {
                        State::Chunk(_) if left == 0 => State::ChunkEnd,
                        State::Chunk(_) => State::Chunk(left),
                        _ => State::of_length(left),
                    };
                }
                State::Size | State::ChunkEnd | State::Trailer => bytes = self.line(bytes)?,
                State::Done => bail!("the answer is longer than it said"),
            }
        }
        Ok(())
    }

    /// Parses a line or its beginning. Returns the bytes after it.
    fn line<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let Some(end) = memchr(b'\n', bytes) else {
            self.line.extend_from_slice(bytes);
            if self.line.len() > LONGEST {
                bail!("the answer is badly chunked");
            }
            return Ok(&[]);
        };
        let cut = !self.line.is_empty();
        if cut {
            self.line.extend_from_slice(&bytes[..end]);
        }
        let line = if cut { &self.line[..] } else { &bytes[..end] }.trim_ascii();
        self.state = match self.state {
            State::Size => match chunk_size(line).context("the answer is badly chunked")? {
                0 => State::Trailer,
                size => State::Chunk(size),
            },
            State::ChunkEnd if line.is_empty() => State::Size,
            State::Trailer if line.is_empty() => State::Done,
            State::Trailer => State::Trailer,
            _ => bail!("the answer is badly chunked"),
        };
        self.line.clear();
        Ok(&bytes[end + 1..])
    }

    /// True if the whole body was read.
    pub(super) fn is_complete(&self) -> bool {
        self.state == State::Done
    }

    /// True if the body is complete when the server closes the connection.
    pub(super) fn may_end(&self) -> bool {
        matches!(self.state, State::Done | State::UntilClose)
    }
}

fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?.trim_ascii();
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Head {
        head(text.as_bytes()).unwrap().expect("a whole head").0
    }

    #[test]
    fn heads_say_how_the_body_ends() {
        let head = parsed(
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n",
        );
        assert!(head.is_stream && head.keep);
        assert_eq!((head.status, head.body.state), (200, State::Size));
        let head = parsed("HTTP/1.1 429 x\r\ncontent-length: 12\r\nconnection: close\r\n\r\n");
        assert!(!head.is_stream && !head.keep);
        assert_eq!((head.status, head.body.state), (429, State::Length(12)));
        let head = parsed("HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n");
        assert!(head.keep && head.body.is_complete());
        let head = parsed("HTTP/1.1 200 OK\r\n\r\n");
        assert!(!head.keep && !head.body.is_complete() && head.body.may_end());
        assert!(parsed("HTTP/1.1 204 No Content\r\n\r\n").body.is_complete());
    }

    #[test]
    fn heads_may_be_cut_and_nonsense_is_refused() {
        let text = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx";
        for end in 0..text.len() - 1 {
            assert_eq!(head(&text[..end]).unwrap(), None, "{end}");
        }
        assert_eq!(head(text).unwrap().unwrap().1, text.len() - 1);
        assert!(head(b"SSH-2.0-OpenSSH\r\n").is_err());
        assert!(head(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n").is_err());
    }

    fn read(state: State, pieces: &[&[u8]]) -> Result<(Vec<u8>, bool)> {
        let mut body = Body { state, line: Vec::new() };
        let mut all = Vec::new();
        for piece in pieces {
            body.feed(piece, |data| all.extend_from_slice(data))?;
        }
        Ok((all, body.is_complete()))
    }

    #[test]
    fn bodies_end_where_they_say() {
        let all = |state, bytes: &[u8]| read(state, &[bytes]).unwrap();
        assert_eq!(all(State::Length(3), b"abc"), (b"abc".to_vec(), true));
        assert_eq!(all(State::Length(4), b"abc"), (b"abc".to_vec(), false));
        assert_eq!(all(State::Size, b"3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n"), (b"abc".to_vec(), true));
        assert_eq!(all(State::Size, b"3\r\nabc\r\n0\r\n"), (b"abc".to_vec(), false));
        for (state, bytes) in [
            (State::Length(1), &b"ab"[..]),
            (State::Size, b"x\r\n"),
            (State::Size, b"1\r\nab\r\n"),
            (State::Size, b"0\r\n\r\nx"),
            (State::Size, b"ffffffffffffffffff\r\n"),
        ] {
            assert!(read(state, &[bytes]).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn where_a_chunked_body_is_cut_makes_no_difference(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..8),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..12),
        ) {
            let mut bytes = Vec::new();
            for chunk in &chunks {
                bytes.extend_from_slice(format!("{:X}\r\n", chunk.len()).as_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(read(State::Size, &pieces).unwrap(), (chunks.concat(), true));
        }
    }
}
