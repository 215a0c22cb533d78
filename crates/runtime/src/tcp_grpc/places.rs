//! Limits on network connections, in total and per address.
//!
//! A connection whose handshake is not finished costs a descriptor, and its peer is unknown.
//! All such connections together may have a quarter of the places, those of one address an
//! eighth. All connections of one address may have half of the places; that is generous, since
//! many nodes may stand behind one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};
use tokio::sync::Notify;

use crate::network::network;

/// Divisor of the total for all connections of one address.
const ONE: usize = 2;
/// Divisor of the total for all connections that are not secured yet.
const STRANGERS: usize = 4;
/// Divisor of the total for connections of one address that are not secured yet.
const ONE_STRANGER: usize = 8;
/// Descriptors left to everything but network connections, as counted by `descriptors::needed`:
/// files, the page, the API server, the Unix socket.
const RESERVED: u64 = 1536;

/// Connection limits of one server.
pub(super) struct ConnectionPlaces {
    most: usize,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Default)]
struct Taken {
    all: Count,
    /// Connections by address. Addresses without a connection are absent.
    by_address: HashMap<IpAddr, Count>,
}

#[derive(Clone, Copy, Default)]
struct Count {
    all: usize,
    strangers: usize,
}

/// Place of one connection, until dropped.
pub(super) struct ConnectionPlace {
    of: Arc<ConnectionPlaces>,
    address: IpAddr,
    is_stranger: bool,
}

// === impl ConnectionPlaces ===

impl ConnectionPlaces {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(ONE_STRANGER),
            taken: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Waits until any place is free.
    pub(super) async fn wait_for_one(&self) {
        loop {
            let freed = self.freed.notified();
            if self.taken().all.all < self.most {
                return;
            }
            freed.await;
        }
    }

    /// Takes a place for a connection that is not secured yet. The error names the limit that
    /// is reached.
    pub(super) fn take(self: &Arc<Self>, address: IpAddr) -> Result<ConnectionPlace, &'static str> {
        let address = network(address);
        let mut taken = self.taken();
        let own = taken.by_address.get(&address).copied().unwrap_or_default();
        if own.all >= self.most / ONE {
            return Err("this address has too many connections");
        }
        if own.strangers >= self.most / ONE_STRANGER {
            return Err("too many connections of this address are not secured yet");
        }
        if taken.all.strangers >= self.most / STRANGERS {
            return Err("too many connections are not secured yet");
        }
        taken.count(address, |count| {
            count.all += 1;
            count.strangers += 1;
        });
        drop(taken);
        Ok(ConnectionPlace {
            of: Arc::clone(self),
            address,
            is_stranger: true,
        })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Taken ===

impl Taken {
    fn count(&mut self, address: IpAddr, change: impl Fn(&mut Count)) {
        change(&mut self.all);
        let own = self.by_address.entry(address).or_default();
        change(own);
        if own.all == 0 {
            self.by_address.remove(&address);
        }
    }
}

// === impl ConnectionPlace ===

impl ConnectionPlace {
    /// Marks the connection as secured.
    pub(super) fn is_secured(&mut self) {
        if std::mem::take(&mut self.is_stranger) {
            let mut taken = self.of.taken();
            taken.count(self.address, |count| count.strangers -= 1);
        }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let is_stranger = usize::from(self.is_stranger);
        self.of.taken().count(self.address, |count| {
            count.all -= 1;
            count.strangers -= is_stranger;
        });
        self.of.freed.notify_waiters();
    }
}

/// Returns how many connections a server may have that asks for `most`: as many as the
/// descriptor limit leaves beside everything else, or a quarter of that limit if nothing is
/// left.
pub(super) fn within_limit(most: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    within(limit, most)
}

fn within(limit: u64, most: usize) -> usize {
    let left = limit.saturating_sub(RESERVED).max(limit / 4);
    most.min(usize::try_from(left).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Takes places until none is left.
    fn all(places: &Arc<ConnectionPlaces>, of: &str) -> Vec<ConnectionPlace> {
        std::iter::from_fn(|| places.take(address(of)).ok()).collect()
    }

    #[test]
    fn connections_leave_descriptors_for_all_else() {
        for (limit, most, expected) in [
            (1024, 20_480, 256),
            (4096, 20_480, 2560),
            (4096, 512, 512),
            (1_048_576, 20_480, 20_480),
            (u64::MAX, 20_480, 20_480),
        ] {
            assert_eq!(within(limit, most), expected, "{limit}");
        }
        assert_eq!(RESERVED, crate::descriptors::needed(false));
    }

    #[test]
    fn strangers_leave_places_to_those_who_are_secured() {
        let places = ConnectionPlaces::new(64);
        let one = all(&places, "192.0.2.1");
        let two = all(&places, "192.0.2.2");
        assert_eq!((one.len(), two.len()), (8, 8));
        assert_eq!(all(&places, "192.0.2.3").len(), 0);
        drop(one);
        // A secured connection makes room for the next one.
        let mut secured = Vec::new();
        while let Ok(mut place) = places.take(address("192.0.2.3")) {
            place.is_secured();
            secured.push(place);
        }
        assert_eq!(secured.len(), 32, "one address has half");
        drop((two, secured));
        let taken = places.taken();
        assert_eq!((taken.all.all, taken.all.strangers), (0, 0));
        assert!(taken.by_address.is_empty());
    }

    #[test]
    fn the_addresses_of_one_network_are_one() {
        let places = ConnectionPlaces::new(64);
        let held = all(&places, "2001:db8::1");
        assert_eq!(held.len(), 8);
        assert_eq!(all(&places, "2001:db8::2").len(), 0);
        assert_eq!(all(&places, "2001:db8:0:1::2").len(), 8);
        let places = ConnectionPlaces::new(64);
        let held = all(&places, "192.0.2.1");
        assert_eq!(all(&places, "::ffff:192.0.2.1").len(), 0);
        drop(held);
    }

    #[tokio::test]
    async fn a_place_that_becomes_free_is_noticed() {
        let places = ConnectionPlaces::new(8);
        let mut held: Vec<ConnectionPlace> = Vec::new();
        for host in 0..8 {
            let mut place = places.take(address(&format!("192.0.2.{host}"))).unwrap();
            place.is_secured();
            held.push(place);
        }
        let waiting = tokio::spawn({
            let places = Arc::clone(&places);
            async move { places.wait_for_one().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        held.pop();
        waiting.await.unwrap();
    }
}
