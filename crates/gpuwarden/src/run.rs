//! `gpuwarden run`: all roles in one process, over the embedded store.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use agent::kernel_log::{Config as KernelLogConfig, KernelLogMonitor, WINDOW};
use anyhow::Context as _;
use cli::{Endpoint, ModeSetting, PolicySetting, RunSettings};
use cluster::Cluster;
use connector::{Connector, NodeLookup, Pipeline};
use console::{Console, Info, api};
use controller::policy::{PolicyFollower, PolicySource};
use controller::quarantine::{Config as QuarantineConfig, Mode, Owns, Quarantine};
use controller::retention::Retention;
use host::boot::Boot;
use host::kernel_log::Spec;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use runtime::{logging, unix_grpc};
use store::EventStore;
use store::sqlite::SqliteStore;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Any uid may report: preflight checks run as the user's.
const SOCKET_MODE: u32 = 0o666;
/// What is still under way this long after SIGTERM is left behind.
const GRACE: Duration = Duration::from_millis(800);

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(settings: RunSettings) -> anyhow::Result<ExitCode> {
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    logging::start(&settings.log, settings.log_format, colour)?;
    let catalog = Arc::new(cli::load_catalog(&settings.catalog)?);
    let transformers = match &settings.connector_config {
        Some(path) => connector::Config::read(path)?,
        None => connector::Config::default(),
    };
    for note in &transformers.notes {
        tracing::warn!("{note}");
    }
    let cluster = match &settings.cluster {
        Some(cluster) => Some(Arc::new(Cluster::connect(cluster.connect_options()).await?)),
        None => None,
    };
    let (metrics, sources) = (Metrics::default(), Sources::default());
    let clock: fn() -> Timestamp = Timestamp::now;
    let source = policy_source(settings.policy.clone());
    let policy = PolicyFollower::load(source, cluster.clone(), clock, &metrics)?;

    let store = Arc::new(SqliteStore::open(&settings.data_dir)?);
    let socket = unix_grpc::bind(&settings.socket, SOCKET_MODE)?;
    let listener = TcpListener::bind(settings.listen).await.with_context(|| {
        format!(
            "cannot listen on {}; --listen chooses another address, 127.0.0.1:0 any free port",
            settings.listen
        )
    })?;
    let server = format!("http://{}", listener.local_addr()?);
    let endpoint = Endpoint {
        server: server.clone(),
        socket: absolute(settings.socket.clone()),
        pid: std::process::id(),
    };
    endpoint.write(&settings.data_dir).with_context(|| {
        format!(
            "cannot write to the data directory {}",
            settings.data_dir.display()
        )
    })?;

    let cancel = CancellationToken::new();
    let events: Arc<dyn EventStore> = Arc::clone(&store) as Arc<dyn EventStore>;
    let mut connector = Connector::new(
        Arc::clone(&events),
        settings.accept_nodes.clone(),
        &metrics,
        clock,
    );
    if settings.connector_config.is_some() {
        let nodes = known_nodes(cluster.as_deref());
        let pipeline = Pipeline::new(transformers.transformers, &nodes, &metrics);
        if let Err(error) = pipeline.recall(events.as_ref(), clock()).await {
            tracing::warn!(err = %error, "repeats of what was stored before are not known");
        }
        connector = connector.with_pipeline(pipeline);
    }
    let monitor = KernelLogMonitor::new(
        KernelLogConfig {
            spec: settings.kernel_log.clone(),
            node_name: settings.node_name.clone(),
            history: settings.history,
            state_dir: (settings.kernel_log != Spec::Stdin).then(|| settings.data_dir.clone()),
            boot: Boot::current().ok(),
            window: WINDOW,
            refuse_user_space: settings.refuse_user_space,
            gpu_metadata: settings.gpu_metadata.clone(),
            catalog,
        },
        connector.clone(),
        &sources,
        &metrics,
        clock,
    );
    let (mode, shown_mode) = match settings.mode {
        ModeSetting::Observe => (Mode::Observe, api::Mode::Observe),
        ModeSetting::DryRun => (Mode::DryRun, api::Mode::DryRun),
        ModeSetting::Quarantine => (Mode::Act, api::Mode::Quarantine),
    };
    let (quarantine, handles) = Quarantine::new(
        QuarantineConfig {
            store: Arc::clone(&events),
            cluster,
            policy: policy.policy(),
            mode,
            owns: Owns::Node(settings.node_name.clone()),
            brake: settings.circuit_breaker,
            gpu_label: settings.gpu_node_label.clone(),
            namespace: settings.namespace.clone(),
            clock,
        },
        &metrics,
    );
    let retention = Retention {
        store: Arc::clone(&events),
        fleet: handles.view.clone(),
        age: settings.retention,
        max_bytes: settings.store_size,
        clock,
    };
    let retention_metrics = metrics.clone();
    let console = Console {
        info: Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node_name: settings.node_name.clone(),
            mode: shown_mode,
            started_at: clock(),
            data_dir: settings.data_dir.display().to_string(),
            socket: endpoint.socket.display().to_string(),
        },
        fleet: handles.view,
        policy: policy.view(),
        why_not: {
            let questions = handles.questions;
            Arc::new(move |node| {
                let questions = questions.clone();
                Box::pin(async move { questions.why_not(node).await })
            })
        },
        sources,
        store: Arc::clone(&events),
        metrics,
        clock,
    };

    // Order of the end: first nothing more comes in, then what came in is worked off.
    let mut inputs = JoinSet::new();
    let mut workers = JoinSet::new();
    inputs.spawn(monitor.run(cancel.clone()));
    let serving = connector::serve(socket, connector, cancel.clone());
    inputs.spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(err = %error, "the connector's socket has failed");
        }
    });
    workers.spawn(console::serve(listener, console, cancel.clone()));
    workers.spawn(quarantine.run(cancel.clone()));
    workers.spawn(policy.run(cancel.clone()));
    workers.spawn(handles.journal.run());
    let until = cancel.clone();
    workers.spawn(async move { retention.run(&retention_metrics, until).await });
    greet(&settings, &server);

    wait_for_signal().await?;
    tracing::info!("ending");
    cancel.cancel();
    let orderly = tokio::time::timeout(GRACE, async {
        while inputs.join_next().await.is_some() {}
        while workers.join_next().await.is_some() {}
        store.close().await;
    })
    .await
    .is_ok();
    if !orderly {
        tracing::warn!("some work was still under way; nothing that was acknowledged is lost");
    }
    Endpoint::remove(&settings.data_dir);
    // The socket's file: a connection to it would only be refused.
    drop(std::fs::remove_file(&settings.socket));
    Ok(ExitCode::SUCCESS)
}

fn policy_source(setting: Option<PolicySetting>) -> PolicySource {
    match setting {
        None => PolicySource::BuiltIn,
        Some(PolicySetting::File(path)) => PolicySource::File(path),
        Some(PolicySetting::Preset(preset)) => PolicySource::Preset(preset),
        Some(PolicySetting::ConfigMap {
            namespace,
            name,
            key,
        }) => PolicySource::ConfigMap {
            namespace,
            name,
            key,
        },
    }
}

/// Where events learn of their nodes: what the quarantine's watch has seen last. Without a
/// cluster nothing is known of any.
fn known_nodes(cluster: Option<&Cluster>) -> Arc<dyn NodeLookup> {
    let nodes = cluster.map(Cluster::known_nodes);
    Arc::new(move |name: &str| nodes.as_ref()?.get(name))
}

/// What a person sees first.
#[allow(clippy::print_stdout)]
fn greet(settings: &RunSettings, server: &str) {
    let mode = match (&settings.cluster, settings.mode) {
        (None, _) => "watching this machine; --kubeconfig FILE gives it a cluster",
        (Some(_), ModeSetting::Observe) => "observing only; --quarantine acts",
        (Some(_), ModeSetting::DryRun) => "deciding, but writing nothing (dry run)",
        (Some(_), ModeSetting::Quarantine) => "quarantining nodes with faults",
    };
    let place = if settings.data_dir_is_default {
        String::new()
    } else {
        format!(" --data-dir {}", settings.data_dir.display())
    };
    println!(
        "gpuwarden {} on node {}: {mode}",
        env!("CARGO_PKG_VERSION"),
        settings.node_name
    );
    println!("status page  {server}/");
    println!("try it       gpuwarden inject xid 79{place} && gpuwarden explain{place}");
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

async fn wait_for_signal() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
