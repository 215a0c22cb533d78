//! `gpuwarden controller`: the role of a cluster. It receives the events of agents and central
//! monitors, quarantines faulty nodes, returns them to service, and serves the page.

use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use certificates::{CertificateKeeper, CertificatePlan};
use cli::{
    ControllerSettings, IngestSettings, Mode, ProcessSettings, ServerCertificate, Transport,
};
use cluster::{Cluster, Reason};
use connector::{AcceptNodes, Forwarding};
use console::LeadershipSource;
use console::api::Role;
use contract::keys::LEASE;
use controller::agents::Agents;
use controller::certificate::{self, CaConfigMap};
use controller::ingest::{self, Identify, Reviewer};
use controller::labeler::{Labeler, LabelerConfig};
use controller::leadership;
use controller::maintenance::MachineNotices;
use controller::objects::{Objects, ObjectsConfig, ObjectsFollower, ObjectsSource};
use controller::pods::PodDevices;
use controller::quarantine::Owns;
use monitor::Frame;
use runtime::logging;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use runtime::tls::{ClientCertificates, ServerTls};
use store::{EventStore, Identity, StoreUrl};
use tokio::net::TcpListener;

use crate::act::Acting;
use crate::lead::{Standby, Term};
use crate::parts::{self, CLOCK, Front, Policy};
use crate::tasks::{Tasks, log_failure};

/// Mode of the socket: the operator's commands can report events for any node there, so no other
/// user gets access.
const OWN_UID: u32 = 0o600;
const SOCKET: &str = "gpuwarden.sock";

/// Runs until SIGTERM or SIGINT, until the lead is lost, or until a task fails.
pub(crate) async fn run(settings: ControllerSettings) -> anyhow::Result<ExitCode> {
    let ControllerSettings {
        process,
        act,
        audit,
        ..
    } = &settings;
    let sources = Sources::default();
    let metrics = parts::start_process("controller", process, &sources)?;
    let mut shutdown = pin!(parts::until_signal());
    let cluster = parts::cluster(act, audit.as_ref(), "controller", &metrics).await?;
    let mut tasks = Tasks::default();
    // Invalid settings are an error now, not only once this process is elected.
    let policy = parts::policy(act, cluster.clone(), &metrics, &mut tasks)?;
    let identify = identify(&settings.ingest, cluster.clone());
    let protection = Protection::new(&settings)?;
    let listener = parts::listen(process).await?;
    let host = host::identity::host_name().unwrap_or_else(|| "controller".to_owned());
    let mut start = Start {
        settings: &settings,
        metrics,
        sources,
        policy,
        identify,
        protection,
        host: &host,
        cluster,
        leadership: None,
        listener,
        tasks,
    };
    let Some(cluster) = start.cluster.clone().filter(|_| settings.leader_elect) else {
        leadership::register_sole(LEASE, &start.metrics);
        let mut acting = start.act(None).await?;
        let ends = acting.tasks.until_shutdown_or_failure(shutdown).await;
        acting.end().await;
        return ends.map(|()| ExitCode::SUCCESS);
    };

    let mode = act.mode;
    let socket = process.data_dir.join(SOCKET);
    let standby = Standby {
        cluster,
        namespace: &act.namespace,
        settings: process,
        process: parts::process_view(&host, Role::Controller, mode, process, &socket),
        metrics: start.metrics.clone(),
        listener: start.listener,
    };
    stands_by(&standby)?;
    let Some(leading) = standby.until_elected(&mut shutdown).await? else {
        return Ok(ExitCode::SUCCESS);
    };
    start.cluster = Some(leading.cluster);
    start.leadership = Some(leading.shown);
    start.listener = leading.listener;
    let term = leading.term;
    let mut written = true;
    let acted = match start.act(Some(&term)).await {
        Ok(mut acting) => {
            let ends = tokio::select! {
                ends = acting.tasks.until_shutdown_or_failure(shutdown) => ends,
                () = term.lost() => Ok(()),
            };
            written = acting.end().await;
            ends
        }
        Err(error) => Err(error),
    };
    // The lead is released after a failed start as well, so that another candidate can take
    // over.
    let lost = term.end(written).await;
    acted?;
    if let Some(why) = lost {
        tracing::error!("{why}: this process stops acting and ends; restarted, it stands by");
        return Ok(ExitCode::from(cli::EXIT_DEPOSED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Everything a controller needs to begin acting.
struct Start<'a> {
    settings: &'a ControllerSettings,
    metrics: Metrics,
    sources: Sources,
    policy: Policy,
    identify: Identify,
    protection: Protection,
    host: &'a str,
    cluster: Option<Arc<Cluster>>,
    leadership: Option<LeadershipSource>,
    listener: TcpListener,
    tasks: Tasks,
}

/// Protection of the port for agents.
enum Protection {
    /// Without TLS.
    Open,
    /// Certificate from files.
    Files(Arc<ServerTls>),
    /// Certificate of the controller's own, in a namespace.
    Own(CertificatePlan, ClientCertificates),
}

/// A controller that acts.
struct Running<'a> {
    process: &'a ProcessSettings,
    store: Arc<dyn EventStore>,
    forwarding: Option<Forwarding>,
    tasks: Tasks,
}

// === impl Start ===

impl<'a> Start<'a> {
    /// Opens the store and the port for agents, and starts acting; with an election, for `term`.
    async fn act(self, term: Option<&Term>) -> anyhow::Result<Running<'a>> {
        let Self {
            settings,
            metrics,
            cluster,
            mut tasks,
            ..
        } = self;
        let ControllerSettings {
            ingest,
            process,
            act,
            ..
        } = settings;
        let store = StoreUrl::in_data_dir(&process.data_dir).open().await?;
        if let Some(term) = term {
            term.act_on(store.as_ref()).await?;
        }
        let grpc = TcpListener::bind(ingest.listen).await.with_context(|| {
            format!(
                "cannot listen on {}; --grpc-listen chooses another address",
                ingest.listen
            )
        })?;
        let address = grpc.local_addr()?;
        let socket = process.data_dir.join(SOCKET);
        let front = Front::open_on(self.listener, process, &socket, OWN_UID, None)?;
        let server = front.endpoint.server.clone();

        let nodes = AcceptNodes::Any;
        let in_cluster = cluster.as_deref();
        let intake = parts::connector(
            act, process, &store, nodes, in_cluster, &metrics, &mut tasks,
        );
        let intake = intake.await?;
        let forwarding = intake.forwarding.clone();
        let connector = intake.connector.clone();
        let namespace = &act.namespace;
        let opening = self
            .protection
            .open(cluster.as_ref(), namespace, &mut tasks);
        let tls = opening.await?;
        // Modes other than `act` write nothing about faults to the cluster.
        let writes = act.mode.writes();
        if let (Some(source), Some(cluster)) = (&settings.objects, &cluster) {
            let reporting = connector.clone();
            let frame =
                parts::central_frame(self.host, process, reporting, &self.sources, &metrics);
            let store = store.identity();
            watch_objects(
                source,
                Arc::clone(cluster),
                frame,
                &store,
                writes,
                &mut tasks,
            )?;
        }
        let pods = PodDevices::new(cluster.clone().filter(|_| writes));
        if let Some((labels, cluster)) = settings.labels.clone().zip(cluster.clone()) {
            let config = LabelerConfig {
                cluster,
                labels: labels.labels,
                selectors: labels.selectors,
                clock: CLOCK,
            };
            let labeler = Labeler::new(config, &self.sources, &metrics);
            tasks.writer("the labels of nodes", labeler.run(tasks.done()));
        }
        let machines = MachineNotices::default();
        let acting = Acting {
            settings: act,
            process,
            policy: self.policy,
            cluster,
            owns: Owns::All,
            leadership: self.leadership,
            name: self.host,
            store: Arc::clone(&store),
            metrics,
            sources: self.sources,
            intake,
            machines: machines.clone(),
            devices: None,
        };
        let agents = Agents {
            pods,
            maintenance: act.maintenance.as_ref().map(|_| machines),
            fleet: acting.start(front, &mut tasks)?,
            store_id: store.identity().id,
        };
        let serving = ingest::serve(grpc, tls, self.identify, connector, agents, tasks.no_more());
        let port = "the gRPC port";
        tasks.input(port, log_failure(port, serving));
        greet(settings, address, &server);
        Ok(Running {
            process,
            store,
            forwarding,
            tasks,
        })
    }
}

// === impl Running ===

impl Running<'_> {
    /// Ends the tasks in order. Returns whether all writes to the cluster were completed.
    async fn end(self) -> bool {
        let Self {
            process,
            store,
            forwarding,
            tasks,
        } = self;
        let close = parts::close(store, forwarding);
        tasks.end(close, process).await
    }
}

// === impl Protection ===

impl Protection {
    /// Reads the files that the settings name.
    fn new(settings: &ControllerSettings) -> anyhow::Result<Self> {
        let in_cluster = settings.act.cluster.is_some();
        let Transport::Tls { own, clients } = settings.ingest.transport.clone() else {
            tracing::warn!(
                "events are accepted without TLS from anybody on this machine, for any node"
            );
            return Ok(Self::Open);
        };
        let clients = match clients {
            Some(authority) if in_cluster => ClientCertificates::Optional(authority),
            Some(authority) => ClientCertificates::Required(authority),
            None => ClientCertificates::None,
        };
        Ok(match own {
            ServerCertificate::Files(own) => Self::Files(Arc::new(ServerTls::load(own, clients)?)),
            ServerCertificate::Own { service, lifetime } => {
                let plan = certificate::plan(&service, &settings.act.namespace, lifetime);
                Self::Own(plan, clients)
            }
        })
    }

    /// Returns the TLS configuration. For a certificate of our own, starts the tasks that renew
    /// it and publish its authorities.
    async fn open(
        self,
        cluster: Option<&Arc<Cluster>>,
        namespace: &str,
        tasks: &mut Tasks,
    ) -> anyhow::Result<Option<Arc<ServerTls>>> {
        let (plan, clients) = match self {
            Self::Open => return Ok(None),
            Self::Files(tls) => return Ok(Some(tls)),
            Self::Own(plan, clients) => (plan, clients),
        };
        let cluster = cluster.context("a certificate of the controller's own needs a cluster")?;
        let published = CaConfigMap::new(Arc::clone(cluster), namespace);
        let shared = Arc::clone(cluster);
        let keeper = CertificateKeeper::open(shared, namespace, plan, published.clone());
        let keeper = keeper.await.context(
            "there is no certificate for agents; --grpc-tls-cert and --grpc-tls-key name another one",
        )?;
        let tls = ServerTls::load(keeper.files(), clients)?;
        let authorities = keeper.authorities();
        let publishing = published.run(authorities, tasks.done());
        let why = Reason::new("certificate for agents");
        tasks.worker("the authorities", why.clone().scope(publishing));
        tasks.worker("the certificate", why.scope(keeper.run(tasks.done())));
        Ok(Some(Arc::new(tls)))
    }
}

/// Starts the monitor of Kubernetes objects, with policies from `source`.
fn watch_objects(
    source: &ObjectsSource,
    cluster: Arc<Cluster>,
    frame: Frame,
    store: &Identity,
    writes: bool,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let follower = ObjectsFollower::load(source.clone()).context("--objects")?;
    let monitor = Objects::new(ObjectsConfig {
        cluster: Arc::clone(&cluster),
        frame,
        policies: follower.policies(),
        store: format!("{} {:?}", store.id, store.since),
        writes,
    });
    let following = follower.run(Some(cluster), tasks.done());
    tasks.worker("the object policies", following);
    tasks.monitor("the object monitor", |no_more| monitor.run(no_more));
    Ok(())
}

/// Returns how callers of the port for agents are authenticated.
fn identify(settings: &IngestSettings, cluster: Option<Arc<Cluster>>) -> Identify {
    if settings.transport == Transport::Open {
        return Identify::anybody();
    }
    let tokens = cluster.map(|cluster| {
        let reviewer: Arc<dyn Reviewer> = cluster;
        (settings.tokens.clone(), reviewer)
    });
    Identify::new(tokens)
}

/// Prints the greeting of a controller that stands by.
fn stands_by(standby: &Standby<'_>) -> anyhow::Result<()> {
    let address = standby.listener.local_addr()?;
    let version = env!("CARGO_PKG_VERSION");
    logging::tell(format!(
        "gpuwarden {version} controller: standing by until it leads; status at http://{address}/"
    ));
    Ok(())
}

/// Prints the greeting of a controller that acts.
fn greet(settings: &ControllerSettings, grpc: SocketAddr, server: &str) {
    let mode = match (&settings.act.cluster, settings.act.mode) {
        (None, _) => "recording only; --kubeconfig FILE gives it a cluster",
        (Some(_), Mode::Observe) => "observing only; --quarantine acts",
        (Some(_), Mode::DryRun) => "deciding, but writing nothing (dry run)",
        (Some(_), Mode::Act) => "quarantining nodes with faults",
    };
    let version = env!("CARGO_PKG_VERSION");
    logging::tell(format!(
        "gpuwarden {version} controller: {mode}\n\
         agents       {grpc}\n\
         status page  {server}/"
    ));
}
