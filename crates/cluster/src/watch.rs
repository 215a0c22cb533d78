//! Endless watches of objects of any kind: all of them, those of a namespace, or one.
//!
//! A watch lists the objects, then watches from the listed version on. When the API server ends
//! the watch, a new one continues from the last version received; when the server no longer has
//! that version, the objects are listed again. kube's `watcher` does the same. This one exists
//! because consumers must learn at once that a failed watch works again (`watcher` reports it
//! with the next change of a node, which may take minutes), because one unreadable object must
//! not stop the others, and because kube drops a truncated line, and with it a change.

use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{ListParams, WatchParams};
use kube::core::{Request, Status};
use model::node::NodeView;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::KnownNodes;
use crate::causes::chain;
use crate::connect::Cluster;
use crate::layer::REQUEST_TIMEOUT;

mod selection;
mod wire;

pub use selection::Selection;
use wire::{Line, LineKind, RawList, WatchedObject, is_version_too_large, line};

/// Longest time of a watch (seconds), after which the API server ends it and a new one starts.
/// On a connection that has died silently this end does not come, which makes the silence
/// detectable (`connect/transport.rs`). Each watch asks for up to a third less, at random, so
/// that the watches of many nodes that began together do not stay in step.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Longest delay of that end. A proxy in between can keep the connection alive, and answer its
/// pings, while the API server behind it is gone.
const WATCH_GRACE: Duration = Duration::from_secs(15);
/// Longest time for one page of a list, of up to about 10 MB.
const PAGE_TIMEOUT: Duration = REQUEST_TIMEOUT.saturating_mul(3);
/// First pause after a failure; each further one doubles.
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// Longest pause after a failure.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// Time after which a watch counts as working, as it does once it has delivered a change: the
/// next failure is the first one again.
const WORKED: Duration = Duration::from_secs(1);

/// An event of a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum Signal<T> {
    /// A list begins: all objects follow as `Applied`.
    Restarted,
    /// The list is complete: objects not delivered since `Restarted` are gone.
    Listed,
    /// An object is new or has changed.
    Applied(Arc<T>),
    /// The object of this name is gone (`NAMESPACE/NAME` if it has a namespace).
    Deleted(String),
    /// The watch fails and is retried for ever; each failed try sends this signal.
    Failing {
        /// Error of the watch, in words.
        error: String,
        /// True if a permission is missing, so waiting alone does not help.
        refused: bool,
    },
    /// The watch works again. The changes that were missed follow.
    Recovered,
}

/// A signal of the watch of nodes.
pub type NodeEvent = Signal<NodeView>;

/// Reason why a list or watch ended.
enum WatchEnd {
    /// The receiver was dropped.
    ReceiverDropped,
    /// The API server no longer has the version, so the objects are listed again. Not a failure.
    Expired,
    /// Any other error, in words, and whether a permission is missing (403).
    Failed(String, bool),
}

/// A function that observes each signal before the consumer receives it.
type Observer<T> = Box<dyn Fn(&Signal<T>) + Send + Sync>;

/// A watch that delivers objects as `T`s.
struct Watch<T> {
    client: Client,
    selection: Selection,
    observer: Observer<T>,
    signals: mpsc::Sender<Signal<T>>,
    /// Version to watch from; `None` to list first.
    version: Option<String>,
    back_off: Duration,
    random: RandomState,
    failing: bool,
    /// True if a malformed object was logged since the last list.
    malformed: bool,
    /// Version after which a line could not be read.
    unreadable: Option<String>,
}

// === impl Cluster ===

impl Cluster {
    /// Watches all nodes until `cancel` is cancelled or the receiver is dropped, and keeps the
    /// last state of each in [`known_nodes`](Self::known_nodes). Must be called within a tokio
    /// runtime.
    ///
    /// The first signals are `Restarted`, one `Applied` per node, and `Listed`. The nodes come
    /// without managed fields and the list of images.
    pub fn watch_nodes(&self, cancel: CancellationToken) -> mpsc::Receiver<NodeEvent> {
        let known = self.known.clone();
        let selection = Selection::of::<Node>(&(), None);
        self.start(selection, move |event| known.apply(event), cancel)
    }

    /// Watches the objects of `selection` until `cancel` is cancelled or the receiver is
    /// dropped. Delivers them as `T`s: the type that the selection was made for, or any other
    /// that can be read from its JSON. Takes the permissions `list` and `watch`. Must be called
    /// within a tokio runtime.
    pub fn watch<T: DeserializeOwned + Send + Sync + 'static>(
        &self,
        selection: Selection,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<Signal<T>> {
        self.start(selection, |_| {}, cancel)
    }

    fn start<T: DeserializeOwned + Send + Sync + 'static>(
        &self,
        selection: Selection,
        observer: impl Fn(&Signal<T>) + Send + Sync + 'static,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<Signal<T>> {
        let (signals, receiver) = mpsc::channel(selection.queue());
        let watch = Watch::new(self.watching.clone(), selection, observer, signals);
        tokio::spawn(async move { cancel.run_until_cancelled(watch.run()).await });
        receiver
    }

    /// Returns the cache of nodes that [`watch_nodes`](Self::watch_nodes) fills.
    pub fn known_nodes(&self) -> KnownNodes {
        self.known.clone()
    }
}

// === impl Watch ===

impl<T: DeserializeOwned> Watch<T> {
    fn new(
        client: Client,
        selection: Selection,
        observer: impl Fn(&Signal<T>) + Send + Sync + 'static,
        signals: mpsc::Sender<Signal<T>>,
    ) -> Self {
        Self {
            client,
            selection,
            observer: Box::new(observer),
            signals,
            version: None,
            back_off: BACK_OFF_MIN,
            random: RandomState::new(),
            failing: false,
            malformed: false,
            unreadable: None,
        }
    }

    async fn run(mut self) {
        loop {
            let result = match self.version.clone() {
                None => self.list().await,
                Some(version) => self.watch(&version).await,
            };
            let error = match result {
                Ok(()) => continue,
                Err(WatchEnd::ReceiverDropped) => return,
                Err(WatchEnd::Expired) => {
                    tracing::debug!(
                        path = self.selection.path,
                        "the version to watch from is too old; listing again"
                    );
                    self.version = None;
                    if self.failing {
                        // The API server answers again, so the next try follows soon.
                        self.back_off = BACK_OFF_MIN;
                    }
                    None
                }
                Err(WatchEnd::Failed(error, refused)) => Some((error, refused)),
            };
            if let Some((error, refused)) = error {
                if !self.failing {
                    let of = self.selection.fields.as_deref().unwrap_or("all");
                    tracing::warn!(
                        "the watch of {} ({of}) failed; trying again: {error}",
                        self.selection.path
                    );
                }
                self.failing = true;
                if self.send(Signal::Failing { error, refused }).await.is_err() {
                    return;
                }
            }
            // At random between half of the pause and all of it: see `WATCH_SECONDS`.
            let half = self.back_off / 2;
            tokio::time::sleep(half + half.mul_f64(self.chance())).await;
            self.back_off = (self.back_off * 2).min(BACK_OFF_MAX);
        }
    }

    /// Lists and delivers all objects, page by page.
    async fn list(&mut self) -> Result<(), WatchEnd> {
        let mut page = ListParams::default().limit(self.selection.page());
        page.field_selector.clone_from(&self.selection.fields);
        page.label_selector.clone_from(&self.selection.labels);
        let mut first = true;
        loop {
            let request = Request::new(&self.selection.path);
            let request = if self.selection.metadata_only {
                request.list_metadata(&page)
            } else {
                request.list(&page)
            };
            let request = request.map_err(WatchEnd::failed)?;
            let answer = self.client.request_text(request);
            let answer = tokio::time::timeout(PAGE_TIMEOUT, answer).await;
            let answer = answer
                .map_err(|_| WatchEnd::timed_out())?
                .map_err(WatchEnd::failed)?;
            let list: RawList<'_> = serde_json::from_str(&answer)
                .map_err(kube::Error::SerdeError)
                .map_err(WatchEnd::failed)?;
            if first {
                self.send_recovered().await?;
                self.malformed = false;
                self.send(Signal::Restarted).await?;
                first = false;
            }
            for object in list.items.into_iter().flatten() {
                self.send_applied(object).await?;
            }
            if let Some(token) = list.metadata.continue_.filter(|token| !token.is_empty()) {
                page = page.continue_token(&token);
                continue;
            }
            let version = list
                .metadata
                .resource_version
                .filter(|version| !version.is_empty());
            if version.is_none() {
                return Err(WatchEnd::Failed(
                    "the list has no version".to_owned(),
                    false,
                ));
            }
            self.version = version;
            return self.send(Signal::Listed).await;
        }
    }

    /// Delivers the changes since `version` until the watch ends. Its end is no failure, unless
    /// it ends at once.
    async fn watch(&mut self, version: &str) -> Result<(), WatchEnd> {
        let seconds = f64::from(WATCH_SECONDS) * (1.0 - self.chance() / 3.0);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // From 20 to 30.
        let mut params = WatchParams::default().timeout(seconds.ceil() as u32);
        params.field_selector.clone_from(&self.selection.fields);
        params.label_selector.clone_from(&self.selection.labels);
        let request = Request::new(&self.selection.path);
        let request = if self.selection.metadata_only {
            request.watch_metadata(&params, version)
        } else {
            request.watch(&params, version)
        };
        let request = request.map_err(WatchEnd::failed)?;
        let begin = Instant::now();
        let end = begin + Duration::from_secs(WATCH_SECONDS.into()) + WATCH_GRACE;
        let started = tokio::time::timeout_at(end, self.client.request_stream(request)).await;
        let started = started.map_err(|_| WatchEnd::timed_out())?;
        let stream = started.map_err(|error| self.watch_failed(error))?;
        self.send_recovered().await?;

        let mut stream = pin!(stream);
        let mut worked = false;
        loop {
            // A line that has arrived is read even after `end`: the consumer may have been slow.
            let line = match tokio::time::timeout_at(end, line(&mut stream)).await {
                Ok(Ok(Some(line))) => line,
                Ok(Ok(None)) => break,
                Ok(Err(error)) => return Err(WatchEnd::failed(kube::Error::ReadEvents(error))),
                Err(_) => return Err(WatchEnd::timed_out()),
            };
            let Line { kind, object } = match serde_json::from_slice(&line) {
                Ok(line) => line,
                Err(error) => return Err(self.unreadable(&line, &error)),
            };
            if let LineKind::Error = kind {
                return Err(match serde_json::from_str(object.get()) {
                    Ok(status) => self.watch_failed(kube::Error::Api(status)),
                    Err(error) => self.unreadable(&line, &error),
                });
            }
            self.back_off = BACK_OFF_MIN;
            worked = true;
            let meta = WatchedObject::of(object);
            if let Some(version) = meta.version() {
                self.version = Some(version.to_owned());
            }
            match (kind, meta.name()) {
                (LineKind::Added | LineKind::Modified, _) => self.send_applied(object).await?,
                (LineKind::Deleted, Some(name)) => self.send(Signal::Deleted(name)).await?,
                (LineKind::Deleted, None) => self.log_malformed("it has no name"),
                (LineKind::Bookmark | LineKind::Error, _) => {}
            }
        }
        if worked || begin.elapsed() >= WORKED {
            self.back_off = BACK_OFF_MIN;
            return Ok(());
        }
        Err(WatchEnd::Failed(
            "the API server ended the watch at once".to_owned(),
            false,
        ))
    }

    /// Returns a random number from 0 to 1. The state of the hasher is random, and no time is
    /// hashed twice.
    fn chance(&self) -> f64 {
        let random = self.random.hash_one(std::time::Instant::now()) % 1024;
        f64::from(u16::try_from(random).unwrap_or_default()) / 1023.0
    }

    /// Interprets the error of a watch, and decides which version to continue from.
    fn watch_failed(&mut self, error: kube::Error) -> WatchEnd {
        let kube::Error::Api(status) = &error else {
            return WatchEnd::failed(error);
        };
        if status.code == 410 || status.reason == "Expired" {
            return WatchEnd::Expired;
        }
        // The API server will never accept the version: it is of another etcd (400), or in the
        // future, after etcd was restored from a backup (504).
        if status.code == 400 || is_version_too_large(status) {
            self.version = None;
        }
        WatchEnd::failed(error)
    }

    /// Handles a line that is no event. As it may have been any change, nothing after it is
    /// read: the watch restarts before the line, to receive it whole. If that fails again, all
    /// objects are listed.
    fn unreadable(&mut self, line: &[u8], error: &serde_json::Error) -> WatchEnd {
        // The API server may send a `Status` without an event around it.
        let status: Option<Status> = serde_json::from_slice(line).ok();
        if let Some(status) = status.filter(|status| status.code != 0) {
            return self.watch_failed(kube::Error::Api(Box::new(status)));
        }
        if self.unreadable == self.version {
            self.version = None;
        }
        self.unreadable.clone_from(&self.version);
        WatchEnd::Failed(
            format!("a line of the watch cannot be read: {error}"),
            false,
        )
    }

    async fn send_applied(&mut self, object: &RawValue) -> Result<(), WatchEnd> {
        match serde_json::from_str(object.get()) {
            Ok(object) => self.send(Signal::Applied(Arc::new(object))).await,
            Err(error) => {
                self.log_malformed(&error.to_string());
                Ok(())
            }
        }
    }

    /// Logs an object that is skipped; only the first one after a list, since it may be the same
    /// object again.
    fn log_malformed(&mut self, error: &str) {
        if !self.malformed {
            tracing::warn!(
                path = self.selection.path,
                error,
                "skipping a malformed object of the API server"
            );
        }
        self.malformed = true;
    }

    async fn send_recovered(&mut self) -> Result<(), WatchEnd> {
        if !self.failing {
            return Ok(());
        }
        tracing::info!(path = self.selection.path, "a watch works again");
        self.failing = false;
        self.send(Signal::Recovered).await
    }

    async fn send(&self, signal: Signal<T>) -> Result<(), WatchEnd> {
        (self.observer)(&signal);
        self.signals
            .send(signal)
            .await
            .map_err(|_| WatchEnd::ReceiverDropped)
    }
}

// === impl WatchEnd ===

impl WatchEnd {
    fn timed_out() -> Self {
        Self::Failed("the API server did not answer in time".to_owned(), false)
    }

    /// Creates the end of a failed watch: the error with its causes, in one line.
    fn failed(error: impl std::error::Error + 'static) -> Self {
        let any: &(dyn std::error::Error + 'static) = &error;
        let refused = matches!(
            any.downcast_ref::<kube::Error>(),
            Some(kube::Error::Api(status)) if status.code == 403
        );
        Self::Failed(chain(any), refused)
    }
}

#[cfg(test)]
mod outage;
#[cfg(test)]
mod tests;
