//! Switches that people set in the cluster: the `ConfigMap` of the circuit breaker, and a pause.
//!
//! Both are watched, so an edit takes effect at once. [`Switch::settle`] decides its
//! consequences, which hold here from then on, even if they cannot be written to the cluster.
//! Only a process that acts writes.
//!
//! Operators of NVSentinel set the circuit breaker by deleting its `ConfigMap` and creating
//! another one. The old state holds in between. If no new one appears within [`ABSENT_AFTER`],
//! the breaker counts as closed and its `ConfigMap` is created again. If there is none at the
//! start, it is created at once: there is no earlier state that could hold, and operators of
//! NVSentinel restart it to have it created.

mod watched;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ConfigMap, ConfigMapChange, ConfigMapEvent};
use contract::keys;
use fleet::brake::Hold;
use fleet::brake::pause::Pause;
use fleet::brake::switch::{BreakerState, Switch, SwitchChange};
use fleet::{LIST_DELAY, SwitchState};
use jiff::Timestamp;
use model::future::FutureTimes;
use runtime::logging::chain;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::watches::receive;
use watched::{ReadState, Watched};

/// Pause before a failed write is retried.
const RETRY: Duration = Duration::from_secs(5);

/// Time after which the circuit breaker counts as closed if its `ConfigMap` was deleted, and the
/// `ConfigMap` is created again. Leaves time to delete and create it by hand or by a script.
const ABSENT_AFTER: Duration = Duration::from_secs(10);

/// State of the two `ConfigMap`s, and of the writes to that of the circuit breaker.
pub(super) struct Switches {
    cluster: Arc<Cluster>,
    namespace: String,
    breaker: Watched,
    own: Watched,
    /// Circuit breaker in effect.
    switch: Switch,
    /// Circuit breaker as last read from its `ConfigMap`.
    read: Option<Switch>,
    /// Annotations of the circuit breaker with times in the future.
    times: FutureTimes,
    /// True while the `ConfigMap` is deleted and its absence does not count yet. `breaker.seen`
    /// still holds its last state.
    absent: bool,
    /// Time when the absence counts; `None` unless the `ConfigMap` is certainly absent.
    absence_counts_at: Option<Instant>,
    /// True from the time that the window trips the breaker until the cluster shows it.
    tripping: bool,
    pause: Option<Pause>,
    writing: JoinSet<Result<ConfigMap, ApiError>>,
    /// Version that the last write was based on; `None` if there was no `ConfigMap`.
    written_on: Option<String>,
    /// Time of the last successful write.
    written_at: Option<Instant>,
    retry_at: Option<Instant>,
    write_error: Option<String>,
    /// Last log line about the circuit breaker; `None` if its state has changed since.
    logged: Option<String>,
}

/// An event for [`Switches::handle`].
pub(super) enum SwitchEvent {
    /// An event of the watch of the circuit breaker.
    Breaker(ConfigMapEvent),
    /// An event of the watch of our own `ConfigMap`, which holds the pause.
    Own(ConfigMapEvent),
    /// The answer to a write of the circuit breaker.
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
            logged: None,
        }
    }

    /// Waits for the next event; `None` if a watch has ended. Dropping the future loses no
    /// event.
    pub(super) async fn next(&mut self) -> Option<SwitchEvent> {
        tokio::select! {
            event = receive(self.breaker.events.as_mut()) => event.map(SwitchEvent::Breaker),
            event = receive(self.own.events.as_mut()) => event.map(SwitchEvent::Own),
            Some(done) = self.writing.join_next() => {
                let lost = |error| Err(ApiError::unavailable(error));
                Some(SwitchEvent::Written(done.unwrap_or_else(lost)))
            }
        }
    }

    /// Handles an event. Returns true if the switches may have changed. Writes only if
    /// `may_write`.
    pub(super) fn handle(&mut self, event: SwitchEvent, may_write: bool, now: Timestamp) -> bool {
        match event {
            SwitchEvent::Breaker(event) => {
                if !self.handle_breaker(event) {
                    return false;
                }
                if self.absent {
                    return true; // The last state holds.
                }
                self.logged = None;
                self.read_switch(now);
            }
            SwitchEvent::Own(event) => {
                if !self.own.apply(event) {
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
            SwitchEvent::Written(answer) => {
                if self.handle_answer(answer, now) {
                    return true;
                }
            }
        }
        self.settle(false, may_write, now);
        true
    }

    /// Handles the answer to a write. Returns true if no further write is to follow now.
    fn handle_answer(&mut self, answer: Result<ConfigMap, ApiError>, now: Timestamp) -> bool {
        match answer {
            Ok(map) => {
                (self.write_error, self.logged) = (None, None);
                self.written_at = Some(Instant::now());
                // The watch may have delivered a newer state already.
                if !self.absent && !self.breaker.knows_newer(&map) {
                    self.breaker.seen = Some(map);
                    self.read_switch(now);
                }
                false
            }
            // The watch will deliver the newer state. If it has already, the switch is written
            // again.
            Err(ApiError::Conflict { .. }) => self.breaker.version() == self.written_on,
            // Deleted meanwhile, which the watch will deliver.
            Err(ApiError::NotFound { .. }) if self.written_on.is_some() => true,
            Err(error) => {
                let error = chain(&error);
                if self.write_error.as_ref() != Some(&error) {
                    tracing::warn!(
                        err = error,
                        "the ConfigMap {}/{} cannot be written; its new state holds until this \
                         process ends",
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

    /// Trips the circuit breaker, because its window is full.
    pub(super) fn trip(&mut self, may_write: bool, now: Timestamp) {
        self.settle(true, may_write, now);
    }

    /// Retries a failed write, or ends the wait for a deleted `ConfigMap`, if due. Returns true
    /// if the switches may have changed.
    pub(super) fn wake(&mut self, may_write: bool, now: Timestamp) -> bool {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        if due(self.retry_at) {
            self.retry_at = None;
            self.write(may_write);
        }
        if !due(self.absence_counts_at) {
            return false;
        }
        (self.absent, self.absence_counts_at) = (false, None);
        self.tripping = false;
        (self.breaker.seen, self.read, self.logged) = (None, None, None);
        let dropped_at = self.switch.dropped_at;
        self.read_switch(now);
        // The deletion closes the breaker. Quarantines that a person has dropped stay dropped.
        self.switch.dropped_at = dropped_at;
        self.settle(false, may_write, now);
        true
    }

    /// Returns when to call [`Self::wake`] next.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let times = [self.retry_at, self.absence_counts_at];
        times.into_iter().flatten().min()
    }

    /// Handles an event of the circuit breaker's watch. Returns true if its state has changed.
    fn handle_breaker(&mut self, event: ConfigMapEvent) -> bool {
        match &event {
            ConfigMapEvent::Missing if self.breaker.seen.is_some() => {
                (self.breaker.read_state, self.breaker.refused_since) = (ReadState::Done, None);
                if !self.absent {
                    tracing::warn!(
                        "the circuit breaker's ConfigMap was deleted: its state holds for {} s, \
                         unless another one is created",
                        ABSENT_AFTER.as_secs()
                    );
                }
                self.absent = true;
                (self.absence_counts_at).get_or_insert_with(|| Instant::now() + ABSENT_AFTER);
                return true;
            }
            ConfigMapEvent::Missing => {}
            // An older state than the one that we have written.
            ConfigMapEvent::Seen(map)
                if self.breaker.knows_newer(map)
                    && self
                        .written_at
                        .is_some_and(|at| at.elapsed() < LIST_DELAY.unsigned_abs()) =>
            {
                return false;
            }
            ConfigMapEvent::Seen(_) => {
                let made_anew = std::mem::replace(&mut self.absent, false);
                self.absence_counts_at = None;
                // A person has created it since.
                self.tripping &= !made_anew;
                return self.breaker.apply(event) || made_anew;
            }
            // The `ConfigMap` may have been created meanwhile.
            ConfigMapEvent::Failing { .. } => self.absence_counts_at = None,
        }
        self.breaker.apply(event)
    }

    /// Returns the circuit breaker as last observed in the cluster.
    fn in_cluster(&self) -> Switch {
        let seen = self.breaker.seen.as_ref();
        seen.map_or_else(Switch::default, |map| {
            Switch::read(&map.data, &map.annotations)
        })
    }

    fn read_switch(&mut self, now: Timestamp) {
        let read = self.in_cluster();
        let switch = read.following(self.read.as_ref(), &mut self.times, now);
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

    fn settle(&mut self, trip: bool, may_write: bool, now: Timestamp) {
        if self.breaker.read_state != ReadState::Done && !self.switch.exists {
            // The `ConfigMap` was not read, so nothing is logged about its absence. As nobody
            // can close the breaker then, each process starts with an empty window.
            self.switch.exists = true;
            self.switch.reset_at = Some(now);
        }
        let tripped = self.switch.state == BreakerState::Tripped;
        let trip = trip || self.tripping;
        if let Some(SwitchChange { wanted, why }) = self.switch.settle(trip, now) {
            let text = format!("circuit breaker {}: {why}", wanted.state.name());
            if self.is_new_line(&text) {
                tracing::warn!("{text}");
            }
            // Without a write the cluster will not show the trip.
            self.tripping = may_write && (self.tripping || (trip && !tripped));
            self.switch = wanted;
        }
        self.write(may_write);
    }

    /// Writes the circuit breaker in effect, if the cluster has another state. One write at a
    /// time; [`Self::handle_answer`] leads here again.
    fn write(&mut self, may_write: bool) {
        let free = self.writing.is_empty() && !self.absent;
        if !may_write || !free || self.breaker.read_state != ReadState::Done {
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

    /// Returns true if a line differs from the last one: each attempt to write produces it
    /// again.
    fn is_new_line(&mut self, text: &str) -> bool {
        let news = self.logged.as_deref() != Some(text);
        self.logged = Some(text.to_owned());
        news
    }

    /// Returns the switches for the fleet.
    pub(super) fn switched(&self) -> SwitchState {
        let unread = |state: &ReadState| match state {
            ReadState::Pending(why) => Some(why.clone()),
            ReadState::Done | ReadState::Refused(_) => None,
        };
        let breaker = match (unread(&self.breaker.read_state), &self.switch.state) {
            (Some(why), _) => Some(Hold::Unread(why)),
            (_, BreakerState::Tripped) => Some(Hold::Tripped),
            (_, BreakerState::Other(word)) => Some(Hold::Unread(format!(
                "the status in the ConfigMap {} is {word:?}, which is neither {} nor {}",
                keys::BREAKER_CONFIG_MAP,
                keys::BREAKER_CLOSED,
                keys::BREAKER_TRIPPED
            ))),
            (_, BreakerState::Closed) => None,
        };
        SwitchState {
            pause: self.pause.clone(),
            unread: unread(&self.own.read_state),
            breaker,
            dropped_at: self.switch.dropped_at,
            reset_at: self.switch.reset_at,
        }
    }

    /// Returns the name of the circuit breaker's state.
    pub(super) fn state(&self) -> &str {
        self.switch.state.name()
    }

    /// Returns notes for people on the state of the switches.
    pub(super) fn notes(&self) -> Vec<String> {
        let (namespace, name) = (&self.namespace, keys::BREAKER_CONFIG_MAP);
        let mut notes = Vec::new();
        for (watched, name) in [(&self.breaker, name), (&self.own, keys::CONFIG_MAP)] {
            if let ReadState::Refused(why) = &watched.read_state {
                notes.push(format!(
                    "the ConfigMap {namespace}/{name} cannot be read, and has no effect: \
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
                "the ConfigMap {namespace}/{name} was deleted: its state holds until another one is \
                 created; if none is within {} s, it counts as {}",
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

/// Returns the change of the `ConfigMap` from `seen` to `wanted`.
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
