//! Networks of peers: a sender may have any number of addresses in one.

use std::net::{IpAddr, Ipv6Addr};

/// Prefix of an IPv6 address that identifies a network: a host with one address there has them
/// all.
const NETWORK: u128 = u128::MAX << 64;

/// Returns an IPv4 address unchanged, and the network of an IPv6 address.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) & NETWORK)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_one_network_are_one() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
