//! The requests of a router's own routes.

use crate::limits::Bound;
use crate::parameter::{Line, own, tabled};

/// The bytes of a backend's address.
const URL_BYTES: usize = 2048;

/// A backend that registers at a router.
#[derive(Debug, Default)]
pub struct RegistrationRequest {
    /// The address of the backend.
    pub url: String,
    /// Seconds until the registration expires, unless it is renewed; a minute if absent.
    pub ttl: Option<f32>,
}

#[rustfmt::skip]
const REGISTRATION: &[Line<RegistrationRequest>] = &[
    own("url", Bound::Text(URL_BYTES), "The address of the backend.", |r: &mut RegistrationRequest, v| v.put(&mut r.url)).required(),
    own("ttl", Bound::Number { least: 0.0, most: f64::MAX }, "Seconds until the registration expires, unless it is renewed; a minute if absent.", |r, v| v.put(&mut r.ttl)),
];

tabled!(RegistrationRequest, "A backend that registers at a router.", [REGISTRATION]);
