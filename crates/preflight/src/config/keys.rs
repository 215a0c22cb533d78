//! Keys of the configuration file, as serde reads them, and their defaults.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use policy::glob::Glob;

use super::{
    Coordination, HostPath, PodSecurity, VolumeMount, container, discovery, duration, older, yes,
};
use crate::topology;

/// Socket of the connector on a node; the default of NVSentinel's chart.
const CONNECTOR_SOCKET: &str = "unix:///var/run/nvsentinel.sock";

/// Top-level keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Keys {
    #[serde(default)]
    pub(super) init_containers: Option<Vec<container::Entry>>,
    /// Checks as ADR-026 lists them.
    #[serde(default)]
    pub(super) checks: Option<Vec<container::Entry>>,
    /// Image of all our checks. In a chart's values: the image of its Deployment, in whatever
    /// form.
    #[serde(default)]
    pub(super) image: Option<Value>,
    #[serde(default)]
    pub(super) gpu_resource_names: Option<Vec<String>>,
    #[serde(default)]
    pub(super) network_resource_names: Option<Vec<String>>,
    #[serde(default = "connector_socket")]
    pub(super) connector_socket: String,
    #[serde(default)]
    pub(super) processing_strategy: Strategy,
    #[serde(default)]
    pub(super) init_container_placement: Placement,
    /// Secrets for pods. In a chart's values: secrets for its Deployment.
    #[serde(default)]
    pub(super) image_pull_secrets: Option<Vec<Secret>>,
    /// Secrets for pods, by the name that the chart's values use.
    #[serde(default)]
    pub(super) injected_image_pull_secrets: Option<Vec<Secret>>,
    #[serde(default)]
    pub(super) ignore_unknown_checks: bool,
    #[serde(default)]
    pub(super) nccl_env_patterns: Option<Vec<Glob>>,
    #[serde(default)]
    pub(super) volume_mount_patterns: Option<Vec<Glob>>,
    #[serde(default)]
    pub(super) nccl_allreduce_extra_env: Vec<Value>,
    #[serde(default)]
    pub(super) gang_discovery: discovery::Entry,
    #[serde(default)]
    pub(super) gang_coordination: CoordinationKeys,
    #[serde(default)]
    pub(super) namespace_selector: Option<Value>,
    #[serde(default)]
    pub(super) object_selector: Option<Value>,
    #[serde(default = "yes")]
    pub(super) gate_checks: bool,
    #[serde(default)]
    pub(super) resource_mode: ResourceMode,
    #[serde(default)]
    pub(super) pod_security: Option<PodSecurity>,
    #[serde(default, deserialize_with = "duration")]
    pub(super) check_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    pub(super) result_cache: Option<Duration>,
    /// Only read by the chart: true if the webhook is deployed at all.
    #[serde(default, rename = "enabled")]
    _enabled: Option<bool>,
    #[serde(flatten)]
    pub(super) older: older::Keys,
    /// All other keys; [`chart::is_values`](super::chart::is_values) judges them.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct CoordinationKeys {
    enabled: bool,
    #[serde(deserialize_with = "duration")]
    pub(super) timeout: Option<Duration>,
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
    pub(super) fn read(self, timeout: Duration) -> Result<Coordination, String> {
        let paths = self
            .extra_host_path_mounts
            .iter()
            .map(|one| &one.mount_path);
        let paths = paths.chain(self.extra_volume_mounts.iter().map(|one| &one.mount_path));
        for path in paths.chain([&self.config_map_mount_path]) {
            if !path.starts_with('/') {
                return Err(format!(
                    "gangCoordination: the mount path {path:?} does not begin with a slash"
                ));
            }
        }
        if !self.nccl_topo_data.is_empty() {
            return Err(
                "gangCoordination: ncclTopoData is not supported; make a ConfigMap with the file topo.xml in \
                 each namespace, and name it by ncclTopoConfigMap"
                    .into(),
            );
        }
        let shape = Some(&*self.nccl_topo_shape).filter(|shape| !shape.is_empty());
        let topology_file = shape.map(topology::of_shape).transpose();
        if self.master_port == 0 {
            return Err(
                "gangCoordination.masterPort: 0 is not a port; write one from 1 to 65535".into(),
            );
        }
        Ok(Coordination {
            enabled: self.enabled,
            timeout,
            master_port: self.master_port,
            mount_path: self.config_map_mount_path,
            topology_config_map: Some(self.nccl_topo_config_map).filter(|name| !name.is_empty()),
            topology_file: topology_file
                .map_err(|why| format!("gangCoordination.ncclTopoShape: {why}"))?,
            host_paths: self.extra_host_path_mounts,
            volume_mounts: self.extra_volume_mounts,
            mirror_claims: self.mirror_resource_claims,
        })
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

pub(super) fn is_wrapped(keys: &Map<String, Value>) -> bool {
    keys.contains_key("preflight") || keys.contains_key("preflight-injector")
}

fn connector_socket() -> String {
    CONNECTOR_SOCKET.to_owned()
}
