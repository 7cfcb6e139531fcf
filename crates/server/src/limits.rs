//! Limits of every request: the size of its body, and the time in which it must arrive.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::Uri;
use bytes::Bytes;
use forebay_api::limits::{Limited, takes_embeds, takes_images};
use forebay_api::{ApiError, Inflater};
use forebay_http::{Charge, ClientId, HasClients};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::time::{timeout, timeout_at};

use crate::config::ServerConfig;
use crate::cost::unread;
use crate::ignored::ignore;
use crate::inflated::Inflated;
use crate::intake::LARGE_BODY;
use crate::intake::body::{BodyLimit, Pieces};
use crate::intake::turns::{Pace, Turn, Turns, Verdict};
use crate::state::Shared;

/// A body is charged in steps, before its bytes arrive: `STEP` bytes, or the bytes so far divided
/// by `STEP_PART` if that is more. So a client that declares a large body but sends little of it is
/// charged little.
const STEP: usize = 16 << 10;
const STEP_PART: usize = 4;

/// A request's body and its client.
pub(crate) struct Upload {
    body: Body,
    client: ClientId,
    /// The inflater of a compressed body, or the error for an unsupported encoding.
    inflater: Result<Option<Inflater>, ApiError>,
}

impl Upload {
    pub(crate) fn new(body: Body, client: ClientId) -> Self {
        Self { body, client, inflater: Ok(None) }
    }

    /// Returns the body, inflated if it is compressed. Limits apply to the inflated bytes.
    pub(crate) fn into_body(self) -> Result<Body, ApiError> {
        Ok(match self.inflater? {
            Some(inflater) => Body::new(Inflated::new(self.body, inflater)),
            None => self.body,
        })
    }
}

impl<S: HasClients> FromRequest<Arc<S>> for Upload {
    type Rejection = Infallible;

    async fn from_request(request: Request, state: &Arc<S>) -> Result<Self, Infallible> {
        let (mut parts, body) = request.into_parts();
        let client = ClientId::from_request_parts(&mut parts, state).await?;
        Ok(Self { inflater: Inflater::of(&parts.headers), ..Self::new(body, client) })
    }
}

/// Returns the limit of a body. `embeds` is true if the body may have embeddings or images.
pub(crate) fn body_limit(config: &ServerConfig, embeds: bool) -> BodyLimit {
    let (json, json_flag) = if config.max_body_bytes < config.max_json_bytes {
        (config.max_body_bytes, "--max-body-bytes")
    } else {
        (config.max_json_bytes, "--max-json-bytes")
    };
    BodyLimit { most: if embeds { config.max_body_bytes } else { json }, json, json_flag }
}

/// Reads and parses a body. The returned charge covers the memory of the result: keep it as long as
/// the result.
pub(crate) async fn read<T>(upload: Upload, state: &Shared) -> Result<(T, Arc<Charge>), ApiError>
where
    T: Limited + Send + 'static,
{
    let images = state.model.images.is_some() && takes_images(T::PARAMS);
    let limit = body_limit(&state.config, images || takes_embeds(T::PARAMS));
    let charge = Arc::new(state.budget.open(upload.client));
    let turns = state.intake.turns();
    let (pieces, _turn) =
        collect(upload, limit, state.config.receive_timeout, turns, &charge).await?;
    let (request, unread) = state.intake.parse(pieces, limit, &charge).await?;
    for name in unread {
        ignore(state, &name)?;
    }
    Ok((request, charge))
}

/// Reads a body without parsing it, for any route.
pub(crate) async fn whole(upload: Upload, state: &Shared) -> Result<(Bytes, Charge), ApiError> {
    let limit = body_limit(&state.config, true);
    let charge = state.budget.open(upload.client);
    let turns = state.intake.turns();
    let (pieces, _turn) =
        collect(upload, limit, state.config.receive_timeout, turns, &charge).await?;
    Ok((pieces.join(), charge))
}

/// The maximum size of the body of an admin request, in bytes.
const SMALL_BYTES: usize = 16 << 10;

/// Reads and parses the body of an admin request.
pub(crate) async fn small<T: DeserializeOwned>(
    state: &Shared,
    upload: Upload,
) -> Result<T, ApiError> {
    let (body, _charge) = whole(upload, state).await?;
    order(&body)
}

/// Parses the body of an admin request. An empty body means no fields.
pub(crate) fn order<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    if body.len() > SMALL_BYTES {
        let reason = format!("the body has {} bytes, and {SMALL_BYTES} at most", body.len());
        return Err(ApiError::invalid("body", reason));
    }
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))
}

/// Parses the query parameters of a URL.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ApiError> {
    match Query::try_from_uri(uri) {
        Ok(Query(query)) => Ok(query),
        Err(error) => Err(ApiError::invalid("query", error.body_text())),
    }
}

/// Reads a body of at most `limit` bytes that has to arrive within `time`. A large body waits for
/// its turn, which lasts until the caller has parsed it. Reading all large bodies at once would
/// allocate and clear memory for all of them.
pub(crate) async fn collect(
    upload: Upload,
    limit: BodyLimit,
    time: Duration,
    turns: &Turns,
    charge: &Charge,
) -> Result<(Pieces, Option<Turn>), ApiError> {
    let client = upload.client;
    let mut body = upload.into_body()?;
    // A declared length above the limit is rejected before anything is read.
    let declared = body.size_hint().lower();
    if declared > limit.most as u64 {
        return Err(limit.error(limit.most));
    }
    let expired = ApiError::BodyTimeout { seconds: time.as_secs() };
    let read = read_frames(&mut body, client, limit, turns, charge);
    timeout(time, read).await.unwrap_or(Err(expired))
}

async fn read_frames(
    body: &mut Body,
    client: ClientId,
    limit: BodyLimit,
    turns: &Turns,
    charge: &Charge,
) -> Result<(Pieces, Option<Turn>), ApiError> {
    let hint = body.size_hint();
    // The caller has checked a declared size against the limit. Here the size is checked against
    // the budget of an idle server.
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    charge.check(unread(size(hint.lower())))?;
    let most = hint.upper().map_or(usize::MAX, size);
    let mut pieces = Pieces::default();
    let mut so_far = 0;
    let (mut turn, mut pace): (Option<Turn>, _) = (None, Pace::Steady);
    let mut charged = None;
    loop {
        if charged.is_none_or(|charged| so_far >= charged) {
            let step = STEP.max(so_far / STEP_PART);
            let next = so_far.saturating_add(step).min(most.max(so_far));
            charge.at_least(unread(next))?;
            charged = Some(next);
        }
        if so_far >= LARGE_BODY && turn.is_none() {
            turn = Some(turns.take(client, pace).await);
        }
        let in_time = match &turn {
            None => None,
            Some(turn) => timeout_at(turn.deadline(), body.frame()).await.ok(),
        };
        let frame = match in_time {
            Some(frame) => frame,
            None => {
                // A client that sends nothing needs no turn.
                if turn.take().is_some() {
                    pace = Pace::Slow;
                }
                body.frame().await
            }
        };
        let Some(frame) = frame else { return Ok((pieces, turn)) };
        let frame = frame.map_err(broken)?;
        let Ok(data) = frame.into_data() else { continue };
        so_far += data.len();
        if so_far > limit.most {
            return Err(limit.error(limit.most));
        }
        match turn.as_mut().map(|turn| turn.arrived(data.len())) {
            None | Some(Verdict::GoesOn) => {}
            Some(Verdict::TooSlow) => (turn, pace) = (None, Pace::Slow),
            Some(Verdict::Over) => (turn, pace) = (None, Pace::Steady),
        }
        pieces.push(data);
    }
}

/// Converts an error from reading a body to the client's error.
pub(crate) fn broken(error: axum::Error) -> ApiError {
    match error.into_inner().downcast::<ApiError>() {
        Ok(error) => *error,
        Err(error) => ApiError::BrokenBody { reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Waker};

    use axum::http::header::CONTENT_ENCODING;
    use axum::http::{HeaderMap, HeaderValue};
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use forebay_http::ByteBudget;
    use http_body_util::channel::Channel;
    use tokio::task::JoinSet;

    use crate::intake::turns::PATIENCE;

    use super::*;

    const CLIENT: ClientId = ClientId(1);
    const TIME: Duration = Duration::from_secs(60);

    fn upload(body: impl Into<Body>) -> Upload {
        Upload::new(body.into(), CLIENT)
    }

    fn at_most(most: usize) -> BodyLimit {
        BodyLimit { most, json: most, json_flag: "--max-json-bytes" }
    }

    fn free() -> Charge {
        ByteBudget::new(usize::MAX).open(CLIENT)
    }

    async fn all(body: Body, limit: usize) -> Result<Bytes, ApiError> {
        let charge = free();
        let (pieces, _) =
            collect(upload(body), at_most(limit), TIME, &Turns::new(1), &charge).await?;
        Ok(pieces.join())
    }

    #[tokio::test]
    async fn a_compressed_body_is_bounded_by_what_it_becomes() {
        let gzip = |data: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        };
        let read = async |compressed: Vec<u8>, limit: usize| {
            let encoding = HeaderValue::from_static("gzip");
            let headers = HeaderMap::from_iter([(CONTENT_ENCODING, encoding)]);
            let upload = Upload { inflater: Inflater::of(&headers), ..upload(compressed) };
            let charge = free();
            let read = collect(upload, at_most(limit), TIME, &Turns::new(1), &charge).await;
            read.map(|(pieces, _)| pieces.join())
        };
        let large = vec![b'x'; 3 << 20];
        assert_eq!(read(gzip(b"{}"), 2).await.unwrap(), "{}");
        assert_eq!(read(gzip(&large), 3 << 20).await.unwrap(), large);
        let flag = "--max-json-bytes";
        let over = read(gzip(&large), (3 << 20) - 1).await;
        assert_eq!(over.unwrap_err(), ApiError::BodyTooLarge { limit: (3 << 20) - 1, flag });
        let wrong = read(b"{}".to_vec(), 100).await.unwrap_err();
        assert!(wrong.to_string().contains("gzip"), "{wrong}");
        // The inflated bytes are charged, too.
        let budget = ByteBudget::new(1 << 20);
        let headers = HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static("gzip"))]);
        let upload = Upload { inflater: Inflater::of(&headers), ..upload(gzip(&large)) };
        let charge = budget.open(CLIENT);
        let read = collect(upload, at_most(1 << 30), TIME, &Turns::new(1), &charge).await;
        assert!(matches!(read.unwrap_err().status(), 413 | 429));
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
        let turns = Turns::new(1);
        let (limit, charge) = (at_most(4 * LARGE_BODY), free());
        let (mut slow, body) = Channel::<Bytes>::new(2);
        slow.send_data(vec![1; LARGE_BODY].into()).await.unwrap();
        let mut slow_one = Box::pin(collect(upload(Body::new(body)), limit, TIME, &turns, &charge));
        assert!(!is_ready(&mut slow_one));
        assert_eq!(turns.free(), 0, "the body has its turn");

        let large = |times| upload(vec![2; times * LARGE_BODY]);
        let mut quick = Box::pin(collect(large(2), limit, TIME, &turns, &charge));
        let mut small = Box::pin(collect(upload(vec![3; 10]), limit, TIME, &turns, &charge));
        assert!(is_ready(&mut small), "small bodies need no turn");
        assert!(!is_ready(&mut quick));
        tokio::time::advance(2 * PATIENCE).await;
        assert!(!is_ready(&mut slow_one));
        let (pieces, turn) = quick.await.unwrap();
        assert_eq!((pieces.len(), turn.is_some()), (2 * LARGE_BODY, true));

        // From now on this body waits in the queue for slow bodies, whatever the other bodies do.
        slow.send_data(vec![1; 5].into()).await.unwrap();
        drop(slow);
        let (pieces, slow_turn) = slow_one.await.unwrap();
        assert_eq!((pieces.len(), slow_turn.is_some()), (LARGE_BODY + 5, true));
        assert_eq!(turns.free(), 0, "the quick body is being parsed");
        drop(turn);
        assert_eq!(turns.free(), 1);
    }

    /// Sends forty bodies, one byte per millisecond each. Returns how many turns passed before a
    /// large body of another client was read.
    async fn turns_before(clients: u64) -> u64 {
        let turns = Arc::new(Turns::new(1));
        let mut trickles = JoinSet::new();
        for number in 0..40 {
            let (mut sender, body) = Channel::<Bytes>::new(1);
            trickles.spawn(async move {
                sender.send_data(vec![1; LARGE_BODY].into()).await.ok();
                while sender.send_data(vec![1].into()).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
            let upload = Upload::new(Body::new(body), ClientId(2 + number % clients));
            let turns = Arc::clone(&turns);
            trickles.spawn(async move {
                let limit = at_most(1 << 30);
                collect(upload, limit, Duration::MAX, &turns, &free()).await.ok();
            });
        }
        // Long enough for each body to have had a turn.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(turns.given() > 40);
        let before = turns.given();
        let body = upload(vec![2; 32 * LARGE_BODY]);
        let charge = free();
        let read = collect(body, at_most(1 << 30), TIME, &turns, &charge);
        let read = timeout(TIME, read).await;
        assert_eq!(read.expect("the body gets its turn").unwrap().0.len(), 32 * LARGE_BODY);
        turns.given() - before
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_trickle_hold_nobody_up() {
        for clients in [1, 40] {
            assert!(turns_before(clients).await <= 2, "{clients} clients");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clients_take_turns_whatever_they_send() {
        let turns = Turns::new(1);
        let first = turns.take(ClientId(1), Pace::Steady).await;
        let mut greedy: Vec<_> =
            (0..3).map(|_| Box::pin(turns.take(ClientId(1), Pace::Steady))).collect();
        assert!(!greedy.iter_mut().any(is_ready));
        let mut other = Box::pin(turns.take(ClientId(2), Pace::Steady));
        assert!(!is_ready(&mut other));
        // A request that leaves the queue is skipped.
        let mut gone = Box::pin(turns.take(ClientId(3), Pace::Steady));
        assert!(!is_ready(&mut gone));
        drop(gone);
        drop(first);
        let [next, mut after, mut last] = <[_; 3]>::try_from(greedy).ok().unwrap();
        drop(next.await);
        let turn = other.await;
        assert!(!is_ready(&mut after) && !is_ready(&mut last));
        drop(turn);
        drop(after.await);
        drop(last.await);
        assert_eq!(turns.free(), 1);
    }
}
