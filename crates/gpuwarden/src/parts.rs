//! Parts that the roles are assembled from. Each is built from its settings and its
//! dependencies.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent::kernel_log::{JobSources, KernelLogConfig, KernelLogMonitor};
use agent::maintenance::MaintenanceReporter;
use agent::pods::{PodGpuReporter, Tell};
use agent::providers::ProviderMonitor;
use anyhow::Context as _;
use cli::{
    ActSettings, AuditSettings, DeliverySettings, DeviceNetwork, DeviceSettings, Endpoint, Mode,
    NodeSettings, ProcessSettings,
};
use clouds::metadata::{self, MetadataService};
use cluster::{Audit, Cluster, ConnectOptions};
use connector::{AcceptNodes, Connector, Forwarding, NodeLookup, Pipeline};
use console::api::{PolicyView, ProcessView, Role};
use controller::policy::{CurrentPolicy, PolicyFollower};
use devices::DeviceApi;
use host::boot::Boot;
use jiff::Timestamp;
use model::condition::MessageLimits;
use monitor::{Frame, WINDOW};
use runtime::audit::RotatedFile;
use runtime::logging::LogFormat;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use runtime::tls::{self, ClientCertificates, ClientTls, ServerTls};
use runtime::{build, descriptors, logging, tcp_grpc};
use store::EventStore;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpus::{self, GpuChannels};
use crate::places::{ProcessPaths, Socket};
use crate::tasks::{Tasks, log_failure};

/// Clock of the product.
pub(crate) const CLOCK: fn() -> Timestamp = Timestamp::now;

/// Endpoints of the process: its page and its socket, and the endpoint file in the data
/// directory that names both.
pub(crate) struct Front {
    pub(crate) listener: TcpListener,
    pub(crate) socket: Socket,
    pub(crate) places: ProcessPaths,
    pub(crate) endpoint: Endpoint,
}

/// Receiving side for events.
pub(crate) struct Intake {
    pub(crate) connector: Connector,
    /// Length limits of condition messages.
    pub(crate) limits: MessageLimits,
    /// Delivery to another service, if configured.
    pub(crate) forwarding: Option<Forwarding>,
}

/// Returns a channel to the controller. It connects on first use.
pub(crate) fn controller_channel(
    settings: &DeliverySettings,
) -> anyhow::Result<tonic::transport::Channel> {
    let tls = match settings.authority.clone() {
        Some(authority) => Some(Arc::new(ClientTls::load(
            authority,
            settings.certificate.clone(),
        )?)),
        None => None,
    };
    tcp_grpc::channel(&settings.controller, tls).context("--controller")
}

/// Starts logging and raises the limit of file descriptors to the hard limit. Returns the
/// metrics registry.
pub(crate) fn start_process(
    role: &'static str,
    settings: &ProcessSettings,
    sources: &Sources,
) -> anyhow::Result<Metrics> {
    let metrics = start_logging(role, &settings.log, settings.log_format)?;
    sources.register(&metrics);
    Ok(metrics)
}

/// Does the work of [`start_process`] for a process without a data directory.
pub(crate) fn start_logging(
    role: &'static str,
    filter: &str,
    format: LogFormat,
) -> anyhow::Result<Metrics> {
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    logging::start(filter, format, colour)?;
    let metrics = Metrics::default();
    logging::register(&metrics);
    tls::register(&metrics);
    let version = env!("CARGO_PKG_VERSION");
    build::register(&metrics, version, role);
    tracing::info!(version, "starting");
    if let Err(error) = descriptors::raise() {
        tracing::warn!(err = %error, "the limit of file descriptors cannot be raised");
    }
    Ok(metrics)
}

/// The current policy, for decisions and for the page.
pub(crate) struct Policy {
    pub(crate) current: CurrentPolicy,
    pub(crate) view: watch::Receiver<Arc<PolicyView>>,
}

/// Loads the policy, and starts a task that reloads it on changes.
pub(crate) fn policy(
    settings: &ActSettings,
    cluster: Option<Arc<Cluster>>,
    metrics: &Metrics,
    tasks: &mut Tasks,
) -> anyhow::Result<Policy> {
    let follower = PolicyFollower::load(settings.policy.clone(), cluster, CLOCK, metrics)?;
    let policy = Policy {
        current: follower.policy(),
        view: follower.view(),
    };
    tasks.worker("the policy", follower.run(tasks.done()));
    Ok(policy)
}

/// Connects to the cluster, if one is configured.
pub(crate) async fn cluster(
    settings: &ActSettings,
    audit: Option<&AuditSettings>,
    command: &'static str,
    metrics: &Metrics,
) -> anyhow::Result<Option<Arc<Cluster>>> {
    let Some(options) = settings.cluster.clone() else {
        return Ok(None);
    };
    connect(options, audit, command, metrics).await.map(Some)
}

/// Connects to a cluster, with an audit log of the writes of `command` if one is configured.
pub(crate) async fn connect(
    options: ConnectOptions,
    audit: Option<&AuditSettings>,
    command: &'static str,
    metrics: &Metrics,
) -> anyhow::Result<Arc<Cluster>> {
    let audit = match audit {
        Some(settings) => Some(start_audit(settings, command, metrics)?),
        None => None,
    };
    let cluster = Cluster::connect_audited(options, audit).await?;
    Ok(Arc::new(cluster))
}

/// Starts the audit log of this process.
fn start_audit(
    settings: &AuditSettings,
    command: &'static str,
    metrics: &Metrics,
) -> anyhow::Result<Audit> {
    let pod = std::env::var("POD_NAME")
        .ok()
        .filter(|name| !name.is_empty());
    let name = pod.as_deref().unwrap_or(command);
    let path = settings.directory.join(format!("{name}-audit.log"));
    let file = RotatedFile {
        path: path.clone(),
        max_bytes: settings.max_bytes,
        backups: settings.backups,
    };
    runtime::audit::start(file, metrics).with_context(|| {
        let path = path.display();
        format!("cannot write the audit log {path}; --audit-log-base-path names another directory")
    })?;
    Ok(Audit {
        component: command,
        instance: pod.or_else(host::identity::host_name).unwrap_or_default(),
        with_bodies: settings.with_bodies,
        sink: Arc::new(runtime::audit::write),
    })
}

/// Creates the connector in front of a store, with its transformers and forwarding if
/// configured.
pub(crate) async fn connector(
    settings: &ActSettings,
    process: &ProcessSettings,
    store: &Arc<dyn EventStore>,
    nodes: AcceptNodes,
    cluster: Option<&Cluster>,
    metrics: &Metrics,
    tasks: &mut Tasks,
) -> anyhow::Result<Intake> {
    let mut intake = Intake {
        connector: Connector::new(Arc::clone(store), nodes, metrics, CLOCK),
        limits: MessageLimits::default(),
        forwarding: None,
    };
    let Some(path) = &settings.connector_config else {
        return Ok(intake);
    };
    let config = connector::ConnectorConfig::read(path)?;
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    intake.limits = config.limits;
    if let Some(target) = &config.forward {
        let (forwarding, delivery) = Forwarding::open(target, &process.data_dir, metrics)?;
        let done = tasks.done();
        // Shutdown does not wait for the target: undelivered events stay on disk.
        tasks.worker("the delivery to the gRPC sink", async move {
            let delivering = delivery.run(CancellationToken::new());
            done.run_until_cancelled_owned(delivering).await;
        });
        intake.connector = intake.connector.with_forwarding(forwarding.clone());
        intake.forwarding = Some(forwarding);
    }
    // Events are enriched from the quarantine's watch of nodes. Without a cluster there is
    // nothing to add.
    let known = cluster.map(Cluster::known_nodes);
    let nodes: Arc<dyn NodeLookup> = Arc::new(move |name: &str| known.as_ref()?.get(name));
    let pipeline = Pipeline::new(config.transformers, &nodes, metrics);
    if let Err(error) = pipeline.recall(store.as_ref(), CLOCK()).await {
        tracing::warn!(err = %error, "stored events cannot be read: repeats of them will not be recognised");
    }
    intake.connector = intake.connector.with_pipeline(pipeline);
    Ok(intake)
}

/// Closes the files of the store and of the forwarding.
pub(crate) async fn close(store: Arc<dyn EventStore>, forwarding: Option<Forwarding>) {
    if let Some(forwarding) = forwarding {
        forwarding.close().await;
    }
    store.close().await;
}

/// Creates the Device API of a node, and registers its socket and the job gate's.
pub(crate) async fn device_api(
    settings: &DeviceSettings,
    socket_mode: u32,
    metrics: &Metrics,
    places: &mut ProcessPaths,
    tasks: &mut Tasks,
) -> anyhow::Result<DeviceApi> {
    let api = DeviceApi::new(metrics, CLOCK);
    let socket = Socket::bind(&settings.socket, socket_mode)?;
    let (served, providers) = (api.clone(), settings.providers);
    places.add("the Device API", socket, move |listener, until| {
        devices::serve(listener, served.clone(), providers, until)
    });
    if let Some(path) = &settings.job_gate {
        let (socket, served) = (Socket::bind(path, socket_mode)?, api.clone());
        places.add("the job gate", socket, move |listener, until| {
            devices::gate::serve(listener, served.clone(), until)
        });
    }
    if let Some(network) = &settings.network {
        let (listener, tls) = open_network(network).await?;
        let name = "the Device API on TCP";
        let serving = devices::serve_tcp(listener, tls, api.clone(), tasks.no_more());
        tasks.input(name, log_failure(name, serving));
    }
    Ok(api)
}

/// Binds the TCP address of the Device API, and reads its certificates.
async fn open_network(
    network: &DeviceNetwork,
) -> anyhow::Result<(TcpListener, Option<Arc<ServerTls>>)> {
    let tls = match network.tls.clone() {
        None => None,
        Some((own, clients)) => {
            let clients = ClientCertificates::Required(clients);
            let tls = ServerTls::load(own, clients).context("--device-api-listen")?;
            Some(Arc::new(tls))
        }
    };
    let listener = TcpListener::bind(network.listen).await.with_context(|| {
        format!(
            "cannot listen on {}; --device-api-listen chooses another address",
            network.listen
        )
    })?;
    tracing::info!(
        address = %listener.local_addr()?,
        tls = tls.is_some(),
        "the Device API listens on TCP"
    );
    Ok((listener, tls))
}

/// Returns the frame of a monitor that runs once for many nodes. `name` is the host or the node.
pub(crate) fn central_frame(
    name: &str,
    process: &ProcessSettings,
    connector: Connector,
    sources: &Sources,
    metrics: &Metrics,
) -> Frame {
    Frame {
        node_name: name.to_owned(),
        state_dir: Some(process.data_dir.clone()),
        boot: None,
        window: WINDOW,
        connector,
        sources: sources.clone(),
        metrics: metrics.clone(),
        clock: CLOCK,
    }
}

/// Creates and starts the monitors of a node, which report to `connector`. One of them watches
/// the reports of providers to the Device API.
pub(crate) fn monitors(
    node: &NodeSettings,
    process: &ProcessSettings,
    connector: Connector,
    devices: DeviceApi,
    sources: &Sources,
    metrics: &Metrics,
    tasks: &mut Tasks,
) -> anyhow::Result<GpuChannels> {
    let frame = Frame {
        boot: Boot::current().ok(),
        ..central_frame(&node.node_name, process, connector, sources, metrics)
    };
    let catalog = Arc::new(cli::load_catalog(&node.catalog)?);
    let (driver, machine) = watch::channel(None);
    let api = devices.clone();
    let gpus = gpus::start(node, process, &frame, &catalog, driver, api, tasks)?;
    let kernel_log = KernelLogConfig {
        spec: node.kernel_log.clone(),
        history: node.history,
        refuse_user_space: node.refuse_user_space,
        gpu_metadata: node.gpu_metadata.clone(),
        machine,
        sysfs: host::nics::SYSFS.into(),
        catalog,
        jobs: JobSources {
            proc: host::job::PROC.into(),
            pod_logs: host::job::POD_LOGS.into(),
            kubelet: node.pod_resources.clone(),
            inventory: gpus.inventory.clone(),
        },
    };
    let monitor = KernelLogMonitor::new(kernel_log, &frame);
    tasks.monitor("the kernel-log monitor", |end| monitor.run(end));
    let monitor = ProviderMonitor::new(devices, &frame);
    tasks.monitor("the monitor of providers", |end| monitor.run(end));
    Ok(gpus)
}

/// Starts the task that shows the open faults of a node as conditions of its GPUs.
pub(crate) fn follow_faults(api: DeviceApi, tasks: &mut Tasks) {
    let following = devices::faults::follow(api, tasks.done());
    tasks.worker("the faults of GPUs", following);
}

/// Starts the kubelet client that lists the devices of pods, if its results are used: `tell`
/// receives the pods with GPUs, and the GPU monitor, with DCGM, whether pods rely on IMEX.
pub(crate) fn pod_gpus(
    node: &NodeSettings,
    gpus: GpuChannels,
    tell: Option<Tell>,
    tasks: &mut Tasks,
) {
    if tell.is_none() && node.gpu.dcgm.is_none() {
        return;
    }
    let reporter = PodGpuReporter {
        node_name: node.node_name.clone(),
        socket: node.pod_resources.clone(),
        inventory: gpus.inventory,
        imex: gpus.imex,
        tell,
    };
    tasks.worker("the GPUs of pods", reporter.run(tasks.done()));
}

/// Starts the client of the machine's metadata service, if the settings name a cloud. `tell` brings
/// the announced maintenance to the controller.
pub(crate) fn announced_maintenance(
    node: &NodeSettings,
    tell: agent::maintenance::Tell,
    sources: &Sources,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Some(provider) = node.metadata_service else {
        return Ok(());
    };
    let service = MetadataService::new(provider, metadata::ADDRESS)?;
    let reporter = MaintenanceReporter {
        node_name: node.node_name.clone(),
        source: sources.add_optional("metadata-service", &service.to_string(), CLOCK()),
        service,
        tell,
        clock: CLOCK,
    };
    tasks.worker("announced maintenance", reporter.run(tasks.done()));
    Ok(())
}

/// Returns the description of this process for the page. `node_name` is the node it runs on, or
/// its host.
pub(crate) fn process_view(
    node_name: &str,
    role: Role,
    mode: Mode,
    process: &ProcessSettings,
    socket: &Path,
) -> ProcessView {
    ProcessView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node_name: node_name.to_owned(),
        role,
        mode,
        started_at: CLOCK(),
        data_dir: absolute(&process.data_dir).display().to_string(),
        data_dir_is_default: process.data_dir_is_default,
        socket: absolute(socket).display().to_string(),
    }
}

/// Binds the address of the page, the API and the metrics.
pub(crate) async fn listen(settings: &ProcessSettings) -> anyhow::Result<TcpListener> {
    TcpListener::bind(settings.listen).await.with_context(|| {
        format!(
            "cannot listen on {}; --listen chooses another address, 127.0.0.1:0 any free port",
            settings.listen
        )
    })
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Waits for SIGTERM or SIGINT.
pub(crate) async fn until_signal() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("ending");
    Ok(())
}

// === impl Front ===

impl Front {
    /// Returns the listener of the page, and a future that serves `connector` and all other
    /// sockets until `cancel`.
    pub(crate) fn serve(
        mut self,
        connector: Connector,
        cancel: CancellationToken,
    ) -> (TcpListener, impl Future<Output = ()>) {
        let serve = move |listener, until| connector::serve(listener, connector.clone(), until);
        self.places.add("the connector", self.socket, serve);
        (self.listener, self.places.serve(cancel))
    }

    /// Binds the page and the socket, and writes the endpoint file. The caller holds the lock of
    /// the data directory.
    pub(crate) async fn open(
        settings: &ProcessSettings,
        socket: &Path,
        socket_mode: u32,
        device_api: &Path,
    ) -> anyhow::Result<Self> {
        let listener = listen(settings).await?;
        Self::open_on(listener, settings, socket, socket_mode, Some(device_api))
    }

    /// Does the work of [`open`](Self::open) with a listener that is already bound.
    pub(crate) fn open_on(
        listener: TcpListener,
        settings: &ProcessSettings,
        socket: &Path,
        socket_mode: u32,
        device_api: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let places = ProcessPaths::open(&settings.data_dir)?;
        let bound = Socket::bind(socket, socket_mode)?;
        let endpoint = Endpoint {
            server: format!("http://{}", listener.local_addr()?),
            socket: absolute(socket),
            device_api: device_api.map(absolute),
            pid: std::process::id(),
        };
        endpoint.write(&settings.data_dir).with_context(|| {
            format!(
                "cannot write to the data directory {}",
                settings.data_dir.display()
            )
        })?;
        Ok(Self {
            listener,
            socket: bound,
            places,
            endpoint,
        })
    }
}
