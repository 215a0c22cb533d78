//! Azure: an event that the machine acknowledges begins before its time.

use clouds::loopback::{Asked, Reply};
use jiff::fmt::rfc2822;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use kube::api::DeleteParams;
use serde_json::{Value, json};
use testkit::wait_for;

use super::{Machine, Service};
use crate::support::SOON;

/// Name of the machine in Azure.
const VM: &str = "gpu_7";

/// Azure, as it is now.
#[derive(Default)]
struct Azure {
    /// Event of the machine: its id, status and begin.
    event: Option<(String, String, Timestamp)>,
    /// Events that were told to begin.
    begun: Vec<String>,
}

// === impl Azure ===

impl Service for Azure {
    const NAME: &'static str = "azure";

    fn answer(&mut self, asked: &Asked) -> Reply {
        if asked.header("metadata") != "true" {
            return Reply::new(400, "no header Metadata");
        }
        if asked.target.starts_with("/metadata/instance/compute?") {
            return Reply::new(200, json!({"name": VM}).to_string());
        }
        if asked.method == "POST" {
            let request: Value = serde_json::from_str(asked.text()).unwrap();
            let event = request["StartRequests"][0]["EventId"].as_str().unwrap();
            self.begun.push(event.to_owned());
            return Reply::new(200, "");
        }
        let events = self.event.iter().map(|(id, status, start)| {
            json!({
                "EventId": id, "EventType": "Redeploy", "ResourceType": "VirtualMachine",
                "Resources": [VM], "EventStatus": status, "EventSource": "Platform",
                "NotBefore": rfc2822::to_string(&start.to_zoned(TimeZone::UTC)).unwrap(),
                "Description": "Host maintenance", "DurationInSeconds": 600,
            })
        });
        let events: Vec<Value> = events.collect();
        Reply::new(
            200,
            json!({"DocumentIncarnation": 1, "Events": events}).to_string(),
        )
    }
}

impl Azure {
    fn announces(&mut self, id: &str, status: &str, within: SignedDuration) {
        self.event = Some((id.to_owned(), status.to_owned(), Timestamp::now() + within));
    }
}

#[tokio::test]
async fn azure_begins_once_the_node_is_drained_and_the_node_returns() -> anyhow::Result<()> {
    let Some(mut machine) = Machine::new(Azure::default()).await? else {
        return Ok(());
    };
    // A job that has to end before the node is drained.
    let pod = testkit::pod("default", "job").on(&machine.node);
    pod.create(&machine.pods.clone().into_client()).await?;

    let (hours, minutes) = (SignedDuration::from_hours(2), SignedDuration::from_mins(4));
    machine.service().announces("A", "Scheduled", hours);
    machine.until("DETECTED", false).await?;
    machine.service().announces("A", "Scheduled", minutes);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.controller.restart().await?;
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    assert_eq!(machine.service().begun, [""; 0]);
    let now = DeleteParams::default().grace_period(0);
    machine.pods.delete("job", &now).await?;
    wait_for("the word to begin", SOON * 2, || async {
        match machine.service().begun.as_slice() {
            [one] if one == "A" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;

    (machine.service()).announces("A", "Started", SignedDuration::ZERO);
    machine.until("MAINTENANCE_ONGOING", true).await?;
    machine.goes_down().await?;
    machine.service().event = None;
    machine.until("MAINTENANCE_ONGOING", true).await?;
    machine.comes_up()?;
    machine.until("HEALTHY_TRIGGERED", false).await?;

    // One that is called off.
    machine.service().announces("B", "Scheduled", minutes);
    machine.until("QUARANTINE_TRIGGERED", true).await?;
    machine.service().event = None;
    machine.until("CANCELLED", false).await?;
    assert_eq!(machine.service().begun[0], "A");
    Ok(())
}
