//! Redfish provider with a real API server, against a fake BMC that follows the published
//! schema, and against the emulator of `sushy-tools`.

use std::collections::BTreeMap;
use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cluster::{Cluster, ConnectOptions, ObjectKind};
use gpuwarden_janitor::conformance::{self, Weather, World};
use gpuwarden_janitor::redfish::Redfish;
use gpuwarden_janitor::{Provider, Signal};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use maintenance::janitor::redfish::RedfishConfig;
use maintenance::janitor::{Action, Class, FoundOperation};
use runtime::tls::{CertificateFiles, ClientCertificates, ServerTls};
use serde_json::{Value, json};
use testkit::{Authority, Component, ControlPlane, Purpose, Version, unique};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;

/// Machines of a world; more than its tests use.
const MACHINES: usize = 12;
/// Value of `Authorization` for `root:calvin`.
const AUTHORIZATION: &str = "Basic cm9vdDpjYWx2aW4=";
const SOON: Duration = Duration::from_secs(30);

/// Turns a true response into a false one.
pub(crate) type Lie = Box<dyn FnMut(&Value) -> Vec<u8> + Send>;

/// Fake BMC for one world of machines.
pub(crate) struct Fake {
    weather: Arc<Mutex<Weather>>,
    pub(crate) resets: Mutex<Vec<String>>,
    /// Replaces the responses to GET requests, if set.
    pub(crate) lie: Mutex<Option<Lie>>,
}

impl Fake {
    pub(crate) fn new(weather: &Arc<Mutex<Weather>>) -> Arc<Self> {
        Arc::new(Self {
            weather: Arc::clone(weather),
            resets: Mutex::default(),
            lie: Mutex::default(),
        })
    }

    /// Answers a request. An error breaks the connection.
    async fn answer(&self, request: Request<Incoming>) -> io::Result<Response<Full<Bytes>>> {
        let said = request.headers().get("authorization");
        if said.is_none_or(|said| said != AUTHORIZATION) {
            return Ok(answer(StatusCode::UNAUTHORIZED, &json!({})));
        }
        let path = request.uri().path().to_owned();
        if request.method() == "GET" {
            return Ok(match self.resource(&path) {
                Some(resource) => match &mut *self.lie.lock().unwrap() {
                    Some(lie) => Response::new(Full::new(lie(&resource).into())),
                    None => answer(StatusCode::OK, &resource),
                },
                None => answer(StatusCode::NOT_FOUND, &json!({})),
            });
        }
        let weather = *self.weather.lock().unwrap();
        match weather {
            Weather::Throttled(wait) => {
                let mut busy = answer(StatusCode::SERVICE_UNAVAILABLE, &json!({}));
                if let Some(wait) = wait {
                    let seconds = wait.as_secs().to_string().parse().unwrap();
                    busy.headers_mut().insert("retry-after", seconds);
                }
                return Ok(busy);
            }
            Weather::Forbidden => {
                let why = json!({"error": {"@Message.ExtendedInfo": [
                    {"Message": "There are insufficient privileges for the account."}]}});
                return Ok(answer(StatusCode::FORBIDDEN, &why));
            }
            Weather::Slow(time) => tokio::time::sleep(time).await,
            Weather::Fine | Weather::AnswerLost | Weather::Away => {}
        }
        assert_eq!(path, "/redfish/v1/Systems/1/Actions/ComputerSystem.Reset");
        let body = http_body_util::BodyExt::collect(request.into_body()).await;
        let body: Value = serde_json::from_slice(&body.unwrap().to_bytes()).unwrap();
        let reset = body["ResetType"].as_str().unwrap().to_owned();
        self.resets.lock().unwrap().push(reset);
        if weather == Weather::AnswerLost {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(answer(StatusCode::ACCEPTED, &json!({})))
    }

    fn resource(&self, path: &str) -> Option<Value> {
        const LOGS: &str = "/redfish/v1/Systems/1/LogServices";
        let resets = self.resets.lock().unwrap().len();
        Some(match path.strip_prefix("/redfish/v1/Systems")? {
            "" => json!({"Members": [{"@odata.id": "/redfish/v1/Systems/1"}]}),
            "/1" => json!({
                "PowerState": "On",
                "LastResetTime": format!("2026-11-25T10:{resets:02}:00Z"),
                "LogServices": {"@odata.id": LOGS},
                "Actions": {"#ComputerSystem.Reset": {
                    "target": "/redfish/v1/Systems/1/Actions/ComputerSystem.Reset",
                    "@Redfish.ActionInfo": "/redfish/v1/Systems/1/ResetActionInfo",
                }},
            }),
            "/1/ResetActionInfo" => json!({"Parameters": [
                {"Name": "ResetType", "AllowableValues": ["On", "ForceRestart", "PowerCycle"]}]}),
            "/1/LogServices" => json!({"Members": [{"@odata.id": format!("{LOGS}/SEL")}]}),
            "/1/LogServices/SEL" => {
                json!({"Entries": {"@odata.id": format!("{LOGS}/SEL/Entries")}})
            }
            "/1/LogServices/SEL/Entries" => json!({"Members": []}),
            _ => return None,
        })
    }

    async fn serve<T: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self: Arc<Self>, stream: T) {
        let service = service_fn(move |request| {
            let fake = Arc::clone(&self);
            async move { fake.answer(request).await }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service);
        // Errors of the connection are intended by the test.
        drop(connection.await);
    }

    /// Serves requests; no connections are accepted while it is away.
    pub(crate) async fn listen(self: Arc<Self>) -> anyhow::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if *self.weather.lock().unwrap() != Weather::Away {
                    tokio::spawn(Arc::clone(&self).serve(stream));
                }
            }
        });
        Ok(address)
    }
}

fn answer(status: StatusCode, body: &Value) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.to_string().into()));
    *answer.status_mut() = status;
    answer
}

/// Cluster whose nodes have boot ids set by the test.
pub(crate) struct Nodes {
    plane: ControlPlane,
    pub(crate) cluster: Arc<Cluster>,
}

impl Nodes {
    async fn new() -> anyhow::Result<Option<Self>> {
        let plane = ControlPlane::shared(Version::V1_37).await?;
        match plane {
            Some(plane) => Self::of(plane).await.map(Some),
            None => Ok(None),
        }
    }

    pub(crate) async fn of(plane: ControlPlane) -> anyhow::Result<Self> {
        let options = ConnectOptions {
            kubeconfig: Some(plane.kubeconfig().to_owned()),
            ..ConnectOptions::default()
        };
        let cluster = Arc::new(Cluster::connect(options).await?);
        Ok(Self { plane, cluster })
    }

    pub(crate) async fn make(&self, name: &str) {
        let client = self.plane.client().await.unwrap();
        let node = testkit::node(name).without_kubelet();
        node.create(&client).await.unwrap();
        super::generic::set_boot(&self.cluster, name, "boot-1").await;
    }

    pub(crate) async fn node(&self, name: &str) -> Value {
        let nodes = ObjectKind::new("", "v1", "nodes");
        let node = self.cluster.object(&nodes, None, name).await.unwrap();
        node.unwrap()
    }
}

struct Bmcs {
    nodes: Nodes,
    provider: Arc<Redfish>,
    weather: Arc<Mutex<Weather>>,
    machines: BTreeMap<String, Arc<Fake>>,
    unused: Mutex<Vec<String>>,
    _secrets: tempfile::TempDir,
}

impl Bmcs {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(nodes) = Nodes::new().await? else {
            return Ok(None);
        };
        let weather = Arc::new(Mutex::new(Weather::Fine));
        let (secrets, mut config) = credentials()?;
        let mut machines = BTreeMap::new();
        for _ in 0..MACHINES {
            let (name, fake) = (unique("bmc"), Fake::new(&weather));
            let address = Arc::clone(&fake).listen().await?;
            config.addresses.insert(name.clone(), address);
            machines.insert(name, fake);
        }
        let unused = Mutex::new(machines.keys().cloned().collect());
        let provider = Arc::new(Redfish::open(Arc::clone(&nodes.cluster), config)?);
        Ok(Some(Self {
            nodes,
            provider,
            weather,
            machines,
            unused,
            _secrets: secrets,
        }))
    }
}

pub(crate) fn credentials() -> anyhow::Result<(tempfile::TempDir, RedfishConfig)> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text)?;
        anyhow::Ok(path.display().to_string())
    };
    let config = RedfishConfig {
        username_path: file("username", "root\n")?,
        password_path: file("password", "calvin\n")?,
        ..RedfishConfig::default()
    };
    Ok((directory, config))
}

#[async_trait]
impl World for Bmcs {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.provider) as Arc<dyn Provider>
    }

    async fn machine(&self) -> String {
        let name = self.unused.lock().unwrap().pop().unwrap();
        self.nodes.make(&name).await;
        name
    }

    async fn set(&self, weather: Weather) -> bool {
        *self.weather.lock().unwrap() = weather;
        true
    }

    async fn boots(&self, machine: &str) {
        super::generic::set_boot(&self.nodes.cluster, machine, "boot-2").await;
    }

    async fn fails(&self, _machine: &str) -> bool {
        // A machine that hangs cannot be told from a slow one.
        false
    }

    async fn signals(&self, machine: &str) -> usize {
        self.machines[machine].resets.lock().unwrap().len()
    }
}

pub(crate) fn reboot(node: &str, operation: &str) -> Signal {
    Signal::new(Action::Reboot, node, operation)
}

#[tokio::test]
async fn the_redfish_provider_passes_what_every_provider_has_to() -> anyhow::Result<()> {
    let Some(world) = Bmcs::new().await? else {
        return Ok(());
    };
    conformance::all(&world).await;
    Ok(())
}

#[tokio::test]
async fn a_signal_is_noted_at_the_node_and_says_what_it_lacks() -> anyhow::Result<()> {
    let Some(world) = Bmcs::new().await? else {
        return Ok(());
    };
    let machine = world.machine().await;
    let provider = world.provider();
    provider.send(&reboot(&machine, "op-1")).await.unwrap();
    let resets = world.machines[&machine].resets.lock().unwrap().clone();
    assert_eq!(resets, ["PowerCycle"]);
    let node = world.nodes.node(&machine).await;
    let note = &node["metadata"]["annotations"][contract::keys::POWER_CYCLE];
    let note: Value = serde_json::from_str(note.as_str().unwrap())?;
    assert_eq!(note["operation"], "op-1");
    assert_eq!(note["bootId"], "boot-1");
    assert_eq!(note["lastReset"], "2026-11-25T10:00:00Z");
    // A refusal removes the record, and the failure quotes the BMC.
    let machine = world.machine().await;
    world.set(Weather::Forbidden).await;
    let refused = provider.send(&reboot(&machine, "op-2")).await.unwrap_err();
    assert!(
        refused.message.contains("insufficient privileges"),
        "{refused:?}"
    );
    let node = world.nodes.node(&machine).await;
    assert!(
        node["metadata"]["annotations"]
            .get(contract::keys::POWER_CYCLE)
            .is_none()
    );
    // A machine without a configured BMC.
    let unnamed = unique("unnamed");
    world.nodes.make(&unnamed).await;
    let failure = provider.send(&reboot(&unnamed, "op-3")).await.unwrap_err();
    assert_eq!(failure.class, Class::Permanent);
    assert!(
        failure.message.contains("no address of the BMC"),
        "{failure:?}"
    );
    Ok(())
}

#[tokio::test]
async fn certificates_are_checked_unless_they_are_not_to_be() -> anyhow::Result<()> {
    let Some(nodes) = Nodes::new().await? else {
        return Ok(());
    };
    let (directory, config) = credentials()?;
    let authority = Authority::new("bmcs")?;
    let pair = authority.sign(Purpose::Server, "localhost", &["localhost"])?;
    pair.write(directory.path(), "tls")?;
    let files = CertificateFiles {
        certificate: directory.path().join("tls.crt"),
        key: directory.path().join("tls.key"),
    };
    let tls = ServerTls::load(files, ClientCertificates::None)?;
    let acceptor = tokio_rustls::TlsAcceptor::from(tls.config());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("https://localhost:{}", listener.local_addr()?.port());
    let fake = Fake::new(&Arc::new(Mutex::new(Weather::Fine)));
    let served = Arc::clone(&fake);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(stream) = acceptor.accept(stream).await {
                tokio::spawn(Arc::clone(&served).serve(stream));
            }
        }
    });
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text)?;
        anyhow::Ok(path.display().to_string())
    };
    let ours = file("ca.crt", authority.pem())?;
    let others = file("other.crt", Authority::new("others")?.pem())?;
    for (authority, insecure_skip_verify, taken) in [
        (others.clone(), false, false),
        (ours, false, true),
        (others, true, true),
    ] {
        let node = unique("tls");
        nodes.make(&node).await;
        let config = RedfishConfig {
            addresses: BTreeMap::from([(node.clone(), address.clone())]),
            authority,
            insecure_skip_verify,
            ..config.clone()
        };
        let provider = Redfish::open(Arc::clone(&nodes.cluster), config)?;
        let sent = provider
            .send(&reboot(&node, &format!("op-of-{node}")))
            .await;
        match sent {
            Ok(_) => assert!(taken),
            Err(failure) => {
                assert!(!taken, "{failure:?}");
                assert_eq!(failure.class, Class::Transient, "{failure:?}");
                assert!(failure.message.contains("certificate"), "{failure:?}");
            }
        }
    }
    assert_eq!(fake.resets.lock().unwrap().len(), 2);
    Ok(())
}

/// Emulator process; it is killed with the test.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The emulator's machine is off for some seconds after a reset. It provides neither the time
/// of the last reset nor a log, and rejects `PowerCycle`.
#[tokio::test]
async fn a_machine_of_sushy_tools_is_restarted() -> anyhow::Result<()> {
    let Some(python) = testkit::require(Component::PythonGrpc) else {
        return Ok(());
    };
    let Some(nodes) = Nodes::new().await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let settings = directory.path().join("sushy.conf");
    let system = "7f3c9e1e-2b1f-4a53-9a46-0a6d2b1f4a53";
    std::fs::write(
        &settings,
        format!(
            "SUSHY_EMULATOR_STATE_DIR = {:?}\nSUSHY_EMULATOR_FAKE_SYSTEMS = [{{'uuid': '{system}', 'name': \
             'gpu', 'power_state': 'On', 'external_notifier': False, 'nics': []}}]\n",
            directory.path()
        ),
    )?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let emulator = Command::new(python)
        .args([
            "-m",
            "sushy_tools.emulator.main",
            "--fake",
            "--interface",
            "127.0.0.1",
        ])
        .args(["--port", &port.to_string(), "--config"])
        .arg(&settings)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let _emulator = Emulator(emulator);
    let up = || async {
        let connected = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
        connected.map(drop).map_err(|error| error.to_string())
    };
    testkit::wait_for("the emulator", SOON, up).await?;

    let node = unique("sushy");
    nodes.make(&node).await;
    let config = RedfishConfig {
        addresses: BTreeMap::from([(node.clone(), format!("http://127.0.0.1:{port}"))]),
        ..RedfishConfig::default()
    };
    let provider = Redfish::open(Arc::clone(&nodes.cluster), config)?;
    let signal = reboot(&node, "op-1");
    assert_eq!(provider.send(&signal).await.unwrap(), "boot-1");
    let power = async || {
        let text = get(port, &format!("/redfish/v1/Systems/{system}")).await?;
        let system: Value = serde_json::from_str(&text)?;
        anyhow::Ok(system["PowerState"].clone())
    };
    assert_eq!(power().await?, "Off");
    // There is no evidence of a reset, so it is not repeated.
    let again = provider.send(&signal).await.unwrap_err();
    assert_eq!(again.class, Class::Transient, "{again:?}");
    let on = || async {
        match power().await {
            Ok(state) if state == "On" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    testkit::wait_for("the machine to start", SOON, on).await?;
    assert!(!provider.is_ready(&signal, "boot-1").await.unwrap());
    super::generic::set_boot(&nodes.cluster, &node, "boot-2").await;
    assert!(provider.is_ready(&signal, "boot-1").await.unwrap());
    assert_eq!(
        provider.find(&signal).await.unwrap(),
        FoundOperation::Sent("boot-1".to_owned())
    );
    Ok(())
}

async fn get(port: u16, path: &str) -> anyhow::Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    Ok(body.to_owned())
}
