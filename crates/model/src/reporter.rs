//! The reporter of an event, as determined by the connector that received it.
//!
//! Whatever a message claims about its sender, the connector records the actual reporter in the
//! event's metadata. Senders cannot write there: the connector first removes their keys under
//! `gpuwarden.dev/`. The reporter's [`Authority`] decides what it may close.

use std::fmt;

use contract::{HealthEvent, keys};
use serde::{Deserialize, Serialize};

/// Agent of events that gpuwarden reports about a node itself, such as a request to validate
/// it.
pub const OWN_AGENT: &str = "gpuwarden";

/// Reporter of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reporter {
    /// A monitor in one of gpuwarden's own processes.
    Monitor,
    /// A process on the event's machine that runs as root or as our own user, in our own pid
    /// and user namespaces: an administrator of the machine.
    Operator(Process),
    /// Another process on the event's machine, including root in a container.
    User(Process),
    /// A pod on the event's machine, as `namespace/name`, whose event was forwarded by a
    /// central monitor.
    Pod(String),
    /// The agent of the event's node, over the network. The original reporter is not known.
    Node,
    /// A monitor that watches nodes from elsewhere, by its authenticated name.
    Central(String),
}

/// A process on the event's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Effective user id of the process.
    pub uid: u32,
    /// Process id. `None` if the process is not visible in our pid namespace.
    pub pid: Option<i32>,
}

/// Authority of a reporter. A report closes only faults that its own authority or a lower one
/// opened, and reports of two authorities are two faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Authority {
    /// Any user of the machine. Users are not distinguished: a passing check in the next pod
    /// closes what the check in an earlier pod opened.
    User,
    /// Administrators of the machine or the cluster, and our own monitors.
    Trusted,
}

/// Returns whether gpuwarden itself reported the event. Only gpuwarden closes the faults that
/// such an event opens.
pub fn is_own_word(event: &HealthEvent) -> bool {
    event.agent == OWN_AGENT && Reporter::of(event) == Some(Reporter::Monitor)
}

// === impl Reporter ===

impl Reporter {
    /// Returns the reporter recorded in an event. `None` if the record is missing or malformed.
    pub fn of(event: &HealthEvent) -> Option<Self> {
        Self::parse(event.metadata.get(keys::META_REPORTED_BY)?)
    }

    /// Records the reporter in an event.
    pub fn note_in(&self, event: &mut HealthEvent) {
        event
            .metadata
            .insert(keys::META_REPORTED_BY.to_owned(), self.mark());
    }

    /// Returns the reporter without the pid, which differs when a restarted check reports the
    /// same thing again.
    #[must_use]
    pub fn without_pid(self) -> Self {
        let lasting = |process: Process| Process {
            pid: None,
            ..process
        };
        match self {
            Self::Operator(process) => Self::Operator(lasting(process)),
            Self::User(process) => Self::User(lasting(process)),
            other => other,
        }
    }

    /// Returns the authority of the reporter.
    pub fn authority(&self) -> Authority {
        match self {
            Self::User(_) | Self::Pod(_) => Authority::User,
            Self::Monitor | Self::Operator(_) | Self::Node | Self::Central(_) => Authority::Trusted,
        }
    }

    /// Returns the value of [`keys::META_REPORTED_BY`].
    fn mark(&self) -> String {
        match self {
            Self::Monitor => "monitor".to_owned(),
            Self::Operator(process) => format!("operator {}", process.mark()),
            Self::User(process) => format!("user {}", process.mark()),
            Self::Pod(name) => format!("pod {name}"),
            Self::Node => "node".to_owned(),
            Self::Central(name) => format!("central {name}"),
        }
    }

    fn parse(mark: &str) -> Option<Self> {
        let (class, rest) = mark.split_once(' ').unwrap_or((mark, ""));
        match class {
            "monitor" if rest.is_empty() => Some(Self::Monitor),
            "operator" => Process::parse(rest).map(Self::Operator),
            "user" => Process::parse(rest).map(Self::User),
            "pod" => Some(Self::Pod(rest.to_owned())),
            "node" if rest.is_empty() => Some(Self::Node),
            "central" => Some(Self::Central(rest.to_owned())),
            _ => None,
        }
    }
}

/// Formats the reporter for people: `process 7 of user 1000`.
impl fmt::Display for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Monitor => f.write_str("a monitor of ours"),
            Self::Operator(process) | Self::User(process) => process.fmt(f),
            Self::Pod(name) => write!(f, "pod {name}"),
            Self::Node => f.write_str("the node's agent"),
            Self::Central(name) => write!(f, "central monitor {name}"),
        }
    }
}

// === impl Process ===

impl Process {
    fn mark(self) -> String {
        match self.pid {
            Some(pid) => format!("uid={} pid={pid}", self.uid),
            None => format!("uid={}", self.uid),
        }
    }

    fn parse(mark: &str) -> Option<Self> {
        let (uid, pid) = match mark.split_once(' ') {
            Some((uid, pid)) => (uid, Some(pid.strip_prefix("pid=")?.parse().ok()?)),
            None => (mark, None),
        };
        let uid = uid.strip_prefix("uid=")?.parse().ok()?;
        Some(Self { uid, pid })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of user {}", self.uid),
            None => write!(f, "a process of user {}", self.uid),
        }
    }
}

// === impl Authority ===

impl Authority {
    /// Returns the authority behind an event. Events without a recorded reporter, as in a
    /// replay from another system, have the lowest one.
    pub fn of(event: &HealthEvent) -> Self {
        Reporter::of(event).map_or(Self::User, |reporter| reporter.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_read_again_and_weighs_what_it_should() {
        let process = |pid| Process { uid: 1000, pid };
        let table = [
            (Reporter::Monitor, Authority::Trusted),
            (Reporter::Operator(process(Some(7))), Authority::Trusted),
            (Reporter::User(process(Some(7))), Authority::User),
            (Reporter::User(process(None)), Authority::User),
            (Reporter::Pod("training/a".into()), Authority::User),
            (Reporter::Node, Authority::Trusted),
            (Reporter::Central("k8s sa".into()), Authority::Trusted),
        ];
        for (reporter, authority) in table {
            let mut event = HealthEvent::default();
            assert_eq!(Authority::of(&event), Authority::User);
            reporter.note_in(&mut event);
            assert_eq!(Reporter::of(&event), Some(reporter), "{event:?}");
            assert_eq!(Authority::of(&event), authority);
        }
    }

    #[test]
    fn what_is_no_note_of_ours_weighs_least() {
        for mark in [
            "",
            "Monitor",
            "monitor ",
            "monitor x",
            "node n1",
            "operator",
            "operator uid=0 pid=",
            "operator 0",
            "user uid=-1",
            "root",
        ] {
            let mut event = HealthEvent::default();
            let key = keys::META_REPORTED_BY.to_owned();
            event.metadata.insert(key, mark.to_owned());
            let read = Reporter::of(&event);
            assert!(read.is_none() || mark == "monitor ", "{mark:?}: {read:?}");
        }
    }
}
