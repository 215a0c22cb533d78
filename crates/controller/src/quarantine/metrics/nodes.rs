//! Metrics of the state of all nodes, for alerts and dashboards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use fleet::session::Phase;
use fleet::view::{FleetView, NodeState, NodeStatus};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::Labels;

use super::lock;

runtime::metrics! {
    #[derive(Clone)]
    pub(in crate::quarantine) struct NodeMetrics {
        /// Nodes by state: `healthy`, `degraded`, `unhealthy`, `partly-quarantined`, or the phase
        /// of the node's session.
        nodes: Family<Labels<1>, Gauge> = "gpuwarden_nodes" {state},
        /// Time when the node's session entered its phase; nodes without a session have no
        /// series.
        since: Family<Labels<2, String>, Gauge<f64, AtomicU64>> =
            "gpuwarden_node_phase_timestamp_seconds" {node, phase},
        shown: Arc<Mutex<BTreeSet<Labels<2, String>>>>,
        /// Time of the oldest proposal that waits for an approval; 0 without one.
        proposed: Gauge<f64, AtomicU64> = "gpuwarden_oldest_proposal_timestamp_seconds",
        /// 1 while new quarantines are paused.
        paused: Gauge = "gpuwarden_quarantine_paused",
    }
}

/// All states of nodes.
const STATES: [NodeState; 13] = [
    NodeState::Healthy,
    NodeState::Degraded,
    NodeState::Unhealthy,
    NodeState::PartlyQuarantined,
    NodeState::Session(Phase::Held),
    NodeState::Session(Phase::Quarantining),
    NodeState::Session(Phase::Quarantined),
    NodeState::Session(Phase::Draining),
    NodeState::Session(Phase::Drained),
    NodeState::Session(Phase::Remediating),
    NodeState::Session(Phase::Remediated),
    NodeState::Session(Phase::RemediationFailed),
    NodeState::Session(Phase::Returning),
];

// === impl NodeMetrics ===

impl NodeMetrics {
    /// Sets the gauges from the state of all nodes.
    pub(in crate::quarantine) fn show(&self, view: &FleetView) {
        let mut counts: BTreeMap<&str, i64> = STATES.map(|state| (state.name(), 0)).into();
        for node in &view.nodes {
            *counts.entry(node.state.name()).or_default() += 1;
        }
        // The view leaves out most healthy nodes.
        let all = view.cluster.as_ref().map_or(0, |cluster| cluster.nodes);
        let listed = (view.nodes.iter()).filter(|node| node.in_cluster == Some(true));
        let healthy = all.saturating_sub(listed.count());
        *counts.entry(NodeState::Healthy.name()).or_default() +=
            i64::try_from(healthy).unwrap_or(i64::MAX);
        for (state, count) in counts {
            self.nodes.get_or_create(&[("state", state)]).set(count);
        }
        let paused = view
            .brake
            .as_ref()
            .is_some_and(|brake| brake.paused.is_some());
        self.paused.set(i64::from(paused));
        self.show_sessions(&view.nodes);
    }

    fn show_sessions(&self, nodes: &[NodeStatus]) {
        let (mut now, mut proposed) = (BTreeSet::new(), None);
        for node in nodes {
            // Sessions of another gpuwarden are in its own metrics.
            let session = node.session.as_ref().filter(|one| one.another.is_none());
            let Some(session) = session.filter(|one| one.phase != Phase::Idle) else {
                continue;
            };
            let phase = session.phase.name().to_owned();
            let labels = [("node", node.name.clone()), ("phase", phase)];
            let since = session.since.as_duration().as_secs_f64();
            self.since.get_or_create(&labels).set(since);
            now.insert(labels);
            let since = session.proposal.as_ref().map(|proposal| proposal.since);
            proposed = proposed.into_iter().chain(since).min();
        }
        let mut shown = lock(&self.shown);
        for gone in shown.difference(&now) {
            self.since.remove(gone);
        }
        *shown = now;
        let proposed = proposed.map_or(0.0, |since| since.as_duration().as_secs_f64());
        self.proposed.set(proposed);
    }
}
