//! Controller: acts on the events in the store and in the cluster.
//!
//! [`quarantine`] takes nodes with faults out of service and returns them. It makes no
//! decisions: it keeps the fault book and the sessions of `fleet` up to date with the store and
//! the cluster, and carries out their effects. [`policy`] loads the rules for the decisions.
//!
//! [`analysis`] concludes from many events, and reports each conclusion as an event.
//! [`objects`] reports Kubernetes objects that are faults of a node.
//! [`ledger`] keeps the history of each GPU, and reports those that a person has marked as bad.
//!
//! [`maintenance`] reads the notices of clouds on the nodes.
//!
//! [`conditions`] reports faults on the nodes, as conditions and Events.
//!
//! [`labeler`] labels nodes by the software and the devices that they have.
//!
//! [`ingest`] accepts reports of agents and central monitors over the network. [`agents`] serves
//! the other requests of agents, and [`pods`] writes their reports of GPUs on pods. [`certificate`]
//! describes the certificate of that port, if the controller issues it.

pub mod agents;
pub mod analysis;
pub mod api_requests;
pub mod certificate;
pub mod conditions;
pub mod ingest;
pub mod labeler;
pub mod leadership;
pub mod ledger;
pub mod maintenance;
pub mod objects;
pub mod pods;
pub mod policy;
pub mod quarantine;
pub mod retention;
pub mod text_place;

use runtime::metrics::Group;
use runtime::work_queue::WorkQueue;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    let cluster = [leadership::described()].into_iter();
    let mut all = vec![
        Group::new("store", retention::StoreMetrics::described()),
        Group::new("policy", policy::PolicyMetrics::described()),
        analysis::described_metrics(),
        objects::described_metrics(),
        Group::new("ledger", ledger::LedgerMetrics::described()),
        Group::new("conditions", conditions::described_metrics()),
        Group::new("labels of nodes", labeler::described_metrics()),
        Group::new("announced maintenance", maintenance::described_metrics()),
        Group::new("cluster", cluster.chain(api_requests::described())),
        Group::new(
            "queues",
            WorkQueue::described(conditions::QUEUE, conditions::QUEUED),
        ),
    ];
    all.extend(quarantine::described_metrics());
    all
}
