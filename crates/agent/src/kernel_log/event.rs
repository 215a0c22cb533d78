//! Converts a finding to health events.

use std::collections::BTreeMap;

use contract::{EVENT_VERSION, HealthEvent, RecommendedAction, action_name, json, keys};
use diagnosis::decode::{Cancelled, Finding, FindingKind, KernelLogDecoder, MachineGpus};
use host::kernel_log::{KernelLogRecord, RecordRef};
use jiff::Timestamp;
use model::event::{MAX_METADATA_BYTES, floor_char_boundary};

pub(crate) struct Context<'a> {
    pub(crate) finding: &'a Finding,
    pub(crate) record: &'a KernelLogRecord,
    /// Time when the line was written.
    pub(crate) at: Timestamp,
    /// Description of the machine's GPUs, if known.
    pub(crate) machine: Option<&'a MachineGpus>,
    pub(crate) node_name: &'a str,
    /// True if the line is older than the configured history.
    pub(crate) earlier_in_boot: bool,
    /// Place of the line in a file or journal.
    pub(crate) place: Option<&'a str>,
    /// Job on the GPU, if known.
    pub(crate) job: Option<&'a str>,
}

/// Metadata key of the log line, for events with another message.
const META_LOG_LINE: &str = "gpuwarden.dev/log-line";

/// Message of a failed reset, the same as NVSentinel's.
const RESET_FAILED: &str = "GPU reset failed, proceeding with a node reboot";

/// Returns the events for a finding in `record`, as this monitor would report them. `place`
/// distinguishes records with the same text.
pub fn events_of_finding(
    finding: &Finding,
    record: &KernelLogRecord,
    node_name: &str,
    at: Timestamp,
    place: &str,
) -> Vec<HealthEvent> {
    of(&Context {
        finding,
        record,
        at,
        node_name,
        earlier_in_boot: false,
        place: Some(place),
        machine: None,
        job: None,
    })
}

/// Returns the event for a line of kernel log, as this monitor would report it; `None` for a
/// line without a fault.
pub fn event_of_line(line: &str, node_name: &str, at: Timestamp) -> Option<HealthEvent> {
    let findings = KernelLogDecoder::default().record(line.as_bytes(), at);
    let record = RecordRef {
        wall: Some(at),
        raw_text: line.as_bytes(),
        ..RecordRef::default()
    };
    let events = of(&Context {
        finding: findings.first()?,
        record: &record.to_record(),
        at,
        machine: None,
        node_name,
        earlier_in_boot: false,
        place: None,
        job: None,
    });
    events.into_iter().next()
}

/// Returns the event for a finding, and a recovery for each fault that it ends.
pub(crate) fn of(context: &Context<'_>) -> Vec<HealthEvent> {
    let event = event(context);
    let cancelled = context
        .finding
        .cancels
        .iter()
        .map(|cancelled| cancellation(&event, cancelled));
    let mut events: Vec<HealthEvent> = cancelled.collect();
    events.insert(0, event);
    events
}

/// Returns the recovery of a fault on the same device that `event` cancels.
fn cancellation(event: &HealthEvent, cancelled: &Cancelled) -> HealthEvent {
    let by = event.error_code.join(", ");
    let mut healthy = HealthEvent {
        is_fatal: false,
        is_healthy: true,
        message: format!("Cancelled by {} error code {by}", event.check_name),
        recommended_action: RecommendedAction::None as i32,
        check_name: cancelled.check.to_owned(),
        error_code: vec![cancelled.code.clone()],
        ..event.clone()
    };
    for key in [
        keys::META_MEANING,
        keys::META_VERDICT,
        keys::META_RPC_HISTORY,
        keys::META_CATALOGUE_ACTION,
        keys::META_JOB,
    ] {
        healthy.metadata.remove(key);
    }
    healthy
        .metadata
        .insert(keys::META_CANCELLED_BY.to_owned(), by);
    healthy
}

fn event(context: &Context<'_>) -> HealthEvent {
    let Context {
        finding, record, ..
    } = context;
    let mut metadata = metadata(context);
    let mut note = |key: &str, value: String| metadata.insert(key.to_owned(), value);
    // A reset of one GPU needs its UUID. Without the UUID the contract restarts the machine.
    //
    // NVSentinel also restarts if only the kernel's own line had the UUID, since its reset
    // could not be acknowledged without the metadata file. gpuwarden's can.
    let mut action = finding.action;
    if action == RecommendedAction::ComponentReset && finding.gpu_uuid.is_none() {
        let name = action_name(action as i32).into_owned();
        note(keys::META_CATALOGUE_ACTION, name);
        action = RecommendedAction::RestartVm;
    }
    let line = finding.lines.as_ref().unwrap_or(&record.text);
    let message = if finding.kind == FindingKind::Reset && !finding.healthy {
        let end = floor_char_boundary(line, MAX_METADATA_BYTES);
        let line = line.get(..end).unwrap_or_default();
        note(META_LOG_LINE, line.to_owned());
        RESET_FAILED.to_owned()
    } else {
        line.clone()
    };
    HealthEvent {
        version: EVENT_VERSION,
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: finding.component().to_owned(),
        check_name: finding.check().to_owned(),
        is_fatal: finding.fatal,
        is_healthy: finding.healthy,
        message,
        recommended_action: action as i32,
        error_code: finding.code().into_iter().collect(),
        entities_impacted: finding.entities(),
        metadata,
        generated_timestamp: Some(json::proto_timestamp(context.at)),
        node_name: context.node_name.to_owned(),
        processing_strategy: finding.strategy as i32,
        ..HealthEvent::default()
    }
}

/// Returns the metadata of the record, the finding and the machine.
fn metadata(context: &Context<'_>) -> BTreeMap<String, String> {
    let Context {
        finding, record, ..
    } = context;
    let flag = |is: bool| is.then(|| "true".to_owned());
    let from_user_space = record.facility.is_some_and(|facility| facility != 0);
    let pci = finding.pci.as_deref();
    let gpu = context.machine.and_then(|machine| {
        let of_uuid = finding.gpu_uuid.as_deref();
        let of_uuid = of_uuid.and_then(|uuid| machine.gpu_with_uuid(uuid));
        of_uuid.or_else(|| machine.gpu_at(pci?))
    });
    let index = finding.gpu_index.or_else(|| gpu?.index);
    let version = context.machine.and_then(MachineGpus::driver_version);
    let own = [
        (keys::META_BOOT_ID, record.boot_id.map(|id| id.to_string())),
        (
            keys::META_KERNEL_SEQUENCE,
            record.seq.map(|seq| seq.to_string()),
        ),
        (keys::META_LOG_PLACE, context.place.map(str::to_owned)),
        (keys::META_FROM_USER_SPACE, flag(from_user_space)),
        (keys::META_EARLIER_IN_BOOT, flag(context.earlier_in_boot)),
        (keys::META_GPU_UUID, finding.gpu_uuid.clone()),
        (
            keys::META_GPU_SERIAL,
            gpu.and_then(|gpu| gpu.serial.clone()),
        ),
        (keys::META_GPU_INDEX, index.map(|index| index.to_string())),
        (keys::META_DRIVER_VERSION, version.map(str::to_owned)),
        (keys::META_JOB, context.job.map(str::to_owned)),
    ];
    let own = own
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    let all = own.chain(finding.metadata());
    all.map(|(key, value)| (key.to_owned(), value)).collect()
}
