//! The proxies that the environment configures, and the servers that are reached without a proxy.

use std::env;

use hyper::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

/// The proxies in `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY`, and the exceptions in `NO_PROXY`.
/// The lower-case names are read too.
#[derive(Debug)]
pub(crate) struct Proxies {
    matcher: Matcher,
    exceptions: Vec<Exception>,
}

/// An entry of `NO_PROXY`: servers that are reached without a proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Exception {
    /// A name, which includes all its subdomains, or an address; `*`: any host.
    host: String,
    /// The port; `None` means any port.
    port: Option<u16>,
}

impl Proxies {
    pub(crate) fn from_env() -> Self {
        let lists = ["no_proxy", "NO_PROXY"].map(|name| env::var(name).unwrap_or_default());
        let list = lists.into_iter().find(|list| !list.trim().is_empty());
        Self { matcher: Matcher::from_env(), exceptions: exceptions(&list.unwrap_or_default()) }
    }

    /// Returns the proxy for requests to `to`; `None` if the server is reached directly.
    pub(crate) fn intercept(&self, to: &Uri) -> Option<Intercept> {
        // Entries that are networks, such as `10.0.0.0/8`, are handled by the matcher.
        let excepted = self.exceptions.iter().any(|exception| exception.takes(to));
        if excepted { None } else { self.matcher.intercept(to) }
    }
}

/// Parses all forms of entries that curl, Python and Go accept, separated by commas or white space.
/// A name may have a leading dot or `*.`, and a port. An address may be in brackets.
fn exceptions(list: &str) -> Vec<Exception> {
    let entries = list.split([',', ' ', '\t', '\n']).filter(|entry| !entry.is_empty());
    entries.map(Exception::new).collect()
}

impl Exception {
    fn new(entry: &str) -> Self {
        let (host, port) = match entry.rsplit_once(':') {
            // Without brackets, the last group of an IPv6 address is not a port.
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                (host, port.parse().ok())
            }
            _ => (entry, None),
        };
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        let host = match host.as_str() {
            "*" => "*",
            host => host.strip_prefix('*').unwrap_or(host).trim_matches('.'),
        };
        Self { host: host.to_owned(), port }
    }

    fn takes(&self, to: &Uri) -> bool {
        let default = if to.scheme_str() == Some("https") { 443 } else { 80 };
        if self.port.is_some_and(|port| port != to.port_u16().unwrap_or(default)) {
            return false;
        }
        let host = to.host().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
        let host = host.trim_end_matches('.');
        let below = host.strip_suffix(self.host.as_str()).is_some_and(|rest| rest.ends_with('.'));
        !self.host.is_empty() && (self.host == "*" || host == self.host || below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes(list: &str, to: &str) -> bool {
        let to: Uri = to.parse().expect("an address");
        exceptions(list).iter().any(|exception| exception.takes(&to))
    }

    #[test]
    fn every_form_of_an_exception_is_read() {
        for list in [
            "hub.test",
            "HUB.Test",
            ".hub.test",
            "*.hub.test",
            "hub.test.",
            "other.test,hub.test",
            "other.test hub.test",
            "other.test, hub.test",
            "*",
            "hub.test:8443",
        ] {
            assert!(takes(list, "https://hub.test:8443/a"), "{list}");
        }
        for list in ["hub.test", ".hub.test", "*.hub.test"] {
            assert!(takes(list, "https://cdn.hub.test/a"), "{list}");
            assert!(!takes(list, "https://myhub.test/a"), "{list}");
        }
        assert!(takes("hub.test:443", "https://hub.test/a"));
        assert!(!takes("hub.test:80", "https://hub.test/a"));
        for list in ["::1", "[::1]", "[::1]:8080", "*"] {
            assert!(takes(list, "http://[::1]:8080/a"), "{list}");
        }
        assert!(takes("10.0.0.1", "http://10.0.0.1/a") && takes("*", "http://10.0.0.1/a"));
        for list in ["", " , ", ".", "other.test", "test.hub"] {
            assert!(!takes(list, "https://hub.test/a"), "{list}");
        }
    }
}
