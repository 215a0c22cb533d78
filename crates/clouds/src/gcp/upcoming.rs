//! An announced maintenance, in the form that GCP's log and its Compute API share: `UpcomingMaintenance` of
//! <https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances>.

use notices::words::Upcoming;
use notices::{Kind, Notice, Phase};

/// Type of the resource of all notices: the monitored resource of the log.
pub(super) const RESOURCE: &str = "gce_instance";

/// Returns the notice of a maintenance. `number` is the id of the instance, `word` the status for people where
/// the API has none. Returns `None` if the begin of a maintenance that has not begun cannot be understood.
pub(super) fn notice(
    upcoming: Upcoming,
    phase: Phase,
    word: &str,
    kind: Kind,
    number: &str,
) -> Option<Notice> {
    let start = upcoming.start();
    if start.is_err() && phase == Phase::Scheduled {
        return None;
    }
    let (end, emergency) = (upcoming.end(), upcoming.is_emergency());
    let status = Some(upcoming.maintenance_status).filter(|status| !status.is_empty());
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
        end,
        emergency,
        updated: None,
    })
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
