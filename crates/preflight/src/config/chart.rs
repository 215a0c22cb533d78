//! Values of NVSentinel's chart: the configuration among keys for the chart's own objects.

use std::collections::BTreeMap;

use contract::findings::Findings;
use contract::names;
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
/// [`Keys`](super::keys::Keys) does not have. Records those that belong to neither.
pub(super) fn is_values(rest: &BTreeMap<String, Value>, findings: &mut Findings<'_>) -> bool {
    let (charts, unknown): (Vec<&str>, Vec<&str>) =
        (rest.keys().map(String::as_str)).partition(|key| CHARTS_OWN.contains(key));
    for key in unknown {
        findings.unknown_key(key, &KNOWN);
    }
    !charts.is_empty()
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
    findings: &mut Findings<'_>,
) -> Vec<String> {
    let own = own.unwrap_or_default();
    if is_values && injected.is_none() && !own.is_empty() {
        warnings.push(
            "imagePullSecrets: in values of a chart they are its Deployment's, and pods do not get them; write \
             injectedImagePullSecrets"
                .to_owned(),
        );
    }
    let (key, secrets) = match injected {
        Some(secrets) => ("injectedImagePullSecrets", secrets),
        None if is_values => return Vec::new(),
        None => ("imagePullSecrets", own),
    };
    let secrets: Vec<String> = secrets.into_iter().map(Secret::name).collect();
    for (at, secret) in secrets.iter().enumerate() {
        findings.check(&format!("{key}[{at}]"), names::object_name(secret));
    }
    secrets
}
