//! What people have set in the cluster: the circuit breaker's `ConfigMap`, and a pause.
//!
//! Both are watched, so an edit takes effect at once; what follows from it is decided in
//! `domain` ([`Switch::settle`]) and holds here from that moment on, whether or not it
//! can be written down. Only who acts writes.
//!
//! Who sets the circuit breaker as NVSentinel's operators do deletes its `ConfigMap` and makes
//! another. What it said holds in between; only where none comes for [`ABSENT_AFTER`] it counts
//! as closed, and is made anew by us. Where there is none when we start, that is at once: nothing
//! is known that could hold, and NVSentinel's operators restart it to have it made.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ConfigMap, ConfigMapChange, ConfigMapEvent, ObjectError};
use contract::keys;
use domain::brake::Hold;
use domain::brake::pause::Pause;
use domain::brake::switch::{State, Switch, SwitchChange};
use domain::future::FutureTimes;
use jiff::Timestamp;
use runtime::logging::chain;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::nodes::{LIST_TAKES, receive};

/// Pause before a write that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// A refusal that lasts so long is meant. After a start of the API server the first requests
/// may be refused, until it knows who may what.
const REFUSED_AFTER: Duration = Duration::from_secs(60);

/// How long the circuit breaker's `ConfigMap` has to be absent to count as closed, and to be
/// made anew: time for who deletes and creates it, by hand or by a script, to do the second.
const ABSENT_AFTER: Duration = Duration::from_secs(10);

/// The two `ConfigMaps`, as last seen.
pub(super) struct Switches {
    cluster: Arc<Cluster>,
    namespace: String,
    breaker: Watched,
    own: Watched,
    /// What holds of the circuit breaker.
    switch: Switch,
    /// What its `ConfigMap` said when it was last read.
    read: Option<Switch>,
    /// Times of the future in its annotations.
    times: FutureTimes,
    /// It was deleted, and its absence does not count yet: it still stands in `breaker.seen`.
    absent: bool,
    /// When its absence counts; `None` while it is not known to be absent.
    absence_counts_at: Option<Instant>,
    /// The window has tripped it, and the cluster has not shown that yet.
    tripping: bool,
    pause: Option<Pause>,
    writing: JoinSet<Result<ConfigMap, ObjectError>>,
    /// The version that the last write was made on; `None`: there was none.
    written_on: Option<String>,
    /// When a write was last answered with what it has become.
    written_at: Option<Instant>,
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
            Arrival::Written(Ok(map)) => {
                (self.write_error, self.said) = (None, None);
                self.written_at = Some(Instant::now());
                // The watch may have been faster, and know what has happened since.
                if !self.absent && !self.breaker.knows_newer(&map) {
                    self.breaker.seen = Some(map);
                    self.read_switch(now);
                }
            }
            // The watch brings what has changed, and it is decided anew; where it has already,
            // what follows from it is still to be written.
            Arrival::Written(Err(ObjectError::Conflict)) => {
                if self.breaker.version() == self.written_on {
                    return true;
                }
            }
            // Deleted meanwhile; the watch brings that as well.
            Arrival::Written(Err(ObjectError::NotFound { .. })) if self.written_on.is_some() => {
                return true;
            }
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
        (self.breaker.seen, self.said) = (None, None);
        let dropped_at = self.switch.dropped_at;
        self.read_switch(now);
        // Who deletes it closes it; what a person has dropped stays dropped.
        self.switch.dropped_at = dropped_at;
        self.settle(false, write, now);
        true
    }

    /// When to call [`Self::wake`].
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
                    && self.written_at.is_some_and(|at| at.elapsed() < LIST_TAKES) =>
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

    /// The circuit breaker as it stands in the cluster.
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
        self.tripping &= switch.state == State::Closed && switch.tripped_at.is_none();
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
        let tripped = self.switch.state == State::Tripped;
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
    /// The version that was last seen; `None`: there is none.
    fn version(&self) -> Option<String> {
        Some(self.seen.as_ref()?.resource_version.clone())
    }

    /// Whether `map` is older than what is known.
    fn knows_newer(&self, map: &ConfigMap) -> bool {
        let version = |map: &ConfigMap| map.resource_version.parse::<u64>().ok();
        let known = self.seen.as_ref().and_then(version);
        known.is_some_and(|known| version(map).is_some_and(|version| version < known))
    }

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
            switches.write(false);
            assert!(!switches.is_news(&said));
            assert_eq!(switches.reset_at(), Some(at(1)));
        }
        // It is written down with it once there is a place for it.
        let annotations = change(&Switch::default(), &switches.switch).annotations;
        assert_eq!(annotations[keys::RESET_AT], Some(at(1).to_string()));
    }
    fn map(version: u32, status: &str, cursor: &str, tripped_at: Option<i64>) -> ConfigMap {
        let words = [
            (keys::BREAKER_STATUS, status),
            (keys::BREAKER_CURSOR, cursor),
        ];
        let tripped_at =
            tripped_at.map(|second| (keys::TRIPPED_AT.to_owned(), at(second).to_string()));
        ConfigMap {
            resource_version: version.to_string(),
            annotations: tripped_at.into_iter().collect(),
            data: (words.iter())
                .map(|(key, word)| ((*key).to_owned(), (*word).to_owned()))
                .collect(),
        }
    }

    fn seen(map: ConfigMap) -> Arrival {
        breaker(ConfigMapEvent::Seen(map))
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_deleted_holds_for_a_while_and_its_successor_is_an_edit() {
        for (seconds, successor, closed) in [
            (1, Some("CREATE"), true),
            (9, Some("RESUME"), true),
            (9, None, false),
            (10, None, true),
        ] {
            let mut switches = switches().await;
            let tripped = map(1, "TRIPPED", "RESUME", Some(1));
            switches.take_in(seen(tripped), false, at(2));
            switches.take_in(breaker(ConfigMapEvent::Missing), true, at(3));
            assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
            // A failure in between: the time in which it is known to be absent counts.
            switches.take_in(failing(false), true, at(3));
            assert_eq!(switches.wake_at(), None);
            switches.take_in(breaker(ConfigMapEvent::Missing), true, at(3));
            tokio::time::advance(Duration::from_secs(seconds)).await;
            switches.wake(true, at(4));
            assert_eq!(switches.absent, seconds < 10);
            assert_eq!(
                switches.writing.is_empty(),
                seconds < 10,
                "only then made by us"
            );
            if let Some(cursor) = successor {
                switches.take_in(seen(map(5, "CLOSED", cursor, None)), false, at(4));
                assert!(!switches.absent && switches.wake_at().is_none());
            }
            assert_eq!(switches.state() == keys::BREAKER_CLOSED, closed);
            assert_eq!(switches.reset_at(), closed.then_some(at(4)));
            let dropped = (successor == Some("CREATE")).then_some(at(4));
            assert_eq!(switches.dropped_at(), dropped, "{seconds} {successor:?}");
        }
    }

    #[tokio::test]
    async fn a_trip_while_a_write_is_under_way_is_kept_and_written_behind_it() {
        let mut switches = switches().await;
        switches.take_in(breaker(ConfigMapEvent::Missing), true, at(1));
        assert_eq!(switches.writing.len(), 1, "it is made");
        switches.trip(true, at(2));
        // The watch may be faster than the answer.
        switches.take_in(seen(map(1, "CLOSED", "RESUME", None)), true, at(3));
        assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
        switches.writing = JoinSet::new();
        let made = Arrival::Written(Ok(map(1, "CLOSED", "RESUME", None)));
        switches.take_in(made, true, at(3));
        assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
        assert_eq!(switches.writing.len(), 1);
        switches.writing = JoinSet::new();
        let made = Arrival::Written(Ok(map(2, "TRIPPED", "RESUME", Some(3))));
        switches.take_in(made, true, at(4));
        // Or slower.
        switches.take_in(seen(map(1, "CLOSED", "RESUME", None)), true, at(4));
        assert_eq!(switches.state(), keys::BREAKER_TRIPPED);
        // Then a person closes it.
        switches.take_in(seen(map(3, "CLOSED", "RESUME", Some(3))), true, at(5));
        assert_eq!(switches.state(), keys::BREAKER_CLOSED);
        assert_eq!(switches.reset_at(), Some(at(5)));
    }

    #[tokio::test]
    async fn an_edit_while_a_write_is_under_way_is_taken_in_and_written_behind_it() {
        let mut switches = switches().await;
        switches.take_in(seen(map(1, "TRIPPED", "RESUME", None)), true, at(1));
        switches.take_in(seen(map(2, "CLOSED", "CREATE", Some(1))), true, at(2));
        assert_eq!(switches.dropped_at(), Some(at(2)));
        switches.writing = JoinSet::new();
        let conflict = || Arrival::Written(Err(ObjectError::Conflict));
        switches.take_in(conflict(), true, at(3));
        assert_eq!(switches.writing.len(), 1, "on what was seen meanwhile");
        switches.writing = JoinSet::new();
        switches.take_in(conflict(), true, at(4));
        assert!(
            switches.writing.is_empty(),
            "the watch has to bring it first"
        );
        assert_eq!(switches.dropped_at(), Some(at(2)));
    }

    #[tokio::test]
    async fn a_drop_in_the_future_dismisses_what_was_before_it_was_seen() {
        let mut switches = switches().await;
        for (version, second) in [(1, 5), (2, 9)] {
            let mut map = map(version, "CLOSED", "RESUME", None);
            let future = (keys::DROPPED_AT.to_owned(), Timestamp::MAX.to_string());
            map.annotations.extend([future]);
            // Where it cannot be written, it is read again and again.
            switches.take_in(seen(map), false, at(second));
            assert_eq!(switches.dropped_at(), Some(at(5)));
            assert!(switches.notes()[0].contains(keys::DROPPED_AT));
            let change = change(&switches.in_cluster(), &switches.switch);
            assert_eq!(
                change.annotations[keys::DROPPED_AT],
                Some(at(5).to_string())
            );
        }
    }
}
