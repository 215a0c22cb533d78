//! The configuration of preflight: which containers are put into which pods, and how gangs are known.
//!
//! It is NVSentinel's file (YAML), the values of its chart, also under `preflight`, or the keys that ADR-026
//! has under `preflight-injector`. Where two keys say the same thing, the one of the configuration
//! document goes before the one of the ADR.

mod chart;
mod container;
mod discovery;
mod keys;
mod older;
mod valid;

use std::ops::RangeInclusive;
use std::time::Duration;

use jiff::SignedDuration;
use serde::{Deserialize, Deserializer, de};
use serde_json::Value;

use contract::findings::on_line_with;

pub use container::CheckContainer;
pub use discovery::{Discovery, MinCount, PodGroups, Resource};

use policy::glob::Glob;

use keys::{
    CONFIG_MAP, GANG_TIMEOUT, Keys, Placement, ResourceMode, Strategy, Wrapped, is_wrapped,
};

use crate::topology::Topologies;

/// Largest configuration (bytes): what a `ConfigMap` can hold.
pub const MAX_CONFIG_BYTES: usize = 1024 * 1024;
/// Most checks. Each is a container of every pod that gets them, and an object in etcd has 1.5 MB.
pub const MAX_CHECKS: usize = 32;

/// Times that the checks take: they take whole seconds.
const TIMES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(7 * 24 * 3600);

/// The network devices of Mellanox, of Amazon (EFA), and of Google's GPU machines.
const NETWORK_RESOURCES: [&str; 2] = ["nvidia.com/mlnxnics", "vpc.amazonaws.com/efa"];
/// Google's names differ by the number of the card alone, from 0 on; so many there are.
const GOOGLE_NICS: usize = 8;
const ENV_PATTERNS: [&str; 6] = [
    "NCCL_*",
    "FI_*",
    "LD_LIBRARY_PATH",
    "UCX_*",
    "TORCH_NCCL_*",
    "CUDA_DEVICE_ORDER",
];
const MOUNT_PATTERNS: [&str; 7] = [
    "host-opt-amazon*",
    "host-libefa*",
    "host-libibverbs*",
    "amazon-efa*",
    "nvtcpxo-*",
    "nccl-*",
    "dev-shm",
];
const EXCLUDED_NAMESPACES: [&str; 4] = [
    "nvsentinel",
    "kube-system",
    "kube-public",
    "kube-node-lease",
];
/// An error of a configuration that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}")]
pub struct ConfigError {
    /// The file, or the object.
    pub place: String,
    /// The problem, and what to do.
    pub what: String,
}

/// What the injected containers are, and which pods get them.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The checks, in the order in which they run.
    pub checks: Vec<CheckContainer>,
    /// The names of the resources and device classes that are GPUs.
    pub gpus: Devices,
    /// The names of the resources and device classes that are network devices.
    pub networks: Devices,
    /// The value of `PLATFORM_CONNECTOR_SOCKET`.
    pub connector_socket: String,
    /// The value of `PROCESSING_STRATEGY`.
    pub processing_strategy: String,
    /// Checks come before a pod's own init containers, not after.
    pub prepend: bool,
    /// Names of secrets that pods get to pull the checks' images.
    pub image_pull_secrets: Vec<String>,
    /// The variables of users' containers that checks get.
    pub env_patterns: Vec<Glob>,
    /// The volume mounts of users' containers that checks get.
    pub mount_patterns: Vec<Glob>,
    /// How the gang of a pod is known.
    pub discovery: Discovery,
    /// What gangs get.
    pub coordination: Coordination,
    /// Which topology file of NCCL the machines of an instance type have.
    pub topologies: Topologies,
    /// Namespaces that never get checks.
    pub excluded_namespaces: Vec<String>,
    /// The only namespaces that get checks; empty for those of the selector.
    pub namespaces: Vec<String>,
    /// The selector of namespaces in the webhook's registration.
    pub namespace_selector: Value,
    /// The selector of pods in the webhook's registration, if there is one.
    pub object_selector: Option<Value>,
    /// Whether pods wait (`Fail`) or start unchecked (`Ignore`) while no webhook answers.
    pub failure_policy: FailurePolicy,
    /// Checks run only where they can say something: gang checks in gangs, loopback with two GPUs or
    /// more. Where false, every check runs in every pod, as the documents have it.
    pub gate_checks: bool,
    /// A check gets the largest number of GPUs that one container has, not those of all containers.
    pub largest_container: bool,
    /// What becomes of pods where Pod Security forbids what their checks need. Where `None`, their checks
    /// report to the webhook if that has a way to the controller, and they start without checks otherwise.
    pub pod_security: Option<PodSecurity>,
    /// The value of `CHECK_TIMEOUT_SECONDS`; `None` for the defaults of the checks.
    pub check_timeout: Option<Duration>,
    /// How long a check that passed on a node is not repeated there for the same GPUs; `None`: each pod is
    /// tested.
    pub result_cache: Option<Duration>,
    /// Warnings for the operator: what is read and has no effect, or another one than in NVSentinel.
    pub warnings: Vec<String>,
}

/// Names of one kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Extended resources.
    pub resources: Vec<String>,
    /// Device classes of dynamic resource allocation.
    pub classes: Vec<String>,
}

/// What gangs get.
#[derive(Clone, Debug, PartialEq)]
pub struct Coordination {
    /// Gangs are looked for at all.
    pub enabled: bool,
    /// Longest wait for all members.
    pub timeout: Duration,
    /// The TCP port of rank 0.
    pub master_port: u16,
    /// The place of the gang's `ConfigMap` in a check.
    pub mount_path: String,
    /// A `ConfigMap` with NCCL's topology file `topo.xml`, of the same namespace.
    pub topology_config_map: Option<String>,
    /// The name of the topology file of all machines.
    pub topology_file: Option<String>,
    /// Host paths that checks of gangs get.
    pub host_paths: Vec<HostPath>,
    /// Volumes of the pod that checks of gangs get.
    pub volume_mounts: Vec<VolumeMount>,
    /// Checks of gangs get every claim of the pod, not only those of GPUs and network devices.
    pub mirror_claims: bool,
}

/// A path of the host, mounted into a check.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostPath {
    /// Name of the volume.
    pub name: String,
    /// The path on the host.
    pub host_path: String,
    /// The path in the check.
    pub mount_path: String,
    /// The check cannot write there.
    #[serde(default = "yes")]
    pub read_only: bool,
    /// The kind of the path, such as `Directory`; not checked by the kubelet where `None`.
    #[serde(default)]
    pub host_path_type: Option<String>,
}

/// A volume that the pod has, mounted into a check.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// The path in the check.
    pub mount_path: String,
    /// The check cannot write there.
    #[serde(default = "yes")]
    pub read_only: bool,
}

/// What becomes of pods while no webhook answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum FailurePolicy {
    /// They are not created.
    #[default]
    Fail,
    /// They start without checks.
    Ignore,
}

/// What becomes of pods whose namespace forbids paths of the host, by which checks report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodSecurity {
    /// Their checks report to the webhook, which brings it to the controller.
    Https,
    /// They start without checks.
    Skip,
    /// They are denied.
    Deny,
}

/// Warning about another one.
const NO_TRANSPORT: &str =
    "has no effect: gangs get a ConfigMap, and our own checks ask the webhook besides";
/// Warning about a key of newer charts.
const IGNORE_UNKNOWN: &str = "ignoreUnknownChecks: true has no effect: a pod whose annotation names a check that \
                              is not known is denied";

// === impl Config ===

impl Config {
    /// Reads a configuration; `place` names it in errors.
    pub fn parse(text: &str, place: &str) -> Result<Self, ConfigError> {
        let wrong = |what: String| ConfigError {
            place: place.to_owned(),
            what,
        };
        if text.len() > MAX_CONFIG_BYTES {
            let found = text.len();
            return Err(wrong(format!(
                "has {found} bytes, at most {MAX_CONFIG_BYTES} are read"
            )));
        }
        let read: Value = from_yaml(text).map_err(&wrong)?;
        let keys = match read {
            // An empty file is one without keys.
            Value::Null => from_yaml("{}"),
            Value::Object(keys) if is_wrapped(&keys) => {
                from_yaml::<Wrapped>(text).map(|wrapped| wrapped.keys)
            }
            _ => from_yaml(text),
        };
        let config = Self::from_keys(keys.map_err(&wrong)?).map_err(&wrong)?;
        let mut names = valid::names(&config).into_iter();
        if let Some((key, error)) = names.find_map(|(key, checked)| Some((key, checked.err()?))) {
            let line = on_line_with(text, &error.text);
            return Err(wrong(format!("{line}{key}: {error}")));
        }
        Ok(config)
    }

    fn from_keys(keys: Keys) -> Result<Self, String> {
        let older = keys.older;
        let is_values = chart::is_values(&keys.rest)?;
        // The chart's image has its webhook, and no checks.
        let image = keys.image.filter(|image| !image.is_null() && !is_values);
        let image = image.map(container::Image::deserialize).transpose();
        let image = image.map_err(|error| format!("image: {error}"))?;
        if is_values && keys.init_containers.is_none() && keys.checks.is_none() {
            return Err(
                "initContainers is missing: these are values of a chart, whose own list of checks is not known                  here; add it, or write a file of `image: IMAGE` alone for the checks of gpuwarden"
                    .into(),
            );
        }
        let checks = container::checks(
            keys.init_containers,
            keys.checks,
            image.as_ref(),
            &older,
            &keys.nccl_allreduce_extra_env,
        )?;
        let mut warnings = Vec::new();
        if is_values {
            warnings.extend(chart::without_tag(&checks));
        }
        let secrets = chart::pull_secrets(
            keys.injected_image_pull_secrets,
            keys.image_pull_secrets,
            is_values,
            &mut warnings,
        );
        if keys.ignore_unknown_checks {
            warnings.push(IGNORE_UNKNOWN.to_owned());
        }
        let coordination = keys.gang_coordination;
        if coordination.config_transport != CONFIG_MAP {
            let found = &coordination.config_transport;
            warnings.push(format!(
                "gangCoordination.configTransport: {found:?} {NO_TRANSPORT}"
            ));
        }
        let timeout = coordination.timeout.or(older.gang_timeout);
        let gpus = older.gpu_detection.devices(
            keys.gpu_resource_names,
            || vec!["nvidia.com/gpu".to_owned()],
            &["gpu.nvidia.com"],
        );
        warnings.extend(valid::parts_of_gpus(&gpus.resources));
        let config = Self {
            checks,
            gpus,
            networks: older.network_detection.devices(
                keys.network_resource_names,
                network_resources,
                &[],
            ),
            connector_socket: keys.connector_socket,
            processing_strategy: match keys.processing_strategy {
                Strategy::Execute => "EXECUTE_REMEDIATION".to_owned(),
                Strategy::Store => "STORE_ONLY".to_owned(),
            },
            prepend: keys.init_container_placement == Placement::Prepend,
            image_pull_secrets: secrets,
            env_patterns: keys
                .nccl_env_patterns
                .unwrap_or_else(|| globs(&ENV_PATTERNS)),
            mount_patterns: keys
                .volume_mount_patterns
                .unwrap_or_else(|| globs(&MOUNT_PATTERNS)),
            discovery: keys.gang_discovery.discovery()?,
            coordination: coordination.read(timeout.unwrap_or(GANG_TIMEOUT))?,
            topologies: older.nccl_topology.read()?,
            excluded_namespaces: older
                .exclude_namespaces
                .unwrap_or_else(|| names(&EXCLUDED_NAMESPACES)),
            // Who names namespaces has chosen.
            namespace_selector: match keys.namespace_selector {
                Some(selector) => selector,
                None if older.namespaces.is_empty() => labelled(),
                None => serde_json::json!({}),
            },
            namespaces: older.namespaces,
            object_selector: keys
                .object_selector
                .filter(|selector| selector.as_object().is_some_and(|keys| !keys.is_empty())),
            failure_policy: older.webhook.failure_policy,
            gate_checks: keys.gate_checks,
            largest_container: keys.resource_mode == ResourceMode::Max,
            pod_security: keys.pod_security,
            check_timeout: in_range("checkTimeout", keys.check_timeout)?,
            result_cache: in_range("resultCache", keys.result_cache)?,
            warnings,
        };
        valid::check(&config)?;
        Ok(config)
    }

    /// Returns the check of this name.
    pub fn check(&self, name: &str) -> Option<&CheckContainer> {
        self.checks.iter().find(|check| check.name == name)
    }
}

/// Returns a time for the checks, if they take it.
fn in_range(key: &str, time: Option<Duration>) -> Result<Option<Duration>, String> {
    match time.filter(|time| !TIMES.contains(time)) {
        Some(_) => Err(format!("{key}: write a time from 1s to 168h")),
        None => Ok(time),
    }
}

fn from_yaml<T: de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
}

fn labelled() -> Value {
    serde_json::json!({"matchLabels": {"nvsentinel.nvidia.com/preflight": "enabled"}})
}

fn network_resources() -> Vec<String> {
    let google = (0..GOOGLE_NICS).flat_map(|card| {
        [
            format!("networking.gke.io.networks/gpu-nic{card}"),
            format!("networking.gke.io.networks/gpu-nic{card}.IP"),
        ]
    });
    names(&NETWORK_RESOURCES)
        .into_iter()
        .chain(google)
        .collect()
}

fn yes() -> bool {
    true
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().copied().map(str::to_owned).collect()
}

fn globs(patterns: &[&str]) -> Vec<Glob> {
    patterns.iter().copied().map(Glob::from).collect()
}

/// Reads `10m`, `300s`, or a number of seconds.
fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "expected a time: write 10m, 300s or a number of seconds"
    )]
    enum Form {
        Seconds(u32),
        Text(String),
    }
    let text = match Option::<Form>::deserialize(from)? {
        None => return Ok(None),
        Some(Form::Seconds(seconds)) => format!("{seconds}s"),
        Some(Form::Text(text)) => text,
    };
    let read = text.parse::<SignedDuration>().ok();
    let read = read.and_then(|read| Duration::try_from(read).ok());
    match read.filter(|read| !read.is_zero()) {
        Some(read) => Ok(Some(read)),
        None => Err(de::Error::custom(format!(
            "{text:?} is no time; write 10m, 300s or a number of seconds"
        ))),
    }
}

#[cfg(test)]
pub(crate) mod tests;
