//! GCP: the upcoming maintenance of an instance, and the event that is imminent.

use clouds::loopback::{Asked, Reply};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Machine, Service};

/// GCP, as it is now.
#[derive(Default)]
struct Gcp {
    upcoming: Option<Value>,
    /// True once the machine is about to end.
    is_imminent: bool,
}

// === impl Gcp ===

impl Service for Gcp {
    const NAME: &'static str = "gcp";

    fn answer(&mut self, asked: &Asked) -> Reply {
        if asked.header("metadata-flavor") != "Google" {
            return Reply::new(403, "no header Metadata-Flavor");
        }
        let path = asked.target.strip_prefix("/computeMetadata/v1/instance/");
        match (path.unwrap_or_default(), &self.upcoming) {
            ("id", _) => Reply::new(200, "4711"),
            ("maintenance-event", _) if self.is_imminent => {
                Reply::new(200, "TERMINATE_ON_HOST_MAINTENANCE")
            }
            ("maintenance-event", _) => Reply::new(200, "NONE"),
            ("upcoming-maintenance?alt=json", Some(upcoming)) => {
                Reply::new(200, upcoming.to_string())
            }
            ("upcoming-maintenance?alt=json", None) => {
                let none =
                    r#"{"error": "no notifications have been received yet, try again later"}"#;
                Reply::new(503, none)
            }
            _ => Reply::new(404, "not found"),
        }
    }
}

impl Gcp {
    /// Announces a maintenance.
    fn announces(&mut self, kind: &str, status: &str, within: SignedDuration) {
        let begin = Timestamp::now() + within;
        let end = begin + SignedDuration::from_hours(4);
        self.upcoming = Some(json!({
            "can_reschedule": "false", "maintenance_status": status, "type": kind,
            "window_start_time": begin.to_string(), "window_end_time": end.to_string(),
        }));
    }
}

#[tokio::test]
async fn a_machine_in_gcp_leaves_before_its_maintenance_and_returns_after_it() -> anyhow::Result<()>
{
    let Some(mut machine) = Machine::new(Gcp::default()).await? else {
        return Ok(());
    };
    let (hours, minutes) = (SignedDuration::from_hours(2), SignedDuration::from_mins(4));
    (machine.service()).announces("SCHEDULED", "PENDING", hours);
    machine.until("DETECTED", false).await?;
    (machine.service()).announces("SCHEDULED", "PENDING", minutes);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.controller.restart().await?;
    machine.service().is_imminent = true;
    machine.until("MAINTENANCE_ONGOING", true).await?;
    machine.goes_down().await?;
    *machine.service() = Gcp::default();
    machine.until("MAINTENANCE_ONGOING", true).await?;
    machine.comes_up()?;
    // The agent may have told this process already that there is no maintenance.
    machine.controller.restart().await?;
    machine.until("HEALTHY_TRIGGERED", false).await?;

    // An emergency waits for no time. This one is called off.
    (machine.service()).announces("UNSCHEDULED", "PENDING", hours);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    *machine.service() = Gcp::default();
    machine.until("CANCELLED", false).await?;
    machine.controller.restart().await?;
    machine.until("CANCELLED", false).await
}
