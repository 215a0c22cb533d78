//! The way to a controller in a cluster: `kubectl port-forward` with the rights of the person who
//! runs this command.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use contract::keys;
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::args::RemoteArgs;
use crate::settings::DEFAULT_PORT;

/// Label of the controllers' pods in the chart.
const PODS: &str = "app=gpuwarden-controller";
/// Name of the port of status page, API and metrics in the chart.
const PORT: &str = "metrics";
/// Longest wait for kubectl.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A running `kubectl port-forward`, which ends with this value.
pub(super) struct PortForward {
    /// Address on this machine that leads to the controller, such as `127.0.0.1:40123`.
    pub(super) address: String,
    /// Namespace and name of the controller's pod.
    pub(super) pod: String,
    /// kubectl, whose standard output stays open: it writes a line there for each connection.
    _kubectl: Child,
}

/// kubectl's list of pods.
#[derive(Deserialize)]
struct Pods {
    items: Vec<Pod>,
}

// === impl PortForward ===

impl PortForward {
    /// Starts kubectl to the controller that is ready, else to one that can tell why it is not.
    pub(super) async fn start(args: &RemoteArgs) -> anyhow::Result<Self> {
        let namespace = args.namespace.as_deref().unwrap_or(keys::NAMESPACE);
        let started = async {
            let pod = controller(args, namespace).await?;
            forward(args, namespace, &pod).await
        };
        let started = tokio::time::timeout(TIMEOUT, started).await;
        started.with_context(|| format!("kubectl takes over {} s", TIMEOUT.as_secs()))?
    }
}

/// Returns the pod of the controller that acts: of several, it alone is ready.
async fn controller(args: &RemoteArgs, namespace: &str) -> anyhow::Result<Pod> {
    let mut get = kubectl(args, namespace);
    get.args(["get", "pods", "-l", PODS, "-o", "json"]);
    let output = get.output().await.map_err(not_started)?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let pods: Pods = serde_json::from_slice(&output.stdout).context("kubectl get pods")?;
    let found = pods
        .items
        .into_iter()
        .filter(|pod| phase(pod) == "Running")
        .max_by_key(is_ready);
    found.with_context(|| {
        format!(
            "no pod with the label {PODS} runs in the namespace {namespace}; name gpuwarden's with \
             --namespace, and its cluster with --context, or see kubectl -n {namespace} get pods"
        )
    })
}

async fn forward(args: &RemoteArgs, namespace: &str, pod: &Pod) -> anyhow::Result<PortForward> {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let mut command = kubectl(args, namespace);
    command.args(["port-forward", "--address", "127.0.0.1"]);
    command.args([format!("pod/{name}"), format!(":{}", port(pod))]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut kubectl = command.spawn().map_err(not_started)?;
    let mut line = String::new();
    let mut stdout = BufReader::new(kubectl.stdout.take().context("no standard output")?);
    stdout.read_line(&mut line).await?;
    let Some(address) = address(&line) else {
        let mut said = String::new();
        if let Some(mut stderr) = kubectl.stderr.take() {
            stderr.read_to_string(&mut said).await?;
        }
        bail!("kubectl port-forward: {line}{}", said.trim());
    };
    kubectl.stdout = Some(stdout.into_inner());
    Ok(PortForward {
        address,
        pod: format!("{namespace}/{name}"),
        _kubectl: kubectl,
    })
}

/// Returns kubectl for the cluster and user that the flags name, else for those of its own settings.
fn kubectl(args: &RemoteArgs, namespace: &str) -> Command {
    let mut command = Command::new("kubectl");
    if let Some(file) = &args.kubeconfig {
        command.arg("--kubeconfig").arg(file);
    }
    if let Some(context) = &args.context {
        command.arg("--context").arg(context);
    }
    command.args(["--namespace", namespace]);
    command
}

fn not_started(error: io::Error) -> anyhow::Error {
    anyhow::Error::new(error).context(
        "cannot start kubectl, which leads to the controller in the cluster; have it in PATH, or name \
         the address of a gpuwarden with --server",
    )
}

fn phase(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    phase.unwrap_or_default()
}

fn is_ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let mut conditions = status
        .and_then(|status| status.conditions.as_deref())
        .unwrap_or_default()
        .iter();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn port(pod: &Pod) -> u16 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports
        .find(|port| port.name.as_deref() == Some(PORT))
        .and_then(|port| u16::try_from(port.container_port).ok())
        .unwrap_or(DEFAULT_PORT)
}

/// Returns the address in kubectl's `Forwarding from 127.0.0.1:40123 -> 2112`.
fn address(line: &str) -> Option<String> {
    let rest = line.strip_prefix("Forwarding from ")?;
    Some(rest.split_once(" -> ")?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_address_is_read_from_the_line_of_kubectl() {
        let line = "Forwarding from 127.0.0.1:40123 -> 2112\n";
        assert_eq!(address(line).as_deref(), Some("127.0.0.1:40123"));
        assert_eq!(address("error: unable to listen\n"), None);
        assert_eq!(address(""), None);
    }

    #[test]
    fn the_port_is_the_one_that_the_pod_names() {
        let pod = |ports: serde_json::Value| -> Pod {
            let container = json!({"name": "controller", "ports": ports});
            serde_json::from_value(json!({"spec": {"containers": [container]}})).unwrap()
        };
        let named = json!([{"name": "grpc", "containerPort": 50051},
            {"name": "metrics", "containerPort": 9000}]);
        assert_eq!(port(&pod(named)), 9000);
        assert_eq!(port(&pod(json!([]))), DEFAULT_PORT);
    }
}
