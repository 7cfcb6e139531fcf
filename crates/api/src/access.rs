//! Checks a request's `Host` and `Origin` headers against the allowed hosts and origins.
//!
//! A page open in a browser can send requests to any server that the user's machine can reach.
//! Three headers help to detect such requests. `Host` is the name under which the page reached the
//! server; a page can make its own domain resolve to this machine. `Origin` names the page. A
//! browser sends `Content-Type: application/json` only after a preflight request.

use http::header::{HOST, ORIGIN};
use http::{HeaderMap, Uri, Version};

use crate::error::ApiError;

const ANY: &str = "*";

/// The hosts and origins whose requests are served.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Host names by which requests may address the server. `*.example.com` means all of its
    /// subdomains, and `*` any host. `None` allows any host.
    pub allowed_hosts: Option<Vec<String>>,
    /// Origins that may send requests from a browser, such as `https://example.com`; `*` means any.
    pub allowed_origins: Vec<String>,
    /// True if requests from other origins are refused. Otherwise they are served, and the browser
    /// hides the response from the page.
    pub refuse_other_origins: bool,
}

impl Access {
    fn allows_origin(&self, origin: &str) -> bool {
        self.allowed_origins.iter().any(|allowed| allowed == ANY || allowed == origin)
    }

    /// True if pages of any origin may send requests from a browser.
    #[must_use]
    pub fn allows_every_origin(&self) -> bool {
        self.allowed_origins.iter().any(|origin| origin == ANY)
    }

    /// Checks the `Host` and `Origin` headers of a request.
    ///
    /// # Errors
    /// The request names another host, or comes from an origin that is not allowed.
    pub fn check(&self, headers: &HeaderMap, uri: &Uri, version: Version) -> Result<(), ApiError> {
        let mut hosts = headers.get_all(HOST).iter();
        let (host, second) = (hosts.next(), hosts.next());
        let invalid = |reason: &str| ApiError::invalid("host", format!("`Host`: {reason}"));
        if second.is_some() {
            return Err(invalid("there are several"));
        }
        if host.is_none() && version == Version::HTTP_11 {
            return Err(invalid("HTTP/1.1 needs it"));
        }
        let host = host.map(|host| host.to_str().map_err(|_| invalid("not a name"))).transpose()?;
        // The URL of a request may be absolute, and then contains the host too.
        let named = uri.authority().map(|authority| authority.as_str());
        if let Some(allowed) = &self.allowed_hosts
            && let Some(other) = [host, named].into_iter().flatten().find(|h| !matches(allowed, h))
        {
            let reason = format!("the host `{other}` is not one of --allowed-hosts");
            return Err(ApiError::Forbidden { reason, code: "host_not_allowed" });
        }
        if self.refuse_other_origins
            && let Some(origin) = headers.get(ORIGIN)
        {
            let origin = origin.to_str().unwrap_or_default();
            if !self.allows_origin(origin) && !host.is_some_and(|host| is_own(origin, host)) {
                let reason = format!(
                    "web pages of `{origin}` may not use this server: the origin is not in --allowed-origins"
                );
                return Err(ApiError::Forbidden { reason, code: "origin_not_allowed" });
            }
        }
        Ok(())
    }
}

/// Returns a host without its port and without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    match host.rsplit_once(':') {
        // With a second colon, the host is an IPv6 address without brackets and without a port.
        Some((name, _)) if !name.contains(':') => name,
        _ => host,
    }
}

fn matches(allowed: &[String], host: &str) -> bool {
    let host = bare(host).trim_end_matches('.').to_ascii_lowercase();
    allowed.iter().any(|pattern| {
        let pattern = pattern.to_ascii_lowercase();
        match pattern.strip_prefix('*') {
            Some("") => true,
            Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
            None => bare(&pattern) == host,
        }
    })
}

/// True if the origin is this server itself.
fn is_own(origin: &str, host: &str) -> bool {
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

/// True if the request comes from a page of this server.
#[must_use]
pub fn is_from_own_page(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    text(ORIGIN).zip(text(HOST)).is_some_and(|(origin, host)| is_own(origin, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(items: &[&str]) -> Vec<String> {
        items.iter().map(|&item| item.to_owned()).collect()
    }

    #[test]
    fn hosts_with_and_without_ports() {
        let allowed = list(&["localhost", "127.0.0.1", "::1", "*.example.com"]);
        let right = [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "127.0.0.1:1",
            "[::1]:80",
            "a.example.com",
        ];
        for host in right {
            assert!(matches(&allowed, host), "{host}");
        }
        let wrong = ["", "evil.example", "localhost.evil.example", "xlocalhost", "example.com"];
        for host in wrong.into_iter().chain(["evilexample.com", "[::2]", "127.0.0.1.nip.io"]) {
            assert!(!matches(&allowed, host), "{host}");
        }
        assert!(matches(&list(&["*"]), "anything"));
    }

    #[test]
    fn only_the_servers_own_pages_are_its_own() {
        assert!(is_own("http://localhost:8000", "localhost:8000"));
        for (origin, host) in
            [("null", "localhost"), ("http://localhost:3000", "localhost:8000"), ("", "")]
        {
            assert!(!is_own(origin, host), "{origin}");
        }
    }
}
