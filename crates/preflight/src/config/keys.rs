//! Keys of the configuration file, as serde reads them, and their defaults.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use jiff::SignedDuration;
use serde::Deserialize;
use serde_json::Value;

use contract::findings::Findings;
use contract::names;
use policy::glob::Glob;

use super::{
    Coordination, HostPath, PodSecurity, VolumeMount, container, discovery, older, valid, yes,
};
use crate::topology;

/// Socket of the connector on a node; the default of NVSentinel's chart.
const CONNECTOR_SOCKET: &str = "unix:///var/run/nvsentinel.sock";

/// Top-level keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Keys {
    pub(super) init_containers: Option<Vec<container::Entry>>,
    /// Checks as ADR-026 lists them.
    pub(super) checks: Option<Vec<container::Entry>>,
    /// Image of all our checks. In a chart's values: the image of its Deployment, in whatever
    /// form.
    pub(super) image: Option<Value>,
    pub(super) gpu_resource_names: Option<Vec<String>>,
    pub(super) network_resource_names: Option<Vec<String>>,
    #[serde(default = "connector_socket")]
    pub(super) connector_socket: String,
    #[serde(default)]
    pub(super) processing_strategy: Strategy,
    #[serde(default)]
    pub(super) init_container_placement: Placement,
    /// Secrets for pods. In a chart's values: secrets for its Deployment.
    pub(super) image_pull_secrets: Option<Vec<Secret>>,
    /// Secrets for pods, by the name that the chart's values use.
    pub(super) injected_image_pull_secrets: Option<Vec<Secret>>,
    #[serde(default)]
    pub(super) ignore_unknown_checks: bool,
    pub(super) nccl_env_patterns: Option<Vec<Glob>>,
    pub(super) volume_mount_patterns: Option<Vec<Glob>>,
    #[serde(default)]
    pub(super) nccl_allreduce_extra_env: Vec<Value>,
    #[serde(default)]
    pub(super) gang_discovery: discovery::Entry,
    #[serde(default)]
    pub(super) gang_coordination: CoordinationKeys,
    pub(super) namespace_selector: Option<Value>,
    pub(super) object_selector: Option<Value>,
    #[serde(default = "yes")]
    pub(super) gate_checks: bool,
    #[serde(default)]
    pub(super) resource_mode: ResourceMode,
    pub(super) pod_security: Option<PodSecurity>,
    pub(super) check_timeout: Option<Time>,
    pub(super) result_cache: Option<Time>,
    /// Only read by the chart: true if the webhook is deployed at all.
    #[serde(rename = "enabled")]
    _enabled: Option<bool>,
    // Keys of ADR-026 from here on.
    #[serde(default)]
    pub(super) dcgm: older::Dcgm,
    #[serde(default)]
    pub(super) nccl: older::Nccl,
    pub(super) gang_timeout: Option<Time>,
    #[serde(default)]
    pub(super) gpu_detection: older::Detection,
    #[serde(default)]
    pub(super) network_detection: older::Detection,
    #[serde(default)]
    pub(super) nccl_topology: topology::Keys,
    #[serde(default)]
    pub(super) namespaces: Vec<String>,
    pub(super) exclude_namespaces: Option<Vec<String>>,
    #[serde(default)]
    pub(super) webhook: older::Webhook,
    /// All other keys; [`chart::is_values`](super::chart::is_values) judges them.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct CoordinationKeys {
    enabled: bool,
    pub(super) timeout: Option<Time>,
    master_port: u16,
    config_map_mount_path: String,
    nccl_topo_config_map: String,
    /// The chart makes a `ConfigMap` of this text, which is not supported here.
    nccl_topo_data: String,
    nccl_topo_shape: String,
    extra_host_path_mounts: Vec<HostPath>,
    extra_volume_mounts: Vec<VolumeMount>,
    mirror_resource_claims: bool,
    /// Transport of the gang's configuration to the checks; a key of newer charts.
    pub(super) config_transport: String,
}

/// The only supported value of `gangCoordination.configTransport`.
pub(super) const CONFIG_MAP: &str = "configMap";

#[derive(Deserialize, Clone, Copy, Default)]
pub(super) enum Strategy {
    #[default]
    #[serde(rename = "EXECUTE_REMEDIATION")]
    Execute,
    #[serde(rename = "STORE_ONLY")]
    Store,
}

#[derive(Deserialize, Clone, Copy, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum Placement {
    #[default]
    Append,
    Prepend,
}

#[derive(Deserialize, Clone, Copy, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum ResourceMode {
    #[default]
    Sum,
    Max,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected the name of a Secret")]
pub(super) enum Secret {
    Name(String),
    Object { name: String },
}

/// Time as text, or a number of seconds.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a time such as 10m or 300s, or a number of seconds"
)]
pub(super) enum Time {
    Seconds(u32),
    Text(String),
}

/// Keys of chart values that hold our configuration.
pub(super) const WRAPPERS: [&str; 2] = ["preflight", "preflight-injector"];

/// Chart values that hold our configuration under one key.
#[derive(Deserialize)]
pub(super) struct Wrapped {
    #[serde(rename = "preflight", alias = "preflight-injector")]
    pub(super) keys: Keys,
}

// === impl CoordinationKeys ===

impl Default for CoordinationKeys {
    fn default() -> Self {
        Self {
            enabled: true,
            timeout: None,
            master_port: 29500,
            config_map_mount_path: "/etc/preflight".to_owned(),
            nccl_topo_config_map: String::new(),
            nccl_topo_data: String::new(),
            nccl_topo_shape: String::new(),
            extra_host_path_mounts: Vec::new(),
            extra_volume_mounts: Vec::new(),
            mirror_resource_claims: true,
            config_transport: CONFIG_MAP.to_owned(),
        }
    }
}

/// Default of the longest wait for a gang.
pub(super) const GANG_TIMEOUT: Duration = Duration::from_secs(600);

impl CoordinationKeys {
    pub(super) fn read(self, timeout: Duration, findings: &mut Findings<'_>) -> Coordination {
        let path = |key: &str| format!("gangCoordination.{key}");
        valid::mount_path(
            &path("configMapMountPath"),
            &self.config_map_mount_path,
            findings,
        );
        for (at, mount) in self.extra_host_path_mounts.iter().enumerate() {
            valid::host_path(
                &path(&format!("extraHostPathMounts[{at}]")),
                mount,
                findings,
            );
        }
        for (at, mount) in self.extra_volume_mounts.iter().enumerate() {
            let path = path(&format!("extraVolumeMounts[{at}].mountPath"));
            valid::mount_path(&path, &mount.mount_path, findings);
        }
        if !self.nccl_topo_data.is_empty() {
            let what = "it is not supported; make a ConfigMap with the file topo.xml in each \
                        namespace, and name it by ncclTopoConfigMap";
            findings.at_key(&path("ncclTopoData"), what);
        }
        let shape = Some(&*self.nccl_topo_shape).filter(|shape| !shape.is_empty());
        let shape = shape.map(topology::of_shape);
        if self.master_port == 0 {
            findings.refuse(&path("masterPort"), "write a port from 1 to 65535");
        }
        let config_map = Some(self.nccl_topo_config_map).filter(|name| !name.is_empty());
        if let Some(name) = &config_map {
            findings.check(&path("ncclTopoConfigMap"), names::object_name(name));
        }
        Coordination {
            enabled: self.enabled,
            timeout,
            master_port: self.master_port,
            mount_path: self.config_map_mount_path,
            topology_config_map: config_map,
            topology_file: shape.and_then(|shape| findings.check(&path("ncclTopoShape"), shape)),
            host_paths: self.extra_host_path_mounts,
            volume_mounts: self.extra_volume_mounts,
            mirror_claims: self.mirror_resource_claims,
        }
    }
}

// === impl Time ===

impl Time {
    /// Returns the time at `path` if it is in `range`; without a range, any above zero.
    pub(super) fn read(
        time: Option<Self>,
        path: &str,
        range: Option<&RangeInclusive<Duration>>,
        findings: &mut Findings<'_>,
    ) -> Option<Duration> {
        let given = match time? {
            Self::Seconds(seconds) => Some(Duration::from_secs(seconds.into())),
            Self::Text(text) => {
                let read = text.parse::<SignedDuration>().ok();
                read.and_then(|read| Duration::try_from(read).ok())
            }
        };
        let fits = |time: &Duration| match range {
            Some(range) => range.contains(time),
            None => !time.is_zero(),
        };
        let given = given.filter(fits);
        if given.is_none() {
            let from = if range.is_some() {
                " from 1s to 168h"
            } else {
                ""
            };
            let wanted = format!("write a time{from} such as 10m or 300s, or a number of seconds");
            findings.refuse(path, wanted);
        }
        given
    }
}

// === impl Secret ===

impl Secret {
    pub(super) fn name(self) -> String {
        match self {
            Self::Name(name) | Self::Object { name } => name,
        }
    }
}

fn connector_socket() -> String {
    CONNECTOR_SOCKET.to_owned()
}
