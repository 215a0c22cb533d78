//! Timeline of a node: received lines, the events decoded from them and their effect on the
//! open faults, decisions and requests, what the node waits for, and how to clear it.
//!
//! A pure function of the node's events, journal and state. The effect of an event on the open
//! faults is found by recording all events in a [`FaultBook`] again.

mod clear;
mod fold;

use contract::{HealthEvent, effective_action_name, json, keys};
use diagnosis::catalog::{Catalog, Xid};
use fleet::view::NodeStatus;
use jiff::Timestamp;
use model::event::{EventRecord, is_notice};
use model::fault::{FaultBook, FaultChange, Ignored, Subject};
use model::journal::JournalEntry;
use model::position::Position;
use model::reporter::Reporter;
use serde_json::{Value, json};

use crate::api::{Explain, TimelineEntry, TimelineKind};
use fold::Folds;

/// Input of a timeline.
#[derive(Clone, Copy, Debug)]
pub struct Material<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Data directory of the server; `None` if commands find it by default.
    pub data_dir: Option<&'a str>,
    /// Events of the node, in any order.
    pub records: &'a [EventRecord],
    /// True if `records` are all events of the node, not only the newest.
    pub complete: bool,
    /// Journal of the node, in the order of writing.
    pub journal: &'a [JournalEntry],
    /// State of the node; `None` if it has neither an open fault nor a session.
    pub status: Option<&'a NodeStatus>,
}

/// Builds the timeline. Entries are ordered by time; at equal times, an event precedes the
/// decisions about it.
pub fn explain(material: &Material<'_>) -> Explain {
    let Material {
        node,
        data_dir,
        records,
        complete,
        journal,
        status,
    } = *material;
    let mut records: Vec<&EventRecord> = records.iter().collect();
    records.sort_by_key(|record| record.seq);
    records.dedup_by_key(|record| record.seq);

    // Each entry with its feed position. Journal entries have none and come last.
    let mut entries: Vec<(Position, TimelineEntry)> = Vec::new();
    let mut folds = Folds::new(journal, complete);
    let mut book = FaultBook::default();
    for record in records {
        let changes = book.record(record);
        if !folds.is_repeat(record, &changes) {
            let new = event_entries(record, &changes, complete);
            entries.extend(new.into_iter().map(|entry| (record.seq, entry)));
        }
    }
    entries.extend(folds.entries());
    entries.extend(
        journal
            .iter()
            .map(|entry| (Position::END, journal_entry(entry))),
    );
    // The sort is stable: at equal times the order is that of acceptance, followed by the
    // decisions.
    entries.sort_by_key(|(seq, entry)| (entry.at, *seq));
    let entries = entries.into_iter().map(|(_, entry)| entry).collect();

    Explain {
        node: node.to_owned(),
        status: status.cloned(),
        in_cluster: status.and_then(|status| status.in_cluster),
        entries,
        awaits: clear::awaits(node, status),
        how_to_clear: status
            .map(|status| clear::how_to_clear(status, data_dir))
            .unwrap_or_default(),
        gpus: Vec::new(),
        unhealthy_gpus: Vec::new(),
    }
}

/// Returns the catalogue row of an event's code; `None` if the code is not an XID with a row.
pub(crate) fn catalogue_row(check: &str, code: &str) -> Option<&'static Xid> {
    if check != keys::CHECK_XID {
        return None;
    }
    // `149.NETIR_LINK_EVT` is the code, and the unit that reports it.
    let (number, _) = code.split_once('.').unwrap_or((code, ""));
    Catalog::builtin().xid(number.parse().ok()?)
}

fn event_entries(
    record: &EventRecord,
    changes: &[FaultChange],
    complete: bool,
) -> Vec<TimelineEntry> {
    let event = &record.event;
    let generated = event.generated_timestamp.and_then(json::timestamp);
    // A sender's clock may be ahead of ours, but the line preceded its acceptance.
    let observed = generated.map_or(record.created_at, |time| time.min(record.created_at));
    let entry = |at, kind, text, detail| TimelineEntry {
        at,
        kind,
        text,
        detail,
        session: None,
    };
    let mut entries = Vec::with_capacity(3);
    if !event.message.is_empty() {
        let detail = line_detail(event, generated);
        entries.push(entry(
            observed,
            TimelineKind::Line,
            event.message.clone(),
            detail,
        ));
    }
    entries.push(entry(
        observed,
        TimelineKind::Decoded,
        decoded_text(event),
        decoded_detail(event),
    ));
    let effect = effects(changes, is_notice(event), complete);
    let future = event.metadata.get(keys::META_FUTURE_TIME).map(|time| {
        format!("; its sender gave the time {time}, in the future: the time of receipt counts")
    });
    let future = future.unwrap_or_default();
    entries.push(entry(
        record.created_at,
        TimelineKind::Event,
        format!(
            "accepted as #{} ({}){}: {effect}{future}",
            record.seq,
            record.id,
            reported_by(event)
        ),
        json!({
            "id": record.id,
            "seq": record.seq,
            "createdAt": record.created_at,
            "effect": effect,
            "reporter": event.metadata.get(keys::META_REPORTED_BY),
        }),
    ));
    entries
}

/// Returns the reporter of an event; empty for our own monitors.
fn reported_by(event: &HealthEvent) -> String {
    match Reporter::of(event) {
        None | Some(Reporter::Monitor) => String::new(),
        Some(reporter) => format!(" from {reporter}"),
    }
}

fn line_detail(event: &HealthEvent, generated: Option<Timestamp>) -> Value {
    let has = |key| event.metadata.contains_key(key);
    let ours = has(keys::META_GONE_AFTER);
    let source = if ours {
        "gpuwarden, by what the cluster says of the node"
    } else if has(keys::META_INJECTED) {
        "gpuwarden inject"
    } else if has(keys::META_FROM_USER_SPACE) {
        "kernel log, written there by a program"
    } else if event.agent != keys::SYSLOG_AGENT {
        event.agent.as_str()
    } else if has(keys::META_BOOT_ID) || has(keys::META_KERNEL_SEQUENCE) {
        "kernel log"
    } else {
        "kernel log, from a file"
    };
    let kernel_log = event.agent == keys::SYSLOG_AGENT && !ours;
    let mut detail = json!({ "source": source, "kernelLog": kernel_log });
    for (name, key) in [
        ("bootId", keys::META_BOOT_ID),
        ("kernelSequence", keys::META_KERNEL_SEQUENCE),
        ("job", keys::META_JOB),
        ("fullLength", keys::META_MESSAGE_CUT),
        ("futureTimestamp", keys::META_FUTURE_TIME),
    ] {
        if let Some(value) = event.metadata.get(key) {
            detail[name] = json!(value);
        }
    }
    if let Some(time) = generated.filter(|_| !has(keys::META_TIME_OF_RECEIPT)) {
        detail["generatedTimestamp"] = json!(time);
    }
    detail
}

/// Returns the title of an event, such as `SysLogsXIDError 79 on PCI 0000:b3:00`: check, codes
/// and subjects.
fn title(event: &HealthEvent) -> String {
    let subjects: Vec<String> = Subject::of_entities(&event.entities_impacted)
        .iter()
        .map(Subject::to_string)
        .collect();
    let mut title = event.check_name.clone();
    if !event.error_code.is_empty() {
        title.push(' ');
        title.push_str(&event.error_code.join(", "));
    }
    format!("{title} on {}", subjects.join("; "))
}

fn decoded_text(event: &HealthEvent) -> String {
    let title = title(event);
    if event.is_healthy {
        return format!("{title}: healthy");
    }
    let gravity = if event.is_fatal { "fatal" } else { "not fatal" };
    let action = effective_action_name(event);
    let mut text = format!("{title}: {gravity}, recommended action {action}");
    // The monitor's own reading of the line is more specific than the row of the code.
    let own = event.metadata.get(keys::META_MEANING);
    let mut rows = event
        .error_code
        .iter()
        .filter_map(|code| catalogue_row(&event.check_name, code))
        .peekable();
    if let (Some(own), None) = (own, rows.peek()) {
        text = format!("{text}. {own}");
    }
    for row in rows {
        let meaning = own.map_or(&*row.meaning, String::as_str);
        text = format!("{text}. {meaning} (source: {})", row.source);
    }
    if let Some(verdict) = event.metadata.get(keys::META_VERDICT) {
        text = format!("{text}. Verdict: {verdict}");
    }
    if let Some(evidence) = event.metadata.get(keys::META_EVIDENCE) {
        let ids: Vec<&str> = evidence.split(',').collect();
        let count = match ids.len() {
            1 => "the event".to_owned(),
            count => format!("{count} events:"),
        };
        text = format!("{text}. It rests on {count} {}", ids.join(", "));
    }
    text
}

fn decoded_detail(event: &HealthEvent) -> Value {
    let entities: Vec<Value> = event
        .entities_impacted
        .iter()
        .map(|entity| {
            json!({ "entityType": entity.entity_type, "entityValue": entity.entity_value })
        })
        .collect();
    let catalogue: Vec<Value> = event
        .error_code
        .iter()
        .filter_map(|code| catalogue_row(&event.check_name, code))
        .map(|row| {
            json!({
                "code": row.code,
                "mnemonic": row.mnemonic,
                "meaning": row.meaning,
                "note": row.note,
                "source": row.source,
            })
        })
        .collect();
    json!({
        "agent": event.agent,
        "check": event.check_name,
        "codes": event.error_code,
        "entities": entities,
        "healthy": event.is_healthy,
        "fatal": event.is_fatal,
        "recommendedAction": effective_action_name(event),
        "catalogue": catalogue,
    })
}

fn effects(changes: &[FaultChange], is_notice: bool, complete: bool) -> String {
    let effects: Vec<String> = changes
        .iter()
        .map(|change| effect(change, is_notice, complete))
        .collect();
    effects.join("; ")
}

fn effect(change: &FaultChange, is_notice: bool, complete: bool) -> String {
    // Without the earlier events, the faults open at that time are not known.
    let doubt = if complete {
        ""
    } else {
        " (judging by the events shown here)"
    };
    match change {
        FaultChange::Opened(title) | FaultChange::Refreshed(title) if is_notice => {
            format!("a notice, {title}: it is shown for a day and needs no remediation")
        }
        FaultChange::Opened(title) => format!("opens the fault {title}{doubt}"),
        FaultChange::Refreshed(title) => format!("reports the open fault {title} again"),
        FaultChange::Escalated(title) => format!("makes the open fault {title} fatal"),
        FaultChange::Closed(title) => format!("closes the fault {title}"),
        FaultChange::Explained(node) => format!("changes what explains a fault of node {node}"),
        FaultChange::Ignored(Ignored::Strategy) => {
            "stored only, as its processing strategy asks".to_owned()
        }
        FaultChange::Ignored(Ignored::EarlierInBoot) => {
            "shown only: it is older than the history that counts at a first start".to_owned()
        }
        FaultChange::Ignored(Ignored::NothingToClose) => {
            format!("changes nothing: no fault that it could close is open{doubt}")
        }
        FaultChange::Ignored(Ignored::LacksAuthority) => {
            "changes nothing: what it would close was reported by a monitor or by somebody who \
             administers the machine, and stays open until one of those reports it healthy"
                .to_owned()
        }
        FaultChange::Ignored(Ignored::BeforeRecovery) => {
            "changes nothing: it was accepted before the recovery that closed its fault, and came \
             later"
                .to_owned()
        }
        FaultChange::Ignored(Ignored::AlreadyRecorded) => "recorded already".to_owned(),
        FaultChange::Ignored(Ignored::Overflow) => {
            "not recorded: the node has the most open faults that are kept; read again when there is \
             room"
                .to_owned()
        }
    }
}

fn journal_entry(entry: &JournalEntry) -> TimelineEntry {
    TimelineEntry {
        at: entry.at,
        kind: TimelineKind::Journal(entry.kind),
        text: entry.text.clone(),
        detail: entry.detail.clone(),
        session: entry.session.clone(),
    }
}

#[cfg(test)]
mod tests;
