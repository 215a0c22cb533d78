//! Keys of ADR-026 that the configuration document does not have.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::{Devices, FailurePolicy, duration};
use crate::topology;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Keys {
    #[serde(default)]
    pub(super) dcgm: Dcgm,
    #[serde(default)]
    pub(super) nccl: Nccl,
    #[serde(default, deserialize_with = "duration")]
    pub(super) gang_timeout: Option<Duration>,
    #[serde(default)]
    pub(super) gpu_detection: Detection,
    #[serde(default)]
    pub(super) network_detection: Detection,
    #[serde(default)]
    pub(super) nccl_topology: topology::Keys,
    #[serde(default)]
    pub(super) namespaces: Vec<String>,
    #[serde(default)]
    pub(super) exclude_namespaces: Option<Vec<String>>,
    #[serde(default)]
    pub(super) webhook: Webhook,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Dcgm {
    pub(super) hostengine_addr: Option<String>,
    pub(super) diag_level: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct Nccl {
    #[serde(rename = "loopbackThresholdGBps")]
    pub(super) loopback: Option<f64>,
    #[serde(rename = "allreduceThresholdGBps")]
    pub(super) allreduce: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Detection {
    resource_names: Option<Vec<String>>,
    device_classes: Option<Vec<String>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Webhook {
    #[serde(default)]
    pub(super) failure_policy: FailurePolicy,
    /// Everything else that the chart has here, such as certificates, is set by flags.
    #[serde(flatten)]
    _rest: BTreeMap<String, Value>,
}

// === impl Detection ===

impl Detection {
    /// Returns the names of the devices. `newer` is the configuration document's key, which
    /// wins.
    pub(super) fn devices(
        &self,
        newer: Option<Vec<String>>,
        default: impl FnOnce() -> Vec<String>,
        classes: &[&str],
    ) -> Devices {
        let resources = newer.or_else(|| self.resource_names.clone());
        Devices {
            resources: resources.unwrap_or_else(default),
            classes: self
                .device_classes
                .clone()
                .unwrap_or_else(|| super::names(classes)),
        }
    }
}
