//! What people have set in the cluster: the circuit breaker's `ConfigMap`, and a pause.
//!
//! Both are watched, so an edit takes effect at once; what follows from it is decided in
//! `domain` ([`Switch::settle`]) and holds here from that moment on, whether or not it
//! can be written down. Only who acts writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ConfigMap, ConfigMapChange, ConfigMapEvent, ObjectError};
use contract::keys;
use domain::brake::Hold;
use domain::brake::pause::Pause;
use domain::brake::switch::{State, Switch, SwitchChange};
use jiff::Timestamp;
use runtime::logging::chain;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::nodes::receive;

/// Pause before a write that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// A refusal that lasts so long is meant. After a start of the API server the first requests
/// may be refused, until it knows who may what.
const REFUSED_AFTER: Duration = Duration::from_secs(60);

/// The two `ConfigMaps`, as last seen.
pub(super) struct Switches {
    cluster: Arc<Cluster>,
    namespace: String,
    breaker: Watched,
    own: Watched,
    /// What holds of the circuit breaker.
    switch: Switch,
    pause: Option<Pause>,
    writing: JoinSet<Result<ConfigMap, ObjectError>>,
    retry_at: Option<Instant>,
    write_error: Option<String>,
    /// What was last said of the circuit breaker; `None`: it has changed since.
    said: Option<String>,
}

/// A `ConfigMap` that is watched.
struct Watched {
    events: Option<mpsc::Receiver<ConfigMapEvent>>,
    seen: Option<ConfigMap>,
    /// Since when the API server refuses it.
    refused_since: Option<Instant>,
    /// Whether it is known at all, and what hinders it.
    known: Known,
}

/// Whether a `ConfigMap`'s content is known.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Known {
    /// The API server has not told yet. Why.
    NotYet(String),
    /// As last seen; that it does not exist is known as well.
    Yes,
    /// The API server does not let us. We go on without.
    Refused(String),
}

/// What has arrived.
pub(super) enum Arrival {
    /// From the watch of the circuit breaker.
    Breaker(ConfigMapEvent),
    /// From the watch of our own.
    Own(ConfigMapEvent),
    /// The answer to a write.
    Written(Result<ConfigMap, ObjectError>),
}

// === impl Switches ===

impl Switches {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        namespace: String,
        cancel: &CancellationToken,
    ) -> Self {
        let watch = |name| {
            let events = cluster.watch_config_map(&namespace, name, cancel.clone());
            Watched {
                events: Some(events),
                seen: None,
                refused_since: None,
                known: Known::NotYet("the API server has not answered yet".to_owned()),
            }
        };
        Self {
            breaker: watch(keys::BREAKER_CONFIG_MAP),
            own: watch(keys::CONFIG_MAP),
            cluster,
            namespace,
            switch: Switch::default(),
            pause: None,
            writing: JoinSet::new(),
            retry_at: None,
            write_error: None,
            said: None,
        }
    }

    /// Waits for the next thing to take in; `None` where a watch has ended. Dropping it loses
    /// nothing.
    pub(super) async fn next(&mut self) -> Option<Arrival> {
        tokio::select! {
            event = receive(&mut self.breaker.events) => event.map(Arrival::Breaker),
            event = receive(&mut self.own.events) => event.map(Arrival::Own),
            Some(done) = self.writing.join_next() => {
                let lost = |error| Err(ObjectError::Unavailable { source: Box::new(error) });
                Some(Arrival::Written(done.unwrap_or_else(lost)))
            }
        }
    }

    /// Takes in what has arrived. Returns whether anything may follow from it.
    pub(super) fn take_in(&mut self, arrival: Arrival, write: bool, now: Timestamp) -> bool {
        match arrival {
            Arrival::Breaker(event) => {
                if !self.breaker.take_in(event) {
                    return false;
                }
                self.said = None;
                self.read_switch();
            }
            Arrival::Own(event) => {
                if !self.own.take_in(event) {
                    return false;
                }
                let text = (self.own.seen.as_ref()).and_then(|map| map.data.get(keys::PAUSE));
                let pause = text.and_then(|text| Pause::read(text));
                if pause != self.pause {
                    if let Some(pause) = &pause {
                        tracing::warn!("new quarantines are {pause}");
                    } else {
                        tracing::info!("new quarantines are no longer paused");
                    }
                }
                self.pause = pause;
                return true;
            }
            Arrival::Written(Ok(map)) => {
                (self.write_error, self.said) = (None, None);
                self.breaker.seen = Some(map);
                self.read_switch();
            }
            // The watch brings what has changed, and it is decided anew.
            Arrival::Written(Err(ObjectError::Conflict)) => {}
            Arrival::Written(Err(error)) => {
                let error = chain(&error);
                if self.write_error.as_ref() != Some(&error) {
                    tracing::warn!(
                        err = error,
                        "the ConfigMap {}/{} cannot be written; what it would say holds all the \
                         same, until this process ends",
                        self.namespace,
                        keys::BREAKER_CONFIG_MAP
                    );
                }
                self.write_error = Some(error);
                self.retry_at = Some(Instant::now() + RETRY);
                return true;
            }
        }
        self.settle(false, write, now);
        true
    }

    /// The window is full: trips the circuit breaker.
    pub(super) fn trip(&mut self, write: bool, now: Timestamp) {
        self.settle(true, write, now);
    }

    /// Tries again what could not be written, where it is time.
    pub(super) fn retry_if_due(&mut self, write: bool, now: Timestamp) {
        if self.retry_at.is_some_and(|at| at <= Instant::now()) {
            self.retry_at = None;
            self.write_anew(write, now);
        }
    }

    /// When to call [`Self::retry_if_due`].
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Writes what follows from what the cluster has, after an error.
    pub(super) fn write_anew(&mut self, write: bool, now: Timestamp) {
        if self.breaker.known != Known::Yes {
            return;
        }
        let tripped = self.switch.state == State::Tripped;
        let reset_at = self.switch.reset_at;
        self.switch = self.seen_switch();
        if !self.switch.exists {
            // It went missing then, not with each try to write it.
            self.switch.reset_at = reset_at;
        }
        let trip =
            tripped && self.switch.state == State::Closed && self.switch.tripped_at.is_none();
        self.settle(trip, write, now);
    }

    /// The circuit breaker as it stands in the cluster.
    fn seen_switch(&self) -> Switch {
        let seen = self.breaker.seen.as_ref();
        seen.map_or_else(Switch::default, |map| {
            Switch::read(&map.data, &map.annotations)
        })
    }

    fn read_switch(&mut self) {
        let switch = self.seen_switch();
        if switch.state != self.switch.state {
            tracing::warn!("the circuit breaker is {}", switch.state.name());
        }
        self.switch = switch;
    }

    fn settle(&mut self, trip: bool, write: bool, now: Timestamp) {
        if self.breaker.known != Known::Yes && !self.switch.exists {
            // Whether it exists is not known, and nothing is to be said of it. Where nobody can
            // close it, each process begins with a window of its own.
            self.switch.exists = true;
            self.switch.reset_at = Some(now);
        }
        // One write at a time; its answer leads here again.
        if self.breaker.known == Known::Yes && write && !self.writing.is_empty() && !trip {
            return;
        }
        let Some(SwitchChange { seen, wanted, why }) = self.switch.settle(trip, now) else {
            return;
        };
        let text = format!("circuit breaker {}: {why}", wanted.state.name());
        if self.is_news(&text) {
            tracing::warn!("{text}");
        }
        let change = change(&seen, &wanted);
        self.switch = wanted;
        if !write || self.breaker.known != Known::Yes || !self.writing.is_empty() {
            return;
        }
        let (cluster, namespace) = (Arc::clone(&self.cluster), self.namespace.clone());
        let seen = self.breaker.seen.clone();
        self.writing.spawn(async move {
            let name = keys::BREAKER_CONFIG_MAP;
            let seen = seen.as_ref();
            cluster
                .change_config_map(&namespace, name, seen, &change)
                .await
        });
    }

    /// Whether this was not said yet: each try to write finds it anew.
    fn is_news(&mut self, text: &str) -> bool {
        let news = self.said.as_deref() != Some(text);
        self.said = Some(text.to_owned());
        news
    }

    /// What holds all new quarantines back. `breaker`: whether the circuit breaker counts.
    pub(super) fn stop(&self, breaker: bool, now: Timestamp) -> Option<Hold> {
        if let Some(pause) = self.pause.as_ref().filter(|pause| pause.holds(now)) {
            return Some(Hold::Paused(pause.clone()));
        }
        if let Known::NotYet(why) = &self.own.known {
            return Some(Hold::Unread(why.clone()));
        }
        if !breaker {
            return None;
        }
        match (&self.breaker.known, &self.switch.state) {
            (Known::NotYet(why), _) => Some(Hold::Unread(why.clone())),
            (_, State::Tripped) => Some(Hold::Tripped),
            (_, State::Odd(word)) => Some(Hold::Unread(format!(
                "the status in the ConfigMap {} is {word:?}, which is neither {} nor {}",
                keys::BREAKER_CONFIG_MAP,
                keys::BREAKER_CLOSED,
                keys::BREAKER_TRIPPED
            ))),
            (_, State::Closed) => None,
        }
    }

    /// When a pause ends by itself.
    pub(super) fn pause_ends(&self, now: Timestamp) -> Option<Timestamp> {
        let until = self.pause.as_ref()?.until?;
        (until > now).then_some(until)
    }

    /// When what the brake had held back was last dropped.
    pub(super) fn dropped_at(&self) -> Option<Timestamp> {
        self.switch.dropped_at
    }

    /// When a person last closed the circuit breaker.
    pub(super) fn reset_at(&self) -> Option<Timestamp> {
        self.switch.reset_at
    }

    /// The state's word.
    pub(super) fn state(&self) -> &str {
        self.switch.state.name()
    }

    /// What a person should know or do.
    pub(super) fn notes(&self) -> Vec<String> {
        let (namespace, name) = (&self.namespace, keys::BREAKER_CONFIG_MAP);
        let mut notes = Vec::new();
        for (watched, name) in [(&self.breaker, name), (&self.own, keys::CONFIG_MAP)] {
            if let Known::Refused(why) = &watched.known {
                notes.push(format!(
                    "the ConfigMap {namespace}/{name} cannot be read, what it says does not count: \
                     {why}"
                ));
            }
        }
        if let Some(error) = &self.write_error {
            notes.push(format!(
                "the ConfigMap {namespace}/{name} cannot be written: {error}; create the namespace \
                 or allow it, or name another namespace with --namespace"
            ));
        }
        if self.switch.state == State::Tripped {
            notes.push(format!(
                "to go on: kubectl -n {namespace} patch configmap {name} --type merge -p \
                 '{{\"data\":{{\"status\":\"CLOSED\"}}}}'; with \"cursor\":\"CREATE\" beside it what \
                 is held back now is dropped"
            ));
        }
        notes
    }
}

// === impl Watched ===

impl Watched {
    /// Takes an event in. Returns whether anything has changed.
    fn take_in(&mut self, event: ConfigMapEvent) -> bool {
        let refused_since = match &event {
            ConfigMapEvent::Failing { refused: true, .. } => {
                self.refused_since.or(Some(Instant::now()))
            }
            _ => None,
        };
        self.refused_since = refused_since;
        let refused = refused_since.is_some_and(|since| since.elapsed() >= REFUSED_AFTER);
        let before = (self.seen.clone(), self.known.clone());
        match event {
            ConfigMapEvent::Seen(map) => {
                self.seen = Some(map);
                self.known = Known::Yes;
            }
            ConfigMapEvent::Missing => {
                self.seen = None;
                self.known = Known::Yes;
            }
            ConfigMapEvent::Failing { error, .. } => {
                let known = std::mem::replace(&mut self.known, Known::Yes);
                self.known = match known {
                    _ if refused => Known::Refused(error),
                    Known::NotYet(_) => Known::NotYet(error),
                    // What was known a moment ago is the best there is.
                    known => known,
                };
            }
        }
        before != (self.seen.clone(), self.known.clone())
    }
}

/// What to write so that the `ConfigMap` says `wanted`.
fn change(seen: &Switch, wanted: &Switch) -> ConfigMapChange {
    let mut change = ConfigMapChange::default();
    if !seen.exists || wanted.state != seen.state {
        let status = wanted.state.name().to_owned();
        change
            .data
            .insert(keys::BREAKER_STATUS.into(), Some(status));
    }
    if !seen.exists || seen.drop_asked {
        let cursor = keys::CURSOR_RESUME.to_owned();
        change
            .data
            .insert(keys::BREAKER_CURSOR.into(), Some(cursor));
    }
    let existed = seen.exists;
    let mut annotations = BTreeMap::new();
    for (key, seen, wanted) in [
        (keys::TRIPPED_AT, seen.tripped_at, wanted.tripped_at),
        (keys::RESET_AT, seen.reset_at, wanted.reset_at),
        (keys::DROPPED_AT, seen.dropped_at, wanted.dropped_at),
    ] {
        if !existed || seen != wanted {
            annotations.insert(key.to_owned(), wanted.map(|time| time.to_string()));
        }
    }
    change.annotations = annotations;
    change
}

#[cfg(test)]
mod tests {
    use cluster::ConnectOptions;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// The switches of a cluster that cannot be reached.
    async fn switches() -> Switches {
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                    clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                    users: [{name: u, user: {}}]\n\
                    contexts: [{name: c, context: {cluster: c, user: u}}]\n";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, text).unwrap();
        let options = ConnectOptions {
            kubeconfig: Some(path),
            ..ConnectOptions::default()
        };
        let cluster = Cluster::connect(options).await.unwrap();
        Switches::new(
            Arc::new(cluster),
            "ns".to_owned(),
            &CancellationToken::new(),
        )
    }

    fn breaker(event: ConfigMapEvent) -> Arrival {
        Arrival::Breaker(event)
    }

    fn failing(refused: bool) -> Arrival {
        let error = format!("refused: {refused}");
        breaker(ConfigMapEvent::Failing { error, refused })
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_never_read_is_not_said_to_be_missing() {
        let mut switches = switches().await;
        for refused in [false, true] {
            switches.take_in(failing(refused), false, at(1));
            tokio::time::advance(REFUSED_AFTER).await;
            switches.take_in(failing(refused), false, at(1));
            assert_eq!(switches.said, None, "{refused}");
        }
        // Nobody can close what cannot be read: the window begins with the process.
        assert_eq!(switches.reset_at(), Some(at(1)));
        switches.trip(false, at(2));
        let said = switches.said.as_deref().unwrap();
        assert!(
            said.starts_with("circuit breaker TRIPPED: too many"),
            "{said}"
        );
        assert_eq!(switches.state(), keys::BREAKER_TRIPPED);

        switches.take_in(breaker(ConfigMapEvent::Missing), false, at(3));
        let said = "circuit breaker CLOSED: the ConfigMap did not exist";
        assert_eq!(switches.said.as_deref(), Some(said));
        assert_eq!(switches.reset_at(), Some(at(3)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_counts_only_where_it_lasts() {
        let mut switches = switches().await;
        let own = |event| Arrival::Own(event);
        switches.take_in(own(ConfigMapEvent::Missing), false, at(1));
        let held =
            |switches: &Switches| matches!(switches.stop(true, at(1)), Some(Hold::Unread(_)));
        for (refused, seconds, expected) in [
            (true, 0, true),
            (true, 59, true),
            // Another failure in between: it is not known what the API server would say.
            (false, 30, true),
            (true, 1, true),
            (true, 59, true),
            (true, 1, false),
            (false, 1, false),
        ] {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            switches.take_in(failing(refused), false, at(1));
            assert_eq!(held(&switches), expected, "{refused} after {seconds} s");
        }
        // An operator had stopped it all the same.
        let mut map = ConfigMap::default();
        let tripped = (
            keys::BREAKER_STATUS.to_owned(),
            keys::BREAKER_TRIPPED.to_owned(),
        );
        map.data.extend([tripped]);
        switches.take_in(breaker(ConfigMapEvent::Seen(map)), false, at(1));
        assert_eq!(switches.stop(true, at(1)), Some(Hold::Tripped));
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_said_once_and_resets_the_window_once() {
        let mut switches = switches().await;
        switches.take_in(breaker(ConfigMapEvent::Missing), false, at(1));
        let said = switches.said.clone().unwrap();
        for second in 2..5 {
            let message = "namespaces \"ns\" not found".to_owned();
            let error = Arrival::Written(Err(ObjectError::NotFound { message }));
            switches.take_in(error, false, at(second));
            switches.write_anew(false, at(second));
            assert!(!switches.is_news(&said));
            assert_eq!(switches.reset_at(), Some(at(1)));
        }
        // It is written down with it once there is a place for it.
        let seen = Switch {
            reset_at: Some(at(1)),
            ..Switch::default()
        };
        let wanted = seen.settle(false, at(9)).unwrap().wanted;
        let annotations = change(&seen, &wanted).annotations;
        assert_eq!(annotations[keys::RESET_AT], Some(at(1).to_string()));
    }
}
