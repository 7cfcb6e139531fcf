//! Decides to which addresses connections are allowed. The refused networks are those in IANA's
//! registries of special-purpose addresses (RFC 6890 and its updates).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length)
}

const fn v6(a: u16, b: u16, c: u16, length: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0), length)
}

/// Private networks.
const PRIVATE_V4: [Ipv4Net; 5] = [
    v4(10, 0, 0, 0, 8),
    v4(100, 64, 0, 0, 10),
    v4(127, 0, 0, 0, 8),
    v4(172, 16, 0, 0, 12),
    v4(192, 168, 0, 0, 16),
];

/// Networks that never have public files: this host, link-local (where clouds offer credentials),
/// protocol assignments, documentation, benchmarks, 6to4 relays, multicast, reserved.
const NEVER_V4: [Ipv4Net; 10] = [
    v4(0, 0, 0, 0, 8),
    v4(169, 254, 0, 0, 16),
    v4(192, 0, 0, 0, 24),
    v4(192, 0, 2, 0, 24),
    v4(192, 88, 99, 0, 24),
    v4(198, 18, 0, 0, 15),
    v4(198, 51, 100, 0, 24),
    v4(203, 0, 113, 0, 24),
    v4(224, 0, 0, 0, 4),
    v4(240, 0, 0, 0, 4),
];

/// Loopback and unique local addresses.
const PRIVATE_V6: [Ipv6Net; 2] =
    [Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128), v6(0xfc00, 0, 0, 7)];

/// Global unicast addresses. Addresses that embed an IPv4 address (mapped, NAT64), link-local
/// addresses and multicast addresses are outside this network.
const GLOBAL_V6: Ipv6Net = v6(0x2000, 0, 0, 3);

/// Refused parts of `GLOBAL_V6`: protocol assignments (including Teredo), documentation, 6to4.
const NEVER_V6: [Ipv6Net; 4] =
    [v6(0x2001, 0, 0, 23), v6(0x2001, 0xdb8, 0, 32), v6(0x2002, 0, 0, 16), v6(0x3fff, 0, 0, 20)];

/// True if `address` is a public unicast address.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !PRIVATE_V4.iter().chain(&NEVER_V4).any(|network| network.contains(&v4)),
        IpAddr::V6(v6) => {
            GLOBAL_V6.contains(&v6) && !NEVER_V6.iter().any(|network| network.contains(&v6))
        }
    }
}

/// True if `address` is public, or belongs to a private network.
pub(crate) fn is_public_or_private(address: IpAddr) -> bool {
    is_public(address)
        || match address {
            IpAddr::V4(v4) => PRIVATE_V4.iter().any(|network| network.contains(&v4)),
            IpAddr::V6(v6) => PRIVATE_V6.iter().any(|network| network.contains(&v6)),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: &str = "10.0.0.1 10.255.255.255 100.64.0.1 100.127.255.255 127.0.0.1 127.1.2.3 172.16.0.1 172.31.255.255 192.168.0.1 \
        ::1 fc00::1 fd12:3456::1";
    const NEVER: &str = "0.0.0.0 0.1.2.3 169.254.169.254 192.0.0.1 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.9 \
        224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 \
        64:ff9b:1::7f00:1 100::1 2001::1 2001:10::1 2001:db8::1 2002:7f00:1::1 3fff::1 5f00::1 fe80::1 fec0::1 ff02::1";
    const PUBLIC: &str = "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1 172.15.255.255 172.32.0.1 \
        192.167.255.255 192.169.0.1 198.17.255.255 198.20.0.1 223.255.255.255 2001:200::1 2606:4700:4700::1111 2a00:1450::1";

    fn of(text: &str) -> impl Iterator<Item = IpAddr> {
        text.split_whitespace().map(|word| word.parse().unwrap())
    }

    #[test]
    fn every_special_class_is_refused() {
        for address in of(PRIVATE).chain(of(NEVER)) {
            assert!(!is_public(address), "{address}");
        }
        for address in of(PUBLIC) {
            assert!(is_public(address), "{address}");
        }
    }

    #[test]
    fn networks_of_ones_own_are_all_that_a_flag_opens() {
        for address in of(PRIVATE).chain(of(PUBLIC)) {
            assert!(is_public_or_private(address), "{address}");
        }
        for address in of(NEVER) {
            assert!(!is_public_or_private(address), "{address}");
        }
    }
}
