//! `gpuwarden status`: the state of the process and of the nodes.

use console::api::{DeliveryView, ForwardView, LeadershipView, Mode, Role, StatusView};
use contract::keys;
use fleet::brake::some_of;
use fleet::session::Phase;
use fleet::view::{
    BrakeView, ClusterView, DeviceView, FaultView, IncidentView, LimitView, NodeState, NodeStatus,
};
use jiff::Timestamp;
use runtime::sources::{SourceState, SourceStatus};

use super::{devices, incidents};
use crate::args::{Format, ViewArgs};
use crate::client::Client;
use crate::exit_code;
use crate::output::{self, Colour, ago, plural, say};

/// Most nodes in the text, the most severe ones; the lines above them must not scroll away.
const NODES_SHOWN: usize = 100;
/// Most faults of a node in the text, the most severe ones.
const FAULTS_SHOWN: usize = 10;

pub(super) async fn execute(args: &ViewArgs) -> anyhow::Result<u8> {
    let status = Client::remote(&args.remote).await?.status().await?;
    let format = args.output.output;
    if !output::structured(format, &status)? {
        text(&status, format == Format::Wide)?;
    }
    Ok(exit_code(healthy(&status)))
}

/// Returns true if gpuwarden is ready, no node has a fatal fault, and none is out of service.
fn healthy(status: &StatusView) -> bool {
    status.ready && status.fleet.nodes.iter().all(well)
}

/// Returns true if a node is healthy. The quarantine of another gpuwarden does not count: if every
/// node runs its own gpuwarden, all of them would report it.
fn well(node: &NodeStatus) -> bool {
    let session = node.session.as_ref();
    let is_foreign = session.is_some_and(|session| session.another.is_some());
    matches!(node.state, NodeState::Healthy | NodeState::Degraded)
        || (is_foreign && !node.faults.iter().any(|fault| fault.fatal))
}

fn text(status: &StatusView, wide: bool) -> anyhow::Result<()> {
    let process = &status.process;
    let mode = match process.mode {
        Mode::Observe if process.role == Role::Agent => "agent",
        Mode::Observe => "observing",
        Mode::DryRun => "quarantine, dry run",
        Mode::Act => "quarantine",
    };
    let (version, up) = (&process.version, ago(process.started_at, status.now));
    say!(
        "gpuwarden {version} on {}, {mode}, up {up}",
        process.node_name
    )?;
    if let Some(leadership) = &status.leadership {
        leadership_text(leadership)?;
        // A standby has no other state.
        if !leadership.leads {
            return Ok(());
        }
    }
    if status.delivery.is_none() || status.fleet.cluster.is_some() {
        say!(
            "cluster     {}",
            cluster_text(status.fleet.cluster.as_ref())
        )?;
    }
    if let Some(brake) = &status.fleet.brake {
        brake_text(brake, wide)?;
    }
    for source in &status.sources {
        output::line(&source_text(source))?;
    }
    if let Some(gpus) = devices::summary(&status.gpus) {
        output::line(&gpus)?;
    }
    match &status.delivery {
        None => store_text(status)?,
        Some(delivery) => delivery_text(delivery, status)?,
    }
    if let Some(forward) = &status.forward {
        forward_text(forward)?;
    }
    policy_text(status, wide)?;
    if wide {
        say!("socket      {}", process.socket)?;
    }
    for reason in &status.not_ready {
        say!("{} {reason}", output::colour("not ready:", Colour::Red))?;
    }
    if status.delivery.is_some() {
        output::line("\nFaults and decisions are shown at the controller.")?;
    } else if status.fleet.nodes.is_empty() {
        output::line("\nNo open fault.")?;
    } else {
        for line in incident_lines(&status.fleet.nodes, status.now) {
            output::line(&line)?;
        }
        for line in node_lines(&status.fleet.nodes, status.now, wide) {
            output::line(&line)?;
        }
    }
    Ok(())
}

/// Returns the lines of the incidents of several nodes.
fn incident_lines(nodes: &[NodeStatus], now: Timestamp) -> Vec<String> {
    let all = IncidentView::all(nodes).into_iter();
    let several = all.filter(|incident| incident.nodes.len() > 1);
    let line = |incident: IncidentView| {
        let approval = incidents::approval(&incident);
        let awaits = approval.map_or_else(String::new, |text| format!(", awaits {text}"));
        format!(
            "incident    {}: {} nodes, {} ago, {} of node {}{awaits}",
            output::plain(&incident.id),
            incident.nodes.len(),
            ago(incident.since, now),
            output::plain(&incident.primary.title()),
            output::plain(&incident.primary_node),
        )
    };
    several.map(line).collect()
}

/// Writes a further line of the entry above, in a colour.
fn below(text: &str, colour: Colour) -> std::io::Result<()> {
    say!(
        "            {}",
        output::colour(&output::plain(text), colour)
    )
}

fn cluster_text(cluster: Option<&ClusterView>) -> String {
    let Some(cluster) = cluster else {
        return "none".to_owned();
    };
    let server = &cluster.server;
    if cluster.connected {
        return format!("{server} ({} nodes)", cluster.nodes);
    }
    let error = cluster.error.as_deref().unwrap_or("connecting");
    let state = output::colour(&format!("not connected: {error}"), Colour::Red);
    format!("{server}: {state}")
}

fn policy_text(status: &StatusView, wide: bool) -> anyhow::Result<()> {
    let policy = &status.policy;
    if let Some(error) = &policy.error {
        let holds = match policy.loaded_at {
            Some(at) => format!("that of {} ago is used", ago(at, status.now)),
            None => "nothing is decided".to_owned(),
        };
        let state = output::colour(&format!("not loaded, {holds}"), Colour::Red);
        let error = output::indented(error, 12);
        say!("policy      {}: {state}: {error}", policy.source)?;
    }
    if wide {
        let rule_sets = policy.rule_sets.join(", ");
        say!("policy      {}: {rule_sets}", policy.source)?;
    }
    Ok(())
}

fn source_text(source: &SourceStatus) -> String {
    let colour = match source.state {
        SourceState::Following | SourceState::Ended => Colour::Green,
        SourceState::CatchingUp => Colour::Yellow,
        SourceState::Failing | SourceState::Stuck => Colour::Red,
    };
    let mut gone = String::new();
    for (count, what) in [
        (source.lost, "lost"),
        (source.malformed, "malformed"),
        (source.refused, "refused"),
    ] {
        if count > 0 {
            gone = format!("{gone}, {count} {what}");
        }
    }
    let advice = source.advice.as_ref();
    let advice = advice.map_or_else(String::new, |advice| format!("\n            {advice}"));
    format!(
        "{:<11} {}: {}, {}, {}{gone}{advice}",
        source.name,
        output::colour(source.state.name(), colour),
        source.detail,
        plural(source.records, "record"),
        plural(source.faults, "fault")
    )
}

/// Returns the lines of the nodes, by name. If there are too many, only the most severe ones, most
/// severe first; `wide` shows all.
fn node_lines(nodes: &[NodeStatus], now: Timestamp, wide: bool) -> Vec<String> {
    let mut nodes: Vec<&NodeStatus> = nodes.iter().collect();
    let most = if wide { usize::MAX } else { NODES_SHOWN };
    if nodes.len() > most {
        nodes.sort_by_key(|node| rank(node.state));
    }
    let left = nodes.len().saturating_sub(most);
    let mut lines = Vec::new();
    for node in nodes.into_iter().take(most) {
        let colour = match node.state {
            NodeState::Healthy => Colour::Green,
            NodeState::Degraded
            | NodeState::Session(Phase::Held)
            | NodeState::PartlyQuarantined => Colour::Yellow,
            _ => Colour::Red,
        };
        let cordoned = if node.unschedulable == Some(true) {
            ", unschedulable"
        } else {
            ""
        };
        let state = output::colour(node.state.name(), colour);
        lines.push(format!(
            "\n{}  {state}{cordoned}",
            output::plain(&node.name)
        ));
        let most = if wide { usize::MAX } else { FAULTS_SHOWN };
        for fault in node.faults.iter().take(most) {
            lines.push(fault_text(fault, now));
            if wide {
                let message = output::indented(&fault.message, 9);
                lines.push(format!("         {message}"));
            }
        }
        let left = node.faults.len().saturating_sub(most);
        if left > 0 {
            lines.push(format!("  and {left} more open faults: -o wide lists them"));
        }
        let notices = node.notices.iter();
        lines.extend(notices.take(most).map(|notice| notice_text(notice, now)));
        let devices = node.devices.iter().flat_map(device_lines);
        lines.extend(devices.map(|line| format!("  device {}", output::plain(&line))));
        let notes = node.notes.iter();
        lines.extend(notes.map(|note| format!("  note   {}", output::plain(note))));
    }
    if left > 0 {
        lines.push(format!("\nand {left} more nodes: -o wide lists them"));
    }
    lines
}

/// Returns the lines about a tainted device.
pub(super) fn device_lines(device: &DeviceView) -> Vec<String> {
    let taints = device.taints.join(", ");
    let gpu = if device.gpu.is_empty() {
        String::new()
    } else {
        format!(" ({})", device.gpu)
    };
    let mut lines = vec![format!("{}{gpu}: {taints}", device.device)];
    if !device.pods.is_empty() {
        lines.push(format!(
            "{} is used by {}",
            device.device,
            device.pods.join(", ")
        ));
    }
    let evictions = device.evictions.iter();
    lines.extend(evictions.map(|text| format!("{}: {text}", device.device)));
    lines
}

fn fault_text(fault: &FaultView, now: Timestamp) -> String {
    let fatal = if fault.fatal {
        output::colour("fatal", Colour::Red)
    } else {
        output::colour("minor", Colour::Grey)
    };
    let action = output::plain(&fault.recommended_action);
    let cause = fault.explained_by.as_ref();
    let cause = cause.map_or_else(String::new, |cause| {
        let (fault, node) = (output::plain(&cause.fault), output::plain(&cause.node));
        format!(", explained by {fault} of node {node}")
    });
    format!(
        "  {fatal}  {}, {action}, {}{cause}",
        output::plain(&fault.title()),
        when_and_by_whom(fault, now)
    )
}

/// Returns the line of a report of the last day that no repair waits for.
fn notice_text(notice: &FaultView, now: Timestamp) -> String {
    format!(
        "  {} {}, {}",
        output::colour("notice", Colour::Grey),
        output::plain(&notice.title()),
        when_and_by_whom(notice, now)
    )
}

fn when_and_by_whom(fault: &FaultView, now: Timestamp) -> String {
    let times = if fault.count > 1 {
        format!(", {} times", fault.count)
    } else {
        String::new()
    };
    let reporter = fault.reported_by.as_ref();
    let reporter = reporter.map_or_else(String::new, |who| {
        format!(", reported by {}", output::plain(who))
    });
    format!("{} ago{times}{reporter}", ago(fault.last_seen, now))
}

/// Returns the order of a node if not all nodes are shown, from 0 for the first.
fn rank(state: NodeState) -> u8 {
    match state {
        NodeState::Unhealthy | NodeState::Session(Phase::RemediationFailed) => 0,
        NodeState::Session(Phase::Held) => 1,
        NodeState::Session(Phase::Quarantining) => 2,
        NodeState::Session(
            Phase::Quarantined
            | Phase::Draining
            | Phase::Drained
            | Phase::Remediating
            | Phase::Remediated,
        ) => 3,
        NodeState::PartlyQuarantined => 4,
        NodeState::Session(Phase::Returning) => 5,
        NodeState::Degraded => 6,
        NodeState::Healthy | NodeState::Session(Phase::Idle) => 7,
    }
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
    say!("leader      {who}")?;
    if let Some(error) = error {
        let text = format!("the Lease {lease} cannot be acquired: {error}");
        below(&text, Colour::Red)?;
    }
    Ok(())
}

/// Writes the state of the store.
fn store_text(status: &StatusView) -> anyhow::Result<()> {
    say!(
        "store       {} in {}",
        plural(status.store.events, "event"),
        status.process.data_dir
    )?;
    if status.store.unreadable > 0 {
        let text = format!(
            "{} events cannot be read and are skipped; `gpuwarden store inspect` names them",
            status.store.unreadable
        );
        below(&text, Colour::Red)?;
    }
    for note in &status.store.notes {
        say!("            {}", output::plain(note))?;
    }
    Ok(())
}

/// Writes the state of the delivery to the controller.
fn delivery_text(delivery: &DeliveryView, status: &StatusView) -> anyhow::Result<()> {
    say!(
        "controller  {}: {} events delivered, {} wait, {} refused",
        delivery.controller,
        delivery.delivered,
        status.store.events,
        delivery.refused
    )?;
    if delivery.store_changes > 0 {
        say!(
            "            its store was replaced {} times; {} events were sent again",
            delivery.store_changes,
            delivery.resent
        )?;
    }
    if delivery.suspects > 0 {
        let text = format!(
            "the controller fails on {} events; they are tried again",
            delivery.suspects
        );
        below(&text, Colour::Yellow)?;
    }
    if delivery.aside > 0 {
        let text = format!(
            "{} events were rejected and are kept in {}/outbox/refused.jsonl",
            delivery.aside, status.process.data_dir
        );
        below(&text, Colour::Yellow)?;
    }
    Ok(())
}

/// Writes the state of the gRPC sink.
fn forward_text(forward: &ForwardView) -> anyhow::Result<()> {
    let mut text = format!(
        "gRPC sink   {}: {} events delivered, {} wait",
        output::plain(&forward.target),
        forward.delivered,
        forward.waiting
    );
    for (count, what) in [(forward.aside, "rejected"), (forward.missed, "missed")] {
        if count > 0 {
            let part = format!(", {count} {what}");
            text.push_str(&output::colour(&part, Colour::Yellow));
        }
    }
    output::line(&text)?;
    if let Some(failing) = &forward.failing {
        below(failing, Colour::Red)?;
    }
    Ok(())
}

/// Writes the limits of new quarantines, in one line if there is no trouble.
fn brake_text(brake: &BrakeView, wide: bool) -> anyhow::Result<()> {
    if let Some(paused) = &brake.paused {
        let text = format!("new quarantines are {}", output::plain(paused));
        say!("brake       {}", output::colour(&text, Colour::Yellow))?;
    }
    let held = match brake.held {
        0 => String::new(),
        1 => ", holds 1 node back".to_owned(),
        held => format!(", holds {held} nodes back"),
    };
    let shown = if wide { usize::MAX } else { 3 };
    let limits = brake.limits.iter().take(shown).map(|limit| {
        let LimitView {
            limit,
            of_which,
            used,
            allowed,
            of,
            ..
        } = limit;
        output::plain(&format!("{used} of {allowed} ({limit} of {of} {of_which})"))
    });
    let limits: Vec<String> = limits.collect();
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
    say!("brake       {state}{limits}{held}")?;
    for used in room_used(brake, wide) {
        say!("            {used}")?;
    }
    for note in &brake.notes {
        say!("            {}", output::plain(note))?;
    }
    Ok(())
}

/// Returns the nodes that use up the full limits.
fn room_used(brake: &BrakeView, wide: bool) -> Vec<String> {
    let full = brake.limits.iter().take(if wide { usize::MAX } else { 3 });
    full.filter(|limit| limit.used >= limit.allowed && !limit.by.is_empty())
        .map(|limit| {
            let by = some_of(&limit.by, limit.used);
            output::plain(&format!("{} is used by {by}", limit.limit))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, state: NodeState, faults: usize) -> NodeStatus {
        let fault = serde_json::json!({
            "agent": "a", "componentClass": "GPU", "check": "c", "code": "79", "subject": "PCI 1",
            "entities": [], "fatal": true, "recommendedAction": "NONE", "message": "m",
            "firstSeen": "2027-01-15T08:00:00Z", "lastSeen": "2027-01-15T08:00:00Z", "count": 1,
            "eventId": "e",
        });
        let fault: FaultView = serde_json::from_value(fault).unwrap();
        NodeStatus {
            name: name.to_owned(),
            state,
            session: None,
            in_cluster: None,
            unschedulable: None,
            faults: vec![fault; faults],
            notices: vec![],
            devices: vec![],
            notes: vec!["note".to_owned()],
        }
    }

    #[test]
    fn a_node_that_another_has_quarantined_is_its_to_tell() {
        let session = serde_json::json!({
            "id": "s", "phase": "quarantined", "since": "2027-01-15T08:00:00Z", "failures": 0,
            "awaits": "a",
        });
        let mut anothers = session.clone();
        anothers["another"] = serde_json::json!({"who": "w", "end": "e"});
        for (session, faults, expected) in [
            (&session, 0, false),
            (&anothers, 0, true),
            (&anothers, 1, false),
        ] {
            let session = serde_json::from_value(session.clone()).unwrap();
            let node = NodeStatus {
                session: Some(session),
                ..node("n1", NodeState::Session(Phase::Quarantined), faults)
            };
            assert_eq!(well(&node), expected, "{node:?}");
        }
    }

    #[test]
    fn what_stands_above_does_not_scroll_away() {
        let mut nodes: Vec<NodeStatus> = (0..NODES_SHOWN)
            .map(|n| node(&format!("n{n}"), NodeState::Degraded, 0))
            .collect();
        nodes.push(node("worst", NodeState::Unhealthy, 366));
        let now = Timestamp::UNIX_EPOCH;
        let lines = node_lines(&nodes, now, false);
        assert_eq!(lines[0], "\nworst  unhealthy");
        assert_eq!(
            lines[FAULTS_SHOWN + 1],
            "  and 356 more open faults: -o wide lists them"
        );
        assert_eq!(
            lines.last().unwrap(),
            "\nand 1 more nodes: -o wide lists them"
        );
        assert_eq!(lines.len(), 2 * NODES_SHOWN + FAULTS_SHOWN + 2);
        // The wide format shows all.
        let lines = node_lines(&nodes, now, true);
        assert_eq!(lines.len(), 2 * (NODES_SHOWN + 1) + 2 * 366);
    }

    #[test]
    fn notices_stand_behind_the_faults_and_whoever_reported_is_named() {
        let mut node = node("n1", NodeState::Healthy, 1);
        node.notices = std::mem::take(&mut node.faults);
        node.notices[0].reported_by = Some("process 7 of user 1000".to_owned());
        let lines = node_lines(&[node], Timestamp::UNIX_EPOCH, false);
        assert_eq!(lines[0], "\nn1  healthy");
        assert!(lines[1].starts_with("  notice "), "{lines:?}");
        assert!(
            lines[1].ends_with(", reported by process 7 of user 1000"),
            "{lines:?}"
        );
    }

    #[test]
    fn records_that_could_not_be_read_are_told() {
        let source = |malformed| SourceStatus {
            name: "connector".to_owned(),
            state: SourceState::Following,
            detail: "/s".to_owned(),
            advice: None,
            records: 3,
            faults: 1,
            lost: 0,
            malformed,
            refused: 0,
            refusal: None,
            last_record_at: None,
            alive_at: Timestamp::UNIX_EPOCH,
        };
        assert!(source_text(&source(0)).ends_with("1 fault"));
        assert!(source_text(&source(2)).ends_with("1 fault, 2 malformed"));
        // The advice has a line of its own.
        let advice = Some("restart it".to_owned());
        let text = source_text(&SourceStatus {
            advice,
            ..source(0)
        });
        assert!(text.ends_with("1 fault\n            restart it"), "{text}");
    }

    #[test]
    fn who_uses_the_room_of_a_full_limit_is_named() {
        let limit = |used, by: &[&str]| LimitView {
            limit: "20%".to_owned(),
            of_which: "GPU nodes".to_owned(),
            used,
            allowed: 2,
            of: 10,
            by: by.iter().map(|name| (*name).to_owned()).collect(),
        };
        let brake = BrakeView {
            enabled: true,
            state: keys::BREAKER_CLOSED.to_owned(),
            limits: vec![limit(3, &["a", "b"]), limit(1, &["c"]), limit(2, &[])],
            unknown: None,
            held: 1,
            paused: None,
            notes: Vec::new(),
        };
        assert_eq!(room_used(&brake, false), ["20% is used by a, b and 1 more"]);
    }
}
