//! Devices, processors and memory that the checks of a pod get.
//!
//! A check must see every GPU of the pod, and must never make a schedulable pod unschedulable:
//! a check gets nothing beyond what the containers that start after it get anyway, so the
//! scheduler needs no extra room for it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::config::{Config, Devices};
use crate::field;
use crate::quantity::{self, Amount, of as amount};

/// Prefix of resources that request a device class like an extended resource.
const IMPLICIT: &str = "deviceclass.resource.kubernetes.io/";
/// Resources that decide the quality of service class of a pod.
const COMPUTE: [&str; 2] = ["cpu", "memory"];
/// Requests of a check with `resourceMode: max`, as in NVSentinel.
const DEFAULT_REQUESTS: [(&str, &str); 2] = [("cpu", "100m"), ("memory", "500Mi")];

/// Claims, templates and device classes that pods name, as found in the cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterClaims {
    /// `spec` of each claim in the pod's namespace, by name.
    pub claims: BTreeMap<String, Value>,
    /// `spec.spec` of each claim template in the pod's namespace, by name.
    pub templates: BTreeMap<String, Value>,
    /// Device class, by the extended resource that stands for it (`spec.extendedResourceName`).
    pub classes: BTreeMap<String, String>,
}

/// Devices of a pod that its checks get.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesOfPod {
    /// Extended resources and their counts.
    pub extended: BTreeMap<String, u64>,
    /// Elements of `resources.claims` for the checks.
    pub claims: Vec<Value>,
    /// Number of GPUs; `None` if a claim leaves it open.
    pub gpus: Option<u64>,
    /// True if the pod has network devices or is on the host's network.
    pub has_network: bool,
}

/// Kind of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gpu,
    Network,
}

/// Devices of one claim.
struct Claimed {
    gpus: Option<u64>,
    is_gpu: bool,
    is_network: bool,
}

// === impl DevicesOfPod ===

impl DevicesOfPod {
    /// Returns the devices of a pod; `None` if it has no GPU.
    pub fn of(pod: &Value, config: &Config, cluster: &ClusterClaims) -> Option<Self> {
        let mut found = Self {
            gpus: Some(0),
            ..Self::default()
        };
        let mut has_gpu = false;
        for (resource, kind) in extended_resources(pod, config, cluster) {
            let count = shared(pod, &resource, config);
            if count == 0 {
                continue;
            }
            match kind {
                Kind::Gpu => {
                    has_gpu = true;
                    found.gpus = found.gpus.map(|gpus| gpus.saturating_add(count));
                }
                Kind::Network => found.has_network = true,
            }
            found.extended.insert(resource, count);
        }
        let mut uses_of = uses(pod, config);
        for claim in field::list(pod, "/spec/resourceClaims") {
            let Some(claimed) = claimed(claim, config, cluster) else {
                continue;
            };
            let uses = uses_of.remove(field::name(claim)).unwrap_or_default();
            if uses.is_empty() {
                continue;
            }
            if claimed.is_gpu {
                has_gpu = true;
                found.gpus = found.gpus.zip(claimed.gpus).map(|(one, other)| one + other);
            }
            found.has_network |= claimed.is_network;
            found.claims.extend(uses);
        }
        let is_host = pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true));
        found.has_network |= is_host;
        has_gpu.then_some(found)
    }

    /// Returns the elements of `resources.claims` for all claims of the pod.
    pub fn all_claims(pod: &Value, config: &Config) -> Vec<Value> {
        let mut uses = uses(pod, config);
        let claims = field::list(pod, "/spec/resourceClaims").iter();
        let used = claims.filter_map(|claim| uses.remove(field::name(claim)));
        used.flatten().collect()
    }

    /// Returns the `resources` of a check: the configured ones within the bounds of the pod,
    /// and the devices.
    pub fn resources(
        &self,
        own: Option<&Value>,
        claims: &[Value],
        pod: &Value,
        config: &Config,
    ) -> Value {
        let mut resources = own.and_then(Value::as_object).cloned().unwrap_or_default();
        let mut requests = part(&resources, "requests");
        let mut limits = part(&resources, "limits");
        if is_best_effort(pod) {
            // Any request of the check would move the pod out of the class `BestEffort`.
            for resource in COMPUTE {
                requests.remove(resource);
                limits.remove(resource);
            }
        }
        for resource in COMPUTE {
            let (request, limit) = compute(resource, &requests, &limits, pod, config);
            set(&mut requests, resource, request);
            set(&mut limits, resource, limit);
        }
        for (resource, count) in &self.extended {
            requests.insert(resource.clone(), count.to_string().into());
            limits.insert(resource.clone(), count.to_string().into());
        }
        for (key, part) in [("requests", requests), ("limits", limits)] {
            if part.is_empty() {
                resources.remove(key);
            } else {
                resources.insert(key.to_owned(), part.into());
            }
        }
        if !claims.is_empty() {
            resources.insert("claims".to_owned(), claims.into());
        }
        resources.into()
    }
}

/// Returns the names of the claims (`resourceClaimName`) and claim templates
/// (`resourceClaimTemplateName`) that a pod refers to. They must be fetched before its devices
/// can be determined.
pub fn claims_named(pod: &Value) -> (BTreeSet<String>, BTreeSet<String>) {
    let named = |key: &str| {
        let claims = field::list(pod, "/spec/resourceClaims").iter();
        let names = claims.filter_map(|claim| claim.get(key)?.as_str());
        names.map(str::to_owned).collect()
    };
    (
        named("resourceClaimName"),
        named("resourceClaimTemplateName"),
    )
}

/// Returns the extended resources of a pod that are GPUs or network devices.
fn extended_resources(
    pod: &Value,
    config: &Config,
    cluster: &ClusterClaims,
) -> BTreeMap<String, Kind> {
    let mut found = BTreeMap::new();
    for (devices, kind) in [(&config.gpus, Kind::Gpu), (&config.networks, Kind::Network)] {
        for container in field::list(pod, "/spec/containers") {
            for place in ["/resources/limits", "/resources/requests"] {
                let asked = container.pointer(place).and_then(Value::as_object);
                let names = asked.into_iter().flat_map(Map::keys);
                let wanted = names.filter(|name| is_one_of(name, devices, cluster));
                found.extend(wanted.map(|name| (name.clone(), kind)));
            }
        }
    }
    found
}

fn is_one_of(resource: &str, devices: &Devices, cluster: &ClusterClaims) -> bool {
    let class = resource.strip_prefix(IMPLICIT);
    let class = class.or_else(|| cluster.classes.get(resource).map(String::as_str));
    devices.resources.iter().any(|known| known == resource)
        || class.is_some_and(|class| devices.classes.iter().any(|known| known == class))
}

/// Returns how many of a resource a check may share with the containers that start after it.
fn shared(pod: &Value, resource: &str, config: &Config) -> u64 {
    let counts = later_containers(pod, config).into_iter().map(|container| {
        let count = ["/resources/limits", "/resources/requests"]
            .into_iter()
            .filter_map(|place| amount(container.pointer(place)?.get(resource)?));
        // Devices are whole.
        let millis = count.map(|(millis, _)| millis).max().unwrap_or_default();
        u64::try_from(millis / 1000).unwrap_or_default()
    });
    if config.largest_container {
        let containers = field::list(pod, "/spec/containers").len();
        counts.take(containers).max().unwrap_or_default()
    } else {
        counts.fold(0, u64::saturating_add)
    }
}

/// Returns the containers that start after the checks and run until the pod ends: the pod's
/// containers, and with `prepend` also the sidecars among its init containers.
fn later_containers<'a>(pod: &'a Value, config: &Config) -> Vec<&'a Value> {
    let containers = field::list(pod, "/spec/containers").iter();
    let sidecars = field::list(pod, "/spec/initContainers").iter();
    let sidecars = sidecars.filter(|one| {
        config.prepend && one.get("restartPolicy").and_then(Value::as_str) == Some("Always")
    });
    containers.chain(sidecars).collect()
}

/// Returns, by claim, the elements of `resources.claims` that cover what later containers use:
/// the whole claim or single requests.
fn uses<'a>(pod: &'a Value, config: &Config) -> BTreeMap<&'a str, Vec<Value>> {
    let mut requests: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for container in later_containers(pod, config) {
        for used in field::list(container, "/resources/claims") {
            let request = used.get("request").and_then(Value::as_str);
            let of_claim = requests.entry(field::name(used)).or_default();
            of_claim.insert(request);
        }
    }
    let uses = |claim: &str, requests: BTreeSet<Option<&str>>| {
        if requests.contains(&None) {
            return vec![json!({"name": claim})];
        }
        let requests = requests.into_iter().flatten();
        requests
            .map(|request| json!({"name": claim, "request": request}))
            .collect()
    };
    let requests = requests.into_iter();
    requests
        .map(|(claim, requests)| (claim, uses(claim, requests)))
        .collect()
}

/// Returns the devices that an element of `spec.resourceClaims` requests; `None` if these are
/// neither GPUs nor network devices, or if the claim is not known.
fn claimed(claim: &Value, config: &Config, cluster: &ClusterClaims) -> Option<Claimed> {
    let spec = match field::text(claim, "/resourceClaimName") {
        Some(name) => cluster.claims.get(name),
        None => cluster
            .templates
            .get(field::text(claim, "/resourceClaimTemplateName")?),
    }?;
    let mut found = Claimed {
        gpus: Some(0),
        is_gpu: false,
        is_network: false,
    };
    for request in field::list(spec, "/devices/requests") {
        match kind_of(request, config) {
            Some((Kind::Gpu, count)) => {
                found.is_gpu = true;
                found.gpus = found.gpus.zip(count).map(|(one, other)| one + other);
            }
            Some((Kind::Network, _)) => found.is_network = true,
            None => {}
        }
    }
    (found.is_gpu || found.is_network).then_some(found)
}

/// Returns the kind and number of devices that a request asks for; `None` for other devices and
/// for access to devices in use (`adminAccess`). Alternatives (`firstAvailable`) must all be of
/// one kind, since it is not yet decided which one the pod gets.
fn kind_of(request: &Value, config: &Config) -> Option<(Kind, Option<u64>)> {
    let alternatives = field::list(request, "/firstAvailable");
    if let Some((first, rest)) = alternatives.split_first() {
        let (kind, count) = of_class(first, config)?;
        let mut same = Some(count);
        for other in rest {
            let (other_kind, other_count) = of_class(other, config)?;
            if other_kind != kind {
                return None;
            }
            same = same.filter(|count| *count == other_count);
        }
        return Some((kind, same.flatten()));
    }
    // API versions before v1beta2 have the fields of `exactly` in the request itself.
    of_class(request.get("exactly").unwrap_or(request), config)
}

fn of_class(request: &Value, config: &Config) -> Option<(Kind, Option<u64>)> {
    if request.get("adminAccess") == Some(&Value::Bool(true)) {
        return None;
    }
    let class = field::text(request, "/deviceClassName")?;
    let is = |devices: &Devices| devices.classes.iter().any(|known| known == class);
    let kind = match () {
        () if is(&config.gpus) => Kind::Gpu,
        () if is(&config.networks) => Kind::Network,
        () => return None,
    };
    let all = field::text(request, "/allocationMode") == Some("All");
    let count = request.get("count").map_or(Some(1), Value::as_u64);
    Some((kind, count.filter(|_| !all)))
}

fn part(resources: &Map<String, Value>, key: &str) -> Map<String, Value> {
    let part = resources.get(key).and_then(Value::as_object);
    part.cloned().unwrap_or_default()
}

fn set(part: &mut Map<String, Value>, resource: &str, value: Option<String>) {
    match value {
        Some(value) => part.insert(resource.to_owned(), value.into()),
        None => part.remove(resource),
    };
}

/// Returns true if a pod requests neither processors nor memory, in no container nor as a
/// whole: its quality of service class is `BestEffort`.
fn is_best_effort(pod: &Value) -> bool {
    let containers = field::list(pod, "/spec/containers").iter();
    let all = containers.chain(field::list(pod, "/spec/initContainers"));
    let mut asked = all.chain(pod.get("spec")).flat_map(|one| {
        let parts = ["/resources/requests", "/resources/limits"];
        parts.into_iter().filter_map(|part| one.pointer(part))
    });
    !asked.any(|part| {
        let mut amounts = COMPUTE.iter().filter_map(|it| amount(part.get(*it)?));
        amounts.any(|(millis, _)| millis > 0)
    })
}

/// Returns a check's request and limit of processors or memory.
///
/// A check without its own gets those of the largest container, so that it changes neither the
/// pod's quality of service class nor its share of quotas and limit ranges. The result never
/// exceeds what the later containers request together.
fn compute(
    resource: &str,
    requests: &Map<String, Value>,
    limits: &Map<String, Value>,
    pod: &Value,
    config: &Config,
) -> (Option<String>, Option<String>) {
    let containers = field::list(pod, "/spec/containers").iter();
    let asked: Vec<_> = containers
        .map(|container| asked_for(container, resource))
        .collect();
    let all_limited = !asked.is_empty() && asked.iter().all(|(_, limit)| limit.is_some());
    let is_guaranteed = all_limited
        && asked.iter().all(|(request, limit)| {
            let millis = |amount: &Option<Amount>| amount.as_ref().map(|(millis, _)| *millis);
            millis(request) == millis(limit)
        });
    let is_own = requests.contains_key(resource) || limits.contains_key(resource);
    let (request, limit) = if is_own && !is_guaranteed {
        let limit = limits.get(resource).and_then(amount);
        (
            requests
                .get(resource)
                .and_then(amount)
                .or_else(|| limit.clone()),
            limit,
        )
    } else if config.largest_container && !is_guaranteed {
        let default = DEFAULT_REQUESTS.iter().find(|(name, _)| *name == resource);
        (
            default.and_then(|(_, value)| amount(&(*value).into())),
            None,
        )
    } else {
        let request = asked
            .iter()
            .filter_map(|(request, _)| request.clone())
            .max();
        let limit = asked.iter().filter_map(|(_, limit)| limit.clone()).max();
        (request, limit.filter(|_| all_limited))
    };
    // A pod-level request, where present, bounds the sum over the containers.
    let of_containers = asked.iter().filter_map(|(request, _)| request.as_ref());
    let together: i128 = of_containers.map(|(millis, _)| *millis).sum();
    let of_whole = |part| amount(pod.pointer(part)?.get(resource)?);
    let whole = of_whole("/spec/resources/requests");
    let most = whole.map_or(together, |(whole, _)| together.min(whole));
    // The API server refuses a container limit above the pod-level limit.
    let highest = of_whole("/spec/resources/limits");
    let limit = match (limit, highest) {
        (Some(limit), Some(highest)) => Some(limit.min(highest)),
        (limit, _) => limit,
    };
    let request = request.map(|(request, text)| {
        if request > most {
            (most, quantity::text(most))
        } else {
            (request, text)
        }
    });
    // A container without a request of its own requests its limit.
    let request = request.filter(|(request, _)| *request > 0 || limit.is_some());
    (request.map(|(_, text)| text), limit.map(|(_, text)| text))
}

/// Returns request and limit of a container. A limit alone is also the request.
fn asked_for(container: &Value, resource: &str) -> (Option<Amount>, Option<Amount>) {
    let of = |place| amount(container.pointer(place)?.get(resource)?);
    let limit = of("/resources/limits");
    (of("/resources/requests").or_else(|| limit.clone()), limit)
}

#[cfg(test)]
mod tests;
