//! Client and server of the protocol, over machines in memory and a connection that can be cut.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use contract::janitor_provider as wire;
use contract::janitor_provider::csp_provider_service_client::CspProviderServiceClient;
use contract::janitor_provider::csp_provider_service_server::{
    CspProviderService, CspProviderServiceServer,
};
use gpuwarden_janitor::client::Remote;
use gpuwarden_janitor::conformance::{self, Weather, World};
use gpuwarden_janitor::server::{self, Callers};
use gpuwarden_janitor::{Provider, Signal};
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure, ProviderPlace};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

/// Machine of a [`Farm`].
#[derive(Default)]
struct Machine {
    boots: u32,
    failed: bool,
    /// Result of a reset of its GPUs, once it has ended.
    reset: Option<bool>,
    /// Received signals to reset GPUs.
    resets: Vec<Signal>,
    /// Request ids, by operation.
    signals: BTreeMap<String, String>,
}

/// Provider whose machines are in memory.
struct Farm {
    machines: Mutex<BTreeMap<String, Machine>>,
    weather: Mutex<Weather>,
    /// True while the connection to it is cut.
    cut: watch::Sender<bool>,
}

impl Farm {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            machines: Mutex::default(),
            weather: Mutex::new(Weather::Fine),
            cut: watch::Sender::new(false),
        })
    }
}

#[async_trait]
impl Provider for Farm {
    fn name(&self) -> &'static str {
        "farm"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let weather = *self.weather.lock().unwrap();
        match weather {
            Weather::Throttled(wait) => {
                let failure = ProviderFailure::new(Class::Transient, "RATE_LIMITED", "too many");
                return Err(wait.map_or(failure.clone(), |wait| failure.after(wait)));
            }
            Weather::Forbidden => {
                let why = "not for you";
                return Err(ProviderFailure::new(
                    Class::Permanent,
                    "PERMISSION_DENIED",
                    why,
                ));
            }
            Weather::Slow(time) => tokio::time::sleep(time).await,
            Weather::Fine | Weather::AnswerLost | Weather::Away => {}
        }
        let mut machines = self.machines.lock().unwrap();
        let machine = machines.get_mut(&signal.node);
        let machine = machine.ok_or_else(|| {
            ProviderFailure::new(Class::Permanent, "RESOURCE_NOT_FOUND", "no such")
        })?;
        let boots = machine.boots;
        if signal.action == Action::Reset && !machine.signals.contains_key(&signal.operation) {
            machine.resets.push(signal.clone());
        }
        let request = machine.signals.entry(signal.operation.clone());
        let request = request.or_insert_with(|| boots.to_string()).clone();
        if weather == Weather::AnswerLost {
            self.cut.send_replace(true);
        }
        Ok(request)
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let machines = self.machines.lock().unwrap();
        let machine = machines.get(&signal.node);
        let found = machine.and_then(|one| one.signals.get(&signal.operation));
        Ok(found.map_or(FoundOperation::NotSent, |request| {
            FoundOperation::Sent(request.clone())
        }))
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
        let machines = self.machines.lock().unwrap();
        let machine = machines.get(&signal.node).unwrap();
        if signal.action == Action::Reset {
            let failed =
                || ProviderFailure::new(Class::Permanent, "HELD", "it is held by x (pid 1)");
            return match machine.reset {
                Some(false) => Err(failed()),
                well => Ok(well.unwrap_or_default()),
            };
        }
        if machine.failed {
            return Err(ProviderFailure::new(
                Class::Permanent,
                "BROKEN",
                "it is broken",
            ));
        }
        Ok(machine.boots.to_string() != request_id)
    }
}

/// Starts a proxy to `to`. While the connection is cut, it closes connections and accepts none.
async fn line(to: SocketAddr, cut: watch::Receiver<bool>) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut cut = cut.clone();
            if *cut.borrow() {
                continue;
            }
            tokio::spawn(async move {
                let Ok(mut far) = TcpStream::connect(to).await else {
                    return;
                };
                tokio::select! {
                    _ = cut.wait_for(|cut| *cut) => {}
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                }
            });
        }
    });
    Ok(address)
}

/// Farm behind the protocol.
struct Behind {
    farm: Arc<Farm>,
    remote: Arc<Remote>,
    count: AtomicUsize,
    _end: tokio_util::sync::DropGuard,
}

impl Behind {
    async fn new() -> anyhow::Result<Self> {
        let farm = Farm::new();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = line(listener.local_addr()?, farm.cut.subscribe()).await?;
        let end = CancellationToken::new();
        let provider: Arc<dyn Provider> = Arc::clone(&farm) as Arc<dyn Provider>;
        let serving = server::serve(listener, None, provider, Callers::anybody(), end.clone());
        tokio::spawn(serving);
        let host = address.to_string();
        let remote = Arc::new(Remote::open(&ProviderPlace::Open { host })?);
        Ok(Self {
            farm,
            remote,
            count: AtomicUsize::new(0),
            _end: end.drop_guard(),
        })
    }
}

#[async_trait]
impl World for Behind {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.remote) as Arc<dyn Provider>
    }

    async fn machine(&self) -> String {
        let name = format!("machine-{}", self.count.fetch_add(1, Ordering::Relaxed));
        let mut machines = self.farm.machines.lock().unwrap();
        machines.insert(name.clone(), Machine::default());
        name
    }

    async fn set(&self, weather: Weather) -> bool {
        *self.farm.weather.lock().unwrap() = weather;
        self.farm.cut.send_replace(weather == Weather::Away);
        true
    }

    async fn boots(&self, machine: &str) {
        let mut machines = self.farm.machines.lock().unwrap();
        machines.get_mut(machine).unwrap().boots += 1;
    }

    async fn fails(&self, machine: &str) -> bool {
        let mut machines = self.farm.machines.lock().unwrap();
        machines.get_mut(machine).unwrap().failed = true;
        true
    }

    async fn resets(&self, machine: &str, well: bool) -> bool {
        let mut machines = self.farm.machines.lock().unwrap();
        machines.get_mut(machine).unwrap().reset = Some(well);
        true
    }

    async fn signals(&self, machine: &str) -> usize {
        self.farm.machines.lock().unwrap()[machine].signals.len()
    }
}

#[tokio::test]
async fn a_provider_behind_the_protocol_is_as_good_as_one_without() -> anyhow::Result<()> {
    let world = Behind::new().await?;
    conformance::all(&world).await;
    // All fields of a reset are transmitted.
    let machines = world.farm.machines.lock().unwrap();
    let mut resets = machines.values().flat_map(|one| &one.resets);
    let is_whole = |one: &Signal| one.gpus.uuids == ["GPU-1"] && one.resource == "first";
    assert!(resets.any(is_whole));
    Ok(())
}

/// Provider like NVSentinel's: it ignores operation ids, and returns the same code for all
/// errors.
struct Old {
    ready: Mutex<Result<bool, Code>>,
    sent: Mutex<Vec<wire::SendRebootSignalRequest>>,
}

#[tonic::async_trait]
impl CspProviderService for Old {
    async fn send_reboot_signal(
        &self,
        request: Request<wire::SendRebootSignalRequest>,
    ) -> Result<Response<wire::SendRebootSignalResponse>, Status> {
        let mut sent = self.sent.lock().unwrap();
        sent.push(request.into_inner());
        if sent.len() > 1 {
            return Err(Status::internal("the cloud says 429"));
        }
        let request_id = "i-1".to_owned();
        Ok(Response::new(wire::SendRebootSignalResponse { request_id }))
    }

    async fn is_node_ready(
        &self,
        _: Request<wire::IsNodeReadyRequest>,
    ) -> Result<Response<wire::IsNodeReadyResponse>, Status> {
        match *self.ready.lock().unwrap() {
            Ok(is_ready) => Ok(Response::new(wire::IsNodeReadyResponse {
                is_ready,
                request_id: String::new(),
            })),
            Err(code) => Err(Status::new(code, "what the cloud says")),
        }
    }

    async fn send_terminate_signal(
        &self,
        _: Request<wire::SendTerminateSignalRequest>,
    ) -> Result<Response<wire::SendTerminateSignalResponse>, Status> {
        Err(Status::unimplemented("no"))
    }

    async fn send_gpu_reset_signal(
        &self,
        _: Request<wire::SendGpuResetSignalRequest>,
    ) -> Result<Response<wire::SendGpuResetSignalResponse>, Status> {
        Err(Status::unimplemented("no"))
    }

    async fn is_gpu_reset_complete(
        &self,
        _: Request<wire::IsGpuResetCompleteRequest>,
    ) -> Result<Response<wire::IsGpuResetCompleteResponse>, Status> {
        Err(Status::unimplemented("no"))
    }
}

#[tokio::test]
async fn a_provider_that_knows_no_operations_is_not_believed_to() -> anyhow::Result<()> {
    let old = Arc::new(Old {
        ready: Mutex::new(Ok(true)),
        sent: Mutex::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let host = listener.local_addr()?.to_string();
    let service = CspProviderServiceServer::from_arc(Arc::clone(&old));
    let incoming = runtime::tcp_grpc::incoming(listener, None);
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    let remote = Remote::open(&ProviderPlace::Open { host })?;
    let signal = Signal::new(Action::Reboot, "n", "op");
    assert_eq!(remote.send(&signal).await.unwrap(), "i-1");
    // A provider that reports any node as ready says nothing about the operation.
    assert_eq!(
        remote.find(&signal).await.unwrap(),
        FoundOperation::CannotTell
    );
    // The meaning of the error is unknown, so the signal is not retried.
    let failure = remote.send(&signal).await.unwrap_err();
    assert_eq!(failure.class, Class::Ambiguous, "{failure:?}");
    for (code, found) in [
        (Code::Internal, Some(FoundOperation::CannotTell)),
        (Code::NotFound, Some(FoundOperation::CannotTell)),
        (Code::Unimplemented, Some(FoundOperation::CannotTell)),
        (Code::Unavailable, None),
        (Code::DeadlineExceeded, None),
    ] {
        *old.ready.lock().unwrap() = Err(code);
        assert_eq!(remote.find(&signal).await.ok(), found, "{code:?}");
        let failure = remote.is_ready(&signal, "i-1").await.unwrap_err();
        assert_eq!(failure.class, Class::Transient, "{code:?}: {failure:?}");
    }
    let terminate = Signal {
        action: Action::Terminate,
        ..signal
    };
    let failure = remote.send(&terminate).await.unwrap_err();
    assert_eq!(failure.class, Class::Permanent, "{failure:?}");
    let reset = Signal::new(Action::Reset, "n", "op");
    let failure = remote.send(&reset).await.unwrap_err();
    assert_eq!(failure.class, Class::Permanent, "{failure:?}");
    assert_eq!(
        remote.find(&reset).await.unwrap(),
        FoundOperation::CannotTell
    );
    Ok(())
}

#[tokio::test]
async fn nvsentinels_janitor_is_served_each_request_by_itself() -> anyhow::Result<()> {
    let farm = Farm::new();
    farm.machines
        .lock()
        .unwrap()
        .insert("n".to_owned(), Machine::default());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let end = CancellationToken::new();
    let _guard = end.clone().drop_guard();
    let provider: Arc<dyn Provider> = Arc::clone(&farm) as Arc<dyn Provider>;
    tokio::spawn(server::serve(
        listener,
        None,
        provider,
        Callers::anybody(),
        end,
    ));
    let endpoint = tonic::transport::Endpoint::try_from(format!("http://{address}"))?;
    let mut client = CspProviderServiceClient::new(endpoint.connect().await?);
    let reboot = |node: &str| wire::SendRebootSignalRequest {
        node_name: node.to_owned(),
        operation_id: String::new(),
    };
    for _ in 0..2 {
        client.send_reboot_signal(reboot("n")).await?;
    }
    assert_eq!(farm.machines.lock().unwrap()["n"].signals.len(), 2);
    let look = wire::IsNodeReadyRequest {
        node_name: "n".to_owned(),
        request_id: "0".to_owned(),
        operation_id: String::new(),
    };
    assert!(
        !client
            .is_node_ready(look.clone())
            .await?
            .into_inner()
            .is_ready
    );
    farm.machines.lock().unwrap().get_mut("n").unwrap().boots = 1;
    assert!(
        client
            .is_node_ready(look.clone())
            .await?
            .into_inner()
            .is_ready
    );
    // Each error has a specific code.
    let code = |status: Status| status.code();
    let unknown = client.send_reboot_signal(reboot("m")).await.map_err(code);
    assert_eq!(unknown.unwrap_err(), Code::NotFound);
    let empty = client.send_reboot_signal(reboot("")).await.map_err(code);
    assert_eq!(empty.unwrap_err(), Code::InvalidArgument);
    let long = client.send_reboot_signal(reboot(&"n".repeat(600))).await;
    assert_eq!(long.map_err(code).unwrap_err(), Code::InvalidArgument);
    *farm.weather.lock().unwrap() = Weather::Throttled(None);
    let throttled = client.send_reboot_signal(reboot("n")).await.map_err(code);
    assert_eq!(throttled.unwrap_err(), Code::ResourceExhausted);
    let nothing = wire::IsNodeReadyRequest {
        request_id: String::new(),
        ..look
    };
    let nothing = client.is_node_ready(nothing).await.map_err(code);
    assert_eq!(nothing.unwrap_err(), Code::InvalidArgument);
    let reset = wire::SendGpuResetSignalRequest::default();
    let reset = client.send_gpu_reset_signal(reset).await.map_err(code);
    assert_eq!(reset.unwrap_err(), Code::InvalidArgument);
    let many = wire::SendGpuResetSignalRequest {
        node_name: "n".to_owned(),
        gpu_uuids: vec!["GPU-1".to_owned(); 300],
        ..wire::SendGpuResetSignalRequest::default()
    };
    let many = client.send_gpu_reset_signal(many).await.map_err(code);
    assert_eq!(many.unwrap_err(), Code::InvalidArgument);
    Ok(())
}
