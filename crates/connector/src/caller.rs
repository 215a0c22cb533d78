//! Who sends events, and for which nodes they may speak.
//!
//! An event can take a node out of service, and a healthy one gives it back. So what a
//! sender says of other nodes than its own counts only where somebody has allowed it.

use std::fmt;

use runtime::unix_grpc::UnixPeer;

/// Who offers events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A monitor in this process. It is part of us, and speaks for whom it watches.
    Monitor,
    /// A process on this machine, over the Unix socket. Any user may use it.
    Local(UnixPeer),
    /// The agent of a node that has proven its name.
    Node(String),
    /// A monitor that watches nodes from elsewhere (a cloud's API, Kubernetes objects), has
    /// proven its name, and is allowed to by the operator.
    Central(String),
}

/// Which nodes processes on this machine may speak for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcceptNodes {
    /// The node that they run on, which has this name.
    Own(String),
    /// Any.
    Any,
}

// === impl AcceptNodes ===

impl AcceptNodes {
    /// Whether `caller` may speak for `node`; the error says why not, and what to do.
    pub(super) fn check(&self, caller: &Caller, node: &str) -> Result<(), String> {
        match (caller, self) {
            (Caller::Monitor | Caller::Central(_), _) | (Caller::Local(_), Self::Any) => Ok(()),
            (Caller::Local(_), Self::Own(own)) if own == node => Ok(()),
            (Caller::Local(_), Self::Own(own)) => Err(format!(
                "{node:?} is another node than this one, {own:?}; report it on its own machine, or \
                 start gpuwarden with --accept-nodes any where this one collects for others"
            )),
            (Caller::Node(own), _) if own == node => Ok(()),
            (Caller::Node(own), _) => Err(format!(
                "{node:?} is another node than the sender, {own:?}; a node speaks for itself only"
            )),
        }
    }
}

// === impl Caller ===

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Monitor => f.write_str("a monitor of ours"),
            Self::Local(UnixPeer { uid, pid, .. }) => match pid {
                Some(pid) => write!(f, "process {pid} of user {uid}"),
                None => write!(f, "a process of user {uid}"),
            },
            Self::Node(name) => write!(f, "node {name}"),
            Self::Central(name) => write!(f, "central monitor {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_speak_for_whom() {
        let peer = UnixPeer {
            uid: 1000,
            gid: 1000,
            pid: Some(7),
        };
        let own = AcceptNodes::Own("n1".into());
        let table = [
            (Caller::Monitor, &own, "n2", true),
            (Caller::Local(peer), &own, "n1", true),
            (Caller::Local(peer), &own, "n2", false),
            (Caller::Local(peer), &own, "N1", false),
            (Caller::Local(peer), &AcceptNodes::Any, "n2", true),
            (Caller::Node("n2".into()), &own, "n2", true),
            (Caller::Node("n2".into()), &own, "n1", false),
            // What local processes may do says nothing about nodes.
            (Caller::Node("n2".into()), &AcceptNodes::Any, "n1", false),
            (Caller::Central("cloud".into()), &own, "n2", true),
        ];
        for (caller, nodes, node, may) in table {
            let answer = nodes.check(&caller, node);
            assert_eq!(answer.is_ok(), may, "{caller} for {node}: {answer:?}");
        }
    }
}
