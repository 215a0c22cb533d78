//! What is ours on a node, as the node itself says.
//!
//! The annotations are NVSentinel's, so that its tools read them, and a node that it
//! quarantined is taken over. `gpuwarden.dev/session` adds what they do not tell: the
//! session's id, and the labels that we replaced.

use std::collections::BTreeMap;

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::assess::Desired;
use crate::event::{event_id, floor_char_boundary};
use crate::node::{NodeView, Taint};

/// Longest reason of a [`ReleaseRequest`], in bytes: it goes into the journal.
pub const REASON_BYTES: usize = 1024;

/// What is ours on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Ownership {
    /// Identity of the session.
    pub session_id: String,
    /// The events for which the node is quarantined; their ids are filled in.
    pub events: Vec<HealthEvent>,
    /// Whether the session asked for a cordon.
    pub cordoned: bool,
    /// Whether the node was cordoned before; then it stays so.
    pub cordon_pre_existing: bool,
    /// Taints that the session asked for.
    pub taints: Vec<AppliedTaint>,
    /// Labels that the session wrote, with the value that each had before.
    /// `None`: not known, the session is of NVSentinel.
    pub replaced_labels: Option<BTreeMap<String, Option<String>>>,
}

/// A taint that a session asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedTaint {
    /// The taint.
    #[serde(flatten)]
    pub taint: Taint,
    /// Whether the node had it before; then it stays.
    #[serde(default)]
    pub pre_existing: bool,
}

/// How a person ended a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByHand {
    /// `kubectl uncordon`.
    Uncordoned,
    /// A taint of ours is gone.
    Untainted,
    /// They asked for it; see [`ReleaseRequest`].
    Released,
}

/// A request to give a quarantined node back, whatever its faults: the annotation
/// [`keys::RELEASE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRequest {
    /// Who asks.
    #[serde(default)]
    pub by: String,
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// When they asked, by their own clock.
    #[serde(default)]
    pub at: Option<Timestamp>,
}

/// The annotation `gpuwarden.dev/session`.
#[derive(Serialize, Deserialize)]
pub(super) struct SessionAnnotation {
    pub(super) id: String,
    pub(super) since: Timestamp,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, Option<String>>,
}

// === impl Ownership ===

impl Ownership {
    /// What is ours on `node`; `None` where it is not quarantined.
    ///
    /// Text that does not parse counts as present but empty: the node is ours, and what
    /// cannot be read is not guessed.
    pub fn read(node: &NodeView) -> Option<Self> {
        let annotation = |key: &str| node.annotations.get(key).map(|text| text.trim());
        let text = annotation(keys::QUARANTINE_HEALTH_EVENT).unwrap_or_default();
        let session: Option<SessionAnnotation> =
            annotation(keys::SESSION).and_then(|text| serde_json::from_str(text).ok());
        if (text.is_empty() || text == "[]") && session.is_none() {
            return None;
        }
        let mut events = json::annotation::parse(text).unwrap_or_default();
        for event in &mut events {
            if event.id.is_empty() {
                event.id = event_id(event);
            }
            // The reference does not write it, but it is the node's own annotation.
            event.node_name.clone_from(&node.name);
        }
        let is_true = |key| annotation(key) == Some(keys::TRUE);
        Some(Self {
            session_id: session
                .as_ref()
                .map(|session| session.id.clone())
                .or_else(|| events.first().map(|event| event.id.clone()))
                .unwrap_or_default(),
            cordoned: is_true(keys::QUARANTINE_IS_CORDONED),
            cordon_pre_existing: is_true(keys::QUARANTINE_CORDON_PRE_EXISTING),
            taints: annotation(keys::QUARANTINE_APPLIED_TAINTS)
                .and_then(|text| serde_json::from_str(text).ok())
                .unwrap_or_default(),
            replaced_labels: session.map(|session| session.labels),
            events,
        })
    }

    /// Whether somebody took back by hand what the session had done. Our own changes
    /// remove the annotations in the same patch, so they never look like this.
    pub(super) fn undone_by_hand(&self, node: &NodeView) -> Option<ByHand> {
        if self.cordoned && !node.unschedulable {
            return Some(ByHand::Uncordoned);
        }
        let gone = self
            .taints
            .iter()
            .any(|applied| !applied.pre_existing && !node.has_taint(&applied.taint));
        gone.then_some(ByHand::Untainted)
    }

    /// Whether the session has put `taint` on the node.
    pub(super) fn added(&self, taint: &Taint) -> bool {
        self.taints
            .iter()
            .any(|applied| applied.taint == *taint && !applied.pre_existing)
    }

    /// When the newest report of the faults that the node lists was accepted. These are
    /// the faults that a person who ends the session has seen and dismissed.
    pub(super) fn newest_listed(&self, desired: &Desired) -> Option<Timestamp> {
        desired
            .events
            .iter()
            .filter(|counted| self.events.iter().any(|event| event.id == counted.event.id))
            .map(|counted| counted.accepted_at)
            .max()
    }
}

// === impl ReleaseRequest ===

impl ReleaseRequest {
    /// The request that stands on `node`. Text that is no JSON is somebody's reason: they
    /// wrote it by hand.
    pub fn read(node: &NodeView) -> Option<Self> {
        let text = node.annotations.get(keys::RELEASE)?.trim();
        let mut request: Self = serde_json::from_str(text).unwrap_or_else(|_| Self {
            by: String::new(),
            reason: text.to_owned(),
            at: None,
        });
        for (field, limit) in [(&mut request.by, 253), (&mut request.reason, REASON_BYTES)] {
            field.truncate(floor_char_boundary(field, limit));
        }
        if request.by.is_empty() {
            "somebody".clone_into(&mut request.by);
        }
        Some(request)
    }

    /// Up to when the reports of faults are dismissed: as far as the person can have seen
    /// them. Where their clock is ahead of ours, later ones count.
    pub(super) fn dismisses_until(
        &self,
        newest_listed: Option<Timestamp>,
        now: Timestamp,
    ) -> Timestamp {
        let asked = self.at.map_or(now, |at| at.min(now));
        newest_listed.map_or(asked, |newest| newest.max(asked))
    }
}

/// When a person last ended a session of this node, from its annotation.
pub fn released_at(node: &NodeView) -> Option<Timestamp> {
    node.annotations.get(keys::RELEASED_AT)?.trim().parse().ok()
}
