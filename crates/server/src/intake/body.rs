//! Request bodies, and their limits.

use bytes::{Bytes, BytesMut};
use forebay_api::ApiError;

/// A chunk of fewer bytes is copied to the end of the previous chunk. Otherwise a client that sends
/// single bytes would use much more memory.
const SMALL_PIECE: usize = 4096;

/// A body as a list of the chunks that arrived. Joining the chunks of a large body takes time, so
/// the parsing thread does it.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    whole: Vec<Bytes>,
    /// The small chunks that came last, joined.
    small: BytesMut,
}

impl Pieces {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.whole.iter().map(Bytes::len).sum::<usize>() + self.small.len()
    }

    pub(crate) fn push(&mut self, piece: Bytes) {
        // The first chunk is usually the only one.
        let is_first = self.whole.is_empty() && self.small.is_empty();
        if piece.len() < SMALL_PIECE && !is_first {
            return self.small.extend_from_slice(&piece);
        }
        if !self.small.is_empty() {
            self.whole.push(std::mem::take(&mut self.small).freeze());
        }
        self.whole.push(piece);
    }

    /// Joins the chunks. Most bodies have one chunk, which is not copied.
    pub(crate) fn join(mut self) -> Bytes {
        if !self.small.is_empty() {
            self.whole.push(self.small.freeze());
        }
        if self.whole.len() > 1 {
            self.whole.concat().into()
        } else {
            self.whole.pop().unwrap_or_default()
        }
    }
}

/// The maximum size of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BodyLimit {
    /// The maximum number of bytes.
    pub(crate) most: usize,
    /// The maximum number of bytes without embeddings and images.
    pub(crate) json: usize,
    /// The flag that sets `json`.
    pub(crate) json_flag: &'static str,
}

impl BodyLimit {
    /// Returns the error for a client whose body exceeds `limit`.
    pub(crate) fn error(self, limit: usize) -> ApiError {
        let flag = if limit > self.json { "--max-body-bytes" } else { self.json_flag };
        ApiError::BodyTooLarge { limit, flag }
    }
}
