//! Checks of gpuwarden in a cluster, with the permissions of the person who asks: whether its pods
//! run, and why not; the `RuntimeClass` of the agents; GPU nodes without an agent.
//!
//! What only a pod itself can see, such as its driver, host paths and permissions, `doctor agent`
//! and `doctor controller` check there.

use std::collections::{BTreeMap, BTreeSet};

use cluster::{ApiError, Cluster, ObjectKind};
use contract::keys;
use fleet::brake::{NodeLabel, some_of};
use serde_json::Value;

use super::{Finding, actors, causes, in_cluster};
use crate::args::KubeArgs;
use crate::output::plural;
use crate::settings::namespace;

/// `DaemonSet` and label `app` of the agents.
const AGENTS: &str = "gpuwarden-agent";
/// Deployment and label `app` of the controllers.
const CONTROLLERS: &str = "gpuwarden-controller";
/// Variable of a controller with the label of GPU nodes.
const GPU_NODE_LABEL: &str = "GPUWARDEN_GPU_NODE_LABEL";
/// Most pods and nodes that a finding names.
const NAMED: usize = 5;

/// Objects of gpuwarden in a namespace.
struct Release {
    namespace: String,
    daemon_set: Option<Value>,
    deployment: Option<Value>,
    pods: Vec<Value>,
    /// Message of the newest warning about each object, by its name.
    warnings: BTreeMap<String, String>,
}

pub(super) async fn check(args: &KubeArgs) -> anyhow::Result<Vec<Finding>> {
    let file = crate::commands::file(&args.cluster)?;
    let namespace = namespace(args.namespace.clone().or(file.namespace.clone()))?;
    let cluster = crate::commands::connect(&args.cluster, file).await?;
    let (mut findings, answers) = in_cluster::server(&cluster).await;
    if !answers {
        return Ok(findings);
    }
    match Release::read(&cluster, namespace).await {
        Ok(release) => {
            findings.push(release.controllers());
            findings.push(release.agents());
            findings.extend(release.runtime_class(&cluster).await);
            findings.extend(release.nodes_without_agent(&cluster).await);
        }
        Err(error) => findings.push(Finding::problem("permissions", causes(&error))),
    }
    findings.extend(actors::check(&cluster).await);
    Ok(findings)
}

// === impl Release ===

impl Release {
    async fn read(cluster: &Cluster, namespace: String) -> Result<Self, ApiError> {
        let within = Some(namespace.as_str());
        let apps = |resource| ObjectKind::new("apps", "v1", resource);
        let core = |resource| ObjectKind::new("", "v1", resource);
        let daemon_set = cluster.object(&apps("daemonsets"), within, AGENTS).await?;
        let deployments = apps("deployments");
        let deployment = cluster.object(&deployments, within, CONTROLLERS).await?;
        let pods = cluster.list_objects(&core("pods"), within).await?;
        let events = cluster.list_objects(&core("events"), within).await?;
        Ok(Self {
            warnings: warnings(events),
            namespace,
            daemon_set,
            deployment,
            pods,
        })
    }

    fn missing(&self, check: &'static str, object: &str) -> Finding {
        let what = format!("the namespace {} has no {object}", self.namespace);
        Finding::problem(check, what)
    }

    /// Checks that a controller is ready: of several, one acts and the others stand by.
    fn controllers(&self) -> Finding {
        let Some(deployment) = &self.deployment else {
            return self.missing("controllers", &format!("Deployment {CONTROLLERS}"));
        };
        let number = |path| {
            deployment
                .pointer(path)
                .and_then(Value::as_u64)
                .unwrap_or(0)
        };
        let (wanted, ready) = (number("/spec/replicas"), number("/status/readyReplicas"));
        if ready > 0 {
            let what = format!("one acts, of {}", plural(wanted, "replica"));
            return Finding::ok("controllers", what);
        }
        let what = format!("no controller is ready: {}", self.reasons(CONTROLLERS));
        Finding::problem("controllers", what).fix(format!(
            "kubectl -n {0} exec deploy/{CONTROLLERS} -- gpuwarden doctor controller, or kubectl -n {0} \
             logs deploy/{CONTROLLERS}",
            self.namespace
        ))
    }

    /// Checks that the agents of all nodes that the `DaemonSet` selects are ready.
    fn agents(&self) -> Finding {
        let Some(set) = &self.daemon_set else {
            return self.missing("agents", &format!("DaemonSet {AGENTS}"));
        };
        let number = |name| set["status"][name].as_u64().unwrap_or(0);
        let (wanted, ready) = (number("desiredNumberScheduled"), number("numberReady"));
        if wanted == 0 {
            let what = format!("the DaemonSet {AGENTS} selects no node");
            return Finding::problem("agents", what).fix("see agent.nodeSelector, agent.affinity");
        }
        if ready >= wanted {
            let agents = plural(ready, "agent");
            return Finding::ok("agents", format!("{agents}, all ready"));
        }
        let what = format!("{ready} of {wanted} are ready: {}", self.reasons(AGENTS));
        Finding::problem("agents", what).fix(format!(
            "kubectl -n {} exec POD -- gpuwarden doctor agent, in one that runs",
            self.namespace
        ))
    }

    /// Returns the reasons why pods are not ready, each with the pods that have it.
    fn reasons(&self, app: &str) -> String {
        let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for pod in self.pods_of(app) {
            if let Some(reason) = self.reason(pod) {
                let name = name(pod).to_owned();
                reasons.entry(reason).or_default().push(name);
            }
        }
        // Without pods it is their owner that cannot create them.
        let mut owners = self.warnings.iter().filter(|(name, _)| {
            name.starts_with(app) && !self.pods.iter().any(|pod| self::name(pod) == name.as_str())
        });
        if reasons.is_empty() {
            return match owners.next() {
                Some((_, warning)) => warning.clone(),
                None => "it has no pods yet".to_owned(),
            };
        }
        let reasons = reasons.into_iter().map(|(reason, mut pods)| {
            let count = pods.len();
            pods.truncate(NAMED);
            format!("{reason} ({})", some_of(&pods, count))
        });
        reasons.collect::<Vec<String>>().join("; ")
    }

    /// Returns the reason why a pod is not ready; `None` if it is.
    fn reason(&self, pod: &Value) -> Option<String> {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let mut failing = conditions.filter(|condition| condition["status"] != "True");
        let ready = !failing
            .clone()
            .any(|condition| condition["type"] == "Ready");
        if ready && pod["status"]["phase"] == "Running" {
            return None;
        }
        let waiting = pod.pointer("/status/containerStatuses/0/state/waiting");
        let of_waiting = waiting.and_then(|waiting| {
            let message = waiting["message"].as_str().or(waiting["reason"].as_str())?;
            // The kubelet says why in an Event.
            (message != "ContainerCreating").then(|| message.to_owned())
        });
        let of_event = || self.warnings.get(name(pod)).cloned();
        let mut of_condition = || failing.find_map(|one| Some(one["message"].as_str()?.to_owned()));
        let reason = of_waiting.or_else(of_event).or_else(&mut of_condition);
        Some(reason.unwrap_or_else(|| "not ready".to_owned()))
    }

    fn pods_of<'a>(&'a self, app: &'a str) -> impl Iterator<Item = &'a Value> {
        let pods = self.pods.iter();
        pods.filter(move |pod| pod["metadata"]["labels"]["app"] == app)
    }

    /// Checks the `RuntimeClass` of the agents, or another way to the GPUs.
    async fn runtime_class(&self, cluster: &Cluster) -> Option<Finding> {
        let spec = self.daemon_set.as_ref()?.pointer("/spec/template/spec")?;
        let Some(class) = spec["runtimeClassName"].as_str() else {
            return Some(of_other_way(spec));
        };
        let kind = ObjectKind::new("node.k8s.io", "v1", "runtimeclasses");
        let finding = match cluster.object(&kind, None, class).await {
            Ok(Some(_)) => Finding::ok("runtime-class", format!("the cluster has {class}")),
            Ok(None) => {
                let what = format!("the cluster has no RuntimeClass {class}");
                Finding::problem("runtime-class", what)
            }
            Err(error) => Finding::warning("runtime-class", causes(&error)),
        };
        Some(finding)
    }

    /// Finds GPU nodes that have no agent.
    async fn nodes_without_agent(&self, cluster: &Cluster) -> Option<Finding> {
        let label = self.gpu_node_label()?;
        let nodes = ObjectKind::new("", "v1", "nodes");
        let nodes = match cluster.list_objects(&nodes, None).await {
            Ok(nodes) => nodes,
            Err(error) => return Some(Finding::warning("gpu-nodes", causes(&error))),
        };
        let with_agent: BTreeSet<&str> = self
            .pods_of(AGENTS)
            .filter_map(|pod| pod["spec"]["nodeName"].as_str())
            .collect();
        let with_gpus: Vec<&str> = nodes
            .iter()
            .filter(|node| node["metadata"]["labels"][&label.key] == label.value.as_str())
            .map(name)
            .collect();
        if with_gpus.is_empty() {
            let what = format!("no node has the label {label}");
            return Some(Finding::warning("gpu-nodes", what));
        }
        let without = with_gpus.iter().filter(|node| !with_agent.contains(*node));
        let mut without: Vec<String> = without.map(|&node| node.to_owned()).collect();
        let count = without.len();
        if count == 0 {
            let nodes = plural(with_gpus.len() as u64, "node");
            let what = format!("{nodes} with GPUs, each with an agent");
            return Some(Finding::ok("agents", what));
        }
        without.truncate(NAMED);
        let what = format!("no agent on {}", some_of(&without, count));
        let fix = "agent.nodeSelector, agent.affinity and agent.tolerations select them";
        Some(Finding::problem("agents", what).fix(fix))
    }

    /// Returns the label of GPU nodes that the controller has.
    fn gpu_node_label(&self) -> Option<NodeLabel> {
        let container = (self.deployment.as_ref()?).pointer("/spec/template/spec/containers/0")?;
        let variables = container["env"].as_array().into_iter().flatten();
        let mut labels = variables.filter(|variable| variable["name"] == GPU_NODE_LABEL);
        let label = labels.find_map(|variable| variable["value"].as_str());
        NodeLabel::parse(label.unwrap_or(keys::GPU_NODE_LABEL)).ok()
    }
}

/// Describes the way to the GPUs of agents without a `RuntimeClass`.
fn of_other_way(spec: &Value) -> Finding {
    if spec["resourceClaims"].is_array() {
        return Finding::ok("runtime-class", "none: agents have a claim for the GPUs");
    }
    let volumes = spec["volumes"].as_array().into_iter().flatten();
    let mut volumes = volumes.filter(|volume| volume["name"] == "driver");
    if volumes.next().is_some() {
        let what = "none: agents have the directory of the driver";
        return Finding::ok("runtime-class", what);
    }
    let what = "none: agents see the GPUs only if the container runtime gives them to all pods";
    Finding::warning("runtime-class", what)
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Returns the message of the newest warning about each object.
fn warnings(mut events: Vec<Value>) -> BTreeMap<String, String> {
    let time = |event: &Value| {
        let times = ["lastTimestamp", "eventTime"];
        let mut times = times.iter().filter_map(|key| event[key].as_str());
        times.next().unwrap_or_default().to_owned()
    };
    events.sort_by_key(time);
    let warnings = events.iter().filter(|event| event["type"] == "Warning");
    let named = warnings.filter_map(|event| {
        let about = event["involvedObject"]["name"].as_str()?;
        Some((about.to_owned(), event["message"].as_str()?.to_owned()))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::commands::doctor::Severity;

    fn release(pods: Vec<Value>, ready: u64) -> Release {
        Release {
            namespace: "gpuwarden".to_owned(),
            daemon_set: Some(json!({"status": {
                "desiredNumberScheduled": 3, "numberReady": ready,
            }})),
            deployment: Some(json!({
                "spec": {"replicas": 2}, "status": {"readyReplicas": ready.min(1)},
            })),
            pods,
            warnings: BTreeMap::new(),
        }
    }

    fn pod(app: &str, name: &str, status: &Value) -> Value {
        json!({"metadata": {"name": name, "labels": {"app": app}}, "status": status})
    }

    #[test]
    fn pods_that_are_not_ready_are_named_with_their_reason() {
        let ready =
            json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let waiting = |reason: &str, message: Value| {
            json!({"phase": "Pending",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]})
        };
        let mut found = release(
            vec![
                pod(AGENTS, "a", &ready),
                pod(
                    AGENTS,
                    "b",
                    &waiting("ImagePullBackOff", json!("no such image")),
                ),
                pod(AGENTS, "c", &waiting("ContainerCreating", Value::Null)),
                pod("other", "d", &json!({})),
            ],
            1,
        );
        let event = |name: &str, at: &str, message: &str| {
            json!({"type": "Warning", "involvedObject": {"name": name}, "lastTimestamp": at,
                "message": message})
        };
        found.warnings = warnings(vec![
            event(
                "c",
                "2026-01-01T00:00:02Z",
                "no runtime for \"nvidia\" is configured",
            ),
            event("c", "2026-01-01T00:00:01Z", "older"),
        ]);
        let agents = found.agents();
        assert_eq!(agents.result, Severity::Problem);
        assert_eq!(
            agents.what,
            "1 of 3 are ready: no runtime for \"nvidia\" is configured (c); no such image (b)"
        );
        assert_eq!(found.controllers().result, Severity::Ok);
    }

    #[test]
    fn a_refusal_to_create_pods_is_told() {
        let mut found = release(Vec::new(), 0);
        let refused = "pods \"gpuwarden-agent-\" is forbidden: violates PodSecurity";
        found.warnings = [(AGENTS.to_owned(), refused.to_owned())].into();
        assert!(
            found.agents().what.contains(refused),
            "{:?}",
            found.agents()
        );
        let controllers = found.controllers();
        assert!(
            controllers.what.ends_with("it has no pods yet"),
            "{controllers:?}"
        );
        found.daemon_set = None;
        assert!(found.agents().what.contains("has no DaemonSet"));
    }

    #[test]
    fn agents_without_a_runtime_class_have_another_way_or_a_warning() {
        for (spec, expected) in [
            (json!({"resourceClaims": []}), Severity::Ok),
            (json!({"volumes": [{"name": "driver"}]}), Severity::Ok),
            (json!({"volumes": [{"name": "data"}]}), Severity::Warning),
        ] {
            assert_eq!(of_other_way(&spec).result, expected, "{spec}");
        }
    }
}
