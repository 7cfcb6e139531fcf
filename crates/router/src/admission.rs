//! Admission to the router: the keys of clients and operators, and which backends may register.

use std::net::IpAddr;
use std::str::FromStr;

use forebay_api::{ApiError, BackendUrl};
use forebay_http::{KeyId, Keys};
use http::HeaderMap;
use thiserror::Error;

/// Checks that a client may send requests, and returns the client's key.
///
/// # Errors
///
/// Keys are required, and the request has no valid one.
pub(crate) fn client(headers: &HeaderMap, keys: &Keys) -> Result<KeyId, ApiError> {
    match keys.shown(headers) {
        None if !keys.is_empty() => Err(ApiError::Unauthorized),
        key => Ok(KeyId(key)),
    }
}

/// Checks that a request may read the router's reports on backends. The request needs an operator's
/// key. If no operator's key is configured, a client's key suffices.
///
/// # Errors
///
/// The request has no sufficient key.
pub(crate) fn operator(headers: &HeaderMap, keys: &Keys, admin: &Keys) -> Result<(), ApiError> {
    if admin.is_empty() {
        return client(headers, keys).map(|_| ());
    }
    admin.shown(headers).map(|_| ()).ok_or(ApiError::Unauthorized)
}

/// The error for a text that is not a valid pattern.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`{0}` is neither a host, nor *.DOMAIN, nor an address with a prefix length, each with :PORT or without"
)]
pub struct PatternError(String);

/// A pattern of backends that may register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedBackends {
    host: Hosts,
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    /// A single host, in lower case.
    One(String),
    /// All hosts below a domain, which is stored with a leading dot.
    Below(String),
    /// Addresses whose first `bits` bits equal those of `address`.
    Network { address: IpAddr, bits: u8 },
}

impl FromStr for AllowedBackends {
    type Err = PatternError;

    /// `10.0.0.7`, `10.0.0.0/8`, `[fd00::]/8:8000`, `brain-1:8000` or `*.brains.internal:8000`.
    fn from_str(text: &str) -> Result<Self, PatternError> {
        let wrong = || PatternError(text.to_owned());
        let text = text.trim();
        // A colon inside brackets belongs to an IPv6 address.
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => {
                (host, Some(port.parse().map_err(|_| wrong())?))
            }
            _ => (text, None),
        };
        let host = if let Some((address, bits)) = host.split_once('/') {
            let address: IpAddr = bare(address).parse().map_err(|_| wrong())?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.parse().ok().filter(|&bits| bits <= most).ok_or_else(wrong)?;
            Hosts::Network { address, bits }
        } else if let Some(domain) = host.strip_prefix('*') {
            let below = domain.strip_prefix('.').is_some_and(is_name);
            Hosts::Below(if below { domain.to_ascii_lowercase() } else { return Err(wrong()) })
        } else {
            let host = bare(host);
            if host.parse::<IpAddr>().is_err() && !is_name(host) {
                return Err(wrong());
            }
            Hosts::One(host.to_ascii_lowercase())
        };
        Ok(Self { host, port })
    }
}

impl AllowedBackends {
    /// True if the pattern matches a backend's URL.
    pub(crate) fn allows(&self, url: &BackendUrl) -> bool {
        let (host, port) = url.address();
        let host = host.to_ascii_lowercase();
        let fits = match &self.host {
            Hosts::One(one) => *one == host,
            Hosts::Below(domain) => host.ends_with(domain) && host.len() > domain.len(),
            Hosts::Network { address, bits } => {
                host.parse().is_ok_and(|other| same_bits(*address, other, *bits))
            }
        };
        fits && self.port.is_none_or(|only| only == port)
    }
}

fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn is_name(host: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    !host.is_empty() && host.bytes().all(fine)
}

fn same_bits(a: IpAddr, b: IpAddr, bits: u8) -> bool {
    let shift = |width: u32| width - u32::from(bits);
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(shift(32)).unwrap_or(0) == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(shift(128)).unwrap_or(0) == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::AUTHORIZATION;

    use super::*;

    fn bearer(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(value))])
    }

    #[test]
    fn a_client_needs_one_of_the_keys_if_there_are_any() {
        let keys = Keys::new(["secret", "other"]);
        assert_eq!(client(&bearer("Bearer other"), &keys), Ok(KeyId(Some(1))));
        assert_eq!(client(&bearer("Bearer wrong"), &keys), Err(ApiError::Unauthorized));
        assert_eq!(client(&HeaderMap::new(), &keys), Err(ApiError::Unauthorized));
        assert_eq!(client(&HeaderMap::new(), &Keys::default()), Ok(KeyId(None)));
    }

    #[test]
    fn operators_need_their_own_key_where_there_is_one() {
        let (keys, admin) = (Keys::new(["client"]), Keys::new(["admin"]));
        assert!(operator(&bearer("Bearer admin"), &keys, &admin).is_ok());
        assert!(operator(&bearer("Bearer client"), &keys, &admin).is_err());
        assert!(operator(&bearer("Bearer client"), &keys, &Keys::default()).is_ok());
        assert!(operator(&HeaderMap::new(), &keys, &Keys::default()).is_err());
        assert!(operator(&HeaderMap::new(), &Keys::default(), &admin).is_err());
        assert!(operator(&HeaderMap::new(), &Keys::default(), &Keys::default()).is_ok());
    }

    #[test]
    fn backends_are_allowed_by_host_domain_or_network() {
        let allows = |pattern: &str, url: &str| {
            let pattern: AllowedBackends = pattern.parse().unwrap();
            pattern.allows(&BackendUrl::parse(url).unwrap())
        };
        for (pattern, fine, wrong) in [
            ("brain-1", "http://Brain-1:9", "http://brain-10:9"),
            ("brain-1:9", "http://brain-1:9", "http://brain-1:8"),
            ("*.brains.internal:9", "http://a.brains.internal:9", "http://brains.internal:9"),
            ("*.brains.internal", "http://a.b.brains.internal", "http://abrains.internal"),
            ("10.0.0.7", "http://10.0.0.7:1", "http://10.0.0.70:1"),
            ("10.1.0.0/16", "http://10.1.255.1:1", "http://10.2.0.1:1"),
            ("10.1.0.0/16:80", "http://10.1.255.1", "http://10.1.0.1:81"),
            ("0.0.0.0/0", "http://1.2.3.4:1", "http://[::1]:1"),
            ("[fd00::]/8:8000", "http://[fdab::1]:8000", "http://[fc00::1]:8000"),
            ("[::1]", "http://[::1]:5", "http://[::2]:5"),
        ] {
            assert!(allows(pattern, fine), "{pattern} {fine}");
            assert!(!allows(pattern, wrong), "{pattern} {wrong}");
        }
        for wrong in ["", "*", "*x", "10.0.0.0/33", "a/8", "host:x", "a b", "*.", "http://a"] {
            assert!(wrong.parse::<AllowedBackends>().is_err(), "{wrong}");
        }
    }
}
