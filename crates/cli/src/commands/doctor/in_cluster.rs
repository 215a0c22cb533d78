//! The cluster: whether it can be reached, its version and clock, this machine's node,
//! permissions, what people have set there, and a policy that is kept there.

use cluster::{ApiError, Cluster, ConnectOptions, ServerInfo};
use contract::keys;
use controller::policy::PolicySource;
use domain::brake::pause::Pause;
use domain::brake::switch::{BreakerState, Switch};
use domain::brake::{MOST_ALONE, NodeLabel};
use domain::future::{self, is_future};
use domain::node::NodeView;
use domain::shell;
use jiff::{SignedDuration, Timestamp};

use super::machine::parsed;
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
    let needs = needs::of(installation);
    let permissions = permissions(&cluster, &needs).await;
    let of_nodes = needs.first().map(|need| need.why);
    let may_see_nodes = permissions
        .iter()
        .all(|it| it.why.is_none() || it.why != of_nodes);
    findings.extend(permissions);
    if may_see_nodes {
        let name = installation
            .node
            .as_ref()
            .map(|node| node.node_name.as_str());
        findings.extend(nodes(&cluster, name, &act.gpu_node_label).await);
        if name.is_some() && act.mode == Mode::Quarantine {
            match cluster.count_nodes().await {
                Ok(count) => findings.extend(alone(count)),
                Err(error) => findings.push(not_looked_at("nodes", &error)),
            }
        }
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

/// Returns kubectl with the flags by which it goes the same way to the cluster. A fix goes without:
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
    let fix = "timedatectl timesync-status, or chronyc tracking, on both machines";
    let until = there + SignedDuration::from_secs(1);
    let skew = if until < asked {
        asked.duration_since(until)
    } else if there > answered {
        there.duration_since(answered)
    } else {
        SignedDuration::ZERO
    };
    let seconds = skew.as_secs();
    let what = format!("this machine's clock and the API server's are {seconds} s apart");
    if skew > BAD_SKEW {
        Finding::problem("clock", what, WHY).fix(fix)
    } else if skew > ODD_SKEW {
        Finding::warning("clock", what, WHY).fix(fix)
    } else {
        Finding::ok("clock", "it agrees with the API server's")
    }
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
            findings.push(Finding::problem("permissions", what, need.why).fix(need.grant(&who)));
        }
    }
    if findings.is_empty() {
        let verbs = |need: &Need| {
            let verbs: Vec<&str> = need.verbs.iter().map(|(verb, _)| *verb).collect();
            need.described(&verbs)
        };
        let all: Vec<String> = needs.iter().map(verbs).collect();
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

async fn nodes(cluster: &Cluster, name: Option<&str>, label: &NodeLabel) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(name) = name {
        match cluster.find_node(name).await {
            Ok(found) => {
                findings.extend(own_node(name, found.as_ref(), label, Timestamp::now()));
            }
            Err(error) => findings.push(not_looked_at("node", &error)),
        }
    }
    match cluster.any_node_with(label).await {
        Ok(any) => findings.push(gpu_nodes(any, label)),
        Err(error) => findings.push(not_looked_at("gpu-nodes", &error)),
    }
    findings
}

fn own_node(
    name: &str,
    found: Option<&NodeView>,
    label: &NodeLabel,
    now: Timestamp,
) -> Vec<Finding> {
    let Some(node) = found else {
        let what = format!("the cluster has no node {name}");
        let why = "this machine's faults cannot be acted on until the cluster has its node";
        let fix = "kubectl get nodes, and name this machine's with --node-name";
        return vec![Finding::problem("node", what, why).fix(fix)];
    };
    let mut findings = vec![Finding::ok("node", format!("the cluster has {name}"))];
    let node_word = shell::word(name);
    if node.labels.get(&label.key) != Some(&label.value) {
        let what = format!("{name} has no label {label}");
        let why = "it counts as a node without GPUs where limits are in percent of the GPU nodes";
        let label = shell::word(&label.to_string());
        let fix = format!("kubectl label node {node_word} {label}");
        findings.push(Finding::warning("node", what, why).fix(fix));
    }
    let released = node.annotations.get(keys::RELEASED_AT);
    let released = released.and_then(|text| text.trim().parse().ok());
    if let Some(at) = released.filter(|at| is_future(*at, now)) {
        let what = future::text(keys::RELEASED_AT, at);
        let why = "faults that were reported before a gpuwarden first saw it do not count";
        let fix = format!("kubectl annotate node {node_word} {}-", keys::RELEASED_AT);
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

/// Looks at what people have set, and where it is kept.
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
    match map.await {
        Ok(map) => {
            let switch = map.map(|map| Switch::read(&map.data, &map.annotations));
            let switch = switch.unwrap_or_default();
            findings.push(breaker(act, &switch));
            findings.extend(future_times(act, &switch, Timestamp::now()));
        }
        Err(error) => findings.push(not_looked_at("circuit-breaker", &error)),
    }
    match cluster.find_config_map(namespace, keys::CONFIG_MAP).await {
        Ok(map) => {
            let text = map.as_ref().and_then(|map| map.data.get(keys::PAUSE));
            let resume = given.command_with("resume", &[("namespace", namespace)]);
            findings.push(pause(text.map(String::as_str), Timestamp::now(), resume));
        }
        Err(error) => findings.push(not_looked_at("pause", &error)),
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

/// Finds times of the future on the circuit breaker's `ConfigMap`. Who acts writes them anew.
fn future_times(act: &ActSettings, switch: &Switch, now: Timestamp) -> Vec<Finding> {
    let times = [
        (keys::TRIPPED_AT, switch.tripped_at),
        (keys::RESET_AT, switch.reset_at),
        (keys::DROPPED_AT, switch.dropped_at),
    ];
    let future = times
        .into_iter()
        .filter_map(|(key, time)| Some((key, time.filter(|time| is_future(*time, now))?)));
    let why = "a gpuwarden that acts takes it for the time at which it first sees it, and writes \
               that; one that does not act cannot";
    let (namespace, map) = (&act.namespace, keys::BREAKER_CONFIG_MAP);
    let finding = |(key, time)| {
        let fix = format!("kubectl -n {namespace} annotate configmap {map} {key}-");
        Finding::warning("circuit-breaker", future::text(key, time), why).fix(fix)
    };
    future.map(finding).collect()
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
    let kubectl = format!("kubectl -n {namespace}");
    let problem = |what: String, fix: String| {
        let why = "nothing is decided until there is a policy";
        Finding::problem("policy", format!("{place}: {what}"), why).fix(fix)
    };
    let map = match cluster.find_config_map(namespace, name).await {
        Ok(Some(map)) => map,
        Ok(None) => {
            let fix = format!("{kubectl} create configmap {name} --from-file={key}=policy.toml");
            return problem("there is no such object".to_owned(), fix);
        }
        Err(error) => return problem(causes(&error), "see permissions".to_owned()),
    };
    let Some(text) = map.data.get(key) else {
        let fix = format!("{kubectl} edit configmap {name}");
        return problem("there is no such key".to_owned(), fix);
    };
    let fix = format!(
        "{kubectl} get configmap {name} -o jsonpath='{{.data.{}}}' > policy.toml && gpuwarden \
         policy lint policy.toml",
        key.replace('.', "\\.")
    );
    parsed(&place, text, fix)
}

fn not_looked_at(check: &'static str, error: &ApiError) -> Finding {
    let what = format!("cannot be looked at: {}", causes(error));
    Finding::warning(check, what, "nothing can be said of it").fix("see permissions")
}

#[cfg(test)]
mod tests;
