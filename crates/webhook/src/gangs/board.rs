//! State of all gangs: their pods and `ConfigMap`s, as last received from the watches.

mod update;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use cluster::Signal;
use model::listing::Listing;
use preflight::config::Config;
use preflight::gang::{Gang, SizeFrom};
use preflight::inject::{checks_of, is_through};
use preflight::roster::{PREFIX, config_map_name};
use runtime::backoff::Backoff;
use runtime::logging::Seldom;
use serde_json::Value;

use super::RETRY;
use super::accused::{GangOutcome, Suspects, Unreached};
use crate::discoveries::Discoveries;
use crate::kept::MemoryBudget;
use crate::seen::{MapMetadata, WatchedMap, WatchedPod};
pub(super) use update::MapUpdate;

/// Time that the `ConfigMap` of a gang without pods is kept, since its pods may be recreated.
const KEPT: Duration = Duration::from_secs(60);

/// Time without a new pod after which members without checks are counted for an incomplete
/// gang. It doubles with each count, at most [`MOST_COUNTS`] times.
const SETTLED: Duration = Duration::from_secs(5);
const MOST_COUNTS: u32 = 5;
/// Longest pause after failed reconciliations of a gang. An immutable `ConfigMap` or an
/// exhausted quota may last for long.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Namespace and name of a gang's `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GangKey {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// State of all gangs.
#[derive(Default)]
pub(super) struct Board {
    gangs: BTreeMap<GangKey, Known>,
    /// Gang of each pod, by `namespace/name`.
    of_pod: Listing<String, GangKey>,
    queue: BTreeSet<GangKey>,
    /// Gangs to reconcile later, and when.
    delayed: BTreeMap<GangKey, Instant>,
    /// Memory budget of the `ConfigMap`s that were read.
    memory: MemoryBudget,
    /// Gangs that have a `ConfigMap`.
    maps: Listing<GangKey, ()>,
    /// Rate limit of the log line about gangs with colliding names.
    collisions: Seldom,
    /// Rate limit of the log line about surplus pods.
    crowded: Seldom,
}

/// State of one gang.
#[derive(Default)]
struct Known {
    gang: Option<Gang>,
    /// Pods with gang checks, by name.
    pods: BTreeMap<String, MemberPod>,
    map: Option<Map>,
    /// Last write of an existing `ConfigMap`.
    written_at: Option<Instant>,
    /// Pauses between failed reconciliations; `None` after a successful one.
    retries: Option<Backoff>,
    empty_since: Option<Instant>,
    surplus: BTreeSet<String>,
    /// Members without gang checks at the last count; they never join.
    without_checks: u32,
    /// Time of the next count while the gang is incomplete, and the number of counts so far.
    count_at: Option<Instant>,
    counted: u32,
    suspects: Suspects,
}

/// `ConfigMap` of a gang.
struct Map {
    uid: String,
    /// Version that was last watched, read or written.
    version: String,
    /// Whole object at that version; `None` until it is read.
    read: Option<Value>,
}

struct MemberPod {
    /// IP address, once the pod has one.
    address: Option<IpAddr>,
    checks: String,
    /// True if the pod has completed the gang checks.
    is_through: bool,
    outcome: GangOutcome,
}

// === impl Board ===

impl Board {
    /// Handles an event of the pod watch.
    pub(super) fn pod(&mut self, signal: Signal<WatchedPod>, config: &Config, by: &Discoveries) {
        match signal {
            Signal::Restarted => self.of_pod.begin(),
            Signal::Listed => {
                for (pod, gang) in self.of_pod.end() {
                    self.left(&pod, gang);
                }
            }
            Signal::Applied(pod) => self.applied(&pod.0, config, by),
            Signal::Deleted(pod) => self.deleted(&pod),
            Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    fn applied(&mut self, pod: &Value, config: &Config, by: &Discoveries) {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        let (Some(namespace), Some(name)) = (text("/metadata/namespace"), text("/metadata/name"))
        else {
            return;
        };
        let full = format!("{namespace}/{name}");
        let checks = checks_of(pod, config).join(",");
        // A pod without gang checks never joins the others.
        if is_over(pod) || checks.is_empty() {
            return self.deleted(&full);
        }
        let Ok(Some(gang)) = Gang::of(pod, namespace, &by.of(namespace)) else {
            return self.deleted(&full);
        };
        let key = GangKey {
            namespace: namespace.to_owned(),
            name: config_map_name(&gang.id()),
        };
        let known = self.gangs.entry(key.clone()).or_default();
        let others = known.pods.keys().any(|pod| pod != name);
        if let Some(first) = known
            .gang
            .as_ref()
            .filter(|first| others && !is_same(first, &gang))
        {
            if let Some(not_logged_before) = self.collisions.now() {
                tracing::warn!(
                    pod = full, map = %key, first = ?first.size, second = ?gang.size, not_logged_before,
                    "two gangs have the same ConfigMap name; the pods of the second are ignored"
                );
            }
            return self.deleted(&full);
        }
        known.gang = Some(gang);
        known.empty_since = None;
        let address = text("/status/podIP").and_then(|address| address.parse().ok());
        let pod = MemberPod {
            address,
            checks,
            is_through: is_through(pod, config),
            outcome: GangOutcome::of(pod, config),
        };
        if known.pods.insert(name.to_owned(), pod).is_none() {
            known.count_at = Some(Instant::now() + SETTLED);
            known.counted = 0;
        }
        self.of_pod.set(full, key.clone());
        self.queue.insert(key);
    }

    fn deleted(&mut self, pod: &str) {
        if let Some(gang) = self.of_pod.remove(pod) {
            self.left(pod, gang);
        }
    }

    /// Removes a pod from its gang.
    fn left(&mut self, pod: &str, key: GangKey) {
        if let Some(known) = self.gangs.get_mut(&key) {
            let name = pod.split_once('/').map_or(pod, |(_, name)| name);
            known.pods.remove(name);
            if known.pods.is_empty() {
                known.empty_since = Some(Instant::now());
                self.forget(&key);
            }
        }
        self.queue.insert(key);
    }

    /// Handles an event of the `ConfigMap` watch.
    pub(super) fn config_map(&mut self, signal: Signal<WatchedMap>) {
        match signal {
            Signal::Restarted => self.maps.begin(),
            Signal::Listed => {
                for (key, ()) in self.maps.end() {
                    self.map_deleted(key);
                }
            }
            Signal::Applied(map) => {
                let seen = &map.metadata;
                // Other ConfigMaps may carry the same label.
                if !seen.name.starts_with(PREFIX) {
                    return;
                }
                let key = GangKey {
                    namespace: seen.namespace.clone(),
                    name: seen.name.clone(),
                };
                self.maps.set(key.clone(), ());
                let known = self.gangs.entry(key.clone()).or_default();
                if known.pods.is_empty() {
                    known.empty_since.get_or_insert_with(Instant::now);
                }
                if known.map.as_ref().is_some_and(|map| map.is_current(seen)) {
                    return;
                }
                let map = Map {
                    uid: seen.uid.clone(),
                    version: seen.resource_version.clone(),
                    read: None,
                };
                self.set_map(&key, Some(map));
                self.queue.insert(key);
            }
            Signal::Deleted(full) => {
                if let Some((namespace, name)) = full.split_once('/') {
                    self.map_deleted(GangKey {
                        namespace: namespace.to_owned(),
                        name: name.to_owned(),
                    });
                }
            }
            Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    fn map_deleted(&mut self, key: GangKey) {
        if self.gangs.contains_key(&key) {
            self.set_map(&key, None);
            self.queue.insert(key);
        }
    }

    /// Replaces the state of a gang's `ConfigMap`.
    fn set_map(&mut self, key: &GangKey, map: Option<Map>) {
        let Some(known) = self.gangs.get_mut(key) else {
            return;
        };
        let bytes = map.as_ref().and_then(|map| map.read.as_ref());
        let bytes = bytes.map(|read| read.to_string().len());
        if map.is_some() {
            self.maps.set(key.clone(), ());
        } else {
            self.maps.remove(key);
        }
        known.map = map;
        let name = (key.namespace.clone(), key.name.clone());
        let gone = if let Some(bytes) = bytes {
            self.memory.add(&name, bytes)
        } else {
            self.memory.remove(&name);
            Vec::new()
        };
        for (namespace, name) in gone {
            self.forget(&GangKey { namespace, name });
        }
    }

    /// Drops the contents of a gang's `ConfigMap`. They are read again at the next
    /// reconciliation.
    fn forget(&mut self, key: &GangKey) {
        let known = self.gangs.get_mut(key);
        if let Some(map) = known.and_then(|known| known.map.as_mut()) {
            map.read = None;
        }
        self.memory
            .remove(&(key.namespace.clone(), key.name.clone()));
    }

    /// Returns true if a gang has a `ConfigMap`.
    pub(super) fn has_map(&self, key: &GangKey) -> bool {
        self.gangs.get(key).is_some_and(|known| known.map.is_some())
    }

    /// Returns true if the `ConfigMap` of a gang must be read before reconciling.
    pub(super) fn is_unread(&self, key: &GangKey) -> bool {
        let map = self.gangs.get(key).and_then(|known| known.map.as_ref());
        map.is_some_and(|map| map.read.is_none())
    }

    /// Stores the `ConfigMap` of a gang; `None` if it was deleted.
    pub(super) fn set_read(&mut self, key: &GangKey, map: Option<Value>) {
        self.set_map(key, map.map(Map::of));
    }

    /// Returns true once all pods and `ConfigMap`s are listed.
    pub(super) fn is_listed(&self) -> bool {
        self.of_pod.is_complete() && self.maps.is_complete()
    }

    /// Takes the next gang to reconcile.
    pub(super) fn next(&mut self) -> Option<GangKey> {
        let key = self.queue.pop_first()?;
        self.delayed.remove(&key);
        Some(key)
    }

    /// Schedules another reconciliation, with a growing pause. An event about the gang still
    /// reconciles it at once.
    pub(super) fn failed(&mut self, key: &GangKey) {
        if let Some(known) = self.gangs.get_mut(key) {
            let retries = &mut known.retries;
            let retries = retries.get_or_insert_with(|| Backoff::new(RETRY, LONGEST_RETRY));
            self.delayed
                .insert(key.clone(), Instant::now() + retries.pause());
        }
    }

    /// Resets the pause after a successful reconciliation.
    pub(super) fn succeeded(&mut self, key: &GangKey) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.retries = None;
        }
    }

    /// Returns the time when the next delayed gang is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.delayed.values().min().copied()
    }

    /// Queues the delayed gangs that are due.
    pub(super) fn queue_due(&mut self) {
        let now = Instant::now();
        let (queue, delayed) = (&mut self.queue, &mut self.delayed);
        delayed.retain(|key, at| {
            let is_due = *at <= now;
            if is_due {
                queue.insert(key.clone());
            }
            !is_due
        });
    }

    /// Queues all gangs except the delayed ones.
    pub(super) fn queue_all(&mut self) {
        let delayed = &self.delayed;
        let all = self.gangs.keys().filter(|key| !delayed.contains_key(key));
        self.queue.extend(all.cloned());
    }

    /// Returns a gang, if it has pods.
    pub(super) fn gang(&self, key: &GangKey) -> Option<Gang> {
        let known = self.gangs.get(key)?;
        known.gang.clone().filter(|_| !known.pods.is_empty())
    }

    /// Returns the number of a gang's pods with gang checks.
    pub(super) fn pods(&self, key: &GangKey) -> u32 {
        let pods = self.gangs.get(key).map_or(0, |known| known.pods.len());
        u32::try_from(pods).unwrap_or(u32::MAX)
    }

    /// Returns true if members without checks should be counted now, because the gang is
    /// incomplete.
    pub(super) fn is_short(&self, key: &GangKey, expected: u32) -> bool {
        let Some(known) = self.gangs.get(key) else {
            return false;
        };
        let there = self.pods(key).saturating_add(known.without_checks);
        there < expected && known.count_at.is_some_and(|at| at <= Instant::now())
    }

    /// Stores the number of members without checks.
    pub(super) fn count_without_checks(&mut self, key: &GangKey, count: u32) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.without_checks = count;
            known.counted = (known.counted + 1).min(MOST_COUNTS);
            known.count_at = Some(Instant::now() + SETTLED * 2_u32.pow(known.counted));
        }
    }

    /// Returns the expected number of members with checks.
    pub(super) fn with_checks(&self, key: &GangKey, expected: u32) -> u32 {
        let without = self.gangs.get(key).map_or(0, |known| known.without_checks);
        expected.saturating_sub(without).max(1)
    }

    /// Returns the members to report because a majority does not reach them.
    pub(super) fn unreached(&mut self, key: &GangKey, round: Duration) -> Vec<Unreached> {
        let Some(known) = self.gangs.get_mut(key) else {
            return Vec::new();
        };
        let members = known.pods.iter();
        let members = members.filter(|(name, _)| !known.surplus.contains(*name));
        let outcomes = members.map(|(name, pod)| (name.as_str(), &pod.outcome));
        known.suspects.due(&outcomes.collect(), round)
    }

    /// Marks a member as reported.
    pub(super) fn mark_reported(&mut self, key: &GangKey, pod: &str) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.suspects.mark_reported(pod);
        }
    }

    /// Marks a member as not reported, after a failed attempt.
    pub(super) fn mark_unreported(&mut self, key: &GangKey, pod: &str) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.suspects.mark_unreported(pod);
        }
    }

    /// Ends all delays before counts and reports.
    #[cfg(test)]
    pub(super) fn settle(&mut self) {
        for known in self.gangs.values_mut() {
            known.count_at = known.count_at.map(|_| Instant::now());
            known.suspects.settle();
        }
    }

    /// Returns the number of gangs with pods.
    pub(super) fn gangs(&self) -> i64 {
        let there = self.gangs.values().filter(|known| !known.pods.is_empty());
        i64::try_from(there.count()).unwrap_or(i64::MAX)
    }

    /// Returns the number of pods beyond the size of their gang.
    pub(super) fn surplus(&self) -> i64 {
        let surplus = self.gangs.values().map(|known| known.surplus.len());
        i64::try_from(surplus.sum::<usize>()).unwrap_or(i64::MAX)
    }

    /// Stores the `ConfigMap` as written.
    pub(super) fn wrote(&mut self, key: &GangKey, map: Value) {
        self.set_read(key, Some(map));
    }

    /// Returns the uid of a `ConfigMap` whose gang has had no pods for long. A gang without a
    /// `ConfigMap` is forgotten.
    pub(super) fn left_over(&mut self, key: &GangKey) -> Option<String> {
        let known = self.gangs.get(key)?;
        let Some(map) = &known.map else {
            self.gangs.remove(key);
            self.delayed.remove(key);
            return None;
        };
        let is_old = known
            .empty_since
            .is_some_and(|since| since.elapsed() >= KEPT);
        is_old.then(|| map.uid.clone())
    }
}

// === impl Map ===

impl Map {
    /// Wraps a `ConfigMap` as read.
    fn of(mut map: Value) -> Self {
        if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        let text = |pointer: &str| {
            let text = map.pointer(pointer).and_then(Value::as_str);
            text.unwrap_or_default().to_owned()
        };
        Self {
            uid: text("/metadata/uid"),
            version: text("/metadata/resourceVersion"),
            read: Some(map),
        }
    }

    /// Returns true if a watch event contains nothing new. Our own writes come back through the
    /// watch, possibly after a newer version was written.
    fn is_current(&self, seen: &MapMetadata) -> bool {
        let number = |version: &str| version.parse::<u64>().ok();
        let is_older = number(&seen.resource_version)
            .zip(number(&self.version))
            .is_some_and(|(seen, known)| seen <= known);
        self.uid == seen.uid && (self.version == seen.resource_version || is_older)
    }
}

/// Returns true if two gangs are the same. Ids join names by dashes, and dashes also replace
/// characters that names in Kubernetes cannot have, so different gangs can have equal ids or
/// equal `ConfigMap` names.
fn is_same(one: &Gang, other: &Gang) -> bool {
    let object = |gang: &Gang| match &gang.size {
        SizeFrom::Object { name, group, .. } => Some((name.clone(), group.clone())),
        SizeFrom::Pods(_) => None,
    };
    one.id() == other.id() && object(one) == object(other)
}

/// Returns true if a pod has ended or is being deleted.
pub(super) fn is_over(pod: &Value) -> bool {
    let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
    let has_ended = matches!(text("/status/phase"), Some("Succeeded" | "Failed"));
    has_ended || text("/metadata/deletionTimestamp").is_some()
}

impl fmt::Display for GangKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests;
