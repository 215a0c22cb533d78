//! Converts open faults of this node to conditions of its GPUs: `NVSentinelHealth` is false
//! while a fatal fault is open.
//!
//! The faults come from the process that keeps the fault book: this one, or the controller. So
//! a restart loses nothing, and closing or dismissing a fault makes the condition true again.

use std::sync::Arc;

use contract::device::Gpu;
use contract::keys;
use contract::node::{ListFaultsResponse, OpenFault};
use diagnosis::subject::normalise_pci;
use fleet::view::FleetView;
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;

use crate::DeviceApi;
use crate::board::{Own, Said};

/// Agent of events that come from providers of this API. Their faults are conditions already,
/// in the provider's own words.
pub const PROVIDERS_AGENT: &str = "device-api-monitor";

/// Most faults in one condition; `gpuwarden explain` lists all open ones.
const MAX_NAMED: usize = 8;

/// State of knowledge about the open faults of this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum NodeFaults {
    /// Not known yet, so there is no condition.
    #[default]
    Untold,
    /// Known open faults of the node.
    Told(ListFaultsResponse),
    /// The faults were requested, without a response for too long.
    Unseen {
        /// Reason for the missing response.
        why: String,
    },
}

/// Sends the API the faults of a node from a view of this process, until `cancel`.
pub async fn tell(
    api: DeviceApi,
    node: String,
    store_id: String,
    mut view: Receiver<Arc<FleetView>>,
    cancel: CancellationToken,
) {
    let updates = async {
        loop {
            let current = Arc::clone(&view.borrow_and_update());
            // Until all faults are known, the list may lack open ones.
            if let Some(faults) = current.faults_of(&node, &store_id) {
                api.take_faults(NodeFaults::Told(faults));
            }
            if view.changed().await.is_err() {
                // The sender is gone, so the view will not change.
                std::future::pending::<()>().await;
            }
        }
    };
    cancel.run_until_cancelled(updates).await;
}

/// Updates the conditions of GPUs from the faults that the API has received, until `cancel`.
pub async fn follow(api: DeviceApi, cancel: CancellationToken) {
    let (mut version, mut faults) = (api.versions(), api.faults());
    loop {
        version.mark_unchanged();
        let known = faults.borrow_and_update().clone();
        show(&api, &known);
        // Neither sender is dropped before `api`.
        let changed = async {
            tokio::select! {
                _ = faults.changed() => {}
                _ = version.changed() => {}
            }
        };
        if cancel.run_until_cancelled(changed).await.is_none() {
            break;
        }
    }
}

fn show(api: &DeviceApi, known: &NodeFaults) {
    for gpu in api.gpus() {
        let condition = match known {
            NodeFaults::Untold => return,
            NodeFaults::Told(known) => health_of(&gpu, &known.faults),
            NodeFaults::Unseen { why } => Said::unknown("FaultsNotSeen", why),
        };
        if let Err(error) = api.set_condition(Own::Health, &gpu.name, condition) {
            // The GPU is gone by now.
            tracing::debug!(err = %error, "cannot set the fault condition of a GPU");
        }
    }
}

/// Returns the condition of a GPU for the open faults of its node.
fn health_of(gpu: &Gpu, faults: &[OpenFault]) -> Said {
    let is_bad =
        |fault: &&OpenFault| fault.fatal && fault.agent != PROVIDERS_AGENT && concerns(fault, gpu);
    let bad: Vec<&OpenFault> = faults.iter().filter(is_bad).collect();
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

/// Describes the open fatal faults of GPUs that concern none of `gpus`: faults of GPUs beyond
/// the limit, or that the driver does not list now.
pub(crate) fn unplaced(known: &NodeFaults, gpus: &[Arc<Gpu>]) -> Vec<String> {
    let NodeFaults::Told(known) = known else {
        return Vec::new();
    };
    let is_unplaced = |fault: &&OpenFault| {
        let is_of_gpus = fault.component_class == keys::COMPONENT_GPU;
        let is_bad = fault.fatal && is_of_gpus && fault.agent != PROVIDERS_AGENT;
        is_bad && !gpus.iter().any(|gpu| concerns(fault, gpu))
    };
    let unplaced = known.faults.iter().filter(is_unplaced).take(MAX_NAMED);
    let texts = unplaced.map(|fault| {
        let entities = fault.entities.iter();
        let names: Vec<String> = entities
            .map(|entity| format!("{} {}", entity.r#type, entity.value))
            .collect();
        let of = if names.is_empty() {
            "no GPU".to_owned()
        } else {
            names.join(", ")
        };
        format!(
            "{} {} of {of}, which is not listed",
            fault.check, fault.code
        )
    });
    texts.collect()
}

/// Returns true if a fault concerns a GPU: it names the GPU, or is a GPU fault that names none.
pub fn concerns(fault: &OpenFault, gpu: &Gpu) -> bool {
    let spec = gpu.spec.clone().unwrap_or_default();
    let mut conditions = gpu.status.iter().flat_map(|status| &status.conditions);
    let has_number = conditions.any(|one| one.source == Own::Nvml.source());
    let mut names_none = fault.component_class == keys::COMPONENT_GPU;
    for entity in &fault.entities {
        let value = entity.value.as_str();
        let is_it = match entity.r#type.as_str() {
            keys::ENTITY_GPU_UUID => value.eq_ignore_ascii_case(&gpu.name),
            keys::ENTITY_PCI => normalise_pci(value) == normalise_pci(&spec.pci_bus_id),
            // A number, or for some monitors the UUID; a GPU that the driver has not named has
            // no number.
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
