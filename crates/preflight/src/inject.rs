//! Injection of checks: selects the checks for a pod, and builds the JSON patch that adds them.

mod container;
mod inherited;
mod volumes;

use serde_json::{Value, json};

use crate::config::{CheckContainer, Config, PodSecurity};
use crate::field;
use crate::gang::Gang;
use crate::rendezvous::RendezvousPlace;
use crate::resources::DevicesOfPod;
use crate::roster;
use volumes::Volumes;

/// Annotation of a pod: the checks to run, separated by commas, in running order; empty for
/// none.
pub const CHECKS_ANNOTATION: &str = "nvsentinel.nvidia.com/preflight-checks";

/// Variable that names the variables which a check of ours inherited from the user, separated
/// by commas.
pub const INHERITED_VARIABLE: &str = "GPUWARDEN_INHERITED_ENV";

/// Variable with the time, in seconds, that an earlier pass counts for the same GPUs.
pub const RESULT_CACHE_VARIABLE: &str = "GPUWARDEN_RESULT_CACHE_SECONDS";

/// Reason why a pod is denied, written for its creator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// Result of an injection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Injection {
    /// Operations of a JSON patch; empty if the pod stays unchanged.
    pub patch: Vec<Value>,
    /// Warnings for the creator of the pod.
    pub warnings: Vec<String>,
    /// Names of the added checks, in running order.
    pub checks: Vec<String>,
}

/// Pod to inject into, with its context.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    /// Pod in the form that is being created.
    pub pod: &'a Value,
    /// GPUs and network devices of the pod.
    pub devices: &'a DevicesOfPod,
    /// Gang of the pod; `None` if it is in none.
    pub gang: Option<&'a Gang>,
    /// Pod Security level that the namespace enforces, if it forbids host paths.
    pub forbidden_by: Option<&'a str>,
    /// Rendezvous of gangs, if the webhook serves one.
    pub rendezvous: Option<&'a RendezvousPlace>,
}

// === impl Candidate ===

impl<'a> Candidate<'a> {
    /// Returns the webhook as the target of reports, if checks cannot reach the connector of
    /// their node.
    fn reports_to(&self) -> Option<&'a RendezvousPlace> {
        let is_confined = self.forbidden_by.is_some();
        self.rendezvous
            .filter(|place| is_confined && place.takes_reports)
    }
}

/// Decides which checks a pod with GPUs gets, and returns the patch that adds them.
pub fn inject(candidate: Candidate<'_>, config: &Config) -> Result<Injection, Refusal> {
    let mut injection = Injection::default();
    if field::text(candidate.pod, "/spec/os/name") == Some("windows") {
        return Ok(injection);
    }
    let checks = selected(candidate, config, &mut injection.warnings)?;
    let checks = missing(checks, candidate.pod, &mut injection.warnings);
    if checks.is_empty() {
        return Ok(injection);
    }
    let checks = allowed(checks, candidate, config, &mut injection.warnings)?;
    if checks.is_empty() {
        return Ok(injection);
    }
    injection.checks = checks.iter().map(|check| check.name.clone()).collect();
    // A pod without a gang check must not be counted as a gang member.
    let meets = checks.iter().any(|check| is_counted(check, config))
        || !checks_of(candidate.pod, config).is_empty();
    let mut volumes = Volumes::new(candidate, config);
    let containers: Vec<Value> = checks
        .into_iter()
        .map(|check| {
            container::build(
                check,
                candidate,
                config,
                &mut volumes,
                &mut injection.warnings,
            )
        })
        .collect();
    let prepend = config.prepend;
    let mut patch = add(candidate.pod, "initContainers", containers, prepend);
    patch.extend(add(candidate.pod, "volumes", volumes.added(), false));
    let secrets = pull_secrets(candidate.pod, config);
    patch.extend(add(candidate.pod, "imagePullSecrets", secrets, false));
    if let Some(gang) = candidate.gang
        && config.coordination.enabled
        && meets
    {
        patch.push(label(candidate.pod, &gang.id()));
    }
    injection.patch = patch;
    Ok(injection)
}

/// Returns the names of the checks that all members of a gang must have in common: the init
/// containers that are checks, in running order. With [`Config::gate_checks`] only gang checks
/// count, since the others depend on the pod.
pub fn checks_of(pod: &Value, config: &Config) -> Vec<String> {
    let containers = field::list(pod, "/spec/initContainers").iter();
    let known = containers.filter_map(|container| config.check(field::name(container)));
    let counted = known.filter(|check| is_counted(check, config));
    counted.map(|check| check.name.clone()).collect()
}

fn is_counted(check: &CheckContainer, config: &Config) -> bool {
    is_of_gang(check, config) || !config.gate_checks
}

/// Returns true for a gang check. If no check is marked as one, as in a configuration of
/// third-party checks, all count: it is not known which of them communicate.
fn is_of_gang(check: &CheckContainer, config: &Config) -> bool {
    check.gang_only || config.checks.iter().all(|one| !one.gang_only)
}

/// Returns the termination of each of a pod's gang checks, or `None` for a check without one.
/// `state` is the field of the container status: `state` for checks that have ended for good,
/// `lastState` for checks that were restarted.
fn ends<'a>(
    pod: &'a Value,
    config: &Config,
    state: &'static str,
) -> impl Iterator<Item = Option<&'a Value>> {
    let containers = field::list(pod, "/spec/initContainers").iter();
    let checks = containers.map(field::name).filter(|name| {
        let check = config.check(name);
        check.is_some_and(|check| is_of_gang(check, config))
    });
    checks.map(move |name| {
        let statuses = field::list(pod, "/status/initContainerStatuses").iter();
        let mut of_check = statuses.filter(|status| field::name(status) == name);
        of_check.next()?.get(state)?.get("terminated")
    })
}

/// Returns true if an init container of the pod has the name of a check.
pub fn has_checks(pod: &Value, config: &Config) -> bool {
    let mut containers = field::list(pod, "/spec/initContainers").iter();
    containers.any(|container| config.check(field::name(container)).is_some())
}

/// Returns true if a pod has completed its gang checks and will not run them again.
pub fn is_through(pod: &Value, config: &Config) -> bool {
    let mut ends = ends(pod, config, "state").peekable();
    ends.peek().is_some() && ends.all(|end| end.is_some_and(|end| end["exitCode"] == 0))
}

/// Returns the end of a gang check of the pod that has terminated, in RFC 3339, and its
/// termination message.
pub fn last_end<'a>(pod: &'a Value, config: &Config) -> Option<(&'a str, &'a str)> {
    let all = ends(pod, config, "state").chain(ends(pod, config, "lastState"));
    all.flatten().find_map(|end| {
        let at = field::text(end, "/finishedAt")?;
        Some((at, field::text(end, "/message").unwrap_or_default()))
    })
}

/// Returns the checks that the annotation or the defaults select for a pod.
fn selected<'a>(
    candidate: Candidate<'_>,
    config: &'a Config,
    warnings: &mut Vec<String>,
) -> Result<Vec<&'a CheckContainer>, Refusal> {
    let annotation = candidate.pod.pointer("/metadata/annotations");
    let wanted = annotation.and_then(|all| all.get(CHECKS_ANNOTATION)?.as_str());
    let Some(wanted) = wanted else {
        let on = config.checks.iter().filter(|check| check.default_enabled);
        return Ok(on
            .filter(|check| useless(check, candidate, config).is_none())
            .collect());
    };
    let mut checks: Vec<&CheckContainer> = Vec::new();
    for name in wanted.split(',').map(str::trim) {
        if name.is_empty() && wanted.trim().is_empty() {
            return Ok(checks);
        }
        let Some(check) = config.check(name) else {
            let known: Vec<_> = config.checks.iter().map(|check| &*check.name).collect();
            let name = field::shortened(name);
            return Err(Refusal(format!(
                "the annotation {CHECKS_ANNOTATION} names the check {name:?}, which is not known; there \
                 are: {}",
                known.join(", ")
            )));
        };
        if checks.iter().any(|there| there.name == check.name) {
            return Err(Refusal(format!(
                "the annotation {CHECKS_ANNOTATION} names the check {name} twice"
            )));
        }
        checks.push(check);
    }
    // An explicit choice overrides the gating; only a check that cannot run is left out.
    checks.retain(|check| {
        let why = useless(check, candidate, config).filter(|_| check.gang_only);
        if let Some(why) = &why {
            warnings.push(format!("the check {} is left out: {why}", check.name));
        }
        why.is_none()
    });
    Ok(checks)
}

/// Returns why a check would be meaningless in a pod.
fn useless(check: &CheckContainer, candidate: Candidate<'_>, config: &Config) -> Option<String> {
    if !config.gate_checks {
        return None;
    }
    if check.gang_only && candidate.gang.is_none() {
        return Some("the pod is in no gang".to_owned());
    }
    let needs_network =
        !config.networks.resources.is_empty() || !config.networks.classes.is_empty();
    if check.is_allreduce() && needs_network && !candidate.devices.has_network {
        return Some("the pod has no network device, and is not on the host's network".to_owned());
    }
    let gpus = candidate.devices.gpus;
    let few = gpus.filter(|gpus| *gpus < u64::from(check.min_gpus))?;
    Some(format!(
        "the pod has {few} GPUs, and the check needs {}",
        check.min_gpus
    ))
}

/// Removes the checks that the pod already has. It may be a copy of an injected pod, or this
/// webhook may be called again after another one changed the checks' images.
fn missing<'a>(
    mut checks: Vec<&'a CheckContainer>,
    pod: &Value,
    warnings: &mut Vec<String>,
) -> Vec<&'a CheckContainer> {
    for place in ["/spec/initContainers", "/spec/containers"] {
        for container in field::list(pod, place) {
            let name = field::name(container);
            let before = checks.len();
            checks.retain(|check| check.name != name);
            if checks.len() < before && place == "/spec/containers" {
                warnings.push(format!(
                    "the check {name} is left out: a container of the pod has its name"
                ));
            }
        }
    }
    checks
}

/// Returns the checks that Pod Security allows. If it forbids host paths, these are the checks
/// that can report to the webhook, provided that the webhook accepts reports.
fn allowed<'a>(
    mut checks: Vec<&'a CheckContainer>,
    candidate: Candidate<'_>,
    config: &Config,
    warnings: &mut Vec<String>,
) -> Result<Vec<&'a CheckContainer>, Refusal> {
    let Some(level) = candidate.forbidden_by else {
        return Ok(checks);
    };
    let why = format!(
        "the namespace enforces Pod Security `{level}`, which forbids the path of the host by which \
         preflight checks report"
    );
    match config.pod_security {
        Some(PodSecurity::Deny) => Err(Refusal(format!(
            "{why}; leave the checks out by the annotation {CHECKS_ANNOTATION}: \"\""
        ))),
        None | Some(PodSecurity::Https) if candidate.reports_to().is_some() => {
            checks.retain(|check| {
                if !check.is_ours() {
                    let name = &check.name;
                    warnings.push(format!("the check {name} is left out: {why}"));
                }
                check.is_ours()
            });
            Ok(checks)
        }
        // With our host path, the API server would refuse the pod.
        _ => {
            warnings.push(format!("no preflight checks: {why}"));
            Ok(Vec::new())
        }
    }
}

fn pull_secrets(pod: &Value, config: &Config) -> Vec<Value> {
    let there = field::list(pod, "/spec/imagePullSecrets");
    let new = config.image_pull_secrets.iter();
    let new = new.filter(|name| there.iter().all(|secret| field::name(secret) != *name));
    new.map(|name| json!({"name": name})).collect()
}

/// Returns the operation that labels a pod as a member of a gang, for the watch of gang pods.
fn label(pod: &Value, gang_id: &str) -> Value {
    let value = roster::gang_label(gang_id);
    let labels = pod.pointer("/metadata/labels");
    if labels.is_some_and(Value::is_object) {
        let key = roster::GANG_ID_LABEL.replace('/', "~1");
        json!({"op": "add", "path": format!("/metadata/labels/{key}"), "value": value})
    } else {
        json!({"op": "add", "path": "/metadata/labels", "value": {roster::GANG_ID_LABEL: value}})
    }
}

/// Returns the operations that add elements to a list in the pod's `spec`.
fn add(pod: &Value, list: &str, elements: Vec<Value>, prepend: bool) -> Vec<Value> {
    let path = format!("/spec/{list}");
    if elements.is_empty() {
        return Vec::new();
    }
    // `add` also replaces a list that is missing, empty or null.
    if field::list(pod, &path).is_empty() {
        return vec![json!({"op": "add", "path": path, "value": elements})];
    }
    let operation = |(place, element): (usize, Value)| {
        let path = if prepend {
            format!("{path}/{place}")
        } else {
            format!("{path}/-")
        };
        json!({"op": "add", "path": path, "value": element})
    };
    elements.into_iter().enumerate().map(operation).collect()
}

#[cfg(test)]
mod tests;
