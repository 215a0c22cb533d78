//! The state of an object that matches a policy, and its next state: pure.
//!
//! ```text
//! (none) --fault--> pending --fault for `for`--> open --no fault for `clearFor`--> (none)
//! ```
//!
//! What is undetermined ends a wait, and changes nothing else: both times have to pass without a
//! gap.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use contract::HealthEvent;

use crate::judge::Verdict;

/// States by `POLICY/NAMESPACE/NAME`, or `POLICY/NAME`, the keys of NVSentinel's annotation.
pub type Matches = BTreeMap<String, Match>;

/// State of an object that matches a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Match {
    /// Node of the fault.
    pub node: String,
    /// Kind of the object, as events name it.
    pub kind: String,
    /// UID of the object; empty if it is not known.
    #[serde(default)]
    pub uid: String,
    /// Time since when it matches.
    pub since: Timestamp,
    /// True once it was reported.
    pub open: bool,
    /// Time since when it matches no longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clearing: Option<Timestamp>,
    /// True if this store may not have the report: the state is from a node's annotation, or from
    /// the time of another store.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
}

/// Change of a state, with the events that report it. Both are kept together.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Key of the state.
    pub key: String,
    /// New state; `None` to forget it.
    pub state: Option<Match>,
    /// Events to report, in this order.
    pub events: Vec<HealthEvent>,
    /// Nodes whose open matches have changed.
    pub nodes: Vec<String>,
}

/// Report of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    /// The object is a fault of this node.
    Fault(String),
    /// The object is no fault of this node now, for this reason.
    End(String, &'static str),
}

/// Facts that a step decides from, beside the state.
#[derive(Clone, Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) verdict: Verdict,
    /// UID of the object; empty if it is gone.
    pub(crate) uid: &'a str,
    pub(crate) kind: String,
    /// True if what policies read of the object has changed.
    pub(crate) changed: bool,
    pub(crate) open_after: SignedDuration,
    pub(crate) clear_after: SignedDuration,
    pub(crate) now: Timestamp,
}

/// Returns the next state, and what to report.
pub(crate) fn step(before: Option<&Match>, seen: &Observed<'_>) -> (Option<Match>, Vec<Say>) {
    // An object that was made anew under its name is another one.
    let is_other =
        |state: &Match| !state.uid.is_empty() && !seen.uid.is_empty() && state.uid != seen.uid;
    match (&seen.verdict, before) {
        (Verdict::Fault(node), Some(state)) if state.open && state.node == *node => {
            let tell = seen.changed || state.adopted || is_other(state);
            let next = Match {
                uid: seen.uid.to_owned(),
                clearing: None,
                adopted: false,
                ..state.clone()
            };
            let says = tell.then(|| Say::Fault(node.clone())).into_iter();
            (Some(next), says.collect())
        }
        (Verdict::Fault(node), Some(state)) if state.open => {
            let mut says = vec![Say::End(state.node.clone(), "it is on another node")];
            let waits = is_other(state) && seen.open_after.is_positive();
            says.extend((!waits).then(|| Say::Fault(node.clone())));
            (Some(seen.begin(node, !waits)), says)
        }
        (Verdict::Fault(node), state) => {
            let since = state.filter(|state| state.node == *node && !is_other(state));
            let since = since.map_or(seen.now, |state| state.since);
            let open = seen.now.duration_since(since) >= seen.open_after;
            let next = Match {
                since,
                ..seen.begin(node, open)
            };
            let says = open.then(|| Say::Fault(node.clone())).into_iter();
            (Some(next), says.collect())
        }
        (Verdict::Undetermined(_), Some(state)) if state.open && !is_other(state) => {
            let next = Match {
                clearing: None,
                ..state.clone()
            };
            (Some(next), Vec::new())
        }
        (Verdict::Fine | Verdict::Undetermined(_), Some(state)) if state.open => {
            let since = state.clearing.unwrap_or(seen.now);
            if seen.now.duration_since(since) < seen.clear_after {
                let next = Match {
                    clearing: Some(since),
                    ..state.clone()
                };
                return (Some(next), Vec::new());
            }
            let why = if seen.uid.is_empty() {
                "the object is gone"
            } else {
                "resolved"
            };
            (None, vec![Say::End(state.node.clone(), why)])
        }
        (Verdict::Fine | Verdict::Undetermined(_), _) => (None, Vec::new()),
    }
}

// === impl Observed ===

impl Observed<'_> {
    fn begin(&self, node: &str, open: bool) -> Match {
        Match {
            node: node.to_owned(),
            kind: self.kind.clone(),
            uid: self.uid.to_owned(),
            since: self.now,
            open,
            clearing: None,
            adopted: false,
        }
    }
}
