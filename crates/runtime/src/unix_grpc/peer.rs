//! Process at the other end of a Unix socket.

use std::fs;

use tokio::net::unix::UCred;

/// Process at the other end of a connection, as the kernel recorded it when it connected.
///
/// Available in the extensions of a request: `request.extensions().get::<UnixPeer>()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnixPeer {
    /// Effective user id of the process.
    pub uid: u32,
    /// Effective group id of the process.
    pub gid: u32,
    /// Process id in this process's pid namespace; `None` if the process is not visible there.
    /// The process may have ended, and its id may have been reused.
    pub pid: Option<i32>,
    /// True if the process runs as root or as the user of this process, in the same pid and
    /// user namespaces. Root of a container is not root of the machine, although the kernel
    /// reports both as 0.
    pub is_operator: bool,
}

// === impl UnixPeer ===

impl UnixPeer {
    pub(super) fn new(credentials: UCred) -> Self {
        let (uid, pid) = (credentials.uid(), credentials.pid());
        let may_be = uid == 0 || uid == rustix::process::geteuid().as_raw();
        Self {
            uid,
            gid: credentials.gid(),
            pid,
            is_operator: may_be && pid.is_some_and(in_our_namespaces),
        }
    }

    /// Returns the user whose share of bounded resources a request of this process uses; `None`
    /// for an operator, who may use everything.
    pub fn sharing_user(&self) -> Option<u32> {
        (!self.is_operator).then_some(self.uid)
    }
}

/// Returns true if a visible process lives in the pid and user namespaces of this process.
/// Reads only files that every user may read: the links in `/proc/PID/ns` require a privilege.
fn in_our_namespaces(pid: i32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
        return false;
    };
    // A process of a nested namespace has an id in each of them.
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let in_our_pid_namespace =
        numbers.is_some_and(|numbers| numbers.split_ascii_whitespace().count() == 1);
    let user_map = |of: &str| fs::read_to_string(format!("/proc/{of}/uid_map")).ok();
    let own = user_map("self");
    in_our_pid_namespace && own.is_some() && own == user_map(&pid.to_string())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn we_are_in_our_namespaces_and_a_process_that_is_gone_is_not() {
        assert!(in_our_namespaces(
            i32::try_from(std::process::id()).unwrap()
        ));
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(!in_our_namespaces(i32::try_from(child.id()).unwrap()));
    }

    fn child_of(parent: u32) -> i32 {
        let is_child = |pid: &i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.contains(&format!("PPid:\t{parent}\n"))
        };
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(is_child).unwrap()
    }

    #[test]
    fn a_process_of_another_namespace_is_not_in_ours() {
        for kind in ["--pid", "--user"] {
            // `cat` ends when its input does, at the latest with the test.
            let mut child = Command::new("unshare")
                .args([kind, "--fork", "sh", "-c", "echo; exec cat"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut begun = [0];
            let read = std::io::Read::read(child.stdout.as_mut().unwrap(), &mut begun);
            if read.unwrap() == 0 {
                testkit::skip(format!("the right to unshare {kind}"));
                continue;
            }
            assert!(!in_our_namespaces(child_of(child.id())), "{kind}");
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}
