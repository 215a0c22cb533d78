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
use toml::Spanned;

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
    eviction_timeout_in_seconds: Option<Spanned<Number>>,
    system_namespaces: Option<Spanned<String>>,
    delete_after_timeout_minutes: Option<Spanned<i64>>,
    not_ready_timeout_minutes: Option<Spanned<i64>>,
    /// An additional key, not NVSentinel's.
    allow_completion_timeout_minutes: Option<Spanned<i64>>,
    delete_stuck_after_minutes: Option<Spanned<i64>>,
    checkpoint_timeout_minutes: Option<Spanned<i64>>,
    #[serde(rename = "drainGPUPods", default)]
    drain_gpu_pods: bool,
    #[serde(default)]
    partial_drain_enabled: bool,
    user_namespaces: Option<Vec<Namespaces>>,
    pod_drain_policies: Option<Spanned<Vec<PodPolicy>>>,
    custom_drain: Option<Spanned<CustomDrainFile>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Namespaces {
    name: Spanned<String>,
    mode: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodPolicy {
    name: Spanned<String>,
    namespace: Option<Spanned<String>>,
    pod_selector: Spanned<String>,
    mode: Spanned<String>,
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
        let custom_drain = file.custom_drain.filter(|one| one.get_ref().enabled);
        let empty = |one: &Vec<Namespaces>| one.is_empty();
        let by_pods =
            !file.user_namespaces.as_ref().is_none_or(empty) || file.pod_drain_policies.is_some();
        if let Some(custom) = &custom_drain
            && custom.get_ref().node_selector.is_none()
            && by_pods
        {
            findings.at(
                custom.span().start,
                "customDrain: beside userNamespaces or podDrainPolicies it needs a nodeSelector, which \
                 says which nodes are drained by it",
            );
        }
        let custom = custom_drain
            .and_then(|entry| custom::read(entry, &mut findings, read))
            .map(Arc::new);
        let is_custom = custom.is_some();
        let config = Self {
            eviction_grace: file.eviction_timeout_in_seconds.map_or(
                default.eviction_grace,
                |number| {
                    let at = number.span().start;
                    let seconds = match number.into_inner() {
                        Number::Number(number) => Some(number),
                        Number::Text(text) => text.trim().parse().ok(),
                    };
                    let seconds = seconds.filter(|number| (1..=MAX_NUMBER).contains(number));
                    if seconds.is_none() {
                        let what = format!(
                            "evictionTimeoutInSeconds: a whole number of seconds from 1 to \
                             {MAX_NUMBER} belongs here, such as \"60\""
                        );
                        findings.at(at, &what);
                    }
                    SignedDuration::from_secs(seconds.unwrap_or_default())
                },
            ),
            delete_after: minutes(
                "deleteAfterTimeoutMinutes",
                file.delete_after_timeout_minutes,
                default.delete_after,
                &mut findings,
            ),
            unready_after: minutes(
                "notReadyTimeoutMinutes",
                file.not_ready_timeout_minutes,
                default.unready_after,
                &mut findings,
            ),
            stuck_after: file.delete_stuck_after_minutes.map(|number| {
                let key = "deleteStuckAfterMinutes";
                minutes(key, Some(number), SignedDuration::ZERO, &mut findings)
            }),
            ask_after: minutes(
                "allowCompletionTimeoutMinutes",
                file.allow_completion_timeout_minutes,
                default.ask_after,
                &mut findings,
            ),
            checkpoint_limit: minutes(
                "checkpointTimeoutMinutes",
                file.checkpoint_timeout_minutes,
                default.checkpoint_limit,
                &mut findings,
            ),
            only_gpu_pods: file.drain_gpu_pods,
            partial: file.partial_drain_enabled,
            custom,
            system: file.system_namespaces.and_then(|pattern| {
                let regex = Regex::new(pattern.get_ref());
                if let Err(error) = &regex {
                    let what = format!("systemNamespaces is not a regular expression: {error}");
                    findings.at(pattern.span().start, &what);
                }
                regex.ok()
            }),
            rules: {
                let policies = file.pod_drain_policies;
                let policies = policies.filter(|policies| !policies.get_ref().is_empty());
                match (file.user_namespaces, policies) {
                    (namespaces, Some(policies)) => {
                        if namespaces.is_some() {
                            findings.at(
                                policies.span().start,
                                "podDrainPolicies and userNamespaces exclude each other: a \
                                 policy with namespace = \"*\" and podSelector says the same",
                            );
                        }
                        of_pods(policies.into_inner(), &mut findings)
                    }
                    // Without named namespaces all pods belong to the custom resource.
                    (Some(namespaces), None) if namespaces.is_empty() && is_custom => default.rules,
                    (Some(namespaces), None) => (namespaces.into_iter())
                        .map(|one| Rule {
                            namespace: pattern(one.name, &mut findings),
                            labels: None,
                            mode: mode(&one.mode, &mut findings),
                        })
                        .collect(),
                    (None, None) => default.rules,
                }
            },
        };
        findings.result(config)
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

/// Parses the rules that select pods by labels.
fn of_pods(policies: Vec<PodPolicy>, findings: &mut Findings<'_>) -> Vec<Rule> {
    let mut names = BTreeSet::new();
    let mut rules = Vec::new();
    for policy in policies {
        let name = policy.name.get_ref().trim();
        if name.is_empty() || !names.insert(name.to_owned()) {
            let what =
                format!("the name {name:?} is empty or taken: each policy has one of its own");
            findings.at(policy.name.span().start, &what);
        }
        let labels = policy.pod_selector.get_ref().parse::<LabelSelector>();
        let labels = labels.map_err(|error| {
            let what = format!("podSelector: {error}");
            findings.at(policy.pod_selector.span().start, &what);
        });
        let namespace = policy.namespace.map(|name| pattern(name, findings));
        rules.push(Rule {
            namespace: namespace.unwrap_or_else(|| Glob::from("*")),
            labels: labels.ok(),
            mode: mode(&policy.mode, findings),
        });
    }
    rules
}

/// Parses the name of a namespace, or a pattern of several.
fn pattern(name: Spanned<String>, findings: &mut Findings<'_>) -> Glob {
    let start = name.span().start;
    // Wildcards stand for letters.
    if let Err(error) = names::dns_label(&name.get_ref().replace(['*', '?'], "x")) {
        let (name, why) = (name.get_ref(), error.why);
        findings.at(start, &format!("the namespace {name:?} {why}"));
    }
    Glob::from(name.into_inner())
}

/// Parses a number of minutes; 0 stands for the default, as in NVSentinel.
fn minutes(
    key: &str,
    value: Option<Spanned<i64>>,
    default: SignedDuration,
    findings: &mut Findings<'_>,
) -> SignedDuration {
    let Some(value) = value.filter(|value| *value.get_ref() != 0) else {
        return default;
    };
    if (1..=MAX_NUMBER).contains(value.get_ref()) {
        return SignedDuration::from_mins(*value.get_ref());
    }
    let what = format!("{key}: a whole number of minutes from 0 to {MAX_NUMBER} belongs here");
    findings.at(value.span().start, &what);
    default
}

fn mode(name: &Spanned<String>, findings: &mut Findings<'_>) -> DrainMode {
    let found = DrainMode::ALL
        .into_iter()
        .find(|mode| mode.name() == name.get_ref());
    found.unwrap_or_else(|| {
        let what = format!(
            "the mode {:?} is unknown; it is Immediate, AllowCompletion or DeleteAfterTimeout",
            name.get_ref()
        );
        findings.at(name.span().start, &what);
        DrainMode::AllowCompletion
    })
}
