//! What every request has to pass: size and time limits of its body.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Query;
use axum::http::Uri;
use bytes::Bytes;
use forebay_api::ApiError;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::intake::LARGE_BODY;
use crate::state::Shared;

/// How long a refused body is read and thrown away, so that a client that is still sending gets to read the answer.
const LINGER: Duration = Duration::from_secs(5);

/// How long a client whose turn it is may send nothing before the next one's turn comes.
const PATIENCE: Duration = Duration::from_millis(5);

/// A body as it came in. Putting the pieces of a large one together takes a while, and is left to whoever parses it.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<Bytes>);

impl Pieces {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// The whole. Most bodies come in one piece, which is not copied.
    pub(crate) fn join(mut self) -> Bytes {
        if self.0.len() > 1 { self.0.concat().into() } else { self.0.pop().unwrap_or_default() }
    }
}

/// Reads and parses a body.
pub(crate) async fn read<T>(body: Body, state: &Shared) -> Result<T, ApiError>
where
    T: DeserializeOwned + Send + 'static,
{
    let config = &state.config;
    let turns = state.intake.turns();
    let (pieces, _turn) = collect(body, config.max_body_bytes, config.body_timeout, turns).await?;
    state.intake.parse(pieces).await
}

/// A body as it is.
pub(crate) async fn whole(body: Body, state: &Shared) -> Result<Bytes, ApiError> {
    let config = &state.config;
    let turns = state.intake.turns();
    let (pieces, _turn) = collect(body, config.max_body_bytes, config.body_timeout, turns).await?;
    Ok(pieces.join())
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
async fn collect(
    mut body: Body,
    limit: usize,
    time: Duration,
    turns: &Semaphore,
) -> Result<(Pieces, Option<SemaphorePermit<'_>>), ApiError> {
    // A declared length over the limit is refused before anything is read.
    let declared = body.size_hint().lower();
    let result = if declared > limit as u64 {
        Err(ApiError::BodyTooLarge { limit })
    } else {
        let expired = ApiError::BodyTimeout { seconds: time.as_secs() };
        timeout(time, read_frames(&mut body, limit, turns)).await.unwrap_or(Err(expired))
    };
    if matches!(result, Err(ApiError::BodyTooLarge { .. })) {
        tokio::spawn(async move { timeout(LINGER, discard(body)).await });
    }
    result
}

async fn read_frames<'a>(
    body: &mut Body,
    limit: usize,
    turns: &'a Semaphore,
) -> Result<(Pieces, Option<SemaphorePermit<'a>>), ApiError> {
    let mut pieces = Vec::new();
    let mut so_far = 0;
    let mut turn = None;
    loop {
        if so_far >= LARGE_BODY && turn.is_none() {
            // Nobody closes it, and if so, there would be nothing to wait for.
            turn = turns.acquire().await.ok();
        }
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
        let Some(frame) = frame else { return Ok((Pieces(pieces), turn)) };
        let frame = frame.map_err(|error| ApiError::BrokenBody { reason: error.to_string() })?;
        let Ok(data) = frame.into_data() else { continue };
        so_far += data.len();
        if so_far > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        pieces.push(data);
    }
}

async fn discard(mut body: Body) {
    while let Some(Ok(_)) = body.frame().await {}
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use http_body_util::channel::Channel;

    use super::*;

    async fn all(body: Body, limit: usize) -> Result<Bytes, ApiError> {
        let turns = Semaphore::new(1);
        let (pieces, _) = collect(body, limit, Duration::from_secs(60), &turns).await?;
        Ok(pieces.join())
    }

    #[tokio::test]
    async fn bodies_up_to_the_limit() {
        assert_eq!(all(Body::from(vec![7; 10]), 10).await.unwrap(), vec![7; 10]);
        let over = all(Body::from(vec![7; 11]), 10).await;
        assert_eq!(over.unwrap_err(), ApiError::BodyTooLarge { limit: 10 });
        assert_eq!(all(Body::empty(), 10).await.unwrap(), Bytes::new());
    }

    fn is_ready<F: Future>(future: &mut Pin<Box<F>>) -> bool {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_body_waits_for_its_turn_and_a_slow_one_gives_it_up() {
        let turns = Semaphore::new(1);
        let (time, limit) = (Duration::from_secs(60), 4 * LARGE_BODY);
        let (mut slow, body) = Channel::<Bytes>::new(2);
        slow.send_data(vec![1; LARGE_BODY].into()).await.unwrap();
        let mut slow_one = Box::pin(collect(Body::new(body), limit, time, &turns));
        assert!(!is_ready(&mut slow_one));
        assert_eq!(turns.available_permits(), 0, "it has its turn");

        let mut quick = Box::pin(collect(vec![2; 2 * LARGE_BODY].into(), limit, time, &turns));
        let mut small = Box::pin(collect(vec![3; 10].into(), limit, time, &turns));
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
