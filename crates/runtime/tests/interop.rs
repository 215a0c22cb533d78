//! Interoperability tests: stock gRPC clients of three languages call a tonic server behind
//! `unix_grpc`.
//!
//! Python runs grpcio from a virtual environment that is created in the user's cache directory
//! on first use (needs python3 with venv and a package index). Go builds `interop/go`. If a
//! language is missing, its test is skipped, except on CI.

// Clippy does not recognise that the functions beside the tests are test code too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::proto::{BehaviourOverrides, Entity, HealthEvent, HealthEvents, ProcessingStrategy};
use gpuwarden_runtime::unix_grpc::{self, UnixPeer};
use prost::Message as _;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

/// Versions that the Python monitors of the contract's origin lock.
const GRPCIO: &str = "1.82.1";
const PROTOBUF: &str = "7.36.2";

const METHOD: &str = "/datamodels.PlatformConnector/HealthEventOccurredV1";

/// Calls on each connection: the later ones refer to fields of the first.
const CALLS: usize = 4;

/// Call as the server received it.
struct Received {
    events: HealthEvents,
    peer: Option<UnixPeer>,
    call: String,
}

struct Recorder(mpsc::Sender<Received>);

#[tonic::async_trait]
impl PlatformConnector for Recorder {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let call = request
            .metadata()
            .get("call")
            .map_or("", |value| value.to_str().unwrap());
        let received = Received {
            call: call.to_owned(),
            peer: request.extensions().get::<UnixPeer>().copied(),
            events: request.into_inner(),
        };
        self.0.send(received).await.unwrap();
        Ok(Response::new(()))
    }
}

/// Server on a socket of its own.
struct Fixture {
    directory: TempDir,
    received: mpsc::Receiver<Received>,
    server: JoinHandle<()>,
}

impl Fixture {
    fn start() -> Self {
        Self::start_with(|path, recorder| {
            let listener = unix_grpc::bind(path, 0o666).unwrap();
            let server = Server::builder().add_service(PlatformConnectorServer::new(recorder));
            tokio::spawn(async move {
                server
                    .serve_with_incoming(unix_grpc::incoming(listener))
                    .await
                    .unwrap();
            })
        })
    }

    /// Starts tonic alone, without the filter.
    fn start_stock() -> Self {
        Self::start_with(|path, recorder| {
            let listener = unix_grpc::bind(path, 0o666).unwrap();
            let server = Server::builder().add_service(PlatformConnectorServer::new(recorder));
            tokio::spawn(async move {
                server
                    .serve_with_incoming(UnixListenerStream::new(listener))
                    .await
                    .unwrap();
            })
        })
    }

    fn start_with(serve: impl FnOnce(&Path, Recorder) -> JoinHandle<()>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (sender, received) = mpsc::channel(16);
        let server = serve(&directory.path().join("connector.sock"), Recorder(sender));
        Self {
            directory,
            received,
            server,
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("connector.sock")
    }

    fn target(&self, scheme: &str) -> String {
        format!("{scheme}{}", self.socket().display())
    }

    /// Checks the events received from the `CALLS` calls of one client.
    fn expect_calls(&mut self, wanted: &HealthEvents) {
        for call in 0..CALLS {
            let received = self
                .received
                .try_recv()
                .expect("a call that was answered arrived");
            assert_eq!(received.call, call.to_string());
            assert_eq!(&received.events, wanted);
            let peer = received.peer.expect("peer credentials");
            assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
            assert_eq!(peer.gid, rustix::process::getegid().as_raw());
            assert!(peer.pid.is_some());
        }
        assert!(self.received.try_recv().is_err());
        assert!(!self.server.is_finished());
    }
}

/// Returns events with every field set; `full_events()` of client.py is the same.
fn full_events() -> HealthEvents {
    let entity = |kind: &str, value: &str| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    };
    let metadata = [("driver", "580.65.06"), ("", "empty key")];
    let event = HealthEvent {
        version: 1,
        agent: "interop".to_owned(),
        component_class: "GPU".to_owned(),
        check_name: "SysLogsXIDError".to_owned(),
        is_fatal: true,
        is_healthy: false,
        message: "Xid 79: GPU has fallen off the bus — μ".to_owned(),
        recommended_action: 77,
        error_code: vec!["79".to_owned(), "119".to_owned()],
        entities_impacted: vec![entity("PCI", "0000:b3:00"), entity("GPU_UUID", "GPU-1c9f")],
        metadata: metadata
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1_790_000_000,
            nanos: 123_456_789,
        }),
        node_name: "node-1".to_owned(),
        quarantine_overrides: Some(BehaviourOverrides {
            force: true,
            skip: false,
        }),
        drain_overrides: Some(BehaviourOverrides {
            force: false,
            skip: true,
        }),
        processing_strategy: ProcessingStrategy::StoreAndAnalyse.into(),
        id: "id-1".to_owned(),
        custom_recommended_action: "RESEAT_RISER".to_owned(),
    };
    let large = HealthEvent {
        message: "x".repeat(200_000),
        ..HealthEvent::default()
    };
    HealthEvents {
        version: 1,
        events: vec![event, large],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn python_grpcio() {
    let Some(python) = Python::prepare() else {
        return;
    };
    for scheme in ["unix://", "unix:"] {
        let mut fixture = Fixture::start();
        let output = python.call(fixture.target(scheme)).await;
        assert!(output.status.success(), "{scheme}: {}", text(&output));
        fixture.expect_calls(&full_events());
    }
}

/// Shows why the filter is needed. If this fails, `h2` accepts C core's authority: remove
/// `AuthorityStream` and everything it is built on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stock_tonic_still_refuses_c_core() {
    let Some(python) = Python::prepare() else {
        return;
    };
    let fixture = Fixture::start_stock();
    let output = python.call(fixture.target("unix://")).await;
    let text = text(&output);
    assert!(
        !output.status.success() && text.contains("INTERNAL"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_go() {
    let build = tempfile::tempdir().unwrap();
    let client = build.path().join("client");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/go");
    let mut go = Command::new("go");
    go.args(["build", "-o"])
        .arg(&client)
        .arg(".")
        .current_dir(source);
    match run(go).await {
        Ok(output) if output.status.success() => {}
        Ok(output) => return testkit::skip(format_args!("Go modules to build: {}", text(&output))),
        Err(err) => return testkit::skip(format_args!("go: {err}")),
    }
    let request = build.path().join("request.pb");
    fs::write(&request, full_events().encode_to_vec()).unwrap();
    for scheme in ["unix://", "unix:"] {
        let mut fixture = Fixture::start();
        let mut call = Command::new(&client);
        call.args([&fixture.target(scheme), METHOD])
            .arg(&request)
            .arg(CALLS.to_string());
        let output = run(call).await.unwrap();
        assert!(output.status.success(), "{scheme}: {}", text(&output));
        fixture.expect_calls(&full_events());
    }
}

#[tokio::test]
async fn tonic_client() {
    let mut fixture = Fixture::start();
    let endpoint = Endpoint::from_shared(fixture.target("unix://")).unwrap();
    let mut client = PlatformConnectorClient::new(endpoint.connect().await.unwrap());
    for call in 0..CALLS {
        let mut request = Request::new(full_events());
        request
            .metadata_mut()
            .insert("call", call.to_string().parse().unwrap());
        client.health_event_occurred_v1(request).await.unwrap();
    }
    fixture.expect_calls(&full_events());
}

/// Virtual environment with grpcio, and stubs of this contract.
struct Python {
    interpreter: PathBuf,
    stubs: TempDir,
}

impl Python {
    /// Returns `None`, and skips, if this machine cannot run Python.
    fn prepare() -> Option<Self> {
        match python_environment() {
            Ok(interpreter) => {
                let stubs = generate_stubs(&interpreter);
                Some(Self { interpreter, stubs })
            }
            Err(reason) => {
                testkit::skip(&reason);
                None
            }
        }
    }

    async fn call(&self, target: String) -> Output {
        let mut command = Command::new(&self.interpreter);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/client.py"));
        command
            .arg(self.stubs.path())
            .args([target, CALLS.to_string()]);
        run(command).await.unwrap()
    }
}

/// Returns the interpreter of the environment, which is created if missing. `cargo xtask setup`
/// creates the same one.
fn python_environment() -> Result<PathBuf, String> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .ok_or("HOME or XDG_CACHE_HOME for a Python environment")?
        .join("gpuwarden");
    let environment = cache.join(format!("python-grpcio-{GRPCIO}"));
    let interpreter = environment.join("bin/python");

    // Tests run in parallel: one creates the environment, the others wait.
    fs::create_dir_all(&cache).map_err(|err| format!("{}: {err}", cache.display()))?;
    let lock = fs::File::create(cache.join(format!("python-grpcio-{GRPCIO}.lock"))).unwrap();
    lock.lock().unwrap();

    let check = format!("import grpc, grpc_tools; assert grpc.__version__ == '{GRPCIO}'");
    let ready = Command::new(&interpreter).args(["-c", &check]).output();
    if ready.is_ok_and(|output| output.status.success()) {
        return Ok(interpreter);
    }
    let succeed = |command: &mut Command, need: &str| match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{need}: {}", text(&output))),
        Err(err) => Err(format!("{need}: {err}")),
    };
    succeed(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&environment),
        "python3 with venv",
    )?;
    succeed(
        Command::new(&interpreter)
            .args(["-m", "pip", "install", "--quiet"])
            .args([
                format!("grpcio=={GRPCIO}"),
                format!("grpcio-tools=={GRPCIO}"),
                format!("protobuf=={PROTOBUF}"),
            ]),
        "pip to install grpcio",
    )?;
    Ok(interpreter)
}

fn generate_stubs(interpreter: &Path) -> TempDir {
    let stubs = tempfile::tempdir().unwrap();
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    let output = Command::new(interpreter)
        .args(["-m", "grpc_tools.protoc", "--proto_path"])
        .arg(&protos)
        .arg("--python_out")
        .arg(stubs.path())
        .arg("--grpc_python_out")
        .arg(stubs.path())
        .arg(protos.join("health_event.proto"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    stubs
}

/// Runs a command without blocking the server's runtime.
async fn run(mut command: Command) -> std::io::Result<Output> {
    let finished = tokio::task::spawn_blocking(move || command.output());
    tokio::time::timeout(Duration::from_secs(300), finished)
        .await
        .expect("in time")
        .unwrap()
}

fn text(output: &Output) -> String {
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    lossy(&output.stdout) + &lossy(&output.stderr)
}
