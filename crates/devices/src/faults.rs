//! Open faults of this node as conditions of its GPUs: `NVSentinelHealth` is false while a fatal
//! one is open.
//!
//! It follows what the fault book holds, so a restart forgets nothing, and what closes a fault or
//! dismisses it makes the condition true again.

use std::sync::Arc;

use contract::device::Gpu;
use contract::keys;
use diagnosis::subject::normalise_pci;
use domain::view::{FaultView, FleetView};
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;

use crate::DeviceApi;
use crate::board::{Own, Said};

/// Agent of the events that come from providers of this API. They are conditions already, in the
/// words of those who said them.
pub const PROVIDERS_AGENT: &str = "device-api-monitor";

/// Most faults that a condition names; what is open is in `gpuwarden explain`.
const MAX_NAMED: usize = 8;

/// Makes conditions of the faults of a node, until `cancel`.
pub async fn follow(
    api: DeviceApi,
    node: String,
    mut view: Receiver<Arc<FleetView>>,
    cancel: CancellationToken,
) {
    let mut version = api.versions();
    loop {
        version.mark_unchanged();
        let seen = Arc::clone(&view.borrow_and_update());
        // Before that, faults that are open may not be known yet.
        if seen.ready {
            show(&api, &node, &seen);
        }
        let changed = async {
            tokio::select! {
                // Without a sender it is the last view for ever.
                Ok(()) = view.changed() => {}
                Ok(()) = version.changed() => {}
                else => std::future::pending().await,
            }
        };
        if cancel.run_until_cancelled(changed).await.is_none() {
            break;
        }
    }
}

fn show(api: &DeviceApi, node: &str, view: &FleetView) {
    let of_node = view.nodes.iter().find(|known| known.name == node);
    let faults = of_node.map_or(&[][..], |known| &known.faults);
    for gpu in api.gpus() {
        let said = said_of(&gpu, faults);
        if let Err(error) = api.set_condition(Own::Health, &gpu.name, said) {
            // It has gone since.
            tracing::debug!(err = %error, "a fault is shown at no GPU");
        }
    }
}

/// Returns what the open faults of a node say of one of its GPUs.
fn said_of(gpu: &Gpu, faults: &[FaultView]) -> Said {
    let concerns = |fault: &&FaultView| {
        fault.fatal && !fault.dismissed && fault.agent != PROVIDERS_AGENT && names(fault, gpu)
    };
    let bad: Vec<&FaultView> = faults.iter().filter(concerns).collect();
    let Some(first) = bad.first() else {
        return Said::well("NoFault", "No fatal fault is open");
    };
    let texts: Vec<String> = bad
        .iter()
        .take(MAX_NAMED)
        .map(|fault| match fault.code.as_str() {
            "" => fault.check.clone(),
            code => format!("{} {code}", fault.check),
        })
        .collect();
    Said::bad(&first.check, texts.join(", "))
}

/// Returns whether a fault concerns a GPU: it names it, or it is one of GPUs and names none.
fn names(fault: &FaultView, gpu: &Gpu) -> bool {
    let spec = gpu.spec.clone().unwrap_or_default();
    let mut conditions = gpu.status.iter().flat_map(|status| &status.conditions);
    let has_number = conditions.any(|one| one.source == Own::Nvml.source());
    let mut names_none = fault.component_class == keys::COMPONENT_GPU;
    for entity in &fault.entities {
        let value = entity.entity_value.as_str();
        let is_it = match entity.entity_type.as_str() {
            keys::ENTITY_GPU_UUID => value.eq_ignore_ascii_case(&gpu.name),
            keys::ENTITY_PCI => normalise_pci(value) == normalise_pci(&spec.pci_bus_id),
            // A number, or in some the UUID; one that the driver has not named has no number.
            keys::ENTITY_GPU => {
                let is_numbered = has_number && value == spec.index.to_string();
                is_numbered || value.eq_ignore_ascii_case(&gpu.name)
            }
            _ => continue,
        };
        if is_it {
            return true;
        }
        names_none = false;
    }
    names_none
}

#[cfg(test)]
mod tests;
