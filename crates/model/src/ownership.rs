//! The session on a node, as the node itself says in its annotations.
//!
//! These are NVSentinel's, so that its tools read them, and a node that it quarantined is taken
//! over. `gpuwarden.dev/session` adds what they do not tell: the session's id, who made it, how far
//! it is, and the labels that it replaced.

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

mod deeds;
mod machines;

pub use machines::{AFTER_BOOT, AFTER_UPGRADE, Machines, Undone};

/// The annotations that tell a session on a node. A decision about a session has read all of them.
pub const SESSION_ANNOTATIONS: [&str; 5] = [
    keys::QUARANTINE_HEALTH_EVENT,
    keys::QUARANTINE_APPLIED_TAINTS,
    keys::QUARANTINE_IS_CORDONED,
    keys::QUARANTINE_CORDON_PRE_EXISTING,
    keys::SESSION,
];
/// Longest reason of a [`ReleaseRequest`], in bytes: it goes into the journal.
pub const REASON_BYTES: usize = 1024;
/// The form of a time in a label value, which takes no colons.
pub const CORDON_TIME: &str = "%Y-%m-%dT%H-%M-%SZ";

/// Said of a node whose session has found a cordon there.
pub const CORDONED_BEFORE: &str = "the node was cordoned before the session, and stays so";

/// The session on a node: ours, or another gpuwarden's, and what it has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ownership {
    /// Identity of the session.
    pub session_id: String,
    /// The time at which the session began, where that is known.
    pub since: Option<Timestamp>,
    /// The maker of the session, and its progress; empty of a session of NVSentinel.
    pub mark: SessionMark,
    /// The events for which the node is quarantined; their ids are filled in.
    pub events: Vec<HealthEvent>,
    /// True if the session asked for a cordon.
    pub cordoned: bool,
    /// True if the node was cordoned before, and then stays so.
    pub cordon_pre_existing: bool,
    /// Taints that the session asked for.
    pub taints: Vec<AppliedTaint>,
    /// Labels that the session wrote, with the value that each had before; `None` of a session of
    /// NVSentinel, of which they are not known.
    pub replaced_labels: Option<BTreeMap<String, Option<String>>>,
}

/// A kind of gpuwarden that makes sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Maker {
    /// A controller, which speaks for all nodes of its cluster.
    Controller,
    /// The node's own, which speaks for this node only.
    Node,
    /// A kind that is not known here.
    Other(String),
}

/// A taint that a session asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedTaint {
    /// The taint.
    #[serde(flatten)]
    pub taint: Taint,
    /// True if the node had the taint before; then the taint stays.
    #[serde(default)]
    pub pre_existing: bool,
}

/// A way in which a person ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByHand {
    /// `kubectl uncordon`.
    Uncordoned,
    /// A taint of ours is gone.
    Untainted,
    /// The person asked for it; see [`ReleaseRequest`].
    Released,
}

/// The word of a node's session to who carries out repairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// The key of the attempt ([`Attempt::key`](crate::attempt::Attempt::key)) that may be begun: the one that is
    /// under way, unless a person has ended the session. What was made for another repairs nothing any more.
    pub attempt: Option<String>,
    /// True while nothing may be begun: the node is not out of service as its session says. Whoever decides about
    /// the session says next whether a person has ended it, or puts the node back.
    pub waits: bool,
}

/// A request to give a quarantined node back, whatever its faults: the annotation
/// [`keys::RELEASE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRequest {
    /// The person who asks.
    #[serde(default)]
    pub by: String,
    /// The reason, for people.
    #[serde(default)]
    pub reason: String,
    /// The time at which the person asked, by their own clock.
    #[serde(default)]
    pub at: Option<Timestamp>,
}

/// The annotation `gpuwarden.dev/session`.
#[derive(Serialize, Deserialize)]
pub struct SessionAnnotation {
    /// Id of the session.
    pub id: String,
    /// Time at which the session began.
    pub since: Timestamp,
    /// Maker and progress of the session.
    #[serde(flatten)]
    pub mark: SessionMark,
    /// Labels that the session replaced, with their values before; `None`: the node had no such label.
    #[serde(default)]
    pub labels: BTreeMap<String, Option<String>>,
}

/// The part of a session's annotation that says who made the session, and how far it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionMark {
    /// The maker of the session, where the annotation names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Maker>,
    /// Id of the store of whoever keeps it, where a node's own gpuwarden made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The time at which that store took the session over from another, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<Timestamp>,
    /// Since when it is in its phase, where that is later than its begin.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub phase_since: Option<Timestamp>,
    /// The drain of the node, if it was begun.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub drain: Option<DrainMark>,
    /// The GPUs whose pods that drain has leave, by UUID; empty: all pods.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub drain_gpus: Vec<String>,
    /// The remediation of the node, if it was begun.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub remediation: Option<RemediationMark>,
    /// Until when the node waits to be given back, if it does.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Option::is_none"
    )]
    pub back_at: Option<Timestamp>,
    /// The times at which the node had come back to service, of late, before the session began.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Timestamp>,
    /// The times of machines on the node, as far as they were seen.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Machines::is_empty"
    )]
    pub machines: Machines,
    /// What machines have undone of the session.
    #[serde(
        deserialize_with = "or_nothing",
        skip_serializing_if = "Undone::is_empty"
    )]
    pub undone: Undone,
    /// What the session asked for and was never seen on the node: a change that has not arrived.
    #[serde(deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// The drain of a node, as its session says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainMark {
    /// The time at which it began.
    pub since: Timestamp,
    /// The time at which all pods that were to leave had left; `None` while some are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<Timestamp>,
}

/// Reads what can be done without: text that does not parse costs itself, and not the rest of the
/// annotation, without which the node would not be ours.
fn or_nothing<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    from: D,
) -> Result<T, D::Error> {
    let value = Value::deserialize(from)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

// === impl Ownership ===

impl Ownership {
    /// Returns the session on `node`; `None` where it is not quarantined.
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
        let cordoned = is_true(keys::QUARANTINE_IS_CORDONED);
        let cordon_pre_existing = is_true(keys::QUARANTINE_CORDON_PRE_EXISTING);
        let taints = annotation(keys::QUARANTINE_APPLIED_TAINTS)
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let (session_id, since, mark, replaced_labels) = if let Some(session) = session {
            let since = Some(session.since);
            (session.id, since, session.mark, Some(session.labels))
        } else {
            let first = events.first().map(|event| event.id.clone());
            let since = cordon_timestamp(node);
            let mark = SessionMark::default();
            (first.unwrap_or_default(), since, mark, None)
        };
        Some(Self {
            session_id,
            since,
            mark,
            events,
            cordoned,
            cordon_pre_existing,
            taints,
            replaced_labels,
        })
    }

    /// Returns whether the session is kept by another store than `store`, and is not to be
    /// taken over from it.
    ///
    /// Two gpuwardens may run for one node, and if each took over what the other has made, they
    /// would undo each other's work for ever. Whether the other one lives cannot be seen from
    /// here: it may be in another container. But a store that was there, since `begun`, when the
    /// other one signed the session does not stand in for it. One that was made later may: that
    /// is what a lost store leaves behind, and the one before, should it live, does not take
    /// back what was signed after it began. So a session changes hands at most once for each
    /// store that is made. `our_node`: nobody else speaks for the node. A signature of the future
    /// is of a clock that was wrong, and keeps nobody out.
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

    /// Returns since when the session is in its phase.
    pub fn in_phase_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.mark.phase_since.map(|at| at.min(now)).or(self.since)
    }

    /// Returns the session with the time since which it is in its phase, and with the time at which the node
    /// may come back.
    #[must_use]
    pub fn in_phase(mut self, since: Timestamp, back_at: Option<Timestamp>) -> Self {
        self.mark.phase_since = (self.since != Some(since)).then_some(since);
        self.mark.back_at = back_at;
        self
    }

    /// Returns whether the node as a whole is out of service, and not only devices of it.
    pub fn takes_node_out(&self) -> bool {
        self.cordoned || !self.taints.is_empty()
    }

    /// Returns whether `node` stays cordoned when it is given back.
    pub fn keeps_cordon(&self, node: &NodeView) -> bool {
        self.cordoned && self.cordon_pre_existing && node.unschedulable
    }

    /// Returns whether the node is out only because a sender asked for it (`force`).
    pub fn forced(&self) -> bool {
        let force = |event: &HealthEvent| event.quarantine_overrides.is_some_and(|o| o.force);
        !self.events.is_empty() && self.events.iter().all(force)
    }

    /// Returns what the session on `node` says to who carries out repairs.
    pub fn permit(node: &NodeView) -> Permit {
        let own = Self::read(node).filter(|_| !node.annotations.contains_key(keys::RELEASE));
        let mark = own.as_ref().and_then(|own| own.mark.remediation.as_ref());
        let open = mark.and_then(RemediationMark::under_way).map(Attempt::key);
        Permit {
            waits: own.as_ref().is_some_and(|own| own.lacks_a_deed(node)),
            attempt: open,
        }
    }

    /// Returns why the session ends, with the news that the node stays cordoned where it does.
    pub fn with_cordon_before(&self, node: &NodeView, why: &str) -> String {
        if self.keeps_cordon(node) {
            format!("{why}; {CORDONED_BEFORE}")
        } else {
            why.to_owned()
        }
    }

    /// Returns whether the session has put `taint` on the node.
    pub fn added(&self, taint: &Taint) -> bool {
        self.taints
            .iter()
            .any(|applied| applied.taint == *taint && !applied.pre_existing)
    }
}

// === impl SessionMark ===

impl SessionMark {
    /// Returns its drain, where that has the pods of all of `gpus` leave; none named: all pods.
    pub fn drain_of(&self, gpus: &[String]) -> Option<DrainMark> {
        let all = self.drain_gpus.is_empty();
        let these = !gpus.is_empty() && gpus.iter().all(|gpu| self.drain_gpus.contains(gpu));
        self.drain.filter(|_| all || these)
    }

    /// Returns since when its drain or remediation is as it is; `None` where none was begun.
    pub fn stands_since(&self) -> Option<Timestamp> {
        let remediation = self.remediation.as_ref();
        let drain = || self.drain.map(DrainMark::stands_since);
        remediation.and_then(RemediationMark::since).or_else(drain)
    }

    /// Returns the value of [`keys::STATE_LABEL`] of a node in quarantine that is so far.
    pub fn state(&self) -> &'static str {
        state_label(self.drain, self.remediation.as_ref())
    }
}

// === impl DrainMark ===

impl DrainMark {
    /// Returns since when it is as it is.
    fn stands_since(self) -> Timestamp {
        self.done.unwrap_or(self.since)
    }
}

/// Returns the value of [`keys::STATE_LABEL`] of a node in quarantine that is so far.
pub fn state_label(
    drain: Option<DrainMark>,
    remediation: Option<&RemediationMark>,
) -> &'static str {
    match (remediation.and_then(RemediationMark::state), drain) {
        (Some(state), _) => state,
        (None, None) => keys::STATE_QUARANTINED,
        (None, Some(DrainMark { done: None, .. })) => keys::STATE_DRAINING,
        (None, Some(DrainMark { done: Some(_), .. })) => keys::STATE_DRAINED,
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
    /// Returns up to when the reports of faults are dismissed: as far as the person can have seen
    /// them. Where their clock is ahead of ours, later ones count.
    pub fn dismisses_until(&self, newest_listed: Option<Timestamp>, now: Timestamp) -> Timestamp {
        let asked = self.at.map_or(now, |at| at.min(now));
        newest_listed.map_or(asked, |newest| newest.max(asked))
    }

    /// Returns the request that stands on `node`. Text that is no JSON is somebody's reason: they
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
}

/// Returns when a person last ended a session of this node, from its annotation.
pub fn released_at(node: &NodeView) -> Option<Timestamp> {
    node.annotations.get(keys::RELEASED_AT)?.trim().parse().ok()
}

/// Returns the time in NVSentinel's label of when it cordoned, which may have any prefix.
fn cordon_timestamp(node: &NodeView) -> Option<Timestamp> {
    let (_, text) = (node.labels.iter()).find(|(key, _)| key.ends_with(keys::CORDON_TIMESTAMP))?;
    let time = jiff::civil::DateTime::strptime(CORDON_TIME, text).ok()?;
    Some(time.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // Since 70 of the store a; from 90 on of the store b.
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
