//! File descriptors of the process. Services are started with 1,024, for programs that use
//! `select`; a controller of a thousand nodes has more connections than that, and where it
//! cannot open one more, the next thing it cannot open is a file or the API server.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{tcp_grpc, unix_grpc};

/// For everything but gRPC: the page's connections (256), readers of the store, the files of
/// a journal, the API server, certificates.
const BESIDE: u64 = 1024;

/// Returns how many descriptors a process needs whose connections are at their limits; `network`:
/// agents report to it.
pub const fn needed(network: bool) -> u64 {
    let local = BESIDE + unix_grpc::MAX_CONNECTIONS as u64;
    if network {
        local + tcp_grpc::MAX_CONNECTIONS as u64
    } else {
        local
    }
}

/// Returns how many descriptors the process may raise its limit to.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX)
}

/// Raises the limit as far as the process may, as Go and Java do at their start.
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
