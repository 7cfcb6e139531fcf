//! The client of a request.
//!
//! A client is an API key if there are several, and an address otherwise, as at a brain. An IPv6
//! client can choose addresses from a whole /64, so that is one client.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};

/// The bits of an IPv6 address that its owner cannot choose.
const PREFIX_BITS: u32 = 64;

/// A client, as a number that means nothing outside this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClientId(pub(crate) u64);

/// Tells clients apart.
#[derive(Debug, Default)]
pub(crate) struct Clients(RandomState);

impl Clients {
    /// The client with a key, if keys tell clients apart, or at an address.
    pub(crate) fn identify(&self, key: Option<&str>, address: IpAddr) -> ClientId {
        ClientId(match (key, address.to_canonical()) {
            (Some(key), _) => self.0.hash_one((0u8, key)),
            (None, IpAddr::V4(address)) => self.0.hash_one((1u8, address)),
            (None, IpAddr::V6(address)) => {
                let prefix = Ipv6Addr::to_bits(address) >> (128 - PREFIX_BITS);
                self.0.hash_one((2u8, prefix))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_a_key_or_an_address() {
        let clients = Clients::default();
        let of = |key, address: &str| clients.identify(key, address.parse().unwrap());
        assert_eq!(of(Some("a"), "10.0.0.1"), of(Some("a"), "10.0.0.2"));
        assert_ne!(of(Some("a"), "10.0.0.1"), of(Some("b"), "10.0.0.1"));
        assert_ne!(of(None, "10.0.0.1"), of(None, "10.0.0.2"));
        assert_eq!(of(None, "10.0.0.1"), of(None, "::ffff:10.0.0.1"));
        assert_eq!(of(None, "fd00::1"), of(None, "fd00::2:0:0:1"));
        assert_ne!(of(None, "fd00::1"), of(None, "fd00:0:0:1::1"));
    }
}
