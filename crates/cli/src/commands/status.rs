//! `gpuwarden status`: how the nodes are.

use console::api::{DeliveryView, ForwardView, LeadershipView, Mode, Role, Status};
use contract::keys;
use domain::view::{BrakeView, LimitView, NodeState, NodeStatus};
use runtime::sources::SourceState;

use crate::args::{Format, ViewArgs};
use crate::client::Client;
use crate::output::{self, Colour, ago};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

pub(super) async fn execute(args: &ViewArgs) -> anyhow::Result<u8> {
    let status: Status = Client::new(&args.server)?.get("/api/v1/status").await?;
    let format = args.output.output;
    if !output::structured(format, &status)? {
        text(&status, format == Format::Wide)?;
    }
    Ok(if healthy(&status) {
        EXIT_OK
    } else {
        EXIT_UNHEALTHY
    })
}

/// Whether no node has a fatal fault or is out of service, and all that should see does.
fn healthy(status: &Status) -> bool {
    let well = |node: &NodeStatus| matches!(node.state, NodeState::Healthy | NodeState::Degraded);
    status.ready && status.fleet.nodes.iter().all(well)
}

fn text(status: &Status, wide: bool) -> anyhow::Result<()> {
    let mode = match status.mode {
        Mode::Observe if status.role == Role::Agent => "agent",
        Mode::Observe => "observing",
        Mode::DryRun => "quarantine, dry run",
        Mode::Quarantine => "quarantine",
    };
    output::line(&format!(
        "gpuwarden {} on {}, {mode}, up {}",
        status.version,
        status.node_name,
        ago(status.started_at, status.now)
    ))?;
    if let Some(leadership) = &status.leadership {
        leadership_text(leadership)?;
        // Who stands by has nothing else to tell.
        if !leadership.leads {
            return Ok(());
        }
    }
    match &status.fleet.cluster {
        None if status.delivery.is_some() => {}
        None => output::line("cluster     none")?,
        Some(cluster) if cluster.connected => {
            output::line(&format!(
                "cluster     {} ({} nodes)",
                cluster.server, cluster.nodes
            ))?;
        }
        Some(cluster) => output::line(&format!(
            "cluster     {}: {}",
            cluster.server,
            output::colour(
                &format!(
                    "not connected: {}",
                    cluster.error.as_deref().unwrap_or("connecting")
                ),
                Colour::Red
            )
        ))?,
    }
    if let Some(brake) = &status.fleet.brake {
        brake_text(brake, wide)?;
    }
    for source in &status.sources {
        let colour = match source.state {
            SourceState::Following | SourceState::Ended => Colour::Green,
            SourceState::CatchingUp => Colour::Yellow,
            SourceState::Failing | SourceState::Stuck => Colour::Red,
        };
        let mut gone = String::new();
        for (count, what) in [(source.lost, "lost"), (source.refused, "refused")] {
            if count > 0 {
                gone = format!("{gone}, {count} {what}");
            }
        }
        output::line(&format!(
            "{:<11} {}: {}, {} records, {} faults{gone}",
            source.name,
            output::colour(source.state.name(), colour),
            source.detail,
            source.records,
            source.faults
        ))?;
    }
    match &status.delivery {
        None => store_text(status)?,
        Some(delivery) => delivery_text(delivery, status)?,
    }
    if let Some(forward) = &status.forward {
        forward_text(forward)?;
    }
    if let Some(error) = &status.policy.error {
        let holds = match status.policy.loaded_at {
            Some(at) => format!("that of {} ago holds", ago(at, status.now)),
            None => "nothing is decided".to_owned(),
        };
        output::line(&format!(
            "policy      {}: {}: {}",
            status.policy.source,
            output::colour(&format!("not loaded, {holds}"), Colour::Red),
            output::indented(error, 12)
        ))?;
    }
    if wide {
        output::line(&format!(
            "policy      {}: {}",
            status.policy.source,
            status.policy.rule_sets.join(", ")
        ))?;
        output::line(&format!("socket      {}", status.socket))?;
    }
    for reason in &status.not_ready {
        output::line(&format!(
            "{} {reason}",
            output::colour("not ready:", Colour::Red)
        ))?;
    }
    if status.delivery.is_some() {
        output::line("\nFaults and decisions are shown at the controller.")?;
        return Ok(());
    }
    if status.fleet.nodes.is_empty() {
        output::line("\nNo open fault.")?;
        return Ok(());
    }
    for node in &status.fleet.nodes {
        let colour = match node.state {
            NodeState::Healthy => Colour::Green,
            NodeState::Degraded | NodeState::Held => Colour::Yellow,
            _ => Colour::Red,
        };
        let cordoned = if node.unschedulable == Some(true) {
            ", unschedulable"
        } else {
            ""
        };
        output::line(&format!(
            "\n{}  {}{cordoned}",
            node.name,
            output::colour(node.state.name(), colour)
        ))?;
        for fault in &node.faults {
            let fatal = if fault.fatal {
                output::colour("fatal", Colour::Red)
            } else {
                output::colour("minor", Colour::Grey)
            };
            let times = if fault.count > 1 {
                format!(", {} times", fault.count)
            } else {
                String::new()
            };
            output::line(&format!(
                "  {fatal}  {}, {}, {} ago{times}",
                output::plain(&fault.title()),
                output::plain(&fault.recommended_action),
                ago(fault.last_seen, status.now)
            ))?;
            if wide {
                output::line(&format!("         {}", output::indented(&fault.message, 9)))?;
            }
        }
        for note in &node.notes {
            output::line(&format!("  note   {note}"))?;
        }
    }
    Ok(())
}

fn leadership_text(leadership: &LeadershipView) -> anyhow::Result<()> {
    let LeadershipView {
        lease,
        leader,
        leads,
        error,
        ..
    } = leadership;
    let who = match (leads, leader.as_str()) {
        (true, _) => format!("this process ({leader})"),
        (false, "") => "nobody yet; this process stands by".to_owned(),
        (false, leader) => format!("{}; this process stands by", output::plain(leader)),
    };
    output::line(&format!("leader      {who}"))?;
    if let Some(error) = error {
        let text = format!("the Lease {lease} cannot be asked for: {error}");
        let text = output::plain(&text);
        output::line(&format!(
            "            {}",
            output::colour(&text, Colour::Red)
        ))?;
    }
    Ok(())
}

/// How much is stored.
fn store_text(status: &Status) -> anyhow::Result<()> {
    output::line(&format!(
        "store       {} events in {}",
        status.store.events, status.data_dir
    ))?;
    if status.store.unreadable > 0 {
        let text = format!(
            "{} events cannot be read and are passed over; `gpuwarden store inspect` names them",
            status.store.unreadable
        );
        let text = output::colour(&text, Colour::Red);
        output::line(&format!("            {text}"))?;
    }
    Ok(())
}

/// How events get to the controller.
fn delivery_text(delivery: &DeliveryView, status: &Status) -> anyhow::Result<()> {
    output::line(&format!(
        "controller  {}: {} events delivered, {} wait, {} refused",
        delivery.controller, delivery.delivered, status.store.events, delivery.refused
    ))?;
    if delivery.store_changes > 0 {
        output::line(&format!(
            "            its store was another one {} times; {} events were sent again",
            delivery.store_changes, delivery.resent
        ))?;
    }
    if delivery.suspects > 0 {
        let text = format!(
            "the controller fails on {} events; they are tried again",
            delivery.suspects
        );
        let text = output::colour(&text, Colour::Yellow);
        output::line(&format!("            {text}"))?;
    }
    if delivery.aside > 0 {
        let text = format!(
            "{} events were not taken and are kept in {}/outbox/refused.jsonl",
            delivery.aside, status.data_dir
        );
        let text = output::colour(&text, Colour::Yellow);
        output::line(&format!("            {text}"))?;
    }
    Ok(())
}

/// How events are handed on.
fn forward_text(forward: &ForwardView) -> anyhow::Result<()> {
    let mut text = format!(
        "gRPC sink   {}: {} events delivered, {} wait",
        output::plain(&forward.target),
        forward.delivered,
        forward.waiting
    );
    for (count, what) in [(forward.aside, "not taken"), (forward.missed, "missed")] {
        if count > 0 {
            let part = format!(", {count} {what}");
            text.push_str(&output::colour(&part, Colour::Yellow));
        }
    }
    output::line(&text)?;
    if let Some(failing) = &forward.failing {
        let failing = output::colour(&output::plain(failing), Colour::Red);
        output::line(&format!("            {failing}"))?;
    }
    Ok(())
}

/// What limits new quarantines: in one line where all is well.
fn brake_text(brake: &BrakeView, wide: bool) -> anyhow::Result<()> {
    if let Some(paused) = &brake.paused {
        let text = format!("new quarantines are {}", output::plain(paused));
        output::line(&format!(
            "brake       {}",
            output::colour(&text, Colour::Yellow)
        ))?;
    }
    let held = match brake.held {
        0 => String::new(),
        1 => ", holds 1 node back".to_owned(),
        held => format!(", holds {held} nodes back"),
    };
    let limits: Vec<String> = brake
        .limits
        .iter()
        .take(if wide { usize::MAX } else { 3 })
        .map(|limit| {
            let LimitView {
                limit,
                of_which,
                used,
                allowed,
                of,
            } = limit;
            let text = format!("{used} of {allowed} ({limit} of {of} {of_which})");
            output::plain(&text)
        })
        .collect();
    let limits = match (brake.enabled, &brake.unknown, limits.is_empty()) {
        (false, _, _) => "off: nothing limits quarantines".to_owned(),
        (true, Some(why), _) => format!("unknown: {}", output::plain(why)),
        (true, None, true) => "no limit".to_owned(),
        (true, None, false) => limits.join(", "),
    };
    let state = if brake.enabled && brake.state != keys::BREAKER_CLOSED {
        let state = format!("{}, ", output::plain(&brake.state));
        output::colour(&state, Colour::Red)
    } else {
        String::new()
    };
    output::line(&format!("brake       {state}{limits}{held}"))?;
    for note in &brake.notes {
        output::line(&format!("            {}", output::plain(note)))?;
    }
    Ok(())
}
