//! Maintenance that the metadata service of a machine announces, in Azure: the agent runs in a network
//! namespace, where the test plays the service at its real address.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, ensure};
use clouds::loopback::{Asked, Reply, Server};
use jiff::fmt::rfc2822;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{ControlPlane, Launch, Private, Product, Version, binary, skip, unique, wait_for};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{SOON, own_port};

const SERVICE: &str = "169.254.169.254";
/// Name of the machine in Azure.
const VM: &str = "gpu_7";

/// The node goes out five minutes before its maintenance, which may begin as soon as it is drained.
const CONFIG: &str = "
clusterName = 'test'
maintenanceEventPollIntervalSeconds = 10
triggerQuarantineWorkflowTimeLimitMinutes = 5
postMaintenanceHealthyDelayMinutes = 0
beginOnceDrained = true
";

/// A network namespace with the address of metadata services, which ends when dropped.
struct Namespace {
    holder: Child,
    files: TempDir,
}

/// Azure, as the test plays it.
#[derive(Clone, Default)]
struct Azure {
    /// The event of the machine: its id, status and begin.
    event: Arc<Mutex<Option<(String, String, Timestamp)>>>,
    /// Events that were told to begin.
    begun: Arc<Mutex<Vec<String>>>,
}

/// A node whose agent asks Azure.
struct Machine {
    azure: Azure,
    _service: Server,
    controller: Product,
    agent: Product,
    launch: Launch,
    nodes: Api<Node>,
    pods: Api<Pod>,
    node: String,
    // The processes in it end first.
    _namespace: Namespace,
    _plane: Private,
}

// === impl Namespace ===

impl Namespace {
    /// Creates a namespace; `None` without the rights of root.
    fn new() -> anyhow::Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            skip("root, for a network namespace");
            return Ok(None);
        }
        let script = format!(
            "ip link set lo up; ip address add {SERVICE}/32 dev lo; echo up; exec sleep 3600"
        );
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-ec", &script])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let stdout = holder.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let files = tempfile::tempdir()?;
        let namespace = Self { holder, files };
        ensure!(line == "up\n", "the namespace has no address: {line:?}");
        Ok(Some(namespace))
    }

    fn file(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.id()).into()
    }

    /// Binds a socket in the namespace.
    fn bind(&self, address: String) -> anyhow::Result<TcpListener> {
        let file = fs::File::open(self.file())?;
        // A thread of its own: the others stay where they are.
        let bound = std::thread::spawn(move || -> anyhow::Result<std::net::TcpListener> {
            move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(LinkNameSpaceType::Network),
            )?;
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = bound.join().unwrap()?;
        Ok(TcpListener::from_std(listener)?)
    }

    /// Leads connections to a port of loopback out of the namespace.
    fn lead_out(&self, port: u16) -> anyhow::Result<()> {
        let address = format!("127.0.0.1:{port}");
        let listener = self.bind(address.clone())?;
        tokio::spawn(async move {
            while let Ok((mut inner, _)) = listener.accept().await {
                let address = address.clone();
                tokio::spawn(async move {
                    let mut outer = TcpStream::connect(address).await?;
                    tokio::io::copy_bidirectional(&mut inner, &mut outer).await
                });
            }
        });
        Ok(())
    }

    /// Returns a program that runs the product in the namespace.
    fn program(&self) -> anyhow::Result<PathBuf> {
        let (path, product) = (self.files.path().join("gpuwarden"), binary()?);
        let (file, product) = (self.file(), product.display());
        let script = format!(
            "#!/bin/sh\nexec nsenter --net={} {product} \"$@\"\n",
            file.display()
        );
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.holder.kill());
        drop(self.holder.wait());
    }
}

// === impl Azure ===

impl Azure {
    fn answer(&self, asked: &Asked) -> Reply {
        if asked.header("metadata") != "true" {
            return Reply::new(400, "no header Metadata");
        }
        if asked.target.starts_with("/metadata/instance/compute?") {
            return Reply::new(200, json!({"name": VM}).to_string());
        }
        if asked.method == "POST" {
            let request: Value = serde_json::from_str(asked.text()).unwrap();
            let event = request["StartRequests"][0]["EventId"].as_str().unwrap();
            self.begun.lock().unwrap().push(event.to_owned());
            return Reply::new(200, "");
        }
        let event = self.event.lock().unwrap().clone();
        let events = event.into_iter().map(|(id, status, start)| {
            json!({
                "EventId": id, "EventType": "Redeploy", "ResourceType": "VirtualMachine",
                "Resources": [VM], "EventStatus": status, "EventSource": "Platform",
                "NotBefore": rfc2822::to_string(&start.to_zoned(jiff::tz::TimeZone::UTC)).unwrap(),
                "Description": "Host maintenance", "DurationInSeconds": 600,
            })
        });
        let events: Vec<Value> = events.collect();
        Reply::new(
            200,
            json!({"DocumentIncarnation": 1, "Events": events}).to_string(),
        )
    }

    fn announces(&self, id: &str, status: &str, within: SignedDuration) {
        let event = (id.to_owned(), status.to_owned(), Timestamp::now() + within);
        *self.event.lock().unwrap() = Some(event);
    }

    fn ends(&self) {
        *self.event.lock().unwrap() = None;
    }

    fn begun(&self) -> Vec<String> {
        self.begun.lock().unwrap().clone()
    }
}

// === impl Machine ===

impl Machine {
    async fn new() -> anyhow::Result<Option<Self>> {
        // One of its own: the controller is responsible for all nodes.
        let plane = ControlPlane::private(Version::V1_37, testkit::Options::default()).await?;
        let (Some(plane), Some(namespace)) = (plane, Namespace::new()?) else {
            return Ok(None);
        };
        let client = plane.client().await?;
        plane.namespace("gpuwarden").await?;
        let node = unique("e2e");
        testkit::node(&node).create(&client).await?;
        let azure = Azure::default();
        let answers = azure.clone();
        let service = Server::on(namespace.bind(format!("{SERVICE}:80"))?, move |asked| {
            answers.answer(asked)
        });
        let port = own_port()?.local_addr()?.port();
        namespace.lead_out(port)?;
        let config = namespace.files.path().join("maintenance.toml");
        fs::write(&config, CONFIG)?;
        let controller = Launch::controller()?
            .kubeconfig(plane.kubeconfig())
            .quarantine()
            .arg("--drain")
            .option("--maintenance", &config)
            .arg("--grpc-insecure")
            .option("--grpc-listen", format!("127.0.0.1:{port}"))
            .start()
            .await?;
        let launch = Launch::agent()?
            .program(namespace.program()?)
            .node_name(&node)
            .option("--controller", format!("http://127.0.0.1:{port}"))
            .option("--metadata-service", "azure");
        Ok(Some(Self {
            azure,
            _service: service,
            controller,
            agent: launch.clone().spawn()?,
            launch,
            nodes: Api::all(client.clone()),
            pods: Api::default_namespaced(client),
            node,
            _namespace: namespace,
            _plane: plane,
        }))
    }

    /// Boots the machine.
    async fn boots(&self) -> anyhow::Result<()> {
        let boot = json!({"status": {"nodeInfo": {"bootID": unique("boot")}}});
        let (params, boot) = (PatchParams::default(), Patch::Strategic(boot));
        self.nodes.patch_status(&self.node, &params, &boot).await?;
        Ok(())
    }

    /// Waits until the last maintenance is in this state, and the node out of service or not.
    async fn until(&self, state: &str, is_out: bool) -> anyhow::Result<()> {
        let is = || async {
            let output = self
                .controller
                .client(["maintenance", "-o", "json"])
                .await?;
            let shown: Value = serde_json::from_str(&output.stdout)?;
            let records = shown["maintenances"].as_array();
            let last = records.and_then(|all| all.last()).cloned();
            let found = last.unwrap_or_default()["status"].clone();
            let node = self.nodes.get(&self.node).await?;
            let spec = node.spec.unwrap_or_default();
            let out = spec.unschedulable.unwrap_or(false);
            ensure!(found == state && out == is_out, "out: {out}, {shown}");
            Ok(())
        };
        let what = format!("{state}, out: {is_out}; the agent: {}", self.agent.stderr());
        self.controller.wait_for(&what, SOON, is).await
    }
}

#[tokio::test]
async fn azure_begins_once_the_node_is_drained_and_the_node_returns() -> anyhow::Result<()> {
    let Some(mut machine) = Machine::new().await? else {
        return Ok(());
    };
    let azure = machine.azure.clone();
    machine.boots().await?;
    // A job that has to end before the node is drained.
    let pod = testkit::pod("default", "job").on(&machine.node);
    pod.create(&machine.pods.clone().into_client()).await?;

    azure.announces("A", "Scheduled", SignedDuration::from_hours(2));
    machine.until("DETECTED", false).await?;
    azure.announces("A", "Scheduled", SignedDuration::from_mins(4));
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.controller.restart().await?;
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    assert_eq!(azure.begun(), [""; 0]);
    let now = DeleteParams::default().grace_period(0);
    machine.pods.delete("job", &now).await?;
    wait_for("the word to begin", SOON * 2, || async {
        match azure.begun().as_slice() {
            [one] if one == "A" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;

    azure.announces("A", "Started", SignedDuration::ZERO);
    machine.until("MAINTENANCE_ONGOING", true).await?;
    // The machine is redeployed, and its agent with it.
    machine.agent.kill9()?;
    machine.boots().await?;
    azure.ends();
    machine.until("MAINTENANCE_ONGOING", true).await?;
    machine.agent = machine.launch.clone().spawn()?;
    machine.until("HEALTHY_TRIGGERED", false).await?;

    // One that is called off.
    azure.announces("B", "Scheduled", SignedDuration::from_mins(4));
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    azure.ends();
    machine.until("CANCELLED", false).await?;
    assert_eq!(azure.begun()[0], "A");
    Ok(())
}
