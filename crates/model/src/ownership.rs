//! The session on a node, as recorded in the node's annotations.
//!
//! Most annotations are NVSentinel's: its tools can read them, and a node quarantined by
//! NVSentinel can be taken over. `gpuwarden.dev/session` adds the session's id, its maker, its
//! progress, and the labels that it replaced.

use std::collections::BTreeMap;

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::attempt::{Attempt, RemediationMark};
use crate::event::{event_id, floor_char_boundary};
use crate::future::is_future;
use crate::node::{NodeView, Taint};
use crate::proposal::Proposal;

mod deeds;
mod machines;

pub use machines::{AFTER_BOOT, AFTER_UPGRADE, Machines, Undone};

/// Annotations that record a session on a node. A decision about a session depends on all of
/// them.
pub const SESSION_ANNOTATIONS: [&str; 5] = [
    keys::QUARANTINE_HEALTH_EVENT,
    keys::QUARANTINE_APPLIED_TAINTS,
    keys::QUARANTINE_IS_CORDONED,
    keys::QUARANTINE_CORDON_PRE_EXISTING,
    keys::SESSION,
];
/// Longest reason of a [`ReleaseRequest`], in bytes: it is copied into the journal.
pub const REASON_BYTES: usize = 1024;
/// Format of a time in a label's value, which cannot contain colons.
pub const CORDON_TIME: &str = "%Y-%m-%dT%H-%M-%SZ";

/// Message about a node that was already cordoned when its session began.
pub const CORDONED_BEFORE: &str = "the node was cordoned before the session, and stays so";

/// Session on a node, made by this or another gpuwarden or by NVSentinel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ownership {
    /// Id of the session.
    pub session_id: String,
    /// Start of the session, if known.
    pub since: Option<Timestamp>,
    /// Maker and progress of the session. Empty for a session of NVSentinel.
    pub mark: SessionMark,
    /// Events that caused the quarantine, with their ids filled in.
    pub events: Vec<HealthEvent>,
    /// True if the session requested a cordon.
    pub cordoned: bool,
    /// True if the node was already cordoned. It then stays cordoned.
    pub cordon_pre_existing: bool,
    /// Taints that the session requested.
    pub taints: Vec<AppliedTaint>,
    /// Labels that the session wrote, with their previous values. `None` for a session of
    /// NVSentinel, which does not record them.
    pub replaced_labels: Option<BTreeMap<String, Option<String>>>,
    /// Annotations for other programs that the session wrote, with their previous values.
    pub replaced_annotations: BTreeMap<String, Option<String>>,
}

/// Kind of gpuwarden that makes sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Maker {
    /// A controller, responsible for all nodes of its cluster.
    Controller,
    /// The gpuwarden of the node itself, responsible for this node only.
    Node,
    /// A kind unknown to this version.
    Other(String),
}

/// A taint that a session requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedTaint {
    /// Key, value and effect of the taint.
    #[serde(flatten)]
    pub taint: Taint,
    /// True if the node already had the taint. It then stays on the node.
    #[serde(default)]
    pub pre_existing: bool,
}

/// Action of a person that ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByHand {
    /// The node was uncordoned, as by `kubectl uncordon`.
    Uncordoned,
    /// A taint of the session was removed.
    Untainted,
    /// A release was requested; see [`ReleaseRequest`].
    Released,
}

/// The session's permission for the janitor: which attempt may start, and whether now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// Key of the running attempt ([`Attempt::key`](crate::attempt::Attempt::key)). `None` if a
    /// person has ended the session. A resource made for another attempt must not be started.
    pub attempt: Option<String>,
    /// True while nothing may start: the node is not out of service although the session says
    /// so. The controller then either records that a person has ended the session, or takes the
    /// node out of service again.
    pub waits: bool,
}

/// A request to return a quarantined node to service whatever its faults: the annotation
/// [`keys::RELEASE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRequest {
    /// Name of the person, unverified.
    #[serde(default)]
    pub by: String,
    /// Reason for the release, for people.
    #[serde(default)]
    pub reason: String,
    /// Time of the request on the person's own clock.
    #[serde(default)]
    pub at: Option<Timestamp>,
}

/// Content of the annotation `gpuwarden.dev/session`.
#[derive(Serialize, Deserialize)]
pub struct SessionAnnotation {
    /// Id of the session.
    pub id: String,
    /// Start of the session.
    pub since: Timestamp,
    /// Maker and progress of the session.
    #[serde(flatten)]
    pub mark: SessionMark,
    /// Labels that the session replaced, with their previous values. `None` if the node had no
    /// such label.
    #[serde(default)]
    pub labels: BTreeMap<String, Option<String>>,
    /// Annotations for other programs that the session replaced, in the same way.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
}

/// Maker and progress of a session, as part of its annotation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionMark {
    /// Maker of the session, if the annotation names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Maker>,
    /// Id of the maker's store, if a node's own gpuwarden made the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// Time of the takeover of the session by `store` from another store, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<Timestamp>,
    /// Start of the current phase, if later than the session's.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub phase_since: Option<Timestamp>,
    /// Drain of the node, once it has begun.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub drain: Option<DrainMark>,
    /// UUIDs of the GPUs whose pods the drain removes. Empty if it removes all pods.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub drain_gpus: Vec<String>,
    /// Remediation of the node, once it has begun.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub remediation: Option<RemediationMark>,
    /// Proposals of the session, oldest first: approved ones that count, and the one that waits.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub proposals: Vec<Proposal>,
    /// Time when the waiting node may return to service.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub back_at: Option<Timestamp>,
    /// Recent returns of the node to service, before this session began.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Timestamp>,
    /// Recent reboots and driver upgrades of the node.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Machines::is_empty"
    )]
    pub machines: Machines,
    /// Changes of the session that automation has undone.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Undone::is_empty"
    )]
    pub undone: Undone,
    /// Changes that the session requested and that were never observed on the node.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// Drain of a node, as recorded in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainMark {
    /// Start of the drain.
    pub since: Timestamp,
    /// Time when the last pod had left. `None` while the drain is in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<Timestamp>,
}

/// Deserialises an optional part. Malformed content is dropped, rather than failing the whole
/// annotation, without which the node would not be ours.
fn or_nothing<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    from: D,
) -> Result<T, D::Error> {
    let value = Value::deserialize(from)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

// === impl Ownership ===

impl Ownership {
    /// Returns the session on `node`. `None` if the node is not quarantined.
    ///
    /// Malformed annotations count as present but empty: the node belongs to a session, and
    /// unreadable content is not guessed.
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
            // NVSentinel does not write the name, but the annotation belongs to this node.
            event.node_name.clone_from(&node.name);
        }
        let is_true = |key| annotation(key) == Some(keys::TRUE);
        let cordoned = is_true(keys::QUARANTINE_IS_CORDONED);
        let cordon_pre_existing = is_true(keys::QUARANTINE_CORDON_PRE_EXISTING);
        let taints = annotation(keys::QUARANTINE_APPLIED_TAINTS)
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let own = if let Some(session) = session {
            Self {
                session_id: session.id,
                since: Some(session.since),
                mark: session.mark,
                replaced_labels: Some(session.labels),
                replaced_annotations: session.annotations,
                ..Self::default()
            }
        } else {
            let first = events.first().map(|event| event.id.clone());
            Self {
                session_id: first.unwrap_or_default(),
                since: cordon_timestamp(node),
                ..Self::default()
            }
        };
        Some(Self {
            events,
            cordoned,
            cordon_pre_existing,
            taints,
            ..own
        })
    }

    /// Returns whether the session belongs to another store than `store`, and must not be taken
    /// over.
    ///
    /// Two gpuwardens may run for the same node, and if each took over the other's sessions,
    /// they would undo each other's work for ever. Whether the other one is still running is
    /// unknown: it may be in another container. A store that already existed (since `begun`)
    /// when the other one signed the session therefore does not take over. A store that was
    /// created later may, since it replaces a lost store; the earlier store, if it still
    /// exists, does not take back what was signed after its own start. A session thus changes
    /// hands at most once per new store. `our_node` is true if no other gpuwarden is
    /// responsible for the node. A signature from the future was made by a wrong clock and
    /// excludes nobody.
    pub fn kept_by_another(
        &self,
        store: &str,
        begun: Timestamp,
        our_node: bool,
        now: Timestamp,
    ) -> bool {
        if self
            .mark
            .store
            .as_deref()
            .is_none_or(|theirs| theirs == store)
        {
            return false;
        }
        let signed = self.mark.taken_over.or(self.since);
        !(our_node && signed.is_some_and(|signed| signed < begun || is_future(signed, now)))
    }

    /// Returns the start of the session's current phase.
    pub fn in_phase_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.mark.phase_since.map(|at| at.min(now)).or(self.since)
    }

    /// Sets the start of the current phase and the time when the node may return to
    /// service.
    #[must_use]
    pub fn in_phase(mut self, since: Timestamp, back_at: Option<Timestamp>) -> Self {
        self.mark.phase_since = (self.since != Some(since)).then_some(since);
        self.mark.back_at = back_at;
        self
    }

    /// Returns whether the whole node is out of service, and not only some of its devices.
    pub fn takes_node_out(&self) -> bool {
        self.cordoned || !self.taints.is_empty()
    }

    /// Returns whether `node` stays cordoned after the session.
    pub fn keeps_cordon(&self, node: &NodeView) -> bool {
        self.cordoned && self.cordon_pre_existing && node.unschedulable
    }

    /// Returns the field manager that cordoned `node` outside of a session, where the API server has recorded
    /// one. `own` is the session on the node.
    pub fn cordoned_by<'a>(node: &'a NodeView, own: Option<&Self>) -> Option<&'a str> {
        let outside = own.is_none_or(|own| !own.cordoned || own.keeps_cordon(node));
        node.cordoned_by.as_deref().filter(|_| outside)
    }

    /// Returns whether all events of the quarantine were forced by their senders (`force`).
    pub fn forced(&self) -> bool {
        let force = |event: &HealthEvent| event.quarantine_overrides.is_some_and(|o| o.force);
        !self.events.is_empty() && self.events.iter().all(force)
    }

    /// Returns what the session on `node` permits the janitor to start.
    pub fn permit(node: &NodeView) -> Permit {
        let own = Self::read(node).filter(|_| !node.annotations.contains_key(keys::RELEASE));
        let mark = own.as_ref().and_then(|own| own.mark.remediation.as_ref());
        let open = mark.and_then(RemediationMark::under_way).map(Attempt::key);
        Permit {
            waits: own.as_ref().is_some_and(|own| own.lacks_a_deed(node)),
            attempt: open,
        }
    }

    /// Returns the reason why the session ends, and that the node stays cordoned if it does.
    pub fn with_cordon_before(&self, node: &NodeView, why: &str) -> String {
        if self.keeps_cordon(node) {
            format!("{why}; {CORDONED_BEFORE}")
        } else {
            why.to_owned()
        }
    }

    /// Returns whether the session added `taint` to the node.
    pub fn added(&self, taint: &Taint) -> bool {
        self.taints
            .iter()
            .any(|applied| applied.taint == *taint && !applied.pre_existing)
    }
}

// === impl SessionMark ===

impl SessionMark {
    /// Returns the proposal that waits for an approval.
    pub fn proposal(&self) -> Option<&Proposal> {
        self.proposals.iter().find(|one| one.approved.is_none())
    }

    /// Returns the drain, if it covers all of `gpus`. An empty list stands for all pods.
    pub fn drain_of(&self, gpus: &[String]) -> Option<DrainMark> {
        let all = self.drain_gpus.is_empty();
        let these = !gpus.is_empty() && gpus.iter().all(|gpu| self.drain_gpus.contains(gpu));
        self.drain.filter(|_| all || these)
    }

    /// Returns the start of the current state of the drain or remediation. `None` if neither
    /// has begun.
    pub fn stands_since(&self) -> Option<Timestamp> {
        let drain = self.drain.map(DrainMark::stands_since);
        if self.state() == keys::STATE_DRAINING {
            return drain;
        }
        let remediation = self.remediation.as_ref();
        remediation.and_then(RemediationMark::since).or(drain)
    }

    /// Returns the value of [`keys::STATE_LABEL`] for a quarantined node.
    pub fn state(&self) -> &'static str {
        state_label(self.drain, self.remediation.as_ref())
    }
}

// === impl DrainMark ===

impl DrainMark {
    /// Returns the start of the drain's current state.
    fn stands_since(self) -> Timestamp {
        self.done.unwrap_or(self.since)
    }
}

/// Returns the value of [`keys::STATE_LABEL`] for a quarantined node with this progress.
pub fn state_label(
    drain: Option<DrainMark>,
    remediation: Option<&RemediationMark>,
) -> &'static str {
    let drains = drain.is_some_and(|mark| mark.done.is_none());
    match remediation.and_then(RemediationMark::state) {
        // A remediation of single GPUs has not helped, and all other pods leave before the next one.
        Some(keys::STATE_REMEDIATED) | None if drains => keys::STATE_DRAINING,
        Some(state) => state,
        None if drain.is_some() => keys::STATE_DRAINED,
        None => keys::STATE_QUARANTINED,
    }
}

// === impl Maker ===

impl From<String> for Maker {
    fn from(text: String) -> Self {
        match text.as_str() {
            "controller" => Self::Controller,
            "node" => Self::Node,
            _ => Self::Other(text),
        }
    }
}

impl From<Maker> for String {
    fn from(maker: Maker) -> Self {
        match maker {
            Maker::Controller => "controller".to_owned(),
            Maker::Node => "node".to_owned(),
            Maker::Other(text) => text,
        }
    }
}

// === impl ReleaseRequest ===

impl ReleaseRequest {
    /// Returns the time of the latest report that the person can have known about. Later ones
    /// count, even if the person's clock runs ahead.
    pub fn dismisses_until(&self, newest_listed: Option<Timestamp>, now: Timestamp) -> Timestamp {
        let asked = self.at.map_or(now, |at| at.min(now));
        newest_listed.map_or(asked, |newest| newest.max(asked))
    }

    /// Returns the request on `node`. Text that is not JSON was written by hand and counts as
    /// the reason.
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
}

/// Returns the time when a person last ended a session of the node, from its annotation.
pub fn released_at(node: &NodeView) -> Option<Timestamp> {
    node.annotations.get(keys::RELEASED_AT)?.trim().parse().ok()
}

/// Returns the time in NVSentinel's cordon label, whose key may have any prefix.
fn cordon_timestamp(node: &NodeView) -> Option<Timestamp> {
    let (_, text) = (node.labels.iter()).find(|(key, _)| key.ends_with(keys::CORDON_TIMESTAMP))?;
    let time = jiff::civil::DateTime::strptime(CORDON_TIME, text).ok()?;
    Some(time.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::attempt::ResourceKind;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn the_begin_of_nvsentinels_sessions_is_read_from_its_label() {
        let mut node = NodeView::unknown("n1");
        node.annotations
            .insert(keys::QUARANTINE_HEALTH_EVENT.into(), "[{}]".into());
        assert_eq!(Ownership::read(&node).unwrap().since, None);
        node.labels.insert(
            "k8saas.nvidia.com/cordon-timestamp".into(),
            "1970-01-01T00-01-40Z".into(),
        );
        assert_eq!(Ownership::read(&node).unwrap().since, Some(at(100)));
        node.labels.insert(
            "k8saas.nvidia.com/cordon-timestamp".into(),
            "yesterday".into(),
        );
        assert_eq!(Ownership::read(&node).unwrap().since, None);
    }

    #[test]
    fn pods_that_leave_after_a_remediation_that_has_not_helped_are_a_drain() {
        let kind = ResourceKind::default();
        let attempt = json!({"id": "e", "action": "COMPONENT_RESET", "group": "reset", "event": "e",
            "resource": kind, "name": "n", "since": at(1), "timeoutMinutes": 60, "made": at(1),
            "end": {"at": at(2), "outcome": "succeeded", "why": ""}});
        let mark = json!({"drain": {"since": at(3)}, "remediation": {"attempts": [attempt]}});
        let mut mark: SessionMark = serde_json::from_value(mark).unwrap();
        assert_eq!(
            (mark.state(), mark.stands_since()),
            (keys::STATE_DRAINING, Some(at(3)))
        );
        mark.drain = mark.drain.map(|drain| DrainMark {
            done: Some(at(4)),
            ..drain
        });
        assert_eq!(
            (mark.state(), mark.stands_since()),
            (keys::STATE_REMEDIATED, Some(at(2)))
        );
    }

    #[test]
    fn a_wait_that_cannot_be_read_costs_itself_only() {
        let mut node = NodeView::unknown("n1");
        let text = r#"{"id":"s","since":"1970-01-01T00:01:10Z","store":"a","phaseSince":7,
            "backAt":"soon","returns":["never"]}"#;
        node.annotations.insert(keys::SESSION.into(), text.into());
        let own = Ownership::read(&node).unwrap();
        assert_eq!(
            (own.session_id.as_str(), own.mark.store.as_deref()),
            ("s", Some("a"))
        );
        assert_eq!(
            (own.mark.phase_since, own.mark.back_at, own.mark.returns),
            (None, None, vec![])
        );
    }

    #[test]
    fn who_made_a_session_is_kept_whoever_it_is() {
        let mut node = NodeView::unknown("n1");
        let table = [
            ("", None),
            (r#","by":"controller""#, Some(Maker::Controller)),
            (r#","by":"node""#, Some(Maker::Node)),
            (r#","by":"fleet""#, Some(Maker::Other("fleet".to_owned()))),
        ];
        for (by, maker) in table {
            let text = format!(r#"{{"id":"s","since":"1970-01-01T00:01:10Z"{by},"labels":{{}}}}"#);
            node.annotations.insert(keys::SESSION.into(), text.clone());
            assert_eq!(Ownership::read(&node).unwrap().mark.by, maker);
            let read: SessionAnnotation = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
    }

    #[test]
    fn a_session_is_taken_over_from_a_store_only_by_one_that_was_made_later() {
        let mut node = NodeView::unknown("n1");
        // Store a holds the session since second 70, store b since second 90.
        let made = r#"{"id":"s","since":"1970-01-01T00:01:10Z","by":"node","store":"a"}"#;
        let taken = r#"{"id":"s","since":"1970-01-01T00:01:10Z","by":"node","store":"b",
            "takenOver":"1970-01-01T00:01:30Z"}"#;
        let unsigned = r#"{"id":"s","since":"1970-01-01T00:01:10Z","by":"node"}"#;
        let ahead = r#"{"id":"s","since":"2027-01-15T08:00:00Z","by":"node","store":"a"}"#;
        for (text, store, begun, ours, kept) in [
            (ahead, "b", 71, true, false),
            (ahead, "b", 71, false, true),
            (made, "a", 50, true, false),
            (made, "a", 80, false, false),
            (made, "b", 69, true, true),
            (made, "b", 70, true, true),
            (made, "b", 71, true, false),
            (made, "b", 71, false, true),
            (taken, "a", 50, true, true),
            (taken, "c", 80, true, true),
            (taken, "c", 91, true, false),
            (unsigned, "c", 50, true, false),
        ] {
            node.annotations.insert(keys::SESSION.into(), text.into());
            let own = Ownership::read(&node).unwrap();
            let now = at(200);
            let kept_by_another = own.kept_by_another(store, at(begun), ours, now);
            assert_eq!(kept_by_another, kept, "{text} {store} {begun} {ours}");
        }
    }

    #[test]
    fn forced_is_what_only_senders_asked_for() {
        let mut node = NodeView::unknown("n1");
        let force = r#"{"quarantineOverrides":{"force":true}}"#;
        for (text, forced) in [
            (format!("[{force}]"), true),
            (format!("[{force},{{}}]"), false),
            ("[{}]".to_owned(), false),
            ("{".to_owned(), false),
        ] {
            node.annotations
                .insert(keys::QUARANTINE_HEALTH_EVENT.into(), text.clone());
            assert_eq!(Ownership::read(&node).unwrap().forced(), forced, "{text}");
        }
    }
}
