//! `gpuwarden run`: all roles in one process, with the embedded store.

use std::process::ExitCode;
use std::sync::Arc;

use agent::pods::Tell;
use cli::{Mode, RunSettings};
use controller::maintenance::MachineNotices;
use controller::pods::PodDevices;
use controller::quarantine::Owns;
use runtime::logging;
use runtime::sources::Sources;
use store::StoreUrl;

use crate::act;
use crate::gpus;
use crate::parts::{self, Front};
use crate::tasks::Tasks;

/// Runs until SIGTERM or SIGINT, or until a task fails.
pub(crate) async fn run(settings: RunSettings) -> anyhow::Result<ExitCode> {
    let RunSettings {
        node,
        devices: serving,
        process,
        act,
        audit,
    } = &settings;
    gpus::refuse_to_act_on_fakes(&node.gpu, act.mode.writes())?;
    let sources = Sources::default();
    let metrics = parts::start_process("run", process, &sources)?;
    let cluster = parts::cluster(act, audit.as_ref(), "run", &metrics).await?;
    let mut tasks = Tasks::default();
    let policy = parts::policy(act, cluster.clone(), &metrics, &mut tasks)?;
    let store = StoreUrl::in_data_dir(&process.data_dir).open().await?;
    let mut front = Front::open(process, &node.socket, node.socket_mode, &serving.socket).await?;
    let server = front.endpoint.server.clone();

    let nodes = node.accept_nodes.clone();
    let in_cluster = cluster.as_deref();
    let intake = parts::connector(
        act, process, &store, nodes, in_cluster, &metrics, &mut tasks,
    );
    let intake = intake.await?;
    let forwarding = intake.forwarding.clone();
    let connector = intake.connector.clone();
    let places = &mut front.places;
    let api = parts::device_api(serving, node.socket_mode, &metrics, places, &mut tasks).await?;
    let gpus = parts::monitors(
        node,
        process,
        connector,
        api.clone(),
        &sources,
        &metrics,
        &mut tasks,
    )?;

    let acting = cluster.clone().filter(|_| act.mode.writes());
    let tell = acting.map(|cluster| {
        let pods = PodDevices::new(Some(cluster));
        let tell: Tell = Arc::new(move |report| {
            let pods = pods.clone();
            Box::pin(async move { pods.handle(&report).await })
        });
        tell
    });
    parts::pod_gpus(node, gpus, tell, &mut tasks);

    let store_id = store.identity().id;
    let machines = MachineNotices::default();
    let acting = act::Acting {
        settings: act,
        process,
        policy,
        cluster,
        owns: Owns::Node(node.node_name.clone()),
        leadership: None,
        name: &node.node_name,
        store: Arc::clone(&store),
        metrics,
        sources,
        intake,
        machines: machines.clone(),
        devices: Some(api.clone()),
    };
    let tell: agent::maintenance::Tell = Arc::new(move |report| {
        let told = machines.handle(&report);
        Box::pin(async move { told })
    });
    parts::announced_maintenance(node, tell, &acting.sources, &mut tasks)?;
    let fleet = acting.start(front, &mut tasks)?;
    let name = node.node_name.clone();
    let telling = devices::faults::tell(api.clone(), name, store_id, fleet, tasks.done());
    tasks.worker("the faults of this node", telling);
    parts::follow_faults(api, &mut tasks);
    greet(&settings, &server);

    let ends = tasks.until_shutdown_or_failure(parts::until_signal()).await;
    let close = parts::close(store, forwarding);
    tasks.end(close, process).await;
    ends.map(|()| ExitCode::SUCCESS)
}

/// Prints the greeting on stdout.
fn greet(settings: &RunSettings, server: &str) {
    let mode = match (&settings.act.cluster, settings.act.mode) {
        (None, _) => "watching this machine; --kubeconfig FILE gives it a cluster",
        (Some(_), Mode::Observe) => "observing only; --quarantine acts",
        (Some(_), Mode::DryRun) => "deciding, but writing nothing (dry run)",
        (Some(_), Mode::Act) => "quarantining nodes with faults",
    };
    let place = if settings.process.data_dir_is_default {
        String::new()
    } else {
        format!(" --data-dir {}", settings.process.data_dir.display())
    };
    let version = env!("CARGO_PKG_VERSION");
    let node = &settings.node.node_name;
    let fakes = gpus::greeting(&settings.node.gpu);
    logging::tell(format!(
        "gpuwarden {version} on node {node}: {mode}{fakes}\n\
         status page  {server}/\n\
         try it       gpuwarden inject xid 79{place} && gpuwarden explain{place}"
    ));
}
