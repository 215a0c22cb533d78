//! Questions of the console why a node is quarantined or not, answered from the fleet.

use fleet::Fleet;
use jiff::Timestamp;
use runtime::sources::Sources;
use tokio::sync::{mpsc, oneshot};
use trial::why_not::{Connection, Source, WhyNot, why_not};

/// Most questions that wait for the task; further senders wait. Each comes from a person or a
/// script.
pub(super) const MAX_QUESTIONS: usize = 16;

/// Sender of questions to the task. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Questions(pub(super) mpsc::Sender<Question>);

/// A question about a node, and the channel for the answer.
#[derive(Debug)]
pub(super) struct Question {
    node: String,
    answer: oneshot::Sender<WhyNot>,
}

// === impl Questions ===

impl Questions {
    /// Returns why `node` is quarantined or not; `None` if the task has ended.
    pub async fn why_not(&self, node: String) -> Option<WhyNot> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Question { node, answer }).await.ok()?;
        answered.await.ok()
    }
}

// === impl Question ===

impl Question {
    /// Answers the question from the state of the fleet, the cluster and the sources of events.
    pub(super) fn answer(
        self,
        fleet: &Fleet,
        cluster: Option<Connection<'_>>,
        sources: &Sources,
        now: Timestamp,
    ) {
        let statuses = sources.statuses();
        let sources: Vec<Source<'_>> = statuses
            .iter()
            .map(|one| Source {
                name: &one.name,
                sees: one.state.sees(),
                state: one.state.name(),
                detail: &one.detail,
            })
            .collect();
        let answer = why_not(fleet, &self.node, cluster, &sources, now);
        // Sending fails only if the receiver was dropped.
        drop(self.answer.send(answer));
    }
}
