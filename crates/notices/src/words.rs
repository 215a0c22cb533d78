//! Words of the providers that more than one source tells: the Node object, the metadata service of
//! the machine, the API.

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use serde::Deserialize;

use crate::notice::{Kind, Phase};

/// A maintenance as GCP's metadata server and its API have it.
///
/// <https://cloud.google.com/compute/docs/instances/monitor-plan-host-maintenance-event>
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Upcoming {
    /// Status; empty without a maintenance.
    #[serde(alias = "maintenanceStatus")]
    pub maintenance_status: String,
    /// `SCHEDULED` or `UNSCHEDULED`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Begin of the window, as RFC 3339.
    #[serde(alias = "windowStartTime")]
    pub window_start_time: String,
    /// End of the window, as RFC 3339.
    #[serde(alias = "windowEndTime")]
    pub window_end_time: String,
}

// === impl Upcoming ===

impl Upcoming {
    /// Returns the begin of the window; `None` if there is none. Fails if it is no time: without its begin, a
    /// maintenance that has not begun would take the node out at once.
    pub fn start(&self) -> Result<Option<Timestamp>, jiff::Error> {
        let text = Some(&self.window_start_time).filter(|text| !text.is_empty());
        text.map(|text| text.parse()).transpose()
    }

    /// Returns the end of the window, if it is a time.
    pub fn end(&self) -> Option<Timestamp> {
        self.window_end_time.parse().ok()
    }

    /// Returns true if GCP had no time to announce the maintenance.
    pub fn is_emergency(&self) -> bool {
        self.kind == "UNSCHEDULED"
    }
}

/// Returns the progress for a status of GCP; `None` for an unknown one.
pub fn gcp_phase(status: &str) -> Option<Phase> {
    Some(match status {
        "PENDING" => Phase::Scheduled,
        "ONGOING" | "ACTIVE" => Phase::Ongoing,
        "COMPLETED" => Phase::Completed,
        "CANCELLED" | "CANCELED" => Phase::Cancelled,
        _ => return None,
    })
}

/// Returns the effect of an event of Azure by its type; `None` for an unknown one.
///
/// <https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events>
pub fn azure_kind(event_type: &str) -> Option<Kind> {
    Some(match event_type {
        "Freeze" => Kind::Migration,
        "Reboot" => Kind::Reboot,
        "Redeploy" => Kind::Replacement,
        "Preempt" | "Terminate" => Kind::Stop,
        _ => return None,
    })
}

/// Returns the effect of a scheduled event of EC2 by its code and description; an unknown one counts
/// as a reboot.
///
/// <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-instances-status-check_sched.html>
pub fn ec2_kind(code: &str, description: &str) -> Kind {
    match code {
        "instance-stop" => Kind::Stop,
        // The hardware below it has failed, or will.
        "instance-retirement" => Kind::Replacement,
        "system-maintenance" if description.to_lowercase().contains("network") => Kind::Network,
        _ => Kind::Reboot,
    }
}

/// Returns the time of an HTTP date, such as `Mon, 02 Mar 2026 19:01:45 GMT`, with or without the
/// day of the week.
pub fn http_date(text: &str) -> Option<Timestamp> {
    Some(rfc2822::parse(text.trim()).ok()?.timestamp())
}
