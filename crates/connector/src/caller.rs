//! Senders of events, and the nodes that they may report on.
//!
//! An event can take a node out of service, and a healthy event returns it. Reports about other
//! nodes than the sender's own therefore count only if an operator has allowed them.

use std::fmt;

use contract::{HealthEvent, keys};
use model::reporter::{Process, Reporter};
use runtime::unix_grpc::UnixPeer;

/// Identity of the sender of events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Monitor in this process. It is trusted for the nodes that it watches.
    Monitor,
    /// Process on this machine, over the Unix socket, which any user may use.
    Local(UnixPeer),
    /// Pod that has proven its namespace and name, and that its node is this one. It has the
    /// authority of a user of that machine.
    Pod {
        /// Node that the pod runs on.
        node: String,
        /// Namespace and name of the pod, such as `training/worker-0`.
        name: String,
    },
    /// Agent of a node that has proven its name.
    Node(String),
    /// Monitor that watches nodes from elsewhere (a cloud's API, Kubernetes objects), has
    /// proven its name, and is allowed by the operator.
    Central(String),
    /// Peer of a port without authentication: an agent, a monitor, or a user of the machine.
    /// For evaluation on loopback only.
    Anybody,
}

/// Nodes that processes on this machine may report on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcceptNodes {
    /// The node that they run on, which has this name.
    Own(String),
    /// Any node at all.
    Any,
}

// === impl AcceptNodes ===

impl AcceptNodes {
    /// Returns the node that `caller` reports on: this connector's node if it names none.
    pub(super) fn meant<'a>(&'a self, caller: &Caller, node: &'a str) -> Result<&'a str, String> {
        match self {
            Self::Own(own) if node.is_empty() => Ok(own),
            _ => self.check(caller, node).map(|()| node),
        }
    }

    /// Checks that `caller` may report on `node`. The error gives the reason, and what to do.
    pub(super) fn check(&self, caller: &Caller, node: &str) -> Result<(), String> {
        match (caller, self) {
            (Caller::Monitor | Caller::Central(_) | Caller::Anybody, _)
            | (Caller::Local(_), Self::Any) => Ok(()),
            (Caller::Local(_), Self::Own(own)) if own == node => Ok(()),
            (Caller::Local(_), Self::Own(own)) => Err(format!(
                "{node:?} is another node than this one, {own:?}; report it on its own machine, or \
                 start gpuwarden with --accept-nodes any where this one collects for others"
            )),
            (Caller::Node(own) | Caller::Pod { node: own, .. }, _) if own == node => Ok(()),
            (Caller::Node(own) | Caller::Pod { node: own, .. }, _) => Err(format!(
                "{node:?} is another node than the sender, {own:?}; a node speaks for itself only"
            )),
        }
    }
}

// === impl Caller ===

/// Metadata keys that only a controller writes, without the connector. Values from a sender are
/// forged.
const NEVER_SENT: [&str; 2] = [keys::META_TAKEN_OVER, keys::META_GONE_AFTER];

impl Caller {
    /// Records the reporter in an event, and removes metadata that the caller may not set.
    /// Returns the number of removed entries.
    ///
    /// Keeps the reporter recorded by a node's agent: the agent is trusted about processes on
    /// its own node. A central monitor may report on behalf of a pod, which has less authority
    /// than the monitor.
    pub(super) fn sign(&self, event: &mut HealthEvent) -> usize {
        let noted = Reporter::of(event);
        event.metadata.remove(keys::META_REPORTED_BY);
        let before = event.metadata.len();
        event
            .metadata
            .retain(|key, _| !NEVER_SENT.contains(&key.as_str()) && self.may_write(key));
        let taken_off = before - event.metadata.len();
        let reporter = match self {
            Self::Node(_) => noted.unwrap_or(Reporter::Node),
            Self::Central(_) => match noted {
                Some(pod @ Reporter::Pod(_)) => pod,
                _ => self.reporter(),
            },
            other => other.reporter(),
        };
        reporter.note_in(event);
        taken_off
    }

    /// Returns true if the caller may set a metadata key: keys under `gpuwarden.dev/` are for
    /// gpuwarden's own processes, and for `gpuwarden inject`, which an operator runs. A node speaks
    /// for itself only, and a mark of the ledger is about a GPU on any node.
    fn may_write(&self, key: &str) -> bool {
        match self {
            Self::Node(_) if key == keys::META_LEDGER_MARK => false,
            // Agents without TLS, for evaluation, have the same rights as others.
            Self::Monitor | Self::Node(_) | Self::Anybody => true,
            Self::Local(peer) if peer.is_operator => true,
            Self::Local(_) | Self::Pod { .. } | Self::Central(_) => {
                !key.starts_with(keys::OWN_PREFIX)
            }
        }
    }

    fn reporter(&self) -> Reporter {
        match self {
            Self::Monitor => Reporter::Monitor,
            Self::Local(peer) => {
                let process = Process {
                    uid: peer.uid,
                    pid: peer.pid,
                };
                if peer.is_operator {
                    Reporter::Operator(process)
                } else {
                    Reporter::User(process)
                }
            }
            Self::Pod { name, .. } => Reporter::Pod(name.clone()),
            Self::Node(_) => Reporter::Node,
            Self::Central(name) => Reporter::Central(name.clone()),
            Self::Anybody => Reporter::Central("anybody on this machine".to_owned()),
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "node {name}"),
            other => other.reporter().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::reporter::Authority;

    use super::*;

    fn pod(node: &str) -> Caller {
        Caller::Pod {
            node: node.to_owned(),
            name: "training/a".to_owned(),
        }
    }

    #[test]
    fn who_may_speak_for_whom() {
        let peer = UnixPeer {
            uid: 1000,
            gid: 1000,
            pid: Some(7),
            is_operator: false,
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
            // Rights of local processes do not apply to nodes.
            (Caller::Node("n2".into()), &AcceptNodes::Any, "n1", false),
            (pod("n2"), &AcceptNodes::Any, "n2", true),
            (pod("n2"), &AcceptNodes::Any, "n1", false),
            (Caller::Central("cloud".into()), &own, "n2", true),
            (Caller::Anybody, &own, "n2", true),
        ];
        for (caller, nodes, node, may) in table {
            let answer = nodes.check(&caller, node);
            assert_eq!(answer.is_ok(), may, "{caller} for {node}: {answer:?}");
        }
    }

    #[test]
    fn who_reports_is_noted_and_what_only_we_may_say_is_taken_off() {
        let local = |is_operator| {
            Caller::Local(UnixPeer {
                uid: 0,
                gid: 0,
                pid: Some(7),
                is_operator,
            })
        };
        // Remaining number of the keys `said`, `place`, `job`, `taken-over` and a forged
        // reporter, and the reporter.
        let table = [
            (Caller::Monitor, 3, "monitor"),
            (local(true), 3, "operator uid=0 pid=7"),
            (local(false), 1, "user uid=0 pid=7"),
            (pod("n1"), 1, "pod training/a"),
            (Caller::Node("n1".into()), 3, "user uid=9"),
            (Caller::Central("cloud".into()), 1, "central cloud"),
            (Caller::Anybody, 3, "central anybody on this machine"),
        ];
        for (caller, left, reporter) in table {
            let entries = [
                ("said", "x"),
                (keys::META_LOG_PLACE, "1:2:3"),
                (keys::META_JOB, "ml/train"),
                (keys::META_TAKEN_OVER, "x"),
                (keys::META_REPORTED_BY, "user uid=9"),
            ];
            let mut event = HealthEvent {
                metadata: entries.map(|(k, v)| (k.into(), v.into())).into(),
                ..HealthEvent::default()
            };
            assert_eq!(caller.sign(&mut event), 4 - left, "{caller}");
            assert_eq!(event.metadata[keys::META_REPORTED_BY], reporter);
            assert_eq!(event.metadata.len(), left + 1, "{caller}: {event:?}");
        }
        let mut marked = HealthEvent::default();
        let mark = (keys::META_LEDGER_MARK.to_owned(), "good".to_owned());
        marked.metadata.extend([mark]);
        assert_eq!(local(true).sign(&mut marked.clone()), 0);
        assert_eq!(Caller::Node("n1".into()).sign(&mut marked), 1, "{marked:?}");
        // A central monitor may report on behalf of a pod, with the pod's authority.
        let mut brought = HealthEvent::default();
        pod("n1").sign(&mut brought);
        Caller::Central("webhook".into()).sign(&mut brought);
        assert_eq!(brought.metadata[keys::META_REPORTED_BY], "pod training/a");
        let mut unsigned = HealthEvent::default();
        Caller::Node("n1".into()).sign(&mut unsigned);
        assert_eq!(unsigned.metadata[keys::META_REPORTED_BY], "node");
    }

    /// Compares the table of SECURITY.md with the code.
    #[test]
    fn the_table_of_who_may_say_what_is_true() {
        let text = include_str!("../../../SECURITY.md");
        let local = |is_operator| {
            Caller::Local(UnixPeer {
                uid: 0,
                gid: 0,
                pid: None,
                is_operator,
            })
        };
        let callers = [
            Caller::Monitor,
            local(true),
            local(false),
            pod("n1"),
            Caller::Node("n1".into()),
            Caller::Central("cloud".into()),
        ];
        let rows = text
            .lines()
            .skip_while(|line| !line.starts_with("| who reports"));
        let rows: Vec<Vec<&str>> = (rows.skip(2).take_while(|line| line.starts_with('|')))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        assert_eq!(rows.len(), callers.len());
        for (caller, row) in callers.iter().zip(rows) {
            let own = AcceptNodes::Own("n1".into());
            assert!(own.check(caller, "n1").is_ok());
            let speaks_for = match own.check(caller, "n2") {
                Ok(()) => "any node",
                Err(_) => "its own node",
            };
            let closes = match caller.reporter().authority() {
                Authority::Trusted => "anybody",
                Authority::User => "such users",
            };
            let keys = if caller.may_write(keys::META_LOG_PLACE) {
                "kept"
            } else {
                "taken off"
            };
            let user = match caller {
                Caller::Local(peer) => peer.sharing_user(),
                _ => None,
            };
            let shares = runtime::shares::Shares::new(64);
            let room = match shares.take(user, 64) {
                Some(_) => "all",
                None if shares.take(user, 8).is_some() => "an eighth",
                None => "less",
            };
            assert_eq!(row[2..6], [speaks_for, closes, keys, room], "{caller}");
        }
    }
}
