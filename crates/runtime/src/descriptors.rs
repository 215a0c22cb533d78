//! File descriptors of the process. Services start with a limit of 1,024, for programs that use
//! `select`. A controller of a thousand nodes has more connections than that, and a process
//! that runs out of descriptors can next open neither a file nor a connection to the API
//! server.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{tcp_grpc, unix_grpc};

/// Descriptors for everything but gRPC: the page's connections (256), readers of the store,
/// files of a journal, the API server, certificates.
const BESIDE: u64 = 1024;

/// Returns the number of descriptors that a process needs when its connections are at their
/// limits. `network` is true if agents connect to the process.
pub const fn needed(network: bool) -> u64 {
    let local = BESIDE + unix_grpc::MAX_CONNECTIONS as u64;
    if network {
        local + tcp_grpc::MAX_CONNECTIONS as u64
    } else {
        local
    }
}

/// Returns the hard limit of descriptors.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX)
}

/// Raises the soft limit to the hard limit, as Go and Java do when they start.
pub fn raise() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_it_may_be() {
        let before = getrlimit(Resource::Nofile);
        let low = before.maximum.unwrap_or(u64::MAX).min(4096) - 1;
        let lowered = Rlimit {
            current: Some(low),
            ..before
        };
        setrlimit(Resource::Nofile, lowered).unwrap();
        raise().unwrap();
        let raised = getrlimit(Resource::Nofile);
        assert_eq!(
            (raised.current, raised.maximum),
            (before.maximum, before.maximum)
        );
        assert_eq!(hard_limit(), before.maximum.unwrap_or(u64::MAX));
    }
}
