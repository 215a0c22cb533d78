//! Validation against everything that the API server would refuse in a pod with checks.
//!
//! Such a configuration is refused when it is read: with `failurePolicy: Fail`, it would stop
//! the creation of every pod in a labelled namespace.

use contract::findings::Findings;
use contract::names;
use model::selector::{LabelSelector, MatchExpression, SelectorObject};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::HostPath;
use crate::{field, quantity};

/// Prefix of MIG resources in NVIDIA's device plugin.
const MIG: &str = "nvidia.com/mig-";
/// Suffix of resources that several pods share, in NVIDIA's device plugin.
const SHARED: &str = ".shared";
/// Values of `hostPath.type` that Kubernetes accepts, beside an empty one.
const HOST_PATH_TYPES: [&str; 7] = [
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

/// Key of a container, and what is wrong with its value.
pub(super) type Wrong = (&'static str, String);

/// Checks the path of the connector's socket.
pub(super) fn socket(socket: &str, findings: &mut Findings<'_>) {
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    if !path.starts_with('/') || path.ends_with('/') || path.contains(':') {
        let wanted = "write the path of a socket, such as unix:///var/run/nvsentinel.sock";
        findings.refuse("connectorSocket", wanted);
    }
}

/// Checks a selector of the webhook's registration.
pub(super) fn selector(path: &str, selector: Option<&Value>, findings: &mut Findings<'_>) {
    let selector = selector.map(SelectorObject::deserialize);
    let Some(selector) = selector.and_then(|selector| findings.check(path, selector)) else {
        return;
    };
    for MatchExpression {
        operator, values, ..
    } in &selector.match_expressions
    {
        if !values.is_empty() && ["Exists", "DoesNotExist"].contains(&operator.as_str()) {
            findings.at_key(path, format_args!("{operator} takes no values"));
        }
    }
    // An empty selector selects everything.
    if selector != SelectorObject::default() {
        findings.check(path, LabelSelector::try_from(&selector));
    }
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

/// Checks the path that a volume is mounted at.
pub(super) fn mount_path(path: &str, mount: &str, findings: &mut Findings<'_>) {
    if !mount.starts_with('/') {
        findings.refuse(path, "write a path that begins with a slash");
    } else if mount.contains(':') {
        findings.refuse(path, "write a path without ':'");
    }
}

/// Checks a mount of a path of the host.
pub(super) fn host_path(path: &str, mount: &HostPath, findings: &mut Findings<'_>) {
    let key = |key: &str| format!("{path}.{key}");
    findings.check(&key("name"), names::dns_label(&mount.name));
    mount_path(&key("mountPath"), &mount.mount_path, findings);
    let host = &mount.host_path;
    if !host.starts_with('/') || host.split('/').any(|part| part == "..") {
        findings.refuse(
            &key("hostPath"),
            "write an absolute path of a host, without `..`",
        );
    }
    if let Some(kind) = mount
        .host_path_type
        .as_deref()
        .filter(|kind| !kind.is_empty())
    {
        let known = HOST_PATH_TYPES.map(|kind| (kind, ()));
        findings.one_of(&key("hostPathType"), kind, &known);
    }
}

/// Checks a container in the form of the Kubernetes API.
pub(super) fn container(container: &Map<String, Value>) -> Result<(), Wrong> {
    let text = |key: &str| container.get(key).and_then(Value::as_str);
    if text("image").is_none_or(|image| image.is_empty() || image.contains(char::is_whitespace)) {
        return Err(("image", "it is not the name of an image".to_owned()));
    }
    if let Some(policy) = container.get("imagePullPolicy")
        && policy
            .as_str()
            .is_none_or(|it| !PULL_POLICIES.contains(&it))
    {
        let known = PULL_POLICIES[1..].join(", ");
        let what = format!("{policy} is not known; there are {known}");
        return Err(("imagePullPolicy", what));
    }
    // A restartable init container never ends, so it would hold back no pod.
    if container.contains_key("restartPolicy") {
        let what = "it cannot be set: a check runs once, to its end";
        return Err(("restartPolicy", what.to_owned()));
    }
    for key in ["command", "args"] {
        let is_text = |list: &Value| {
            let texts = list.as_array();
            list.is_null() || texts.is_some_and(|texts| texts.iter().all(Value::is_string))
        };
        if !container.get(key).is_none_or(is_text) {
            return Err((key, "it is not a list of texts".to_owned()));
        }
    }
    let whole = Value::Object(container.clone());
    for variable in field::list(&whole, "/env") {
        let name = field::name(variable);
        let is_text = variable.get("value").is_none_or(Value::is_string);
        if name.is_empty() || name.contains('=') || !is_text {
            let what = format!(
                "{variable} is not a variable: it needs a name, and its value must be a text, in quotes"
            );
            return Err(("env", what));
        }
    }
    for mount in field::list(&whole, "/volumeMounts") {
        let path = field::text(mount, "/mountPath").unwrap_or_default();
        if field::name(mount).is_empty() {
            return Err(("volumeMounts", format!("{mount} names no volume")));
        }
        if path.is_empty() || path.contains(':') {
            let what = format!("{path:?} is not a path to mount at");
            return Err(("volumeMounts", what));
        }
    }
    resources(&whole).map_err(|what| ("resources", what))
}

fn resources(container: &Value) -> Result<(), String> {
    let part = |key: &str| container.pointer(key).and_then(Value::as_object);
    let (requests, limits) = (part("/resources/requests"), part("/resources/limits"));
    for (name, value) in requests.into_iter().chain(limits).flatten() {
        if quantity::of(value).is_none_or(|(millis, _)| millis < 0) {
            return Err(format!("{name}: {value} is not a quantity"));
        }
    }
    for (name, request) in requests.into_iter().flatten() {
        let limit = limits.and_then(|limits| limits.get(name));
        let millis = |value: &Value| quantity::of(value).map(|(millis, _)| millis);
        if limit
            .and_then(millis)
            .is_some_and(|limit| millis(request) > Some(limit))
        {
            return Err(format!("the request of {name} is above its limit"));
        }
    }
    Ok(())
}
