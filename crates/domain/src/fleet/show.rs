//! How the nodes and the brake are shown.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::Timestamp;

use super::entry::{Counted, NodeEntry};
use super::{Fleet, Mode};
use crate::assess::{DismissedBy, is_notice};
use crate::brake::{Hold, Use};
use crate::fault::{Fault, not_fully_seen};
use crate::ownership::Ownership;
use crate::session::{Phase, another, dismissal};
use crate::view::{
    AnotherView, BrakeView, FaultView, LimitView, NodeState, NodeStatus, SessionView,
};

/// Most limits that are shown; those that count apart may be many.
const LIMITS_SHOWN: usize = 50;

/// What can be told of whether the cluster has a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// There is no cluster.
    NoCluster,
    /// Its nodes could not be read yet.
    NotRead,
    /// They were: what was not among them is not there.
    Read,
}

/// What is to be shown anew.
#[derive(Debug, Default)]
pub(super) struct Showing {
    /// Nodes that may not be any more as they were last shown: whatever changes one marks it,
    /// or has it looked at, which does.
    pub(super) unshown: BTreeSet<String>,
    counts: Counts,
    /// What is shown may have changed.
    pub(super) news: bool,
}

/// How many nodes were last counted as what.
#[derive(Debug, Default)]
struct Counts {
    in_cluster: usize,
    held: usize,
}

// === impl Counts ===

impl Counts {
    /// Counts a node as something else than before.
    fn replace(&mut self, before: Counted, now: Counted) {
        let one = |count: &mut usize, before: bool, now: bool| {
            *count = (*count + usize::from(now)).saturating_sub(usize::from(before));
        };
        one(&mut self.in_cluster, before.in_cluster, now.in_cluster);
        one(&mut self.held, before.held, now.held);
    }
}

// === impl Fleet ===

impl Fleet {
    /// Returns all nodes as they are shown: as they were `before`, but for those that something
    /// has happened to. A large cluster has thousands, and something happens to a few of them.
    pub fn show(&mut self, before: &[NodeStatus], now: Timestamp) -> Vec<NodeStatus> {
        self.set_time(now);
        let before = before.iter().cloned();
        let mut shown: BTreeMap<String, NodeStatus> =
            before.map(|status| (status.name.clone(), status)).collect();
        for name in std::mem::take(&mut self.showing.unshown) {
            match self.status(&name) {
                Some(status) => drop(shown.insert(name, status)),
                None => drop(shown.remove(&name)),
            }
        }
        shown.into_values().collect()
    }

    /// Returns how many nodes the cluster has, as last shown.
    pub fn nodes_in_cluster(&self) -> usize {
        self.showing.counts.in_cluster
    }

    /// Returns how a node is shown; `None` where there is nothing to tell.
    pub(super) fn status(&mut self, name: &str) -> Option<NodeStatus> {
        let (mode, sight) = (self.settings.mode, self.sight());
        let dropped_at = self.brake.switched.dropped_at;
        let entry = self.nodes.get_mut(name)?; // Or forgotten before.
        let faults = self.book.faults(name);
        let counts = Counted {
            in_cluster: entry.view.is_some(),
            held: entry.hold.is_some(),
        };
        self.showing.counts.replace(entry.shown, counts);
        entry.shown = counts;
        let missed = self.book.missed(name);
        let mut status = entry.status(name, faults, mode, sight, dropped_at, self.now)?;
        if missed > 0 {
            status.notes.push(not_fully_seen(missed));
        }
        Some(status)
    }

    /// Forgets a node that is neither in the cluster nor faulty, and of which nothing is awaited.
    pub(super) fn forget_if_gone(&mut self, name: &str) {
        let is_over = |entry: &&NodeEntry| {
            let awaited = entry.patch.in_flight || entry.claim.awaits.is_some();
            entry.view.is_none() && !awaited && entry.session.phase == Phase::Idle
        };
        let Some(entry) = self.nodes.get(name).filter(is_over) else {
            return;
        };
        if self.book.faults(name).is_empty() {
            self.showing.counts.replace(entry.shown, Counted::default());
            self.nodes.remove(name);
        }
    }

    /// Returns what can be told of whether the cluster has a node.
    fn sight(&self) -> Sight {
        match (self.settings.cluster, self.listed) {
            (false, _) => Sight::NoCluster,
            (true, false) => Sight::NotRead,
            (true, true) => Sight::Read,
        }
    }

    /// Returns the brake as it is shown; `None` where there is nothing to hold back. The state's
    /// word is whoever's to add who reads it.
    pub fn show_brake(&mut self, now: Timestamp) -> Option<BrakeView> {
        if !self.settings.cluster {
            return None;
        }
        self.set_time(now);
        if self.brake.stale && !self.brake.is_waited_for() {
            let plan = self.ask_the_brake();
            self.brake.keep_plan(plan);
        }
        let plan = self.brake.plan();
        let mut notes = Vec::new();
        if plan.unlabelled && self.settings.brake && self.listed {
            notes.push(format!(
                "no node carries the label {}: all nodes are counted",
                self.settings.gpu_label
            ));
        }
        let paused = match self.brake.switched.stop(false, now) {
            Some(Hold::Paused(pause)) => Some(pause.to_string()),
            _ => None,
        };
        let unknown = if !self.listed {
            Some("the cluster's nodes could not be read yet".to_owned())
        } else if self.policy.is_none() {
            Some("no policy was read yet".to_owned())
        } else {
            None
        };
        let shown = plan.limits.iter().take(LIMITS_SHOWN);
        Some(BrakeView {
            enabled: self.settings.brake,
            state: String::new(),
            limits: shown
                .map(|limit| LimitView {
                    limit: limit.limit.clone(),
                    of_which: self.of_which(limit),
                    used: limit.used,
                    allowed: limit.allowed,
                    of: limit.of,
                    by: limit.by.clone(),
                })
                .collect(),
            unknown,
            held: self.showing.counts.held,
            paused,
            notes,
        })
    }

    /// Returns how far the fullest limit is used up.
    pub fn brake_utilization(&self) -> f64 {
        self.brake
            .plan()
            .limits
            .first()
            .map_or(0.0, Use::utilization)
    }

    /// Returns which nodes a limit counts, for people.
    fn of_which(&self, limit: &Use) -> String {
        let nodes = match (self.brake.plan().unlabelled, limit.gpu) {
            (true, _) => "nodes",
            (false, true) => "GPU nodes",
            (false, false) => "other nodes",
        };
        match limit.domain.as_deref() {
            None => nodes.to_owned(),
            Some("") => format!("{nodes} without the label"),
            Some(value) => format!("{nodes} in {value}"),
        }
    }
}

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns how the node is shown; `None`: there is nothing to tell.
    pub(super) fn status(
        &self,
        name: &str,
        faults: &[Fault],
        mode: Mode,
        sight: Sight,
        dropped_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<NodeStatus> {
        // Who only observes still sees what an earlier run has left on the node.
        let observed = (self.ownership())
            .filter(|_| !mode.decides())
            .map(|own| (Phase::Quarantined, own.session_id.clone()));
        let anothers = self.anothers();
        let theirs =
            (anothers.as_ref()).map(|(own, _)| (Phase::Quarantined, own.session_id.clone()));
        let (phase, id) = match (&self.session, observed.or(theirs)) {
            (_, Some((phase, id))) => (Some(phase), Some(id)),
            (session, None) if session.phase != Phase::Idle => {
                (Some(session.phase), session.id.clone())
            }
            _ => (None, None),
        };
        let (mut notices, mut open): (Vec<&Fault>, Vec<&Fault>) = faults
            .iter()
            .partition(|fault| is_notice(fault, &self.noted.verdicts));
        notices.retain(|fault| fault.notice_until().is_some_and(|until| until > now));
        if open.is_empty() && notices.is_empty() && phase.is_none() {
            return None;
        }
        notices.sort_by_key(|fault| std::cmp::Reverse(fault.accepted_at));
        open.sort_by(|a, b| Fault::by_gravity(a, b));
        let mut notes = Vec::new();
        let in_cluster = match sight {
            Sight::NoCluster => None,
            Sight::NotRead => self.view.as_ref().map(|_| true),
            Sight::Read => Some(self.view.is_some()),
        };
        match (sight, in_cluster) {
            (Sight::NotRead, None) => notes.push(
                "the cluster's nodes could not be read yet: what it has of this node is not known"
                    .to_owned(),
            ),
            (_, Some(false)) => notes.push("the cluster has no node of this name".to_owned()),
            _ => {}
        }
        if let Some((own, another)) = &anothers {
            notes.push(format!(
                "quarantined by another gpuwarden{}: {}; it is left alone, and counts as out of \
                 service",
                another::since(own),
                another.who
            ));
            if self.claim.on_our_node {
                notes.push(another::ON_OUR_NODE.to_owned());
            }
        }
        if let Some(hold) = &self.hold {
            notes.push(format!("held back: {hold}"));
        }
        let dismissal = (self.observed.as_ref())
            .and_then(|observed| dismissal(observed, dropped_at, &self.session.times));
        let dismissed = |fault: &Fault| dismissal.is_some_and(|one| fault.dismissed(one.up_to));
        if let Some(one) = dismissal.filter(|_| faults.iter().any(dismissed)) {
            let how = match one.by {
                DismissedBy::Released => "when the node was released by hand",
                DismissedBy::Dropped => "when what the circuit breaker held back was dropped,",
            };
            notes.push(format!(
                "dismissed {how} at {:.0}: a newer report counts again",
                one.up_to
            ));
        }
        notes.extend(self.session.times.notes());
        if self.opted_out() {
            notes.push(format!(
                "opted out by label {}=false: nothing is done about it",
                keys::MANAGED_LABEL
            ));
        }
        notes.extend(self.noted.unknown_policy.as_deref().map(unknown_policy));
        let fatal = faults.iter().any(|fault| fault.event.is_fatal);
        if mode == Mode::Observe && fatal {
            notes.push("observing only: nothing is done about it; --quarantine acts".to_owned());
        }
        if mode == Mode::DryRun && phase.is_some() && anothers.is_none() {
            notes.push("dry run: nothing is written in the cluster".to_owned());
        }
        if self.session.failures > 0 {
            notes.push(format!(
                "{} attempts in a row have failed",
                self.session.failures
            ));
        }
        Some(NodeStatus {
            name: name.to_owned(),
            // What the cluster does not have cannot be on its way out of service.
            state: NodeState::of(&open, phase.filter(|_| in_cluster != Some(false))),
            session: phase.map(|phase| SessionView {
                id: id.unwrap_or_default(),
                phase,
                since: (anothers.as_ref())
                    .and_then(|(own, _)| own.since)
                    .unwrap_or(self.session.since),
                failures: self.session.failures,
                awaits: match (mode, &anothers, &self.hold) {
                    (Mode::Observe, _, _) => {
                        "a gpuwarden that acts: this one only observes".to_owned()
                    }
                    (_, Some((_, another)), _) => format!("{}, to give it back", another.who),
                    (_, _, Some(hold)) => hold.awaits(),
                    _ if sight == Sight::NotRead && in_cluster.is_none() => {
                        "the cluster's nodes to be read".to_owned()
                    }
                    _ => self.session.awaits(self.view.is_some()),
                },
                another: anothers.as_ref().map(|(_, another)| another.clone()),
            }),
            in_cluster,
            unschedulable: self.view.as_ref().map(|view| view.unschedulable),
            faults: open
                .into_iter()
                .map(|fault| FaultView {
                    dismissed: dismissed(fault),
                    ..FaultView::of(fault)
                })
                .collect(),
            notices: notices.into_iter().map(FaultView::of).collect(),
            notes,
        })
    }

    /// Returns the session of another gpuwarden that it carries.
    fn anothers(&self) -> Option<(&Ownership, AnotherView)> {
        self.claim.anothers.as_ref()?;
        let (observed, own) = (self.observed.as_ref()?, self.ownership()?);
        let shown = AnotherView {
            who: another::who(own, &observed.view.name),
            end: another::end_by_hand(own, &observed.view),
        };
        Some((own, shown))
    }

    /// Returns whether the operator's label is what keeps the node in service.
    fn opted_out(&self) -> bool {
        (self.view.as_ref()).is_some_and(|view| {
            let mut verdicts = self.noted.verdicts.iter();
            verdicts.any(|verdict| verdict.ruling.opted_out(view))
        })
    }
}

/// What is said of a node that names a policy which does not exist.
pub(super) fn unknown_policy(name: &str) -> String {
    format!(
        "the annotation {} names the policy {name:?}, which the cluster's policy does not have: \
         the cluster's holds",
        keys::POLICY
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use contract::HealthEvent;
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::assess::assess;
    use crate::event::{Record, normalise};
    use crate::fault::FaultBook;
    use crate::node::NodeView;
    use crate::policy::Policy;
    use crate::session::{Marks, Session, step};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn fault() -> Vec<Fault> {
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: "n1".into(),
            is_fatal: true,
            ..HealthEvent::default()
        };
        normalise(&mut event, at(100));
        let mut book = FaultBook::default();
        book.record(&Record {
            seq: 1.into(),
            id: event.id.clone(),
            created_at: at(100),
            event,
        });
        book.faults("n1").to_vec()
    }

    /// The entry of a node after one look at it; `None`: the cluster does not have it.
    fn looked_at(metadata: Option<serde_json::Value>) -> NodeEntry {
        let mut entry = NodeEntry::new(Session::idle(at(0)));
        if let Some(metadata) = metadata {
            let view = NodeView::from_object(json!({"metadata": metadata}));
            entry.take_view(Arc::new(view.unwrap()));
        }
        let observed = entry.observed.clone();
        let dismissed =
            (observed.as_ref()).and_then(|node| dismissal(node, None, &entry.session.times));
        let unknown = NodeView::unknown("n1");
        let node = observed.as_ref().map_or(&unknown, |node| &node.view);
        let desired = assess(&fault(), &Policy::builtin(), node, dismissed);
        let marks = Marks::default();
        let step = step(
            &entry.session,
            &desired,
            observed.as_ref(),
            &marks,
            None,
            at(101),
        );
        entry.session = step.session;
        entry.noted.verdicts = desired.verdicts;
        entry
    }

    #[test]
    fn why_a_faulty_node_is_in_service_is_noted() {
        let released =
            json!({"name": "n1", "annotations": {keys::RELEASED_AT: at(100).to_string()}});
        let opted_out = json!({"name": "n1", "labels": {keys::MANAGED_LABEL: "false"}});
        let newer = json!({"name": "n1", "annotations": {keys::RELEASED_AT: at(99).to_string()}});
        let table = [
            (
                Some(released),
                Mode::Quarantine,
                "released by hand at 1970-01-01T00:01:40Z",
            ),
            (
                Some(opted_out),
                Mode::Quarantine,
                "opted out by label k8saas.nvidia.com/ManagedByNVSentinel=false",
            ),
            (Some(newer), Mode::Quarantine, ""),
            (Some(json!({"name": "n1"})), Mode::DryRun, "dry run"),
            (
                None,
                Mode::Quarantine,
                "the cluster has no node of this name",
            ),
        ];
        for (metadata, mode, note) in table {
            let status = looked_at(metadata)
                .status("n1", &fault(), mode, Sight::Read, None, at(102))
                .unwrap();
            let notes = status.notes.join("\n");
            assert!(
                notes.contains(note) && notes.is_empty() == note.is_empty(),
                "{note}: {notes}"
            );
            assert_eq!(status.faults[0].dismissed, note.starts_with("released"));
        }
    }

    #[test]
    fn a_node_that_the_cluster_lacks_waits_for_it_to_appear() {
        let shown = |metadata, sight| {
            let status =
                looked_at(metadata).status("n1", &fault(), Mode::Quarantine, sight, None, at(102));
            let status = status.unwrap();
            let awaits = status.session.unwrap().awaits;
            (awaits, status.in_cluster, status.notes.concat())
        };
        let missing =
            looked_at(None).status("n1", &fault(), Mode::Quarantine, Sight::Read, None, at(102));
        assert_eq!(missing.unwrap().state, NodeState::Unhealthy);
        let (awaits, in_cluster, _) = shown(None, Sight::Read);
        assert_eq!(awaits, "the node to appear in the cluster");
        assert_eq!(in_cluster, Some(false));
        let (awaits, in_cluster, _) = shown(Some(json!({"name": "n1"})), Sight::Read);
        assert_eq!(awaits, "the API server's answer to the quarantine");
        assert_eq!(in_cluster, Some(true));
        // What was never read is not told as a fact.
        let (awaits, in_cluster, notes) = shown(None, Sight::NotRead);
        assert_eq!(awaits, "the cluster's nodes to be read");
        assert_eq!(in_cluster, None);
        assert!(
            notes.contains("is not known") && !notes.contains("no node"),
            "{notes}"
        );
    }

    #[test]
    fn a_node_that_another_gpuwarden_has_taken_out_is_shown_with_what_ends_that() {
        let session = json!({"id": "s", "since": "2027-01-15T08:00:00Z", "by": "node"});
        let annotations = json!({keys::SESSION: session.to_string()});
        let metadata = json!({"name": "n1", "annotations": annotations});
        let view = NodeView::from_object(json!({ "metadata": metadata }));
        let mut entry = NodeEntry::new(Session::idle(at(0)));
        entry.take_view(Arc::new(view.unwrap()));
        entry.claim.anothers = Some("s".to_owned());
        // It counts against the limits: without a fault that is known here as well.
        for faults in [Vec::new(), fault()] {
            let status = entry.status("n1", &faults, Mode::Quarantine, Sight::Read, None, at(102));
            let status = status.unwrap();
            assert_eq!(status.state, NodeState::Quarantined);
            let session = status.session.unwrap();
            assert_eq!(session.since.to_string(), "2027-01-15T08:00:00Z");
            assert_eq!(
                session.awaits,
                "the gpuwarden on n1 itself, to give it back"
            );
            let end = session.another.unwrap().end;
            assert!(end.starts_with("kubectl annotate node n1 "), "{end}");
            assert!(status.notes[0].contains("counts as out of service"));
        }
    }

    #[test]
    fn a_node_that_is_gone_is_held_back_by_nothing() {
        let mut entry = looked_at(Some(json!({"name": "n1"})));
        entry.hold = Some(Hold::Tripped);
        entry.session.returns.push(at(100));
        entry.gone();
        assert_eq!(entry.session.returns, []);
        let status = entry.status("n1", &fault(), Mode::Quarantine, Sight::Read, None, at(102));
        let notes = status.unwrap().notes;
        assert_eq!(notes, ["the cluster has no node of this name"]);
    }

    #[test]
    fn what_may_be_out_of_service_counts_until_it_is_known() {
        let mut entry = looked_at(Some(json!({"name": "n1"})));
        assert_eq!(entry.out(at(10)), None);
        entry.patch.in_doubt = Some(at(100));
        let on_the_way = entry.out(at(10)).unwrap();
        assert_eq!((on_the_way.since, on_the_way.forced), (Some(at(10)), false));
        assert_eq!(entry.out(at(100)), None, "it was not made");
        // Seen there: from now on the node says it, and when it is back it is back.
        let with = |text: &str, version: u32| {
            let metadata = json!({
                "name": "n1", "resourceVersion": version.to_string(),
                "annotations": {keys::QUARANTINE_HEALTH_EVENT: text},
            });
            Arc::new(NodeView::from_object(json!({ "metadata": metadata })).unwrap())
        };
        entry.patch.in_doubt = Some(at(100));
        entry.take_view(with("[{}]", 1));
        assert!(entry.out(at(10)).is_some() && !entry.in_service());
        entry.take_view(with("", 2));
        assert_eq!(entry.out(at(10)), None);
        entry.patch.taking_out = true;
        assert!(entry.out(at(10)).is_some(), "a patch that is under way");
    }

    #[test]
    fn a_notice_is_shown_for_a_day_and_is_no_open_fault_unless_the_policy_wants_it() {
        let mut faults = fault();
        faults[0].event.is_fatal = false;
        let day = jiff::SignedDuration::from_hours(24);
        let mut entry = looked_at(Some(json!({"name": "n1"})));
        (entry.session, entry.noted.verdicts) = (Session::idle(at(0)), Vec::new());
        let status = |entry: &NodeEntry, now| {
            entry.status("n1", &faults, Mode::Quarantine, Sight::Read, None, now)
        };
        let shown = status(&entry, at(100) + day - jiff::SignedDuration::from_secs(1)).unwrap();
        assert_eq!(shown.state, NodeState::Healthy);
        assert_eq!((shown.faults.len(), shown.notices.len()), (0, 1));
        assert_eq!(status(&entry, at(100) + day), None);

        let policy = "[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
                      [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"true\"\n";
        let policy = Policy::parse(policy, "p").unwrap();
        entry.noted.verdicts = assess(&faults, &policy, &NodeView::unknown("n1"), None).verdicts;
        let shown = status(&entry, at(100) + day + day).unwrap();
        assert_eq!((shown.faults.len(), shown.notices.len()), (1, 0));
        assert_eq!(shown.state, NodeState::Degraded);
    }
}
