//! URLs of backends, which a router or another server sends requests to.

use http::uri::Authority;
use thiserror::Error;

/// The error for a text that is not a backend's URL.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{url}` is not the URL of a backend: {reason}")]
pub struct UrlError {
    /// The URL as the user wrote it.
    pub url: String,
    /// Why the URL is invalid.
    pub reason: &'static str,
}

/// The address of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BackendUrl {
    authority: Authority,
}

impl BackendUrl {
    /// Parses `http://host:port`. The scheme is optional; the port defaults to 80.
    ///
    /// # Errors
    ///
    /// The text has another scheme such as https, a path, or no host.
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        let error = |reason| UrlError { url: url.to_owned(), reason };
        let rest = match url.trim().split_once("://") {
            None => url.trim(),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some(_) => return Err(error("only http is spoken to backends")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '@']) {
            return Err(error("it has to be http://HOST:PORT"));
        }
        let authority: Authority = rest.parse().map_err(|_| error("no host and port"))?;
        if authority.host().is_empty() || authority.as_str().ends_with(':') {
            return Err(error("no host and port"));
        }
        Ok(Self { authority })
    }

    /// Returns `http://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Returns host and port as they are written.
    #[must_use]
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }

    /// Returns the host as it is written, an IPv6 address in brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        self.authority.host()
    }

    /// Returns the host and port to connect to.
    #[must_use]
    pub fn address(&self) -> (String, u16) {
        let host = self.authority.host();
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        (host.to_owned(), self.authority.port_u16().unwrap_or(80))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let parse = |url| BackendUrl::parse(url).map(|url| url.url());
        assert_eq!(parse("http://host:81/").unwrap(), "http://host:81");
        assert_eq!(parse("HTTP://host:81").unwrap(), "http://host:81");
        assert_eq!(parse("10.0.0.1:8000").unwrap(), "http://10.0.0.1:8000");
        let v6 = BackendUrl::parse("http://[::1]:8000").unwrap();
        assert_eq!(v6.address(), ("::1".to_owned(), 8000));
        assert_eq!(BackendUrl::parse("http://host").unwrap().address().1, 80);
        for wrong in ["https://a:1", "http://a:1/v1", "", "http://", "a:", "u@a:1", "a b"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
