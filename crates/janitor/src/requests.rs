//! Requests to reset GPUs and to hand nodes over: watches and answers become inputs of
//! [`domain::requests::RequestBoard`], and its effects requests to the API server.

use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Event, Kind, ServiceEvent, ServiceWatches, Signal as Watched};
use contract::keys;
use domain::handover::Phase;
use domain::node::NodeView;
use domain::requests::{
    Act, Answer, Effect, Input, RequestBoard, RequestKey, RequestKind, RequestNews,
};
use jiff::Timestamp;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::metrics::RequestMetrics;

/// News that wait for the loop; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before it is asked again where a CRD is installed, or a Job's pods are read.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Longest sleep, so that a clock that is put forward is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Label of the Jobs that reset GPUs.
const JOB_LABEL: &str = "app=gpu-reset";

/// Carries out requests.
pub(crate) struct Requests {
    board: RequestBoard,
    cluster: Arc<Cluster>,
    clock: fn() -> Timestamp,
    metrics: RequestMetrics,
    nodes: ServiceWatches,
    news_of_nodes: mpsc::Receiver<ServiceEvent>,
    sender: mpsc::Sender<Input>,
    inputs: mpsc::Receiver<Input>,
    under_way: JoinSet<Option<Input>>,
    cancel: CancellationToken,
}

// === impl Requests ===

impl Requests {
    /// Returns what has not begun.
    pub(crate) fn new(
        board: RequestBoard,
        cluster: Arc<Cluster>,
        clock: fn() -> Timestamp,
        metrics: &Metrics,
        cancel: CancellationToken,
    ) -> Self {
        let (nodes, news_of_nodes) = ServiceWatches::new(&cluster);
        let (sender, inputs) = mpsc::channel(QUEUE);
        Self {
            board,
            cluster,
            clock,
            metrics: RequestMetrics::new(metrics),
            nodes,
            news_of_nodes,
            sender,
            inputs,
            under_way: JoinSet::new(),
            cancel,
        }
    }

    /// Begins to watch. Takes the permissions `list`, `watch` and `patch` on requests and nodes, `patch` on
    /// the status of requests, `list` and `watch` on pods, and on Jobs `create` and `delete` as well.
    pub(crate) fn begin(&self) {
        for kind in self.board.kinds() {
            let (cluster, sender) = (Arc::clone(&self.cluster), self.sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(async move {
                let watch = watch(&cluster, kind, &sender, cancel.clone());
                cancel.run_until_cancelled(watch).await;
            });
        }
        let (cluster, sender) = (Arc::clone(&self.cluster), self.sender.clone());
        let cancel = self.cancel.clone();
        tokio::spawn(async move {
            let marked = tell_of_marks(&cluster, &sender);
            cancel.run_until_cancelled(marked).await;
        });
        let Some(settings) = self.board.resets() else {
            return;
        };
        let namespace = settings.namespace.clone();
        let (cluster, sender) = (Arc::clone(&self.cluster), self.sender.clone());
        let cancel = self.cancel.clone();
        tokio::spawn(async move {
            let watch = watch_jobs(&cluster, &namespace, &sender, cancel.clone());
            cancel.run_until_cancelled(watch).await;
        });
    }

    /// Returns the next input.
    pub(crate) async fn next(&mut self) -> Input {
        loop {
            let sleep = self.sleep();
            tokio::select! {
                Some(input) = self.inputs.recv() => return input,
                Some(event) = self.news_of_nodes.recv() => return match event {
                    ServiceEvent::Node(name, view) => Input::Node(name, view),
                    ServiceEvent::Pods(name, pods) => Input::Pods(name, pods),
                },
                Some(done) = self.under_way.join_next() => match done {
                    Ok(Some(input)) => return input,
                    Ok(None) => {}
                    // A bug. The request is stuck until the next start.
                    Err(error) => tracing::error!(err = %error, "a request ended without an answer"),
                },
                () = tokio::time::sleep(sleep) => return Input::Time,
            }
        }
    }

    /// Waits for what is under way.
    pub(crate) async fn end(&mut self) {
        while self.under_way.join_next().await.is_some() {}
    }

    fn sleep(&self) -> Duration {
        let wake = self.board.wake_at();
        let wait = wake.map(|wake| wake.duration_since((self.clock)()));
        // A time that has passed already is no wait.
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        wait.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    /// Returns the nodes for which anything is left to be done.
    pub(crate) fn nodes(&self) -> Vec<String> {
        self.board.nodes().map(str::to_owned).collect()
    }

    /// Returns which request is at work on a node.
    pub(crate) fn holds(&self, node: &str) -> Option<String> {
        self.board.holds(node)
    }

    /// Takes an input in, and carries out what follows.
    pub(crate) fn take(&mut self, input: Input) {
        for effect in self.board.take(input, (self.clock)()) {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let cluster = Arc::clone(&self.cluster);
        match effect {
            Effect::Follow(node) => {
                if let Err(error) = self.nodes.follow(&node, &self.cancel) {
                    tracing::warn!(node, err = chain(&error), "a node cannot be watched");
                }
            }
            Effect::Leave(node) => self.nodes.leave(&node),
            Effect::Act(key, act) => {
                let namespace = self.board.resets().map(|resets| resets.namespace.clone());
                self.under_way.spawn(async move {
                    let namespace = namespace.unwrap_or_default();
                    let answer = carry_out(&cluster, &namespace, &key, *act).await;
                    Some(Input::Answered(key, answer))
                });
            }
            Effect::PutBack(view, change) => {
                tracing::info!(
                    node = view.name,
                    "a request is gone, and what it did is undone: {}",
                    change.summary()
                );
                self.under_way.spawn(async move {
                    let answer = change_node(&cluster, &view, &change).await;
                    Some(Input::IsBack(view.name.clone(), answer))
                });
            }
            Effect::Tell(news) => self.tell(&news),
        }
    }

    fn tell(&mut self, news: &RequestNews) {
        self.metrics.happened(news);
        match news {
            RequestNews::ResetBegun { node } => tracing::info!(node, "a reset of GPUs is begun"),
            RequestNews::ResetEnded { node, failure, .. } => match failure {
                None => tracing::info!(node, "a reset of GPUs has succeeded"),
                Some(why) => tracing::warn!(node, "a reset of GPUs has failed: {why}"),
            },
            RequestNews::HandOver {
                name,
                node,
                before,
                after,
                reason,
                ..
            } => {
                let (reason, what) = match (before, after) {
                    (_, Some(Phase::Closed)) if reason == "NodeNotFound" => {
                        ("NodeNotFound", "the node is not there")
                    }
                    (_, Some(Phase::Released)) if *before != Some(Phase::Parked) => {
                        ("ReleaseTaintApplied", "the node is handed over")
                    }
                    (_, Some(Phase::Closed)) => ("ReleaseTaintRemoved", "the node is taken back"),
                    (Some(Phase::Released | Phase::Parked), None) => {
                        ("OperatorDeleteRequested", "the request was deleted")
                    }
                    _ => return,
                };
                tracing::info!(node, "ExternalRemediationRequest {name}: {what}");
                let now = (self.clock)();
                let event = Event {
                    name: format!("{name}.{}", reason.to_ascii_lowercase()),
                    node: node.clone(),
                    pod: None,
                    kind: "Normal".to_owned(),
                    reason: reason.to_owned(),
                    message: format!("ExternalRemediationRequest {name}: {what}"),
                    agent: keys::MANAGED_BY.to_owned(),
                    count: 1,
                    first_seen: now,
                    last_seen: now,
                };
                let cluster = Arc::clone(&self.cluster);
                self.under_way.spawn(async move {
                    // It only tells of what has happened.
                    if let Err(error) = cluster.create_event(&event).await {
                        tracing::debug!(err = chain(&error), "an Event was not made");
                    }
                    None
                });
            }
        }
    }
}

fn kind(of: RequestKind) -> Kind {
    let (group, version, plural) = of.resource();
    Kind::new(group, version, plural)
}

fn jobs() -> Kind {
    Kind::new("batch", "v1", "jobs")
}

/// Tells of the requests of a kind, once the API server serves it.
async fn watch(
    cluster: &Cluster,
    of: RequestKind,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) {
    let (group, version, _) = of.resource();
    let mut said = false;
    loop {
        match cluster.resource_of(group, version, of.name()).await {
            Ok(Some(_)) => break,
            Ok(None) if said => {}
            Ok(None) => {
                let name = of.name();
                tracing::warn!(
                    "the cluster has no kind {name} of {group}/{version}: install its CRD"
                );
                // Of a kind that does not exist there is none: the others need not wait.
                for input in [Input::ListBegun(of), Input::Listed(of)] {
                    if sender.send(input).await.is_err() {
                        return;
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
    let mut signals = cluster.watch_objects(&kind(of), None, |all| all, cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Watched::Restarted => Input::ListBegun(of),
            Watched::Listed => Input::Listed(of),
            Watched::Applied(object) => Input::Seen(of, Box::new(object.as_ref().clone())),
            Watched::Deleted(name) => Input::Gone(RequestKey { kind: of, name }),
            Watched::Failing { .. } | Watched::Recovered => continue,
        };
        if sender.send(input).await.is_err() {
            return;
        }
    }
}

/// Tells of the Jobs that reset GPUs; of one that has failed with what its pods said.
async fn watch_jobs(
    cluster: &Cluster,
    namespace: &str,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) {
    let select = |all: cluster::Selection| all.with_labels(JOB_LABEL);
    let mut signals = cluster.watch_objects(&jobs(), Some(namespace), select, cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Watched::Restarted => Input::Jobs { listed: false },
            Watched::Listed => Input::Jobs { listed: true },
            Watched::Applied(job) => {
                let name = job["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                let why = if has_failed(&job) {
                    why(cluster, namespace, &name).await
                } else {
                    None
                };
                Input::Job(name, Some(Box::new((job.as_ref().clone(), why))))
            }
            Watched::Deleted(title) => {
                let name = title.rsplit('/').next().unwrap_or_default();
                Input::Job(name.to_owned(), None)
            }
            Watched::Failing { .. } | Watched::Recovered => continue,
        };
        if sender.send(input).await.is_err() {
            return;
        }
    }
}

fn has_failed(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array().into_iter().flatten();
    let mut failed = conditions.filter(|one| one["type"] == "Failed" && one["status"] == "True");
    failed.next().is_some()
}

/// Returns what the pods of a Job said at their end.
async fn why(cluster: &Cluster, namespace: &str, job: &str) -> Option<String> {
    let pods = Kind::new("", "v1", "pods");
    let selector = format!("batch.kubernetes.io/job-name={job}");
    // What its condition says is enough where they cannot be read.
    let pods = cluster
        .some_objects(&pods, namespace, &selector)
        .await
        .ok()?;
    let statuses = pods
        .iter()
        .filter_map(|pod| pod["status"]["containerStatuses"].as_array());
    let said = statuses
        .flatten()
        .filter_map(|one| one["state"]["terminated"]["message"].as_str());
    let said: Vec<&str> = said
        .map(str::trim)
        .filter(|said| !said.is_empty())
        .collect();
    said.last().map(|said| (*said).to_owned())
}

/// Tells once of the nodes that say that a request has changed them: it may be gone.
async fn tell_of_marks(cluster: &Cluster, sender: &mpsc::Sender<Input>) {
    let nodes = Kind::new("", "v1", "nodes");
    let mut signals = cluster.watch_objects(&nodes, None, |all| all, CancellationToken::new());
    while let Some(signal) = signals.recv().await {
        match signal {
            Watched::Applied(node) => {
                let annotations = &node["metadata"]["annotations"];
                let marks = [keys::RESET_STOPPED, keys::HANDED_OVER];
                let name = node["metadata"]["name"].as_str();
                if let Some(name) =
                    name.filter(|_| marks.iter().any(|key| annotations[key].is_string()))
                    && sender.send(Input::Marked(name.to_owned())).await.is_err()
                {
                    return;
                }
            }
            // Later ones are seen as they happen.
            Watched::Listed => return,
            _ => {}
        }
    }
}

async fn carry_out(cluster: &Cluster, namespace: &str, key: &RequestKey, act: Act) -> Answer {
    let title = key.title();
    let result = match act {
        Act::Merge(change) => {
            let merged = cluster
                .merge_object(&kind(key.kind), &key.name, &change)
                .await;
            merged.map(|object| Answer::Request(Box::new(object)))
        }
        Act::Status(change) => {
            let merged = cluster
                .merge_status(&kind(key.kind), &key.name, &change)
                .await;
            merged.map(|object| Answer::Request(Box::new(object)))
        }
        Act::Node(view, change) => return change_node(cluster, &view, &change).await,
        Act::Make(job) => {
            match cluster.create_object(&jobs(), Some(namespace), &job).await {
                Ok(job) => Ok(Answer::Job(Box::new(job))),
                // The watch tells whose it is.
                Err(ApiError::Conflict { .. }) => Ok(Answer::Done),
                Err(ApiError::Invalid { message, .. } | ApiError::Forbidden { message, .. }) => {
                    Ok(Answer::Refused(message))
                }
                Err(error) => Err(error),
            }
        }
        Act::Stop { name, uid } => {
            let deleted = cluster
                .delete_with_dependents(&jobs(), namespace, &name, &uid)
                .await;
            deleted.map(|()| Answer::Done)
        }
    };
    match result {
        Ok(answer) => answer,
        Err(ApiError::Conflict { .. }) => Answer::Failed,
        Err(error) => {
            tracing::warn!(err = chain(&error), "{title}: it is tried again");
            Answer::Failed
        }
    }
}

async fn change_node(
    cluster: &Cluster,
    view: &NodeView,
    change: &domain::node::NodeChange,
) -> Answer {
    match cluster.apply(view, change).await {
        Ok(view) => Answer::Node(Box::new(view)),
        Err(ApiError::Conflict { .. }) => Answer::Failed,
        Err(error) => {
            tracing::warn!(
                node = view.name,
                err = chain(&error),
                "a node is not changed"
            );
            Answer::Failed
        }
    }
}
