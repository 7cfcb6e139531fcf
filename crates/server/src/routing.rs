//! Routing preferences in headers, for clients that cannot change the body.

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use forebay_api::{ApiError, Generation, preference};
use forebay_engine::Preference;

use crate::reply::Failure;
use crate::state::Shared;

/// The header of Forebay's router, and the header of SGLang's router.
const KEY_HEADERS: [&str; 2] = ["x-routing-key", "x-smg-routing-key"];
/// vLLM's header that selects a replica.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// The routing preferences of a request's headers.
pub(crate) struct Routing(pub(crate) Preference);

impl Routing {
    /// Sets the parameters' preferences to those of the headers, unless the body has preferences.
    pub(crate) fn fill(&self, generation: &mut Generation) {
        let Preference { key, replica } = &self.0;
        let body = &mut generation.preference;
        if body.key.is_none() && body.replica.is_none() {
            (body.key, body.replica) = (key.clone(), *replica);
        }
    }
}

impl FromRequestParts<Shared> for Routing {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Failure> {
        let headers = &parts.headers;
        let mut key = (KEY_HEADERS[0], None);
        for name in KEY_HEADERS {
            if let (None, Some(value)) = (key.1, text(headers, name)?) {
                key = (name, Some(value));
            }
        }
        let rank = text(headers, RANK_HEADER)?;
        let parsed = rank.map(str::parse).transpose().map_err(|_| {
            let reason = format!("`{RANK_HEADER}`: expected the number of a replica");
            ApiError::invalid(RANK_HEADER, reason)
        })?;
        if key.1.is_none() && parsed.is_none() {
            return Ok(Self(Preference::default()));
        }
        Ok(Self(preference(key, (RANK_HEADER, parsed), state.limits()?)?))
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, ApiError> {
    let value = headers.get(name).map(|value| value.to_str()).transpose();
    value.map_err(|_| ApiError::invalid(name, format!("`{name}`: expected ASCII")))
}
