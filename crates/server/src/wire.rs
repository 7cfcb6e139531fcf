//! The connection of a request, for direct writes of response chunks.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::Version;
use axum::http::request::Parts;
use forebay_egress::EgressMode;
use forebay_http::Line;

use crate::state::Shared;

/// The connection to which chunks are written without hyper; `None`: direct writes are disabled, or
/// the response has no chunks (HTTP/1.0).
pub(crate) struct Wire(pub(crate) Option<Arc<Line>>);

impl FromRequestParts<Shared> for Wire {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Infallible> {
        let usable = state.config.egress == EgressMode::Direct && parts.version == Version::HTTP_11;
        Ok(Self(usable.then(|| parts.extensions.get::<Arc<Line>>().cloned()).flatten()))
    }
}
