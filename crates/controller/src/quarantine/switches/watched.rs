//! A `ConfigMap` that is watched, and the state of what is known of it.

use std::time::Duration;

use cluster::{ConfigMap, ConfigMapEvent};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// A refusal that lasts so long is meant. After a start of the API server the first requests
/// may be refused, until it knows who may what.
pub(super) const REFUSED_AFTER: Duration = Duration::from_secs(60);

/// A `ConfigMap` that is watched.
pub(super) struct Watched {
    pub(super) events: Option<mpsc::Receiver<ConfigMapEvent>>,
    pub(super) seen: Option<ConfigMap>,
    /// The time since which the API server refuses it.
    pub(super) refused_since: Option<Instant>,
    /// The state of what is known of it.
    pub(super) known: Known,
}

/// The state of what is known of a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// The API server has not told yet, for this reason.
    NotYet(String),
    /// It is as last seen, which may be that it does not exist.
    Yes,
    /// The API server does not let us, for this reason. We go on without.
    Refused(String),
}

// === impl Watched ===

impl Watched {
    pub(super) fn new(events: mpsc::Receiver<ConfigMapEvent>) -> Self {
        Self {
            events: Some(events),
            seen: None,
            refused_since: None,
            known: Known::NotYet("the API server has not answered yet".to_owned()),
        }
    }

    /// Returns the version that was last seen; `None`: there is none.
    pub(super) fn version(&self) -> Option<String> {
        Some(self.seen.as_ref()?.resource_version.clone())
    }

    /// Returns whether `map` is older than what is known.
    pub(super) fn knows_newer(&self, map: &ConfigMap) -> bool {
        let version = |map: &ConfigMap| map.resource_version.parse::<u64>().ok();
        let known = self.seen.as_ref().and_then(version);
        known.is_some_and(|known| version(map).is_some_and(|version| version < known))
    }

    /// Takes an event in. Returns whether anything has changed.
    pub(super) fn take_in(&mut self, event: ConfigMapEvent) -> bool {
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
