//! Port of rank 0. Pods on the network of their node share its ports, and another gang or
//! process may use `master_port` there: rank 0 then takes the next free port, and members
//! search for it. The first message of a connection shows whether the peer is the rank 0 of
//! this gang.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::Instant;

/// Number of ports that are tried, starting with `master_port`.
const TRIED: u16 = 4;
/// Pause before they are tried again if all are in use.
const AGAIN: Duration = Duration::from_secs(1);

/// Returns the addresses where rank 0 may listen.
pub(super) fn places(master: SocketAddr) -> impl Iterator<Item = SocketAddr> + Clone {
    let ports = (0..TRIED).filter_map(move |more| master.port().checked_add(more));
    ports.map(move |port| SocketAddr::new(master.ip(), port))
}

/// Listens on the first free port. If all are in use, waits for one until `until`; the error is
/// that of the last attempt.
pub(super) async fn listen(master: SocketAddr, until: Instant) -> io::Result<TcpListener> {
    let any = match master.ip() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    loop {
        let mut last = io::Error::from(io::ErrorKind::AddrInUse);
        for place in places(SocketAddr::new(any, master.port())) {
            match TcpListener::bind(place).await {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
                Ok(listener) => {
                    if place.port() != master.port() {
                        let (port, taken) = (place.port(), master.port());
                        tracing::warn!("the port {taken} is in use here; rank 0 listens on {port}");
                    }
                    return Ok(listener);
                }
                Err(error) => return Err(error),
            }
        }
        if Instant::now() + AGAIN > until {
            return Err(last);
        }
        tokio::time::sleep(AGAIN).await;
    }
}
