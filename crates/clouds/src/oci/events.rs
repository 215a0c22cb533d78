//! Pages of OCI's list of maintenance events of instances.
//!
//! Form and words: `InstanceMaintenanceEventSummary` of
//! <https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/InstanceMaintenanceEvent/>.

use jiff::{Span, SpanRelativeTo, Timestamp};
use notices::{Kind, Notice, Phase};
use serde::Deserialize;
use serde_json::Value;

use crate::{Announced, Instance};

/// A page of events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Notices, one for each event that touches its instance.
    pub announced: Vec<Announced>,
    /// Instances with an event that cannot be understood.
    pub unseen: Vec<Instance>,
    /// Number of events that cannot be understood.
    pub odd: u64,
    /// True if an event does not even tell its instance.
    pub partial: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    id: String,
    instance_id: String,
    #[serde(default)]
    maintenance_category: String,
    #[serde(default)]
    instance_action: String,
    lifecycle_state: String,
    time_window_start: Option<String>,
    start_window_duration: Option<String>,
    estimated_duration: Option<String>,
    time_started: Option<String>,
    time_finished: Option<String>,
}

// === impl Events ===

impl Events {
    /// Parses a page. Fails if the page itself is not of the documented form.
    pub fn parse(body: &[u8]) -> Result<Self, serde_json::Error> {
        let page: Vec<Value> = serde_json::from_slice(body)?;
        let mut events = Self::default();
        for event in &page {
            events.take(event);
        }
        Ok(events)
    }

    fn take(&mut self, value: &Value) {
        let Some(ocid) = value["instanceId"].as_str().filter(|id| !id.is_empty()) else {
            self.odd += 1;
            self.partial = true;
            return;
        };
        let instance = Instance::oci(ocid);
        let event = Event::deserialize(value).ok();
        // The action NONE leaves the instance alone.
        if event
            .as_ref()
            .is_some_and(|event| event.instance_action == "NONE")
        {
            return;
        }
        if let Some(notice) = event.and_then(Event::notice) {
            self.announced.push(Announced { instance, notice });
        } else {
            self.unseen.push(instance);
            self.odd += 1;
        }
    }
}

// === impl Event ===

impl Event {
    /// Returns the notice; `None` if the begin of a maintenance that has not begun cannot be
    /// understood: without its begin, it would take the node out at once.
    fn notice(self) -> Option<Notice> {
        let phase = match self.lifecycle_state.as_str() {
            "STARTED" | "PROCESSING" => Phase::Ongoing,
            // A maintenance that has failed is over too; OCI announces another one.
            "SUCCEEDED" | "FAILED" => Phase::Completed,
            "CANCELED" | "CANCELLED" => Phase::Cancelled,
            _ => Phase::Scheduled,
        };
        let kind = match self.instance_action.as_str() {
            "TERMINATE" | "STOP" => Kind::Stop,
            _ => Kind::Reboot,
        };
        let start = time(
            self.time_started
                .as_deref()
                .or(self.time_window_start.as_deref()),
        );
        if start.is_err() && phase == Phase::Scheduled {
            return None;
        }
        let end = time(self.time_finished.as_deref()).unwrap_or_default();
        Some(Notice {
            node: String::new(),
            provider: "oci".to_owned(),
            resource: ("oci_instance".to_owned(), self.instance_id.clone()),
            kind,
            phase,
            start: start.unwrap_or_default(),
            end: end.or_else(|| self.latest_end()),
            emergency: self.maintenance_category == "EMERGENCY",
            updated: None,
            event: self.id,
            word: self.lifecycle_state,
        })
    }

    /// Returns the end of a maintenance that begins at the end of its window; `None` if the event
    /// does not tell it.
    fn latest_end(&self) -> Option<Timestamp> {
        let begin = time(self.time_window_start.as_deref()).ok()??;
        let lasts = |text: Option<&str>| {
            let span: Span = text?.parse().ok()?;
            span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()
        };
        let window = lasts(self.start_window_duration.as_deref())?;
        let work = lasts(self.estimated_duration.as_deref()).unwrap_or_default();
        begin.checked_add(window).ok()?.checked_add(work).ok()
    }
}

/// Parses a time (RFC 3339), which may be absent.
fn time(text: Option<&str>) -> Result<Option<Timestamp>, jiff::Error> {
    let text = text.filter(|text| !text.is_empty());
    text.map(str::parse).transpose()
}

#[cfg(test)]
mod tests;
