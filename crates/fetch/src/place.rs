//! Parses and checks the target of a URL, without network access.

use std::net::IpAddr;

use url::{Host, Url};

use crate::config::Domains;
use crate::error::FetchError;

/// The length limit of a URL in bytes, more than any server accepts in a request line.
const LONGEST: usize = 8192;

/// The host and path of a request.
#[derive(Debug)]
pub(crate) struct Place {
    /// The host as in the URL, with brackets around an IPv6 address.
    pub(crate) host: String,
    /// The address, if the URL contains an address; `None`: it contains a name.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
    pub(crate) tls: bool,
    /// The value of the `Host` header: the host, with the port unless it is the scheme's default
    /// port.
    pub(crate) authority: String,
    /// The path and the query.
    pub(crate) target: String,
}

/// Parses a URL, and refuses one that is too long.
pub(crate) fn parse(text: &str) -> Result<Url, FetchError> {
    if text.len() > LONGEST {
        return Err(FetchError::BadUrl);
    }
    Url::parse(text).map_err(|_| FetchError::BadUrl)
}

impl Place {
    /// Returns the target of `url`, if the URL is allowed.
    pub(crate) fn of(url: &Url, domains: &Domains) -> Result<Self, FetchError> {
        let tls = match url.scheme() {
            "http" => false,
            "https" => true,
            other => return Err(FetchError::Scheme(other.to_owned())),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(FetchError::Credentials);
        }
        let (Some(host), Some(port)) = (url.host(), url.port_or_known_default()) else {
            return Err(FetchError::BadUrl);
        };
        let address = match host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some(IpAddr::V4(address)),
            Host::Ipv6(address) => Some(IpAddr::V6(address)),
        };
        let host = host.to_string();
        let listed = domains.has(&host);
        if !domains.is_empty() && !listed {
            return Err(FetchError::Domain(host));
        }
        if !matches!(port, 80 | 443) && !listed {
            return Err(FetchError::Port(port));
        }
        let authority = url.port().map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
        let target = match url.query() {
            Some(query) => format!("{}?{query}", url.path()),
            None => url.path().to_owned(),
        };
        Ok(Self { host, address, port, tls, authority, target })
    }
}
