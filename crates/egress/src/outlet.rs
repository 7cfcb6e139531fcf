//! The encoder and the socket that a streamed response lends to its mailbox, so that other threads
//! can write its events.

use std::sync::Arc;

use forebay_api::ApiError;
use forebay_http::Line;

use crate::delta::Delta;
use crate::events;
use crate::tally::Tally;

/// Encodes the events of one API. For a delta that ends in an error, the caller uses
/// [`EventEncoder::fail`].
pub trait EventEncoder: Send + 'static {
    /// Appends the events of a delta. The encoder may take content out of the delta.
    fn delta(
        &mut self,
        choice: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()>;
    /// True if the API's streams end with `data: [DONE]`.
    fn is_said_done(&self) -> bool {
        true
    }
    /// Appends an error and the end of the stream.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        events::event(&error.body(), out)?;
        if self.is_said_done() {
            out.extend_from_slice(events::DONE);
        }
        Ok(())
    }
    /// Returns the media type of the streams.
    fn media_type(&self) -> &'static str {
        "text/event-stream; charset=utf-8"
    }
    /// True if another brain's encoder could continue the response after any delta: there is one
    /// choice, and its tokens determine everything that was written.
    fn resumable(&self) -> bool;
    /// Continues a response whose part `before` another brain has written. Must be called before
    /// all other methods, and only if the encoder is resumable.
    fn resume(&mut self, before: &Delta);
    /// Appends the end of the stream after the last delta.
    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()>;
}

/// The encoder and the socket of a streamed response.
pub struct Outlet {
    /// Writes the events.
    pub encoder: Box<dyn EventEncoder>,
    /// The connection to write to; `None` if all events go through the response.
    pub line: Option<Arc<Line>>,
}

/// A reusable buffer for one chunk of HTTP/1.1's chunked transfer coding (RFC 9112, section 7.1).
#[derive(Debug, Default)]
pub(crate) struct Chunk(Vec<u8>);

impl Chunk {
    /// The space for the size line: at most 8 hexadecimal digits, CR, LF.
    const HEAD: usize = 10;

    /// Clears the chunk and returns the buffer to append its content to.
    pub(crate) fn start(&mut self) -> &mut Vec<u8> {
        self.0.clear();
        self.0.resize(Self::HEAD, 0);
        &mut self.0
    }

    /// Returns the chunk with all appended bytes. It is empty if there are none, since a chunk of
    /// length 0 would end the body.
    pub(crate) fn finish(&mut self) -> &[u8] {
        let mut size = self.0.len() - Self::HEAD;
        if size == 0 {
            return &[];
        }
        let mut at = Self::HEAD - 2;
        self.0[at..Self::HEAD].copy_from_slice(b"\r\n");
        while size > 0 && at > 0 {
            at -= 1;
            self.0[at] = b"0123456789abcdef"[size & 15];
            size >>= 4;
        }
        self.0.extend_from_slice(b"\r\n");
        &self.0[at..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_its_size_in_hexadecimal_and_its_content() {
        let mut chunk = Chunk::default();
        for size in [1, 9, 15, 16, 255, 256, 4095, 70_000] {
            let content = vec![b'x'; size];
            chunk.start().extend_from_slice(&content);
            let expected = [format!("{size:x}\r\n").as_bytes(), &content, b"\r\n"].concat();
            assert_eq!(chunk.finish(), expected);
        }
        chunk.start();
        assert!(chunk.finish().is_empty());
    }
}
