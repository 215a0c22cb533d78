//! `gpuwarden inject`: injects a fault, or its recovery.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use agent::kernel_log::event_of_line;
use anyhow::{Context as _, bail};
use console::api::StatusView;
use contract::{EVENT_VERSION, Entity, HealthEvent, HealthEvents, json, keys};
use fleet::view::FaultView;
use jiff::Timestamp;
use model::fault::normalise_pci;
use tokio::time::Instant;

use crate::args::{Inject, TargetArgs, Via};
use crate::client::{self, Client};
use crate::output::{self, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// Severity of the lines that the driver prints for XIDs.
const KERNEL_ERROR: u8 = 3;

/// Longest wait until a recovery closes its fault.
const CLOSED: Duration = Duration::from_secs(5);
/// Pause between two requests of the open faults.
const POLL: Duration = Duration::from_millis(250);

pub(super) async fn execute(what: Inject) -> anyhow::Result<u8> {
    match what {
        Inject::Xid {
            code,
            gpu,
            via: Via::Nvml,
            target,
            ..
        } => fake_xid(code, gpu, &target).await?,
        Inject::Xid {
            code,
            pci,
            via,
            target,
            ..
        } => xid(code, &pci, via, &target).await?,
        Inject::Recovery {
            pci,
            gpu,
            code,
            target,
        } => {
            let wanted = Wanted {
                pci: pci.as_deref().map(normalise_pci),
                gpu: gpu.map(|index| index.to_string()),
                code,
            };
            return recovery(&wanted, &target).await;
        }
    }
    Ok(EXIT_OK)
}

async fn xid(code: u32, pci: &str, via: Via, target: &TargetArgs) -> anyhow::Result<()> {
    let pci = normalise_pci(pci);
    let plausible = pci.split(':').count() == 3
        && pci
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b':');
    if !plausible {
        bail!("--pci {pci:?} is not a PCI address such as 0000:b3:00");
    }
    let line = format!(
        "NVRM: Xid (PCI:{pci}): {code}, pid={}, name=gpuwarden-inject, injected by gpuwarden",
        std::process::id()
    );
    if via == Via::Kmsg {
        host::kernel_log::write_kmsg(KERNEL_ERROR, &line)?;
        say!("written to the kernel log: {line}")?;
        return Ok(());
    }
    let node = node_name(target).await?;
    let mut event = event_of_line(&line, &node, Timestamp::now())
        .context("our own decoder does not decode the line")?;
    event
        .metadata
        .insert(keys::META_INJECTED.to_owned(), "true".to_owned());
    client::send(target, batch(vec![event])).await?;
    say!("XID {code} on {pci} of {node} is recorded")?;
    Ok(())
}

/// Makes the fake driver report an XID, by its scenario file, which it reads again when it changes.
async fn fake_xid(code: u32, gpu: u32, target: &TargetArgs) -> anyhow::Result<()> {
    let status = Client::new(&target.server)?.status().await?;
    let fake = Path::new(&status.process.data_dir).join(fakes::DIRECTORY);
    fakes::tell_xid(&fake, gpu, code).context(
        "cannot change the fake driver; --via nvml needs a gpuwarden on this machine that runs with \
         --fake-gpus",
    )?;
    let node = &status.process.node_name;
    say!("the fake driver reports XID {code} on GPU {gpu} of {node}")?;
    Ok(())
}

/// Selection of the faults that recover; `None` selects any.
struct Wanted {
    pci: Option<String>,
    gpu: Option<String>,
    code: Option<String>,
}

impl Wanted {
    fn covers(&self, fault: &FaultView) -> bool {
        let has = |kind: &str, value: &String| {
            let mut entities = fault.entities.iter();
            entities.any(|one| one.entity_type == kind && one.entity_value == *value)
        };
        self.code.as_ref().is_none_or(|code| fault.code == *code)
            && (self.pci.as_ref()).is_none_or(|pci| has(keys::ENTITY_PCI, pci))
            && (self.gpu.as_ref()).is_none_or(|index| has(keys::ENTITY_GPU, index))
    }
}

async fn recovery(wanted: &Wanted, target: &TargetArgs) -> anyhow::Result<u8> {
    let client = Client::new(&target.server)?;
    let status = client.status().await?;
    if let Some(delivery) = &status.delivery {
        bail!(
            "this is an agent, and its controller at {} knows the open faults: run the command there, or \
             name the controller's API with --server",
            delivery.controller
        );
    }
    let node = target
        .node_name
        .clone()
        .unwrap_or_else(|| status.process.node_name.clone());
    let faults: Vec<FaultView> = faults_of(&node, status)
        .filter(|fault| wanted.covers(fault))
        .collect();
    let (own, faults): (Vec<_>, Vec<_>) = faults.into_iter().partition(FaultView::is_own_word);
    for fault in &own {
        let title = output::plain(&fault.title());
        say!(
            "left alone: {title} of {node} is gpuwarden's own fault, which no event closes; \
             `gpuwarden release {node}` returns the node"
        )?;
    }
    if faults.is_empty() && !own.is_empty() {
        return Ok(EXIT_UNHEALTHY);
    }
    if faults.is_empty() {
        say!("{node} has no such open fault: nothing to recover")?;
        return Ok(EXIT_OK);
    }
    let events = faults.iter().map(|fault| healthy(fault, &node)).collect();
    client::send(target, batch(events)).await?;
    // Not every user may close every fault, and earlier events are processed first.
    let until = Instant::now() + CLOSED;
    let open = loop {
        let status = client.status().await?;
        let open: Vec<String> = faults_of(&node, status)
            .map(|fault| fault.event_id)
            .collect();
        let is_closed = !faults.iter().any(|fault| open.contains(&fault.event_id));
        if is_closed || Instant::now() >= until {
            break open;
        }
        tokio::time::sleep(POLL).await;
    };
    let mut exit = EXIT_OK;
    for fault in &faults {
        let title = output::plain(&fault.title());
        if open.contains(&fault.event_id) {
            exit = EXIT_UNHEALTHY;
            say!(
                "still open: {title} of {node}; the recovery is recorded. Only a monitor, root or \
                 gpuwarden's own user can close a fault that a monitor or root has reported; \
                 `gpuwarden explain {node}` shows the reason"
            )?;
        } else {
            say!("recovered: {title} of {node}")?;
        }
    }
    Ok(exit)
}

fn faults_of(node: &str, status: StatusView) -> impl Iterator<Item = FaultView> {
    let nodes = status.fleet.nodes.into_iter();
    nodes
        .filter(move |known| known.name == node)
        .flat_map(|known| known.faults)
}

/// Returns the healthy event that closes a fault.
fn healthy(fault: &FaultView, node: &str) -> HealthEvent {
    HealthEvent {
        version: EVENT_VERSION,
        agent: fault.agent.clone(),
        component_class: fault.component_class.clone(),
        check_name: fault.check.clone(),
        is_healthy: true,
        message: "Recovery injected by gpuwarden".to_owned(),
        error_code: if fault.code.is_empty() {
            Vec::new()
        } else {
            vec![fault.code.clone()]
        },
        entities_impacted: fault
            .entities
            .iter()
            .map(|entity| Entity {
                entity_type: entity.entity_type.clone(),
                entity_value: entity.entity_value.clone(),
            })
            .collect(),
        metadata: BTreeMap::from([(keys::META_INJECTED.to_owned(), "true".to_owned())]),
        generated_timestamp: Some(json::proto_timestamp(Timestamp::now())),
        node_name: node.to_owned(),
        ..HealthEvent::default()
    }
}

/// Returns the node of the arguments, else that of the running gpuwarden.
async fn node_name(target: &TargetArgs) -> anyhow::Result<String> {
    if let Some(node) = &target.node_name {
        return Ok(node.clone());
    }
    let status = Client::new(&target.server)?.status().await;
    let status = status.context("which node? name it with --node-name")?;
    Ok(status.process.node_name)
}

fn batch(events: Vec<HealthEvent>) -> HealthEvents {
    HealthEvents {
        version: EVENT_VERSION,
        events,
    }
}
