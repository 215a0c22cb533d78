//! The cluster: its connection, version and clock, this machine's node, permissions, the
//! switches that people have set there, and a policy that is kept there.

use cluster::{Cluster, ConnectOptions, ServerInfo};
use contract::keys;
use controller::policy::PolicySource;
use fleet::brake::pause::Pause;
use fleet::brake::switch::{BreakerState, Switch};
use fleet::brake::{MOST_ALONE, NodeLabel};
use fleet::remediation::RemediationConfig;
use jiff::{SignedDuration, Timestamp};
use model::attempt::ResourceKind;
use model::node::NodeView;
use model::shell;
use policy::{MAX_POLICY_BYTES, Policy};
use runtime::text_file;

use super::needs::{self, Need};
use super::{Finding, Installation, causes};
use crate::given::Given;
use crate::settings::{ActSettings, Mode};

/// More than this between two clocks makes stories hard to read.
const ODD_SKEW: SignedDuration = SignedDuration::from_secs(2);
/// More than this makes decisions about time wrong: pauses, windows, certificates.
const BAD_SKEW: SignedDuration = SignedDuration::from_secs(30);
/// Minor versions of Kubernetes that the tests run against.
const TESTED: std::ops::RangeInclusive<u32> = 36..=37;

/// Looks at the cluster. What may not be looked at is told of with the permissions alone.
pub(super) async fn check(installation: &Installation, given: &Given) -> Vec<Finding> {
    const UNREACHABLE: &str = "no node is seen, taken out of service or given back";
    let Some(act) = &installation.act else {
        return Vec::new();
    };
    let Some(options) = act.cluster.clone() else {
        let what = "none is given (--kubeconfig FILE): only this machine is watched";
        return vec![Finding::ok("cluster", what)];
    };
    let kubectl = kubectl(&options);
    let cluster = match Cluster::connect(options).await {
        Ok(cluster) => cluster,
        Err(error) => {
            let fix = "kubectl config get-contexts; mend --kubeconfig or --context";
            return vec![Finding::problem("cluster", causes(&error), UNREACHABLE).fix(fix)];
        }
    };
    let asked_at = Timestamp::now();
    let info = match cluster.server_info().await {
        Ok(info) => info,
        Err(error) => {
            let what = format!("{}: {}", cluster.server(), causes(&error));
            let fix = format!("{kubectl} cluster-info");
            return vec![Finding::problem("cluster", what, UNREACHABLE).fix(fix)];
        }
    };
    let answered_at = Timestamp::now();
    let mut findings = vec![version(cluster.server(), &info)];
    findings.extend(info.time.map(|there| clock(there, asked_at, answered_at)));
    let mut needs = needs::of(installation);
    if act.mode != Mode::Observe && taints_devices(&cluster, &act.policy).await {
        needs.extend(needs::of_device_taints(act.mode));
    }
    let drain = act.drain.iter().filter_map(|drain| drain.custom.as_ref());
    let drain = drain.map(|custom| &custom.resource);
    for kind in drain.chain(act.remediation.iter().flat_map(RemediationConfig::kinds)) {
        match cluster
            .resource_of(&kind.group, &kind.version, &kind.kind)
            .await
        {
            Ok(Some(resource)) => needs.extend(needs::of_remediation(act.mode, kind, resource)),
            Ok(None) => findings.push(no_kind(kind)),
            // What the cluster serves may be read by everybody; of a trouble the rest tells.
            Err(_) => {}
        }
    }
    findings.extend(permissions(&cluster, &needs).await);
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
    if let Ok(any) = cluster.any_node_with(label).await {
        findings.push(gpu_nodes(any, label));
    }
    if act.mode != Mode::Observe {
        findings.extend(switches(&cluster, act, given).await);
    }
    if let PolicySource::ConfigMap {
        namespace,
        name,
        key,
    } = &act.policy
    {
        findings.push(policy(&cluster, namespace, name, key).await);
    }
    findings
}

/// Tells of custom resources that are to be made and that the cluster does not have.
fn no_kind(kind: &ResourceKind) -> Finding {
    let what = format!("the cluster has no {} of {}", kind.kind, kind.api_version());
    let why = "what is to drain or to repair nodes cannot be made";
    let fix = "install the custom resource definitions of whoever carries them out";
    Finding::problem("repairs", what, why).fix(fix)
}

/// Returns kubectl with the flags by which it connects as gpuwarden does. A fix goes without them:
/// it is a person's to make, who may more than gpuwarden does.
fn kubectl(options: &ConnectOptions) -> String {
    let mut text = "kubectl".to_owned();
    if let Some(file) = &options.kubeconfig {
        let file = shell::word(&file.to_string_lossy());
        text.push_str(&format!(" --kubeconfig {file}"));
    }
    if let Some(context) = &options.context {
        text.push_str(&format!(" --context {}", shell::word(context)));
    }
    text
}

fn version(server: &str, info: &ServerInfo) -> Finding {
    let what = format!("{server} answers: Kubernetes {}", info.version);
    if info.minor.is_some_and(|minor| TESTED.contains(&minor)) {
        return Finding::ok("cluster", what);
    }
    let (first, last) = (TESTED.start(), TESTED.end());
    let what = format!("{what}; tested are 1.{first} to 1.{last}");
    let why = "what the tests show, they show of the tested versions";
    Finding::warning("cluster", what, why).fix("try it with --dry-run first")
}

/// Compares two clocks. The API server says its time to the second, somewhen between question and
/// answer.
fn clock(there: Timestamp, asked: Timestamp, answered: Timestamp) -> Finding {
    const WHY: &str = "pauses, windows of the brake and certificates hold by time, and stories are \
                       put together by it";
    let until = there + SignedDuration::from_secs(1);
    let behind = asked.duration_since(until);
    let ahead = there.duration_since(answered);
    let skew = behind.max(ahead).max(SignedDuration::ZERO);
    let seconds = skew.as_secs();
    let what = format!("this machine's clock and the API server's are {seconds} s apart");
    let finding = if skew > BAD_SKEW {
        Finding::problem("clock", what, WHY)
    } else if skew > ODD_SKEW {
        Finding::warning("clock", what, WHY)
    } else {
        Finding::ok("clock", "it agrees with the API server's")
    };
    finding.fix("timedatectl timesync-status, or chronyc tracking, on both machines")
}

async fn permissions(cluster: &Cluster, needs: &[Need]) -> Vec<Finding> {
    // Before 1.28 nobody can ask for his own name.
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
                Ok(false) if missing.contains(&access.verb) => {}
                Ok(false) => missing.push(access.verb),
                Err(error) => {
                    let what = format!("cannot be asked for: {}", causes(&error));
                    let fix = "kubectl auth can-i --list";
                    return vec![Finding::problem("permissions", what, need.why).fix(fix)];
                }
            }
        }
        if !missing.is_empty() {
            let what = format!("{who} may not {}", need.described(&missing));
            let found = if need.may_lack {
                Finding::warning("permissions", what, need.why)
            } else {
                Finding::problem("permissions", what, need.why)
            };
            findings.push(found.fix(need.grant(&who)));
        }
    }
    if findings.is_empty() {
        let all = needs.iter().map(|need| need.described(need.verbs));
        let all: Vec<String> = all.collect();
        let what = format!("{who} may {}", all.join("; "));
        findings.push(Finding::ok("permissions", what));
    }
    findings
}

/// Warns where there are too many nodes for each to act for itself.
fn alone(nodes: u64) -> Option<Finding> {
    let many = usize::try_from(nodes).is_ok_and(|nodes| nodes > MOST_ALONE);
    let what = format!("each of {nodes} nodes acts for itself");
    let why = "each watches all nodes, which loads the API server, and nodes that fail at the same \
               moment do not see each other: budgets do not hold them";
    let fix = "run `gpuwarden agent` on the nodes, and one `gpuwarden controller`";
    many.then(|| Finding::warning("nodes", what, why).fix(fix))
}

fn own_node(name: &str, found: Option<&NodeView>, label: &NodeLabel) -> Vec<Finding> {
    let Some(node) = found else {
        let what = format!("the cluster has no node {name}");
        let why = "this machine's faults cannot be acted on until the cluster has its node";
        let fix = "kubectl get nodes, and name this machine's with --node-name";
        return vec![Finding::problem("node", what, why).fix(fix)];
    };
    let mut findings = vec![Finding::ok("node", format!("the cluster has {name}"))];
    if node.labels.get(&label.key) != Some(&label.value) {
        let what = format!("{name} has no label {label}");
        let why = "it counts as a node without GPUs where limits are in percent of the GPU nodes";
        let (name, label) = (shell::word(name), shell::word(&label.to_string()));
        let fix = format!("kubectl label node {name} {label}");
        findings.push(Finding::warning("node", what, why).fix(fix));
    }
    findings
}

fn gpu_nodes(any: bool, label: &NodeLabel) -> Finding {
    if any {
        let what = format!("nodes with GPUs have the label {label}");
        return Finding::ok("gpu-nodes", what);
    }
    let what = format!("no node has the label {label}");
    let why = "limits in percent are of all nodes then, not of those with GPUs";
    Finding::warning("gpu-nodes", what, why)
        .fix("--gpu-node-label names another one, or kubectl label node NAME, for each GPU node")
}

/// Looks at the switches that people have set, and the namespace that they are kept in.
async fn switches(cluster: &Cluster, act: &ActSettings, given: &Given) -> Vec<Finding> {
    let mut findings = Vec::new();
    let namespace = &act.namespace;
    // Who may not ask for a namespace learns of it when the ConfigMaps are written.
    if let Ok(false) = cluster.has_namespace(namespace).await {
        let what = format!("the cluster has no namespace {namespace}");
        let why = "the circuit breaker and pauses are kept in it";
        let fix = format!("kubectl create namespace {namespace}, or name another with --namespace");
        return vec![Finding::problem("namespace", what, why).fix(fix)];
    }
    let map = cluster.find_config_map(namespace, keys::BREAKER_CONFIG_MAP);
    if let Ok(map) = map.await {
        let switch = map.map(|map| Switch::read(&map.data, &map.annotations));
        findings.push(breaker(act, &switch.unwrap_or_default()));
    }
    if let Ok(map) = cluster.find_config_map(namespace, keys::CONFIG_MAP).await {
        let text = map.as_ref().and_then(|map| map.data.get(keys::PAUSE));
        let resume = given.command_with("resume", &[("namespace", namespace)]);
        findings.push(pause(text.map(String::as_str), Timestamp::now(), resume));
    }
    findings
}

fn breaker(act: &ActSettings, switch: &Switch) -> Finding {
    const CHECK: &str = "circuit-breaker";
    let (namespace, map) = (&act.namespace, keys::BREAKER_CONFIG_MAP);
    if !act.circuit_breaker {
        let what = "the brake is off (--circuit-breaker false)";
        let why = "a broken monitor or a wrong rule may take every node out of service";
        return Finding::warning(CHECK, what, why);
    }
    if switch.state == BreakerState::Closed {
        return Finding::ok(CHECK, "it is closed: nodes with faults are taken out");
    }
    let since = switch.tripped_at.map(|at| format!(" since {at:.0}"));
    let what = format!(
        "it is {}{} (ConfigMap {namespace}/{map})",
        switch.state.name(),
        since.unwrap_or_default()
    );
    let why = "no further node is taken out of service until a person closes it";
    Finding::problem(CHECK, what, why).fix(format!(
        "kubectl -n {namespace} patch configmap {map} --type merge -p '{{\"data\":{{\"{}\":\"{}\"}}}}', \
         once it is clear why so many nodes failed",
        keys::BREAKER_STATUS,
        keys::BREAKER_CLOSED
    ))
}

fn pause(text: Option<&str>, now: Timestamp, resume: String) -> Finding {
    match text.and_then(Pause::read).filter(|pause| pause.holds(now)) {
        None => Finding::ok("pause", "nothing is paused"),
        Some(pause) => {
            let why = "no further node is taken out of service until it ends";
            Finding::warning("pause", format!("new quarantines are {pause}"), why).fix(resume)
        }
    }
}

async fn policy(cluster: &Cluster, namespace: &str, name: &str, key: &str) -> Finding {
    let place = format!("configmap:{namespace}/{name}/{key}");
    let (found, fix) = match cluster.find_config_map(namespace, name).await {
        Err(error) => (Err(causes(&error)), "see permissions".to_owned()),
        Ok(None) => (
            Err("there is no such object".to_owned()),
            format!("kubectl -n {namespace} create configmap {name} --from-file={key}=policy.toml"),
        ),
        Ok(Some(map)) => (
            map.data
                .get(key)
                .cloned()
                .ok_or("there is no such key".to_owned()),
            format!("kubectl -n {namespace} edit configmap {name}"),
        ),
    };
    let parsed = found
        .map_err(|error| format!("{place}: {error}"))
        .and_then(|text| Policy::parse(&text, &place).map_err(|error| causes(&error)));
    let why = "nothing is decided until there is a policy";
    Finding::tried("policy", format!("{place} can be read"), parsed, why).fix(fix)
}

/// Returns whether the policy taints single devices, as far as it can be read.
async fn taints_devices(cluster: &Cluster, policy: &PolicySource) -> bool {
    let text = match policy {
        PolicySource::BuiltIn | PolicySource::Preset(_) => None,
        PolicySource::File(path) => text_file::read(path, MAX_POLICY_BYTES).ok(),
        PolicySource::ConfigMap {
            namespace,
            name,
            key,
        } => {
            let map = cluster.find_config_map(namespace, name).await;
            map.ok()
                .flatten()
                .and_then(|map| map.data.get(key).cloned())
        }
    };
    let policy = text.and_then(|text| Policy::parse(&text, "policy").ok());
    policy.is_some_and(|policy| policy.device_taints.is_some())
}

#[cfg(test)]
mod tests;
