//! Attacks on all ports but the monitors' socket, which `hostile.rs` covers: the Device API, the
//! webhook, the rendezvous, the janitor's custom resources and the provider of a janitor.
//! Legitimate requests are answered, memory stays bounded, and the attackers' requests have no
//! effect.
//!
//! BMCs, which respond to a janitor, are in `crates/janitor/tests/`. `GPUWARDEN_SOAK_SECONDS`
//! sets the duration of the attacks. Without it, each port is attacked once.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use ::janitor::client::Remote;
use ::janitor::{Provider, Signal};
use anyhow::{Context as _, ensure};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::core::DynamicObject;
use maintenance::janitor::{Action, ProviderPlace};
use runtime::tls::ClientTls;
use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Options, Version, unique};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::hostile::{MOST_MEMORY, memory, soak};
use crate::janitor::resources;
use crate::machines::{self, Played, boots};
use crate::support::{SOON, Scene, install_crds, own_port};
use crate::webhook::{DIAG, NAMESPACE, Webhook, create_with, names, opted_in, pod, registered};

/// Connections of one attacker, for each kind of garbage.
const EACH: usize = 10;
/// Requests of one attacker that are parsed and refused.
const REQUESTS: usize = 50;
/// Garbage for every port: no bytes, half a request, another protocol.
const RUBBISH: [&[u8]; 6] = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /mutate HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    &[0xff; 4096],
];

#[derive(Clone, Copy, Debug)]
enum Port {
    DeviceApi,
    Webhook,
    Rendezvous,
    Janitor,
    Provider,
}

const PORTS: [Port; 5] = [
    Port::DeviceApi,
    Port::Webhook,
    Port::Rendezvous,
    Port::Janitor,
    Port::Provider,
];

/// All processes with ports, and their cluster.
struct Ports {
    plane: testkit::Private,
    scene: Scene,
    /// Provider that the product's janitor calls.
    played: Arc<Played>,
    webhook: Webhook,
    rendezvous: SocketAddr,
    /// A namespace whose pods get checks.
    namespace: String,
    provider: tokio::process::Child,
    provider_address: SocketAddr,
    /// Reserve the ports of the rendezvous and of the provider.
    _places: [TcpSocket; 2],
    _balancer: Balancer,
    _directory: tempfile::TempDir,
    _guard: tokio_util::sync::DropGuard,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_port_answers_whatever_strangers_do() -> anyhow::Result<()> {
    let options = Options::default();
    let Some(plane) = ControlPlane::private(Version::LATEST, options).await? else {
        return Ok(());
    };
    let (duration, begin) = (soak()?, Instant::now());
    let ports = Ports::open(plane).await?;
    let mut turns = 0;
    loop {
        for port in PORTS {
            let turn = ports.withstand(port).await;
            turn.with_context(|| format!("{port:?}, turn {turns}"))?;
            turns += 1;
        }
        if begin.elapsed() >= duration {
            break;
        }
    }
    println!("{turns} turns of strangers at {} ports", PORTS.len());
    ports.webhook.end().await
}

impl Ports {
    async fn open(plane: testkit::Private) -> anyhow::Result<Self> {
        plane.namespace(NAMESPACE).await?;
        let client = plane.client().await?;
        install_crds(&client).await?;
        let directory = tempfile::tempdir()?;
        let config = directory.path().join("janitor.yaml");
        let played = Played::new();
        let guard = machines::serve(Arc::clone(&played) as Arc<dyn Provider>, &config).await?;
        let arrange = |launch: testkit::Launch| {
            let launch = launch.arg("--janitor").option("--fake-gpus", "2");
            launch.option("--janitor-config", config)
        };
        let scene = Scene::new(&plane, |node| node, arrange).await?;
        boots(&scene.nodes, &scene.node, "boot-1").await?;

        let balancer = Balancer::start().await?;
        let url = format!("https://{}", balancer.address());
        let place = own_port()?;
        let rendezvous = place.local_addr()?;
        let at = rendezvous.to_string();
        let webhook = Webhook::start(&plane, &url, &["--rendezvous-listen", &at]).await?;
        balancer.send_to(&[webhook.address]);
        registered(&plane).await?;
        let namespace = opted_in(&plane).await?;

        let port = own_port()?;
        let provider_address = port.local_addr()?;
        let provider = tokio::process::Command::new(testkit::binary()?)
            .args(["janitor-provider", "--anybody", "--namespace", &namespace])
            .args(["--listen", &provider_address.to_string()])
            .arg("--kubeconfig")
            .arg(plane.kubeconfig())
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self {
            plane,
            scene,
            played,
            webhook,
            rendezvous,
            namespace,
            provider,
            provider_address,
            _places: [place, port],
            _balancer: balancer,
            _directory: directory,
            _guard: guard,
        })
    }

    /// Attacks a port, and makes legitimate requests there.
    async fn withstand(&self, port: Port) -> anyhow::Result<()> {
        match port {
            Port::DeviceApi => self.device_api().await?,
            Port::Webhook => self.webhook().await?,
            Port::Rendezvous => self.rendezvous().await?,
            Port::Janitor => self.janitor().await?,
            Port::Provider => self.provider().await?,
        }
        let provider = self.provider.id().context("the provider has ended")?;
        for pid in [self.scene.product.pid(), self.webhook.pid(), provider] {
            let memory = memory(pid)?;
            ensure!(memory < MOST_MEMORY, "process {pid} takes {memory} MiB");
        }
        Ok(())
    }

    async fn device_api(&self) -> anyhow::Result<()> {
        let socket = self.scene.product.data_dir().join("device-api.sock");
        let mut held = Vec::new();
        for rubbish in RUBBISH {
            for _ in 0..EACH {
                let mut stream = UnixStream::connect(&socket)?;
                stream.set_nonblocking(true)?;
                // The server may close the connection at once.
                drop(stream.write(rubbish));
                held.push(stream);
            }
        }
        let data_dir = self.scene.product.data_dir().display().to_string();
        let answers = || async {
            let asked = ["check", "node", "--strict", "--data-dir", &data_dir];
            let output = self.scene.product.command(asked).await;
            let output = output.map_err(|error| error.to_string())?;
            let fit = output.stdout == "fit: 2 GPUs, 0 bad, 0 unknown\n";
            fit.then_some(()).ok_or(format!("{output:?}"))
        };
        let product = &self.scene.product;
        product.wait_for("the node's fitness", SOON, answers).await
    }

    async fn webhook(&self) -> anyhow::Result<()> {
        let address = self.webhook.address;
        let _held = rubbish_at(address).await?;
        let mut secured = Vec::new();
        for _ in 0..EACH {
            // The body is never sent.
            let slow = format!("{}Content-Length: 1000\r\n\r\n{{", head("/mutate", ""));
            secured.push(say(address, &slow).await?);
        }
        for number in 0..REQUESTS {
            let body = match number % 5 {
                0 => "null".to_owned(),
                1 => "[".repeat(100_000),
                2 => json!({"request": {"uid": "u", "object": {"spec": 7}}}).to_string(),
                3 => format!("{{\"request\":{:?}}}", "x".repeat(100_000)),
                _ => "\u{0}\u{7f}".to_owned(),
            };
            answered(&ask(address, "/mutate", "", &body).await?)?;
        }
        self.checks_are_injected().await
    }

    /// Checks that pods get their checks.
    async fn checks_are_injected(&self) -> anyhow::Result<()> {
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let pod = pod(&unique("own"), json!({"nvidia.com/gpu": "1"}));
        let client = self.plane.client().await?;
        let made = create_with(&params, &client, &self.namespace, &pod).await?;
        assert_eq!(names(&made, "initContainers"), [DIAG]);
        Ok(())
    }

    async fn rendezvous(&self) -> anyhow::Result<()> {
        let address = self.rendezvous;
        let _held = rubbish_at(address).await?;
        for number in 0..REQUESTS {
            let bearer = match number % 4 {
                0 => String::new(),
                1 => "Authorization: Bearer \r\n".to_owned(),
                2 => format!("Authorization: Bearer made-up-{}\r\n", unique("token")),
                _ => format!("Authorization: Bearer {}\r\n", "x".repeat(9_000)),
            };
            let path = match number % 3 {
                0 => format!("/gangs/{}/preflight-x", self.namespace),
                1 => "/gangs/kube-system/..%2f..%2fsecrets".to_owned(),
                _ => "/events".to_owned(),
            };
            let answer = ask(address, &path, &bearer, "{}").await?;
            let status = answered(&answer)?;
            ensure!((400..500).contains(&status), "{path}: {answer}");
        }
        self.checks_are_injected().await
    }

    /// Creates resources for foreign nodes, and resources that claim to be done or owned by
    /// another, and a legitimate one.
    async fn janitor(&self) -> anyhow::Result<()> {
        let client = self.plane.client().await?;
        let api = resources(&client, "RebootNode", "rebootnodes");
        let before = self.played.signals();
        let mut made = Vec::new();
        let make = async |name: String, metadata: Value, node: &str| {
            let mut object = json!({
                "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1", "kind": "RebootNode",
                "metadata": metadata, "spec": {"nodeName": node},
                // The API server drops the status of a new resource.
                "status": {"startTime": "2026-11-25T00:00:00Z", "conditions": [{
                    "type": "SignalSent", "status": "True", "reason": "Succeeded", "message": "x",
                    "lastTransitionTime": "2026-11-25T00:00:00Z"}]},
            });
            object["metadata"]["name"] = json!(name);
            let object: DynamicObject = serde_json::from_value(object)?;
            let made = api.create(&PostParams::default(), &object).await?;
            ensure!(made.data["status"].is_null(), "{:?}", made.data["status"]);
            Ok(made)
        };
        let attempt =
            json!({"annotations": {"gpuwarden.dev/attempt": "{\"session\":\"made-up\"}"}});
        for number in 0..REQUESTS {
            let name = unique("stranger");
            if number % 2 == 0 {
                // The product acts for its own node only.
                make(name, json!({}), &unique("nowhere")).await?;
            } else {
                make(name.clone(), attempt.clone(), &self.scene.node).await?;
                made.push(name);
            }
        }
        let own = unique("own");
        let meant = make(own.clone(), json!({}), &self.scene.node).await?;
        made.push(own.clone());
        let uid = meant.metadata.uid.context("no uid")?;
        let done = |name: String| {
            let api: Api<DynamicObject> = api.clone();
            async move {
                let object = api.get(&name).await.map_err(|error| error.to_string())?;
                let status = &object.data["status"];
                let ended = status["completionTime"].is_string();
                ended.then_some(()).ok_or(format!("{name}: {status}"))
            }
        };
        let product = &self.scene.product;
        let signalled = || async {
            let signals = self.played.signals();
            let sent = signals.contains(&uid);
            sent.then_some(()).ok_or(format!("{signals:?}"))
        };
        product.wait_for("the signal", 3 * SOON, signalled).await?;
        boots(&self.scene.nodes, &self.scene.node, &unique("boot")).await?;
        for name in &made {
            let ended = || done(name.clone());
            product.wait_for("the end", 3 * SOON, ended).await?;
        }
        let signals = self.played.signals();
        let new: Vec<_> = signals.iter().skip(before.len()).collect();
        ensure!(new == [&uid], "{new:?}, and not only {uid}");
        let all = ListParams::default();
        api.delete_collection(&DeleteParams::default(), &all)
            .await?;
        Ok(())
    }

    async fn provider(&self) -> anyhow::Result<()> {
        let host = self.provider_address.to_string();
        let remote = Remote::open(&ProviderPlace::Open { host })?;
        let ready = Signal::new(Action::Reboot, &self.scene.node, "none");
        let answers = || async {
            let answer = remote.is_ready(&ready, "another-boot").await;
            answer.map(drop).map_err(|failure| failure.text())
        };
        testkit::wait_for("the provider", SOON, answers).await?;
        let _held = rubbish_at(self.provider_address).await?;
        for node in [
            String::new(),
            "../namespaces/kube-system".to_owned(),
            format!("{}?x=", self.scene.node),
            format!("{}/status", self.scene.node),
            "n".repeat(10_000),
        ] {
            let sent = remote.send(&Signal::new(Action::Reboot, &node, "op")).await;
            ensure!(sent.is_err(), "{node}: {sent:?}");
        }
        testkit::wait_for("the provider", SOON, answers).await?;
        let jobs = ["-n", &self.namespace, "get", "jobs", "-o", "name"];
        let jobs = self.plane.kubectl(jobs).await?;
        ensure!(jobs.is_empty(), "{jobs}");
        Ok(())
    }
}

/// Opens connections with garbage, and returns them.
async fn rubbish_at(address: SocketAddr) -> anyhow::Result<Vec<TcpStream>> {
    let mut held = Vec::new();
    for rubbish in RUBBISH {
        for _ in 0..EACH {
            let mut stream = TcpStream::connect(address).await?;
            // The server may close the connection at once.
            drop(stream.write_all(rubbish).await);
            held.push(stream);
        }
    }
    Ok(held)
}

fn head(path: &str, more: &str) -> String {
    let method = if path.starts_with("/gangs") {
        "GET"
    } else {
        "POST"
    };
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}")
}

/// Sends text over a TLS connection.
async fn say(address: SocketAddr, text: &str) -> anyhow::Result<TlsStream<TcpStream>> {
    let mut tls = ClientTls::trusting_all()?.config().as_ref().clone();
    tls.alpn_protocols.clear();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost")?;
    let mut stream = TlsConnector::from(Arc::new(tls))
        .connect(name, stream)
        .await?;
    // The server may refuse the request before it is sent.
    drop(stream.write_all(text.as_bytes()).await);
    Ok(stream)
}

/// Returns the response to a request; empty if the connection was cut.
async fn ask(address: SocketAddr, path: &str, more: &str, body: &str) -> anyhow::Result<String> {
    let head = head(path, more);
    let length = body.len();
    let kind = "Content-Type: application/json";
    let request = format!("{head}{kind}\r\nContent-Length: {length}\r\n\r\n{body}");
    let mut stream = say(address, &request).await?;
    let mut answer = Vec::new();
    // A cut connection ends without TLS's closing message.
    drop(tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await?);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Returns the status of a response.
fn answered(answer: &str) -> anyhow::Result<u16> {
    let status = answer.split(' ').nth(1).context("no answer")?;
    Ok(status.parse()?)
}
