//! Reads the documents of metadata services.

use jiff::SignedDuration;
use notices::words::{Upcoming, azure_kind, ec2_kind, gcp_phase, http_date};
use notices::{Kind, Notice, Phase};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The machine that a document is about.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Id of the machine: EC2's instance id, the name of Azure's VM, GCE's number.
    pub id: &'a str,
}

/// A scheduled event of EC2.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Ec2Event {
    event_id: String,
    code: String,
    #[serde(default)]
    description: String,
    #[serde(default)]
    state: String,
    not_before: String,
    #[serde(default)]
    not_after: String,
}

/// The scheduled events of Azure.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureEvents {
    events: Vec<AzureEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureEvent {
    event_id: String,
    event_type: String,
    #[serde(default)]
    event_status: String,
    resources: Vec<String>,
    /// Empty once the event has started.
    #[serde(default)]
    not_before: String,
    /// Seconds; -1 if unknown.
    #[serde(default)]
    duration_in_seconds: i64,
}

// === impl Machine ===

impl Machine<'_> {
    /// Returns a notice about this machine, to be filled in.
    fn notice(&self, provider: &str, resource: &str) -> Notice {
        Notice {
            node: self.node.to_owned(),
            event: String::new(),
            provider: provider.to_owned(),
            resource: (resource.to_owned(), self.id.to_owned()),
            kind: Kind::Reboot,
            phase: Phase::Scheduled,
            word: String::new(),
            start: None,
            end: None,
            emergency: false,
            updated: None,
        }
    }
}

/// Reads EC2's `events/maintenance/scheduled`, or its `history` of events that are over. Fails with
/// the reason if an event cannot be understood.
pub fn ec2(machine: Machine<'_>, document: &[u8]) -> Result<Vec<Notice>, String> {
    let events: Vec<Ec2Event> = json(document)?;
    let notices = events.into_iter().map(|event| {
        let start = http_date(&event.not_before);
        let phase = match event.state.as_str() {
            "completed" => Phase::Completed,
            "canceled" | "cancelled" => Phase::Cancelled,
            _ => Phase::Scheduled,
        };
        // An event without a begin would take the node out at once.
        if start.is_none() && phase.is_open() {
            return Err(format!(
                "event {}: NotBefore {:?} is no time",
                event.event_id, event.not_before
            ));
        }
        Ok(Notice {
            kind: ec2_kind(&event.code, &event.description),
            phase,
            word: [event.code, event.state].join(" ").trim_end().to_owned(),
            event: event.event_id,
            start,
            end: http_date(&event.not_after),
            ..machine.notice("aws", "ec2_instance")
        })
    });
    notices.collect()
}

/// Reads Azure's scheduled events, and takes those of this machine: a machine also sees the events
/// of others in its availability set.
pub fn azure(machine: Machine<'_>, document: &[u8]) -> Result<Vec<Notice>, String> {
    let AzureEvents { events } = json(document)?;
    let is_ours = |event: &AzureEvent| {
        let mut resources = event.resources.iter();
        resources.any(|name| name.eq_ignore_ascii_case(machine.id))
    };
    let notices = events.into_iter().filter(is_ours).map(|event| {
        let phase = match event.event_status.as_str() {
            "Started" => Phase::Ongoing,
            "Completed" => Phase::Completed,
            "Canceled" | "Cancelled" => Phase::Cancelled,
            _ => Phase::Scheduled,
        };
        let start = http_date(&event.not_before);
        if start.is_none() && !event.not_before.is_empty() {
            return Err(format!(
                "event {}: NotBefore {:?} is no time",
                event.event_id, event.not_before
            ));
        }
        let duration = SignedDuration::from_secs(event.duration_in_seconds.max(0));
        let end = start.and_then(|start| start.checked_add(duration).ok());
        Ok(Notice {
            // Each event takes the machine away, also one of a type that is new.
            kind: azure_kind(&event.event_type).unwrap_or(Kind::Reboot),
            phase,
            word: format!("{} {}", event.event_type, event.event_status),
            event: event.event_id,
            start,
            end: end.filter(|_| event.duration_in_seconds > 0),
            ..machine.notice("azure", "VirtualMachine")
        })
    });
    notices.collect()
}

/// Reads GCP's `maintenance-event` and `upcoming-maintenance`. GCP announces one maintenance of a
/// machine at a time, without an id.
pub fn gcp(machine: Machine<'_>, event: &str, upcoming: &[u8]) -> Result<Option<Notice>, String> {
    let upcoming = gcp_upcoming(upcoming)?;
    // One that is about to begin: a minute before a migration, an hour before a machine with GPUs
    // ends.
    let imminent = match event.trim() {
        "" | "NONE" => None,
        "MIGRATE_ON_HOST_MAINTENANCE" => Some(Kind::Migration),
        _ => Some(Kind::Reboot),
    };
    if imminent.is_none() && upcoming.maintenance_status.is_empty() {
        return Ok(None);
    }
    let start = upcoming.start().unwrap_or_default();
    let phase = match imminent {
        Some(_) => Phase::Ongoing,
        None => gcp_phase(&upcoming.maintenance_status).unwrap_or(Phase::Scheduled),
    };
    if phase == Phase::Scheduled && start.is_none() {
        return Err(format!(
            "window_start_time {:?} is no time",
            upcoming.window_start_time
        ));
    }
    let word = match imminent {
        Some(_) => event.trim(),
        None => &upcoming.maintenance_status,
    };
    Ok(Some(Notice {
        kind: imminent.unwrap_or(Kind::Reboot),
        phase,
        word: word.to_owned(),
        start,
        end: upcoming.end(),
        emergency: upcoming.is_emergency(),
        ..machine.notice("gcp", "gce_instance")
    }))
}

/// Reads `upcoming-maintenance`, which without a maintenance is `NONE`, `{}` or an error in JSON.
fn gcp_upcoming(document: &[u8]) -> Result<Upcoming, String> {
    match document.trim_ascii() {
        b"" | b"NONE" | b"\"NONE\"" => Ok(Upcoming::default()),
        document => json(document),
    }
}

fn json<T: DeserializeOwned>(document: &[u8]) -> Result<T, String> {
    serde_json::from_slice(document).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
