//! What every request has to pass: size and time limits of its body, the API key.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Query;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, Uri};
use bytes::{Bytes, BytesMut};
use forebay_api::ApiError;
use forebay_api::limits::{Limited, takes_embeds};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use subtle::ConstantTimeEq;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::budget::Charge;
use crate::intake::LARGE_BODY;
use crate::state::Shared;

/// How long a refused body is read and thrown away, so that a client that is still sending gets to read the answer.
const LINGER: Duration = Duration::from_secs(5);

/// How long a client whose turn it is may send nothing before the next one's turn comes.
const PATIENCE: Duration = Duration::from_millis(5);

/// Bytes of a piece below which it is copied to the one before it: a client that sends a byte a piece would have us keep much more.
const SMALL_PIECE: usize = 4096;

/// A body as it came in. Putting the pieces of a large one together takes a while, and is left to whoever parses it.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    whole: Vec<Bytes>,
    /// Small ones that came last.
    small: BytesMut,
}

impl Pieces {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.whole.iter().map(Bytes::len).sum::<usize>() + self.small.len()
    }

    fn push(&mut self, piece: Bytes) {
        // The first is most often the only one.
        let is_first = self.whole.is_empty() && self.small.is_empty();
        if piece.len() < SMALL_PIECE && !is_first {
            return self.small.extend_from_slice(&piece);
        }
        if !self.small.is_empty() {
            self.whole.push(std::mem::take(&mut self.small).freeze());
        }
        self.whole.push(piece);
    }

    /// The whole. Most bodies come in one piece, which is not copied.
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

/// Most bytes of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BodyLimit {
    /// Bytes.
    pub(crate) most: usize,
    /// Bytes beside embeddings.
    pub(crate) json: usize,
    /// The flag that sets the latter.
    pub(crate) json_flag: &'static str,
}

impl BodyLimit {
    fn of(state: &Shared, embeds: bool) -> Self {
        let config = &state.config;
        let (json, json_flag) = if config.max_body_bytes < config.max_json_bytes {
            (config.max_body_bytes, "--max-body-bytes")
        } else {
            (config.max_json_bytes, "--max-json-bytes")
        };
        Self { most: if embeds { config.max_body_bytes } else { json }, json, json_flag }
    }

    /// What a client is told whose body is over it.
    pub(crate) fn error(self, limit: usize) -> ApiError {
        let flag = if limit > self.json { "--max-body-bytes" } else { self.json_flag };
        ApiError::BodyTooLarge { limit, flag }
    }
}

/// Reads and parses a body. The charge is for what it takes: it is to be kept until that is gone.
pub(crate) async fn read<T>(body: Body, state: &Shared) -> Result<(T, Arc<Charge>), ApiError>
where
    T: DeserializeOwned + Limited + Send + 'static,
{
    let limit = BodyLimit::of(state, takes_embeds(T::PARAMS));
    let charge = Arc::new(state.budget.open());
    let turns = state.intake.turns();
    let (pieces, _turn) = collect(body, limit, state.config.body_timeout, turns, &charge).await?;
    Ok((state.intake.parse(pieces, limit, &charge).await?, charge))
}

/// A body as it is, whatever route it is for.
pub(crate) async fn whole(body: Body, state: &Shared) -> Result<(Bytes, Charge), ApiError> {
    let limit = BodyLimit::of(state, true);
    let charge = state.budget.open();
    let turns = state.intake.turns();
    let (pieces, _turn) = collect(body, limit, state.config.body_timeout, turns, &charge).await?;
    Ok((pieces.join(), charge))
}

/// What a URL asks for after its `?`.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ApiError> {
    match Query::try_from_uri(uri) {
        Ok(Query(query)) => Ok(query),
        Err(error) => Err(ApiError::invalid("query", error.body_text())),
    }
}

/// Reads a body of at most `limit` bytes that has to arrive within `time`. A large one is read when it is its turn, which lasts until the
/// caller has parsed it: if all were read at once, all would lie in memory that has to be found and cleared first.
async fn collect<'a>(
    mut body: Body,
    limit: BodyLimit,
    time: Duration,
    turns: &'a Semaphore,
    charge: &Charge,
) -> Result<(Pieces, Option<SemaphorePermit<'a>>), ApiError> {
    // A declared length over the limit is refused before anything is read.
    let declared = body.size_hint().lower();
    let result = if declared > limit.most as u64 {
        Err(limit.error(limit.most))
    } else {
        let expired = ApiError::BodyTimeout { seconds: time.as_secs() };
        timeout(time, read_frames(&mut body, limit, turns, charge)).await.unwrap_or(Err(expired))
    };
    let is_refused = matches!(
        result,
        Err(ApiError::BodyTooLarge { .. }
            | ApiError::RequestTooLarge { .. }
            | ApiError::Overloaded { .. })
    );
    if is_refused {
        tokio::spawn(async move { timeout(LINGER, discard(body)).await });
    }
    result
}

async fn read_frames<'a>(
    body: &mut Body,
    limit: BodyLimit,
    turns: &'a Semaphore,
    charge: &Charge,
) -> Result<(Pieces, Option<SemaphorePermit<'a>>), ApiError> {
    // No more than the limit, which was checked.
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(0);
    let mut pieces = Pieces::default();
    let mut so_far = 0;
    let mut turn = None;
    loop {
        if so_far >= LARGE_BODY && turn.is_none() {
            // Nobody closes it, and if so, there would be nothing to wait for.
            turn = turns.acquire().await.ok();
        }
        // Who waits for a turn holds no more than what has come.
        let expected = if declared <= LARGE_BODY || turn.is_some() { declared } else { 0 };
        let come = if so_far > expected { so_far.next_multiple_of(LARGE_BODY) } else { expected };
        charge.unread(come)?;
        let frame = match &turn {
            None => body.frame().await,
            Some(_) => match timeout(PATIENCE, body.frame()).await {
                Ok(frame) => frame,
                Err(_) => {
                    turn = None;
                    body.frame().await
                }
            },
        };
        let Some(frame) = frame else { return Ok((pieces, turn)) };
        let frame = frame.map_err(|error| ApiError::BrokenBody { reason: error.to_string() })?;
        let Ok(data) = frame.into_data() else { continue };
        so_far += data.len();
        if so_far > limit.most {
            return Err(limit.error(limit.most));
        }
        pieces.push(data);
    }
}

async fn discard(mut body: Body) {
    while let Some(Ok(_)) = body.frame().await {}
}

/// Whether the headers carry the key, if one is set. Takes the same time wherever a wrong key differs.
pub(crate) fn authorized(headers: &HeaderMap, key: Option<&str>) -> bool {
    let Some(key) = key else { return true };
    let given =
        headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
    given.is_some_and(|given| given.as_bytes().ct_eq(key.as_bytes()).into())
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use axum::http::HeaderValue;
    use http_body_util::channel::Channel;

    use super::*;
    use crate::budget::Budget;

    #[test]
    fn bearer_tokens() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(value));
            authorized(&headers, Some("secret"))
        };
        assert!(with("Bearer secret") && with("bearer  secret"));
        assert!(!with("Bearer secre") && !with("Bearer secret2") && !with("Basic secret"));
        assert!(!with("secret"));
        assert!(!authorized(&HeaderMap::new(), Some("secret")));
        assert!(authorized(&HeaderMap::new(), None));
    }

    fn at_most(most: usize) -> BodyLimit {
        BodyLimit { most, json: most, json_flag: "--max-json-bytes" }
    }

    async fn all(body: Body, limit: usize) -> Result<Bytes, ApiError> {
        let turns = Semaphore::new(1);
        let charge = Budget::new(usize::MAX).open();
        let time = Duration::from_secs(60);
        let (pieces, _) = collect(body, at_most(limit), time, &turns, &charge).await?;
        Ok(pieces.join())
    }

    #[tokio::test]
    async fn bodies_up_to_the_limit() {
        assert_eq!(all(Body::from(vec![7; 10]), 10).await.unwrap(), vec![7; 10]);
        let over = all(Body::from(vec![7; 11]), 10).await;
        let flag = "--max-json-bytes";
        assert_eq!(over.unwrap_err(), ApiError::BodyTooLarge { limit: 10, flag });
        assert_eq!(all(Body::empty(), 10).await.unwrap(), Bytes::new());
    }

    fn is_ready<F: Future>(future: &mut Pin<Box<F>>) -> bool {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_body_waits_for_its_turn_and_a_slow_one_gives_it_up() {
        let turns = Semaphore::new(1);
        let (time, limit) = (Duration::from_secs(60), at_most(4 * LARGE_BODY));
        let charge = Budget::new(usize::MAX).open();
        let (mut slow, body) = Channel::<Bytes>::new(2);
        slow.send_data(vec![1; LARGE_BODY].into()).await.unwrap();
        let mut slow_one = Box::pin(collect(Body::new(body), limit, time, &turns, &charge));
        assert!(!is_ready(&mut slow_one));
        assert_eq!(turns.available_permits(), 0, "it has its turn");

        let mut quick =
            Box::pin(collect(vec![2; 2 * LARGE_BODY].into(), limit, time, &turns, &charge));
        let mut small = Box::pin(collect(vec![3; 10].into(), limit, time, &turns, &charge));
        assert!(is_ready(&mut small), "small ones need no turn");
        assert!(!is_ready(&mut quick));
        tokio::time::advance(2 * PATIENCE).await;
        assert!(!is_ready(&mut slow_one));
        let (pieces, turn) = quick.await.unwrap();
        assert_eq!((pieces.len(), turn.is_some()), (2 * LARGE_BODY, true));

        slow.send_data(vec![1; 5].into()).await.unwrap();
        drop(slow);
        assert!(!is_ready(&mut slow_one), "the quick one is being parsed");
        drop(turn);
        let (pieces, turn) = slow_one.await.unwrap();
        assert_eq!((pieces.len(), turn.is_some()), (LARGE_BODY + 5, true));
    }
}
