//! `gpuwarden agent`: the role of a node. It watches the node, receives events on its socket,
//! keeps them on disk and delivers them to the controller. It has no access to the cluster and
//! decides nothing.

use std::process::ExitCode;
use std::sync::Arc;

use agent::faults::FaultAsker;
use cli::{AgentSettings, Mode};
use connector::outbox::{Outbox, OutboxLimits};
use connector::{Connector, Delivery};
use console::api::Role;
use console::{AgentPart, Console};
use runtime::logging;
use runtime::sources::Sources;

use crate::gpus;
use crate::parts::{self, CLOCK, Front};
use crate::tasks::Tasks;

/// Runs until SIGTERM or SIGINT, or until a task fails. Starts even if the controller is
/// unreachable.
pub(crate) async fn run(settings: AgentSettings) -> anyhow::Result<ExitCode> {
    let AgentSettings {
        delivery,
        node,
        devices,
        process,
    } = &settings;
    // The controller may act on the reports, and this process cannot know whether it does.
    gpus::refuse_to_act_on_fakes(&node.gpu, true)?;
    let sources = Sources::default();
    let metrics = parts::start_process("agent", process, &sources)?;
    let limits = OutboxLimits {
        bytes: delivery.outbox_size,
        ..OutboxLimits::default()
    };
    let channel = parts::controller_channel(delivery)?;
    let outbox = Outbox::open(&process.data_dir, limits, &metrics)?;
    let mut front = Front::open(process, &node.socket, node.socket_mode, &devices.socket).await?;
    let endpoint = front.endpoint.clone();

    let nodes = node.accept_nodes.clone();
    let connector = Connector::new(outbox.clone(), nodes, &metrics, CLOCK);
    let mut tasks = Tasks::default();
    let reporting = connector.clone();
    let places = &mut front.places;
    let api = parts::device_api(devices, node.socket_mode, &metrics, places, &mut tasks).await?;
    let gpus = parts::monitors(
        node,
        process,
        reporting,
        api.clone(),
        &sources,
        &metrics,
        &mut tasks,
    )?;
    let header = connector::token_header(delivery.token_file.clone());
    let tell = agent::pods::to_controller(channel.clone(), Arc::clone(&header));
    parts::pod_gpus(node, gpus, Some(tell), &mut tasks);
    let tell = agent::maintenance::to_controller(channel.clone(), Arc::clone(&header));
    parts::announced_maintenance(node, tell, &sources, &mut tasks)?;
    let asking = FaultAsker {
        node_name: node.node_name.clone(),
        channel: channel.clone(),
        header: Arc::clone(&header),
        devices: api.clone(),
    };
    tasks.worker("the faults of this node", asking.run(tasks.done()));
    parts::follow_faults(api.clone(), &mut tasks);
    let delivering = Delivery::new(outbox.clone(), channel, header, &metrics);
    let console = Console {
        process: parts::process_view(
            &node.node_name,
            Role::Agent,
            Mode::Observe,
            process,
            &endpoint.socket,
        ),
        sources,
        places: front.places.troubles(),
        leadership: None,
        controller: None,
        agent: Some(AgentPart {
            controller: delivery.controller.clone(),
            outbox: outbox.clone(),
            delivery: delivering.status(),
        }),
        devices: Some(api),
        metrics,
        clock: CLOCK,
    };

    let (page, serving) = front.serve(connector, tasks.no_more());
    tasks.input("the sockets", serving);
    let done = tasks.done();
    tasks.worker("the delivery", delivering.run(done.clone()));
    let page = console::serve(page, console, done);
    tasks.worker("the page", async move { drop(page.await) });
    greet(&settings, &endpoint.server);

    let ends = tasks.until_shutdown_or_failure(parts::until_signal()).await;
    tasks.end(outbox.close(), process).await;
    ends.map(|()| ExitCode::SUCCESS)
}

/// Prints the greeting on stdout.
fn greet(settings: &AgentSettings, server: &str) {
    let version = env!("CARGO_PKG_VERSION");
    let (node, controller) = (&settings.node.node_name, &settings.delivery.controller);
    let fakes = gpus::greeting(&settings.node.gpu);
    logging::tell(format!(
        "gpuwarden {version} agent on node {node}, for the controller at {controller}{fakes}\n\
         status  {server}/api/v1/status"
    ));
}
