//! The server over a real socket: consumers, providers, watchers, a restart.

// Clippy does not see that the functions beside the tests are tests too.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::time::Duration;

use contract::device::gpu_service_client::GpuServiceClient;
use contract::device::provider_service_client::ProviderServiceClient;
use contract::device::{
    Condition, ConditionStatus, GetGpuRequest, Gpu, GpuPhase, HeartbeatRequest, ListGpusRequest,
    ListGpusResponse, RegisterGpuRequest, UpdateGpuConditionRequest, WatchEventType,
    WatchGpusRequest, WatchGpusResponse,
};
use contract::nvhcd::HealthCheckRequest;
use contract::nvhcd::health_check_service_client::HealthCheckServiceClient;
use contract::nvsentinel_device;
use contract::nvsentinel_device::gpu_service_client::GpuServiceClient as ReferenceClient;
use diagnosis::gpu::Inventory;
use gpuwarden_devices::board::{Own, Said};
use gpuwarden_devices::{DeviceApi, Providers, gate, serve};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::unix_grpc;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

#[path = "devices/access.rs"]
mod access;

/// A server on a socket of its own.
struct Server {
    api: DeviceApi,
    metrics: Metrics,
    cancel: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    fn start(directory: &TempDir) -> Self {
        Self::open_to(directory, Providers::Operators, 0o600)
    }

    /// Starts a server that `providers` may write to, on a socket with these permissions.
    fn open_to(directory: &TempDir, providers: Providers, mode: u32) -> Self {
        let metrics = Metrics::default();
        let api = DeviceApi::new(&metrics, Timestamp::now);
        let cancel = CancellationToken::new();
        let listener = unix_grpc::bind(&directory.path().join("api.sock"), mode).unwrap();
        let served = serve(listener, api.clone(), providers, cancel.clone());
        let serving = tokio::spawn(async move { served.await.unwrap() });
        Self {
            api,
            metrics,
            cancel,
            serving,
        }
    }

    async fn stop(self) {
        self.cancel.cancel();
        self.serving.await.unwrap();
    }
}

fn inventory(count: u32) -> Inventory {
    Inventory {
        gpus: (0..count).map(found).collect(),
        ..Inventory::default()
    }
}

fn found(index: u32) -> diagnosis::gpu::Gpu {
    diagnosis::gpu::Gpu {
        index,
        uuid: format!("GPU-Aa{index:02}"),
        pci: format!("0000:{index:02x}:00.0"),
        product: "NVIDIA H100 80GB HBM3".to_owned(),
        architecture: Some("Hopper".to_owned()),
        memory_bytes: Some(85_520_809_984),
        ..diagnosis::gpu::Gpu::default()
    }
}

async fn channel(path: &Path) -> Channel {
    let target = format!("unix://{}", path.display());
    Endpoint::from_shared(target)
        .unwrap()
        .connect()
        .await
        .unwrap()
}

async fn consumer(directory: &TempDir) -> GpuServiceClient<Channel> {
    GpuServiceClient::new(channel(&directory.path().join("api.sock")).await)
}

async fn list(client: &mut GpuServiceClient<Channel>) -> ListGpusResponse {
    client
        .list_gpus(ListGpusRequest {})
        .await
        .unwrap()
        .into_inner()
}

async fn watch(
    client: &mut GpuServiceClient<Channel>,
    resource_version: &str,
) -> Streaming<WatchGpusResponse> {
    let resource_version = resource_version.to_owned();
    let request = WatchGpusRequest { resource_version };
    client.watch_gpus(request).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<WatchGpusResponse>) -> WatchGpusResponse {
    let next = tokio::time::timeout(Duration::from_secs(30), stream.message());
    next.await
        .expect("an event in time")
        .unwrap()
        .expect("an event")
}

fn condition<'a>(gpu: &'a Gpu, kind: &str) -> &'a Condition {
    let status = gpu.status.as_ref().unwrap();
    let found = status.conditions.iter().find(|one| one.r#type == kind);
    found.unwrap_or_else(|| panic!("{kind} of {gpu:?}"))
}

fn phase(gpu: &Gpu) -> GpuPhase {
    gpu.status.as_ref().unwrap().phase()
}

#[tokio::test]
async fn without_gpus_the_api_is_empty_and_with_them_it_has_what_the_driver_says() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    let mut client = consumer(&directory).await;
    assert_eq!(list(&mut client).await.gpus, []);

    server.api.set_inventory(&inventory(2));
    let gpus = list(&mut client).await.gpus;
    let names: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    assert_eq!(names, ["GPU-Aa00", "GPU-Aa01"]);
    let spec = gpus[1].spec.as_ref().unwrap();
    assert_eq!((spec.index, spec.memory_bytes), (1, 85_520_809_984));
    assert_eq!(spec.pci_bus_id, "0000:01:00.0");
    let nvml = condition(&gpus[1], "NVMLReady");
    assert_eq!(nvml.status(), ConditionStatus::True);
    assert_eq!(
        (nvml.reason.as_str(), nvml.source.as_str()),
        ("Initialized", "nvml-provider")
    );
    assert_eq!(phase(&gpus[1]), GpuPhase::Ready);

    // Names are not case-sensitive.
    let name = "gpu-aA01".to_owned();
    let got = client
        .get_gpu(GetGpuRequest { name })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(got.gpu.as_ref(), Some(&gpus[1]));
    let name = "GPU-9".to_owned();
    let refused = client.get_gpu(GetGpuRequest { name }).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("\"GPU-9\""), "{refused}");
    server.stop().await;
}

#[tokio::test]
async fn a_watch_begins_where_a_list_ended_and_tells_each_change() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(1));
    let mut client = consumer(&directory).await;
    let listed = list(&mut client).await;
    let mut from_list = watch(&mut client, &listed.resource_version).await;
    let mut from_nothing = watch(&mut client, "").await;

    let added = next(&mut from_nothing).await;
    assert_eq!(added.r#type(), WatchEventType::Added);
    assert_eq!(added.gpu.as_ref(), listed.gpus.first());
    let bookmark = next(&mut from_nothing).await;
    assert_eq!(bookmark.r#type(), WatchEventType::Bookmark);
    assert_eq!(bookmark.resource_version, listed.resource_version);

    let bad = Said::bad("XidError", "Critical XID error 79 detected");
    server
        .api
        .set_condition(Own::Nvml, "gpu-aa00", bad)
        .unwrap();
    for watch in [&mut from_list, &mut from_nothing] {
        let event = next(watch).await;
        assert_eq!(event.r#type(), WatchEventType::Modified);
        let gpu = event.gpu.unwrap();
        assert_eq!(gpu.resource_version, event.resource_version);
        assert_eq!(phase(&gpu), GpuPhase::NotReady);
        let ready = condition(&gpu, "Ready");
        assert_eq!(
            (ready.reason.as_str(), ready.message.as_str()),
            ("XidError", "false: NVMLReady")
        );
    }

    let resource_version = "seven".to_owned();
    let refused = client
        .watch_gpus(WatchGpusRequest { resource_version })
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    server.stop().await;
}

#[tokio::test]
async fn a_watcher_goes_on_over_a_restart_of_the_server_with_a_resync() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(2));
    let mut client = consumer(&directory).await;
    let version = list(&mut client).await.resource_version;
    let mut events = watch(&mut client, &version).await;
    server.stop().await;
    let ended = events.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable);

    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(1));
    let mut client = consumer(&directory).await;
    let mut events = watch(&mut client, &version).await;
    assert_eq!(next(&mut events).await.r#type(), WatchEventType::Resync);
    let added = next(&mut events).await;
    assert_eq!(added.r#type(), WatchEventType::Added);
    assert_eq!(added.gpu.unwrap().name, "GPU-Aa00");
    assert_eq!(next(&mut events).await.r#type(), WatchEventType::Bookmark);
    server.stop().await;
}

#[tokio::test]
async fn providers_write_what_is_theirs_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(1));
    let channel = channel(&directory.path().join("api.sock")).await;
    let mut provider = ProviderServiceClient::new(channel.clone());
    let mut client = GpuServiceClient::new(channel);
    let register = |name: &str, id: &str| RegisterGpuRequest {
        name: name.to_owned(),
        provider_id: id.to_owned(),
        ..RegisterGpuRequest::default()
    };
    let update = |kind: &str, id: &str| UpdateGpuConditionRequest {
        name: "GPU-Aa00".to_owned(),
        condition: Some(Condition {
            r#type: kind.to_owned(),
            status: ConditionStatus::False.into(),
            reason: "TooHot".to_owned(),
            ..Condition::default()
        }),
        provider_id: id.to_owned(),
    };

    let early = provider
        .update_gpu_condition(update("Hot", "a"))
        .await
        .unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition);
    let known = provider
        .register_gpu(register("GPU-Aa00", "a"))
        .await
        .unwrap()
        .into_inner();
    assert!(!known.created);
    let new = provider
        .register_gpu(register("GPU-Bb01", "a"))
        .await
        .unwrap()
        .into_inner();
    assert!(new.created);
    assert_eq!(phase(&new.gpu.unwrap()), GpuPhase::Pending);

    let hot = provider
        .update_gpu_condition(update("Hot", "a"))
        .await
        .unwrap()
        .into_inner();
    let hot = hot.gpu.unwrap();
    assert_eq!(condition(&hot, "Hot").source, "a");
    assert_eq!(condition(&hot, "NVMLReady").status(), ConditionStatus::True);
    assert_eq!(phase(&hot), GpuPhase::NotReady);

    provider
        .register_gpu(register("GPU-Aa00", "b"))
        .await
        .unwrap();
    for (kind, id) in [
        ("Hot", "b"),
        ("Ready", "b"),
        ("NVMLReady", "b"),
        ("NVSentinelHealth", "a"),
    ] {
        let refused = provider
            .update_gpu_condition(update(kind, id))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{kind}: {refused}");
        assert!(refused.message().contains(kind), "{refused}");
    }
    let heartbeat = HeartbeatRequest {
        provider_id: "a".to_owned(),
        gpu_names: vec!["GPU-Aa00".to_owned(), "GPU-Cc02".to_owned()],
    };
    let heard = provider.heartbeat(heartbeat).await.unwrap().into_inner();
    assert_eq!(heard.unknown_gpu_names, ["GPU-Cc02"]);
    assert_eq!(list(&mut client).await.gpus[0], hot);
    let text = server.metrics.encode();
    assert!(
        text.contains("gpuwarden_device_api_refused_writes_total 5\n"),
        "{text}"
    );
    assert!(
        text.contains("gpuwarden_device_api_gpus{phase=\"not_ready\"} 1\n"),
        "{text}"
    );
    server.stop().await;
}

#[tokio::test]
async fn nvsentinels_service_has_the_same_gpus() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(1));
    let channel = channel(&directory.path().join("api.sock")).await;
    let mut client = ReferenceClient::new(channel);
    let listed = client
        .list_gpus(nvsentinel_device::ListGpusRequest {})
        .await;
    let items = listed.unwrap().into_inner().gpu_list.unwrap().items;
    assert_eq!(items[0].name, "GPU-Aa00");
    let request = nvsentinel_device::WatchGpusRequest {};
    let mut events = client.watch_gpus(request).await.unwrap().into_inner();
    let added = events.message().await.unwrap().unwrap();
    assert_eq!(
        (added.r#type.as_str(), added.object.as_ref()),
        ("ADDED", items.first())
    );

    server
        .api
        .away(Own::Nvml, "DriverGone", "libnvidia-ml.so.1 is gone");
    let modified = events.message().await.unwrap().unwrap();
    assert_eq!(modified.r#type, "MODIFIED");
    let status = modified.object.unwrap().status.unwrap();
    let seen: Vec<(&str, &str, &str)> = (status.conditions.iter())
        .map(|one| {
            (
                one.r#type.as_str(),
                one.status.as_str(),
                one.reason.as_str(),
            )
        })
        .collect();
    let gone = |kind| (kind, "Unknown", "DriverGone");
    assert_eq!(seen, [gone("NVMLReady"), gone("Ready")]);
    server.stop().await;
}

#[tokio::test]
async fn health_and_reflection_are_served() {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    let channel = channel(&directory.path().join("api.sock")).await;
    for service in ["", "gpuwarden.device.v1alpha1.GpuService"] {
        let service = service.to_owned();
        let mut client = HealthClient::new(channel.clone());
        let health = client.check(HealthCheckRequest { service }).await.unwrap();
        assert_eq!(health.into_inner().status, 1);
    }
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(channel);
    let asked = client
        .server_reflection_info(futures::stream::iter([request]))
        .await
        .unwrap();
    let answer = asked.into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(services)) = answer.message_response else {
        panic!("{answer:?}");
    };
    let name = |service: ServiceResponse| service.name;
    let mut names: Vec<String> = services.service.into_iter().map(name).collect();
    names.sort();
    let ours = [
        "gpuwarden.device.v1alpha1.GpuService",
        "gpuwarden.device.v1alpha1.ProviderService",
        "nvidia.nvsentinel.v1alpha1.GpuService",
    ];
    for name in ours {
        assert!(names.iter().any(|one| one == name), "{name}: {names:?}");
    }
    assert!(
        !names.iter().any(|name| name.starts_with("nvhcd")),
        "{names:?}"
    );
    server.stop().await;
}

#[tokio::test]
async fn the_job_gate_counts_what_is_bad_and_only_that() {
    let directory = tempfile::tempdir().unwrap();
    let api = DeviceApi::new(&Metrics::default(), Timestamp::now);
    let path = directory.path().join("gate.sock");
    let (listener, cancel) = (
        unix_grpc::bind(&path, 0o666).unwrap(),
        CancellationToken::new(),
    );
    let serving = tokio::spawn(gate::serve(listener, api.clone(), cancel.clone()));
    let mut client = HealthCheckServiceClient::new(channel(&path).await);
    let mut ask = async || {
        let args = vec!["--ignored".to_owned()];
        let asked = client.run_health_check(HealthCheckRequest { args }).await;
        let answer = asked.unwrap().into_inner();
        (
            answer.success,
            answer.exit_code,
            answer.output,
            answer.error,
        )
    };
    let fit = (true, 0, "{\"fail_count\": 0}".to_owned(), String::new());
    assert_eq!(ask().await, fit);
    api.set_inventory(&inventory(2));
    assert_eq!(ask().await, fit);
    api.away(Own::Nvml, "DriverGone", "");
    assert_eq!(ask().await, fit);
    api.set_inventory(&inventory(2));
    api.set_condition(Own::Health, "GPU-Aa01", Said::bad("Xid79", ""))
        .unwrap();
    let (success, exit_code, output, error) = ask().await;
    assert_eq!(
        (success, exit_code, output.as_str()),
        (false, 1, "{\"fail_count\": 1}")
    );
    assert_eq!(error, "GPU-Aa01: false: NVSentinelHealth");
    cancel.cancel();
    serving.await.unwrap().unwrap();
}

/// A thousand watchers over eight connections, and one that reads nothing: all others receive
/// everything, and the slow one learns that it has missed changes, and then gets the state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_watcher_holds_up_nobody_and_is_told_what_it_missed() {
    const WATCHERS: usize = 1_000;
    const CHANGES: usize = 10;
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&directory);
    server.api.set_inventory(&inventory(8));
    let mut slow = watch(&mut consumer(&directory).await, "").await;

    let mut watching = Vec::new();
    for _ in 0..8 {
        let client = consumer(&directory).await;
        for _ in 0..WATCHERS / 8 {
            let mut client = client.clone();
            watching.push(watch(&mut client, "").await);
        }
    }
    for watch in &mut watching {
        while next(watch).await.r#type() != WatchEventType::Bookmark {}
    }
    let message = |change: usize| format!("{change} {}", "x".repeat(900));
    let say = |change: usize| {
        let said = Said::bad("XidError", message(change));
        server
            .api
            .set_condition(Own::Nvml, "GPU-Aa03", said)
            .unwrap();
    };
    // Watchers of one connection share its flow-control window, so they are read concurrently.
    for change in 0..CHANGES {
        say(change);
        for watch in &mut watching {
            // On a busy machine a bookmark may come before it.
            let told = loop {
                if let Some(gpu) = next(watch).await.gpu {
                    break gpu;
                }
            };
            assert_eq!(condition(&told, "NVMLReady").message, message(change));
        }
    }
    drop(watching);
    // More than the history keeps, together with the connection's buffers.
    (0..8_000).for_each(say);
    let mut resyncs = 0;
    loop {
        let told = next(&mut slow).await;
        resyncs += usize::from(told.r#type() == WatchEventType::Resync);
        let gpu = told.gpu.filter(|gpu| gpu.name == "GPU-Aa03");
        if gpu.is_some_and(|gpu| condition(&gpu, "NVMLReady").message == message(7_999)) {
            break;
        }
    }
    assert!(resyncs > 0);
    server.stop().await;
}
