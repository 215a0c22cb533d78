//! The janitor's loop: watches and answers become inputs of the board, and its effects requests.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, Event, ServiceEvent, ServiceWatches};
use contract::keys;
use jiff::Timestamp;
use maintenance::Key;
use maintenance::handover::Phase;
use maintenance::janitor::{
    Answer, Board, Effect, Input, News, NodeSeen, NodeTold, ProviderPlace, Question,
};
use model::node::NodeView;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::metrics::JanitorMetrics;
use crate::provider::Signal;
use crate::providers::Providers;
use crate::{acts, watches};

/// News of resources that wait for the loop; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Longest sleep of the loop, so that a clock that is put forward is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// What a janitor is made of.
pub struct JanitorParts {
    /// The cluster, for who leads.
    pub cluster: Arc<Cluster>,
    /// What decides.
    pub board: Board,
    /// The providers of its configuration.
    pub providers: Providers,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Carries out what custom resources ask for.
pub struct Janitor {
    parts: JanitorParts,
    metrics: JanitorMetrics,
    nodes: ServiceWatches,
    news_of_nodes: mpsc::Receiver<ServiceEvent>,
    under_way: JoinSet<Option<Input>>,
    cancel: CancellationToken,
}

// === impl Janitor ===

impl Janitor {
    /// Returns a janitor that has not begun.
    pub fn new(parts: JanitorParts, metrics: &Metrics) -> Self {
        let (nodes, news_of_nodes) = ServiceWatches::new(&parts.cluster);
        Self {
            metrics: JanitorMetrics::registered(metrics),
            nodes,
            news_of_nodes,
            under_way: JoinSet::new(),
            cancel: CancellationToken::new(),
            parts,
        }
    }

    /// Runs until `cancel`; what is under way then is waited for. Takes the permissions `list`, `watch`,
    /// `patch` and `delete` on its resources, `patch` on their status, `list`, `watch`, `patch` and `delete` on
    /// nodes, `list` and `watch` on pods, and on Jobs `create` and `delete` as well.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (sender, mut inputs) = mpsc::channel(QUEUE);
        self.begin(&sender);
        loop {
            let sleep = self.sleep();
            tokio::select! {
                () = cancel.cancelled() => break,
                Some(input) = inputs.recv() => self.take(input),
                Some(event) = self.news_of_nodes.recv() => self.node_event(event),
                Some(done) = self.under_way.join_next() => self.done(done),
                () = tokio::time::sleep(sleep) => self.take(Input::Time),
            }
        }
        self.cancel.cancel();
        // Whoever ends in between leaves what was sent to be asked for.
        while let Some(done) = self.under_way.join_next().await {
            let Ok(Some(input)) = done else { continue };
            for effect in self.parts.board.take(input, (self.parts.clock)()) {
                match effect {
                    Effect::Write { .. } | Effect::Tell(_) => self.carry_out(effect),
                    _ => {}
                }
            }
        }
    }

    /// Begins to watch.
    fn begin(&self, sender: &mpsc::Sender<Input>) {
        let start = |watch: watches::Watch| {
            let (cluster, sender) = (Arc::clone(&self.parts.cluster), sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(async move {
                let watch = watch.run(&cluster, &sender, cancel.clone());
                cancel.run_until_cancelled(watch).await;
            });
        };
        for kind in self.parts.board.kinds() {
            start(watches::Watch::Resources(kind));
        }
        start(watches::Watch::Marks);
        if let Some(resets) = &self.parts.board.config().resets {
            start(watches::Watch::Jobs(resets.namespace.clone()));
        }
    }

    fn sleep(&self) -> Duration {
        let wake = self.parts.board.wake_at();
        let wait = wake.map(|wake| wake.duration_since((self.parts.clock)()));
        // A time that has passed already is no wait.
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        wait.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn node_event(&mut self, event: ServiceEvent) {
        let input = match event {
            ServiceEvent::Pods(node, pods) => Input::Pods(node, pods),
            ServiceEvent::Slices(..) => return, // Nobody has asked for them.
            ServiceEvent::Node(node, object) => {
                let config = self.parts.board.config();
                let told = object.and_then(|object| {
                    let seen = NodeSeen::read(&object, config);
                    let view = NodeView::from_object(object)?;
                    Some(Box::new(NodeTold { seen, view }))
                });
                Input::Node(node, told)
            }
        };
        self.take(input);
    }

    fn done(&mut self, done: Result<Option<Input>, JoinError>) {
        match done {
            Ok(Some(input)) => self.take(input),
            Ok(None) => {}
            // A bug. The resource is stuck until the next start, which asks the provider.
            Err(error) => {
                tracing::error!(err = %error, "a request of the janitor ended without an answer");
            }
        }
    }

    fn take(&mut self, input: Input) {
        for effect in self.parts.board.take(input, (self.parts.clock)()) {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let followed = match &effect {
            Effect::Follow(node) => self.nodes.follow(node, &self.cancel),
            Effect::FollowPods(node) => self.nodes.follow_pods(node, &self.cancel),
            _ => Ok(()),
        };
        if let Err(error) = followed {
            tracing::warn!(err = chain(&error), "a node cannot be watched");
        }
        match effect {
            Effect::Follow(_) | Effect::FollowPods(_) => {}
            Effect::Leave(node) => self.nodes.leave(&node),
            Effect::Tell(news) => self.tell(&news),
            Effect::Ask {
                key,
                node,
                operation,
                gpus,
                provider,
                question,
            } => {
                let Some(action) = maintenance::janitor::Action::of(key.kind) else {
                    return; // Not reached: nobody asks a provider about another.
                };
                let signal = Signal {
                    action,
                    node,
                    operation,
                    resource: key.name.clone(),
                    gpus,
                };
                self.ask(key, signal, &provider, question);
            }
            act => {
                let cluster = Arc::clone(&self.parts.cluster);
                let resets = self.parts.board.config().resets.as_ref();
                let namespace = resets.map(|resets| resets.namespace.clone());
                let (namespace, metrics) = (namespace.unwrap_or_default(), self.metrics.clone());
                self.under_way.spawn(async move {
                    acts::carry_out(&cluster, &namespace, &metrics, act).await
                });
            }
        }
    }

    fn ask(&mut self, key: Key, signal: Signal, place: &ProviderPlace, question: Question) {
        let Some(provider) = self.parts.providers.of(place) else {
            return; // Not reached: those of the configuration were opened.
        };
        self.under_way.spawn(async move {
            let title = key.title();
            let answer = match question {
                Question::Send => {
                    let provider_name = provider.name();
                    tracing::info!(
                        node = signal.node,
                        operation = signal.operation,
                        provider = provider_name,
                        "{title}: the signal is sent"
                    );
                    Answer::Sent(provider.send(&signal).await)
                }
                Question::Find => Answer::Found(provider.find(&signal).await),
                Question::Ready(request) => {
                    Answer::Ready(provider.is_ready(&signal, &request).await)
                }
            };
            let failure = match &answer {
                Answer::Sent(Err(failure))
                | Answer::Found(Err(failure))
                | Answer::Ready(Err(failure)) => Some(failure),
                _ => None,
            };
            if let Some(failure) = failure {
                let (class, text) = (failure.class.word(), failure.text());
                tracing::warn!(node = signal.node, class, "{title}: {text}");
            }
            Some(Input::Answered(key, signal.operation, answer))
        });
    }

    fn tell(&mut self, news: &News) {
        self.metrics.happened(news);
        match news {
            News::Begun { key, node } => tracing::info!(node, "{} is begun", key.title()),
            News::Ended {
                key,
                node,
                outcome,
                message,
                ..
            } => tracing::info!(node, "{} has ended: {outcome}: {message}", key.title()),
            News::ResetBegun { node } => tracing::info!(node, "a reset of GPUs is begun"),
            News::ResetEnded { node, failure, .. } => match failure {
                None => tracing::info!(node, "a reset of GPUs has succeeded"),
                Some(why) => tracing::warn!(node, "a reset of GPUs has failed: {why}"),
            },
            News::HandOver {
                name,
                node,
                before,
                after,
                reason,
                ..
            } => {
                if let Some((reason, what)) = said_of_hand_over(*before, *after, reason) {
                    tracing::info!(node, "ExternalRemediationRequest {name}: {what}");
                    self.make_event(name, node, reason, what);
                }
            }
        }
    }

    /// Tells of a hand-over as a Kubernetes Event of its node.
    fn make_event(&mut self, name: &str, node: &str, reason: &str, what: &str) {
        let now = (self.parts.clock)();
        let event = Event {
            name: format!("{name}.{}", reason.to_ascii_lowercase()),
            node: node.to_owned(),
            pod: None,
            kind: "Normal".to_owned(),
            reason: reason.to_owned(),
            message: format!("ExternalRemediationRequest {name}: {what}"),
            agent: keys::MANAGED_BY.to_owned(),
            count: 1,
            first_seen: now,
            last_seen: now,
        };
        let cluster = Arc::clone(&self.parts.cluster);
        self.under_way.spawn(async move {
            // It only tells of what has happened.
            if let Err(error) = cluster.create_event(&event).await {
                tracing::debug!(err = chain(&error), "an Event was not made");
            }
            None
        });
    }
}

/// Returns what is said of a hand-over, with its word; `None`: nothing.
fn said_of_hand_over(
    before: Option<Phase>,
    after: Option<Phase>,
    reason: &str,
) -> Option<(&'static str, &'static str)> {
    Some(match (before, after) {
        (_, Some(Phase::Closed)) if reason == "NodeNotFound" => {
            ("NodeNotFound", "the node is not there")
        }
        (_, Some(Phase::Released)) if before != Some(Phase::Parked) => {
            ("ReleaseTaintApplied", "the node is handed over")
        }
        (_, Some(Phase::Closed)) => ("ReleaseTaintRemoved", "the node is taken back"),
        (Some(Phase::Released | Phase::Parked), None) => {
            ("OperatorDeleteRequested", "the request was deleted")
        }
        _ => return None,
    })
}
