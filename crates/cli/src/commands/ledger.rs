//! `gpuwarden ledger`: the history of GPUs and nodes, and the marks of people.
//!
//! A mark is an event, so that it is durable, in order with all others, and part of a node's story.

use std::time::Duration;

use analysis::ledger::{FaultHistory, HALF_LIFE, MAX_REASON_BYTES, MarkKind, Score, real_name};
use anyhow::bail;
use console::api::{LedgerEntry, LedgerGpu, LedgerView, Role};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use tokio::time::Instant;

use super::events::query;
use super::{person, reason};
use crate::args::{LedgerArgs, LedgerCommand, MarkArg, MarkArgs, TargetArgs};
use crate::client::{self, Client};
use crate::output::{self, plain, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// Monitor that a mark names.
const AGENT: &str = "gpuwarden-ledger";
/// Longest wait until a mark is in the ledger.
const MARKED: Duration = Duration::from_secs(10);
/// Pause between two requests of the ledger.
const POLL: Duration = Duration::from_millis(250);
/// Terms of a score that the text shows.
const TERMS: usize = 10;

pub(super) async fn execute(args: &LedgerArgs) -> anyhow::Result<u8> {
    if let Some(LedgerCommand::Mark(args)) = &args.what {
        return mark(args).await;
    }
    let client = Client::remote(&args.remote).await?;
    let format = args.output.output;
    let Some(name) = &args.name else {
        let path = format!("/api/v1/ledger?limit={}", args.limit);
        let view: LedgerView = client.get(&path).await?;
        if !output::structured(format, &view)? {
            list(&view)?;
        }
        return Ok(EXIT_OK);
    };
    let entry = entry(&client, name).await?;
    if !output::structured(format, &entry)? {
        details(name, &entry)?;
    }
    Ok(EXIT_OK)
}

/// Requests a GPU or node of the ledger.
pub(super) async fn entry(client: &Client, name: &str) -> anyhow::Result<LedgerEntry> {
    client.get(&format!("/api/v1/ledger/{}", query(name))).await
}

fn list(view: &LedgerView) -> anyhow::Result<()> {
    if view.gpus.is_empty() {
        say!("the ledger has no GPU: no event has named one by serial number or UUID")?;
    } else {
        let rows: Vec<Vec<String>> = view.gpus.iter().map(|gpu| row(gpu, view.now)).collect();
        let heads = [
            "GPU", "NODE", "SLOT", "SEEN", "FAULTS", "REPAIRS", "SCORE", "MARK",
        ];
        output::table(&heads, &rows)?;
    }
    let more = |shown: usize, all: usize, what: &str| {
        if shown < all {
            say!("{shown} of {all} {what}; --limit shows more")
        } else {
            Ok(())
        }
    };
    more(view.gpus.len(), view.total_gpus, "GPUs")?;
    if !view.nodes.is_empty() {
        output::line("")?;
        let row = |node: &console::api::LedgerNode| {
            let (faults, repairs) = (node.faults.to_string(), node.repairs.to_string());
            vec![plain(&node.node), faults, repairs, score(node.score)]
        };
        let rows: Vec<Vec<String>> = view.nodes.iter().map(row).collect();
        output::table(&["NODE", "FAULTS", "REPAIRS", "SCORE"], &rows)?;
        more(view.nodes.len(), view.total_nodes, "nodes")?;
    }
    if view.left_out > 0 {
        let rows = output::plural(view.left_out, "row");
        say!("{rows} of GPUs or nodes had to make room and are left out")?;
    }
    Ok(())
}

fn row(gpu: &LedgerGpu, now: Timestamp) -> Vec<String> {
    let node = match &gpu.on_two_nodes {
        Some((one, other)) => format!("{one} and {other} at once"),
        None if gpu.is_replaced => format!("(was in {})", gpu.node),
        None => gpu.node.clone(),
    };
    vec![
        plain(&gpu.id),
        plain(&node),
        plain(&gpu.slot),
        gpu.last_seen
            .map(|at| output::ago(at, now))
            .unwrap_or_default(),
        gpu.faults.to_string(),
        gpu.repairs.to_string(),
        score(gpu.score),
        standing(gpu),
    ]
}

/// Returns the mark of a GPU, and whether it is a candidate for a return to its vendor.
fn standing(gpu: &LedgerGpu) -> String {
    let mark = gpu.mark.as_ref().map(|mark| mark.kind.name());
    let candidate = gpu.is_rma_candidate.then_some("RMA candidate");
    let words: Vec<&str> = mark.into_iter().chain(candidate).collect();
    words.join(", ")
}

fn score(value: f64) -> String {
    format!("{value:.2}")
}

fn details(name: &str, entry: &LedgerEntry) -> anyhow::Result<()> {
    if let Some(gpu) = &entry.gpu {
        let row = &gpu.row;
        say!("GPU       {}", plain(&gpu.short.id))?;
        for uuid in &row.uuids {
            say!("uuid      {}", plain(uuid))?;
        }
        if let Some(mark) = &row.mark {
            let (by, reason) = (plain(&mark.by), plain(&mark.reason));
            let at = output::time(mark.at);
            say!(
                "mark      {} since {at}, by {by}: {reason}",
                mark.kind.name()
            )?;
        }
        for one in row.rma.values() {
            let (node, fault) = (plain(&one.node), plain(&one.fault));
            let at = output::time(one.since);
            say!("RMA       candidate since {at}: repairs on {node} do not help against {fault}")?;
        }
        if let Some((one, other)) = &gpu.short.on_two_nodes {
            let (one, other) = (plain(one), plain(other));
            say!(
                "note      seen on {one} and {other} at the same time: the serial number is not unique, or one of \
                 the nodes states a wrong one; no mark is acted on meanwhile"
            )?;
        }
        for node in row.reported.keys() {
            say!("reported  KnownBadGPU on {}", plain(node))?;
        }
        let places = |place: &analysis::ledger::Place| {
            vec![
                plain(&place.node),
                plain(&place.slot),
                plain(&place.provider_id),
                output::time(place.from),
                output::time(place.to),
            ]
        };
        let rows: Vec<Vec<String>> = row.places.iter().map(places).collect();
        output::line("")?;
        output::table(&["NODE", "SLOT", "PROVIDER ID", "FROM", "TO"], &rows)?;
        if row.places_are_cut {
            say!("older places are left out")?;
        }
        history(&row.history)?;
        terms(&gpu.score)?;
    }
    if let Some(node) = &entry.node {
        say!("node      {}", plain(name))?;
        if !node.row.provider_id.is_empty() {
            say!("provider  {}", plain(&node.row.provider_id))?;
        }
        for gpu in &node.gpus {
            let (slot, standing) = (plain(&gpu.slot), standing(gpu));
            let pause = if standing.is_empty() { "" } else { ", " };
            say!("GPU       {}  {slot}{pause}{standing}", plain(&gpu.id))?;
        }
        history(&node.row.history)?;
        terms(&node.score)?;
    }
    Ok(())
}

fn history(history: &FaultHistory) -> anyhow::Result<()> {
    if !history.faults.is_empty() {
        let row = |fault: &analysis::ledger::PastFault| {
            vec![
                format!("{} {}", plain(&fault.check), plain(&fault.code)),
                plain(&fault.node),
                if fault.fatal { "fatal" } else { "" }.to_owned(),
                plain(&fault.action),
                output::time(fault.first),
                output::time(fault.last),
            ]
        };
        let rows: Vec<Vec<String>> = history.faults.iter().map(row).collect();
        output::line("")?;
        let heads = ["FAULT", "NODE", "FATAL", "ACTION", "FIRST", "LAST"];
        output::table(&heads, &rows)?;
    }
    if !history.repairs.is_empty() {
        let row = |repair: &analysis::ledger::Repair| {
            let result = if repair.succeeded {
                "succeeded"
            } else {
                "failed"
            };
            vec![
                repair.kind.text().to_owned(),
                plain(&repair.node),
                result.to_owned(),
                output::time(repair.at),
            ]
        };
        let rows: Vec<Vec<String>> = history.repairs.iter().map(row).collect();
        output::line("")?;
        output::table(&["REPAIR", "NODE", "RESULT", "AT"], &rows)?;
    }
    if history.is_cut {
        say!("older faults or repairs are left out")?;
    }
    Ok(())
}

fn terms(of: &Score) -> anyhow::Result<()> {
    let days = HALF_LIFE.as_hours() / 24;
    say!(
        "\nscore     {}: each fault and repair counts half after {days} days; nothing acts on it",
        score(of.value)
    )?;
    for term in of.terms.iter().take(TERMS) {
        say!(
            "  {}  of {:<4}  {}  {}",
            score(term.value),
            term.weight,
            output::time(term.at),
            plain(&term.what)
        )?;
    }
    if of.terms.len() > TERMS {
        let others = of.terms.len() - TERMS;
        say!(
            "  and {}; -o json lists all",
            output::plural(others as u64, "older term")
        )?;
    }
    Ok(())
}

/// Sends a mark, and waits until the ledger has it.
async fn mark(args: &MarkArgs) -> anyhow::Result<u8> {
    let gpu = real_name(&args.gpu);
    let Some(gpu) = gpu else {
        bail!(
            "{:?} is no serial number or UUID of a GPU: gpuwarden ledger lists them",
            args.gpu
        );
    };
    let reason = reason(&args.reason, MAX_REASON_BYTES)?;
    let kind = match args.mark {
        MarkArg::Bad => MarkKind::Bad,
        MarkArg::Rma => MarkKind::Rma,
        MarkArg::Good => MarkKind::Good,
    };
    let client = Client::new(&args.server)?;
    let status = client.status().await?;
    if let Some(delivery) = &status.delivery {
        bail!(
            "this is an agent: mark GPUs where its controller runs, which it reaches at {}",
            delivery.controller
        );
    }
    if let Some(leadership) = status.leadership.as_ref().filter(|one| !one.leads) {
        bail!(
            "this controller stands by: mark GPUs where {} runs, which leads",
            leadership.leader
        );
    }
    let known = entry(&client, &gpu).await.ok().and_then(|entry| entry.gpu);
    let place = known.as_ref().map(|known| known.short.node.clone());
    let of_cluster = status.process.role == Role::Controller;
    let node = place.filter(|node| of_cluster && !node.is_empty());
    let mut event = HealthEvent {
        version: EVENT_VERSION,
        agent: AGENT.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: keys::CHECK_LEDGER_MARK.to_owned(),
        is_healthy: kind == MarkKind::Good,
        message: reason,
        generated_timestamp: Some(json::proto_timestamp(Timestamp::now())),
        node_name: node.unwrap_or(status.process.node_name),
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        ..HealthEvent::default()
    };
    let name = if gpu.starts_with("GPU-") {
        keys::META_GPU_UUID
    } else {
        keys::META_GPU_SERIAL
    };
    event.metadata.extend([
        (name.to_owned(), gpu.clone()),
        (keys::META_LEDGER_MARK.to_owned(), kind.name().to_owned()),
        (keys::META_LEDGER_BY.to_owned(), person()),
    ]);
    let target = TargetArgs {
        node_name: None,
        socket: args.socket.clone(),
        server: args.server.clone(),
    };
    let before = known.and_then(|known| known.row.mark);
    let batch = HealthEvents {
        version: EVENT_VERSION,
        events: vec![event],
    };
    client::send(&target, batch).await?;
    let until = Instant::now() + MARKED;
    loop {
        let found = entry(&client, &gpu).await.ok().and_then(|entry| entry.gpu);
        let mark = found.and_then(|found| found.row.mark);
        if mark.as_ref().is_some_and(|mark| mark.kind == kind) && mark != before {
            say!("{}: marked as {}", plain(&gpu), kind.name())?;
            return Ok(EXIT_OK);
        }
        if Instant::now() >= until {
            say!(
                "{}: the mark is stored, but not in the ledger after {} s. Only root and gpuwarden's own user \
                 can mark a GPU; if that is you, look at gpuwarden's log",
                plain(&gpu),
                MARKED.as_secs()
            )?;
            return Ok(EXIT_UNHEALTHY);
        }
        tokio::time::sleep(POLL).await;
    }
}
