//! What is kept per node, and how it is shown.

use std::sync::Arc;

use contract::keys;
use domain::assess::{DismissedBy, Verdict, is_notice};
use domain::brake::{Hold, Out};
use domain::fault::Fault;
use domain::node::{NodeChange, NodeView};
use domain::session::another;
use domain::session::ownership::{Ownership, dismissal};
use domain::session::{Phase, Session};
use domain::view::{AnotherView, FaultView, NodeState, NodeStatus, SessionView};
use jiff::Timestamp;
use tokio::time::Instant;

use super::Mode;
use super::look::unknown_policy;
use super::publish::Counted;

/// What is kept per node.
pub(super) struct NodeEntry {
    /// The node as last seen; `None`: the cluster does not have it, or there is no cluster.
    pub(super) view: Option<Arc<NodeView>>,
    /// Its session.
    pub(super) session: Session,
    /// A patch is under way.
    pub(super) in_flight: bool,
    /// In a dry run: what would have been changed since the node was last as it was.
    pub(super) pretended: NodeChange,
    /// Why its faults count or do not, as last noted.
    pub(super) verdicts: Vec<Verdict>,
    /// A policy that it names and that does not exist.
    pub(super) unknown_policy: Option<String>,
    /// Since when the cluster does not have it, as far as we have seen.
    pub(super) absent_since: Option<Timestamp>,
    /// It was said that the cluster does not have it.
    pub(super) missing_said: bool,
    /// Events on the node that are known to be in the store.
    pub(super) known: Vec<String>,
    /// It carries this session of another gpuwarden; empty where its id cannot be read.
    pub(super) anothers: Option<String>,
    /// That one runs for the node that this process runs on.
    pub(super) on_our_node: bool,
    /// Events that nothing was decided about yet: since when the first, and how many.
    pub(super) undecided: Option<(Instant, u32)>,
    /// That it is out of service, as the node itself says (in a dry run: would say).
    own: Option<Out>,
    /// When a patch was last answered with the node as it is then.
    pub(super) patched_at: Option<Instant>,
    /// A patch is under way that takes it out of service.
    pub(super) taking_out: bool,
    /// Such a patch was sent, and nobody knows whether it was made: until when that counts.
    pub(super) in_doubt: Option<Timestamp>,
    /// Why it is held back.
    pub(super) hold: Option<Hold>,
    /// As what it is counted in what was last published.
    pub(super) shown: Counted,
}

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

// === impl NodeEntry ===

impl NodeEntry {
    pub(super) fn new(session: Session) -> Self {
        Self {
            view: None,
            session,
            in_flight: false,
            pretended: NodeChange::default(),
            verdicts: Vec::new(),
            unknown_policy: None,
            absent_since: None,
            missing_said: false,
            known: Vec::new(),
            anothers: None,
            on_our_node: false,
            undecided: None,
            own: None,
            patched_at: None,
            taking_out: false,
            in_doubt: None,
            hold: None,
            shown: Counted::default(),
        }
    }

    /// Takes a view in. Returns whether anything that decisions look at has changed: a
    /// heartbeat changes nothing.
    pub(super) fn see(&mut self, view: Arc<NodeView>) -> bool {
        let Some(known) = &self.view else {
            self.view = Some(view);
            self.missing_said = false;
            self.absent_since = None;
            self.read_own();
            return true;
        };
        let changed = !known.same_but_for_heartbeat(&view);
        self.view = Some(view);
        if changed {
            self.read_own();
        }
        changed
    }

    /// Whether `view` is older than what is known. Versions are comparable numbers in every
    /// Kubernetes we know; where they are not, no view is, and a patch that rests on an old
    /// one fails its tests.
    pub(super) fn knows_newer(&self, view: &NodeView) -> bool {
        let Some(known) = self.view.as_ref().filter(|known| known.uid == view.uid) else {
            return false;
        };
        match (
            known.resource_version.parse::<u64>(),
            view.resource_version.parse::<u64>(),
        ) {
            (Ok(known), Ok(version)) => version < known,
            _ => false,
        }
    }

    /// Takes in that the cluster does not have it any more.
    pub(super) fn gone(&mut self) {
        self.view = None;
        self.own = None;
        self.in_doubt = None;
        self.hold = None;
        // One that comes by this name later is another, and has never come back.
        self.session.returns.clear();
    }

    /// Reads from the node, as decisions see it, whether it is out of service.
    pub(super) fn read_own(&mut self) {
        let own = self
            .effective_view()
            .and_then(|view| Ownership::read(&view));
        let times = &self.session.times;
        self.own = own.map(|own| Out {
            since: times.counted(keys::SESSION, own.since),
            forced: own.forced(),
        });
        if self.own.is_some() {
            self.in_doubt = None;
        }
    }

    /// Whether nothing on the node says that it is out of service.
    pub(super) fn in_service(&self) -> bool {
        self.own.is_none()
    }

    /// Since when the node says that it is out of service, where that counts in the
    /// brake's window.
    pub(super) fn out_since(&self) -> Option<Timestamp> {
        self.own.filter(|out| !out.forced)?.since
    }

    /// Whether it counts as out of service: it is, or may be before we look again.
    pub(super) fn out(&self, now: Timestamp) -> Option<Out> {
        let on_the_way = Out {
            since: Some(now),
            forced: false,
        };
        let in_doubt = self.in_doubt.is_some_and(|until| now < until);
        (self.own).or((self.taking_out || in_doubt).then_some(on_the_way))
    }

    /// How the brake counts it: as out of service or not, and forced or not. A node on its
    /// way that then says itself that it is out counts as before.
    pub(super) fn counted(&self, now: Timestamp) -> Option<bool> {
        self.out(now).map(|out| out.forced)
    }

    /// The node as decisions see it: in a dry run with the changes that were not made.
    pub(super) fn effective_view(&self) -> Option<Arc<NodeView>> {
        let view = self.view.as_ref()?;
        if self.pretended.is_empty() {
            return Some(Arc::clone(view));
        }
        Some(Arc::new(view.after(&self.pretended)))
    }

    /// How the node is shown; `None`: there is nothing to tell.
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
        let observed = self
            .view
            .as_ref()
            .filter(|_| mode == Mode::Observe)
            .and_then(|view| {
                let own = Ownership::read(view)?;
                Some((Phase::Quarantined, own.session_id))
            });
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
            .partition(|fault| is_notice(fault, &self.verdicts));
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
            if self.on_our_node {
                notes.push(another::ON_OUR_NODE.to_owned());
            }
        }
        if let Some(hold) = &self.hold {
            notes.push(format!("held back: {hold}"));
        }
        let view = self.effective_view();
        let dismissal =
            (view.as_deref()).and_then(|view| dismissal(view, dropped_at, &self.session.times));
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
        notes.extend(self.unknown_policy.as_deref().map(unknown_policy));
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

    /// The session of another gpuwarden that it carries.
    fn anothers(&self) -> Option<(Ownership, AnotherView)> {
        self.anothers.as_ref()?;
        let view = self.effective_view()?;
        let own = Ownership::read(&view)?;
        let shown = AnotherView {
            who: another::who(&own, &view.name),
            end: another::end_by_hand(&own, &view),
        };
        Some((own, shown))
    }

    /// Whether the operator's label is what keeps the node in service.
    fn opted_out(&self) -> bool {
        (self.view.as_ref()).is_some_and(|view| {
            let mut verdicts = self.verdicts.iter();
            verdicts.any(|verdict| verdict.ruling.opted_out(view))
        })
    }
}

#[cfg(test)]
mod tests {
    use contract::HealthEvent;
    use domain::assess::assess;
    use domain::event::{Record, normalise};
    use domain::fault::FaultBook;
    use domain::policy::Policy;
    use domain::session::{Marks, step};
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;

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
        let view =
            metadata.and_then(|metadata| NodeView::from_object(json!({"metadata": metadata})));
        let node = view.clone().unwrap_or_else(|| NodeView::unknown("n1"));
        let desired = assess(
            &fault(),
            &Policy::builtin(),
            &node,
            dismissal(&node, None, &entry.session.times),
        );
        entry.session = step(
            &entry.session,
            &desired,
            view.as_ref(),
            &Marks::default(),
            None,
            at(101),
        )
        .session;
        entry.verdicts = desired.verdicts;
        entry.view = view.map(Arc::new);
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
                Mode::Act,
                "released by hand at 1970-01-01T00:01:40Z",
            ),
            (
                Some(opted_out),
                Mode::Act,
                "opted out by label k8saas.nvidia.com/ManagedByNVSentinel=false",
            ),
            (Some(newer), Mode::Act, ""),
            (Some(json!({"name": "n1"})), Mode::DryRun, "dry run"),
            (None, Mode::Act, "the cluster has no node of this name"),
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
                looked_at(metadata).status("n1", &fault(), Mode::Act, sight, None, at(102));
            let status = status.unwrap();
            let awaits = status.session.unwrap().awaits;
            (awaits, status.in_cluster, status.notes.concat())
        };
        let missing = looked_at(None).status("n1", &fault(), Mode::Act, Sight::Read, None, at(102));
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
        entry.view = view.map(Arc::new);
        entry.anothers = Some("s".to_owned());
        // It counts against the limits: without a fault that is known here as well.
        for faults in [Vec::new(), fault()] {
            let status = entry.status("n1", &faults, Mode::Act, Sight::Read, None, at(102));
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
        let status = entry.status("n1", &fault(), Mode::Act, Sight::Read, None, at(102));
        let notes = status.unwrap().notes;
        assert_eq!(notes, ["the cluster has no node of this name"]);
    }

    #[test]
    fn what_may_be_out_of_service_counts_until_it_is_known() {
        let mut entry = looked_at(Some(json!({"name": "n1"})));
        assert_eq!(entry.out(at(10)), None);
        entry.in_doubt = Some(at(100));
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
        entry.in_doubt = Some(at(100));
        entry.see(with("[{}]", 1));
        assert!(entry.out(at(10)).is_some() && !entry.in_service());
        entry.see(with("", 2));
        assert_eq!(entry.out(at(10)), None);
        entry.taking_out = true;
        assert!(entry.out(at(10)).is_some(), "a patch that is under way");
    }

    #[test]
    fn a_notice_is_shown_for_a_day_and_is_no_open_fault_unless_the_policy_wants_it() {
        let mut faults = fault();
        faults[0].event.is_fatal = false;
        let day = jiff::SignedDuration::from_hours(24);
        let mut entry = looked_at(Some(json!({"name": "n1"})));
        (entry.session, entry.verdicts) = (Session::idle(at(0)), Vec::new());
        let status =
            |entry: &NodeEntry, now| entry.status("n1", &faults, Mode::Act, Sight::Read, None, now);
        let shown = status(&entry, at(100) + day - jiff::SignedDuration::from_secs(1)).unwrap();
        assert_eq!(shown.state, NodeState::Healthy);
        assert_eq!((shown.faults.len(), shown.notices.len()), (0, 1));
        assert_eq!(status(&entry, at(100) + day), None);

        let policy = "[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
                      [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"true\"\n";
        let policy = Policy::parse(policy, "p").unwrap();
        entry.verdicts = assess(&faults, &policy, &NodeView::unknown("n1"), None).verdicts;
        let shown = status(&entry, at(100) + day + day).unwrap();
        assert_eq!((shown.faults.len(), shown.notices.len()), (1, 0));
        assert_eq!(shown.state, NodeState::Degraded);
    }
}
