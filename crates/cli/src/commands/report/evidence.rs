//! Evidence about a GPU or node, assembled from the ledger, the events and the journal.
//!
//! A ticket is one fault: reports of a check and code on one node. It has the fields that the records
//! of repairs of GPU clouds ask for: the times of open, update and close, the durable id of the
//! hardware, category, fault, action, and the date of a hand-over.

use analysis::ledger::{GpuRow, PastFault, real_name};
use console::api::{EventView, Explain, LedgerEntry, TimelineEntry, TimelineKind};
use contract::{HealthEvent, effective_action_name, json, keys};
use jiff::Timestamp;
use model::attempt::{Attempt, DIAGNOSTICS_GROUP, VALIDATION_GROUP};
use model::journal::EntryKind;
use serde::Serialize;
use serde_json::Value;

/// Format of the report.
const FORMAT: &str = "gpuwarden.dev/evidence/v1";
/// Kind of custom resource by which a node is handed over to others.
const HAND_OVER: &str = "ExternalRemediationRequest";
/// Most nodes of a GPU: those where it was seen last.
pub(super) const MAX_NODES: usize = 8;
/// Events of each node: the newest ones.
pub(super) const NEWEST_EVENTS: usize = 1_000;

/// Everything that is known about a GPU or node.
#[derive(Debug)]
pub(super) struct Material {
    /// Name as given: serial number, UUID or node.
    pub(super) name: String,
    pub(super) version: String,
    /// Time by the server's clock.
    pub(super) now: Timestamp,
    /// Entry of the ledger, if there is one.
    pub(super) entry: Option<LedgerEntry>,
    /// Nodes, the latest first.
    pub(super) nodes: Vec<NodeMaterial>,
}

/// Everything that is known about a node.
#[derive(Debug)]
pub(super) struct NodeMaterial {
    pub(super) name: String,
    /// Newest events, oldest first.
    pub(super) events: Vec<EventView>,
    /// Story of the node, or the error of the request: a node that is gone, and whose events are
    /// deleted, has none.
    pub(super) story: Result<Explain, String>,
}

/// The report.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Evidence {
    pub(super) format: &'static str,
    /// Name that was asked for.
    pub(super) subject: String,
    /// Time of the report.
    pub(super) written_at: Timestamp,
    /// Version of gpuwarden that wrote the report.
    pub(super) gpuwarden_version: String,
    /// Faults, oldest first.
    pub(super) tickets: Vec<Ticket>,
    /// Log lines and readings, as events: of the GPU, or of the whole node.
    pub(super) events: Vec<EventView>,
    /// Decisions, requests and answers about the nodes, with their repairs and validations.
    pub(super) journal: Vec<JournalLine>,
    /// Places, faults, repairs and mark of the ledger.
    pub(super) ledger: Option<LedgerEntry>,
    /// Remarks on what the report lacks.
    pub(super) remarks: Vec<String>,
}

/// A fault and what was done about it.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ticket {
    /// Id: that of the event that reported the fault first.
    pub(super) id: String,
    pub(super) node: String,
    /// Durable id of the hardware: the GPU's serial number or UUID, else the cloud's id of the node, else
    /// the node's name.
    pub(super) hardware_id: String,
    /// Component class, such as `GPU`; empty if the event is deleted.
    pub(super) category: String,
    /// Check and codes.
    pub(super) fault: String,
    pub(super) fatal: bool,
    /// Recommended action.
    pub(super) action: String,
    /// Time of the fault: of the log line, or of the reading.
    pub(super) fault_at: Timestamp,
    /// Time of the last report.
    pub(super) last_reported_at: Timestamp,
    /// Time when the fault was accepted, at which the ticket is open; absent if the event is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) opened_at: Option<Timestamp>,
    /// Time when the node left service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) out_of_service_at: Option<Timestamp>,
    /// Time when the node was back in service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) back_in_service_at: Option<Timestamp>,
    /// Time of the last change.
    pub(super) updated_at: Timestamp,
    /// Time when the fault was over and the node back; absent while the ticket is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) closed_at: Option<Timestamp>,
    /// Time when the node was handed over to others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) handed_over_at: Option<Timestamp>,
    /// Remediations.
    pub(super) repairs: Vec<Attempt>,
    /// Validations.
    pub(super) validations: Vec<Attempt>,
    /// Collections of diagnostics.
    pub(super) diagnostics: Vec<Attempt>,
    /// Id of the session that took the node out of service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<String>,
}

/// Entry of the journal of a node.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JournalLine {
    pub(super) node: String,
    #[serde(flatten)]
    pub(super) entry: TimelineEntry,
}

/// Stay of a node out of service.
struct Outage<'a> {
    session: &'a str,
    entries: Vec<&'a TimelineEntry>,
    out_at: Option<Timestamp>,
    back_at: Option<Timestamp>,
}

// === impl Evidence ===

impl Evidence {
    pub(super) fn of(material: &Material) -> anyhow::Result<Self> {
        let entry = material.entry.as_ref();
        let gpu = entry.and_then(|entry| entry.gpu.as_ref());
        let node = entry.and_then(|entry| entry.node.as_ref());
        let history = match (gpu, node) {
            (Some(gpu), _) => Some(&gpu.row.history),
            (None, node) => node.map(|node| &node.row.history),
        };
        let hardware = |part: &NodeMaterial, id: &str| {
            let gpu = gpu.map(|gpu| gpu.short.id.clone());
            let of_event = || part.events.iter().find(|view| view.event["id"] == *id);
            let provider = node.map(|node| node.row.provider_id.clone());
            gpu.or_else(|| gpu_of(of_event()?))
                .or_else(|| provider.filter(|id| !id.is_empty()))
                .unwrap_or_else(|| part.name.clone())
        };
        let mut evidence = Self {
            format: FORMAT,
            subject: material.name.clone(),
            written_at: material.now,
            gpuwarden_version: material.version.clone(),
            tickets: Vec::new(),
            events: Vec::new(),
            journal: Vec::new(),
            ledger: material.entry.clone(),
            remarks: Vec::new(),
        };
        for part in &material.nodes {
            if part.events.len() >= NEWEST_EVENTS {
                let name = &part.name;
                evidence.remarks.push(format!(
                    "{name} has more than {NEWEST_EVENTS} events: the older ones are left out"
                ));
            }
            if let Err(error) = &part.story {
                evidence.remarks.push(format!(
                    "the decisions about {} are not known: {error}",
                    part.name
                ));
            }
            let entries = part.story.iter().flat_map(|story| &story.entries);
            let journal: Vec<&TimelineEntry> = entries.filter(|one| is_journal(one)).collect();
            let outages = outages(&journal);
            let faults = history.iter().flat_map(|history| &history.faults);
            let before = evidence.tickets.len();
            for fault in faults.filter(|fault| fault.node == part.name) {
                evidence.tickets.push(Ticket::of(
                    fault,
                    part,
                    &outages,
                    hardware(part, &fault.event),
                )?);
            }
            let new = evidence.tickets.iter().skip(before);
            let mut sessions: Vec<&str> = new.filter_map(|one| one.session.as_deref()).collect();
            // Outages for another reason, such as a conclusion from many events.
            let mut others = Vec::new();
            for outage in outages
                .iter()
                .filter(|one| !sessions.contains(&one.session))
            {
                let mut events = part.events.iter();
                let Some(view) = events.find(|view| view.event["id"] == *outage.session) else {
                    continue;
                };
                let event = json::from_value(view.event.clone())?;
                if gpu.is_none_or(|gpu| names(&event, &gpu.row)) {
                    let fault = fault_of(&event, view.created_at);
                    others.push(Ticket::of(
                        &fault,
                        part,
                        &outages,
                        hardware(part, &fault.event),
                    )?);
                }
            }
            sessions.extend(outages.iter().map(|one| one.session).filter(|session| {
                others
                    .iter()
                    .any(|one| one.session.as_deref() == Some(session))
            }));
            let concerns = |entry: &&&TimelineEntry| {
                let session = session_of(entry);
                gpu.is_none() || session.is_some_and(|session| sessions.contains(&session))
            };
            let lines = journal.iter().filter(concerns).map(|entry| JournalLine {
                node: part.name.clone(),
                entry: (*entry).clone(),
            });
            evidence.journal.extend(lines);
            evidence.tickets.extend(others);
            for view in &part.events {
                let event = json::from_value(view.event.clone())?;
                if gpu.is_none_or(|gpu| names(&event, &gpu.row)) {
                    evidence.events.push(view.clone());
                }
            }
        }
        if history.is_some_and(|history| history.is_cut) {
            let remark = "the ledger has left out older faults or repairs".to_owned();
            evidence.remarks.push(remark);
        }
        if evidence.tickets.iter().any(|one| one.opened_at.is_none()) {
            evidence.remarks.push(
                "the events of some faults are deleted: only what the ledger has of them is left"
                    .to_owned(),
            );
        }
        evidence.tickets.sort_by_key(|ticket| ticket.fault_at);
        evidence.events.sort_by_key(|event| event.seq);
        evidence.journal.sort_by_key(|line| line.entry.at);
        Ok(evidence)
    }
}

// === impl Ticket ===

impl Ticket {
    fn of(
        fault: &PastFault,
        part: &NodeMaterial,
        outages: &[Outage<'_>],
        hardware_id: String,
    ) -> anyhow::Result<Self> {
        let event = part
            .events
            .iter()
            .find(|view| view.event["id"] == *fault.event);
        let accepted = event.map(|view| view.created_at);
        let opened = accepted.unwrap_or(fault.first);
        let is_during = |outage: &&Outage<'_>| {
            let began = outage
                .entries
                .first()
                .is_some_and(|entry| entry.at <= fault.last.max(opened));
            let is_over = outage.back_at.is_some_and(|back| back < opened);
            outage.session == fault.event || (began && !is_over)
        };
        let outage = outages.iter().find(is_during);
        let recovered = recovery(fault, part)?;
        let back = outage.and_then(|outage| outage.back_at);
        let closed = match outage {
            Some(_) => back,
            None => recovered,
        };
        let entries = outage
            .map(|outage| outage.entries.as_slice())
            .unwrap_or_default();
        let attempts = attempts(entries);
        let is_of = |attempt: &&Attempt, group: &str| attempt.group == group;
        let of_group = |group| {
            attempts
                .iter()
                .filter(|one| is_of(one, group))
                .cloned()
                .collect()
        };
        let is_repair =
            |one: &&Attempt| !is_of(one, VALIDATION_GROUP) && !is_of(one, DIAGNOSTICS_GROUP);
        let handed_over = attempts.iter().find(|one| one.resource.kind == HAND_OVER);
        let changes = entries.iter().map(|entry| entry.at);
        let changes = changes.chain(recovered).chain([fault.last, opened]);
        let text = |key: &str| {
            let value = event.and_then(|view| view.event[key].as_str());
            value.unwrap_or_default().to_owned()
        };
        Ok(Self {
            id: fault.event.clone(),
            node: fault.node.clone(),
            hardware_id,
            category: text("componentClass"),
            fault: format!("{} {}", fault.check, fault.code)
                .trim_end()
                .to_owned(),
            fatal: fault.fatal,
            action: fault.action.clone(),
            fault_at: fault.first,
            last_reported_at: fault.last,
            opened_at: accepted,
            out_of_service_at: outage.and_then(|outage| outage.out_at),
            back_in_service_at: back,
            updated_at: changes.max().unwrap_or(opened),
            closed_at: closed,
            handed_over_at: handed_over.map(|one| one.made.unwrap_or(one.since)),
            repairs: attempts.iter().filter(is_repair).cloned().collect(),
            validations: of_group(VALIDATION_GROUP),
            diagnostics: of_group(DIAGNOSTICS_GROUP),
            session: outage.map(|outage| outage.session.to_owned()),
        })
    }
}

/// Returns the fault that an event reports.
fn fault_of(event: &HealthEvent, accepted: Timestamp) -> PastFault {
    let observed = event.generated_timestamp.and_then(json::timestamp);
    PastFault {
        last: accepted,
        first: observed.map_or(accepted, |at| at.min(accepted)),
        node: event.node_name.clone(),
        check: event.check_name.clone(),
        code: event.error_code.join(","),
        fatal: event.is_fatal,
        action: effective_action_name(event).into_owned(),
        event: event.id.clone(),
    }
}

/// Returns the time of the first healthy event of a fault's check after its last report.
fn recovery(fault: &PastFault, part: &NodeMaterial) -> anyhow::Result<Option<Timestamp>> {
    for view in part
        .events
        .iter()
        .filter(|view| view.created_at >= fault.last)
    {
        let event = json::from_value(view.event.clone())?;
        let codes = event.error_code.join(",");
        let is_of = event.check_name == fault.check && (codes.is_empty() || codes == fault.code);
        if event.is_healthy && is_of {
            return Ok(Some(view.created_at));
        }
    }
    Ok(None)
}

/// Returns the serial number or UUID of the GPU that an event names.
fn gpu_of(view: &EventView) -> Option<String> {
    let names = [keys::META_GPU_SERIAL, keys::META_GPU_UUID];
    let names = names.map(|key| view.event["metadata"][key].as_str());
    names.into_iter().flatten().find_map(real_name)
}

fn is_journal(entry: &TimelineEntry) -> bool {
    matches!(entry.kind, TimelineKind::Journal(_))
}

/// Returns the session of an entry. The end of a session names it in its detail only.
fn session_of(entry: &TimelineEntry) -> Option<&str> {
    let session = entry.session.as_deref();
    session.or_else(|| entry.detail["id"].as_str())
}

/// Returns the stays out of service in a journal.
fn outages<'a>(journal: &[&'a TimelineEntry]) -> Vec<Outage<'a>> {
    let mut outages: Vec<Outage<'a>> = Vec::new();
    for entry in journal {
        let Some(session) = session_of(entry) else {
            continue;
        };
        let known = outages.iter().position(|outage| outage.session == session);
        let index = known.unwrap_or_else(|| {
            outages.push(Outage {
                session,
                entries: Vec::new(),
                out_at: None,
                back_at: None,
            });
            outages.len() - 1
        });
        let Some(outage) = outages.get_mut(index) else {
            continue;
        };
        outage.entries.push(entry);
        if entry.kind == TimelineKind::Journal(EntryKind::Session) {
            match entry.detail["to"].as_str() {
                Some("idle") => outage.back_at = Some(entry.at),
                Some("held" | "quarantining") | None => {}
                Some(_) => outage.out_at = outage.out_at.or(Some(entry.at)),
            }
        }
    }
    outages
}

/// Returns the attempts in the entries of a session, each as it was last recorded.
fn attempts(entries: &[&TimelineEntry]) -> Vec<Attempt> {
    let mut attempts: Vec<Attempt> = Vec::new();
    for entry in entries {
        let found: Option<Attempt> = match &entry.detail["attempt"] {
            Value::Null => None,
            attempt => serde_json::from_value(attempt.clone()).ok(),
        };
        let Some(attempt) = found else {
            continue;
        };
        match attempts.iter_mut().find(|known| known.id == attempt.id) {
            Some(known) => *known = attempt,
            None => attempts.push(attempt),
        }
    }
    attempts
}

/// Returns true if an event names a GPU of the ledger.
fn names(event: &HealthEvent, row: &GpuRow) -> bool {
    let metadata = |key| event.metadata.get(key);
    let is_serial = row.serial.is_some() && metadata(keys::META_GPU_SERIAL) == row.serial.as_ref();
    let has = |uuid: &String| {
        let mut entities = event.entities_impacted.iter();
        metadata(keys::META_GPU_UUID) == Some(uuid) || entities.any(|it| it.entity_value == *uuid)
    };
    is_serial || row.uuids.iter().any(has)
}

#[cfg(test)]
mod tests;
