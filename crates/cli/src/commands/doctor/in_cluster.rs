//! Checks of the cluster: connection, version, clock, permissions, this machine's node, and what
//! gpuwarden reads there.

mod objects;

use std::collections::BTreeSet;

use analysis::{NodePlaces, Rule, RulesText};
use cluster::{Cluster, ObjectKind, ServerInfo};
use contract::findings::MAX_FILE_BYTES;
use contract::keys;
use controller::certificate;
use controller::policy::PolicySource;
use controller::text_place::TextPlace;
use fleet::brake::{MOST_ALONE, NodeLabel};
use fleet::remediation::RemediationConfig;
use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::shell;
use policy::Policy;
use runtime::text_file;

use super::needs::{self, Need};
use super::peers::in_time;
use super::{Finding, Installation, causes};
use crate::settings::{AnalysisRules, Mode};

/// Difference between two clocks that makes stories hard to read.
const ODD_SKEW: SignedDuration = SignedDuration::from_secs(2);
/// Difference between two clocks that makes decisions by time wrong.
const BAD_SKEW: SignedDuration = SignedDuration::from_secs(30);
/// Minor versions of Kubernetes that the tests run against.
const TESTED: std::ops::RangeInclusive<u32> = 35..=37;

/// Checks the cluster. An object that may not be read is reported as a missing permission only.
pub(super) async fn check(installation: &Installation) -> Vec<Finding> {
    let Some(act) = &installation.act else {
        return Vec::new();
    };
    let Some(options) = act.cluster.clone() else {
        let what = "none is named (--kubeconfig FILE): only this machine is watched";
        return vec![Finding::ok("cluster", what)];
    };
    let cluster = match Cluster::connect(options).await {
        Ok(cluster) => cluster,
        Err(error) => return vec![Finding::problem("cluster", causes(&error))],
    };
    let (mut findings, answers) = server(&cluster).await;
    if !answers {
        return findings;
    }
    let (policy, text) = policy(&cluster, &act.policy).await;
    let policy_taints = Policy::parse(&text.unwrap_or_default(), "policy")
        .is_ok_and(|policy| policy.device_taints.is_some());
    let mut needs = needs::of(installation, policy_taints && act.mode != Mode::Observe);
    let drain = act.drain.iter().filter_map(|drain| drain.custom.as_ref());
    let drain = drain.map(|custom| &custom.resource);
    for kind in drain.chain(act.remediation.iter().flat_map(RemediationConfig::kinds)) {
        let served = cluster.resource_of(&kind.group, &kind.version, &kind.kind);
        match served.await {
            Ok(Some(resource)) => needs.extend(needs::of_remediation(act.mode, kind, resource)),
            Ok(None) => {
                let what = format!("the cluster has no {} of {}", kind.kind, kind.api_version());
                findings.push(Finding::problem("repairs", what));
            }
            // Everybody may list what the cluster serves; the other checks report the error.
            Err(_) => {}
        }
    }
    if let Some(source) = &installation.objects {
        let (found, more) = objects::check(&cluster, source).await;
        findings.extend(found);
        needs.extend(more);
    }
    findings.extend(permissions(&cluster, &needs).await);
    if needs::issues_certificate(installation) {
        findings.extend(own_certificate(&cluster, &act.namespace).await);
    }
    let label = &act.gpu_node_label;
    if let Some(node) = &installation.node {
        if let Ok(found) = cluster.find_node(&node.node_name).await {
            findings.extend(own_node(&node.node_name, found.as_ref(), label));
        }
        if act.mode.writes()
            && let Ok(count) = cluster.count_nodes().await
        {
            findings.extend(alone(count));
        }
    }
    if let Ok(any) = cluster.any_node_with(&label.to_string()).await {
        findings.push(if any {
            Finding::ok(
                "gpu-nodes",
                format!("nodes with GPUs have the label {label}"),
            )
        } else {
            Finding::warning("gpu-nodes", format!("no node has the label {label}"))
        });
    }
    let namespace = &act.namespace;
    if act.mode != Mode::Observe
        && let Ok(false) = cluster.has_namespace(namespace).await
    {
        let what = format!("the cluster has no namespace {namespace}");
        let fix = format!("kubectl create namespace {namespace}, or name another with --namespace");
        findings.push(Finding::problem("namespace", what).fix(fix));
    }
    findings.extend(policy);
    let (finding, rules, places) = rules(&cluster, &act.rules).await;
    findings.extend(finding);
    findings.extend(topology(&cluster, &rules, &places).await);
    findings
}

/// Checks connection, version and clock. Also returns true if the API server answers.
pub(super) async fn server(cluster: &Cluster) -> (Vec<Finding>, bool) {
    let asked_at = Timestamp::now();
    let info = match cluster.server_info().await {
        Ok(info) => info,
        Err(error) => {
            let what = format!("{}: {}", cluster.server(), causes(&error));
            let finding = Finding::problem("cluster", what).fix("kubectl cluster-info");
            return (vec![finding], false);
        }
    };
    let answered_at = Timestamp::now();
    let mut findings = vec![version(cluster.server(), &info)];
    findings.extend(info.time.map(|there| clock(there, asked_at, answered_at)));
    (findings, true)
}

/// Checks the certificate that the controllers of this namespace issue themselves.
async fn own_certificate(cluster: &Cluster, namespace: &str) -> Option<Finding> {
    let (kind, name) = (ObjectKind::new("", "v1", "secrets"), certificate::SECRET);
    let secret = cluster.object(&kind, Some(namespace), name).await.ok()?;
    let shown = format!("the Secret {namespace}/{name}");
    let Some(secret) = secret else {
        let what = format!("{shown} does not exist yet: the first controller that acts makes it");
        return Some(Finding::ok("tls", what));
    };
    let finding = match certificates::validity(&secret) {
        Some(validity) => in_time(&shown, validity, Timestamp::now()),
        None => Finding::problem("tls", format!("{shown} holds no certificate")),
    };
    Some(finding.fix(format!(
        "kubectl -n {namespace} describe secret {name}; the controller renews it"
    )))
}

fn version(server: &str, info: &ServerInfo) -> Finding {
    let what = format!("{server} answers: Kubernetes {}", info.version);
    if info.minor.is_some_and(|minor| TESTED.contains(&minor)) {
        return Finding::ok("cluster", what);
    }
    let (first, last) = (TESTED.start(), TESTED.end());
    let what = format!("{what}; the tests cover 1.{first} to 1.{last} only");
    Finding::warning("cluster", what).fix("try it with --dry-run first")
}

/// Compares two clocks. The API server reports its time in whole seconds, at some time between
/// request and answer.
fn clock(there: Timestamp, asked: Timestamp, answered: Timestamp) -> Finding {
    let behind = asked.duration_since(there + SignedDuration::from_secs(1));
    let ahead = there.duration_since(answered);
    let skew = behind.max(ahead);
    let what = format!(
        "this machine's clock and the API server's are {} s apart",
        skew.as_secs()
    );
    if skew > BAD_SKEW {
        Finding::problem("clock", what)
    } else if skew > ODD_SKEW {
        Finding::warning("clock", what)
    } else {
        Finding::ok("clock", "it agrees with the API server's")
    }
}

async fn permissions(cluster: &Cluster, needs: &[Need]) -> Vec<Finding> {
    // Kubernetes before 1.28 does not tell a client its own name.
    let who = cluster
        .own_name()
        .await
        .unwrap_or_else(|_| "NAME".to_owned());
    let mut findings = Vec::new();
    for need in needs {
        let mut missing: Vec<&str> = Vec::new();
        for access in need.accesses() {
            match cluster.may(access).await {
                Ok(true) => {}
                Ok(false) => missing.push(access.verb),
                Err(error) => {
                    let what = format!("cannot be checked: {}", causes(&error));
                    return vec![Finding::problem("permissions", what)];
                }
            }
        }
        missing.dedup();
        if !missing.is_empty() {
            let what = format!("{who} may not {}", need.described(&missing));
            let found = if need.may_lack {
                Finding::warning("permissions", what)
            } else {
                Finding::problem("permissions", what)
            };
            findings.push(Finding {
                why: Some(need.why),
                ..found.fix(need.grant(&who))
            });
        }
    }
    if findings.is_empty() {
        let all: Vec<String> = needs
            .iter()
            .map(|need| need.described(&need.verbs))
            .collect();
        let what = format!("{who} may {}", all.join("; "));
        findings.push(Finding::ok("permissions", what));
    }
    findings
}

/// Warns where too many nodes act for themselves.
fn alone(nodes: u64) -> Option<Finding> {
    let many = usize::try_from(nodes).is_ok_and(|nodes| nodes > MOST_ALONE);
    many.then(|| Finding::warning("nodes", format!("each of {nodes} nodes acts for itself")))
}

fn own_node(name: &str, found: Option<&NodeView>, label: &NodeLabel) -> Vec<Finding> {
    let Some(node) = found else {
        let what = format!("the cluster has no node {name}");
        return vec![Finding::problem("node", what)];
    };
    let mut findings = vec![Finding::ok("node", format!("the cluster has {name}"))];
    if node.labels.get(&label.key) != Some(&label.value) {
        let what = format!("{name} has no label {label}");
        let (name, label) = (shell::word(name), shell::word(&label.to_string()));
        let fix = format!("kubectl label node {name} {label}");
        findings.push(Finding::warning("node", what).fix(fix));
    }
    findings
}

/// Returns the finding about a policy in a `ConfigMap`, and the policy's text, where it can be read.
async fn policy(cluster: &Cluster, source: &PolicySource) -> (Option<Finding>, Option<String>) {
    let PolicySource::Place(place) = source else {
        return (None, None);
    };
    let (text, fix) = text_of(cluster, place, "policy.toml").await;
    let parsed = text
        .clone()
        .and_then(|text| Policy::parse(&text, &place.to_string()).map_err(|error| causes(&error)));
    let parsed = parsed.map(|_| format!("{place} can be read"));
    let finding = fix.map(|fix| Finding::tried("policy", parsed).fix(fix));
    (finding, text.ok())
}

/// Returns the finding about rules of the analysis in a `ConfigMap`, the rules in effect, and the
/// places that they give to nodes by their names.
async fn rules(
    cluster: &Cluster,
    source: &AnalysisRules,
) -> (Option<Finding>, Vec<Rule>, NodePlaces) {
    let place = match source {
        AnalysisRules::Off => return (None, Vec::new(), NodePlaces::default()),
        AnalysisRules::BuiltIn => return (None, analysis::built_in(), NodePlaces::default()),
        AnalysisRules::Place(place) => place,
    };
    let (text, fix) = text_of(cluster, place, "rules.toml").await;
    let parsed = text.and_then(|text| {
        let source = place.to_string();
        let text = RulesText { source, text };
        let rules = text.parse().map_err(|error| causes(&error))?;
        Ok((rules, text.places()))
    });
    let read = match &parsed {
        Ok(_) => Ok(format!("{place} can be read")),
        Err(error) => Err(error.clone()),
    };
    let finding = fix.map(|fix| Finding::tried("rules", read).fix(fix));
    let (rules, places) = parsed.unwrap_or_else(|_| (analysis::built_in(), NodePlaces::default()));
    (finding, rules, places)
}

/// Returns whether nodes have a place by their names, or a label by which the rules group several
/// nodes.
async fn topology(cluster: &Cluster, rules: &[Rule], places: &NodePlaces) -> Option<Finding> {
    if !places.is_empty() {
        return Some(by_names(&cluster.node_names().await.ok()?, places));
    }
    let labels: BTreeSet<&str> = rules
        .iter()
        .flat_map(Rule::labels)
        .map(String::as_str)
        .collect();
    let mut labels: Vec<&str> = labels.into_iter().collect();
    // What the events of a monitor name is no label.
    labels.retain(|label| *label != keys::META_CHASSIS_SERIAL);
    if labels.is_empty() {
        return None;
    }
    for label in &labels {
        if cluster.any_node_with(label).await.ok()? {
            return Some(Finding::ok(
                "topology",
                format!("nodes have the label {label}"),
            ));
        }
    }
    let what = format!("no node has a label of {}", labels.join(", "));
    let fix = "label the nodes, or name them in topology.nodes of a file of rules";
    Some(Finding::warning("topology", what).fix(fix))
}

/// Returns how many of the cluster's nodes have a place by their names.
fn by_names(nodes: &[String], places: &NodePlaces) -> Finding {
    let placed = nodes.iter().filter(|node| places.names(node)).count();
    let all = nodes.len();
    let what = format!("topology.nodes of the rules places {placed} of {all} nodes by their names");
    if placed > 0 {
        return Finding::ok("topology", what);
    }
    Finding::warning("topology", what)
}

/// Returns the text at a place, or the reason why it cannot be read; of a `ConfigMap` also the fix.
/// `file` is the name of a file that such a text comes from.
async fn text_of(
    cluster: &Cluster,
    place: &TextPlace,
    file: &str,
) -> (Result<String, String>, Option<String>) {
    let (namespace, name, key) = match place {
        TextPlace::File(path) => {
            let text = text_file::read(path, MAX_FILE_BYTES);
            return (text.map_err(|error| causes(&error)), None);
        }
        TextPlace::ConfigMap {
            namespace,
            name,
            key,
        } => (namespace, name, key),
    };
    let edit = format!("kubectl -n {namespace} edit configmap {name}");
    let (text, fix) = match cluster.find_config_map(namespace, name).await {
        Err(error) => (Err(causes(&error)), "see permissions".to_owned()),
        Ok(None) => (
            Err("there is no such object".to_owned()),
            format!("kubectl -n {namespace} create configmap {name} --from-file={key}={file}"),
        ),
        Ok(Some(mut map)) => {
            let text = map.data.remove(key);
            (text.ok_or("there is no such key".to_owned()), edit)
        }
    };
    let text = text.map_err(|error| format!("{place}: {error}"));
    (text, Some(fix))
}

#[cfg(test)]
mod tests;
