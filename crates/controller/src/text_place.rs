//! Texts that people keep in a file or a `ConfigMap`, and that are read again whenever they change:
//! the policy, and the rules of the analysis.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ConfigMapEvent};
use contract::findings::MAX_FILE_BYTES;
use runtime::file_stamp::FileStamp;
use runtime::text_file;
use tokio_util::sync::CancellationToken;

/// Pause between two checks of a file. A change takes effect once two checks in a row find the
/// same file: an editor that writes in place empties the file first, and an empty policy would
/// return every node to service.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Place of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextPlace {
    /// A file at this path.
    File(PathBuf),
    /// A key of a `ConfigMap` of the cluster.
    ConfigMap {
        /// Namespace of the `ConfigMap`.
        namespace: String,
        /// Name of the `ConfigMap`.
        name: String,
        /// Key whose value is the text.
        key: String,
    },
}

/// Result of reading a text.
pub(crate) enum Reading {
    /// The text as it is now, changed or not.
    Text(String),
    /// The text is not there, for this reason.
    Missing(String),
    /// The text cannot be followed, for this reason.
    Failing(String),
}

// === impl TextPlace ===

impl std::fmt::Display for TextPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::ConfigMap {
                namespace,
                name,
                key,
            } => write!(f, "configmap:{namespace}/{name}/{key}"),
        }
    }
}

impl TextPlace {
    /// Passes each reading to `take` until `cancel`. Without a cluster a `ConfigMap` is not read.
    pub(crate) async fn follow(
        &self,
        cluster: Option<Arc<Cluster>>,
        cancel: CancellationToken,
        take: impl FnMut(Reading),
    ) {
        let stop = cancel.clone();
        match self {
            Self::File(path) => {
                stop.run_until_cancelled(follow_file(path, take)).await;
            }
            Self::ConfigMap {
                namespace,
                name,
                key,
            } => {
                let Some(cluster) = cluster else {
                    return;
                };
                let events = cluster.watch_config_map(namespace, name, cancel);
                let following = follow_config_map(events, key, take);
                stop.run_until_cancelled(following).await;
            }
        }
    }
}

async fn follow_file(path: &Path, mut take: impl FnMut(Reading)) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Nothing counts as read yet, so a change right after the start is noticed.
    let mut taken = None;
    let mut last = None;
    loop {
        looks.tick().await;
        // Follows links: a mounted `ConfigMap` changes by the target of a link.
        let stamp = std::fs::metadata(path)
            .map(|metadata| FileStamp::of(&metadata))
            .map_err(|error| error.kind());
        let settled = last == Some(stamp);
        last = Some(stamp);
        if !settled || taken == last {
            continue;
        }
        taken = last;
        match text_file::read(path, MAX_FILE_BYTES) {
            Ok(text) => take(Reading::Text(text)),
            Err(error) => {
                // A file that exists may be readable at the next check.
                taken = stamp.is_err().then_some(stamp);
                take(Reading::Missing(format!("it cannot be read: {error}")));
            }
        }
    }
}

async fn follow_config_map(
    mut events: tokio::sync::mpsc::Receiver<ConfigMapEvent>,
    key: &str,
    mut take: impl FnMut(Reading),
) {
    while let Some(event) = events.recv().await {
        take(match event {
            ConfigMapEvent::Seen(map) => match map.data.get(key) {
                Some(text) => Reading::Text(text.clone()),
                None => Reading::Missing(format!("the ConfigMap has no key {key}")),
            },
            ConfigMapEvent::Missing => {
                Reading::Missing("the cluster has no such ConfigMap".to_owned())
            }
            ConfigMapEvent::Failing { error, .. } => {
                Reading::Failing(format!("the ConfigMap cannot be watched: {error}"))
            }
        });
    }
}
