//! Controller of `ValidationRequest`s. Watch events update its state,
//! [`maintenance::validation_request::step`] decides, and `steps` carries the decisions out, one
//! request after another.
//!
//! The controller waits for each response before it handles the next request. So two requests
//! never take the same node, and each decision is based on the results of the previous ones. A
//! test takes minutes, a step a few milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ObjectKind, Selection, ServiceEvent, ServiceWatches, Signal};
use jiff::Timestamp;
use maintenance::is_older;
use maintenance::validation_request::{
    self as requests, ValidationConfiguration, ValidationRequest,
};
use runtime::logging::Seldom;
use runtime::metrics::Metrics;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use nodes::Nodes;

use crate::metrics::ValidationMetrics;
use crate::watches::until_served;

mod nodes;
mod steps;

/// Watch events that wait for the loop. A slower loop slows the watches down.
const QUEUE: usize = 256;
/// Longest sleep of the loop, in case the clock is set forward.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Dependencies of a validator.
pub struct ValidatorParts {
    /// Cluster client of the leading replica.
    pub cluster: Arc<Cluster>,
    pub config: ValidationConfiguration,
    /// Namespace of the objects that run tests.
    pub namespace: String,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// Controller of `ValidationRequest`s, with its state.
pub struct Validator {
    parts: ValidatorParts,
    metrics: ValidationMetrics,
    nodes: Nodes,
    node_events: mpsc::Receiver<ServiceEvent>,
    requests: BTreeMap<String, ValidationRequest>,
    /// Names of requests that cannot be parsed.
    unreadable: BTreeSet<String>,
    /// Objects that run tests, by provider and name.
    objects: BTreeMap<(String, String), Value>,
    /// Watches that have not delivered a complete list.
    unlisted: BTreeSet<Source>,
    /// Rate limit of the log line about unparsable requests.
    malformed: Seldom,
    /// Rate limit of the log line about failing watches.
    failing: Seldom,
    /// Names of requests to reconcile.
    dirty: BTreeSet<String>,
    /// Times for reconciling requests again.
    wakes: BTreeMap<String, Timestamp>,
    cancel: CancellationToken,
}

/// Watch that runs as long as the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Requests,
    /// Objects of a provider, by its index in the configuration.
    Objects(usize),
}

/// Event of a watch.
type WatchEvent = (Source, Signal<Value>);

// === impl Validator ===

impl Validator {
    /// Creates a validator that has not started.
    pub fn new(parts: ValidatorParts, metrics: &Metrics) -> Self {
        let (watches, node_events) = ServiceWatches::new(&parts.cluster);
        let providers = 0..parts.config.providers.len();
        let unlisted = providers.map(Source::Objects).chain([Source::Requests]);
        Self {
            metrics: ValidationMetrics::registered(metrics),
            nodes: Nodes::new(watches),
            node_events,
            requests: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            objects: BTreeMap::new(),
            unlisted: unlisted.collect(),
            malformed: Seldom::default(),
            failing: Seldom::default(),
            dirty: BTreeSet::new(),
            wakes: BTreeMap::new(),
            cancel: CancellationToken::new(),
            parts,
        }
    }

    /// Runs until `cancel`. Needs the permissions `list`, `watch` and `patch` on requests,
    /// `patch` on their status, `list`, `watch` and `patch` on nodes, `list` and `watch` on
    /// `ResourceSlice`s if a criterion reads them, and `get`, `list`, `watch`, `create` and
    /// `delete` on the kinds of the providers.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (sender, mut events) = mpsc::channel(QUEUE);
        self.begin(&sender);
        loop {
            let sleep = self.sleep();
            tokio::select! {
                () = cancel.cancelled() => break,
                Some((source, signal)) = events.recv() => self.handle(source, signal),
                Some(event) = self.node_events.recv() => self.handle_node(event),
                () = tokio::time::sleep(sleep) => {}
            }
            // Handle all queued events first, so that decisions use the latest state.
            while let Ok((source, signal)) = events.try_recv() {
                self.handle(source, signal);
            }
            while let Ok(event) = self.node_events.try_recv() {
                self.handle_node(event);
            }
            if self.unlisted.is_empty() {
                let (config, now) = (&self.parts.config, (self.parts.clock)());
                for node in self.nodes.reevaluate(config, now) {
                    self.mark_requests_of(&node);
                }
                self.reconcile_all(&cancel).await;
            }
        }
        self.cancel.cancel();
    }

    fn begin(&self, sender: &mpsc::Sender<WatchEvent>) {
        let providers = self.parts.config.providers.values().enumerate();
        let objects = providers.map(|(at, provider)| {
            let kind = ObjectKind::new(&provider.group, &provider.version, &provider.plural);
            let of = (
                provider.group.clone(),
                provider.version.clone(),
                provider.kind.clone(),
            );
            let namespace = self.parts.namespace.clone();
            (Source::Objects(at), of, kind, Some(namespace))
        });
        let own = [requests::GROUP, requests::VERSION, requests::KIND].map(str::to_owned);
        let requests = (Source::Requests, own.into(), requests_kind(), None);
        for (source, of, kind, namespace) in objects.chain([requests]) {
            let (cluster, sender) = (Arc::clone(&self.parts.cluster), sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(cancel.clone().run_until_cancelled_owned(async move {
                let of = (of.0.as_str(), of.1.as_str(), of.2.as_str());
                // A kind that does not exist has no objects, so other watches need not wait for
                // it.
                let none = async { sender.send((source, Signal::Listed)).await.ok() };
                if until_served(&cluster, of, none).await.is_none() {
                    return;
                }
                let namespace = namespace.as_deref();
                let mut signals = cluster.watch(Selection::of_kind(&kind, namespace), cancel);
                while let Some(signal) = signals.recv().await {
                    if sender.send((source, signal)).await.is_err() {
                        return;
                    }
                }
            }));
        }
    }

    fn sleep(&self) -> Duration {
        if !self.unlisted.is_empty() {
            return LONGEST_SLEEP; // Nothing is reconciled before the lists are complete.
        }
        let wake = self.wakes.values().min();
        let wait = wake.map(|wake| wake.duration_since((self.parts.clock)()));
        // A time in the past is due now.
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        wait.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn handle(&mut self, source: Source, signal: Signal<Value>) {
        match (source, signal) {
            (_, Signal::Restarted) => {
                self.unlisted.insert(source);
                match source {
                    Source::Requests => {
                        self.requests.clear();
                        self.unreadable.clear();
                    }
                    Source::Objects(at) => {
                        let provider = self.provider(at);
                        self.objects
                            .retain(|(of, _), _| Some(of) != provider.as_ref());
                    }
                }
            }
            (_, Signal::Listed) => {
                self.unlisted.remove(&source);
                self.mark_all();
                self.follow_nodes();
            }
            (Source::Requests, Signal::Applied(object)) => self.update_request(&object),
            (Source::Requests, Signal::Deleted(name)) => {
                self.requests.remove(&name);
                self.unreadable.remove(&name);
                self.wakes.remove(&name);
                // Other requests may wait for the nodes of this one.
                self.mark_all();
                self.follow_nodes();
            }
            (Source::Objects(at), Signal::Applied(object)) => {
                let name = object["metadata"]["name"].as_str();
                if let Some((provider, name)) = self.provider(at).zip(name) {
                    let key = (provider, name.to_owned());
                    self.objects.insert(key, object.as_ref().clone());
                    self.mark_all();
                }
            }
            (Source::Objects(at), Signal::Deleted(title)) => {
                let name = title.rsplit('/').next().unwrap_or_default().to_owned();
                if let Some(provider) = self.provider(at) {
                    self.objects.remove(&(provider, name));
                    self.mark_all();
                }
            }
            (_, Signal::Failing { error, .. }) => {
                if let Some(not_logged_before) = self.failing.now() {
                    let what = self.name(source);
                    tracing::warn!(not_logged_before, err = error, "{what} cannot be watched");
                }
                // Requests of other providers need not wait: a run that was not listed is
                // fetched instead.
                if source != Source::Requests {
                    self.unlisted.remove(&source);
                }
            }
            (_, Signal::Recovered) => {}
        }
    }

    /// Returns the name of a watch for log lines.
    fn name(&self, source: Source) -> String {
        match source {
            Source::Requests => "ValidationRequests".to_owned(),
            Source::Objects(at) => {
                let provider = self.provider(at).unwrap_or_default();
                format!("the objects of the provider {provider}")
            }
        }
    }

    fn provider(&self, at: usize) -> Option<String> {
        self.parts.config.providers.keys().nth(at).cloned()
    }

    fn update_request(&mut self, object: &Value) {
        match ValidationRequest::read(object) {
            Ok(request) => {
                let known = self.requests.get(&request.name);
                if known.is_some_and(|known| is_older(&request.version, &known.version)) {
                    return;
                }
                self.unreadable.remove(&request.name);
                self.dirty.insert(request.name.clone());
                self.requests.insert(request.name.clone(), request);
                self.follow_nodes();
            }
            Err(error) => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                self.requests.remove(name);
                self.unreadable.insert(name.to_owned());
                if let Some(not_logged_before) = self.malformed.now() {
                    tracing::warn!(
                        not_logged_before,
                        name,
                        "a ValidationRequest cannot be read: {error}"
                    );
                }
            }
        }
    }

    fn handle_node(&mut self, event: ServiceEvent) {
        let (config, now) = (&self.parts.config, (self.parts.clock)());
        if let Some(node) = self.nodes.handle(event, config, now) {
            self.mark_requests_of(&node);
        }
    }

    fn mark_requests_of(&mut self, node: &str) {
        let requests = self.requests.values();
        let about = requests.filter(|request| request.nodes.iter().any(|one| one == node));
        self.dirty.extend(about.map(|request| request.name.clone()));
    }

    fn mark_all(&mut self) {
        let open = self.requests.values();
        self.dirty.extend(open.map(|request| request.name.clone()));
    }

    /// Watches exactly the nodes of unfinished requests.
    fn follow_nodes(&mut self) {
        let open = self.requests.values().filter(|request| !request.is_over());
        let wanted: BTreeSet<String> = open.flat_map(|one| one.nodes.iter().cloned()).collect();
        // Until all requests are listed, another one may need these nodes.
        if self.unlisted.is_empty() {
            self.nodes.keep_only(&wanted);
        }
        self.nodes.follow(wanted, &self.parts.config, &self.cancel);
    }

    fn kind(&self, provider: &str) -> Option<ObjectKind> {
        let provider = self.parts.config.providers.get(provider)?;
        Some(ObjectKind::new(
            &provider.group,
            &provider.version,
            &provider.plural,
        ))
    }
}

fn requests_kind() -> ObjectKind {
    ObjectKind::new(requests::GROUP, requests::VERSION, requests::PLURAL)
}
