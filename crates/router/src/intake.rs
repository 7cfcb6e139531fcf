//! Reads the bodies of clients' requests, within the router's memory budget.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use forebay_api::{ApiError, Inflater};
use forebay_http::RequestBody;
use http_body_util::BodyExt;
use hyper::body::Body;
use memchr::memmem;
use tokio::time::timeout;

use crate::budget::{Budget, Held};

/// The sizes in bytes of the first and of the largest allocation for a body. Allocations grow, so a
/// client that sends byte by byte takes no more memory than others.
const FIRST_PIECE: usize = 4 << 10;
const LARGEST_PIECE: usize = 256 << 10;
/// A body that is larger than the JSON limit has to contain one of these fields: embeddings, or
/// images in the spelling of each API. The backend checks more closely.
const LARGE: [&[u8]; 6] = [
    b"\"prompt_embeds\"",
    b"\"image_url\"",
    b"\"image_data\"",
    b"\"images\"",
    b"\"source\"",
    b"\"input_image\"",
];
/// The length of the longest entry of [`LARGE`].
const LONGEST: usize = 15;

/// The limits on bodies, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyLimits {
    /// The largest body in bytes.
    pub whole: usize,
    /// The largest body in bytes of a request without `prompt_embeds` and images.
    pub json: usize,
    /// The largest total size of all requests' bodies in bytes.
    pub all: usize,
}

impl Default for BodyLimits {
    /// The defaults of a brain.
    fn default() -> Self {
        Self { whole: 64 << 20, json: 4 << 20, all: 1 << 30 }
    }
}

/// Takes memory for a body from the budget.
fn take(held: &mut Held, more: usize) -> Result<(), ApiError> {
    if held.take(more) {
        return Ok(());
    }
    let limit = held.budget().limit();
    let reason = format!("request bodies take all {limit} bytes of --max-request-bytes-in-flight");
    Err(ApiError::Overloaded { reason })
}

/// A body that is being received.
struct Arriving {
    limits: BodyLimits,
    held: Held,
    /// The whole body, as long as it consists of one chunk. Most bodies do, and are not copied.
    only: Bytes,
    /// Buffers that are filled one after the other; all but the last are full.
    pieces: Vec<BytesMut>,
    length: usize,
}

impl Arriving {
    fn new(limits: BodyLimits, budget: &Arc<Budget>) -> Self {
        Self { limits, held: Held::new(budget), only: Bytes::new(), pieces: Vec::new(), length: 0 }
    }

    fn push(&mut self, data: Bytes) -> Result<(), ApiError> {
        let is_first = self.length == 0;
        self.length += data.len();
        if self.length > self.limits.whole {
            return Err(ApiError::BodyTooLarge {
                limit: self.limits.whole,
                flag: "--max-payload-size",
            });
        }
        if is_first {
            take(&mut self.held, data.len())?;
            self.only = data;
        } else {
            let first = std::mem::take(&mut self.only);
            self.copy(&first)?;
            self.held.give(first.len());
            self.copy(&data)?;
        }
        if self.length > self.limits.json && !self.may_be_large() {
            return Err(ApiError::BodyTooLarge {
                limit: self.limits.json,
                flag: "--max-json-bytes",
            });
        }
        Ok(())
    }

    fn copy(&mut self, mut data: &[u8]) -> Result<(), ApiError> {
        while !data.is_empty() {
            let room = self.pieces.last().map_or(0, |piece| piece.capacity() - piece.len());
            if room == 0 {
                let size = (FIRST_PIECE << self.pieces.len().min(16)).min(LARGEST_PIECE);
                take(&mut self.held, size)?;
                self.pieces.push(BytesMut::with_capacity(size));
                continue;
            }
            let (now, later) = data.split_at(room.min(data.len()));
            self.pieces.last_mut().into_iter().for_each(|piece| piece.extend_from_slice(now));
            data = later;
        }
        Ok(())
    }

    /// True if the body received so far has a field for which large bodies are allowed. Checked
    /// when the JSON limit is first exceeded.
    fn may_be_large(&mut self) -> bool {
        let has = |piece: &[u8]| LARGE.iter().any(|field| memmem::find(piece, field).is_some());
        let found = has(&self.only) || self.pieces.iter().any(|piece| has(piece));
        // The field may be split between two buffers.
        let found = found
            || self.pieces.windows(2).any(|pair| {
                let end = &pair[0][pair[0].len().saturating_sub(LONGEST)..];
                let start = &pair[1][..pair[1].len().min(LONGEST)];
                has(&[end, start].concat())
            });
        if found {
            self.limits.json = usize::MAX;
        }
        found
    }

    /// Joins the buffers. While they are copied, twice the memory of the body is charged to the
    /// budget.
    fn join(mut self) -> Result<(Bytes, Held), ApiError> {
        if self.pieces.is_empty() {
            return Ok((self.only, self.held));
        }
        take(&mut self.held, self.length)?;
        let mut whole = Vec::with_capacity(self.length);
        for piece in self.pieces {
            // The copied buffer is freed before the next one is copied.
            whole.extend_from_slice(&piece);
        }
        self.held.give(self.held.bytes() - self.length);
        Ok((whole.into(), self.held))
    }
}

/// Reads a body that has to arrive within `time`. A compressed body is decompressed, and the limits
/// apply to its decompressed size.
pub(crate) async fn collect(
    (mut body, inflater): (RequestBody, Option<Inflater>),
    limits: BodyLimits,
    budget: &Arc<Budget>,
    time: Duration,
) -> Result<(Bytes, Held), ApiError> {
    let late = ApiError::BodyTimeout { seconds: time.as_secs() };
    if body.size_hint().lower() > limits.whole as u64 {
        return Err(ApiError::BodyTooLarge { limit: limits.whole, flag: "--max-payload-size" });
    }
    let read = read(&mut body, inflater, Arriving::new(limits, budget));
    timeout(time, read).await.unwrap_or(Err(late))
}

async fn read(
    body: &mut RequestBody,
    mut inflater: Option<Inflater>,
    mut arriving: Arriving,
) -> Result<(Bytes, Held), ApiError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ApiError::BrokenBody { reason: error.to_string() })?;
        let Ok(data) = frame.into_data() else { continue };
        let Some(inflater) = &mut inflater else {
            arriving.push(data)?;
            continue;
        };
        let mut rest = &data[..];
        while !rest.is_empty() {
            let piece = inflater.step(&mut rest)?;
            if !piece.is_empty() {
                arriving.push(piece.into())?;
                tokio::task::yield_now().await;
            }
        }
    }
    if let Some(mut inflater) = inflater {
        let piece = inflater.finish()?;
        if !piece.is_empty() {
            arriving.push(piece.into())?;
        }
    }
    arriving.join()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: BodyLimits = BodyLimits { whole: 1 << 20, json: 64 << 10, all: 4 << 20 };

    #[test]
    fn a_trickle_takes_about_as_much_as_it_brings() {
        let budget = Budget::new(usize::MAX);
        let mut body = Arriving::new(LIMITS, &budget);
        for sent in 1..=LIMITS.json {
            body.push(Bytes::from_static(b"x")).unwrap();
            assert!(budget.taken() <= 2 * sent + 2 * FIRST_PIECE, "{} for {sent}", budget.taken());
        }
        let (whole, held) = body.join().unwrap();
        assert_eq!((whole.len(), budget.taken()), (LIMITS.json, LIMITS.json));
        drop(held);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn only_embeddings_and_images_may_be_larger_than_json() {
        let budget = Budget::new(LIMITS.all);
        let large = vec![b' '; LIMITS.json];
        let mut body = Arriving::new(LIMITS, &budget);
        body.push(large.clone().into()).unwrap();
        let error = body.push(Bytes::from_static(b"x")).unwrap_err();
        assert_eq!(error, ApiError::BodyTooLarge { limit: LIMITS.json, flag: "--max-json-bytes" });
        drop(body);
        assert_eq!(LARGE.iter().map(|field| field.len()).max(), Some(LONGEST));
        // The field may be anywhere in the body.
        let places = [0, FIRST_PIECE - 7, 3 * FIRST_PIECE - 1, LIMITS.json - LONGEST];
        for (field, at) in LARGE.iter().flat_map(|field| places.map(|at| (field, at))) {
            let mut with = large.clone();
            with[at..at + field.len()].copy_from_slice(field);
            let mut body = Arriving::new(LIMITS, &budget);
            body.push(with.into()).unwrap();
            body.push(vec![b'x'; LIMITS.whole - LIMITS.json].into()).unwrap();
            let error = body.push(Bytes::from_static(b"x")).unwrap_err();
            assert_eq!(
                error,
                ApiError::BodyTooLarge { limit: LIMITS.whole, flag: "--max-payload-size" },
                "at {at}"
            );
        }
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn a_spent_budget_refuses_and_what_ends_is_given_back() {
        let budget = Budget::new(3 * FIRST_PIECE);
        let mut first = Arriving::new(LIMITS, &budget);
        first.push(vec![1; FIRST_PIECE].into()).unwrap();
        let mut second = Arriving::new(LIMITS, &budget);
        second.push(vec![2; 10].into()).unwrap();
        let error = second.push(vec![2; 2 * FIRST_PIECE].into()).unwrap_err();
        assert_eq!(error.status(), 429);
        drop(first);
        second.push(vec![2; 10].into()).unwrap();
        drop(second);
        assert_eq!(budget.taken(), 0);
    }

    proptest! {
        /// A body is joined correctly, however it was split into chunks.
        #[test]
        fn bodies_are_put_together_again(cuts in prop::collection::vec(1usize..9000, 0..20)) {
            let budget = Budget::new(usize::MAX);
            let mut body = Arriving::new(BodyLimits { json: usize::MAX, ..LIMITS }, &budget);
            let mut expected = Vec::new();
            for cut in cuts {
                let data: Vec<u8> = (0..cut).map(|at| (expected.len() + at) as u8).collect();
                body.push(data.clone().into()).unwrap();
                expected.extend(data);
            }
            prop_assert_eq!(body.join().unwrap().0, expected);
        }
    }
}
