//! AWS: scheduled events of EC2 by `IMDSv2`, and the history with those that are over.

use clouds::loopback::{Asked, Reply};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Machine, Service};

const TOKEN: &str = "token-1";

/// AWS, as it is now.
#[derive(Default)]
struct Aws {
    /// Events that are to come.
    scheduled: Vec<Value>,
    /// Events that are over.
    history: Vec<Value>,
}

// === impl Aws ===

impl Service for Aws {
    const NAME: &'static str = "aws";

    fn answer(&mut self, asked: &Asked) -> Reply {
        if asked.method == "PUT" && asked.target == "/latest/api/token" {
            return Reply::new(200, TOKEN);
        }
        if asked.header("x-aws-ec2-metadata-token") != TOKEN {
            return Reply::new(401, "no token");
        }
        let events = match asked.target.as_str() {
            "/latest/meta-data/instance-id" => return Reply::new(200, "i-0abc"),
            "/latest/meta-data/events/maintenance/scheduled" => &self.scheduled,
            "/latest/meta-data/events/maintenance/history" => &self.history,
            _ => return Reply::new(404, "not found"),
        };
        Reply::new(200, json!(events).to_string())
    }
}

impl Aws {
    /// Announces an event, which is the only one.
    fn schedules(&mut self, id: &str, within: SignedDuration) {
        let begin = Timestamp::now() + within;
        let date = |at: Timestamp| at.strftime("%d %b %Y %H:%M:%S GMT").to_string();
        self.scheduled = vec![json!({
            "EventId": id, "Code": "system-reboot", "Description": "scheduled reboot", "State": "active",
            "NotBefore": date(begin), "NotAfter": date(begin + SignedDuration::from_hours(2)),
        })];
    }

    /// Ends the event in this state.
    fn ends(&mut self, state: &str) {
        for mut event in self.scheduled.drain(..) {
            event["State"] = json!(state);
            self.history.push(event);
        }
    }
}

#[tokio::test]
async fn a_machine_in_aws_leaves_before_its_event_and_returns_after_it() -> anyhow::Result<()> {
    let Some(mut machine) = Machine::new(Aws::default()).await? else {
        return Ok(());
    };
    let (hours, minutes) = (SignedDuration::from_hours(2), SignedDuration::from_mins(4));
    machine.service().schedules("e-1", hours);
    machine.until("DETECTED", false).await?;
    machine.service().schedules("e-1", minutes);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.controller.restart().await?;
    machine.goes_down().await?;
    machine.service().ends("completed");
    // A boot alone is no end, while nobody says how the event is.
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.comes_up()?;
    machine.until("HEALTHY_TRIGGERED", false).await?;

    // One that is called off, which stays in the history.
    machine.service().schedules("e-2", minutes);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.service().ends("canceled");
    machine.until("CANCELLED", false).await?;
    machine.controller.restart().await?;
    machine.until("CANCELLED", false).await
}
