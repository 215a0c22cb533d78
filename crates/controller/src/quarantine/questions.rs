//! Questions of the console why a node is quarantined, or is not; the fleet answers them.

use tokio::sync::{mpsc, oneshot};
use trial::why_not::{Connection, Source, WhyNot, why_not};

use super::Quarantine;

/// Questions that wait for the task; who asks more waits. Each is a person, or a script.
pub(super) const MAX_QUESTIONS: usize = 16;

/// Asks the task. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Questions(pub(super) mpsc::Sender<Question>);

/// A node that somebody asks about, and where the answer goes.
#[derive(Debug)]
pub(super) struct Question {
    node: String,
    answer: oneshot::Sender<WhyNot>,
}

// === impl Questions ===

impl Questions {
    /// Returns why `node` is quarantined, or is not; `None` where the task has ended.
    pub async fn why_not(&self, node: String) -> Option<WhyNot> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Question { node, answer }).await.ok()?;
        answered.await.ok()
    }
}

// === impl Quarantine ===

impl Quarantine {
    pub(super) fn answer(&self, question: Question) {
        // It fails only where nobody waits for it any more.
        drop(question.answer.send(self.why_not(&question.node)));
    }

    fn why_not(&self, node: &str) -> WhyNot {
        let statuses = self.sources.statuses();
        let sources: Vec<Source<'_>> = statuses
            .iter()
            .map(|one| Source {
                name: &one.name,
                sees: one.state.sees(),
                state: one.state.name(),
                detail: &one.detail,
            })
            .collect();
        let cluster = self.cluster.as_ref().map(|cluster| Connection {
            server: cluster.server(),
            connected: self.fleet.is_listed() && self.cluster_error.is_none(),
            listed: self.fleet.is_listed(),
            error: self.cluster_error.as_deref(),
        });
        why_not(&self.fleet, node, cluster, &sources, (self.clock)())
    }
}
