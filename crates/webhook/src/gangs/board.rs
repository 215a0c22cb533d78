//! What is known of gangs: their pods, and their `ConfigMap`s.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::Signal;
use preflight::config::Config;
use preflight::gang::Gang;
use preflight::inject::checks_of;
use preflight::roster::{
    GANG_ID_LABEL, MANAGED_BY, MANAGED_BY_LABEL, Member, PREFIX, Roster, config_map_name,
    gang_label,
};
use serde_json::{Value, json};

use crate::discoveries::Discoveries;

/// Time for which the `ConfigMap` of a gang without pods is kept: its pods may be made anew.
const KEPT: Duration = Duration::from_secs(60);

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
    of_pod: BTreeMap<String, GangKey>,
    to_look_at: BTreeSet<GangKey>,
    pods_listed: bool,
    maps_listed: bool,
    /// Those that a list has not delivered yet.
    pods_missing: BTreeSet<String>,
    maps_missing: BTreeSet<GangKey>,
}

/// What is known of a gang.
#[derive(Default)]
struct Known {
    gang: Option<Gang>,
    /// By name.
    pods: BTreeMap<String, Pod>,
    map: Option<Arc<Value>>,
    empty_since: Option<Instant>,
    surplus: BTreeSet<String>,
}

struct Pod {
    /// `None` until it has one.
    address: Option<IpAddr>,
    checks: String,
}

// === impl Board ===

impl Board {
    /// Takes in news of a pod.
    pub(super) fn pod(&mut self, signal: Signal<Value>, config: &Config, by: &Discoveries) {
        match signal {
            Signal::Restarted => self.pods_missing = self.of_pod.keys().cloned().collect(),
            Signal::Listed => {
                self.pods_listed = true;
                for pod in std::mem::take(&mut self.pods_missing) {
                    self.gone(&pod);
                }
            }
            Signal::Applied(pod) => self.seen(&pod, config, by),
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
        self.pods_missing.remove(&full);
        let is_over = matches!(text("/status/phase"), Some("Succeeded" | "Failed"));
        if is_over || text("/metadata/deletionTimestamp").is_some() {
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
        known.gang = Some(gang);
        known.empty_since = None;
        let address = text("/status/podIP").and_then(|address| address.parse().ok());
        let pod = Pod {
            address,
            checks: checks_of(pod, config).join(","),
        };
        known.pods.insert(name.to_owned(), pod);
        self.of_pod.insert(full, key.clone());
        self.to_look_at.insert(key);
    }

    fn gone(&mut self, pod: &str) {
        let Some(key) = self.of_pod.remove(pod) else {
            return;
        };
        if let Some(known) = self.gangs.get_mut(&key) {
            let name = pod.split_once('/').map_or(pod, |(_, name)| name);
            known.pods.remove(name);
            if known.pods.is_empty() {
                known.empty_since = Some(Instant::now());
            }
        }
        self.to_look_at.insert(key);
    }

    /// Takes in news of a `ConfigMap`.
    pub(super) fn map(&mut self, signal: Signal<Value>) {
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
                let text = |pointer: &str| map.pointer(pointer).and_then(Value::as_str);
                let names = text("/metadata/namespace").zip(text("/metadata/name"));
                // Others that carry the label are none of ours.
                let Some((namespace, name)) = names.filter(|(_, name)| name.starts_with(PREFIX))
                else {
                    return;
                };
                let key = GangKey {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                };
                self.maps_missing.remove(&key);
                let known = self.gangs.entry(key.clone()).or_default();
                known.map = Some(map);
                if known.pods.is_empty() {
                    known.empty_since.get_or_insert_with(Instant::now);
                }
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
        if let Some(known) = self.gangs.get_mut(&key) {
            known.map = None;
            self.to_look_at.insert(key);
        }
    }

    /// Returns whether all pods and `ConfigMap`s have been delivered once.
    pub(super) fn is_listed(&self) -> bool {
        self.pods_listed && self.maps_listed
    }

    /// Returns the next gang to look at.
    pub(super) fn next(&mut self) -> Option<GangKey> {
        self.to_look_at.pop_first()
    }

    /// Has a gang looked at once more.
    pub(super) fn again(&mut self, key: GangKey) {
        self.to_look_at.insert(key);
    }

    /// Has all gangs looked at once more.
    pub(super) fn all_again(&mut self) {
        self.to_look_at.extend(self.gangs.keys().cloned());
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

    /// Returns what the `ConfigMap` of a gang is to be.
    pub(super) fn look(
        &mut self,
        key: &GangKey,
        gang: &Gang,
        expected: u32,
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
        let data = known.map.as_ref().and_then(|map| map.get("data").cloned());
        let data = data.unwrap_or_default();
        // What somebody else has made of it is no word of ours.
        let roster = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned));
        let mut roster = roster.unwrap_or_default();
        roster.gang_id = gang.id();
        roster.master_port = config.coordination.master_port;
        let (roster, surplus) = roster.with(members.collect(), expected);
        known.note_surplus(surplus, &roster);
        let wanted = json!(roster.data());
        let is_new = known.map.is_none();
        if wanted == data {
            return Look { map: None, is_new };
        }
        let map = match &known.map {
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
        if let Some(known) = self.gangs.get_mut(key) {
            known.map = Some(Arc::new(map));
        }
    }

    /// Returns the uid of the `ConfigMap` of a gang that has had no pods for long; one without a
    /// `ConfigMap` is forgotten.
    pub(super) fn left_over(&mut self, key: &GangKey) -> Option<String> {
        let known = self.gangs.get(key)?;
        let Some(map) = &known.map else {
            self.gangs.remove(key);
            return None;
        };
        let is_old = known
            .empty_since
            .is_some_and(|since| since.elapsed() >= KEPT);
        let uid = map.pointer("/metadata/uid").and_then(Value::as_str);
        uid.filter(|_| is_old).map(str::to_owned)
    }
}

// === impl Known ===

impl Known {
    /// Notes who has no place in the gang, and says who is new among them.
    fn note_surplus(&mut self, surplus: Vec<Member>, roster: &Roster) {
        let names: BTreeSet<String> = surplus.into_iter().map(|member| member.pod).collect();
        let new: Vec<&String> = names.difference(&self.surplus).collect();
        if !new.is_empty() {
            tracing::warn!(
                gang = roster.gang_id, pods = ?new,
                "the gang has its {} members; these pods wait until one goes", roster.expected
            );
        }
        self.surplus = names;
    }
}

impl fmt::Display for GangKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests;
