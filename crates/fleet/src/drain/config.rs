//! The configuration of drains: NVSentinel's file for its node drainer, with additional keys.

use std::collections::BTreeSet;
use std::sync::Arc;

use contract::findings::{FileError, Findings, Format};
use contract::names;
use jiff::SignedDuration;
use model::selector::LabelSelector;
use policy::glob::Glob;
use regex::Regex;
use serde::Deserialize;

use super::custom::{self, CustomDrain, CustomDrainFile, Number};
use super::{DrainMode, PodView};

/// Namespaces whose pods stay by default: NVSentinel's, and our own.
const SYSTEM_NAMESPACES: [&str; 7] = [
    "nvsentinel",
    "gpuwarden",
    "kube-system",
    "gpu-operator",
    "gmp-system",
    "network-operator",
    "skyhook",
];
/// Longest grace period of an eviction.
const EVICTION_GRACE: SignedDuration = SignedDuration::from_secs(300);
/// Wait for pods before they are deleted.
const DELETE_AFTER: SignedDuration = SignedDuration::from_mins(60);
/// Time after which a pod that is not ready is not waited for.
const UNREADY_AFTER: SignedDuration = SignedDuration::from_mins(5);
/// Time after which a person is asked about pods that are waited for.
const ASK_AFTER: SignedDuration = SignedDuration::from_hours(24);
/// Longest time for a checkpoint: enough for a large training.
const CHECKPOINT_LIMIT: SignedDuration = SignedDuration::from_mins(10);
/// Largest number in the file, of any unit: more than a year of minutes.
const MAX_NUMBER: i64 = 1_000_000;

/// Settings of all drains.
#[derive(Clone, Debug)]
pub struct DrainConfig {
    /// Longest grace period of an eviction; a shorter one of the pod counts.
    pub eviction_grace: SignedDuration,
    /// Wait for pods of [`DeleteAfterTimeout`](DrainMode::DeleteAfterTimeout), from the begin of
    /// the drain.
    pub delete_after: SignedDuration,
    /// Time after which a pod that is not ready is not waited for.
    pub unready_after: SignedDuration,
    /// Time after which a pod that has not ended in time is deleted, though its containers may
    /// still run; `None` for never.
    pub stuck_after: Option<SignedDuration>,
    /// Time from the begin of the drain after which a person is asked about pods that are waited
    /// for.
    pub ask_after: SignedDuration,
    /// Longest time to write a checkpoint for a pod that asks for it before it is evicted.
    pub checkpoint_limit: SignedDuration,
    /// True if only pods with GPUs are drained.
    pub only_gpu_pods: bool,
    /// True if only the pods that hold a faulty GPU leave, where only that GPU is to be reset or
    /// is out of service.
    pub partial: bool,
    /// Drain by a custom resource, for the nodes that it selects.
    pub custom: Option<Arc<CustomDrain>>,
    /// Namespaces whose pods stay; `None` for [`SYSTEM_NAMESPACES`].
    system: Option<Regex>,
    /// Rules for pods; the first that matches counts.
    rules: Vec<Rule>,
}

/// A rule that names the mode of pods.
#[derive(Clone, Debug)]
struct Rule {
    namespace: Glob,
    /// Labels of the pods; `None` for all pods of the namespace.
    labels: Option<LabelSelector>,
    mode: DrainMode,
}

/// Keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    eviction_timeout_in_seconds: Option<Number>,
    system_namespaces: Option<String>,
    delete_after_timeout_minutes: Option<i64>,
    not_ready_timeout_minutes: Option<i64>,
    /// An additional key, not NVSentinel's.
    allow_completion_timeout_minutes: Option<i64>,
    delete_stuck_after_minutes: Option<i64>,
    checkpoint_timeout_minutes: Option<i64>,
    #[serde(rename = "drainGPUPods", default)]
    drain_gpu_pods: bool,
    #[serde(default)]
    partial_drain_enabled: bool,
    user_namespaces: Option<Vec<Namespaces>>,
    pod_drain_policies: Option<Vec<PodPolicy>>,
    custom_drain: Option<CustomDrainFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Namespaces {
    name: String,
    mode: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodPolicy {
    name: String,
    namespace: Option<String>,
    pod_selector: String,
    mode: String,
}

// === impl DrainConfig ===

impl Default for DrainConfig {
    fn default() -> Self {
        Self {
            eviction_grace: EVICTION_GRACE,
            delete_after: DELETE_AFTER,
            unready_after: UNREADY_AFTER,
            stuck_after: None,
            ask_after: ASK_AFTER,
            checkpoint_limit: CHECKPOINT_LIMIT,
            only_gpu_pods: false,
            partial: false,
            custom: None,
            system: None,
            rules: vec![Rule {
                namespace: Glob::from("*"),
                labels: None,
                mode: DrainMode::AllowCompletion,
            }],
        }
    }
}

impl DrainConfig {
    /// Parses a configuration that needs no other file; see [`Self::parse_with`].
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        Self::parse_with(text, source, |_| Err("it is not looked for".to_owned()))
    }

    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong; `read` reads a template file beside it.
    pub fn parse_with(
        text: &str,
        source: &str,
        read: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Self, FileError> {
        let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
        let default = Self::default();
        let custom_drain = file.custom_drain.filter(|one| one.enabled);
        let by_pods = file.user_namespaces.iter().any(|all| !all.is_empty())
            || file.pod_drain_policies.is_some();
        if by_pods
            && custom_drain
                .as_ref()
                .is_some_and(|custom| custom.node_selector.is_none())
        {
            let what = "beside userNamespaces or podDrainPolicies it needs a nodeSelector, which \
                        says which nodes are drained by it";
            findings.at_key("customDrain", what);
        }
        let custom = custom_drain.and_then(|keys| custom::read(keys, &mut findings, read));
        let is_custom = custom.is_some();
        let grace = file.eviction_timeout_in_seconds.map(|number| {
            let seconds = number
                .seconds()
                .filter(|one| (1..=MAX_NUMBER).contains(one));
            if seconds.is_none() {
                let wanted = format!("write a whole number of seconds from 1 to {MAX_NUMBER}");
                findings.refuse("evictionTimeoutInSeconds", wanted);
            }
            SignedDuration::from_secs(seconds.unwrap_or_default())
        });
        let key = "deleteStuckAfterMinutes";
        let stuck = findings.minutes(key, file.delete_stuck_after_minutes, 0..=MAX_NUMBER);
        // 0 stands for the default, as in NVSentinel.
        let mut minutes = |key, number: Option<i64>| {
            let minutes = findings.minutes(key, number, 0..=MAX_NUMBER);
            minutes.filter(|minutes| !minutes.is_zero())
        };
        let delete_after = minutes(
            "deleteAfterTimeoutMinutes",
            file.delete_after_timeout_minutes,
        );
        let unready_after = minutes("notReadyTimeoutMinutes", file.not_ready_timeout_minutes);
        let ask_after = minutes(
            "allowCompletionTimeoutMinutes",
            file.allow_completion_timeout_minutes,
        );
        let checkpoint_limit = minutes("checkpointTimeoutMinutes", file.checkpoint_timeout_minutes);
        let system = file.system_namespaces.and_then(|pattern| {
            let why = |error| format!("is not a regular expression: {error}");
            findings.check("systemNamespaces", Regex::new(&pattern).map_err(why))
        });
        let policies = file.pod_drain_policies.filter(|all| !all.is_empty());
        let rules = match (file.user_namespaces, policies) {
            (namespaces, Some(policies)) => {
                if namespaces.is_some() {
                    let what = "podDrainPolicies and userNamespaces exclude each other: a policy \
                                with namespace = \"*\" and podSelector says the same";
                    findings.at_key("podDrainPolicies", what);
                }
                of_pods(policies, &mut findings)
            }
            // Without named namespaces all pods belong to the custom resource.
            (Some(namespaces), None) if namespaces.is_empty() && is_custom => default.rules,
            (Some(namespaces), None) => of_namespaces(namespaces, &mut findings),
            (None, None) => default.rules,
        };
        findings.result(Self {
            eviction_grace: grace.unwrap_or(default.eviction_grace),
            delete_after: delete_after.unwrap_or(default.delete_after),
            unready_after: unready_after.unwrap_or(default.unready_after),
            stuck_after: stuck,
            ask_after: ask_after.unwrap_or(default.ask_after),
            checkpoint_limit: checkpoint_limit.unwrap_or(default.checkpoint_limit),
            only_gpu_pods: file.drain_gpu_pods,
            partial: file.partial_drain_enabled,
            custom: custom.map(Arc::new),
            system,
            rules,
        })
    }

    /// Returns whether the pods of `namespace` stay, because it is one of the system's.
    pub fn is_system(&self, namespace: &str) -> bool {
        match &self.system {
            Some(pattern) => pattern.is_match(namespace),
            None => SYSTEM_NAMESPACES.contains(&namespace),
        }
    }

    /// Returns the mode of the first rule that matches a pod.
    pub fn mode_of(&self, pod: &PodView) -> Option<DrainMode> {
        let found = self.rules.iter().find(|rule| {
            let labels = rule.labels.as_ref();
            rule.namespace.matches(&pod.namespace)
                && labels.is_none_or(|labels| labels.matches(&pod.labels))
        });
        found.map(|rule| rule.mode)
    }
}

/// Parses the rules that select pods by their namespace.
fn of_namespaces(namespaces: Vec<Namespaces>, findings: &mut Findings<'_>) -> Vec<Rule> {
    let rules = namespaces.into_iter().enumerate();
    let rule = |(at, one): (usize, Namespaces)| {
        let path = format!("userNamespaces[{at}]");
        Rule {
            namespace: pattern(&format!("{path}.name"), one.name, findings),
            labels: None,
            mode: mode(&path, &one.mode, findings),
        }
    };
    rules.map(rule).collect()
}

/// Parses the rules that select pods by labels.
fn of_pods(policies: Vec<PodPolicy>, findings: &mut Findings<'_>) -> Vec<Rule> {
    let mut names = BTreeSet::new();
    let mut rules = Vec::new();
    for (at, policy) in policies.into_iter().enumerate() {
        let path = format!("podDrainPolicies[{at}]");
        let name = policy.name.trim();
        if name.is_empty() || !names.insert(name.to_owned()) {
            let what =
                format!("the name {name:?} is empty or taken: each policy has one of its own");
            findings.at_key(&format!("{path}.name"), what);
        }
        let namespace = policy.namespace.unwrap_or_else(|| "*".to_owned());
        rules.push(Rule {
            labels: findings.check(&format!("{path}.podSelector"), policy.pod_selector.parse()),
            namespace: pattern(&format!("{path}.namespace"), namespace, findings),
            mode: mode(&path, &policy.mode, findings),
        });
    }
    rules
}

/// Parses the name of a namespace, or a pattern of several.
fn pattern(path: &str, name: String, findings: &mut Findings<'_>) -> Glob {
    // Wildcards stand for letters.
    let checked = names::dns_label(&name.replace(['*', '?'], "x"));
    findings.check(
        path,
        checked.map_err(|error| format!("{name:?} {}", error.why)),
    );
    Glob::from(name)
}

fn mode(path: &str, name: &str, findings: &mut Findings<'_>) -> DrainMode {
    let modes = DrainMode::ALL.map(|mode| (mode.name(), mode));
    let mode = findings.one_of(&format!("{path}.mode"), name, &modes);
    mode.unwrap_or(DrainMode::AllowCompletion)
}
