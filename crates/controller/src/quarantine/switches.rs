//! The switches that people set in the cluster: the circuit breaker's `ConfigMap`, and a pause.
//!
//! Both are watched, so an edit takes effect at once; what follows from it is decided in
//! `domain` ([`Switch::settle`]) and holds here from that moment on, whether or not it
//! can be written down. Only who acts writes.
//!
//! A person who sets the circuit breaker as NVSentinel's operators do deletes its `ConfigMap` and
//! makes another. What it said holds in between; only where none comes for [`ABSENT_AFTER`] it counts
//! as closed, and is made anew by us. Where there is none when we start, that is at once: nothing
//! is known that could hold, and NVSentinel's operators restart it to have it made.

mod watched;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ConfigMap, ConfigMapChange, ConfigMapEvent};
use contract::keys;
use fleet::brake::Hold;
use fleet::brake::pause::Pause;
use fleet::brake::switch::{BreakerState, Switch, SwitchChange};
use fleet::{LIST_TAKES, Switched};
use jiff::Timestamp;
use model::future::FutureTimes;
use runtime::logging::chain;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::watches::receive;
use watched::{Known, Watched};

/// Pause before a write that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The circuit breaker's `ConfigMap` counts as closed, and is made anew, once it is absent for so
/// long: time for who deletes and creates it, by hand or by a script, to do the second.
const ABSENT_AFTER: Duration = Duration::from_secs(10);

/// The two `ConfigMaps`, as last seen.
pub(super) struct Switches {
    cluster: Arc<Cluster>,
    namespace: String,
    breaker: Watched,
    own: Watched,
    /// The circuit breaker that holds.
    switch: Switch,
    /// The circuit breaker as its `ConfigMap` said when it was last read.
    read: Option<Switch>,
    /// Times of the future in its annotations.
    times: FutureTimes,
    /// True while the `ConfigMap` is deleted and its absence does not count yet: it still stands in
    /// `breaker.seen`.
    absent: bool,
    /// The time at which its absence counts; `None` while it is not known to be absent.
    absence_counts_at: Option<Instant>,
    /// True while the window has tripped it, and the cluster has not shown that yet.
    tripping: bool,
    pause: Option<Pause>,
    writing: JoinSet<Result<ConfigMap, ApiError>>,
    /// The version that the last write was made on; `None`: there was none.
    written_on: Option<String>,
    /// The time of the last write that was answered with a `ConfigMap`.
    written_at: Option<Instant>,
    retry_at: Option<Instant>,
    write_error: Option<String>,
    /// The last log line about the circuit breaker; `None`: it has changed since.
    said: Option<String>,
}

/// Something that has arrived.
pub(super) enum Arrival {
    /// From the watch of the circuit breaker.
    Breaker(ConfigMapEvent),
    /// From the watch of our own.
    Own(ConfigMapEvent),
    /// The answer to a write.
    Written(Result<ConfigMap, ApiError>),
}

// === impl Switches ===

impl Switches {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        namespace: String,
        cancel: &CancellationToken,
    ) -> Self {
        let watch = |name| Watched::new(cluster.watch_config_map(&namespace, name, cancel.clone()));
        Self {
            breaker: watch(keys::BREAKER_CONFIG_MAP),
            own: watch(keys::CONFIG_MAP),
            cluster,
            namespace,
            switch: Switch::default(),
            read: None,
            times: FutureTimes::default(),
            absent: false,
            absence_counts_at: None,
            tripping: false,
            pause: None,
            writing: JoinSet::new(),
            written_on: None,
            written_at: None,
            retry_at: None,
            write_error: None,
            said: None,
        }
    }

    /// Waits for the next thing to take in; `None` where a watch has ended. Dropping it loses
    /// nothing.
    pub(super) async fn next(&mut self) -> Option<Arrival> {
        tokio::select! {
            event = receive(self.breaker.events.as_mut()) => event.map(Arrival::Breaker),
            event = receive(self.own.events.as_mut()) => event.map(Arrival::Own),
            Some(done) = self.writing.join_next() => {
                let lost = |error| Err(ApiError::unavailable(error));
                Some(Arrival::Written(done.unwrap_or_else(lost)))
            }
        }
    }

    /// Takes in what has arrived. Returns whether anything may follow from it.
    pub(super) fn take_in(&mut self, arrival: Arrival, write: bool, now: Timestamp) -> bool {
        match arrival {
            Arrival::Breaker(event) => {
                if !self.breaker_event(event) {
                    return false;
                }
                if self.absent {
                    return true; // What it said holds.
                }
                self.said = None;
                self.read_switch(now);
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
            Arrival::Written(answer) => {
                if self.written(answer, now) {
                    return true;
                }
            }
        }
        self.settle(false, write, now);
        true
    }

    /// Takes in the answer to a write. Returns whether nothing more is to be done now.
    fn written(&mut self, answer: Result<ConfigMap, ApiError>, now: Timestamp) -> bool {
        match answer {
            Ok(map) => {
                (self.write_error, self.said) = (None, None);
                self.written_at = Some(Instant::now());
                // The watch may have been faster, and know what has happened since.
                if !self.absent && !self.breaker.knows_newer(&map) {
                    self.breaker.seen = Some(map);
                    self.read_switch(now);
                }
                false
            }
            // The watch brings what has changed, and it is decided anew; where it has already,
            // what follows from it is still to be written.
            Err(ApiError::Conflict { .. }) => self.breaker.version() == self.written_on,
            // Deleted meanwhile; the watch brings that as well.
            Err(ApiError::NotFound { .. }) if self.written_on.is_some() => true,
            Err(error) => {
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
                true
            }
        }
    }

    /// Trips the circuit breaker, for the window is full.
    pub(super) fn trip(&mut self, write: bool, now: Timestamp) {
        self.settle(true, write, now);
    }

    /// Does what is to be done by now: tries again what could not be written, and takes in that
    /// the circuit breaker's `ConfigMap` stays away. Returns whether anything may follow from it.
    pub(super) fn wake(&mut self, write: bool, now: Timestamp) -> bool {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        if due(self.retry_at) {
            self.retry_at = None;
            self.write(write);
        }
        if !due(self.absence_counts_at) {
            return false;
        }
        (self.absent, self.absence_counts_at) = (false, None);
        self.tripping = false;
        (self.breaker.seen, self.read, self.said) = (None, None, None);
        let dropped_at = self.switch.dropped_at;
        self.read_switch(now);
        // Who deletes it closes it; what a person has dropped stays dropped.
        self.switch.dropped_at = dropped_at;
        self.settle(false, write, now);
        true
    }

    /// Returns when to call [`Self::wake`].
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let times = [self.retry_at, self.absence_counts_at];
        times.into_iter().flatten().min()
    }

    /// Takes in what the circuit breaker's watch tells. Returns whether anything has changed.
    fn breaker_event(&mut self, event: ConfigMapEvent) -> bool {
        match &event {
            ConfigMapEvent::Missing if self.breaker.seen.is_some() => {
                (self.breaker.known, self.breaker.refused_since) = (Known::Yes, None);
                if !self.absent {
                    tracing::warn!(
                        "the circuit breaker's ConfigMap was deleted: what it said holds for {} s, \
                         unless another is made",
                        ABSENT_AFTER.as_secs()
                    );
                }
                self.absent = true;
                (self.absence_counts_at).get_or_insert_with(|| Instant::now() + ABSENT_AFTER);
                return true;
            }
            ConfigMapEvent::Missing => {}
            // Of before our own write.
            ConfigMapEvent::Seen(map)
                if self.breaker.knows_newer(map)
                    && self
                        .written_at
                        .is_some_and(|at| at.elapsed() < LIST_TAKES.unsigned_abs()) =>
            {
                return false;
            }
            ConfigMapEvent::Seen(_) => {
                let made_anew = std::mem::replace(&mut self.absent, false);
                self.absence_counts_at = None;
                // A person has set it since.
                self.tripping &= !made_anew;
                return self.breaker.take_in(event) || made_anew;
            }
            // Whether it is still absent is not known.
            ConfigMapEvent::Failing { .. } => self.absence_counts_at = None,
        }
        self.breaker.take_in(event)
    }

    /// Returns the circuit breaker as it stands in the cluster.
    fn in_cluster(&self) -> Switch {
        let seen = self.breaker.seen.as_ref();
        seen.map_or_else(Switch::default, |map| {
            Switch::read(&map.data, &map.annotations)
        })
    }

    fn read_switch(&mut self, now: Timestamp) {
        let read = self.in_cluster();
        let switch = read.taken_in(self.read.as_ref(), &mut self.times, now);
        for note in self.times.notes().filter(|_| !switch.amended.is_empty()) {
            tracing::warn!("ConfigMap {}: {note}", keys::BREAKER_CONFIG_MAP);
        }
        if switch.state != self.switch.state {
            tracing::warn!("the circuit breaker is {}", switch.state.name());
        }
        self.tripping &= switch.state == BreakerState::Closed && switch.tripped_at.is_none();
        self.read = switch.exists.then(|| switch.clone());
        self.switch = switch;
    }

    fn settle(&mut self, trip: bool, write: bool, now: Timestamp) {
        if self.breaker.known != Known::Yes && !self.switch.exists {
            // Whether it exists is not known, and nothing is to be said of it. Where nobody can
            // close it, each process begins with a window of its own.
            self.switch.exists = true;
            self.switch.reset_at = Some(now);
        }
        let tripped = self.switch.state == BreakerState::Tripped;
        let trip = trip || self.tripping;
        if let Some(SwitchChange { wanted, why }) = self.switch.settle(trip, now) {
            let text = format!("circuit breaker {}: {why}", wanted.state.name());
            if self.is_news(&text) {
                tracing::warn!("{text}");
            }
            // Who does not write does not wait for the cluster to show it.
            self.tripping = write && (self.tripping || (trip && !tripped));
            self.switch = wanted;
        }
        self.write(write);
    }

    /// Writes what holds, where the cluster says something else. One write at a time; its
    /// answer leads here again.
    fn write(&mut self, write: bool) {
        let free = self.writing.is_empty() && !self.absent;
        if !write || !free || self.breaker.known != Known::Yes {
            return;
        }
        let change = change(&self.in_cluster(), &self.switch);
        if change == ConfigMapChange::default() {
            return;
        }
        self.written_on = self.breaker.version();
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

    /// Returns whether this was not said yet: each try to write finds it anew.
    fn is_news(&mut self, text: &str) -> bool {
        let news = self.said.as_deref() != Some(text);
        self.said = Some(text.to_owned());
        news
    }

    /// Returns what people have set, as far as it is known.
    pub(super) fn switched(&self) -> Switched {
        let unread = |known: &Known| match known {
            Known::NotYet(why) => Some(why.clone()),
            Known::Yes | Known::Refused(_) => None,
        };
        let breaker = match (unread(&self.breaker.known), &self.switch.state) {
            (Some(why), _) => Some(Hold::Unread(why)),
            (_, BreakerState::Tripped) => Some(Hold::Tripped),
            (_, BreakerState::Odd(word)) => Some(Hold::Unread(format!(
                "the status in the ConfigMap {} is {word:?}, which is neither {} nor {}",
                keys::BREAKER_CONFIG_MAP,
                keys::BREAKER_CLOSED,
                keys::BREAKER_TRIPPED
            ))),
            (_, BreakerState::Closed) => None,
        };
        Switched {
            pause: self.pause.clone(),
            unread: unread(&self.own.known),
            breaker,
            dropped_at: self.switch.dropped_at,
            reset_at: self.switch.reset_at,
        }
    }

    /// Returns the state's word.
    pub(super) fn state(&self) -> &str {
        self.switch.state.name()
    }

    /// Returns what a person should know or do.
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
        if self.absent {
            notes.push(format!(
                "the ConfigMap {namespace}/{name} was deleted: what it said holds until another is \
                 made; where none is within {} s, it counts as {}",
                ABSENT_AFTER.as_secs(),
                keys::BREAKER_CLOSED
            ));
        }
        let future = self.times.notes();
        notes.extend(future.map(|note| format!("the ConfigMap {namespace}/{name}: {note}")));
        if self.switch.state == BreakerState::Tripped {
            notes.push(format!(
                "to go on: kubectl -n {namespace} patch configmap {name} --type merge -p \
                 '{{\"data\":{{\"status\":\"CLOSED\"}}}}'; with \"cursor\":\"CREATE\" beside it what \
                 is held back now is dropped"
            ));
        }
        notes
    }
}

/// Returns what to write so that the `ConfigMap` says `wanted`.
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
    let mut annotations = BTreeMap::new();
    for (key, seen, wanted) in [
        (keys::TRIPPED_AT, seen.tripped_at, wanted.tripped_at),
        (keys::RESET_AT, seen.reset_at, wanted.reset_at),
        (keys::DROPPED_AT, seen.dropped_at, wanted.dropped_at),
    ] {
        if seen != wanted {
            annotations.insert(key.to_owned(), wanted.map(|time| time.to_string()));
        }
    }
    change.annotations = annotations;
    change
}

#[cfg(test)]
mod tests;
