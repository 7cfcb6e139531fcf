//! Request bodies, and their limits.

use bytes::{Bytes, BytesMut};
use forebay_api::ApiError;

/// Pieces of fewer bytes are copied into the previous one. Otherwise a client that sends single
/// bytes would use much more memory.
const SMALL_PIECE: usize = 4096;

/// A body in the pieces that arrived. Joining those of a large body takes time, so the parsing
/// thread does it.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    whole: Vec<Bytes>,
    /// Small pieces that came last.
    small: BytesMut,
}

impl Pieces {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.whole.iter().map(Bytes::len).sum::<usize>() + self.small.len()
    }

    pub(crate) fn push(&mut self, piece: Bytes) {
        // The first piece is usually the only one.
        let is_first = self.whole.is_empty() && self.small.is_empty();
        if piece.len() < SMALL_PIECE && !is_first {
            return self.small.extend_from_slice(&piece);
        }
        if !self.small.is_empty() {
            self.whole.push(std::mem::take(&mut self.small).freeze());
        }
        self.whole.push(piece);
    }

    /// Joins the pieces. Most bodies have one piece, which is not copied.
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

/// The largest number of bytes of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BodyLimit {
    /// Bytes.
    pub(crate) most: usize,
    /// Bytes without embeddings and images.
    pub(crate) json: usize,
    /// The flag that sets `json`.
    pub(crate) json_flag: &'static str,
}

impl BodyLimit {
    /// The error for a client whose body exceeds the limit.
    pub(crate) fn error(self, limit: usize) -> ApiError {
        let flag = if limit > self.json { "--max-body-bytes" } else { self.json_flag };
        ApiError::BodyTooLarge { limit, flag }
    }
}
