//! `gpuwarden report`: reports for others.

mod evidence;
mod html;

use analysis::ledger::real_name;
use console::api::{EventView, Explain};
use sha2::{Digest as _, Sha256};

use super::events::query;
use super::ledger;
use crate::EXIT_OK;
use crate::args::{EvidenceArgs, EvidenceFormat, ReportCommand};
use crate::client::Client;
use crate::output;
use evidence::{Evidence, MAX_NODES, Material, NEWEST_EVENTS, NodeMaterial};

pub(super) async fn execute(what: &ReportCommand) -> anyhow::Result<u8> {
    match what {
        ReportCommand::Evidence(args) => evidence(args).await,
    }
}

/// Writes the evidence, and its SHA-256 to standard error: what a redirection writes into a file has
/// that sum.
async fn evidence(args: &EvidenceArgs) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let material = gather(&client, &args.name).await?;
    let evidence = Evidence::of(&material)?;
    let mut text = match args.output {
        EvidenceFormat::Html => html::page(&evidence)?,
        EvidenceFormat::Json => serde_json::to_string_pretty(&evidence)?,
    };
    text.push('\n');
    output::part(&text)?;
    output::note(&format!("sha256 {:x}", Sha256::digest(&text)));
    Ok(EXIT_OK)
}

/// Requests everything that is known about a GPU or node.
async fn gather(client: &Client, name: &str) -> anyhow::Result<Material> {
    let status = client.status().await?;
    let name = real_name(name).unwrap_or_else(|| name.to_owned());
    let entry = ledger::entry(client, &name).await;
    let gpu = entry.as_ref().ok().and_then(|entry| entry.gpu.as_ref());
    let mut names: Vec<String> = Vec::new();
    match gpu {
        Some(gpu) => {
            let places = gpu.row.places.iter().rev().map(|place| &place.node);
            let faults = gpu.row.history.faults.iter().rev().map(|fault| &fault.node);
            for node in places.chain(faults) {
                if !names.contains(node) && names.len() < MAX_NODES {
                    names.push(node.clone());
                }
            }
        }
        None => names.push(name.clone()),
    }
    let mut nodes = Vec::new();
    for node in names {
        let path = format!("/api/v1/nodes/{}/explain", query(&node));
        let story: anyhow::Result<Explain> = client.get(&path).await;
        let story = match (story, &entry) {
            (Ok(story), _) => Ok(story),
            (Err(error), Ok(_)) => Err(format!("{error:#}")),
            // Neither the ledger nor anybody else knows the name.
            (Err(error), Err(_)) => return Err(error),
        };
        let path = format!("/api/v1/events?limit={NEWEST_EVENTS}&node={}", query(&node));
        let mut events: Vec<EventView> = client.get(&path).await?;
        events.reverse();
        nodes.push(NodeMaterial {
            name: node,
            events,
            story,
        });
    }
    Ok(Material {
        name,
        version: status.process.version,
        now: status.now,
        entry: entry.ok(),
        nodes,
    })
}
