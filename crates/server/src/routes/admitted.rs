//! The common entry of all routes that compute: it runs the same checks in the same order.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequest, FromRequestParts, Request};
use forebay_api::limits::Limited;
use forebay_api::{ApiError, Limits};
use forebay_http::{Charge, ClientId, KeyId};

use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::reply::Failure;
use crate::routing::Routing;
use crate::state::Shared;

/// A request body of a route that computes, and its checks.
pub(crate) trait Admissible: Limited + Send + 'static {
    /// A checked body, in which only the prompt's length can still be invalid.
    type Valid: Send;

    /// Returns the name of the requested model; `None`: the body names no model.
    fn model(&self) -> Option<&str>;

    /// Checks that the model fits the route.
    ///
    /// # Errors
    /// The model has another task.
    fn suits(&self, _state: &Shared) -> Result<(), ApiError> {
        Ok(())
    }

    /// Checks the parameters of the body.
    ///
    /// # Errors
    /// A parameter is invalid; the error names the first.
    fn validate_at(self, door: &Door<'_>) -> Result<Self::Valid, ApiError>;
}

/// The server state against which a body is checked, and the client that sent the body.
pub(crate) struct Door<'a> {
    pub(crate) state: &'a Shared,
    pub(crate) limits: Limits,
    /// Routing parameters from headers, which complete the body.
    pub(crate) routing: &'a Routing,
    pub(crate) key: KeyId,
    pub(crate) client: ClientId,
}

/// A request that passed all checks.
pub(crate) struct AdmittedRequest<T: Admissible> {
    pub(crate) admission: Admission,
    pub(crate) valid: T::Valid,
}

/// Everything about an admitted request except its body.
pub(crate) struct Admission {
    pub(crate) state: Shared,
    pub(crate) peer: Peer,
    pub(crate) arrived: Instant,
    /// The served name of the model.
    pub(crate) model: String,
    pub(crate) limits: Limits,
    pub(crate) routing: Routing,
    /// The body's memory charge, until its prompts are token ids.
    pub(crate) charge: Arc<Charge>,
}

impl<T: Admissible> FromRequest<Shared> for AdmittedRequest<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &Shared) -> Result<Self, Failure> {
        let (mut parts, body) = request.into_parts();
        let Ok(mut peer) = Peer::from_request_parts(&mut parts, state).await;
        let Ok(key) = KeyId::from_request_parts(&mut parts, state).await;
        let routing = Routing::from_request_parts(&mut parts, state).await?;
        let Ok(upload) = Upload::from_request(Request::from_parts(parts, body), state).await;
        let arrived = Instant::now();
        let (body, charge) = limits::read::<T>(upload, state).await?;
        let (model, adapter) = state.named(body.model())?;
        peer.adapter = adapter;
        body.suits(state)?;
        let limits = state.admit()?;
        let door = Door { state, limits, routing: &routing, key, client: charge.client() };
        let valid = body.validate_at(&door)?;
        let state = Arc::clone(state);
        let admission = Admission { state, peer, arrived, model, limits, routing, charge };
        Ok(Self { admission, valid })
    }
}
