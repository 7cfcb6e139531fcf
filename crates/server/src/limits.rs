//! What every request has to pass: size and time limits of its body, the API key.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Query;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, Uri};
use bytes::Bytes;
use forebay_api::ApiError;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use subtle::ConstantTimeEq;
use tokio::time::timeout;

use crate::state::Shared;

/// How long a refused body is read and thrown away, so that a client that is still sending gets to read the answer.
const LINGER: Duration = Duration::from_secs(5);

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
    let pieces = collect(body, config.max_body_bytes, config.body_timeout).await?;
    state.intake.parse(pieces).await
}

/// A body as it is.
pub(crate) async fn whole(body: Body, state: &Shared) -> Result<Bytes, ApiError> {
    let config = &state.config;
    Ok(collect(body, config.max_body_bytes, config.body_timeout).await?.join())
}

/// What a URL asks for after its `?`.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ApiError> {
    match Query::try_from_uri(uri) {
        Ok(Query(query)) => Ok(query),
        Err(error) => Err(ApiError::invalid("query", error.body_text())),
    }
}

/// Reads a body of at most `limit` bytes that has to arrive within `time`.
async fn collect(mut body: Body, limit: usize, time: Duration) -> Result<Pieces, ApiError> {
    // A declared length over the limit is refused before anything is read.
    let declared = body.size_hint().lower();
    let result = if declared > limit as u64 {
        Err(ApiError::BodyTooLarge { limit })
    } else {
        let expired = ApiError::BodyTimeout { seconds: time.as_secs() };
        timeout(time, read_frames(&mut body, limit)).await.unwrap_or(Err(expired))
    };
    if matches!(result, Err(ApiError::BodyTooLarge { .. })) {
        tokio::spawn(async move { timeout(LINGER, discard(body)).await });
    }
    result
}

async fn read_frames(body: &mut Body, limit: usize) -> Result<Pieces, ApiError> {
    let mut pieces = Vec::new();
    let mut so_far = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ApiError::BrokenBody { reason: error.to_string() })?;
        let Ok(data) = frame.into_data() else { continue };
        so_far += data.len();
        if so_far > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        pieces.push(data);
    }
    Ok(Pieces(pieces))
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
    use axum::http::HeaderValue;

    use super::*;

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

    #[tokio::test]
    async fn bodies_up_to_the_limit() {
        let time = Duration::from_secs(60);
        let full = collect(Body::from(vec![7; 10]), 10, time).await.unwrap();
        assert_eq!(full.join(), vec![7; 10]);
        let over = collect(Body::from(vec![7; 11]), 10, time).await;
        assert_eq!(over.unwrap_err(), ApiError::BodyTooLarge { limit: 10 });
        assert_eq!(collect(Body::empty(), 10, time).await.unwrap().join(), Bytes::new());
    }
}
