//! Limits the number of connections that are not authenticated yet, in total and per address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// The largest number of unauthenticated connections.
const STRANGERS: usize = 256;
/// The limit for one address. An outpost opens one connection for each of its hands.
const AT_ONE_ADDRESS: usize = 16;
/// The length of the prefix of an IPv6 address, in bits. The owner of the address can't choose the
/// prefix.
const PREFIX_BITS: u32 = 64;

/// The unauthenticated connections. Connections from one address can't take all permits.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
    at: Mutex<HashMap<IpAddr, usize>>,
}

/// The permit of one unauthenticated connection. Dropping it returns the permit.
#[derive(Debug)]
pub(crate) struct Place {
    strangers: Arc<Strangers>,
    address: IpAddr,
}

impl Strangers {
    /// Returns a permit for a connection from `address`; `None`: a limit is reached.
    pub(crate) fn place(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let address = owner(address);
        let mut at = self.at.lock();
        let all: usize = at.values().sum();
        let own = at.get(&address).copied().unwrap_or_default();
        if all >= STRANGERS || own >= AT_ONE_ADDRESS {
            return None;
        }
        at.insert(address, own + 1);
        drop(at);
        Some(Place { strangers: Arc::clone(self), address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut at = self.strangers.at.lock();
        if let Some(own) = at.get_mut(&self.address) {
            *own -= 1;
            if *own == 0 {
                at.remove(&self.address);
            }
        }
    }
}

/// Returns one address for all addresses among which the owner of `address` can choose.
fn owner(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let fixed = u128::MAX << (Ipv6Addr::BITS - PREFIX_BITS);
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & fixed))
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(strangers: &Arc<Strangers>, address: &str, count: usize) -> Vec<Place> {
        let address = address.parse().expect("an address");
        (0..count).filter_map(|_| strangers.place(address)).collect()
    }

    #[test]
    fn an_address_has_some_of_the_places() {
        let strangers = Arc::default();
        let mut first = places(&strangers, "192.0.2.1", 1000);
        assert_eq!(first.len(), AT_ONE_ADDRESS);
        // The same address in another notation.
        assert!(places(&strangers, "::ffff:192.0.2.1", 1).is_empty());
        assert_eq!(places(&strangers, "192.0.2.2", 1000).len(), AT_ONE_ADDRESS);
        first.pop();
        assert_eq!(places(&strangers, "192.0.2.1", 1000).len(), 1);
        drop(first);
        assert!(strangers.at.lock().is_empty());
    }

    #[test]
    fn an_ipv6_network_is_one_address() {
        let strangers = Arc::default();
        let _some = places(&strangers, "2001:db8::1", 10);
        let _others = places(&strangers, "2001:db8::ffff:0:0:1", 1000);
        assert_eq!(strangers.at.lock().values().sum::<usize>(), AT_ONE_ADDRESS);
        assert_eq!(places(&strangers, "2001:db8:0:1::1", 1).len(), 1);
    }

    #[test]
    fn all_addresses_together_have_a_limit() {
        let strangers = Arc::default();
        let taken: Vec<Place> =
            (0..100).flat_map(|host| places(&strangers, &format!("192.0.2.{host}"), 20)).collect();
        assert_eq!(taken.len(), STRANGERS);
    }
}
