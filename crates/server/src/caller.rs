//! The client of a request, for handlers.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::client::{ClientId, KeyId};
use crate::state::Shared;

/// Identifies a request once. Later calls get the same answer.
fn identified(parts: &mut Parts, state: &Shared) -> (ClientId, KeyId) {
    if let Some(known) = parts.extensions.get() {
        return *known;
    }
    let found = state.clients.identify(&state.config.api_keys, parts);
    parts.extensions.insert(found);
    found
}

impl FromRequestParts<Shared> for ClientId {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Infallible> {
        Ok(identified(parts, state).0)
    }
}

impl FromRequestParts<Shared> for KeyId {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Infallible> {
        Ok(identified(parts, state).1)
    }
}
