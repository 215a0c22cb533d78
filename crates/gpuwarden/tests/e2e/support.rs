//! A node in a cluster, the product that watches it, and queries about both.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{Entity, HealthEvent, HealthEvents};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition,
};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, NodeBuilder, Product, binary, unique};
use tokio::net::TcpSocket;
use tonic::transport::Endpoint;

/// Time for any expected event, also on a very busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// Configuration of a remediation that hands a node over whose replacement is recommended. It ends
/// with the table of the templates.
pub(crate) const HAND_OVER: &str = r#"
[remediationActions.REPLACE_VM]
apiGroup = "nvsentinel.dgxc.nvidia.com"
version = "v1"
kind = "ExternalRemediationRequest"
scope = "Cluster"
completeConditionType = "ExternalRemediationComplete"
templateFileName = "hand-over.yaml"
equivalenceGroup = "external"

[templates]
"hand-over.yaml" = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata:
  name: extrr-{{ .NodeName }}-{{ .HealthEventID }}
spec:
  healthEvent:
    nodeName: {{ .NodeName | printf "%q" }}
    checkName: {{ .HealthEvent.CheckName | printf "%q" }}
    recommendedAction: {{ .RecommendedActionName | printf "%q" }}
"""
"#;
/// Configuration of a janitor that resets GPUs by Jobs, and stops services meanwhile.
pub(crate) const JANITOR: &str = "
gpuResetController:
  enabled: true
  serviceManager: {name: gpu-operator}
  resetJob:
    imageConfig: {image: example.com/gpuwarden:1}
";

/// A node, and the product that is responsible for it.
pub(crate) struct Scene {
    pub(crate) node: String,
    pub(crate) nodes: Api<Node>,
    pub(crate) product: Product,
    pub(crate) before: Value,
}

impl Scene {
    /// Creates a node described by `describe`, and starts a product with `--quarantine` for it.
    pub(crate) async fn new(
        plane: &ControlPlane,
        describe: impl FnOnce(NodeBuilder) -> NodeBuilder,
        arrange: impl FnOnce(Launch) -> Launch,
    ) -> anyhow::Result<Self> {
        Self::with(plane, describe, |node| {
            let launch = Launch::new()?
                .node_name(node)
                .kubeconfig(plane.kubeconfig())
                .quarantine();
            Ok(arrange(launch))
        })
        .await
    }

    /// Creates a node described by `describe`, and starts a product with `launch` applied for
    /// it.
    pub(crate) async fn with(
        plane: &ControlPlane,
        describe: impl FnOnce(NodeBuilder) -> NodeBuilder,
        launch: impl FnOnce(&str) -> anyhow::Result<Launch>,
    ) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        let node = unique("e2e");
        describe(testkit::node(&node)).create(&client).await?;
        let nodes: Api<Node> = Api::all(client);
        let before = settled(&nodes, &node).await?;
        let product = launch(&node)?.start().await?;
        Ok(Self {
            node,
            nodes,
            product,
            before,
        })
    }

    /// Kills the product, and starts it again without its store.
    pub(crate) async fn restart_without_store(&mut self) -> anyhow::Result<()> {
        self.product.kill9()?;
        for file in std::fs::read_dir(self.product.data_dir())? {
            std::fs::remove_file(file?.path())?;
        }
        self.product.restart().await
    }

    /// Waits until `holds` returns `Ok` for the node.
    pub(crate) async fn node_until<T>(
        &self,
        what: &str,
        holds: impl Fn(&Value) -> Result<T, String>,
    ) -> anyhow::Result<T> {
        self.product
            .wait_for(what, SOON, || async {
                holds(
                    &object(&self.nodes, &self.node)
                        .await
                        .map_err(|error| error.to_string())?,
                )
            })
            .await
    }

    /// Waits until the product has cordoned the node. Returns the node.
    pub(crate) async fn cordoned(&self) -> anyhow::Result<Value> {
        self.node_until("the cordon", |node| {
            let ours = node["metadata"]["annotations"]["quarantineHealthEventIsCordoned"] == "True";
            if ours && node["spec"]["unschedulable"] == true {
                Ok(node.clone())
            } else {
                Err(shape(node).to_string())
            }
        })
        .await
    }

    /// Waits until the node has a condition with this status. Returns the condition.
    pub(crate) async fn condition(&self, kind: &str, status: &str) -> anyhow::Result<Value> {
        self.node_until(&format!("condition {kind}={status}"), |node| {
            let found = condition(node, kind);
            if found["status"] == status {
                Ok(found.clone())
            } else {
                Err(node["status"]["conditions"].to_string())
            }
        })
        .await
    }

    /// Waits until the node is exactly as before the test.
    pub(crate) async fn restored(&self) -> anyhow::Result<()> {
        self.node_until("the node as it was before", |node| {
            let now = shape(node);
            if now == self.before {
                Ok(())
            } else {
                Err(format!("{now}\nbefore: {}", self.before))
            }
        })
        .await
    }

    /// Restores a node that has returned before, and whose next return would be delayed: once
    /// its faults have recovered, uncordons it as a person would.
    pub(crate) async fn restored_by_hand(&self) -> anyhow::Result<()> {
        self.session("a session that ends", |it| {
            it["phase"].is_null() || it["phase"] == "releasing"
        })
        .await?;
        self.patch(json!({"spec": {"unschedulable": null}})).await?;
        self.restored().await
    }

    /// Patches the node as a person or another controller would.
    pub(crate) async fn patch(&self, patch: Value) -> anyhow::Result<()> {
        let patch = Patch::<Value>::Merge(patch);
        self.nodes
            .patch(&self.node, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Waits until the product has processed `events` events.
    pub(crate) async fn taken_in(&self, events: u64) -> anyhow::Result<()> {
        taken_in(&self.product, events).await
    }

    /// Waits until the status shows a fault of the node. `inject recovery` reads the status, which
    /// follows the product with a delay: the node may be cordoned before.
    pub(crate) async fn faulty(&self) -> anyhow::Result<()> {
        self.product
            .wait_for("a fault in the status", SOON, || async {
                let shown = self.shown().await.map_err(|error| error.to_string())?;
                match shown["faults"].as_array() {
                    Some(faults) if !faults.is_empty() => Ok(()),
                    _ => Err(shown.to_string()),
                }
            })
            .await
    }

    /// Returns the output of `gpuwarden status -o json`, whatever its exit code.
    pub(crate) async fn status(&self) -> anyhow::Result<Value> {
        let output = self.product.client(["status", "-o", "json"]).await?;
        Ok(serde_json::from_str(&output.stdout)?)
    }

    /// Returns the node in the status; `null` if it is missing.
    pub(crate) async fn shown(&self) -> anyhow::Result<Value> {
        let status = self.status().await?;
        let nodes = status["fleet"]["nodes"].as_array();
        let mut nodes = nodes.into_iter().flatten();
        let own = nodes.find(|node| node["name"] == self.node.as_str());
        Ok(own.cloned().unwrap_or_default())
    }

    /// Waits until the product has read all inputs of its decisions.
    pub(crate) async fn ready(&self) -> anyhow::Result<()> {
        self.product
            .wait_for("readiness", SOON, || async {
                match self.product.get("/readyz").await {
                    Ok(ready) if ready == "ready\n" => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await
    }

    /// Waits until the node's session in the status meets `is`.
    pub(crate) async fn session(
        &self,
        what: &str,
        is: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        self.product
            .wait_for(what, SOON, || async {
                let shown = self.shown().await.map_err(|error| error.to_string())?;
                if is(&shown["session"]) {
                    Ok(())
                } else {
                    Err(shown.to_string())
                }
            })
            .await
    }

    /// Waits until the node's story has an entry of this kind that contains `text`.
    pub(crate) async fn told(&self, kind: &str, text: &str) -> anyhow::Result<()> {
        self.product
            .wait_for(&format!("{kind} {text:?} in the story"), SOON, || async {
                let story = self.story().await.map_err(|error| error.to_string())?;
                let mut told = story.iter();
                if told.any(|entry| entry.0 == kind && entry.1.contains(text)) {
                    Ok(())
                } else {
                    Err(format!("{story:?}"))
                }
            })
            .await
    }

    /// Returns the kinds and texts of the entries that `explain` prints, in order.
    pub(crate) async fn story(&self) -> anyhow::Result<Vec<(String, String)>> {
        self.story_of(&self.node).await
    }

    /// Returns the entries that `explain` prints for another node.
    pub(crate) async fn story_of(&self, node: &str) -> anyhow::Result<Vec<(String, String)>> {
        let output = self.product.client(["explain", node, "-o", "json"]).await?;
        let story: Value = serde_json::from_str(&output.stdout)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let entries = story["entries"].as_array().cloned().unwrap_or_default();
        Ok(entries
            .iter()
            .map(|entry| (text(&entry["kind"]), text(&entry["text"])))
            .collect())
    }
}

/// Returns the condition of this type; `null` if the node has none.
pub(crate) fn condition<'a>(node: &'a Value, kind: &str) -> &'a Value {
    let list = node["status"]["conditions"].as_array();
    let mut list = list.into_iter().flatten();
    list.find(|one| one["type"] == kind).unwrap_or(&Value::Null)
}

/// Returns an XID line as the driver prints it.
pub(crate) fn xid(code: u32, note: &str) -> String {
    // The driver's form for an unknown process, which a patch has to escape.
    format!(
        "[  100.000001] NVRM: Xid (PCI:0000:b3:00): {code}, pid='<unknown>', name=<unknown>, {note} & more\n"
    )
}

/// Reads the node object.
pub(crate) async fn object(nodes: &Api<Node>, name: &str) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(nodes.get(name).await?)?)
}

/// Returns the parts that a restored node must have as before: labels, annotations, spec.
pub(crate) fn shape(node: &Value) -> Value {
    let mut annotations = node["metadata"]["annotations"].clone();
    // The controller manager changes this annotation with the number of nodes, from a hundred
    // on.
    if let Some(ttl) = annotations.get_mut("node.alpha.kubernetes.io/ttl") {
        *ttl = Value::Null;
    }
    json!({
        "labels": node["metadata"]["labels"],
        "annotations": annotations,
        "spec": node["spec"],
    })
}

/// Waits until the controller manager has set up a new node. Returns the node's shape.
async fn settled(nodes: &Api<Node>, name: &str) -> anyhow::Result<Value> {
    testkit::wait_for(
        "the controller manager's marks on the node",
        SOON,
        || async {
            let node = object(nodes, name)
                .await
                .map_err(|error| error.to_string())?;
            let marked =
                node["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"].is_string();
            let cordoned = node["spec"]["unschedulable"] == true;
            let taints = node["spec"]["taints"].to_string();
            let tainted = taints.contains("node.kubernetes.io/unschedulable");
            if marked && cordoned == tainted {
                Ok(shape(&node))
            } else {
                Err(shape(&node).to_string())
            }
        },
    )
    .await
}

/// Gives a node another boot id, as a reboot of its machine does.
pub(crate) async fn reboot(nodes: &Api<Node>, name: &str) -> anyhow::Result<()> {
    let boot = json!({"status": {"nodeInfo": {"bootID": unique("boot")}}});
    let (params, boot) = (PatchParams::default(), Patch::Strategic(boot));
    nodes.patch_status(name, &params, &boot).await?;
    Ok(())
}

/// Binds a socket without listening: it reserves the address for another listener, across its
/// restarts.
pub(crate) fn bound(address: SocketAddr) -> anyhow::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Binds such a socket to a free port.
pub(crate) fn own_port() -> anyhow::Result<TcpSocket> {
    bound(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

/// Returns a fatal fault of a GPU.
pub(crate) fn event(node: &str, gpu: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: true,
        node_name: node.into(),
        recommended_action: 2,
        error_code: vec!["DCGM_FR_FAULTY_MEMORY".into()],
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.into(),
        }],
        ..HealthEvent::default()
    }
}

/// Returns the recovery of [`event`].
pub(crate) fn recovery(node: &str, gpu: &str) -> HealthEvent {
    HealthEvent {
        is_fatal: false,
        is_healthy: true,
        recommended_action: 0,
        ..event(node, gpu)
    }
}

/// Waits until a product has processed `events` events, and its status shows their faults.
pub(crate) async fn taken_in(product: &Product, events: u64) -> anyhow::Result<()> {
    product
        .wait_for("events to be taken in", SOON, || async {
            let output = product.client(["status", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?.stdout;
            let status: Value = serde_json::from_str(&output).map_err(|error| error.to_string())?;
            let applied = status["fleet"]["applied"].as_u64().unwrap_or(0);
            if applied >= events {
                Ok(())
            } else {
                Err(format!("{applied} of {events}"))
            }
        })
        .await
}

/// Sends events to the product's socket, as any monitor does.
pub(crate) async fn send_to(product: &Product, events: Vec<HealthEvent>) -> anyhow::Result<()> {
    send(product.socket(), events).await
}

/// Sends events to a socket path.
pub(crate) async fn send(socket: &Path, events: Vec<HealthEvent>) -> anyhow::Result<()> {
    let address = format!("unix://{}", socket.display());
    let channel = Endpoint::try_from(address)?.connect().await?;
    PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(HealthEvents { version: 1, events })
        .await?;
    Ok(())
}

/// Runs a command without a running product. Returns its exit code, output and errors.
pub(crate) fn gpuwarden(args: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut child = Command::new(binary().unwrap())
        .args(args)
        .env_remove("GPUWARDEN_KUBECONFIG")
        .env("GPUWARDEN_LISTEN", "127.0.0.1:0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Installs the kinds of `deploy/helm/gpuwarden/crds`, and waits until they are served.
pub(crate) async fn install_crds(client: &kube::Client) -> anyhow::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/gpuwarden/crds");
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for file in std::fs::read_dir(directory)? {
        let text = std::fs::read_to_string(file?.path())?;
        let crd: Value = serde_saphyr::from_str(&text)?;
        let name = crd["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let params = PatchParams::apply("gpuwarden-tests").force();
        crds.patch(&name, &params, &Patch::Apply(&crd)).await?;
        testkit::wait_for(&format!("{name} to be served"), SOON, || async {
            let crd = crds.get(&name).await.map_err(|error| error.to_string())?;
            let conditions = crd
                .status
                .unwrap_or_default()
                .conditions
                .unwrap_or_default();
            let served = |one: &&_| -> bool {
                let one: &CustomResourceDefinitionCondition = one;
                one.type_ == "Established" && one.status == "True"
            };
            if conditions.iter().any(|one| served(&one)) {
                Ok(())
            } else {
                Err(format!("{conditions:?}"))
            }
        })
        .await?;
    }
    Ok(())
}
