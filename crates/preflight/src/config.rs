//! Configuration of preflight: the containers that checks add to pods, and how gangs are found.
//!
//! Three forms are accepted: NVSentinel's configuration document (YAML), the values of its
//! chart (also under the key `preflight`), and the keys of ADR-026 (under
//! `preflight-injector`). If two keys configure the same thing, the key of the configuration
//! document wins over the key of the ADR.

mod chart;
mod container;
mod discovery;
mod keys;
mod older;
mod valid;

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use contract::findings::{FileError, Findings, Format};
use contract::names;

pub use container::CheckContainer;
pub use discovery::{Discovery, MinCount, PodGroups, Resource};

use policy::glob::Glob;

use keys::{
    CONFIG_MAP, GANG_TIMEOUT, Keys, Placement, ResourceMode, Strategy, Time, WRAPPERS, Wrapped,
};

use crate::topology::Topologies;

/// Most checks. Each adds a container to every pod that gets it, and etcd stores at most 1.5 MB
/// per object.
pub const MAX_CHECKS: usize = 32;

/// Accepted timeouts. The checks read whole seconds.
const TIMES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(7 * 24 * 3600);

/// Network devices of Mellanox and Amazon (EFA); [`network_resources`] adds those of Google.
const NETWORK_RESOURCES: [&str; 2] = ["nvidia.com/mlnxnics", "vpc.amazonaws.com/efa"];
/// Network cards of a Google GPU machine; their resource names differ only by the number, from
/// 0 on.
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
/// Configuration of the webhook: the checks, the pods that get them, and what they inherit.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Checks, in running order.
    pub checks: Vec<CheckContainer>,
    /// Resources and device classes that are GPUs.
    pub gpus: Devices,
    /// Resources and device classes that are network devices.
    pub networks: Devices,
    /// Value of the checks' `PLATFORM_CONNECTOR_SOCKET`.
    pub connector_socket: String,
    /// Value of the checks' `PROCESSING_STRATEGY`.
    pub processing_strategy: String,
    /// True if the checks run before the pod's own init containers, false if after.
    pub prepend: bool,
    /// Names of the image pull secrets that are added to pods.
    pub image_pull_secrets: Vec<String>,
    /// Environment variables that checks inherit from the user's containers.
    pub env_patterns: Vec<Glob>,
    /// Volume mounts that checks inherit from the user's containers.
    pub mount_patterns: Vec<Glob>,
    /// Method that finds the gang of a pod.
    pub discovery: Discovery,
    /// Settings of the checks of gangs.
    pub coordination: Coordination,
    /// NCCL topology file, by instance type.
    pub topologies: Topologies,
    /// Namespaces that never get checks.
    pub excluded_namespaces: Vec<String>,
    /// The only namespaces that get checks; if empty, the namespace selector decides.
    pub namespaces: Vec<String>,
    /// Namespace selector of the webhook's registration.
    pub namespace_selector: Value,
    /// Object selector of the webhook's registration.
    pub object_selector: Option<Value>,
    /// Fate of pods while no webhook answers: not created (`Fail`) or started unchecked
    /// (`Ignore`).
    pub failure_policy: FailurePolicy,
    /// True if checks run only where their result means something: gang checks in gangs,
    /// loopback with two GPUs or more. If false, every check runs in every pod, as NVSentinel's
    /// documents have it.
    pub gate_checks: bool,
    /// True if a check gets as many GPUs as the largest container has, false for the sum of all
    /// containers.
    pub largest_container: bool,
    /// Handling of pods in namespaces where Pod Security forbids what their checks need. `None`
    /// is `Https` if the webhook can reach the controller, and `Skip` otherwise.
    pub pod_security: Option<PodSecurity>,
    /// Value of `CHECK_TIMEOUT_SECONDS`; `None` leaves the checks' own defaults.
    pub check_timeout: Option<Duration>,
    /// Time that a passed check counts for the same node and GPUs; `None` tests
    /// every pod.
    pub result_cache: Option<Duration>,
    /// Warnings for the operator about keys that have no effect, or another effect than in
    /// NVSentinel.
    pub warnings: Vec<String>,
}

/// Resource names of one kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Names of extended resources, such as `nvidia.com/gpu`.
    pub resources: Vec<String>,
    /// Device classes of dynamic resource allocation.
    pub classes: Vec<String>,
}

/// Settings of the checks of gangs.
#[derive(Clone, Debug, PartialEq)]
pub struct Coordination {
    /// True if gangs are detected at all.
    pub enabled: bool,
    /// Longest wait for all members.
    pub timeout: Duration,
    /// TCP port of rank 0.
    pub master_port: u16,
    /// Directory where the gang's `ConfigMap` is mounted in a check.
    pub mount_path: String,
    /// `ConfigMap` in the pod's namespace that holds NCCL's topology file as `topo.xml`.
    pub topology_config_map: Option<String>,
    /// Name of the topology file, if it is the same for all machines.
    pub topology_file: Option<String>,
    /// Host paths that are mounted into checks of gangs.
    pub host_paths: Vec<HostPath>,
    /// Volumes of the pod that are mounted into checks of gangs.
    pub volume_mounts: Vec<VolumeMount>,
    /// True if checks of gangs get every claim of the pod, not only those of GPUs and network
    /// devices.
    pub mirror_claims: bool,
}

/// Path of the host that is mounted into a check.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostPath {
    /// Name of the volume.
    pub name: String,
    /// Absolute path on the host.
    pub host_path: String,
    /// Path in the check.
    pub mount_path: String,
    /// True for a read-only mount.
    #[serde(default = "yes")]
    pub read_only: bool,
    /// Kind of the path, such as `Directory`; if `None`, the kubelet does not check it.
    #[serde(default)]
    pub host_path_type: Option<String>,
}

/// Volume of the pod that is mounted into a check.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Path in the check.
    pub mount_path: String,
    /// True for a read-only mount.
    #[serde(default = "yes")]
    pub read_only: bool,
}

/// Fate of pods while no webhook answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum FailurePolicy {
    /// Pods are not created.
    #[default]
    Fail,
    /// Pods start without checks.
    Ignore,
}

/// Handling of pods in namespaces that forbid host paths, which checks need to reach the
/// connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodSecurity {
    /// Checks report to the webhook over HTTPS, and the webhook forwards the reports to the
    /// controller.
    Https,
    /// Pods start without checks.
    Skip,
    /// Pods are denied, with the reason.
    Deny,
}

/// Warning about any `configTransport` other than [`CONFIG_MAP`].
const NO_TRANSPORT: &str =
    "has no effect: gangs get a ConfigMap, and the checks of gpuwarden also ask the webhook";
/// Warning about `ignoreUnknownChecks`, a key of newer charts.
const IGNORE_UNKNOWN: &str = "ignoreUnknownChecks: true has no effect: a pod whose annotation names a check that \
                              is not known is denied";

// === impl Config ===

impl Config {
    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        let mut findings = Findings::new(text, source, Format::Yaml)?;
        let keys = if WRAPPERS.iter().any(|key| findings.enter_table(key)) {
            Some(findings.parse::<Wrapped>()?.keys)
        } else {
            findings.parse()?
        };
        // An empty file is a configuration without keys.
        let keys = match keys {
            Some(keys) => keys,
            None => Findings::new("{}", source, Format::Yaml)?.parse()?,
        };
        let config = Self::from_keys(keys, &mut findings);
        findings.result(config)
    }

    fn from_keys(keys: Keys, findings: &mut Findings<'_>) -> Self {
        let is_values = chart::is_values(&keys.rest, findings);
        // In a chart's values, `image` is the webhook's image, which contains no checks.
        let image = keys.image.filter(|image| !image.is_null() && !is_values);
        let image = image.and_then(|image| {
            let image = container::Image::deserialize(image);
            if image.is_err() {
                findings.refuse("image", "write its name, or `repository` and `tag`");
            }
            image.ok()
        });
        let mut checks = Vec::new();
        if is_values && keys.init_containers.is_none() && keys.checks.is_none() {
            let what = "it is missing: these are values of a chart, whose own list of checks is \
                        unknown here; add it, or write a file of `image: IMAGE` alone for the checks \
                        of gpuwarden";
            findings.at_key("initContainers", what);
        } else {
            let variables = container::Variables {
                dcgm: &keys.dcgm,
                nccl: &keys.nccl,
                allreduce: &keys.nccl_allreduce_extra_env,
            };
            let lists = (keys.init_containers, keys.checks);
            checks = container::checks(lists, image.as_ref(), &variables, findings);
        }
        let mut warnings = Vec::new();
        if is_values {
            warnings.extend(chart::without_tag(&checks));
        }
        let secrets = chart::pull_secrets(
            keys.injected_image_pull_secrets,
            keys.image_pull_secrets,
            is_values,
            &mut warnings,
            findings,
        );
        if keys.ignore_unknown_checks {
            warnings.push(IGNORE_UNKNOWN.to_owned());
        }
        let mut coordination = keys.gang_coordination;
        if coordination.config_transport != CONFIG_MAP {
            let found = &coordination.config_transport;
            warnings.push(format!(
                "gangCoordination.configTransport: {found:?} {NO_TRANSPORT}"
            ));
        }
        let own = Time::read(
            coordination.timeout.take(),
            "gangCoordination.timeout",
            None,
            findings,
        );
        let older = Time::read(keys.gang_timeout, "gangTimeout", None, findings);
        let timeout = own.or(older).unwrap_or(GANG_TIMEOUT);
        let gpus = keys.gpu_detection.devices(
            "gpuDetection",
            ("gpuResourceNames", keys.gpu_resource_names),
            || vec!["nvidia.com/gpu".to_owned()],
            &["gpu.nvidia.com"],
            findings,
        );
        warnings.extend(valid::parts_of_gpus(&gpus.resources));
        let networks = keys.network_detection.devices(
            "networkDetection",
            ("networkResourceNames", keys.network_resource_names),
            network_resources,
            &[],
            findings,
        );
        valid::socket(&keys.connector_socket, findings);
        for (list, key) in [
            (Some(&keys.namespaces), "namespaces"),
            (keys.exclude_namespaces.as_ref(), "excludeNamespaces"),
        ] {
            for (at, name) in list.into_iter().flatten().enumerate() {
                findings.check(&format!("{key}[{at}]"), names::dns_label(name));
            }
        }
        valid::selector(
            "namespaceSelector",
            keys.namespace_selector.as_ref(),
            findings,
        );
        let object_selector = keys
            .object_selector
            .filter(|selector| selector.as_object().is_some_and(|keys| !keys.is_empty()));
        valid::selector("objectSelector", object_selector.as_ref(), findings);
        Self {
            checks,
            gpus,
            networks,
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
            discovery: keys.gang_discovery.checked(findings),
            coordination: coordination.read(timeout, findings),
            topologies: keys.nccl_topology.read(findings),
            excluded_namespaces: keys
                .exclude_namespaces
                .unwrap_or_else(|| owned(&EXCLUDED_NAMESPACES)),
            // A list of namespaces already selects them, so no label is required as well.
            namespace_selector: match keys.namespace_selector {
                Some(selector) => selector,
                None if keys.namespaces.is_empty() => labelled(),
                None => serde_json::json!({}),
            },
            namespaces: keys.namespaces,
            object_selector,
            failure_policy: keys.webhook.failure_policy,
            gate_checks: keys.gate_checks,
            largest_container: keys.resource_mode == ResourceMode::Max,
            pod_security: keys.pod_security,
            check_timeout: Time::read(keys.check_timeout, "checkTimeout", Some(&TIMES), findings),
            result_cache: Time::read(keys.result_cache, "resultCache", Some(&TIMES), findings),
            warnings,
        }
    }

    /// Returns the check with this name.
    pub fn check(&self, name: &str) -> Option<&CheckContainer> {
        self.checks.iter().find(|check| check.name == name)
    }
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
    owned(&NETWORK_RESOURCES)
        .into_iter()
        .chain(google)
        .collect()
}

fn yes() -> bool {
    true
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().copied().map(str::to_owned).collect()
}

fn globs(patterns: &[&str]) -> Vec<Glob> {
    patterns.iter().copied().map(Glob::from).collect()
}

#[cfg(test)]
pub(crate) mod tests;
