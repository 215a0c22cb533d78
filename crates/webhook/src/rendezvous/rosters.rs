//! The gangs that pods ask about, as their `ConfigMap`s tell of them.
//!
//! A `ConfigMap` is read when a pod of its gang asks, and again when a watch says that it has changed, once for all
//! who wait. Of others nothing is kept: whoever may write `ConfigMap`s may write many, and large ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use cluster::{Cluster, Kind, Signal};
use preflight::roster::{MANAGED_BY, MANAGED_BY_LABEL, Roster};
use runtime::logging::{Seldom, chain};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kept::{Kept, Key};
use crate::seen::SeenMap;

/// `ConfigMap`s that are read at a time.
const MAX_READS: usize = 4;
/// Time after which a gang is forgotten that nobody asks about.
const UNASKED: Duration = Duration::from_secs(120);
/// Gangs beyond which those are let go that nobody asks about.
const MANY_GANGS: usize = 256;

/// The gangs that are asked about.
pub(super) struct Rosters {
    cluster: Arc<Cluster>,
    state: Mutex<State>,
    reads: Semaphore,
    unread: Seldom,
}

#[derive(Default)]
struct State {
    gangs: BTreeMap<Key, Arc<Asked>>,
    kept: Kept,
}

/// A gang that is asked about.
struct Asked {
    /// Held by the one who reads for all that wait.
    reading: tokio::sync::Mutex<()>,
    /// Changes when the `ConfigMap` does.
    changed: watch::Sender<()>,
    told: Mutex<Known>,
}

struct Known {
    /// As it was read; `None` where there is none.
    told: Option<Arc<Told>>,
    /// The number of changes of the `ConfigMap` that were heard of.
    changes: u64,
    /// The number of them when the reading of `told` began; `None` where it is to be read.
    read_at: Option<u64>,
    asked_at: Instant,
}

/// A gang as its `ConfigMap` tells of it.
pub(super) struct Told {
    roster: Roster,
    members: BTreeSet<String>,
    /// The `ConfigMap`'s data, as the beginning of an answer: an object whose end is missing. All members get the
    /// same, a thousand of them at the same moment.
    pub(super) data: Bytes,
}

/// Tells of the changes of a gang.
pub(super) struct Changes(watch::Receiver<()>);

// === impl Rosters ===

impl Rosters {
    pub(super) fn new(cluster: Arc<Cluster>) -> Self {
        Self {
            cluster,
            state: Mutex::default(),
            reads: Semaphore::new(MAX_READS),
            unread: Seldom::default(),
        }
    }

    /// Follows the changes of `ConfigMap`s until `cancel`.
    pub(super) async fn follow(&self, cancel: CancellationToken) {
        let managed = format!("{MANAGED_BY_LABEL}={MANAGED_BY}");
        let select = |all: cluster::Selection| all.with_labels(&managed).metadata_only();
        let mut signals =
            self.cluster
                .watch_objects_as(&config_maps(), None, select, cancel.clone());
        let follow = async {
            while let Some(signal) = signals.recv().await {
                match signal {
                    Signal::Applied(map) => {
                        let map: &SeenMap = &map;
                        let metadata = &map.metadata;
                        self.changed(&(metadata.namespace.clone(), metadata.name.clone()));
                    }
                    Signal::Deleted(full) => {
                        if let Some((namespace, name)) = full.split_once('/') {
                            self.changed(&(namespace.to_owned(), name.to_owned()));
                        }
                    }
                    // What the list lacks is gone.
                    Signal::Listed => self.all_changed(),
                    Signal::Restarted | Signal::Failing { .. } | Signal::Recovered => {}
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    fn changed(&self, key: &Key) {
        let asked = self.lock().gangs.get(key).cloned();
        if let Some(asked) = asked {
            asked.changed();
        }
    }

    pub(super) fn all_changed(&self) {
        let all: Vec<Arc<Asked>> = self.lock().gangs.values().cloned().collect();
        for asked in all {
            asked.changed();
        }
    }

    /// Returns of how many gangs something is kept, and how many bytes.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let state = self.lock();
        (state.gangs.len(), state.kept.bytes())
    }

    /// Returns the changes of a gang from now on.
    pub(super) fn changes(&self, key: &Key) -> Changes {
        Changes(self.asked(key).changed.subscribe())
    }

    /// Returns a gang as it is now, or as it was last where the API server does not say; `None` where it has no
    /// `ConfigMap`.
    pub(super) async fn told(&self, key: &Key) -> Option<Arc<Told>> {
        let asked = self.asked(key);
        let _one = asked.reading.lock().await;
        {
            let known = asked.known();
            if known.read_at == Some(known.changes) {
                return known.told.clone();
            }
        }
        let turn = self.reads.acquire().await;
        // What changes from here on is read again. Noted only once it is read: whoever asks may hang up before.
        let changes = asked.known().changes;
        let read = self
            .cluster
            .object(&config_maps(), Some(&key.0), &key.1)
            .await;
        drop(turn);
        let told = match read {
            Ok(map) => map.as_ref().and_then(Told::of).map(Arc::new),
            Err(error) => {
                if self.unread.now().is_some() {
                    let (namespace, name) = key;
                    let err = chain(&error);
                    tracing::warn!(err, "the gang {namespace}/{name} cannot be read");
                }
                return asked.known().told.clone();
            }
        };
        {
            let mut known = asked.known();
            known.told.clone_from(&told);
            known.read_at = Some(changes);
        }
        self.keep(key, told.as_deref());
        told
    }

    /// Notes what a gang takes, and lets go of others where there is no room.
    fn keep(&self, key: &Key, told: Option<&Told>) {
        let mut state = self.lock();
        let Some(told) = told else {
            return state.kept.let_go(key);
        };
        for gone in state.kept.keep(key, told.bytes()) {
            if let Some(asked) = state.gangs.get(&gone) {
                let mut known = asked.known();
                known.told = None;
                known.read_at = None;
            }
        }
    }

    /// Returns the gang, which somebody asks about now.
    fn asked(&self, key: &Key) -> Arc<Asked> {
        let mut state = self.lock();
        state.kept.uses(key);
        if let Some(asked) = state.gangs.get(key) {
            asked.known().asked_at = Instant::now();
            return Arc::clone(asked);
        }
        if state.gangs.len() >= MANY_GANGS {
            let State { gangs, kept } = &mut *state;
            gangs.retain(|key, asked| {
                let is_asked = asked.known().asked_at.elapsed() < UNASKED;
                if !is_asked {
                    kept.let_go(key);
                }
                is_asked
            });
        }
        let asked = Arc::new(Asked {
            reading: tokio::sync::Mutex::default(),
            changed: watch::Sender::default(),
            told: Mutex::new(Known {
                told: None,
                changes: 0,
                read_at: None,
                asked_at: Instant::now(),
            }),
        });
        state.gangs.insert(key.clone(), Arc::clone(&asked));
        asked
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Asked ===

impl Asked {
    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.known().changes += 1;
        self.changed.send_modify(|()| {});
    }
}

// === impl Changes ===

impl Changes {
    /// Waits for the next change.
    pub(super) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // Nobody tells any more: whoever waits has a deadline.
            std::future::pending::<()>().await;
        }
    }
}

// === impl Told ===

impl Told {
    /// Reads a `ConfigMap`; `None` where it is none of a gang.
    fn of(map: &Value) -> Option<Self> {
        let data = map.get("data")?;
        let roster = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned)).ok()?;
        let members = roster.members.iter().map(|member| member.pod.clone());
        let data = json!({"data": roster.data()}).to_string();
        Some(Self {
            members: members.collect(),
            data: data.strip_suffix('}')?.to_owned().into(),
            roster,
        })
    }

    /// Returns whether a pod has a place in it.
    pub(super) fn has(&self, pod: &str) -> bool {
        self.members.contains(pod)
    }

    /// Returns whether all members are there.
    pub(super) fn is_complete(&self) -> bool {
        self.roster.is_complete()
    }

    /// Returns whether its members have something to do.
    pub(super) fn is_settled(&self) -> bool {
        self.roster.is_settled()
    }

    /// Returns about how many bytes it takes: the names of its members twice more.
    fn bytes(&self) -> usize {
        self.data.len() * 3
    }
}

fn config_maps() -> Kind {
    Kind::new("", "v1", "configmaps")
}
