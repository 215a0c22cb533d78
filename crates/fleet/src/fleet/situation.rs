//! The situation of one node: the inputs of every decision about it, for `why-not`.

use std::borrow::Cow;

use jiff::Timestamp;
use model::device::NodeDevices;
use model::fault::Fault;
use model::mode::Mode;
use policy::Policy;

use super::Fleet;
use super::show::Shown;
use crate::brake::Hold;
use crate::session::{ObservedNode, Session};

/// Inputs of the decisions about a node, as of now.
#[derive(Clone, Debug)]
pub struct Situation<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// True if this process runs on the node, and for no other.
    pub is_own: bool,
    /// Mode of this process: how far decisions are carried out.
    pub acting: Mode,
    /// The node as decisions see it; `None` where the cluster does not have it, or has not been
    /// read.
    pub observed: Option<&'a ObservedNode>,
    /// Open faults of the node.
    pub faults: &'a [Fault],
    /// Number of reports about the node that found no room in the fault book.
    pub missed: u64,
    /// The policy in force; `None` until one is loaded, and nothing is decided before.
    pub policy: Option<&'a Policy>,
    /// Session of the node.
    pub session: Cow<'a, Session>,
    /// True if the node carries the session of another gpuwarden.
    pub foreign: bool,
    /// True if that gpuwarden runs for the node that this process runs on.
    pub on_our_node: bool,
    /// Devices of the node that can be tainted individually.
    pub devices: NodeDevices,
    /// Text for people about what the session awaits; empty for an unknown node.
    pub awaits: String,
    /// True if the store did not answer the last question about the node.
    pub store_unanswered: bool,
    /// Hold of the brake that keeps the node in service, if any.
    pub hold: Option<&'a Hold>,
    /// Time when the nodes held back by the circuit breaker were last dropped.
    pub dropped_at: Option<Timestamp>,
    /// Time of the situation.
    pub now: Timestamp,
}

impl Fleet {
    /// Returns the situation of `node`, which may be an unknown name.
    pub fn situation<'a>(&'a self, node: &'a str, now: Timestamp) -> Situation<'a> {
        let entry = self.nodes.get(node);
        Situation {
            node,
            is_own: self.state.settings.owns.node() == Some(node),
            acting: self.state.settings.mode,
            observed: entry.and_then(|entry| entry.observed.as_ref()),
            faults: self.state.book.faults(node),
            missed: self.state.book.missed(node),
            policy: self.state.policy.as_deref(),
            session: entry.map_or_else(
                || Cow::Owned(Session::idle(now)),
                |entry| Cow::Borrowed(&entry.session),
            ),
            foreign: entry.is_some_and(|entry| entry.claim.foreign.is_some()),
            on_our_node: entry.is_some_and(|entry| entry.claim.on_our_node),
            devices: self.state.devices_of(node),
            awaits: Shown::of(self, node).map_or_else(String::new, |shown| shown.awaits(None)),
            store_unanswered: entry.is_some_and(|entry| entry.claim.unanswered),
            hold: entry.and_then(|entry| entry.hold.as_ref()),
            dropped_at: self.state.switches.dropped_at,
            now,
        }
    }

    /// Returns the names of all nodes with an entry, and of the node that this process runs on.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.nodes.keys().map(String::as_str);
        names.chain(self.state.settings.owns.node())
    }
}
