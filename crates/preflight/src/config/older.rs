//! Keys of ADR-026 that the configuration document does not have.

use std::collections::BTreeMap;

use contract::findings::Findings;
use contract::names;
use serde::Deserialize;
use serde_json::Value;

use super::{Devices, FailurePolicy};

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
    /// Returns the names of the devices. `key` is that of this table, and `newer` the
    /// configuration document's, which wins.
    pub(super) fn devices(
        self,
        key: &str,
        newer: (&str, Option<Vec<String>>),
        default: impl FnOnce() -> Vec<String>,
        classes: &[&str],
        findings: &mut Findings<'_>,
    ) -> Devices {
        let (path, resources) = match newer {
            (path, Some(names)) => (path.to_owned(), Some(names)),
            (_, None) => (format!("{key}.resourceNames"), self.resource_names),
        };
        for (at, name) in resources.iter().flatten().enumerate() {
            findings.check(&format!("{path}[{at}]"), names::label_key(name));
        }
        for (at, name) in self.device_classes.iter().flatten().enumerate() {
            let path = format!("{key}.deviceClasses[{at}]");
            findings.check(&path, names::object_name(name));
        }
        Devices {
            resources: resources.unwrap_or_else(default),
            classes: self.device_classes.unwrap_or_else(|| super::owned(classes)),
        }
    }
}
