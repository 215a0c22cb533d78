//! Agent and controller as separate processes, connected with TLS.
//!
//! A controller is responsible for every node of its cluster, so each test here has a private
//! control plane.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{Authority, ControlPlane, Launch, Options, Product, Purpose, Version, unique};
use tokio::net::TcpSocket;

use crate::crash::{self, ALL_SENT, Moments};
use crate::runbook::Reader;
use crate::stages::recovered;
use crate::support::{SOON, Scene, object, own_port, xid};

/// Kills of either process, outside of the soak.
const KILLS: u32 = 10;

/// A node's agent, and the controller of its cluster (the scene's product).
pub(crate) struct Apart {
    pub(crate) scene: Scene,
    pub(crate) agent: Product,
    tls: Tls,
}

/// Certificates of both sides, in a directory.
pub(crate) struct Tls {
    directory: TempDir,
    /// Reserves the controller's port across restarts.
    port: TcpSocket,
}

impl Tls {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            directory: TempDir::new()?,
            port: own_port()?,
        })
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the address of the controller.
    pub(crate) fn address(&self) -> anyhow::Result<String> {
        Ok(format!("https://{}", self.port.local_addr()?))
    }

    /// Issues certificates of a new authority to both sides.
    pub(crate) fn rotate(&self, node: &str) -> anyhow::Result<()> {
        let authority = Authority::new("gpuwarden")?;
        let directory = self.directory.path();
        let agent = authority.sign(Purpose::Client, &format!("system:node:{node}"), &[])?;
        agent.write(directory, "agent")?;
        let controller = authority.sign(Purpose::Server, "controller", &["127.0.0.1"])?;
        controller.write(directory, "controller")?;
        std::fs::write(self.path("ca.crt"), authority.pem())?;
        Ok(())
    }

    pub(crate) fn controller(&self, plane: &ControlPlane) -> anyhow::Result<Launch> {
        // Without the election, a killed controller need not wait for its own Lease (see
        // `leader.rs`).
        Ok(Launch::controller()?
            .kubeconfig(plane.kubeconfig())
            .quarantine()
            .option("--leader-elect", "false")
            .option("--grpc-listen", self.port.local_addr()?.to_string())
            .option("--grpc-tls-cert", self.path("controller.crt"))
            .option("--grpc-tls-key", self.path("controller.key"))
            .option("--grpc-client-ca", self.path("ca.crt")))
    }

    /// Returns the launch of an agent of `node`, without its credentials.
    fn agent(&self, node: &str) -> anyhow::Result<Launch> {
        Ok(Launch::agent()?
            .node_name(node)
            .option("--controller", self.address()?)
            .option("--tls-ca", self.path("ca.crt")))
    }

    fn with_certificate(&self, agent: Launch) -> Launch {
        agent
            .option("--tls-cert", self.path("agent.crt"))
            .option("--tls-key", self.path("agent.key"))
    }
}

impl Apart {
    pub(crate) async fn new(plane: &ControlPlane) -> anyhow::Result<Self> {
        let tls = Tls::new()?;
        let launch = |node: &str| {
            tls.rotate(node)?;
            tls.controller(plane)
        };
        let scene = Scene::with(plane, |node| node, launch).await?;
        let agent = tls
            .with_certificate(tls.agent(&scene.node)?)
            .start()
            .await?;
        Ok(Self { scene, agent, tls })
    }

    /// Returns the `status` of the agent.
    async fn agent_status(&self) -> anyhow::Result<Value> {
        let output = self.agent.client(["status", "-o", "json"]).await?;
        Ok(serde_json::from_str(&output.stdout)?)
    }

    /// Waits until the agent's outbox holds this number of events.
    async fn waiting(&self, events: u64) -> anyhow::Result<()> {
        let wait = format!("{events} events to wait at the agent");
        self.agent
            .wait_for(&wait, SOON, || async {
                let status = self
                    .agent_status()
                    .await
                    .map_err(|error| error.to_string())?;
                let found = status["store"]["events"].as_u64().unwrap_or(u64::MAX);
                if found == events {
                    Ok(())
                } else {
                    Err(status.to_string())
                }
            })
            .await
    }

    pub(crate) async fn recover(&self) -> anyhow::Result<()> {
        self.all_is_well().await?;
        self.scene.restored().await
    }

    async fn all_is_well(&self) -> anyhow::Result<()> {
        self.scene.faulty().await?;
        // The operator reports the recovery at the controller.
        let node = [
            "inject",
            "recovery",
            "--node-name",
            self.scene.node.as_str(),
        ];
        self.scene.product.client(node).await?.expect(0)?;
        Ok(())
    }
}

#[tokio::test]
async fn an_agent_says_who_knows_what_it_does_not() -> anyhow::Result<()> {
    let tls = Tls::new()?;
    tls.rotate("n1")?;
    let agent = tls.with_certificate(tls.agent("n1")?).start().await?;
    let controller = format!("https://{}", tls.port.local_addr()?);
    for command in [
        &["inject", "recovery"][..],
        &["explain"],
        &["why-not", "n1"],
        &["events"],
        &["events", "--follow"],
        &["ledger"],
        &["report", "evidence", "n1"],
    ] {
        let answer = agent.client(command.iter().copied()).await?;
        assert_eq!(answer.code, Some(2), "{command:?}: {}", answer.stdout);
        for part in ["this is an agent", &controller, "--server"] {
            assert!(
                answer.stderr.contains(part),
                "{command:?}: {}",
                answer.stderr
            );
        }
    }
    let mark = ["ledger", "mark", "17", "bad", "--reason", "test"];
    let answer = agent.client(mark).await?;
    assert_eq!(answer.code, Some(2), "{}", answer.stdout);
    let here = answer.stderr.contains("this is an agent");
    assert!(
        here && answer.stderr.contains(&controller),
        "{}",
        answer.stderr
    );
    Ok(())
}

#[tokio::test]
async fn an_agent_reports_over_tls_for_its_own_node_and_its_controller_acts() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    // One after the other: a second controller would be responsible for the same nodes.
    line_and_outage(&plane).await?;
    foreign_node(&plane).await?;
    token(&plane).await
}

/// Checks that a line at the agent cordons the node, and that events during an outage of the
/// controller arrive later.
async fn line_and_outage(plane: &ControlPlane) -> anyhow::Result<()> {
    let mut apart = Apart::new(plane).await?;
    apart
        .agent
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    let node = apart.scene.cordoned().await?;
    assert!(
        node["metadata"]["annotations"]["quarantineHealthEvent"]
            .as_str()
            .is_some_and(|text| text.contains("79")),
        "{node}"
    );
    apart.waiting(0).await?;
    let delivered = || async {
        let status = apart.agent_status().await?;
        let is_ready = status["ready"] == true;
        anyhow::ensure!(status["delivery"]["delivered"] == 1 && is_ready, "{status}");
        Ok(())
    };
    let agent = &apart.agent;
    agent.wait_for("a ready agent", SOON, delivered).await?;
    apart.recover().await?;

    // The agent is killed during the outage: it starts without its controller, keeps its events,
    // accepts new ones, and reports the problem.
    let (exit, _) = apart.scene.product.terminate().await?;
    assert!(exit.success(), "{exit}");
    apart
        .agent
        .append_kernel_log(&xid(119, "Timeout waiting for RPC"))?;
    apart.waiting(1).await?;
    apart.agent.restart().await?;
    let code = ["inject", "xid", "48"];
    apart.agent.client(code).await?.expect(0)?;
    apart.waiting(2).await?;
    // Not ready once its first try has failed.
    let waits = || async {
        let shown = apart.agent.client(["status"]).await?;
        let says_so = shown.stdout.contains("2 wait");
        anyhow::ensure!(shown.code == Some(1) && says_so, "{shown:?}");
        Ok(())
    };
    let agent = &apart.agent;
    agent.wait_for("two that wait", SOON, waits).await?;
    // The agent keeps its events across an orderly shutdown.
    let (exit, _) = apart.agent.terminate().await?;
    assert!(exit.success(), "{exit}");
    apart.agent.restart().await?;

    // All certificates are replaced during the outage, while the agent runs.
    apart.waiting(2).await?;
    apart.tls.rotate(&apart.scene.node)?;
    apart.scene.product.restart().await?;
    apart.scene.cordoned().await?;
    apart.waiting(0).await?;
    apart.scene.taken_in(4).await?;
    // The second return within the hour is delayed: the controller remembers the first one.
    apart.all_is_well().await?;
    let wait = "it has come back once within the hour";
    apart
        .scene
        .session("the wait", |it| {
            it["awaits"]
                .as_str()
                .is_some_and(|awaits| awaits.contains(wait))
        })
        .await?;
    apart.scene.restored().await
}

/// Checks that an agent that reports for another node is refused, without delaying others.
async fn foreign_node(plane: &ControlPlane) -> anyhow::Result<()> {
    let mut apart = Apart::new(plane).await?;
    // The certificate of one node and the name of another, as on a compromised machine.
    let client = plane.client().await?;
    let victim = unique("victim");
    testkit::node(&victim).create(&client).await?;
    let launch = apart.tls.agent(&victim)?;
    apart.agent = apart.tls.with_certificate(launch).start().await?;
    apart
        .agent
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    apart
        .agent
        .wait_line("speaks for itself only", SOON)
        .await?;
    apart.waiting(0).await?;
    let status = apart.agent_status().await?;
    assert_eq!(status["delivery"]["refused"], 1, "{status}");
    let aside = apart.agent.data_dir().join("outbox/refused.jsonl");
    assert!(std::fs::read_to_string(aside)?.contains(&victim));
    let data = apart.agent.data_dir().display().to_string();
    let names = [("/var/lib/gpuwarden", data.as_str())];
    let mut reader = Reader::beside(&apart.agent, None)?;
    reader.runbook("GpuwardenEventsPutAside", &names).await?;
    let node = object(&apart.scene.nodes, &victim).await?;
    assert_eq!(node["spec"]["unschedulable"], Value::Null);
    assert!(
        apart
            .scene
            .product
            .stderr()
            .contains("speaks for itself only")
    );
    Ok(())
}

/// Creates an account in the namespace `default`, and a pod of it on a node. Returns the name of
/// the account, and a token of the pod for the controller.
pub(crate) async fn pod_token(
    plane: &ControlPlane,
    node: &str,
) -> anyhow::Result<(String, String)> {
    let client = plane.client().await?;
    let account = unique("agent");
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    let made = json!({"metadata": {"name": account}});
    let made = serde_json::from_value(made)?;
    accounts.create(&PostParams::default(), &made).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let pod = json!({
        "metadata": {"name": account},
        "spec": {
            "nodeName": node,
            "serviceAccountName": account,
            "containers": [{"name": "agent", "image": "gpuwarden"}],
        },
    });
    let pod = pods
        .create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    let bound = json!({"kind": "Pod", "apiVersion": "v1", "name": account,
        "uid": pod.metadata.uid});
    let request = json!({"spec": {"audiences": ["gpuwarden"], "expirationSeconds": 600,
        "boundObjectRef": bound}});
    let request = serde_json::from_value(request)?;
    let answer = accounts
        .create_token_request(&account, &PostParams::default(), &request)
        .await?;
    let token = answer
        .status
        .and_then(|status| status.token)
        .unwrap_or_default();
    Ok((account, token))
}

/// Checks that a pod's token permits reports for the pod's node.
async fn token(plane: &ControlPlane) -> anyhow::Result<()> {
    let mut apart = Apart::new(plane).await?;
    let (account, token) = pod_token(plane, &apart.scene.node).await?;
    std::fs::write(apart.tls.path("token"), token)?;

    let launch = apart.tls.agent(&apart.scene.node)?;
    let launch = launch.option("--token-file", apart.tls.path("token"));
    apart.agent = launch.start().await?;
    apart
        .agent
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    // The ServiceAccount is not permitted yet: the events are refused and stay in the outbox.
    apart.agent.wait_line("may not report", SOON).await?;
    apart.waiting(1).await?;
    let controller = apart.tls.controller(plane)?;
    let controller = controller.option("--agents", format!("default/{account}"));
    apart.scene.product.terminate().await?;
    apart.scene.product = controller.start().await?;
    apart.scene.cordoned().await?;
    apart.recover().await
}

#[tokio::test]
async fn a_controller_leaves_the_sessions_of_a_nodes_own_gpuwarden_to_it() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    let node = scene.cordoned().await?;
    let session = node["metadata"]["annotations"]["gpuwarden.dev/session"].as_str();
    let session: Value = serde_json::from_str(session.unwrap_or_default())?;
    assert_eq!(session["by"], "node", "{session}");

    let tls = Tls::new()?;
    tls.rotate(&scene.node)?;
    let mut controller = tls.controller(&plane)?.start().await?;
    controller.wait_line("it is left alone", SOON).await?;
    recovered(&scene).await?;
    scene.restored().await?;
    // The controller has evaluated the returned node, and reports no faults.
    controller
        .wait_line("is no longer on the node", SOON)
        .await?;
    let status = controller.client(["status", "-o", "json"]).await?.json(0)?;
    assert_eq!(status["fleet"]["applied"], 0, "it took over a fault");
    scene.restored().await
}

#[tokio::test]
async fn either_killed_at_random_moments_loses_and_doubles_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let kills = crash::kills(KILLS)?;
    let mut apart = Apart::new(&plane).await?;
    let socket = apart.agent.socket().to_owned();
    let mut sender = tokio::spawn(crash::send_all(socket, apart.scene.node.clone()));
    let mut moments = Moments::new();
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_millis(20 + moments.below(180))).await;
        match moments.below(3) {
            0 => apart.agent.restart().await?,
            1 => apart.scene.product.restart().await?,
            _ => {
                apart.agent.kill9()?;
                apart.scene.product.restart().await?;
                apart.agent.restart().await?;
            }
        }
    }
    let again = tokio::time::timeout(ALL_SENT, &mut sender).await???;
    println!("{kills} kills, {again} events sent again");
    apart.waiting(0).await?;
    apart.scene.taken_in(crash::events().into()).await?;
    crash::all_once_and_in_order(&apart.scene).await?;
    apart.all_is_well().await?;
    apart.scene.restored_by_hand().await
}
