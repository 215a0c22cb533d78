//! Maintenance that the metadata service of a machine announces: the agent runs in a network namespace, where each
//! test plays the service of a cloud at its real address.

#[path = "metadata_service/aws.rs"]
mod aws;
#[path = "metadata_service/azure.rs"]
mod azure;
#[path = "metadata_service/gcp.rs"]
mod gcp;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context as _, ensure};
use clouds::loopback::{Asked, Reply, Server};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use tempfile::TempDir;
use testkit::{ControlPlane, Launch, Private, Product, Version, binary, skip, unique};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{SOON, own_port, reboot};

const SERVICE: &str = "169.254.169.254";

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

/// Metadata service of a cloud, with the maintenance that it announces.
trait Service: Send + 'static {
    /// Name of the cloud for the agent.
    const NAME: &'static str;

    /// Returns the answer to a request.
    fn answer(&mut self, asked: &Asked) -> Reply;
}

/// A node whose agent asks its metadata service.
struct Machine<S> {
    service: Arc<Mutex<S>>,
    _server: Server,
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

// === impl Machine ===

impl<S: Service> Machine<S> {
    async fn new(service: S) -> anyhow::Result<Option<Self>> {
        // One of its own: the controller is responsible for all nodes.
        let plane = ControlPlane::private(Version::V1_37, testkit::Options::default()).await?;
        let (Some(plane), Some(namespace)) = (plane, Namespace::new()?) else {
            return Ok(None);
        };
        let client = plane.client().await?;
        plane.namespace("gpuwarden").await?;
        let node = unique("e2e");
        testkit::node(&node).create(&client).await?;
        let nodes: Api<Node> = Api::all(client.clone());
        reboot(&nodes, &node).await?;
        let service = Arc::new(Mutex::new(service));
        let played = Arc::clone(&service);
        let server = Server::on(namespace.bind(format!("{SERVICE}:80"))?, move |asked| {
            played.lock().unwrap().answer(asked)
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
            .option("--metadata-service", S::NAME);
        Ok(Some(Self {
            service,
            _server: server,
            controller,
            agent: launch.clone().spawn()?,
            launch,
            nodes,
            pods: Api::default_namespaced(client),
            node,
            _namespace: namespace,
            _plane: plane,
        }))
    }

    /// Returns the service, to change what it announces.
    fn service(&self) -> MutexGuard<'_, S> {
        self.service.lock().unwrap()
    }

    /// Ends the machine with its agent. It has another boot id after that.
    async fn goes_down(&mut self) -> anyhow::Result<()> {
        self.agent.kill9()?;
        reboot(&self.nodes, &self.node).await
    }

    /// Starts the agent of the machine again.
    fn comes_up(&mut self) -> anyhow::Result<()> {
        self.agent = self.launch.clone().spawn()?;
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
