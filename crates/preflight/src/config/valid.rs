//! What an API server would refuse of every pod that a check is put into. It is refused when the configuration
//! is read: with `failurePolicy: Fail` no pod of a labelled namespace would be created any more.

use serde_json::{Map, Value};

use super::{Config, HostPath};
use crate::{field, quantity};

/// Longest name of a container or volume, and of another object (bytes).
const MAX_LABEL_BYTES: usize = 63;
const MAX_NAME_BYTES: usize = 253;
/// The kinds of paths of the host that Kubernetes knows.
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
/// When an image is pulled; without a word it depends on its tag.
const PULL_POLICIES: [&str; 4] = ["", "Always", "IfNotPresent", "Never"];

/// Returns what is wrong with a configuration, by its key.
pub(super) fn check(config: &Config) -> Result<(), String> {
    let socket = &config.connector_socket;
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    if !path.starts_with('/') || path.ends_with('/') || path.contains(':') {
        return Err(format!(
            "connectorSocket: {socket:?} is no path of a socket; write one such as \
             unix:///var/run/nvsentinel.sock"
        ));
    }
    for name in &config.image_pull_secrets {
        object_name("imagePullSecrets", name)?;
    }
    let coordination = &config.coordination;
    if let Some(name) = &coordination.topology_config_map {
        object_name("gangCoordination.ncclTopoConfigMap", name)?;
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

/// Returns whether it is a name for a container or a volume.
pub(super) fn is_label(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    let ends = bytes.first().zip(bytes.last());
    bytes.len() <= MAX_LABEL_BYTES
        && ends.is_some_and(|(first, last)| inner(*first) && inner(*last))
        && bytes.iter().all(|byte| inner(*byte) || *byte == b'-')
}

fn object_name(key: &str, name: &str) -> Result<(), String> {
    if name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label) {
        return Ok(());
    }
    Err(format!(
        "{key}: {name:?} is no name for an object of Kubernetes: small letters, digits, dashes and dots"
    ))
}

fn mount_path(key: &str, path: &str) -> Result<(), String> {
    if path.is_empty() || path.contains(':') {
        return Err(format!("{key}: {path:?} is no path to mount at"));
    }
    Ok(())
}

fn host_path(path: &HostPath) -> Result<(), String> {
    let key = "gangCoordination.extraHostPathMounts";
    if !is_label(&path.name) {
        let name = &path.name;
        return Err(format!(
            "{key}: {name:?} is no name for a volume: small letters, digits and dashes, 63 at most"
        ));
    }
    mount_path(key, &path.mount_path)?;
    let host = &path.host_path;
    if !host.starts_with('/') || host.split('/').any(|part| part == "..") {
        return Err(format!("{key}: {host:?} is no whole path of a host"));
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
        return Err("`image` is no name of an image".to_owned());
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
    // One that runs on stops no pod.
    if container.contains_key("restartPolicy") {
        return Err("`restartPolicy` cannot be set: a check runs once, to its end".to_owned());
    }
    for key in ["command", "args"] {
        let is_text = |list: &Value| {
            let texts = list.as_array();
            list.is_null() || texts.is_some_and(|texts| texts.iter().all(Value::is_string))
        };
        if !container.get(key).is_none_or(is_text) {
            return Err(format!("`{key}` is no list of texts"));
        }
    }
    let whole = Value::Object(container.clone());
    for variable in field::list(&whole, "/env") {
        let name = field::name(variable);
        let is_text = variable.get("value").is_none_or(Value::is_string);
        if name.is_empty() || name.contains('=') || !is_text {
            return Err(format!(
                "`env`: {variable} is no variable: it needs a name, and its value is a text, in quotes"
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
            return Err(format!("`resources`: {name}: {value} is no quantity"));
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
