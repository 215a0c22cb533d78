//! An announced maintenance, in the form that GCP's log and its Compute API share.
//!
//! Fields and words: `UpcomingMaintenance` of
//! <https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances>, and
//! <https://docs.cloud.google.com/compute/docs/instances/monitor-plan-host-maintenance-event>.

use jiff::Timestamp;
use notices::words::gcp_phase;
use notices::{Kind, Notice, Phase};
use serde::Deserialize;

/// Type of the resource of all notices: the monitored resource of the log.
pub(super) const RESOURCE: &str = "gce_instance";

/// Fields of a maintenance.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Upcoming {
    /// Status: `PENDING`, `ONGOING`, in the log also `COMPLETED` and `CANCELLED`.
    pub(super) maintenance_status: String,
    /// `SCHEDULED`, or `UNSCHEDULED` for an emergency.
    #[serde(rename = "type")]
    kind: String,
    window_start_time: Option<String>,
    window_end_time: Option<String>,
}

// === impl Upcoming ===

impl Upcoming {
    /// Returns the phase that the status means; `None` if it is absent, or a word that is not
    /// known.
    pub(super) fn phase(&self) -> Option<Phase> {
        gcp_phase(&self.maintenance_status)
    }

    /// Returns the notice. `number` is the id of the instance, `word` the status for people where
    /// the API has none. Returns `None` if the begin of a maintenance that has not begun cannot be
    /// understood: without its begin, it would take the node out at once.
    pub(super) fn notice(
        self,
        phase: Phase,
        word: &str,
        kind: Kind,
        number: &str,
    ) -> Option<Notice> {
        let start = time(self.window_start_time.as_deref());
        if start.is_err() && phase == Phase::Scheduled {
            return None;
        }
        let status = Some(self.maintenance_status).filter(|status| !status.is_empty());
        Some(Notice {
            node: String::new(),
            // GCP has no id; there is at most one maintenance of an instance at a time.
            event: String::new(),
            provider: "gcp".to_owned(),
            resource: (RESOURCE.to_owned(), number.to_owned()),
            kind,
            phase,
            word: status.unwrap_or_else(|| word.to_owned()),
            start: start.unwrap_or_default(),
            end: time(self.window_end_time.as_deref()).unwrap_or_default(),
            emergency: self.kind == "UNSCHEDULED",
            updated: None,
        })
    }
}

/// Parses a time (RFC 3339), which may be absent.
fn time(text: Option<&str>) -> Result<Option<Timestamp>, jiff::Error> {
    let text = text.filter(|text| !text.is_empty());
    text.map(str::parse).transpose()
}

/// Returns project, zone and name of the path of an instance, which may be that of a URL:
/// `.../projects/P/zones/Z/instances/N`.
pub(super) fn parts_of(path: &str) -> Option<(&str, &str, &str)> {
    let mut parts = path.rsplit('/');
    let mut next = || parts.next().filter(|part| !part.is_empty());
    let (name, instances) = (next()?, next()?);
    let (zone, zones) = (next()?, next()?);
    let (project, projects) = (next()?, next()?);
    let is_path = (projects, zones, instances) == ("projects", "zones", "instances");
    is_path.then_some((project, zone, name))
}
