//! Gangs: which pods form one, and how many members the object that they name asks for.
//!
//! Pods are read at admission, when they may have neither a name nor a uid yet.

use std::fmt;

use serde_json::Value;

use crate::config::{Discovery, Resource};
use crate::field;

/// API group of Kubernetes' own gangs.
const SCHEDULING: &str = "scheduling.k8s.io";
/// API group of Kueue.
const KUEUE: &str = "kueue.x-k8s.io";
/// Labels or annotations with the workload of a pod that Kueue admitted. The first is
/// ADR-026's, the second is written by Kueue's topology-aware scheduling.
const KUEUE_WORKLOAD: [&str; 2] = ["kueue.x-k8s.io/workload-name", "kueue.x-k8s.io/workload"];
/// Label with the group of pods that Kueue admits together.
const KUEUE_GROUP: &str = "kueue.x-k8s.io/pod-group-name";
/// Annotation with the number of pods in that group.
const KUEUE_GROUP_SIZE: &str = "kueue.x-k8s.io/pod-group-total-count";
const LABELS: &str = "/metadata/labels";
const ANNOTATIONS: &str = "/metadata/annotations";
/// Longest name of a Kubernetes object in bytes. Label values have at most 63.
const MAX_NAME_BYTES: usize = 253;
/// Most members of a gang. Its `ConfigMap` has a line for each, and at most 1 MiB.
pub const MAX_MEMBERS: u32 = 8192;

/// Gang, as its pods identify it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gang {
    /// Namespace of the pods.
    pub namespace: String,
    /// First part of the id: the name of the discovery method.
    pub discoverer: String,
    /// Last part of the id: the name that the pods give, or the names joined by a dash.
    pub name: String,
    /// Source of the gang's size.
    pub size: SizeFrom,
}

/// Source of a gang's size.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SizeFrom {
    /// An object in the gang's namespace.
    Object {
        /// Resource types to try; the first one that the API server has is used.
        kinds: Vec<Resource>,
        /// Name of the object.
        name: String,
        /// Group of pods within the object, if it can have several.
        group: Option<String>,
    },
    /// The pods themselves, which carry this size.
    Pods(u32),
}

/// Size of a gang, as an object specifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A number of members.
    Members(u32),
    /// The pods are scheduled one by one and form no gang.
    NoGang,
    /// No size is specified: all pods that exist.
    NotSaid,
}

/// Reason why a pod's gang, or its size, cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GangError(String);

// === impl Gang ===

impl Gang {
    /// Returns the gang of a pod in `namespace`; `None` if the pod is in none.
    pub fn of(pod: &Value, namespace: &str, by: &Discovery) -> Result<Option<Self>, GangError> {
        let found = match by {
            Discovery::Native => native(pod),
            Discovery::PodGroups(groups) => {
                let mut marked = groups.annotations.iter().map(|key| (ANNOTATIONS, key));
                let labels = groups.labels.iter().map(|key| (LABELS, key));
                let name = marked
                    .by_ref()
                    .chain(labels)
                    .find_map(|(place, key)| field::mark(pod, place, key));
                name.map(|name| {
                    let kinds = vec![groups.resource.clone()];
                    (
                        groups.name.clone(),
                        name.to_owned(),
                        from(kinds, name, None),
                    )
                })
            }
            Discovery::Kueue => kueue(pod)?,
            Discovery::Labels { id, size } => labels(pod, id, size)?,
        };
        let Some((discoverer, name, size)) = found else {
            return Ok(None);
        };
        if name.len() > MAX_NAME_BYTES {
            let found = name.len();
            return Err(GangError(format!(
                "the pod names a gang with {found} bytes, a name has at most {MAX_NAME_BYTES}"
            )));
        }
        Ok(Some(Self {
            namespace: namespace.to_owned(),
            discoverer,
            name,
            size,
        }))
    }

    /// Returns the id in pods, the `ConfigMap` and events.
    pub fn id(&self) -> String {
        self.to_string()
    }

    /// Reads the size from `object`, the object that [`size`](Self::size) names.
    pub fn size_in(&self, object: &Value, by: &Discovery) -> Result<Size, GangError> {
        if let Discovery::PodGroups(groups) = by {
            let count = groups.min_count.count(object).map_err(|why| {
                GangError(format!(
                    "`{}` of {} {}/{} gives no number of members: {why}",
                    groups.min_count.expression(),
                    groups.resource.resource,
                    self.namespace,
                    self.name
                ))
            });
            return members(count?);
        }
        let SizeFrom::Object { group, .. } = &self.size else {
            return Ok(Size::NotSaid);
        };
        if *by == Discovery::Kueue {
            return pod_sets(object);
        }
        // A Workload (1.35) contains its groups; a PodGroup (1.36 and later) is one group.
        let policy = match group {
            Some(group) => {
                let groups = field::list(object, "/spec/podGroups");
                let of_pod = groups.iter().find(|one| field::name(one) == group);
                of_pod.and_then(|one| one.get("policy"))
            }
            None => match object.pointer("/spec/schedulingPolicy") {
                Some(policy) => Some(policy),
                None => field::list(object, "/spec/podGroups")
                    .first()
                    .and_then(|one| one.get("policy")),
            },
        };
        let Some(policy) = policy else {
            return Ok(Size::NotSaid);
        };
        match policy.pointer("/gang/minCount").and_then(Value::as_i64) {
            Some(count) => members(count),
            None if policy.get("gang").is_some() => Ok(Size::NotSaid),
            None if policy.get("basic").is_some() => Ok(Size::NoGang),
            None => Ok(Size::NotSaid),
        }
    }
}

impl fmt::Display for Gang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.discoverer, self.namespace, self.name)
    }
}

/// Discovery method, name for the id, and source of the size.
type Found = (String, String, SizeFrom);

fn from(kinds: Vec<Resource>, name: &str, group: Option<&str>) -> SizeFrom {
    SizeFrom::Object {
        kinds,
        name: name.to_owned(),
        group: group.map(str::to_owned),
    }
}

fn kind(group: &str, version: &str, resource: &str) -> Resource {
    Resource {
        group: group.to_owned(),
        version: version.to_owned(),
        resource: resource.to_owned(),
    }
}

fn native(pod: &Value) -> Option<Found> {
    let native = "kubernetes".to_owned();
    if let Some(name) = field::text(pod, "/spec/schedulingGroup/podGroupName") {
        let kinds = ["v1beta1", "v1alpha3", "v1alpha2"];
        let kinds = kinds.map(|version| kind(SCHEDULING, version, "podgroups"));
        return Some((native, name.to_owned(), from(kinds.into(), name, None)));
    }
    let name = field::text(pod, "/spec/workloadRef/name")?;
    let group = field::text(pod, "/spec/workloadRef/podGroup");
    let full = match group {
        Some(group) => format!("{name}-{group}"),
        None => name.to_owned(),
    };
    let kinds = vec![kind(SCHEDULING, "v1alpha1", "workloads")];
    Some((native, full, from(kinds, name, group)))
}

fn kueue(pod: &Value) -> Result<Option<Found>, GangError> {
    let discoverer = "kueue".to_owned();
    if let Some(name) = field::mark(pod, LABELS, KUEUE_GROUP) {
        let size = field::mark(pod, ANNOTATIONS, KUEUE_GROUP_SIZE);
        let size = size_of(KUEUE_GROUP_SIZE, size)?;
        return Ok(Some((discoverer, name.to_owned(), SizeFrom::Pods(size))));
    }
    let places = [LABELS, ANNOTATIONS];
    let name = KUEUE_WORKLOAD
        .iter()
        .flat_map(|key| places.map(|place| (place, key)))
        .find_map(|(place, key)| field::mark(pod, place, key));
    Ok(name.map(|name| {
        let kinds = ["v1beta2", "v1beta1"].map(|version| kind(KUEUE, version, "workloads"));
        (discoverer, name.to_owned(), from(kinds.into(), name, None))
    }))
}

fn labels(pod: &Value, id: &str, size: &str) -> Result<Option<Found>, GangError> {
    let Some(name) = field::mark(pod, LABELS, id) else {
        return Ok(None);
    };
    let size = size_of(size, field::mark(pod, LABELS, size))?;
    let found = ("labels".to_owned(), name.to_owned(), SizeFrom::Pods(size));
    Ok(Some(found))
}

/// Parses the size that a pod itself carries under `key`.
fn size_of(key: &str, value: Option<&str>) -> Result<u32, GangError> {
    let Some(value) = value else {
        return Err(GangError(format!(
            "the pod names a gang and not its size: `{key}` is missing"
        )));
    };
    let size = value
        .parse()
        .ok()
        .filter(|size| (1..=MAX_MEMBERS).contains(size));
    size.ok_or_else(|| {
        GangError(format!(
            "`{key}` of the pod is {value:?}; write a number of members from 1 to {MAX_MEMBERS}"
        ))
    })
}

fn members(count: i64) -> Result<Size, GangError> {
    let count = u32::try_from(count).ok();
    let count = count.filter(|count| (1..=MAX_MEMBERS).contains(count));
    count.map(Size::Members).ok_or_else(|| {
        GangError(format!(
            "a number of members from 1 to {MAX_MEMBERS} is needed, but the object asks for another"
        ))
    })
}

/// Returns the size of a Kueue workload: the sum over its pod sets.
fn pod_sets(object: &Value) -> Result<Size, GangError> {
    let sets = field::list(object, "/spec/podSets");
    if sets.is_empty() {
        return Ok(Size::NotSaid);
    }
    let count = sets.iter().map(|set| {
        let count = set.get("count").and_then(Value::as_i64);
        count.unwrap_or(1).clamp(0, i64::from(u32::MAX))
    });
    members(count.sum())
}

#[cfg(test)]
mod tests;
