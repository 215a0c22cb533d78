//! Converts a change of a GPU to a health event in NVSentinel's form.

use contract::{Entity, HealthEvent, ProcessingStrategy, RecommendedAction, action_name, keys};
use diagnosis::gpu::Gpu;
use diagnosis::gpu::checks::{GpuNames, ProblemChange, Witnesses};

use super::GpuConfig;

/// Returns the event for a change. `blank` is an event of its check.
pub(super) fn of(
    change: &ProblemChange,
    blank: HealthEvent,
    driver_version: Option<&str>,
    config: &GpuConfig,
) -> HealthEvent {
    let mut event = HealthEvent {
        is_healthy: change.message.is_none(),
        error_code: vec![change.code.to_string()],
        entities_impacted: entities(change),
        ..blank
    };
    if change.check == keys::CHECK_GPU_THERMAL_MARGIN && !config.limits.margin_counts {
        event.processing_strategy = ProcessingStrategy::StoreOnly as i32;
    }
    add_names(&mut event, change.gpu.as_ref(), driver_version);
    add_witnesses(&mut event, change.seen_by);
    let Some(message) = &change.message else {
        let watch = change.check.trim_start_matches("Gpu");
        let watch = watch.trim_end_matches("Watch");
        // Names the code, since other faults of the check are still open.
        if change.is_all_well {
            event.error_code.clear();
            event.message = format!("GPU {watch} watch reported no errors");
        } else if change.is_unjudged {
            let code = &change.code;
            event.message =
                format!("GPU {watch} watch: {code} does not count: no pod relies on it");
        } else {
            event.message = format!("GPU {watch} watch: {} is over", change.code);
        }
        return event;
    };
    event.message.clone_from(message);
    judge(&mut event, change, config);
    event
}

/// Returns the event that a GPU is in this machine, which neither opens nor closes a fault. `blank` is
/// an event of [`keys::CHECK_GPU_INVENTORY`].
pub(super) fn inventory(
    gpu: &Gpu,
    driver_version: Option<&str>,
    blank: HealthEvent,
) -> HealthEvent {
    let known = GpuNames::from(gpu);
    let mut event = HealthEvent {
        is_healthy: true,
        message: format!("{} is in this machine", gpu.product),
        entities_impacted: of_names(names(Some(&known)).into_iter()),
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        ..blank
    };
    add_names(&mut event, Some(&known), driver_version);
    event
}

/// Returns the event that a GPU is healthy again. `blank` is an event of the check.
pub(super) fn recovery(gpu: &Gpu, message: &str, blank: HealthEvent) -> HealthEvent {
    let names = [
        (keys::ENTITY_PCI, &gpu.pci),
        (keys::ENTITY_GPU_UUID, &gpu.uuid),
    ];
    let entities = names.map(|(kind, value)| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.clone(),
    });
    HealthEvent {
        is_healthy: true,
        message: message.to_owned(),
        entities_impacted: entities.into(),
        ..blank
    }
}

/// Sets fatality and action of an event by the catalogue.
fn judge(event: &mut HealthEvent, change: &ProblemChange, config: &GpuConfig) {
    let verdict = config.catalog.judge_dcgm(&change.code);
    let row = config.catalog.dcgm_named(&change.code);
    let severity = row.map(|row| row.severity.to_string());
    let mut action = verdict.action;
    let notes = [
        (keys::META_MEANING, Some(verdict.meaning.to_string())),
        (
            keys::META_VERDICT,
            verdict.basis.map(|basis| basis.to_string()),
        ),
        (
            keys::META_SEVERITY,
            severity.filter(|word| !word.is_empty()),
        ),
    ];
    for (key, value) in notes {
        event
            .metadata
            .extend(value.map(|value| (key.to_owned(), value)));
    }
    // A reset of one GPU needs its names. Without them the contract restarts the machine.
    let has_names =
        (change.gpu.as_ref()).is_some_and(|gpu| gpu.pci.is_some() && gpu.uuid.is_some());
    if action == RecommendedAction::ComponentReset && !has_names {
        let name = action_name(action as i32).into_owned();
        let key = keys::META_CATALOGUE_ACTION.to_owned();
        event.metadata.insert(key, name);
        action = RecommendedAction::RestartVm;
    }
    event.is_fatal = verdict.fatal;
    event.recommended_action = action as i32;
}

/// Adds the sources of a report to the metadata, if DCGM is one.
fn add_witnesses(event: &mut HealthEvent, seen_by: Witnesses) {
    let witnesses = match (seen_by.dcgm, seen_by.nvml) {
        (true, true) => "NVML, DCGM",
        (true, false) => "DCGM",
        (false, _) => return,
    };
    let noted = (keys::META_WITNESSES.to_owned(), witnesses.to_owned());
    event.metadata.extend([noted]);
}

/// Adds the GPU's and the machine's names to the metadata.
pub(super) fn add_names(
    event: &mut HealthEvent,
    gpu: Option<&GpuNames>,
    driver_version: Option<&str>,
) {
    let names = [
        (keys::META_DRIVER_VERSION, driver_version.map(str::to_owned)),
        (keys::META_GPU_INDEX, gpu.map(|gpu| gpu.index.to_string())),
        (keys::META_GPU_UUID, gpu.and_then(|gpu| gpu.uuid.clone())),
        (
            keys::META_GPU_SERIAL,
            gpu.and_then(|gpu| gpu.serial.clone()),
        ),
        (
            keys::META_CHASSIS_SERIAL,
            gpu.and_then(|gpu| gpu.chassis_serial.clone()),
        ),
    ];
    for (key, value) in names {
        event
            .metadata
            .extend(value.map(|value| (key.to_owned(), value)));
    }
}

fn entities(change: &ProblemChange) -> Vec<Entity> {
    let parts = [
        (
            keys::ENTITY_NVLINK,
            change.link.map(|link| link.to_string()),
        ),
        (
            keys::ENTITY_NVSWITCH,
            change.switch.map(|switch| switch.to_string()),
        ),
    ];
    let gpu = names(change.gpu.as_ref()).into_iter();
    of_names(gpu.chain(parts))
}

/// Returns the types and values of a GPU's names.
fn names(gpu: Option<&GpuNames>) -> [(&'static str, Option<String>); 3] {
    [
        (keys::ENTITY_GPU, gpu.map(|gpu| gpu.index.to_string())),
        (keys::ENTITY_PCI, gpu.and_then(|gpu| gpu.pci.clone())),
        (keys::ENTITY_GPU_UUID, gpu.and_then(|gpu| gpu.uuid.clone())),
    ]
}

fn of_names(names: impl Iterator<Item = (&'static str, Option<String>)>) -> Vec<Entity> {
    let entity = |(kind, value): (&str, Option<String>)| {
        Some(Entity {
            entity_type: kind.to_owned(),
            entity_value: value?,
        })
    };
    names.filter_map(entity).collect()
}
