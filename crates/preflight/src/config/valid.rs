//! Validation against everything that the API server would refuse in a pod with checks.
//!
//! Such a configuration is refused when it is read: with `failurePolicy: Fail`, it would stop
//! the creation of every pod in a labelled namespace.

use std::collections::BTreeMap;

use contract::names::{self, WrongName};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Config, HostPath};
use crate::{field, quantity};

/// Prefix of MIG resources in NVIDIA's device plugin.
const MIG: &str = "nvidia.com/mig-";
/// Suffix of resources that several pods share, in NVIDIA's device plugin.
const SHARED: &str = ".shared";
/// Values of `hostPath.type` that Kubernetes accepts.
const HOST_PATH_TYPES: [&str; 8] = [
    "",
    "DirectoryOrCreate",
    "Directory",
    "FileOrCreate",
    "File",
    "Socket",
    "CharDevice",
    "BlockDevice",
];
/// Values of `imagePullPolicy`; if empty, the tag decides.
const PULL_POLICIES: [&str; 4] = ["", "Always", "IfNotPresent", "Never"];

/// Checks a configuration. The error names the key.
pub(super) fn check(config: &Config) -> Result<(), String> {
    let socket = &config.connector_socket;
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    if !path.starts_with('/') || path.ends_with('/') || path.contains(':') {
        return Err(format!(
            "connectorSocket: {socket:?} is not the path of a socket; write one such as \
             unix:///var/run/nvsentinel.sock"
        ));
    }
    let coordination = &config.coordination;
    for (key, selector) in [
        ("namespaceSelector", Some(&config.namespace_selector)),
        ("objectSelector", config.object_selector.as_ref()),
    ] {
        let selector = selector.map(Selector::deserialize).transpose();
        let selector = selector.map_err(|error| format!("{key}: {error}"))?;
        selector.map_or(Ok(()), |selector| selector.check(key))?;
    }
    mount_path("gangCoordination", &coordination.mount_path)?;
    for path in &coordination.host_paths {
        host_path(path)?;
    }
    for mount in &coordination.volume_mounts {
        mount_path("gangCoordination.extraVolumeMounts", &mount.mount_path)?;
    }
    for check in &config.checks {
        let name = &check.name;
        container(&check.container).map_err(|what| format!("the check {name}: {what}"))?;
    }
    Ok(())
}

/// Key that holds a name, and whether Kubernetes accepts the name.
type Name = (String, Result<(), WrongName>);

/// Returns the Kubernetes names in a configuration.
pub(super) fn names(config: &Config) -> Vec<Name> {
    let mut found = config.discovery.names();
    let mut add = |key: &str, all: &[String], check: fn(&str) -> Result<(), WrongName>| {
        found.extend(all.iter().map(|name| (key.to_owned(), check(name))));
    };
    add("gpuResourceNames", &config.gpus.resources, names::label_key);
    add(
        "networkResourceNames",
        &config.networks.resources,
        names::label_key,
    );
    add(
        "gpuDetection.deviceClasses",
        &config.gpus.classes,
        names::object_name,
    );
    add(
        "networkDetection.deviceClasses",
        &config.networks.classes,
        names::object_name,
    );
    add("namespaces", &config.namespaces, names::dns_label);
    add(
        "excludeNamespaces",
        &config.excluded_namespaces,
        names::dns_label,
    );
    add(
        "imagePullSecrets",
        &config.image_pull_secrets,
        names::object_name,
    );
    let topology = config.coordination.topology_config_map.as_slice();
    add(
        "gangCoordination.ncclTopoConfigMap",
        topology,
        names::object_name,
    );
    let label = std::slice::from_ref(&config.topologies.label);
    add("ncclTopology.instanceTypeLabel", label, names::label_key);
    found
}

/// Returns a warning for each resource that is a part of a GPU.
pub(super) fn parts_of_gpus(resources: &[String]) -> Vec<String> {
    let parts = resources
        .iter()
        .filter(|name| name.starts_with(MIG) || name.ends_with(SHARED));
    parts
        .map(|name| {
            format!(
                "gpuResourceNames: {name} is a part of a GPU, and the checks of gpuwarden test whole GPUs: leave it \
                 out, or give such pods checks of your own"
            )
        })
        .collect()
}

/// Label selector, as in Kubernetes objects.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    #[serde(default)]
    match_labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    match_expressions: Option<Vec<Expression>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expression {
    key: String,
    operator: String,
    #[serde(default)]
    values: Option<Vec<String>>,
}

// === impl Selector ===

impl Selector {
    /// Validates the selector. `key` is its place in the configuration.
    fn check(self, key: &str) -> Result<(), String> {
        let named = |error: WrongName| format!("{key}: {error}");
        for (name, value) in self.match_labels.iter().flatten() {
            names::label_key(name)
                .and_then(|()| names::label_value(value))
                .map_err(named)?;
        }
        for one in self.match_expressions.iter().flatten() {
            let values = one.values.as_deref().unwrap_or_default();
            names::label_key(&one.key).map_err(named)?;
            values
                .iter()
                .try_for_each(|value| names::label_value(value))
                .map_err(named)?;
            let (operator, has_values) = (one.operator.as_str(), !values.is_empty());
            match (operator, has_values) {
                ("In" | "NotIn", true) | ("Exists" | "DoesNotExist", false) => {}
                ("In" | "NotIn", false) => return Err(format!("{key}: {operator} needs values")),
                ("Exists" | "DoesNotExist", true) => {
                    return Err(format!("{key}: {operator} takes no values"));
                }
                _ => {
                    return Err(format!(
                        "{key}: the operator is {operator:?}; In, NotIn, Exists and DoesNotExist are known"
                    ));
                }
            }
        }
        Ok(())
    }
}

fn mount_path(key: &str, path: &str) -> Result<(), String> {
    if path.is_empty() || path.contains(':') {
        return Err(format!("{key}: {path:?} is not a path to mount at"));
    }
    Ok(())
}

fn host_path(path: &HostPath) -> Result<(), String> {
    let key = "gangCoordination.extraHostPathMounts";
    names::dns_label(&path.name).map_err(|error| format!("{key}: {error}"))?;
    mount_path(key, &path.mount_path)?;
    let host = &path.host_path;
    if !host.starts_with('/') || host.split('/').any(|part| part == "..") {
        return Err(format!(
            "{key}: {host:?} is not an absolute path of a host without `..`"
        ));
    }
    let kind = path.host_path_type.as_deref().unwrap_or_default();
    if !HOST_PATH_TYPES.contains(&kind) {
        let known = HOST_PATH_TYPES[1..].join(", ");
        return Err(format!(
            "{key}: hostPathType {kind:?} is not known; there are {known}"
        ));
    }
    Ok(())
}

fn container(container: &Map<String, Value>) -> Result<(), String> {
    let text = |key: &str| container.get(key).and_then(Value::as_str);
    if text("image").is_none_or(|image| image.is_empty() || image.contains(char::is_whitespace)) {
        return Err("`image` is not the name of an image".to_owned());
    }
    if let Some(policy) = container.get("imagePullPolicy")
        && policy
            .as_str()
            .is_none_or(|it| !PULL_POLICIES.contains(&it))
    {
        let known = PULL_POLICIES[1..].join(", ");
        return Err(format!(
            "`imagePullPolicy` {policy} is not known; there are {known}"
        ));
    }
    // A restartable init container never ends, so it would hold back no pod.
    if container.contains_key("restartPolicy") {
        return Err("`restartPolicy` cannot be set: a check runs once, to its end".to_owned());
    }
    for key in ["command", "args"] {
        let is_text = |list: &Value| {
            let texts = list.as_array();
            list.is_null() || texts.is_some_and(|texts| texts.iter().all(Value::is_string))
        };
        if !container.get(key).is_none_or(is_text) {
            return Err(format!("`{key}` is not a list of texts"));
        }
    }
    let whole = Value::Object(container.clone());
    for variable in field::list(&whole, "/env") {
        let name = field::name(variable);
        let is_text = variable.get("value").is_none_or(Value::is_string);
        if name.is_empty() || name.contains('=') || !is_text {
            return Err(format!(
                "`env`: {variable} is not a variable: it needs a name, and its value must be a text, in quotes"
            ));
        }
    }
    for mount in field::list(&whole, "/volumeMounts") {
        let path = field::text(mount, "/mountPath").unwrap_or_default();
        if field::name(mount).is_empty() {
            return Err(format!("`volumeMounts`: {mount} names no volume"));
        }
        mount_path("`volumeMounts`", path)?;
    }
    resources(&whole)
}

fn resources(container: &Value) -> Result<(), String> {
    let part = |key: &str| container.pointer(key).and_then(Value::as_object);
    let (requests, limits) = (part("/resources/requests"), part("/resources/limits"));
    for (name, value) in requests.into_iter().chain(limits).flatten() {
        if quantity::of(value).is_none_or(|(millis, _)| millis < 0) {
            return Err(format!("`resources`: {name}: {value} is not a quantity"));
        }
    }
    for (name, request) in requests.into_iter().flatten() {
        let limit = limits.and_then(|limits| limits.get(name));
        let millis = |value: &Value| quantity::of(value).map(|(millis, _)| millis);
        if limit
            .and_then(millis)
            .is_some_and(|limit| millis(request) > Some(limit))
        {
            return Err(format!(
                "`resources`: the request of {name} is above its limit"
            ));
        }
    }
    Ok(())
}
