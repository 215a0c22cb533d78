//! The values of NVSentinel's chart: its file, among keys that are about the chart's own objects.

use std::collections::BTreeMap;

use contract::nearest::nearest;
use serde_json::Value;

use super::{CheckContainer, keys::Secret};

/// Keys of the chart's values about its own Deployment, Service and policies, which nothing here needs.
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

/// The keys that there are at the top of a configuration.
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

/// Returns whether a configuration is the values of a chart, by the keys in it that are not read here. The
/// error names one that is neither.
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

/// Returns what is to be said of images without a tag: the chart puts its own version there.
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

/// Returns the names of the secrets that pods get. `own` are `imagePullSecrets`, which in values of a chart are
/// those of its Deployment.
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
