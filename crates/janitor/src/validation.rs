//! The controller of `ValidationRequest`s: what it watches goes into [`maintenance::validation_request::step`], and
//! what that says is carried out, one request after the other.
//!
//! It waits for each answer before it looks at the next request: so two requests never take the same node, and
//! what was done is known before anything else is decided. Tests take minutes, and a step some milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, ServiceEvent, ServiceWatches, Signal};
use jiff::{SignedDuration, Timestamp};
use maintenance::is_older;
use maintenance::validation_request::{
    self as requests, Act, Around, Request, Status, ValidationConfiguration,
};
use runtime::logging::{Seldom, chain};
use runtime::metrics::Metrics;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use nodes::Nodes;

use crate::metrics::ValidationMetrics;
use crate::watches::until_served;

mod nodes;

/// News that wait for the loop; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Longest sleep of the loop, so that a clock that is put forward is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Wait before a step is tried again that the API server has not done.
const AGAIN: SignedDuration = SignedDuration::from_secs(5);

/// Most steps before news are looked at.
const MOST_STEPS: usize = 1000;

/// What a controller of requests is made of.
pub struct ValidatorParts {
    /// The cluster, for who leads.
    pub cluster: Arc<Cluster>,
    /// Which tests there are.
    pub config: ValidationConfiguration,
    /// The namespace of the objects that are runs of tests.
    pub namespace: String,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// Carries out what `ValidationRequest`s ask for.
pub struct Validator {
    parts: ValidatorParts,
    metrics: ValidationMetrics,
    nodes: Nodes,
    news_of_nodes: mpsc::Receiver<ServiceEvent>,
    requests: BTreeMap<String, Request>,
    /// The names of those that cannot be read.
    unreadable: BTreeSet<String>,
    /// The objects that are runs of tests, by provider and name.
    objects: BTreeMap<(String, String), Value>,
    /// Watches that have not told yet of all there is.
    unlisted: BTreeSet<Source>,
    /// Says seldom that one cannot be read.
    malformed: Seldom,
    /// Says seldom that a watch fails.
    failing: Seldom,
    /// Requests to be looked at.
    dirty: BTreeSet<String>,
    /// When to look at requests again.
    wakes: BTreeMap<String, Timestamp>,
    cancel: CancellationToken,
}

/// A watch that runs as long as the controller does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Requests,
    /// The objects of a provider, by its place among them.
    Objects(usize),
}

/// News of a watch.
type News = (Source, Signal<Value>);

// === impl Validator ===

impl Validator {
    /// Returns one that has not begun.
    pub fn new(parts: ValidatorParts, metrics: &Metrics) -> Self {
        let (watches, news_of_nodes) = ServiceWatches::new(&parts.cluster);
        let providers = 0..parts.config.providers.len();
        let unlisted = providers.map(Source::Objects).chain([Source::Requests]);
        Self {
            metrics: ValidationMetrics::registered(metrics),
            nodes: Nodes::new(watches),
            news_of_nodes,
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

    /// Runs until `cancel`. Takes the permissions `list`, `watch` and `patch` on requests, `patch` on their
    /// status, `list`, `watch` and `patch` on nodes, `list` and `watch` on `ResourceSlice`s where a criterion
    /// reads them, and on the kinds of providers `get`, `list`, `watch`, `create` and `delete`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (sender, mut news) = mpsc::channel(QUEUE);
        self.begin(&sender);
        loop {
            let sleep = self.sleep();
            tokio::select! {
                () = cancel.cancelled() => break,
                Some((source, signal)) = news.recv() => self.take(source, signal),
                Some(event) = self.news_of_nodes.recv() => self.take_node(event),
                () = tokio::time::sleep(sleep) => {}
            }
            // All that is known already, so that what is decided is decided on it.
            while let Ok((source, signal)) = news.try_recv() {
                self.take(source, signal);
            }
            while let Ok(event) = self.news_of_nodes.try_recv() {
                self.take_node(event);
            }
            if self.unlisted.is_empty() {
                let (config, now) = (&self.parts.config, (self.parts.clock)());
                for node in self.nodes.ask_again(config, now) {
                    self.look_at_requests_of(&node);
                }
                self.look_at_all(&cancel).await;
            }
        }
        self.cancel.cancel();
    }

    /// Begins to watch.
    fn begin(&self, sender: &mpsc::Sender<News>) {
        let providers = self.parts.config.providers.values().enumerate();
        let objects = providers.map(|(at, provider)| {
            let kind = Kind::new(&provider.group, &provider.version, &provider.plural);
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
                // Of a kind that does not exist there is none: the others need not wait.
                let none = async { sender.send((source, Signal::Listed)).await.ok() };
                if until_served(&cluster, of, none).await.is_none() {
                    return;
                }
                let namespace = namespace.as_deref();
                let mut signals = cluster.watch_objects(&kind, namespace, |all| all, cancel);
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
            return LONGEST_SLEEP; // Nothing is looked at before.
        }
        let wake = self.wakes.values().min();
        let wait = wake.map(|wake| wake.duration_since((self.parts.clock)()));
        // A time that has passed already is no wait.
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or_default());
        wait.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn take(&mut self, source: Source, signal: Signal<Value>) {
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
                self.look_at_every_request();
                self.follow_nodes();
            }
            (Source::Requests, Signal::Applied(object)) => self.take_request(&object),
            (Source::Requests, Signal::Deleted(name)) => {
                self.requests.remove(&name);
                self.unreadable.remove(&name);
                self.wakes.remove(&name);
                // Others may have waited for its nodes.
                self.look_at_every_request();
                self.follow_nodes();
            }
            (Source::Objects(at), Signal::Applied(object)) => {
                let name = object["metadata"]["name"].as_str();
                if let Some((provider, name)) = self.provider(at).zip(name) {
                    let key = (provider, name.to_owned());
                    self.objects.insert(key, object.as_ref().clone());
                    self.look_at_every_request();
                }
            }
            (Source::Objects(at), Signal::Deleted(title)) => {
                let name = title.rsplit('/').next().unwrap_or_default().to_owned();
                if let Some(provider) = self.provider(at) {
                    self.objects.remove(&(provider, name));
                    self.look_at_every_request();
                }
            }
            (_, Signal::Failing { error, .. }) => {
                if let Some(not_logged_before) = self.failing.now() {
                    let what = self.name(source);
                    tracing::warn!(not_logged_before, err = error, "{what} cannot be watched");
                }
                // Those of other providers need not wait: a run that is not seen is asked for.
                if source != Source::Requests {
                    self.unlisted.remove(&source);
                }
            }
            (_, Signal::Recovered) => {}
        }
    }

    /// Returns what a watch tells of, for people.
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

    fn take_request(&mut self, object: &Value) {
        match Request::read(object) {
            Ok(request) => {
                let seen = self.requests.get(&request.name);
                if seen.is_some_and(|seen| is_older(&request.version, &seen.version)) {
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

    fn take_node(&mut self, event: ServiceEvent) {
        let (config, now) = (&self.parts.config, (self.parts.clock)());
        if let Some(node) = self.nodes.take(event, config, now) {
            self.look_at_requests_of(&node);
        }
    }

    fn look_at_requests_of(&mut self, node: &str) {
        let requests = self.requests.values();
        let about = requests.filter(|request| request.nodes.iter().any(|one| one == node));
        self.dirty.extend(about.map(|request| request.name.clone()));
    }

    fn look_at_every_request(&mut self) {
        let open = self.requests.values();
        self.dirty.extend(open.map(|request| request.name.clone()));
    }

    /// Watches the nodes of requests that are not over, and no others.
    fn follow_nodes(&mut self) {
        let open = self.requests.values().filter(|request| !request.is_over());
        let wanted: BTreeSet<String> = open.flat_map(|one| one.nodes.iter().cloned()).collect();
        // While not all requests are known, others may name the rest.
        if self.unlisted.is_empty() {
            self.nodes.leave_all_but(&wanted);
        }
        self.nodes.follow(wanted, &self.parts.config, &self.cancel);
    }

    /// Looks at all requests of which something has changed, until nothing is left to do: after each step at the
    /// oldest of them, so that a younger one does not take the room that it waits for.
    async fn look_at_all(&mut self, cancel: &CancellationToken) {
        let now = (self.parts.clock)();
        let due = self.wakes.iter().filter(|(_, at)| **at <= now);
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        for name in due {
            self.wakes.remove(&name);
            self.dirty.insert(name);
        }
        for _ in 0..MOST_STEPS {
            let created = |name: &&String| self.requests.get(*name).map(|one| one.created);
            let Some(name) = self.dirty.iter().min_by_key(created).cloned() else {
                return;
            };
            if cancel.is_cancelled() {
                return; // What is left waits for the next process.
            }
            self.dirty.remove(&name);
            if self.look_at(&name).await {
                self.dirty.insert(name);
            }
        }
        // News come first; then it goes on.
        for name in std::mem::take(&mut self.dirty) {
            self.wakes.insert(name, now);
        }
    }

    /// Does what is next for a request. Returns whether it was all done, so that something may follow.
    async fn look_at(&mut self, name: &str) -> bool {
        let now = (self.parts.clock)();
        let Some(request) = self.requests.get(name).cloned() else {
            return false;
        };
        if let Err(error) = self.look_for_runs(&request).await {
            let title = request.title();
            tracing::warn!(err = chain(&error), "{title}: a run is not seen");
            self.wakes.insert(name.to_owned(), now + AGAIN);
            return false;
        }
        let around = Around {
            nodes: self.nodes.states(),
            objects: &self.objects,
            namespace: &self.parts.namespace,
            requests: &self.requests,
            unreadable: &self.unreadable,
            now,
        };
        let step = requests::step(&request, &self.parts.config, &around);
        match step.wake {
            Some(wake) => drop(self.wakes.insert(name.to_owned(), wake)),
            None => drop(self.wakes.remove(name)),
        }
        let acts = !step.acts.is_empty();
        for act in step.acts {
            if let Err(error) = self.carry_out(&request, act).await {
                let title = request.title();
                if !matches!(error, ApiError::Conflict { .. }) {
                    tracing::warn!(err = chain(&error), "{title}: a step is not done");
                }
                // After a conflict there is news, unless it was missed.
                self.wakes.insert(name.to_owned(), now + AGAIN);
                return false;
            }
        }
        acts
    }

    /// Asks for the objects of runs that were not told of: a list may be older than they are, and one that is
    /// gone is a failure.
    async fn look_for_runs(&mut self, request: &Request) -> Result<(), ApiError> {
        for (provider, name) in request.runs() {
            let key = (provider.to_owned(), name.to_owned());
            let Some(kind) = self
                .kind(provider)
                .filter(|_| !self.objects.contains_key(&key))
            else {
                continue;
            };
            let (cluster, namespace) = (&self.parts.cluster, Some(self.parts.namespace.as_str()));
            if let Some(object) = cluster.object(&kind, namespace, name).await? {
                self.objects.insert(key, object);
            }
        }
        Ok(())
    }

    async fn carry_out(&mut self, request: &Request, act: Act) -> Result<(), ApiError> {
        let cluster = Arc::clone(&self.parts.cluster);
        let namespace = self.parts.namespace.clone();
        match act {
            Act::Finalizers(finalizers) => {
                let change = json!({"metadata": {
                    "resourceVersion": self.version(request), "finalizers": finalizers}});
                let kind = requests_kind();
                let merged = cluster.merge_object(&kind, &request.name, &change).await?;
                self.take_request(&merged);
            }
            Act::Node(view, change) => {
                let what = change.summary();
                let after = cluster.apply(&view, &change).await?;
                let (node, title) = (&view.name, request.title());
                tracing::info!(node, "{title}: {what}");
                let (config, now) = (&self.parts.config, (self.parts.clock)());
                if self.nodes.see(node, Some(after.object()), config, now) {
                    self.look_at_requests_of(node);
                }
            }
            Act::Make {
                provider,
                group,
                object,
            } => {
                let Some(kind) = self.kind(&provider) else {
                    return Ok(()); // Not reached: it was rendered by it.
                };
                let made = cluster
                    .create_object(&kind, Some(&namespace), &object)
                    .await;
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let object = match made {
                    Ok(object) => Some(object),
                    // It was made before, or is another's: what it says is looked at.
                    Err(ApiError::Conflict { .. }) => {
                        cluster.object(&kind, Some(&namespace), name).await?
                    }
                    Err(ApiError::Invalid { message, .. }) => {
                        let (config, now) = (&self.parts.config, (self.parts.clock)());
                        let status = requests::refused(request, config, group, &message, now);
                        self.write(request, &status).await?;
                        // The rest of the step is of an object that is not there.
                        return Err(ApiError::Conflict { status: 409 });
                    }
                    Err(error) => return Err(error),
                };
                tracing::info!("{}: {name} is begun", request.title());
                if let Some(object) = object {
                    self.objects.insert((provider, name.to_owned()), object);
                }
            }
            Act::Delete {
                provider,
                name,
                uid,
            } => {
                if let Some(kind) = self.kind(&provider) {
                    let deleted =
                        cluster.delete_after_dependents(&kind, Some(&namespace), &name, &uid);
                    deleted.await?;
                }
                // It may stay for a while, and then its watch tells.
                let key = (provider, name);
                if let Some(object) = self.objects.get_mut(&key) {
                    object["metadata"]["deletionTimestamp"] = json!((self.parts.clock)());
                }
            }
            Act::Status(status) => self.write(request, &status).await?,
        }
        Ok(())
    }

    async fn write(&mut self, request: &Request, status: &Status) -> Result<(), ApiError> {
        let change = json!({
            "metadata": {"resourceVersion": self.version(request)},
            "status": status,
        });
        let cluster = Arc::clone(&self.parts.cluster);
        let kind = requests_kind();
        let merged = cluster.merge_status(&kind, &request.name, &change).await?;
        self.take_request(&merged);
        self.metrics.changed(request, status);
        if request.status.phase != status.phase
            && let Some(phase) = status.phase
        {
            let why = status.message.as_deref().unwrap_or_default();
            tracing::info!("{}: {} {why}", request.title(), phase.name());
        }
        if status.running() < request.status.running() {
            self.look_at_every_request(); // They may wait for room.
        }
        if status.phase.is_some_and(requests::Phase::is_over) {
            // They may wait for its nodes.
            self.look_at_every_request();
            self.follow_nodes();
        }
        Ok(())
    }

    /// Returns the version of a request after what was done in the same step.
    fn version(&self, request: &Request) -> String {
        let seen = self.requests.get(&request.name).unwrap_or(request);
        seen.version.clone()
    }

    fn kind(&self, provider: &str) -> Option<Kind> {
        let provider = self.parts.config.providers.get(provider)?;
        Some(Kind::new(
            &provider.group,
            &provider.version,
            &provider.plural,
        ))
    }
}

fn requests_kind() -> Kind {
    Kind::new(requests::GROUP, requests::VERSION, requests::PLURAL)
}
