//! What is kept per node, and how it is shown.

use std::sync::Arc;

use domain::fault::Fault;
use domain::node::{NodeChange, NodeView};
use domain::session::ownership::Ownership;
use domain::session::{Phase, Session};
use domain::view::{FaultView, NodeState, NodeStatus, SessionView};

use super::Mode;

/// What is kept per node.
pub(super) struct NodeEntry {
    /// The node as last seen; `None`: the cluster does not have it, or there is no cluster.
    pub(super) view: Option<Arc<NodeView>>,
    /// Its session.
    pub(super) session: Session,
    /// A patch is under way.
    pub(super) in_flight: bool,
    /// In a dry run: what would have been changed since the node was last as it was.
    pub(super) pretended: Vec<NodeChange>,
    /// Why its faults count or do not, as last noted.
    pub(super) reasons: Vec<String>,
    /// It was said that the cluster does not have it.
    pub(super) missing_said: bool,
    /// Events on the node that are known to be in the store.
    pub(super) known: Vec<String>,
    /// It carries this session of another gpuwarden; empty where its id cannot be read.
    pub(super) anothers: Option<String>,
}

// === impl NodeEntry ===

impl NodeEntry {
    pub(super) fn new(session: Session) -> Self {
        Self {
            view: None,
            session,
            in_flight: false,
            pretended: Vec::new(),
            reasons: Vec::new(),
            missing_said: false,
            known: Vec::new(),
            anothers: None,
        }
    }

    /// Takes a view in, unless it is older than what is known. Returns whether anything
    /// that decisions look at has changed.
    pub(super) fn see(&mut self, view: Arc<NodeView>) -> bool {
        let Some(known) = &self.view else {
            self.view = Some(view);
            self.missing_said = false;
            return true;
        };
        // The watch may still deliver states from before our own last patch. Versions are
        // comparable numbers in every Kubernetes we know; where they are not, the view is
        // taken, and a patch that rests on an old one fails its tests.
        let older = match (
            known.resource_version.parse::<u64>(),
            view.resource_version.parse::<u64>(),
        ) {
            (Ok(known_version), Ok(version)) => known.uid == view.uid && version < known_version,
            _ => false,
        };
        if older {
            return false;
        }
        let changed = known.uid != view.uid
            || known.unschedulable != view.unschedulable
            || known.taints != view.taints
            || known.labels != view.labels
            || known.annotations != view.annotations
            || known.object["status"]["conditions"] != view.object["status"]["conditions"];
        self.view = Some(view);
        changed
    }

    /// The node as decisions see it: in a dry run with the changes that were not made.
    pub(super) fn effective_view(&self) -> Option<Arc<NodeView>> {
        let view = self.view.as_ref()?;
        if self.pretended.is_empty() {
            return Some(Arc::clone(view));
        }
        let pretended = self
            .pretended
            .iter()
            .fold(NodeView::clone(view), |view, change| view.after(change));
        Some(Arc::new(pretended))
    }

    /// How the node is shown; `None`: there is nothing to tell.
    pub(super) fn status(
        &self,
        name: &str,
        faults: &[Fault],
        mode: Mode,
        has_cluster: bool,
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
        let (phase, id) = match (&self.session, observed) {
            (_, Some((phase, id))) => (Some(phase), Some(id)),
            (session, None) if session.phase != Phase::Idle => {
                (Some(session.phase), session.id.clone())
            }
            _ => (None, None),
        };
        if faults.is_empty() && phase.is_none() {
            return None;
        }
        let mut sorted: Vec<&Fault> = faults.iter().collect();
        sorted.sort_by(|a, b| Fault::by_gravity(a, b));
        let mut notes = Vec::new();
        if has_cluster && self.view.is_none() {
            notes.push("the cluster has no node of this name".to_owned());
        }
        if self.anothers.is_some() {
            notes.push("quarantined by another gpuwarden: it is left alone".to_owned());
        }
        let fatal = faults.iter().any(|fault| fault.event.is_fatal);
        if mode == Mode::Observe && fatal {
            notes.push("observing only: nothing is done about it; --quarantine acts".to_owned());
        }
        if mode == Mode::DryRun && phase.is_some() {
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
            state: NodeState::of(faults, phase),
            session: phase.map(|phase| SessionView {
                id: id.unwrap_or_default(),
                phase,
                since: self.session.since,
                failures: self.session.failures,
                awaits: self.session.awaits().to_owned(),
            }),
            in_cluster: has_cluster.then_some(self.view.is_some()),
            unschedulable: self.view.as_ref().map(|view| view.unschedulable),
            faults: sorted.into_iter().map(FaultView::of).collect(),
            notes,
        })
    }
}
