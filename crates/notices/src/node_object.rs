//! Notices on the Node object, which need no credentials: labels, annotations and a taint of GKE,
//! and a condition of AKS.
//!
//! GKE's names are those of its documentation and of public tools; `upcoming-maintenance` is the
//! JSON of the instance's metadata server.

use jiff::Timestamp;
use model::node::NodeView;

use crate::notice::{Kind, Notice, Phase, Reading};
use crate::words::{Upcoming, azure_kind, gcp_phase, http_date};

/// Name of the source.
pub const SOURCE: &str = "node-object";

/// Name of the provider of GKE.
pub const GCP: &str = "gcp";
/// GKE: scheduled begin, in seconds since 1970.
const GKE_SCHEDULED: &str = "cloud.google.com/scheduled-maintenance-time";
/// GKE: `ONGOING` during a maintenance.
const GKE_ACTIVE: &str = "cloud.google.com/active-node-maintenance";
/// GKE: taint shortly before the node ends.
const GKE_ENDING: &str = "cloud.google.com/impending-node-termination";
/// GKE: annotation with the maintenance as the instance's metadata server has it.
const GKE_UPCOMING: &str = "node.gke.io/upcoming-maintenance";
/// GKE: annotation with the progress of a maintenance that a person has started.
const GKE_STATE: &str = "node.gke.io/maintenance-state";
/// GKE: annotation of a node whose host is replaced because its user has reported it as faulty.
const GKE_REPLACE: &str = "node.gke.io/report-and-replace-operation";
/// GKE: annotation with the number of the instance.
const GKE_INSTANCE: &str = "container.googleapis.com/instance_id";
/// GKE: label by which a user lets a scheduled maintenance begin; its value is `true`.
pub const GKE_PERFORM: &str = "cloud.google.com/perform-maintenance";
/// Begin of the provider id of a node in Azure.
const AZURE: &str = "azure://";
/// Word of a scheduled maintenance for which GKE has no word of its own.
const PENDING: &str = "PENDING";
/// Word of a maintenance that is going on.
const ONGOING: &str = "ONGOING";

/// A node about which nothing can be said.
struct Unseen;

/// Reads the notices on all nodes. Returns with them the number of notices that cannot be
/// understood.
pub fn read<'a>(nodes: impl Iterator<Item = &'a NodeView>) -> (Reading, u64) {
    let mut reading = Reading {
        complete: true,
        ..Reading::default()
    };
    let mut odd = 0;
    for node in nodes {
        let found = gke(node).and_then(|found| Ok(found.or(aks(node)?)));
        if let Ok(notice) = found {
            reading.notices.extend(notice);
        } else {
            odd += u64::from(is_told(node));
            reading.unseen.insert(node.name.clone());
        }
    }
    (reading, odd)
}

/// Returns whether the node has a notice, of whatever form.
fn is_told(node: &NodeView) -> bool {
    let by_azure = node
        .vm_event
        .as_ref()
        .is_some_and(|event| event.status == Some(true));
    by_azure
        || node.labels.contains_key(GKE_SCHEDULED)
        || node.annotations.contains_key(GKE_UPCOMING)
}

/// Reads the marks of GKE.
fn gke(node: &NodeView) -> Result<Option<Notice>, Unseen> {
    let text = |key: &str| node.annotations.get(key).map(String::as_str);
    let upcoming = match text(GKE_UPCOMING).filter(|text| !text.is_empty()) {
        Some(text) => serde_json::from_str(text).map_err(|_| Unseen)?,
        None => Upcoming::default(),
    };
    let active = node.labels.get(GKE_ACTIVE).map_or("", String::as_str);
    let is_ending = node.taints.iter().any(|one| one.taint.key == GKE_ENDING);
    let scheduled = node.labels.get(GKE_SCHEDULED);
    let status = upcoming.maintenance_status.as_str();
    let told = if is_ending || active == ONGOING {
        ONGOING
    } else {
        status
    };
    if told.is_empty() && scheduled.is_none() {
        return Ok(None);
    }
    let phase = gcp_phase(told).unwrap_or(Phase::Scheduled);
    let label = scheduled.map(|text| {
        let seconds = text.parse().ok();
        seconds.and_then(|seconds| Timestamp::from_second(seconds).ok())
    });
    let start = match label {
        // A time that cannot be understood would take the node out at once.
        Some(None) if phase == Phase::Scheduled => return Err(Unseen),
        Some(Some(start)) => Some(start),
        _ => match upcoming.start() {
            Err(_) if phase == Phase::Scheduled => return Err(Unseen),
            start => start.unwrap_or_default(),
        },
    };
    let words = [active, status, text(GKE_STATE).unwrap_or_default(), PENDING];
    let word = words.into_iter().find(|word| !word.is_empty());
    let instance = text(GKE_INSTANCE).or(node.provider_id.rsplit('/').next());
    Ok(Some(Notice {
        node: node.name.clone(),
        event: String::new(),
        provider: GCP.to_owned(),
        resource: (
            "gce_instance".to_owned(),
            instance.unwrap_or_default().to_owned(),
        ),
        kind: match text(GKE_REPLACE) {
            Some(_) => Kind::Replacement,
            None => Kind::Reboot,
        },
        phase,
        word: word.unwrap_or_default().to_owned(),
        start,
        end: upcoming.end(),
        emergency: upcoming.is_emergency(),
        updated: None,
    }))
}

/// Reads the condition of AKS. Its message is such as `Reboot Scheduled: Mon, 02 Mar 2026 19:01:45
/// GMT`.
fn aks(node: &NodeView) -> Result<Option<Notice>, Unseen> {
    let Some(event) = &node.vm_event else {
        // The condition may be missing for a while after a boot.
        let is_azure = node.provider_id.starts_with(AZURE);
        return if is_azure { Err(Unseen) } else { Ok(None) };
    };
    if !event.status.ok_or(Unseen)? {
        return Ok(None);
    }
    let (what, when) = event
        .message
        .split_once(':')
        .unwrap_or((&event.message, ""));
    let kind = what.split_whitespace().find_map(azure_kind);
    // Other messages tell that the events cannot be read.
    let kind = kind.ok_or(Unseen)?;
    let start = http_date(when);
    if start.is_none() && !when.trim().is_empty() {
        return Err(Unseen);
    }
    Ok(Some(Notice {
        node: node.name.clone(),
        event: String::new(),
        provider: "azure".to_owned(),
        resource: (
            "VirtualMachine".to_owned(),
            node.provider_id
                .strip_prefix(AZURE)
                .unwrap_or_default()
                .to_owned(),
        ),
        kind,
        phase: Phase::Scheduled,
        word: what.trim().to_owned(),
        start,
        end: None,
        emergency: false,
        updated: None,
    }))
}

#[cfg(test)]
mod tests;
