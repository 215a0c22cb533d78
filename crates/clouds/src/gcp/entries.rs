//! Pages of Cloud Logging's `entries:list`, which has each change of a maintenance as an entry of the
//! audit log of system events.
//!
//! Form of a page: <https://docs.cloud.google.com/logging/docs/reference/v2/rest/v2/entries/list>,
//! of an entry: `LogEntry` and `AuditLog` there.

use jiff::Timestamp;
use notices::words::{Upcoming, gcp_phase};
use notices::{Kind, Phase};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::upcoming::{RESOURCE, notice, parts_of};
use crate::{Announced, Instance};

/// Method of an announced maintenance.
const UPCOMING: &str = "compute.instances.upcomingMaintenance";
/// Method of an announced maintenance of the infrastructure below an instance.
const UPCOMING_INFRA: &str = "compute.instances.upcomingInfraMaintenance";
/// Method of an instance that ends for a maintenance, and starts on another host.
const TERMINATES: &str = "compute.instances.terminateOnHostMaintenance";
/// Method of an instance that moves to another host.
const MIGRATES: &str = "compute.instances.migrateOnHostMaintenance";
/// Part of the message of an entry that ends an announced maintenance.
const HAS_ENDED: &str = "Maintenance window has completed";

/// A page of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// Notices, one for each entry about a maintenance, in the order of the page.
    pub announced: Vec<Announced>,
    /// Number of entries that cannot be understood.
    pub odd: u64,
    /// Token of the next page; empty if this is the last one.
    pub next: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Page {
    entries: Vec<Value>,
    next_page_token: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    timestamp: Timestamp,
    #[serde(default)]
    resource: Resource,
    #[serde(default)]
    operation: Operation,
    proto_payload: Payload,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Resource {
    #[serde(rename = "type")]
    kind: String,
    labels: Labels,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Labels {
    instance_id: String,
    project_id: String,
    zone: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Operation {
    last: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Payload {
    method_name: String,
    #[serde(default)]
    resource_name: String,
    #[serde(default)]
    status: Status,
    #[serde(default)]
    metadata: Upcoming,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    message: String,
}

/// Outcome of reading one entry.
enum Read {
    Notice(Box<Announced>),
    /// The entry is about something else, or about a window that is past.
    Nothing,
    /// The entry cannot be understood.
    Odd,
}

// === impl Entries ===

impl Entries {
    /// Parses a page. An announced maintenance whose window is past at `now` tells nothing: the
    /// entry that ended it may be gone. Fails if the page itself is not of the documented form.
    pub fn parse(body: &[u8], now: Timestamp) -> Result<Self, serde_json::Error> {
        // As a map first, since a struct would be read from an array too.
        let page: Map<String, Value> = serde_json::from_slice(body)?;
        let page = Page::deserialize(Value::Object(page))?;
        let mut entries = Self {
            next: page.next_page_token,
            ..Self::default()
        };
        for entry in page.entries {
            match read(entry, now) {
                Read::Notice(notice) => entries.announced.push(*notice),
                Read::Nothing => {}
                Read::Odd => entries.odd += 1,
            }
        }
        Ok(entries)
    }
}

/// Returns the filter of the entries that are read if none is configured.
pub(super) fn default_filter() -> String {
    let methods = [UPCOMING, UPCOMING_INFRA, TERMINATES, MIGRATES].map(|name| format!("{name:?}"));
    format!(
        "log_id(\"cloudaudit.googleapis.com/system_event\") AND resource.type=\"{RESOURCE}\" AND \
         protoPayload.methodName=({})",
        methods.join(" OR ")
    )
}

fn read(entry: Value, now: Timestamp) -> Read {
    // A filter of the user may let other entries pass, of any form.
    let method = &entry["protoPayload"]["methodName"];
    let Some(method) = method.as_str().filter(|name| is_known(name)) else {
        return Read::Nothing;
    };
    let is_announced = [UPCOMING, UPCOMING_INFRA].contains(&method);
    let Ok(entry) = serde_json::from_value::<Entry>(entry) else {
        return Read::Odd;
    };
    let (labels, payload) = (entry.resource.labels, entry.proto_payload);
    let (project, zone, name) = parts_of(&payload.resource_name).unwrap_or_default();
    let or = |own: &str, other: &str| if own.is_empty() { other } else { own }.to_owned();
    let project = or(&labels.project_id, project);
    let instance = Instance::gcp(&project, &or(&labels.zone, zone), name, &labels.instance_id);
    if entry.resource.kind != RESOURCE || instance.names().is_empty() {
        return Read::Odd;
    }
    let said = gcp_phase(&payload.metadata.maintenance_status);
    let phase = if is_announced && payload.status.message.contains(HAS_ENDED) {
        Phase::Completed
    } else if let Some(phase) = said {
        phase
    } else if is_announced {
        Phase::Scheduled
    } else if entry.operation.last {
        // The operation is over, and nothing else will be said about it.
        Phase::Completed
    } else {
        Phase::Ongoing
    };
    let kind = match payload.method_name.as_str() {
        MIGRATES => Kind::Migration,
        _ => Kind::Reboot,
    };
    let word = if is_announced { "PENDING" } else { "ACTIVE" };
    let number = or(&labels.instance_id, name);
    let Some(mut notice) = notice(payload.metadata, phase, word, kind, &number) else {
        return Read::Odd;
    };
    if phase == Phase::Completed {
        "COMPLETED".clone_into(&mut notice.word);
    }
    notice.updated = Some(entry.timestamp);
    let is_past = notice.end.is_some_and(|end| end < now);
    if notice.phase.is_open() && is_past {
        return Read::Nothing;
    }
    Read::Notice(Box::new(Announced { instance, notice }))
}

fn is_known(method: &str) -> bool {
    [UPCOMING, UPCOMING_INFRA, TERMINATES, MIGRATES].contains(&method)
}

#[cfg(test)]
mod tests;
