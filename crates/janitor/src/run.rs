//! The janitor's loop: watches and answers become inputs of the board, and its effects requests.

use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, OneNodeEvent, OneNodeWatches, Signal as Watched};
use domain::janitor::{
    Action, Answer, Board, Effect, GROUP, Input, Key, News, NodeSeen, ProviderPlace, Question,
    Resource, VERSION, Written,
};
use domain::requests::RequestBoard;
use jiff::Timestamp;
use runtime::logging::{Seldom, chain};
use runtime::metrics::Metrics;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::metrics::JanitorMetrics;
use crate::provider::Signal;
use crate::providers::Providers;
use crate::requests::Requests;

/// News of resources that wait for the loop; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before it is asked again where a CRD is installed.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Longest sleep of the loop, so that a clock that is put forward is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// What a janitor is made of.
pub struct JanitorParts {
    /// The cluster, for who leads.
    pub cluster: Arc<Cluster>,
    /// What decides about reboots and terminations.
    pub board: Board,
    /// What decides about resets of GPUs and hand-overs.
    pub requests: RequestBoard,
    /// The providers of its configuration.
    pub providers: Providers,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Carries out what custom resources ask for.
pub struct Janitor {
    parts: JanitorParts,
    requests: Requests,
    metrics: JanitorMetrics,
    nodes: OneNodeWatches,
    news_of_nodes: mpsc::Receiver<OneNodeEvent>,
    under_way: JoinSet<Option<Input>>,
    malformed: Seldom,
    cancel: CancellationToken,
}

/// News of the resources of an action.
type ResourceEvent = (Action, Watched<Value>);

// === impl Janitor ===

impl Janitor {
    /// Returns a janitor that has not begun.
    pub fn new(parts: JanitorParts, metrics: &Metrics) -> Self {
        let (nodes, news_of_nodes) = OneNodeWatches::new(&parts.cluster);
        let cancel = CancellationToken::new();
        let requests = Requests::new(
            parts.requests.clone(),
            Arc::clone(&parts.cluster),
            parts.clock,
            metrics,
            cancel.clone(),
        );
        Self {
            requests,
            metrics: JanitorMetrics::new(metrics),
            nodes,
            news_of_nodes,
            under_way: JoinSet::new(),
            malformed: Seldom::default(),
            cancel,
            parts,
        }
    }

    /// Runs until `cancel`; what is under way then is waited for. Takes the permissions `list`, `watch`,
    /// `patch` and `delete` on its resources, `patch` on their status, and `list`, `watch` and `delete` on
    /// nodes.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (sender, mut resources) = mpsc::channel(QUEUE);
        for action in self.parts.board.config().actions() {
            let (cluster, sender) = (Arc::clone(&self.parts.cluster), sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(async move {
                let watch = watch(&cluster, action, &sender, cancel.clone());
                cancel.run_until_cancelled(watch).await;
            });
        }
        self.requests.begin();
        loop {
            let sleep = self.sleep();
            tokio::select! {
                () = cancel.cancelled() => break,
                input = self.requests.next() => self.take_request(input),
                Some(event) = resources.recv() => self.resource_event(event),
                Some(event) = self.news_of_nodes.recv() => self.node_event(event),
                Some(done) = self.under_way.join_next() => self.done(done),
                () = tokio::time::sleep(sleep) => self.take(Input::Time),
            }
        }
        self.cancel.cancel();
        self.requests.end().await;
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

    fn sleep(&self) -> Duration {
        let wake = self.parts.board.wake_at();
        let wait = wake.map(|wake| wake.duration_since((self.parts.clock)()));
        // A time that has passed already is no wait.
        wait.map_or(LONGEST_SLEEP, |wait| {
            Duration::try_from(wait).unwrap_or_default()
        })
        .min(LONGEST_SLEEP)
    }

    fn resource_event(&mut self, (action, signal): ResourceEvent) {
        let input = match signal {
            Watched::Restarted => Input::ListBegun(action),
            Watched::Listed => Input::Listed(action),
            Watched::Applied(object) => match Resource::read(action, &object) {
                Ok(resource) => {
                    // Before it is decided about.
                    self.tell_board(&resource.node);
                    Input::Seen(Box::new(resource))
                }
                Err(error) => {
                    if let Some(not_logged_before) = self.malformed.now() {
                        let kind = action.kind();
                        tracing::warn!(not_logged_before, "a {kind} cannot be read: {error}");
                    }
                    return;
                }
            },
            Watched::Deleted(name) => Input::Gone(Key { action, name }),
            Watched::Failing { .. } | Watched::Recovered => return,
        };
        self.take(input);
    }

    fn node_event(&mut self, (node, object): OneNodeEvent) {
        let config = self.parts.board.config();
        let seen = object.map(|object| NodeSeen::read(&object, config));
        self.take(Input::Node(node, seen));
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
        self.share_nodes();
    }

    fn take_request(&mut self, input: domain::requests::Input) {
        self.share_nodes();
        self.requests.take(input);
        self.share_nodes();
    }

    /// Tells each board on which nodes the other is at work: there it begins nothing.
    fn share_nodes(&mut self) {
        for node in self.requests.nodes() {
            let held = self.parts.board.holds(&node);
            self.requests
                .take(domain::requests::Input::Held(node, held));
        }
        let nodes: Vec<String> = self.parts.board.nodes().map(str::to_owned).collect();
        for node in nodes {
            self.tell_board(&node);
        }
    }

    fn tell_board(&mut self, node: &str) {
        let held = Input::Held(node.to_owned(), self.requests.holds(node));
        for effect in self.parts.board.take(held, (self.parts.clock)()) {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let cluster = Arc::clone(&self.parts.cluster);
        match effect {
            Effect::Follow(node) => {
                if let Err(error) = self.nodes.follow(&node, &self.cancel) {
                    tracing::warn!(node, err = chain(&error), "a node cannot be watched");
                }
            }
            Effect::Leave(node) => self.nodes.leave(&node),
            Effect::Tell(news) => self.tell(&news),
            Effect::Write {
                key,
                version,
                status,
            } => {
                self.under_way.spawn(async move {
                    let written = write(&cluster, &key, &version, status).await;
                    Some(Input::Written(key, written))
                });
            }
            Effect::Ask {
                key,
                node,
                operation,
                provider,
                question,
            } => {
                let signal = Signal {
                    action: key.action,
                    node,
                    operation,
                };
                self.ask(key, signal, &provider, question);
            }
            Effect::DeleteNode { key, node, uid } => {
                self.under_way.spawn(async move {
                    let nodes = Kind::new("", "v1", "nodes");
                    let result = cluster.delete_object(&nodes, None, &node, &uid).await;
                    if let Err(error) = result {
                        tracing::warn!(node, err = chain(&error), "a terminated node stays");
                    }
                    Some(Input::NodeTried(key))
                });
            }
            Effect::Expire {
                key,
                annotation: (name, value),
            } => {
                self.under_way.spawn(async move {
                    let change = json!({"metadata": {"annotations": {name: value}}});
                    let merged = cluster
                        .merge_object(&kind(key.action), &key.name, &change)
                        .await;
                    if let Err(error) = merged {
                        let (kind, name) = (key.action.kind(), &key.name);
                        tracing::warn!(
                            err = chain(&error),
                            "{kind} {name}: its expiry is not written"
                        );
                    }
                    Some(Input::Tried(key))
                });
            }
            Effect::Delete { key, uid } => {
                let deleted = self.metrics.clone();
                self.under_way.spawn(async move {
                    let kind = kind(key.action);
                    match cluster.delete_object(&kind, None, &key.name, &uid).await {
                        Ok(()) => deleted.deleted(key.action),
                        Err(error) => {
                            let (kind, name) = (key.action.kind(), &key.name);
                            tracing::warn!(err = chain(&error), "{kind} {name} is not deleted");
                        }
                    }
                    Some(Input::Tried(key))
                });
            }
        }
    }

    fn ask(&mut self, key: Key, signal: Signal, place: &ProviderPlace, question: Question) {
        let Some(provider) = self.parts.providers.of(place) else {
            return; // Not reached: those of the configuration were opened.
        };
        self.under_way.spawn(async move {
            let (kind, name) = (key.action.kind(), &key.name);
            let answer = match question {
                Question::Send => {
                    let provider_name = provider.name();
                    tracing::info!(
                        node = signal.node,
                        operation = signal.operation,
                        provider = provider_name,
                        "{kind} {name}: the signal is sent"
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
                tracing::warn!(node = signal.node, class, "{kind} {name}: {text}");
            }
            Some(Input::Answered(key, signal.operation, answer))
        });
    }

    fn tell(&self, news: &News) {
        self.metrics.happened(news);
        match news {
            News::Begun { key, node } => {
                let (kind, name) = (key.action.kind(), &key.name);
                tracing::info!(node, "{kind} {name} is begun");
            }
            News::Ended {
                key,
                node,
                outcome,
                message,
                ..
            } => {
                let (kind, name) = (key.action.kind(), &key.name);
                tracing::info!(node, "{kind} {name} has ended: {outcome}: {message}");
            }
        }
    }
}

/// Tells of the resources of an action, once the API server serves their kind.
async fn watch(
    cluster: &Cluster,
    action: Action,
    sender: &mpsc::Sender<ResourceEvent>,
    cancel: CancellationToken,
) {
    let mut said = false;
    loop {
        match cluster.resource_of(GROUP, VERSION, action.kind()).await {
            Ok(Some(_)) => break,
            Ok(None) => {
                // Of a kind that does not exist there is none: the others need not wait.
                if !said {
                    let kind = action.kind();
                    tracing::warn!(
                        "the cluster has no kind {kind} of {GROUP}/{VERSION}: install its CRD"
                    );
                    for signal in [Watched::Restarted, Watched::Listed] {
                        if sender.send((action, signal)).await.is_err() {
                            return;
                        }
                    }
                }
                said = true;
            }
            Err(error) => {
                tracing::warn!(err = chain(&error), "it is not known which kinds there are");
            }
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
    let mut signals = cluster.watch_objects(&kind(action), None, |all| all, cancel);
    while let Some(signal) = signals.recv().await {
        if sender.send((action, signal)).await.is_err() {
            return;
        }
    }
}

/// Writes the status of a resource that still has this version.
async fn write(cluster: &Cluster, key: &Key, version: &str, status: Value) -> Written {
    let change = json!({"metadata": {"resourceVersion": version}, "status": status});
    let merged = cluster
        .merge_status(&kind(key.action), &key.name, &change)
        .await;
    let (kind, name) = (key.action.kind(), &key.name);
    match merged {
        Ok(object) => match Resource::read(key.action, &object) {
            Ok(resource) => Written::Done(Box::new(resource)),
            Err(error) => {
                tracing::error!(
                    "{kind} {name}, as the API server answers, cannot be read: {error}"
                );
                Written::Changed
            }
        },
        Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Written::Changed,
        Err(error) => {
            tracing::warn!(
                err = chain(&error),
                "{kind} {name}: its status is not written"
            );
            Written::Failed
        }
    }
}

fn kind(action: Action) -> Kind {
    Kind::new(GROUP, VERSION, action.plural())
}
