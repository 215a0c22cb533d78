//! `gpuwarden controller`: a cluster's side. It takes the events of agents and central
//! monitors, takes bad nodes out of service, gives them back, and shows all of it.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use cli::{ControllerSettings, IngestSettings, ModeSetting, Transport};
use cluster::Cluster;
use connector::AcceptNodes;
use controller::ingest::{self, Identify, Reviewer};
use controller::quarantine::Owns;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use runtime::tls::{ClientCertificates, ServerTls};
use store::EventStore;
use store::sqlite::SqliteStore;
use tokio::net::TcpListener;

use crate::act::Acting;
use crate::parts::{self, Front, Tasks};

/// The socket is for the operator's commands, and speaks for any node: nobody else's.
const OWN_UID: u32 = 0o600;
const SOCKET: &str = "gpuwarden.sock";

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(settings: ControllerSettings) -> anyhow::Result<ExitCode> {
    let ControllerSettings {
        ingest,
        process,
        act,
    } = &settings;
    parts::start_logging(process)?;
    let (metrics, sources) = (Metrics::default(), Sources::default());
    let cluster = parts::cluster(act).await?;
    let policy = parts::policy(act, cluster.clone(), &metrics)?;
    let (tls, identify) = transport(ingest, cluster.clone())?;
    let store: Arc<dyn EventStore> = Arc::new(SqliteStore::open(&process.data_dir)?);
    let grpc = TcpListener::bind(ingest.listen).await.with_context(|| {
        format!(
            "cannot listen on {}; --grpc-listen chooses another address",
            ingest.listen
        )
    })?;
    let address = grpc.local_addr()?;
    let front = Front::open(process, &process.data_dir.join(SOCKET), OWN_UID).await?;
    let endpoint = front.endpoint.clone();

    let nodes = AcceptNodes::Any;
    let (connector, limits) =
        parts::connector(act, &store, nodes, cluster.as_deref(), &metrics).await?;
    let mut tasks = Tasks::default();
    let no_more = tasks.no_more.clone();
    let serving = ingest::serve(grpc, tls, identify, connector.clone(), no_more);
    tasks.inputs.spawn(parts::said("the gRPC port", serving));
    let host = host::identity::host_name().unwrap_or_else(|| "controller".to_owned());
    let acting = Acting {
        settings: act,
        policy,
        cluster,
        owns: Owns::All,
        name: &host,
        store: Arc::clone(&store),
        metrics,
        sources,
        connector,
        limits,
    };
    acting.start(front, &mut tasks);
    greet(&settings, address, &endpoint.server);

    parts::until_told().await?;
    tasks.end(store.close(), &endpoint, process).await;
    Ok(ExitCode::SUCCESS)
}

/// How agents are listened to, and how they are told apart.
fn transport(
    settings: &IngestSettings,
    cluster: Option<Arc<Cluster>>,
) -> anyhow::Result<(Option<Arc<ServerTls>>, Identify)> {
    let Transport::Tls { own, clients } = settings.transport.clone() else {
        tracing::warn!(
            "events are taken without TLS, and from anybody on this machine, for any node"
        );
        return Ok((None, Identify::anybody()));
    };
    let clients = match (clients, &cluster) {
        (Some(authority), None) => ClientCertificates::Required(authority),
        (Some(authority), Some(_)) => ClientCertificates::Optional(authority),
        (None, _) => ClientCertificates::None,
    };
    let tls = ServerTls::load(own, clients)?;
    let tokens = cluster.map(|cluster| {
        let reviewer: Arc<dyn Reviewer> = cluster;
        (settings.tokens.clone(), reviewer)
    });
    Ok((Some(Arc::new(tls)), Identify::new(tokens)))
}

/// What a person sees first.
#[allow(clippy::print_stdout)]
fn greet(settings: &ControllerSettings, grpc: SocketAddr, server: &str) {
    let mode = match (&settings.act.cluster, settings.act.mode) {
        (None, _) => "recording only; --kubeconfig FILE gives it a cluster",
        (Some(_), ModeSetting::Observe) => "observing only; --quarantine acts",
        (Some(_), ModeSetting::DryRun) => "deciding, but writing nothing (dry run)",
        (Some(_), ModeSetting::Quarantine) => "quarantining nodes with faults",
    };
    println!("gpuwarden {} controller: {mode}", env!("CARGO_PKG_VERSION"));
    println!("agents       {grpc}");
    println!("status page  {server}/");
}
