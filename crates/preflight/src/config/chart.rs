//! Values of NVSentinel's chart: the configuration among keys for the chart's own objects.

use std::collections::BTreeMap;

use contract::nearest::nearest;
use serde_json::Value;

use super::{CheckContainer, keys::Secret};

/// Keys of the chart's Deployment, Service and policies, which are ignored.
const CHARTS_OWN: [&str; 30] = [
    "affinity",
    "fullnameOverride",
    "global",
    "imageCache",
    "livenessProbe",
    "logLevel",
    "nameOverride",
    "networkPolicy",
    "nodeSelector",
    "podAnnotations",
    "podDisruptionBudget",
    "podLabels",
    "podMonitor",
    "podSecurityContext",
    "priorityClassName",
    "prometheusRule",
    "rbac",
    "readinessProbe",
    "replicaCount",
    "resources",
    "revisionHistoryLimit",
    "securityContext",
    "service",
    "serviceAccount",
    "serviceMonitor",
    "startupProbe",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "updateStrategy",
];

/// Top-level keys of a configuration.
const KNOWN: [&str; 33] = [
    "checkTimeout",
    "checks",
    "connectorSocket",
    "dcgm",
    "enabled",
    "excludeNamespaces",
    "gangCoordination",
    "gangDiscovery",
    "gangTimeout",
    "gateChecks",
    "gpuDetection",
    "gpuResourceNames",
    "ignoreUnknownChecks",
    "image",
    "imagePullSecrets",
    "initContainerPlacement",
    "initContainers",
    "injectedImagePullSecrets",
    "namespaceSelector",
    "namespaces",
    "nccl",
    "ncclAllreduceExtraEnv",
    "ncclEnvPatterns",
    "ncclTopology",
    "networkDetection",
    "networkResourceNames",
    "objectSelector",
    "podSecurity",
    "processingStrategy",
    "resourceMode",
    "resultCache",
    "volumeMountPatterns",
    "webhook",
];

/// Returns true if a configuration is the values of a chart, judged by `rest`, the keys that
/// [`Keys`](super::keys::Keys) does not have. Fails with the name of a key that belongs to
/// neither.
pub(super) fn is_values(rest: &BTreeMap<String, Value>) -> Result<bool, String> {
    let mut unknown = rest
        .keys()
        .filter(|key| !CHARTS_OWN.contains(&key.as_str()));
    if let Some(key) = unknown.next() {
        let hint = match nearest(key, KNOWN, 1).first() {
            Some(meant) => format!("did you mean `{meant}`?"),
            None => format!("there is {}", KNOWN.join(", ")),
        };
        return Err(format!("unknown key `{key}`; {hint}"));
    }
    Ok(!rest.is_empty())
}

/// Returns a warning for each image without a tag: the chart would add its own version.
pub(super) fn without_tag(checks: &[CheckContainer]) -> Vec<String> {
    let image = |check: &CheckContainer| {
        let image = check.container.get("image").and_then(Value::as_str);
        image.unwrap_or_default().to_owned()
    };
    let has_tag = |image: &str| {
        let name = image.rsplit('/').next().unwrap_or(image);
        name.contains([':', '@'])
    };
    let bare = checks.iter().filter(|check| !has_tag(&image(check)));
    bare.map(|check| {
        format!(
            "initContainers, {}: the image {} has no tag, so `latest` is pulled; NVSentinel's chart puts its own \
             version there: name it by image.tag",
            check.name,
            image(check)
        )
    })
    .collect()
}

/// Returns the names of the secrets that pods get. `own` is `imagePullSecrets`, which in a
/// chart's values belongs to its Deployment.
pub(super) fn pull_secrets(
    injected: Option<Vec<Secret>>,
    own: Option<Vec<Secret>>,
    is_values: bool,
    warnings: &mut Vec<String>,
) -> Vec<String> {
    let own = own.unwrap_or_default();
    if is_values && injected.is_none() && !own.is_empty() {
        warnings.push(
            "imagePullSecrets: in values of a chart they are its Deployment's, and pods do not get them; write \
             injectedImagePullSecrets"
                .to_owned(),
        );
    }
    let own = if is_values { Vec::new() } else { own };
    injected
        .unwrap_or(own)
        .into_iter()
        .map(Secret::name)
        .collect()
}
