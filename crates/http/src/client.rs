//! Identifies the client whose share a request uses.
//!
//! A client is identified by its API key if keys are required, and by its address otherwise. An
//! IPv6 host can choose addresses from a whole /64, so a /64 is one client. If the peer is a
//! trusted proxy, the address comes from the proxy's header.

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use ipnet::IpNet;

use crate::keys::Keys;

const FORWARDED_FOR: &str = "x-forwarded-for";
/// The number of leading bits of an IPv6 address that its host cannot choose.
const PREFIX_BITS: u32 = 64;

/// A client id: a number without meaning outside this process, and never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// The index of a request's API key; `None`: no key is required, or the key is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub Option<usize>);

/// The peer of a connection, in the extensions of each of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    /// The address of a client or a proxy.
    Ip(IpAddr),
    /// A process of the local machine, over a Unix socket.
    Local,
}

/// Proxies whose headers about their clients are trusted.
#[derive(Debug, Clone, Default)]
pub struct TrustedProxies {
    networks: Vec<IpNet>,
    local: bool,
}

impl FromStr for TrustedProxies {
    type Err = String;

    /// Parses a comma-separated list of networks (`10.0.0.0/8`), addresses, and `unix` for clients
    /// of a Unix socket.
    fn from_str(list: &str) -> Result<Self, String> {
        let mut proxies = Self::default();
        for item in list.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if item == "unix" {
                proxies.local = true;
                continue;
            }
            let network = item.parse().or_else(|_| item.parse::<IpAddr>().map(IpNet::from));
            let wrong = |_| format!("`{item}` is not an address, a network (10.0.0.0/8) or `unix`");
            proxies.networks.push(network.map_err(wrong)?);
        }
        Ok(proxies)
    }
}

impl TrustedProxies {
    fn trust(&self, remote: Remote) -> bool {
        match remote {
            Remote::Ip(address) => self.networks.iter().any(|network| network.contains(&address)),
            Remote::Local => self.local,
        }
    }

    /// Returns the last address on a request's path that is not a trusted proxy. The search stops
    /// at an unreadable entry, since earlier addresses are not trusted.
    fn origin(&self, remote: Remote, headers: &HeaderMap) -> Remote {
        let mut origin = remote;
        let lines = headers.get_all(FORWARDED_FOR).iter().rev();
        let mut hops = lines.flat_map(|line| line.to_str().unwrap_or_default().rsplit(','));
        while self.trust(origin) {
            let Some(address) = hops.next().and_then(address) else { break };
            origin = Remote::Ip(address);
        }
        origin
    }
}

/// Parses an address as proxies write it: plain, or with a port.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let parsed = plain.parse().or_else(|_| text.parse::<SocketAddr>().map(|socket| socket.ip()));
    Some(parsed.ok()?.to_canonical())
}

/// Derives the ids of clients from API keys or addresses.
#[derive(Debug, Default)]
pub struct Clients {
    hasher: RandomState,
    proxies: TrustedProxies,
}

impl Clients {
    /// Creates the deriver of ids. A request from one of `proxies` may state its client's address
    /// in a header.
    #[must_use]
    pub fn new(proxies: TrustedProxies) -> Self {
        Self { hasher: RandomState::new(), proxies }
    }

    /// Returns the client with this key. Without a key, identifies the client by the address that
    /// `remote` and the headers determine.
    #[must_use]
    pub fn id(&self, key: KeyId, remote: Remote, headers: &HeaderMap) -> ClientId {
        let hash = if let KeyId(Some(key)) = key {
            self.hasher.hash_one((0u8, key))
        } else {
            match self.proxies.origin(remote, headers) {
                Remote::Ip(IpAddr::V4(address)) => self.hasher.hash_one((1u8, address)),
                Remote::Ip(IpAddr::V6(address)) => {
                    let prefix = Ipv6Addr::to_bits(address) >> (128 - PREFIX_BITS);
                    self.hasher.hash_one((2u8, prefix))
                }
                Remote::Local => self.hasher.hash_one(3u8),
            }
        };
        ClientId(hash.max(1))
    }

    /// Returns the client of a request with this head, and the index of its key in `keys`.
    fn identify(&self, keys: &Keys, parts: &Parts) -> (ClientId, KeyId) {
        let key = KeyId(keys.shown(&parts.headers));
        let remote = parts.extensions.get().copied().unwrap_or(Remote::Local);
        (self.id(key, remote, &parts.headers), key)
    }
}

/// A server state that identifies clients. With it, handlers can extract the [`ClientId`] and the
/// [`KeyId`] of a request.
pub trait HasClients: Send + Sync + 'static {
    /// Returns the client ids and the accepted keys.
    fn clients(&self) -> (&Clients, &Keys);
}

/// Identifies the client of a request. The result is stored in the request's extensions, and later
/// calls return it.
fn identified<S: HasClients>(parts: &mut Parts, state: &S) -> (ClientId, KeyId) {
    if let Some(known) = parts.extensions.get() {
        return *known;
    }
    let (clients, keys) = state.clients();
    let found = clients.identify(keys, parts);
    parts.extensions.insert(found);
    found
}

impl<S: HasClients> FromRequestParts<Arc<S>> for ClientId {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<S>) -> Result<Self, Infallible> {
        Ok(identified(parts, &**state).0)
    }
}

impl<S: HasClients> FromRequestParts<Arc<S>> for KeyId {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<S>) -> Result<Self, Infallible> {
        Ok(identified(parts, &**state).1)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(lines: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED_FOR, HeaderValue::from_static(line));
        }
        headers
    }

    fn ip(text: &str) -> Remote {
        Remote::Ip(text.parse().unwrap())
    }

    #[test]
    fn only_a_trusted_proxys_word_counts() {
        let proxies: TrustedProxies = "10.0.0.0/8, 192.0.2.1,::1,unix".parse().unwrap();
        let origin = |remote, lines: &[&'static str]| proxies.origin(remote, &headers(lines));
        // A client that is not a trusted proxy may send any header.
        assert_eq!(origin(ip("203.0.113.9"), &["198.51.100.1"]), ip("203.0.113.9"));
        assert_eq!(origin(ip("10.1.2.3"), &["198.51.100.1"]), ip("198.51.100.1"));
        assert_eq!(origin(Remote::Local, &["198.51.100.1:4711"]), ip("198.51.100.1"));
        assert_eq!(origin(ip("::1"), &["[2001:db8::7]:80"]), ip("2001:db8::7"));
        // The list is read from its end. The first untrusted address from there is the client,
        // which may have forged the entries to its left.
        let way = ["1.1.1.1, 198.51.100.1", "192.0.2.1,10.9.9.9"];
        assert_eq!(origin(ip("10.1.2.3"), &way), ip("198.51.100.1"));
        assert_eq!(origin(ip("10.1.2.3"), &["1.1.1.1, unknown"]), ip("10.1.2.3"));
        assert_eq!(origin(ip("10.1.2.3"), &[]), ip("10.1.2.3"));
        assert_eq!(origin(ip("192.0.2.1"), &["::ffff:198.51.100.1"]), ip("198.51.100.1"));
        for wrong in ["10.0.0.0/40", "host", "10.0.0.1,x"] {
            assert!(wrong.parse::<TrustedProxies>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_client_is_its_key_else_its_address() {
        let clients = Clients::new(TrustedProxies::default());
        let of = |key, remote| clients.id(KeyId(key), remote, &HeaderMap::new());
        assert_eq!(of(Some(0), ip("198.51.100.1")), of(Some(0), ip("198.51.100.2")));
        assert_ne!(of(Some(0), ip("198.51.100.1")), of(Some(1), ip("198.51.100.1")));
        assert_ne!(of(None, ip("198.51.100.1")), of(None, ip("198.51.100.2")));
        // All addresses of a /64 are one client.
        assert_eq!(of(None, ip("2001:db8:0:1::1")), of(None, ip("2001:db8:0:1:ffff::2")));
        assert_ne!(of(None, ip("2001:db8:0:1::1")), of(None, ip("2001:db8:0:2::1")));
        // The ids have no meaning outside: another process has other ids.
        let others = Clients::new(TrustedProxies::default());
        let same = ip("198.51.100.1");
        assert_ne!(of(None, same), others.id(KeyId(None), same, &HeaderMap::new()));
    }
}
