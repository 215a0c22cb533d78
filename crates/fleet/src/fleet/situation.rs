//! The situation of one node, for those who explain what is decided about it.

use std::borrow::Cow;

use jiff::Timestamp;
use model::device::NodeDevices;
use model::fault::Fault;
use policy::Policy;

use super::{Fleet, Mode, Owns};
use crate::brake::Hold;
use crate::session::{Observed, Session};

/// All that decides about a node, as it is known right now.
#[derive(Clone, Debug)]
pub struct Situation<'a> {
    /// Its name.
    pub node: &'a str,
    /// True if this process runs on the node, and for no other.
    pub is_own: bool,
    /// The mode, which says how far decisions are carried out.
    pub acting: Mode,
    /// The node as decisions see it; `None` where the cluster does not have it, as far as it
    /// was read.
    pub observed: Option<&'a Observed>,
    /// Its open faults.
    pub faults: &'a [Fault],
    /// Number of reports about it that found no room among them.
    pub missed: u64,
    /// The policy in force; `None` where none was read yet, and nothing is decided.
    pub policy: Option<&'a Policy>,
    /// Its session.
    pub session: Cow<'a, Session>,
    /// True if the node carries the session of another gpuwarden.
    pub anothers: bool,
    /// True if that gpuwarden runs for the node that this process runs on.
    pub on_our_node: bool,
    /// Its devices that can be tainted each on its own.
    pub devices: NodeDevices,
    /// The thing that its session awaits, for people; empty where nothing is known of the node.
    pub awaits: String,
    /// True if the store did not answer the last question about the node.
    pub store_unanswered: bool,
    /// The hold by which the brake keeps the node in service, if it does.
    pub hold: Option<&'a Hold>,
    /// The time at which the nodes that the circuit breaker held back were last dropped.
    pub dropped_at: Option<Timestamp>,
}

impl Fleet {
    /// Returns what is known of `node`, which may be a name that nobody knows.
    pub fn situation<'a>(&'a self, node: &'a str, now: Timestamp) -> Situation<'a> {
        let entry = self.nodes.get(node);
        Situation {
            node,
            is_own: self.own().is_some_and(|own| own == node),
            acting: self.state.settings.mode,
            observed: entry.and_then(|entry| entry.observed.as_ref()),
            faults: self.state.book.faults(node),
            missed: self.state.book.missed(node),
            policy: self.state.policy.as_deref(),
            session: entry.map_or_else(
                || Cow::Owned(Session::idle(now)),
                |entry| Cow::Borrowed(&entry.session),
            ),
            anothers: entry.is_some_and(|entry| entry.claim.anothers.is_some()),
            on_our_node: entry.is_some_and(|entry| entry.claim.on_our_node),
            devices: self.state.devices_of(node),
            awaits: (self.shown(node)).map_or_else(String::new, |shown| shown.awaits(None)),
            store_unanswered: entry.is_some_and(|entry| entry.claim.unanswered),
            hold: entry.and_then(|entry| entry.hold.as_ref()),
            dropped_at: self.state.switched.dropped_at,
        }
    }

    /// Returns the names of all nodes that anything is known about, and of our own.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().chain(self.own()).map(String::as_str)
    }

    fn own(&self) -> Option<&String> {
        match &self.state.settings.owns {
            Owns::Node(own) => Some(own),
            Owns::All => None,
        }
    }
}
