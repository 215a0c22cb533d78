//! `kubectl gpuwarden`: the program as a plugin of the real kubectl, which leads to the controller's
//! pod by the API server and a kubelet, with the rights of the caller.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{
    Authority, Component, ControlPlane, Launch, Output, Product, Purpose, Version, require, unique,
    wait_for,
};
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};

use crate::doctor::kubeconfig_of;
use crate::support::{SOON, event, own_port, send_to};

/// Port of the controller in its pod.
const PORT: u16 = 2112;

/// A kubelet of one node, played by kwok. It forwards the port of pods to the product.
struct Kubelet {
    _kwok: Child,
    /// Reserves the port.
    _port: TcpSocket,
    _dir: tempfile::TempDir,
}

impl Kubelet {
    async fn start(
        kwok: &Path,
        plane: &ControlPlane,
        node: &str,
        product: &Product,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let certificate =
            Authority::new("kubelets")?.sign(Purpose::Server, node, &["127.0.0.1"])?;
        certificate.write(dir.path(), "kubelet")?;
        let (_, target) = product.address().rsplit_once(':').context("a port")?;
        let target: u16 = target.parse()?;
        let forward = json!({
            "kind": "ClusterPortForward",
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "metadata": {"name": "product"},
            "spec": {"forwards": [{
                "ports": [PORT],
                "target": {"address": "127.0.0.1", "port": target},
            }]},
        });
        std::fs::write(dir.path().join("config.yaml"), forward.to_string())?;
        let port = own_port()?;
        let listen = port.local_addr()?;
        let file = |name: &str| dir.path().join(name).display().to_string();
        let kwok = Command::new(kwok)
            .arg(format!("--kubeconfig={}", plane.kubeconfig().display()))
            .arg(format!("--manage-single-node={node}"))
            .arg(format!(
                "--config={}",
                plane.dir().join("stages.yaml").display()
            ))
            .arg(format!("--config={}", file("config.yaml")))
            .arg(format!("--server-address={listen}"))
            .arg(format!("--tls-cert-file={}", file("kubelet.crt")))
            .arg(format!("--tls-private-key-file={}", file("kubelet.key")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.path().join("log"))?)
            .kill_on_drop(true)
            .spawn()?;
        // The API server finds the kubelet by the status of the node.
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": listen.port()}},
        }});
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(plane.client().await?);
        let (how, status) = (PatchParams::default(), Patch::Merge(status));
        nodes.patch_status(node, &how, &status).await?;
        Ok(Self {
            _kwok: kwok,
            _port: port,
            _dir: dir,
        })
    }
}

/// Creates the pod of a controller, and waits until it is ready.
async fn controller_pod(plane: &ControlPlane, namespace: &str, node: &str) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(plane.client().await?, namespace);
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "leader", "labels": {"app": "gpuwarden-controller"}},
        "spec": {
            "nodeName": node,
            "containers": [{
                "name": "controller",
                "image": "gpuwarden",
                "ports": [{"name": "metrics", "containerPort": PORT}],
            }],
        },
    }))?;
    pods.create(&PostParams::default(), &pod).await?;
    wait_for("the pod of the controller", SOON, || async {
        let pod = pods
            .get("leader")
            .await
            .map_err(|error| error.to_string())?;
        let status = serde_json::to_string(&pod.status).map_err(|error| error.to_string())?;
        let running = status.contains(r#""phase":"Running""#);
        running.then_some(()).ok_or(status)
    })
    .await
}

/// Runs `kubectl gpuwarden ARGS` with a kubeconfig, and with the plugin in a directory.
async fn plugin(kubeconfig: &Path, plugins: &Path, args: &[&str]) -> anyhow::Result<Output> {
    let path = std::env::var("PATH")?;
    let mut kubectl = Command::new(plugins.join("kubectl"));
    kubectl
        .arg("gpuwarden")
        .args(args)
        .env("PATH", format!("{}:{path}", plugins.display()))
        .env("KUBECONFIG", kubeconfig)
        .env_remove("GPUWARDEN_SERVER");
    Output::of(&mut kubectl).await
}

#[tokio::test]
async fn the_plugin_asks_the_controller_with_the_rights_of_its_caller() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(kwok) = require(Component::Kwok) else {
        return Ok(());
    };
    let (node, namespace) = (unique("plugin"), unique("plugin"));
    let client = plane.client().await?;
    plane.namespace(&namespace).await?;
    testkit::node(&node)
        .without_kubelet()
        .create(&client)
        .await?;
    let product = Launch::controller()?
        .kubeconfig(plane.kubeconfig())
        .arg("--grpc-insecure")
        .option("--grpc-listen", "127.0.0.1:0")
        .start()
        .await?;
    send_to(&product, vec![event(&node, "0")]).await?;
    let _kubelet = Kubelet::start(&kwok, &plane, &node, &product).await?;
    controller_pod(&plane, &namespace, &node).await?;

    let plugins = tempfile::tempdir()?;
    symlink(testkit::binary()?, plugins.path().join("kubectl-gpuwarden"))?;
    symlink(plane.kubectl_path(), plugins.path().join("kubectl"))?;
    let account = unique("plugin");
    let caller = kubeconfig_of(&plane, &account, plugins.path()).await?;
    let run = async |args: &[&str]| plugin(&caller, plugins.path(), args).await;
    let status = ["status", "-o", "json", "--namespace", &namespace];

    // Without a permission the API server's words say which one is missing.
    let refused = run(&status).await?;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    for part in ["cannot list resource \"pods\"", &account] {
        assert!(refused.stderr.contains(part), "{refused:?}");
    }
    let may = async |name: &str, rule: &[&str]| {
        let named = ["-n", &namespace, "create", "role", name];
        plane.kubectl(named.iter().chain(rule)).await?;
        let account = format!("--serviceaccount=default:{account}");
        let role = format!("--role={name}");
        let bind = [
            "-n",
            &namespace,
            "create",
            "rolebinding",
            name,
            &role,
            &account,
        ];
        plane.kubectl(bind).await
    };
    may("see", &["--verb=get,list", "--resource=pods"]).await?;
    // The API server learns of a role with a delay.
    wait_for("the refusal of the connection", SOON, || async {
        let refused = run(&status).await.map_err(|error| error.to_string())?;
        let part = "cannot create resource \"pods/portforward\"";
        let is_it = refused.code == Some(2) && refused.stderr.contains(part);
        is_it.then_some(()).ok_or(format!("{refused:?}"))
    })
    .await?;

    may("ask", &["--verb=create", "--resource=pods/portforward"]).await?;
    let found: Value = wait_for("the answer of the controller", SOON, || async {
        let answer = run(&status).await.map_err(|error| error.to_string())?;
        // The node is unhealthy.
        answer.json(1).map_err(|error| error.to_string())
    })
    .await?;
    let nodes = found["fleet"]["nodes"].as_array().into_iter().flatten();
    let names: Vec<&Value> = nodes.map(|node| &node["name"]).collect();
    assert!(names.contains(&&json!(node)), "{found}");

    let text = ["-n", &namespace];
    let explained = run(&[&["explain", &node], &text[..]].concat()).await?;
    assert!(explained.stdout.contains("GpuMemWatch"), "{explained:?}");
    // Printed commands are those of the plugin.
    let why = run(&[&["why-not", &node], &text[..]].concat()).await?;
    assert!(why.stdout.contains("kubectl gpuwarden "), "{why:?}");
    let help = run(&["status", "--help"]).await?;
    assert!(
        help.stdout.contains("Usage: kubectl gpuwarden status"),
        "{help:?}"
    );

    // Where no controller runs, the message has the flag that names another namespace.
    let leader = ["-n", &namespace, "label", "pod", "leader", "app-"];
    plane.kubectl(leader).await?;
    let nothing = run(&status).await?;
    assert_eq!(nothing.code, Some(2), "{nothing:?}");
    assert!(nothing.stderr.contains("--namespace"), "{nothing:?}");
    Ok(())
}
