//! Requests of the routes that only a router has.

use crate::limits::Bound;
use crate::parameter::{Line, own, tabled};

/// The largest size of a backend's URL in bytes.
const URL_BYTES: usize = 2048;

/// A request to register a backend at a router.
#[derive(Debug, Default)]
pub struct RegistrationRequest {
    /// The URL of the backend.
    pub url: String,
    /// Seconds until the registration expires unless renewed; `None` means a minute.
    pub ttl: Option<f32>,
}

#[rustfmt::skip]
const REGISTRATION: &[Line<RegistrationRequest>] = &[
    own("url", Bound::Text(URL_BYTES), "The address of the backend.", |r: &mut RegistrationRequest, v| v.put(&mut r.url)).required(),
    own("ttl", Bound::Number { least: 0.0, most: f64::MAX }, "Seconds until the registration expires, unless it is renewed; a minute if absent.", |r, v| v.put(&mut r.ttl)),
];

tabled!(RegistrationRequest, "A backend that registers at a router.", [REGISTRATION]);
