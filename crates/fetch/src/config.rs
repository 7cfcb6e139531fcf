//! The settings of the fetcher.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use url::Host;

/// The limits on fetching files. Fields that a flag sets have the flag's name.
#[derive(Debug, Clone, Serialize)]
pub struct Config {
    /// True if files are fetched over the network.
    pub remote_media: bool,
    /// The allowed hosts, on all ports. `*.example.com` means every name below `example.com`.
    /// Empty: all hosts, but only on ports 80 and 443.
    pub allowed_media_domains: Vec<String>,
    /// True if addresses in private networks and on this machine are allowed. Link-local and
    /// reserved addresses are never allowed.
    pub media_allow_private: bool,
    /// The folder for `file:` URLs; `None`: `file:` URLs are refused.
    pub allowed_local_media_path: Option<PathBuf>,
    /// The timeout of a fetch, including name resolution, connections, redirects and the body.
    #[serde(skip)]
    pub timeout: Duration,
    /// The size limit of a file in bytes.
    #[serde(skip)]
    pub max_bytes: usize,
    /// The largest number of redirects.
    #[serde(skip)]
    pub max_redirects: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            remote_media: true,
            allowed_media_domains: Vec::new(),
            media_allow_private: false,
            allowed_local_media_path: None,
            timeout: Duration::from_secs(10),
            max_bytes: 20 << 20,
            max_redirects: 3,
        }
    }
}

/// Why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// A domain contains a scheme, a port or the like.
    #[error(
        "{0:?} is no domain: one reads example.com or *.example.com, without a scheme and a port"
    )]
    Domain(String),
    /// The folder for `file:` URLs does not exist or can't be used.
    #[error("{}: {reason}", folder.display())]
    Local {
        /// The folder.
        folder: PathBuf,
        /// Why the folder can't be used.
        reason: String,
    },
}

/// The allowed domains, normalised as hosts in URLs are.
#[derive(Debug)]
pub(crate) struct Domains(Vec<Domain>);

#[derive(Debug)]
struct Domain {
    name: String,
    below: bool,
}

impl Domains {
    pub(crate) fn of(names: &[String]) -> Result<Self, InvalidConfig> {
        let domain = |name: &String| {
            let (below, rest) =
                name.strip_prefix("*.").map_or((false, name.as_str()), |rest| (true, rest));
            let host = Host::parse(rest).ok().filter(|_| !rest.contains('*'));
            let host = host.ok_or_else(|| InvalidConfig::Domain(name.clone()))?;
            Ok(Domain { name: host.to_string(), below })
        };
        Ok(Self(names.iter().map(domain).collect::<Result<_, _>>()?))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if `host`, normalised as in a URL, is in the list.
    pub(crate) fn has(&self, host: &str) -> bool {
        // A trailing dot marks a fully qualified name, which refers to the same host.
        let host = host.strip_suffix('.').unwrap_or(host);
        self.0.iter().any(|domain| match host.strip_suffix(&domain.name) {
            Some("") => !domain.below,
            Some(rest) => domain.below && rest.len() > 1 && rest.ends_with('.'),
            None => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_itself_and_below_a_star_all_others() {
        let names = ["Example.com", "*.images.test", "10.0.0.1", "[::1]", "bücher.test"];
        let domains = Domains::of(&names.map(String::from)).unwrap();
        for host in [
            "example.com",
            "example.com.",
            "a.images.test",
            "a.b.images.test",
            "10.0.0.1",
            "[::1]",
            "xn--bcher-kva.test",
        ] {
            assert!(domains.has(host), "{host}");
        }
        for host in [
            "a.example.com",
            "notexample.com",
            "images.test",
            ".images.test",
            "aimages.test",
            "10.0.0.11",
            "com",
            "",
        ] {
            assert!(!domains.has(host), "{host}");
        }
    }

    #[test]
    fn what_is_no_domain() {
        for name in ["https://example.com", "example.com:80", "", "*.", "a b", "*", "a/b"] {
            let error = Domains::of(&[name.to_owned()]).unwrap_err();
            assert_eq!(error, InvalidConfig::Domain(name.to_owned()));
        }
    }
}
