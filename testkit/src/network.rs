//! Hosts on one switch, each a network namespace, whose connections can be throttled or cut.

use std::net::Ipv4Addr;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// Most hosts of a network: a /26 has 62 addresses, and this machine takes the last.
const MAX_HOSTS: usize = 61;

/// A switch and its hosts, removed on drop.
pub struct Network {
    name: String,
    hosts: usize,
    /// First address of the /26.
    base: u32,
}

// === impl Network ===

impl Network {
    /// Creates a network. Fails with the first command that this machine does not permit.
    pub fn new(hosts: usize) -> Result<Self, String> {
        let network = Self::named(hosts);
        network.build()?;
        Ok(network)
    }

    /// Creates a network whose hosts reach this machine, at [`machine`](Self::machine).
    pub fn with_this_machine(hosts: usize) -> Result<Self, String> {
        let network = Self::new(hosts)?;
        let (link, switch) = (network.link(), network.switch());
        ip(&[
            "link", "add", &link, "type", "veth", "peer", "name", "here", "netns", &switch,
        ])?;
        within(
            &switch,
            &["ip", "link", "set", "here", "master", "sw", "up"],
        )?;
        let address = format!("{}/26", network.machine());
        ip(&["address", "add", &address, "dev", &link])?;
        ip(&["link", "set", &link, "up"])?;
        Ok(network)
    }

    fn named(hosts: usize) -> Self {
        assert!(hosts <= MAX_HOSTS, "{hosts} hosts have no room in a /26");
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        // The range that RFC 2544 reserves for benchmarks has 2,048 networks of this size.
        // Networks of other processes may have the same addresses, unless this machine is in
        // both.
        let nth = process::id().wrapping_add(number.wrapping_mul(331)) % 2048;
        Self {
            name: format!("gw{}x{number}", process::id()),
            hosts,
            base: Ipv4Addr::new(198, 18, 0, 0).to_bits() + nth * 64,
        }
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
            let address = format!("{}/26", self.address(host));
            within(&name, &["ip", "address", "add", &address, "dev", "eth0"])?;
            within(&name, &["ip", "link", "set", "eth0", "up"])?;
            within(&name, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}s", self.name)
    }

    /// Returns the name of this machine's network interface, at most 15 characters.
    fn link(&self) -> String {
        format!("{}u", self.name)
    }

    /// Returns the name of a host's namespace.
    pub fn host(&self, host: usize) -> String {
        format!("{}h{host}", self.name)
    }

    /// Returns the address of a host.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        let host = u32::try_from(host).unwrap_or(u32::MAX);
        Ipv4Addr::from_bits(self.base.saturating_add(host).saturating_add(1))
    }

    /// Returns this machine's address in the network.
    pub fn machine(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.base + 62)
    }

    /// Limits the outgoing bandwidth of a host, in megabits per second.
    pub fn throttle(&self, host: usize, megabits: u32) -> Result<(), String> {
        let rate = format!("{megabits}mbit");
        let tbf = [
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", &rate, "burst", "32kbit",
            "latency", "300ms",
        ];
        within(&self.host(host), &tbf)
    }

    /// Removes the bandwidth limit of a host.
    pub fn unthrottle(&self, host: usize) -> Result<(), String> {
        let tc = ["tc", "qdisc", "delete", "dev", "eth0", "root"];
        within(&self.host(host), &tc)
    }

    /// Drops all packets from one host to another.
    pub fn cut(&self, from: usize, to: usize) -> Result<(), String> {
        let target = format!("{}/32", self.address(to));
        let route = ["ip", "route", "add", "blackhole", &target];
        within(&self.host(from), &route)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(ip(&["link", "delete", &self.link()]));
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
