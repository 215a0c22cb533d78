//! Answering why a node is quarantined, or is not: asked by the console, worked out from
//! what the task knows at that moment.

use domain::nearest::nearest;
use domain::session::Session;
use domain::why_not::{Acting, Connection, Situation, Source, WhyNot, why_not};
use tokio::sync::{mpsc, oneshot};

use super::{Mode, Owns, Quarantine};

/// Questions that wait for the task; who asks more waits. Each is a person, or a script.
pub(super) const MAX_QUESTIONS: usize = 16;
/// Names offered where nothing is known of the one that was asked about.
const NAMES_OFFERED: usize = 3;

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
    /// Why `node` is quarantined, or is not; `None` where the task has ended.
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
        let entry = self.nodes.get(node);
        let idle = Session::idle((self.clock)());
        let view = entry.and_then(super::NodeEntry::effective_view);
        let own = match &self.owns {
            Owns::Node(own) => Some(own),
            Owns::All => None,
        };
        // Those of another machine are not known here.
        let statuses = match own {
            Some(own) if own == node => self.sources.statuses(),
            _ => Vec::new(),
        };
        let sources: Vec<Source<'_>> = statuses
            .iter()
            .map(|one| Source {
                name: &one.name,
                sees: one.state.sees(),
                state: one.state.name(),
                detail: &one.detail,
            })
            .collect();
        let mut why = why_not(&Situation {
            node,
            sources: &sources,
            acting: match self.mode {
                Mode::Observe => Acting::Observe,
                Mode::DryRun => Acting::DryRun,
                Mode::Act => Acting::Act,
            },
            cluster: self.cluster.as_ref().map(|cluster| Connection {
                server: cluster.server(),
                connected: self.listed && self.cluster_error.is_none(),
                listed: self.listed,
                error: self.cluster_error.as_deref(),
            }),
            view: view.as_deref(),
            faults: self.book.faults(node),
            missed: self.book.missed(node),
            policy: self.policy.as_deref(),
            session: entry.map_or(&idle, |entry| &entry.session),
            anothers: entry.is_some_and(|entry| entry.anothers.is_some()),
            on_our_node: entry.is_some_and(|entry| entry.on_our_node),
            hold: entry.and_then(|entry| entry.hold.as_ref()),
            dropped_at: self.dropped_at(),
        });
        why.known |= own.is_some_and(|own| own == node);
        if !why.known {
            let names = self.nodes.keys().chain(own);
            why.nearest = nearest(node, names.map(String::as_str), NAMES_OFFERED)
                .into_iter()
                .map(str::to_owned)
                .collect();
        }
        why
    }
}
