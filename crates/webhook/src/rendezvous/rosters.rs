//! Cache of the gang `ConfigMap`s that pods ask about.
//!
//! A `ConfigMap` is read when a pod of its gang asks, and again after the watch reports a
//! change, once for all waiting pods. No others are cached: anybody with write access can
//! create many large `ConfigMap`s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use cluster::{Cluster, ObjectKind, Selection, Signal};
use preflight::roster::{MANAGED_BY, MANAGED_BY_LABEL, Roster};
use runtime::logging::{Seldom, chain};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kept::{MemoryBudget, ObjectKey};
use crate::seen::WatchedMap;

/// Most concurrent reads of `ConfigMap`s.
const MAX_READS: usize = 4;
/// Time without a request until a gang is removed.
const UNREQUESTED: Duration = Duration::from_secs(120);
/// Number of gangs above which those without requests are removed.
const MANY_GANGS: usize = 256;

/// Gangs that pods ask about.
pub(super) struct Rosters {
    cluster: Arc<Cluster>,
    state: Mutex<State>,
    reads: Semaphore,
    unread: Seldom,
}

#[derive(Default)]
struct State {
    gangs: BTreeMap<ObjectKey, Arc<Entry>>,
    memory: MemoryBudget,
}

/// Gang that pods ask about.
struct Entry {
    /// Held by the task that reads for all waiting ones.
    reading: tokio::sync::Mutex<()>,
    /// Notifies of changes of the `ConfigMap`.
    changed: watch::Sender<()>,
    cached: Mutex<Cached>,
}

struct Cached {
    /// Contents of the last read; `None` if the `ConfigMap` does not exist.
    contents: Option<Arc<Contents>>,
    /// Number of changes that the watch has reported.
    changes: u64,
    /// Value of `changes` when the last read began; `None` if a read is needed.
    read_at: Option<u64>,
    requested_at: Instant,
}

/// Contents of a gang's `ConfigMap`.
pub(super) struct Contents {
    roster: Roster,
    members: BTreeSet<String>,
    /// Data of the `ConfigMap` as the start of the JSON answer, without the closing brace. It
    /// is shared, since a thousand members may get it at the same moment.
    pub(super) data: Bytes,
}

/// Receiver of the changes of a gang.
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

    /// Watches the `ConfigMap`s until `cancel`.
    pub(super) async fn follow(&self, cancel: CancellationToken) {
        let managed = format!("{MANAGED_BY_LABEL}={MANAGED_BY}");
        let maps = Selection::of_kind(&config_maps(), None).with_labels(&managed);
        let mut signals = self.cluster.watch(maps.metadata_only(), cancel.clone());
        let follow = async {
            while let Some(signal) = signals.recv().await {
                match signal {
                    Signal::Applied(map) => {
                        let map: &WatchedMap = &map;
                        let metadata = &map.metadata;
                        self.changed(&(metadata.namespace.clone(), metadata.name.clone()));
                    }
                    Signal::Deleted(full) => {
                        if let Some((namespace, name)) = full.split_once('/') {
                            self.changed(&(namespace.to_owned(), name.to_owned()));
                        }
                    }
                    // Objects missing from the list were deleted.
                    Signal::Listed => self.all_changed(),
                    Signal::Restarted | Signal::Failing { .. } | Signal::Recovered => {}
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    fn changed(&self, key: &ObjectKey) {
        let entry = self.lock().gangs.get(key).cloned();
        if let Some(entry) = entry {
            entry.changed();
        }
    }

    pub(super) fn all_changed(&self) {
        let all: Vec<Arc<Entry>> = self.lock().gangs.values().cloned().collect();
        for entry in all {
            entry.changed();
        }
    }

    /// Returns the number of cached gangs and their bytes.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        let state = self.lock();
        (state.gangs.len(), state.memory.bytes())
    }

    /// Returns a receiver of the gang's changes from now on.
    pub(super) fn changes(&self, key: &ObjectKey) -> Changes {
        Changes(self.entry(key).changed.subscribe())
    }

    /// Returns the current contents of a gang, or the last known ones if the API server fails;
    /// `None` if the `ConfigMap` does not exist.
    pub(super) async fn contents(&self, key: &ObjectKey) -> Option<Arc<Contents>> {
        let entry = self.entry(key);
        let _one = entry.reading.lock().await;
        {
            let cached = entry.cached();
            if cached.read_at == Some(cached.changes) {
                return cached.contents.clone();
            }
        }
        let turn = self.reads.acquire().await;
        // A change during the read causes another read. The count is stored only after the
        // read, because a client that hangs up cancels it.
        let changes = entry.cached().changes;
        let read = self
            .cluster
            .object(&config_maps(), Some(&key.0), &key.1)
            .await;
        drop(turn);
        let contents = match read {
            Ok(map) => map.as_ref().and_then(Contents::of).map(Arc::new),
            Err(error) => {
                if self.unread.now().is_some() {
                    let (namespace, name) = key;
                    let err = chain(&error);
                    tracing::warn!(err, "the gang {namespace}/{name} cannot be read");
                }
                return entry.cached().contents.clone();
            }
        };
        {
            let mut cached = entry.cached();
            cached.contents.clone_from(&contents);
            cached.read_at = Some(changes);
        }
        self.record(key, contents.as_deref());
        contents
    }

    /// Records the size of a gang, and evicts others if there is no room.
    fn record(&self, key: &ObjectKey, contents: Option<&Contents>) {
        let mut state = self.lock();
        let Some(contents) = contents else {
            return state.memory.remove(key);
        };
        for gone in state.memory.add(key, contents.bytes()) {
            if let Some(entry) = state.gangs.get(&gone) {
                let mut cached = entry.cached();
                cached.contents = None;
                cached.read_at = None;
            }
        }
    }

    /// Returns the entry of a gang, and marks it as requested now.
    fn entry(&self, key: &ObjectKey) -> Arc<Entry> {
        let mut state = self.lock();
        state.memory.touch(key);
        if let Some(entry) = state.gangs.get(key) {
            entry.cached().requested_at = Instant::now();
            return Arc::clone(entry);
        }
        if state.gangs.len() >= MANY_GANGS {
            let State { gangs, memory } = &mut *state;
            gangs.retain(|key, entry| {
                let is_wanted = entry.cached().requested_at.elapsed() < UNREQUESTED;
                if !is_wanted {
                    memory.remove(key);
                }
                is_wanted
            });
        }
        let entry = Arc::new(Entry {
            reading: tokio::sync::Mutex::default(),
            changed: watch::Sender::default(),
            cached: Mutex::new(Cached {
                contents: None,
                changes: 0,
                read_at: None,
                requested_at: Instant::now(),
            }),
        });
        state.gangs.insert(key.clone(), Arc::clone(&entry));
        entry
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Entry ===

impl Entry {
    fn cached(&self) -> std::sync::MutexGuard<'_, Cached> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.cached().changes += 1;
        self.changed.send_modify(|()| {});
    }
}

// === impl Changes ===

impl Changes {
    /// Waits for the next change.
    pub(super) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // The sender is gone; every caller has a deadline.
            std::future::pending::<()>().await;
        }
    }
}

// === impl Contents ===

impl Contents {
    /// Parses a `ConfigMap`; `None` if it is not a gang's.
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

    /// Returns true if the pod is a member.
    pub(super) fn has(&self, pod: &str) -> bool {
        self.members.contains(pod)
    }

    /// Returns true if all members are present.
    pub(super) fn is_complete(&self) -> bool {
        self.roster.is_complete()
    }

    /// Returns true if the members need not wait.
    pub(super) fn is_settled(&self) -> bool {
        self.roster.is_settled()
    }

    /// Returns the approximate size in bytes: the data, and the members' names twice.
    fn bytes(&self) -> usize {
        self.data.len() * 3
    }
}

fn config_maps() -> ObjectKind {
    ObjectKind::new("", "v1", "configmaps")
}
