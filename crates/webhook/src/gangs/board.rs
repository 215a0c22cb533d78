//! What is known of gangs: their pods, and their `ConfigMap`s.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use cluster::Signal;
use model::listing::Listing;
use preflight::config::Config;
use preflight::gang::{Gang, SizeFrom};
use preflight::inject::{checks_of, is_through};
use preflight::roster::{
    GANG_ID_LABEL, MANAGED_BY, MANAGED_BY_LABEL, Member, PREFIX, Roster, config_map_name,
    gang_label,
};
use runtime::backoff::Backoff;
use runtime::logging::Seldom;
use serde_json::{Value, json};

use super::accused::{Accused, Dock, Word};
use super::{RETRY, few};
use crate::discoveries::Discoveries;
use crate::kept::Kept;
use crate::seen::{MapMetadata, SeenMap, SeenPod};

/// Time for which the `ConfigMap` of a gang without pods is kept: its pods may be made anew.
const KEPT: Duration = Duration::from_secs(60);

/// Time for which no pod of a gang has come, after which those without checks are looked for that it may be
/// short of. It is doubled each time, up to [`MOST_LOOKS`] times.
const SETTLED: Duration = Duration::from_secs(5);
const MOST_LOOKS: u32 = 5;
/// Time between two writes of a gang that is not whole. Each of its members has a kubelet that reads what is written,
/// and only the last write lets them begin, which waits for nothing.
const PACE: Duration = Duration::from_secs(1);
/// Longest pause after a look at a gang that failed: an immutable `ConfigMap` or a quota of its namespace may be in the
/// way for long.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A gang, by the namespace and name of its `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GangKey {
    pub(super) namespace: String,
    pub(super) name: String,
}

/// The `ConfigMap` to write, if it is to say something else, and whether it is to be made.
pub(super) struct Look {
    pub(super) map: Option<Value>,
    pub(super) is_new: bool,
}

/// What is known of all gangs.
#[derive(Default)]
pub(super) struct Board {
    gangs: BTreeMap<GangKey, Known>,
    /// The gang of each pod, by `namespace/name`.
    of_pod: Listing<String, GangKey>,
    to_look_at: BTreeSet<GangKey>,
    /// Gangs to look at later, and when.
    later: BTreeMap<GangKey, Instant>,
    /// The memory of the `ConfigMap`s that were read.
    kept: Kept,
    maps_listed: bool,
    /// `ConfigMap`s that a list has not delivered yet.
    maps_missing: BTreeSet<GangKey>,
    /// The line of gangs whose names are written alike.
    alike: Seldom,
    /// The line of pods beyond the size of their gang.
    crowded: Seldom,
}

/// What is known of a gang.
#[derive(Default)]
struct Known {
    gang: Option<Gang>,
    /// By name.
    pods: BTreeMap<String, Pod>,
    map: Option<Map>,
    /// The time of the last write of a `ConfigMap` that was there.
    written_at: Option<Instant>,
    /// The pauses after looks that failed one after the other; `None` where the last one went well.
    retries: Option<Backoff>,
    empty_since: Option<Instant>,
    surplus: BTreeSet<String>,
    /// Members that have no checks of the gang, as they were counted last: they never come.
    without_checks: u32,
    /// The time at which they are to be counted next, where the gang is short of members, and how often
    /// they were.
    count_at: Option<Instant>,
    counted: u32,
    dock: Dock,
}

/// The `ConfigMap` of a gang.
struct Map {
    uid: String,
    /// The version that was seen, read or written last.
    version: String,
    /// The whole of it in that version. `None` until it is read.
    read: Option<Value>,
}

struct Pod {
    /// `None` until it has one.
    address: Option<IpAddr>,
    checks: String,
    /// It has been through the gang's checks.
    is_through: bool,
    word: Word,
}

// === impl Board ===

impl Board {
    /// Takes in news of a pod.
    pub(super) fn pod(&mut self, signal: Signal<SeenPod>, config: &Config, by: &Discoveries) {
        match signal {
            Signal::Restarted => self.of_pod.begin(),
            Signal::Listed => {
                for (pod, gang) in self.of_pod.end() {
                    self.left(&pod, gang);
                }
            }
            Signal::Applied(pod) => self.seen(&pod.0, config, by),
            Signal::Deleted(pod) => self.gone(&pod),
            Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    fn seen(&mut self, pod: &Value, config: &Config, by: &Discoveries) {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        let (Some(namespace), Some(name)) = (text("/metadata/namespace"), text("/metadata/name"))
        else {
            return;
        };
        let full = format!("{namespace}/{name}");
        let checks = checks_of(pod, config).join(",");
        // Who has no check of the gang never comes to meet the others.
        if is_over(pod) || checks.is_empty() {
            return self.gone(&full);
        }
        let Ok(Some(gang)) = Gang::of(pod, namespace, &by.of(namespace)) else {
            return self.gone(&full);
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
            if let Some(not_logged_before) = self.alike.now() {
                tracing::warn!(
                    pod = full, map = %key, first = ?first.size, second = ?gang.size, not_logged_before,
                    "two gangs have names that are written alike: the pods of the second find nobody"
                );
            }
            return self.gone(&full);
        }
        known.gang = Some(gang);
        known.empty_since = None;
        let address = text("/status/podIP").and_then(|address| address.parse().ok());
        let pod = Pod {
            address,
            checks,
            is_through: is_through(pod, config),
            word: Word::of(pod, config),
        };
        if known.pods.insert(name.to_owned(), pod).is_none() {
            known.count_at = Some(Instant::now() + SETTLED);
            known.counted = 0;
        }
        self.of_pod.set(full, key.clone());
        self.to_look_at.insert(key);
    }

    fn gone(&mut self, pod: &str) {
        if let Some(gang) = self.of_pod.remove(pod) {
            self.left(pod, gang);
        }
    }

    /// Takes in that a pod is not of its gang any longer.
    fn left(&mut self, pod: &str, key: GangKey) {
        if let Some(known) = self.gangs.get_mut(&key) {
            let name = pod.split_once('/').map_or(pod, |(_, name)| name);
            known.pods.remove(name);
            if known.pods.is_empty() {
                known.empty_since = Some(Instant::now());
                self.forget(&key);
            }
        }
        self.to_look_at.insert(key);
    }

    /// Takes in news of a `ConfigMap`.
    pub(super) fn map(&mut self, signal: Signal<SeenMap>) {
        match signal {
            Signal::Restarted => {
                let there = self.gangs.iter().filter(|(_, known)| known.map.is_some());
                self.maps_missing = there.map(|(key, _)| key.clone()).collect();
            }
            Signal::Listed => {
                self.maps_listed = true;
                for key in std::mem::take(&mut self.maps_missing) {
                    self.map_gone(key);
                }
            }
            Signal::Applied(map) => {
                let seen = &map.metadata;
                // Others that carry the label are none of ours.
                if !seen.name.starts_with(PREFIX) {
                    return;
                }
                let key = GangKey {
                    namespace: seen.namespace.clone(),
                    name: seen.name.clone(),
                };
                self.maps_missing.remove(&key);
                let known = self.gangs.entry(key.clone()).or_default();
                if known.pods.is_empty() {
                    known.empty_since.get_or_insert_with(Instant::now);
                }
                if known.map.as_ref().is_some_and(|map| map.is_as(seen)) {
                    return;
                }
                let map = Map {
                    uid: seen.uid.clone(),
                    version: seen.resource_version.clone(),
                    read: None,
                };
                self.set_map(&key, Some(map));
                self.to_look_at.insert(key);
            }
            Signal::Deleted(full) => {
                if let Some((namespace, name)) = full.split_once('/') {
                    self.map_gone(GangKey {
                        namespace: namespace.to_owned(),
                        name: name.to_owned(),
                    });
                }
            }
            Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    fn map_gone(&mut self, key: GangKey) {
        if self.gangs.contains_key(&key) {
            self.set_map(&key, None);
            self.to_look_at.insert(key);
        }
    }

    /// Notes what is known of the `ConfigMap` of a gang.
    fn set_map(&mut self, key: &GangKey, map: Option<Map>) {
        let Some(known) = self.gangs.get_mut(key) else {
            return;
        };
        let bytes = map.as_ref().and_then(|map| map.read.as_ref());
        let bytes = bytes.map(|read| read.to_string().len());
        known.map = map;
        let name = (key.namespace.clone(), key.name.clone());
        let gone = if let Some(bytes) = bytes {
            self.kept.keep(&name, bytes)
        } else {
            self.kept.let_go(&name);
            Vec::new()
        };
        for (namespace, name) in gone {
            self.forget(&GangKey { namespace, name });
        }
    }

    /// Lets go of what was read of the `ConfigMap` of a gang. It is read again when it is looked at.
    fn forget(&mut self, key: &GangKey) {
        let known = self.gangs.get_mut(key);
        if let Some(map) = known.and_then(|known| known.map.as_mut()) {
            map.read = None;
        }
        self.kept.let_go(&(key.namespace.clone(), key.name.clone()));
    }

    /// Returns whether a gang has a `ConfigMap`.
    pub(super) fn has_map(&self, key: &GangKey) -> bool {
        self.gangs.get(key).is_some_and(|known| known.map.is_some())
    }

    /// Returns whether the `ConfigMap` of a gang is to be read before it is looked at.
    pub(super) fn is_unread(&self, key: &GangKey) -> bool {
        let map = self.gangs.get(key).and_then(|known| known.map.as_ref());
        map.is_some_and(|map| map.read.is_none())
    }

    /// Notes the `ConfigMap` of a gang as it is now; `None` where it is gone.
    pub(super) fn read(&mut self, key: &GangKey, map: Option<Value>) {
        self.set_map(key, map.map(Map::of));
    }

    /// Returns whether all pods and `ConfigMap`s have been delivered once.
    pub(super) fn is_listed(&self) -> bool {
        self.of_pod.is_complete() && self.maps_listed
    }

    /// Returns the next gang to look at.
    pub(super) fn next(&mut self) -> Option<GangKey> {
        let key = self.to_look_at.pop_first()?;
        self.later.remove(&key);
        Some(key)
    }

    /// Has a gang looked at once more, the later the more often in a row that failed. News of it are looked at at once.
    pub(super) fn failed(&mut self, key: &GangKey) {
        if let Some(known) = self.gangs.get_mut(key) {
            let retries = &mut known.retries;
            let retries = retries.get_or_insert_with(|| Backoff::new(RETRY, LONGEST_RETRY));
            self.later
                .insert(key.clone(), Instant::now() + retries.pause());
        }
    }

    /// Notes that a look at a gang did not fail.
    pub(super) fn went_well(&mut self, key: &GangKey) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.retries = None;
        }
    }

    /// Returns when the next of the gangs is due that are to be looked at later.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.later.values().min().copied()
    }

    /// Has the gangs looked at that are due.
    pub(super) fn due_again(&mut self) {
        let now = Instant::now();
        let (to_look_at, later) = (&mut self.to_look_at, &mut self.later);
        later.retain(|key, at| {
            let is_due = *at <= now;
            if is_due {
                to_look_at.insert(key.clone());
            }
            !is_due
        });
    }

    /// Has all gangs looked at once more, but for those that are to be looked at later.
    pub(super) fn all_again(&mut self) {
        let later = &self.later;
        let all = self.gangs.keys().filter(|key| !later.contains_key(key));
        self.to_look_at.extend(all.cloned());
    }

    /// Returns a gang that has pods.
    pub(super) fn gang(&self, key: &GangKey) -> Option<Gang> {
        let known = self.gangs.get(key)?;
        known.gang.clone().filter(|_| !known.pods.is_empty())
    }

    /// Returns the number of pods of a gang.
    pub(super) fn pods(&self, key: &GangKey) -> u32 {
        let pods = self.gangs.get(key).map_or(0, |known| known.pods.len());
        u32::try_from(pods).unwrap_or(u32::MAX)
    }

    /// Returns whether the members of a gang without checks are to be counted, because it is short of others.
    pub(super) fn is_short(&self, key: &GangKey, expected: u32) -> bool {
        let Some(known) = self.gangs.get(key) else {
            return false;
        };
        let there = self.pods(key).saturating_add(known.without_checks);
        there < expected && known.count_at.is_some_and(|at| at <= Instant::now())
    }

    /// Notes how many members of a gang have no checks.
    pub(super) fn count_without_checks(&mut self, key: &GangKey, count: u32) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.without_checks = count;
            known.counted = (known.counted + 1).min(MOST_LOOKS);
            known.count_at = Some(Instant::now() + SETTLED * 2_u32.pow(known.counted));
        }
    }

    /// Returns how many members of a gang can have checks, of those that are expected.
    pub(super) fn with_checks(&self, key: &GangKey, expected: u32) -> u32 {
        let without = self.gangs.get(key).map_or(0, |known| known.without_checks);
        expected.saturating_sub(without).max(1)
    }

    /// Returns the members of a gang that are to be told of, because a majority does not reach them.
    pub(super) fn accused(&mut self, key: &GangKey, round: Duration) -> Vec<Accused> {
        let Some(known) = self.gangs.get_mut(key) else {
            return Vec::new();
        };
        let members = known.pods.iter();
        let members = members.filter(|(name, _)| !known.surplus.contains(*name));
        let words = members.map(|(name, pod)| (name.as_str(), &pod.word));
        known.dock.due(&words.collect(), round)
    }

    /// Notes that a member was told of.
    pub(super) fn told_of(&mut self, key: &GangKey, pod: &str) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.dock.told(pod);
        }
    }

    /// Notes that a member was not told of after all.
    pub(super) fn not_told_of(&mut self, key: &GangKey, pod: &str) {
        if let Some(known) = self.gangs.get_mut(key) {
            known.dock.not_told(pod);
        }
    }

    /// Has no gang, and nobody who is accused, wait any longer.
    #[cfg(test)]
    pub(super) fn settle(&mut self) {
        for known in self.gangs.values_mut() {
            known.count_at = known.count_at.map(|_| Instant::now());
            known.dock.settle();
        }
    }

    /// Returns the number of gangs that have pods.
    pub(super) fn gangs(&self) -> i64 {
        let there = self.gangs.values().filter(|known| !known.pods.is_empty());
        i64::try_from(there.count()).unwrap_or(i64::MAX)
    }

    /// Returns the number of pods beyond the size of their gang.
    pub(super) fn surplus(&self) -> i64 {
        let surplus = self.gangs.values().map(|known| known.surplus.len());
        i64::try_from(surplus.sum::<usize>()).unwrap_or(i64::MAX)
    }

    /// Returns what the `ConfigMap` of a gang is to be. `expected` is the number of members that are needed,
    /// 0 so long as it may still be learnt, or why it cannot be.
    pub(super) fn look(
        &mut self,
        key: &GangKey,
        gang: &Gang,
        expected: Result<u32, String>,
        owner: Option<Value>,
        config: &Config,
    ) -> Look {
        let Some(known) = self.gangs.get_mut(key) else {
            return Look {
                map: None,
                is_new: false,
            };
        };
        let members = known.pods.iter().filter_map(|(name, pod)| {
            Some(Member {
                pod: name.clone(),
                address: pod.address?,
                checks: Some(pod.checks.clone()),
            })
        });
        let there = known.map.as_ref().and_then(|map| map.read.as_ref());
        let data = there.and_then(|map| map.get("data").cloned());
        let data = data.unwrap_or_default();
        // What somebody else has made of it is no word of ours.
        let roster = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned));
        let mut roster = roster.unwrap_or_default();
        let was_settled = roster.is_settled();
        roster.gang_id = gang.id();
        roster.master_port = config.coordination.master_port;
        let count = expected.as_ref().copied().unwrap_or_default();
        let (mut roster, surplus) = roster.with(members.collect(), count);
        roster.untestable = expected.err();
        roster.started = known.started(&roster);
        known.note_surplus(surplus, &roster, &self.crowded);
        let wanted = json!(roster.data());
        let is_new = known.map.is_none();
        let nothing = Look { map: None, is_new };
        if wanted == data {
            return nothing;
        }
        let since = known.written_at.map(|at| at.elapsed());
        if !was_settled && !roster.is_settled() && since.is_some_and(|since| since < PACE) {
            let at = known.written_at.map(|at| at + PACE);
            self.later.extend(at.map(|at| (key.clone(), at)));
            return nothing;
        }
        known.written_at = known.map.is_some().then(Instant::now);
        let there = known.map.as_ref().and_then(|map| map.read.as_ref());
        let map = match there {
            Some(map) => {
                let mut map = Value::clone(map);
                if let Some(map) = map.as_object_mut() {
                    map.insert("data".to_owned(), wanted);
                }
                map
            }
            None => json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": key.name,
                    "namespace": key.namespace,
                    "labels": {
                        GANG_ID_LABEL: gang_label(&gang.id()),
                        MANAGED_BY_LABEL: MANAGED_BY,
                    },
                    "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
                },
                "data": wanted,
            }),
        };
        Look {
            map: Some(map),
            is_new,
        }
    }

    /// Notes what a `ConfigMap` has become.
    pub(super) fn wrote(&mut self, key: &GangKey, map: Value) {
        self.read(key, Some(map));
    }

    /// Returns the uid of the `ConfigMap` of a gang that has had no pods for long; one without a
    /// `ConfigMap` is forgotten.
    pub(super) fn left_over(&mut self, key: &GangKey) -> Option<String> {
        let known = self.gangs.get(key)?;
        let Some(map) = &known.map else {
            self.gangs.remove(key);
            self.later.remove(key);
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
    /// Returns the `ConfigMap` that was read.
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

    /// Returns whether what a watch has seen is no news: what was written here comes back by the watch, also where
    /// it is newer meanwhile.
    fn is_as(&self, seen: &MapMetadata) -> bool {
        let number = |version: &str| version.parse::<u64>().ok();
        let is_older = number(&seen.resource_version)
            .zip(number(&self.version))
            .is_some_and(|(seen, known)| seen <= known);
        self.uid == seen.uid && (self.version == seen.resource_version || is_older)
    }
}

// === impl Known ===

impl Known {
    /// Returns a member that has been through the gang's checks: the one that was named before, if it
    /// still is one, so that not each that ends is a change.
    fn started(&self, roster: &Roster) -> Option<String> {
        let is_through = |pod: &String| self.pods.get(pod).is_some_and(|pod| pod.is_through);
        let through = roster.members.iter().map(|member| &member.pod);
        let mut through = through.filter(|pod| is_through(pod)).peekable();
        let first = through.peek().copied();
        let before = roster.started.as_ref();
        let kept = before.filter(|before| through.any(|pod| pod == *before));
        kept.or(first).cloned()
    }

    /// Notes who has no place in the gang, and says who is new among them.
    fn note_surplus(&mut self, surplus: Vec<Member>, roster: &Roster, line: &Seldom) {
        let names: BTreeSet<String> = surplus.into_iter().map(|member| member.pod).collect();
        let new = names.difference(&self.surplus).map(String::as_str);
        let new: Vec<&str> = new.collect();
        if !new.is_empty()
            && let Some(not_logged_before) = line.now()
        {
            tracing::warn!(
                gang = roster.gang_id,
                pods = few(&new),
                not_logged_before,
                "the gang has its {} members; these pods wait until one goes",
                roster.expected
            );
        }
        self.surplus = names;
    }
}

/// Returns whether two gangs are one. Dashes join the names of which their ids are made, and stand for what a
/// name of Kubernetes cannot have, so that two ids, or their `ConfigMap`s, may be written alike.
fn is_same(one: &Gang, other: &Gang) -> bool {
    let object = |gang: &Gang| match &gang.size {
        SizeFrom::Object { name, group, .. } => Some((name.clone(), group.clone())),
        SizeFrom::Pods(_) => None,
    };
    one.id() == other.id() && object(one) == object(other)
}

/// Returns whether a pod has ended, or is about to.
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
