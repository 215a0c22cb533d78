//! `gpuwarden incidents`: which open faults belong together, and which of them is the cause.

use console::api::IncidentsView;
use fleet::view::{FaultView, IncidentNode, IncidentView};
use jiff::Timestamp;

use super::events::query;
use crate::EXIT_OK;
use crate::args::IncidentsArgs;
use crate::client::Client;
use crate::output::{self, ago, plain, plural, say};

pub(super) async fn execute(args: &IncidentsArgs) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let path = match &args.id {
        Some(id) => format!("/api/v1/incidents/{}", query(id)),
        None => "/api/v1/incidents".to_owned(),
    };
    let view: IncidentsView = client.get(&path).await?;
    if output::structured(args.output.output, &view)? {
        return Ok(EXIT_OK);
    }
    match &args.id {
        Some(_) => {
            for incident in &view.incidents {
                details(incident, view.now)?;
            }
        }
        None => list(&view)?,
    }
    Ok(EXIT_OK)
}

fn list(view: &IncidentsView) -> anyhow::Result<()> {
    if view.incidents.is_empty() {
        say!("no open fault")?;
        return Ok(());
    }
    let row = |incident: &IncidentView| {
        vec![
            plain(&incident.id),
            ago(incident.since, view.now),
            incident.nodes.len().to_string(),
            incident.faults().to_string(),
            incident.explained().to_string(),
            plain(&incident.primary_node),
            plain(&incident.primary.title()),
        ]
    };
    let rows: Vec<Vec<String>> = view.incidents.iter().map(row).collect();
    let heads = [
        "INCIDENT",
        "AGE",
        "NODES",
        "FAULTS",
        "EXPLAINED",
        "NODE",
        "PRIMARY",
    ];
    output::table(&heads, &rows)?;
    Ok(())
}

fn details(incident: &IncidentView, now: Timestamp) -> anyhow::Result<()> {
    say!("incident  {}", plain(&incident.id))?;
    say!("since     {}", output::time(incident.since))?;
    let (node, primary) = (&incident.primary_node, &incident.primary);
    say!(
        "primary   {} of node {}",
        plain(&primary.title()),
        plain(node)
    )?;
    say!("action    {}", plain(&primary.recommended_action))?;
    if let Some(approval) = approval(incident) {
        say!("awaits    {approval}")?;
    }
    for node in &incident.nodes {
        for line in node_lines(node, now) {
            output::line(&line)?;
        }
    }
    Ok(())
}

/// Returns on how many nodes of an incident proposals wait, with the command that approves them.
pub(super) fn approval(incident: &IncidentView) -> Option<String> {
    let (waiting, id) = (incident.proposals(), plain(&incident.id));
    let nodes = plural(waiting as u64, "node");
    (waiting > 0).then(|| format!("an approval on {nodes}: gpuwarden approve {id}"))
}

fn node_lines(node: &IncidentNode, now: Timestamp) -> Vec<String> {
    let awaits = node.awaits.as_ref();
    let awaits = awaits.map_or_else(String::new, |awaits| format!(", awaits {}", plain(awaits)));
    let mut lines = vec![format!(
        "\n{}  {}{awaits}",
        plain(&node.name),
        node.state.name()
    )];
    let faults = node.faults.iter();
    lines.extend(faults.map(|fault| fault_line(fault, now)));
    lines
}

fn fault_line(fault: &FaultView, now: Timestamp) -> String {
    let seen = ago(fault.first_seen, now);
    let explained = fault.explained_by.as_ref();
    let rest = explained.map_or_else(
        || plain(&fault.recommended_action),
        |cause| {
            format!(
                "explained by {} of node {}",
                plain(&cause.fault),
                plain(&cause.node)
            )
        },
    );
    format!("  {}, {seen} ago: {rest}", plain(&fault.title()))
}

#[cfg(test)]
mod tests {
    use fleet::view::{CauseView, NodeState};
    use model::proposal::Proposal;

    use super::*;

    #[test]
    fn a_fault_says_what_it_asks_for_or_what_explains_it() {
        let fault = FaultView {
            agent: "syslog-health-monitor".into(),
            component_class: "GPU".into(),
            check: "SysLogsXIDError".into(),
            code: "145".into(),
            subject: "PCI 0000:b3:00".into(),
            entities: Vec::new(),
            fatal: true,
            dismissed: false,
            recommended_action: "COMPONENT_RESET".into(),
            message: String::new(),
            first_seen: Timestamp::UNIX_EPOCH,
            last_seen: Timestamp::UNIX_EPOCH,
            count: 1,
            event_id: "e".into(),
            reported_by: None,
            explained_by: None,
            incident: "i".into(),
        };
        let cause = CauseView {
            node: "n1".into(),
            fault: "SysLogsXIDError 149 on PCI 0000:c1:00".into(),
        };
        let node = IncidentNode {
            name: "n2".into(),
            state: NodeState::Degraded,
            awaits: None,
            proposal: None,
            faults: vec![
                fault.clone(),
                FaultView {
                    explained_by: Some(cause),
                    ..fault
                },
            ],
        };
        let mut incident = IncidentView {
            id: "i".into(),
            since: Timestamp::UNIX_EPOCH,
            primary_node: "n2".into(),
            primary: node.faults[0].clone(),
            nodes: vec![node.clone()],
        };
        assert_eq!(approval(&incident), None);
        incident.nodes[0].proposal = Some(Proposal {
            since: Timestamp::UNIX_EPOCH,
            actions: ["RESTART_BM".to_owned()].into(),
            approved: None,
        });
        let awaits = approval(&incident).unwrap();
        assert_eq!(awaits, "an approval on 1 node: gpuwarden approve i");
        let now = Timestamp::from_second(3).unwrap();
        assert_eq!(
            node_lines(&node, now),
            [
                "\nn2  degraded",
                "  SysLogsXIDError 145 on PCI 0000:b3:00, 3s ago: COMPONENT_RESET",
                "  SysLogsXIDError 145 on PCI 0000:b3:00, 3s ago: explained by SysLogsXIDError 149 on PCI \
                 0000:c1:00 of node n1",
            ]
        );
    }
}
