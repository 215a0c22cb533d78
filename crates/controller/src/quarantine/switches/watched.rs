//! A watched `ConfigMap` and the state of its watch.

use std::time::Duration;

use cluster::{ConfigMap, ConfigMapEvent};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Time after which a refusal counts as permanent. An API server that has just started may
/// refuse the first requests, until it has loaded its roles.
pub(super) const REFUSED_AFTER: Duration = Duration::from_secs(60);

/// A `ConfigMap` that is watched.
pub(super) struct Watched {
    pub(super) events: Option<mpsc::Receiver<ConfigMapEvent>>,
    pub(super) seen: Option<ConfigMap>,
    /// Start of the current refusals by the API server.
    pub(super) refused_since: Option<Instant>,
    pub(super) read_state: ReadState,
}

/// State of reading a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReadState {
    /// Not read yet, for this reason.
    Pending(String),
    /// Read; it may be absent.
    Done,
    /// The API server refuses to let us read it, for this reason. Decisions ignore it.
    Refused(String),
}

// === impl Watched ===

impl Watched {
    pub(super) fn new(events: mpsc::Receiver<ConfigMapEvent>) -> Self {
        Self {
            events: Some(events),
            seen: None,
            refused_since: None,
            read_state: ReadState::Pending("the API server has not answered yet".to_owned()),
        }
    }

    /// Returns the version that was last observed; `None` if there is no `ConfigMap`.
    pub(super) fn version(&self) -> Option<String> {
        Some(self.seen.as_ref()?.resource_version.clone())
    }

    /// Returns true if `map` is older than the last observed version.
    pub(super) fn knows_newer(&self, map: &ConfigMap) -> bool {
        let version = |map: &ConfigMap| map.resource_version.parse::<u64>().ok();
        let known = self.seen.as_ref().and_then(version);
        known.is_some_and(|known| version(map).is_some_and(|version| version < known))
    }

    /// Applies an event. Returns true if the content or the state of reading has changed.
    pub(super) fn apply(&mut self, event: ConfigMapEvent) -> bool {
        let refused_since = match &event {
            ConfigMapEvent::Failing { refused: true, .. } => {
                self.refused_since.or(Some(Instant::now()))
            }
            _ => None,
        };
        self.refused_since = refused_since;
        let refused = refused_since.is_some_and(|since| since.elapsed() >= REFUSED_AFTER);
        let before = (self.seen.clone(), self.read_state.clone());
        match event {
            ConfigMapEvent::Seen(map) => {
                self.seen = Some(map);
                self.read_state = ReadState::Done;
            }
            ConfigMapEvent::Missing => {
                self.seen = None;
                self.read_state = ReadState::Done;
            }
            ConfigMapEvent::Failing { error, .. } => {
                let before = std::mem::replace(&mut self.read_state, ReadState::Done);
                self.read_state = match before {
                    _ if refused => ReadState::Refused(error),
                    ReadState::Pending(_) => ReadState::Pending(error),
                    // The last state stays.
                    before => before,
                };
            }
        }
        before != (self.seen.clone(), self.read_state.clone())
    }
}
