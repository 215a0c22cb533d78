//! Hosts on one switch, each a network namespace, whose ways can be made slow or cut.

use std::net::Ipv4Addr;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// A switch and its hosts. It is taken down when this is dropped.
pub(super) struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    /// Returns a network; the error is of the first command that this machine does not let us run.
    pub(super) fn new(hosts: usize) -> Result<Self, String> {
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let network = Self {
            name: format!("gw{}x{number}", process::id()),
            hosts,
        };
        network.build()?;
        Ok(network)
    }

    fn build(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&["netns", "add", &switch])?;
        within(&switch, &["ip", "link", "add", "sw", "type", "bridge"])?;
        within(&switch, &["ip", "link", "set", "sw", "up"])?;
        for host in 0..self.hosts {
            let name = self.host(host);
            let port = format!("p{host}");
            ip(&["netns", "add", &name])?;
            let pair = [
                "ip", "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &name,
            ];
            within(&switch, &pair)?;
            within(&switch, &["ip", "link", "set", &port, "master", "sw", "up"])?;
            let address = format!("{}/24", Self::address(host));
            within(&name, &["ip", "address", "add", &address, "dev", "eth0"])?;
            within(&name, &["ip", "link", "set", "eth0", "up"])?;
            within(&name, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}s", self.name)
    }

    /// Returns the name of a host's namespace.
    pub(super) fn host(&self, host: usize) -> String {
        format!("{}h{host}", self.name)
    }

    pub(super) fn address(host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, u8::try_from(host + 1).unwrap())
    }

    /// Lets a host send so many megabits a second.
    pub(super) fn throttle(&self, host: usize, megabits: u32) {
        let rate = format!("{megabits}mbit");
        let host = self.host(host);
        let tbf = [
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", &rate, "burst", "32kbit",
            "latency", "300ms",
        ];
        within(&host, &tbf).unwrap();
    }

    /// Cuts the way from a host to another.
    pub(super) fn cut(&self, from: usize, to: usize) {
        let target = format!("{}/32", Self::address(to));
        within(
            &self.host(from),
            &["ip", "route", "add", "blackhole", &target],
        )
        .unwrap();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            drop(ip(&["netns", "delete", &self.host(host)]));
        }
        drop(ip(&["netns", "delete", &self.switch()]));
    }
}

/// Runs a command in a namespace.
fn within(namespace: &str, command: &[&str]) -> Result<(), String> {
    ip(&[&["netns", "exec", namespace], command].concat())
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", arguments.join(" "), told.trim()))
}
