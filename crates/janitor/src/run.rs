//! Main loop of the janitor: passes watch events and answers to the board, and carries out its
//! effects.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, Event, Reason, ServiceEvent, ServiceWatches};
use contract::keys;
use jiff::Timestamp;
use maintenance::ResourceKey;
use maintenance::handover::HandoverPhase;
use maintenance::janitor::{
    Board, Effect, Input, NodeObservation, NodeUpdate, ProviderAnswer, ProviderPlace, Question,
    ResourceEvent,
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

/// Inputs that wait for the loop. A slower loop slows the watches down.
const QUEUE: usize = 256;
/// Longest sleep of the loop, in case the clock is set forward.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Dependencies of a janitor.
pub struct JanitorParts {
    /// Cluster client of the leading replica.
    pub cluster: Arc<Cluster>,
    /// State machine that makes the decisions.
    pub board: Board,
    /// Providers of its configuration.
    pub providers: Providers,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// Controller of maintenance resources.
pub struct Janitor {
    parts: JanitorParts,
    metrics: JanitorMetrics,
    nodes: ServiceWatches,
    node_events: mpsc::Receiver<ServiceEvent>,
    running: JoinSet<Option<Input>>,
    cancel: CancellationToken,
}

// === impl Janitor ===

impl Janitor {
    /// Creates a janitor that has not started.
    pub fn new(parts: JanitorParts, metrics: &Metrics) -> Self {
        let (nodes, node_events) = ServiceWatches::new(&parts.cluster);
        Self {
            metrics: JanitorMetrics::registered(metrics),
            nodes,
            node_events,
            running: JoinSet::new(),
            cancel: CancellationToken::new(),
            parts,
        }
    }

    /// Runs until `cancel`, then waits for running requests. Needs the permissions `list`,
    /// `watch`, `patch` and `delete` on its resources, `patch` on their status, `list`,
    /// `watch`, `patch` and `delete` on nodes, `list` and `watch` on pods, and `list`, `watch`,
    /// `create` and `delete` on Jobs.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (sender, mut inputs) = mpsc::channel(QUEUE);
        self.begin(&sender);
        loop {
            let sleep = self.sleep();
            tokio::select! {
                () = cancel.cancelled() => break,
                Some(input) = inputs.recv() => self.handle(input),
                Some(event) = self.node_events.recv() => self.node_event(event),
                Some(done) = self.running.join_next() => self.done(done),
                () = tokio::time::sleep(sleep) => self.handle(Input::Time),
            }
        }
        self.cancel.cancel();
        // Only record results. Further signals are left to the next process, which looks up
        // what was sent.
        while let Some(done) = self.running.join_next().await {
            let Ok(Some(input)) = done else { continue };
            for effect in self.parts.board.handle(input, (self.parts.clock)()) {
                match effect {
                    Effect::Write { .. } | Effect::Notify(_) => self.carry_out(effect),
                    _ => {}
                }
            }
        }
    }

    fn begin(&self, sender: &mpsc::Sender<Input>) {
        let start = |watch: watches::JanitorWatch| {
            let (cluster, sender) = (Arc::clone(&self.parts.cluster), sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(async move {
                let watch = watch.run(&cluster, &sender, cancel.clone());
                cancel.run_until_cancelled(watch).await;
            });
        };
        for kind in self.parts.board.kinds() {
            start(watches::JanitorWatch::Resources(kind));
        }
        start(watches::JanitorWatch::Marks);
        for key in self.parts.board.config().label.keys() {
            start(watches::JanitorWatch::Labelled(key.to_owned()));
        }
        if let Some(resets) = &self.parts.board.config().resets {
            start(watches::JanitorWatch::Jobs(resets.namespace.clone()));
        }
    }

    fn sleep(&self) -> Duration {
        let wake = self.parts.board.wake_at();
        let wait = wake.map(|wake| wake.duration_since((self.parts.clock)()));
        // A time in the past is due now.
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        wait.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn node_event(&mut self, event: ServiceEvent) {
        let input = match event {
            ServiceEvent::Pods(node, pods) => Input::Pods(node, pods),
            ServiceEvent::Slices(..) => return, // Never followed by the janitor.
            ServiceEvent::Node(node, object) => {
                let config = self.parts.board.config();
                let observed = object.and_then(|object| {
                    let observation = NodeObservation::read(&object, config);
                    let view = NodeView::from_object(object)?;
                    Some(Box::new(NodeUpdate { observation, view }))
                });
                Input::Node(node, observed)
            }
        };
        self.handle(input);
    }

    fn done(&mut self, done: Result<Option<Input>, JoinError>) {
        match done {
            Ok(Some(input)) => self.handle(input),
            Ok(None) => {}
            // A bug. The resource is stuck until the next start, which queries the provider.
            Err(error) => {
                tracing::error!(err = %error, "a request of the janitor ended without an answer");
            }
        }
    }

    fn handle(&mut self, input: Input) {
        for effect in self.parts.board.handle(input, (self.parts.clock)()) {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let followed = match &effect {
            Effect::WatchNode(node) => self.nodes.follow(node, &self.cancel),
            Effect::WatchPods(node) => self.nodes.follow_pods(node, &self.cancel),
            _ => Ok(()),
        };
        if let Err(error) = followed {
            tracing::warn!(err = chain(&error), "a node cannot be watched");
        }
        match effect {
            Effect::WatchNode(_) | Effect::WatchPods(_) => {}
            Effect::StopWatching(node) => self.nodes.leave(&node),
            Effect::Notify(event) => self.record(&event),
            Effect::Ask {
                key,
                node,
                operation,
                gpus,
                provider,
                question,
            } => {
                let Some(action) = maintenance::janitor::Action::of(key.kind) else {
                    return; // Unreachable: other kinds have no provider.
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
                let why = acts::reason(&act);
                self.running.spawn(why.scope(async move {
                    acts::carry_out(&cluster, &namespace, &metrics, act).await
                }));
            }
        }
    }

    fn ask(&mut self, key: ResourceKey, signal: Signal, place: &ProviderPlace, question: Question) {
        let Some(provider) = self.parts.providers.of(place) else {
            return; // Unreachable: all configured providers are open.
        };
        // A provider may create a Job.
        let why = Reason::of_node(&signal.node, None, key.title());
        self.running.spawn(why.scope(async move {
            let title = key.title();
            let answer = match question {
                Question::Send => {
                    let provider_name = provider.name();
                    tracing::info!(
                        node = signal.node,
                        operation = signal.operation,
                        provider = provider_name,
                        "{title}: sending the signal"
                    );
                    ProviderAnswer::Sent(provider.send(&signal).await)
                }
                Question::Find => ProviderAnswer::Found(provider.find(&signal).await),
                Question::Ready(request) => {
                    ProviderAnswer::Ready(provider.is_ready(&signal, &request).await)
                }
            };
            let failure = match &answer {
                ProviderAnswer::Sent(Err(failure))
                | ProviderAnswer::Found(Err(failure))
                | ProviderAnswer::Ready(Err(failure)) => Some(failure),
                _ => None,
            };
            if let Some(failure) = failure {
                let (class, text) = (failure.class.name(), failure.text());
                tracing::warn!(node = signal.node, class, "{title}: {text}");
            }
            Some(Input::Answered(key, signal.operation, answer))
        }));
    }

    fn record(&mut self, event: &ResourceEvent) {
        self.metrics.happened(event);
        match event {
            ResourceEvent::Begun { key, node } => tracing::info!(node, "{} started", key.title()),
            ResourceEvent::Ended {
                key,
                node,
                outcome,
                message,
                ..
            } => tracing::info!(node, "{} has ended: {outcome}: {message}", key.title()),
            ResourceEvent::ResetBegun { node } => tracing::info!(node, "a reset of GPUs started"),
            ResourceEvent::ResetEnded { node, failure, .. } => match failure {
                None => tracing::info!(node, "a reset of GPUs succeeded"),
                Some(why) => tracing::warn!(node, "a reset of GPUs failed: {why}"),
            },
            ResourceEvent::HandOver {
                name,
                node,
                before,
                after,
                reason,
                ..
            } => {
                if let Some((reason, what)) = handover_event(*before, *after, reason) {
                    tracing::info!(node, "ExternalRemediationRequest {name}: {what}");
                    self.publish_event(name, node, reason, what);
                }
            }
        }
    }

    /// Creates a Kubernetes Event about a handover on its node.
    fn publish_event(&mut self, name: &str, node: &str, reason: &str, what: &str) {
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
        self.running.spawn(async move {
            // Best effort: a lost Event changes no decision.
            if let Err(error) = cluster.create_event(&event).await {
                tracing::debug!(err = chain(&error), "cannot create an Event");
            }
            None
        });
    }
}

/// Returns reason and message of the Event about a handover, if there is one.
fn handover_event(
    before: Option<HandoverPhase>,
    after: Option<HandoverPhase>,
    reason: &str,
) -> Option<(&'static str, &'static str)> {
    Some(match (before, after) {
        (_, Some(HandoverPhase::Closed)) if reason == "NodeNotFound" => {
            ("NodeNotFound", "the node does not exist")
        }
        (_, Some(HandoverPhase::Released)) if before != Some(HandoverPhase::Parked) => {
            ("ReleaseTaintApplied", "the node is handed over")
        }
        (_, Some(HandoverPhase::Closed)) => ("ReleaseTaintRemoved", "the node is taken back"),
        (Some(HandoverPhase::Released | HandoverPhase::Parked), None) => {
            ("OperatorDeleteRequested", "the request was deleted")
        }
        _ => return None,
    })
}
