//! GCP: the instances of Compute with their upcoming maintenance, and the log, with the key of a service account.

use std::collections::BTreeMap;
use std::path::Path;

use clouds::loopback::{Asked, Reply, private_key};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Cloud, INSTANCES, Story};
use crate::support::reboot;

/// GCP, as it is now.
#[derive(Default)]
struct Gcp {
    /// Maintenance of each instance that has one.
    upcoming: BTreeMap<String, Value>,
    /// Entries of the log.
    log: Vec<Value>,
}

// === impl Gcp ===

impl Cloud for Gcp {
    const NAME: &'static str = "gcp";
    const KEYS: &'static str = "targetProjectId = 'p'\napiPollingIntervalSeconds = 30";
    const SOURCES: &'static [&'static str] = &clouds::gcp::SOURCES;

    fn provider_id(instance: &str) -> String {
        format!("gce://p/z/{instance}")
    }

    fn credentials(url: &str, files: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
        let path = files.join("credentials.json");
        let account = json!({
            "type": "service_account", "client_email": "a@p.iam.gserviceaccount.com",
            "private_key": private_key(), "private_key_id": "k", "token_uri": format!("{url}/token"),
        });
        std::fs::write(&path, account.to_string())?;
        let path = path.display().to_string();
        Ok(vec![("GOOGLE_APPLICATION_CREDENTIALS", path)])
    }

    fn announces(&mut self, instance: &str, word: &str, begin: Timestamp) {
        self.says(instance, "SCHEDULED", word, begin);
    }

    fn answer(&self, asked: &Asked) -> Reply {
        if asked.target == "/token" {
            let token = json!({"access_token": "t", "expires_in": 3600});
            return Reply::new(200, token.to_string());
        }
        if asked.header("authorization") != "Bearer t" {
            return Reply::new(401, "no token");
        }
        let answer = if asked.target == "/v2/entries:list" {
            json!({"entries": self.entries(asked)})
        } else {
            json!({"items": {"zones/z": {"instances": self.instances()}}})
        };
        Reply::new(200, answer.to_string())
    }
}

impl Gcp {
    /// Announces the maintenance of an instance, or says that it is over: by the list, which has what is to come or
    /// goes on, and by the log.
    fn says(&mut self, instance: &str, kind: &str, word: &str, begin: Timestamp) {
        let end = begin + SignedDuration::from_hours(1);
        let maintenance = json!({
            "type": kind, "maintenanceStatus": word,
            "windowStartTime": begin.to_string(), "windowEndTime": end.to_string(),
        });
        self.log.push(json!({
            "timestamp": Timestamp::now().to_string(),
            "resource": {
                "type": "gce_instance",
                "labels": {"instance_id": number(instance), "project_id": "p", "zone": "z"},
            },
            "protoPayload": {
                "methodName": "compute.instances.upcomingMaintenance",
                "resourceName": format!("projects/p/zones/z/instances/{instance}"),
                "metadata": maintenance,
            },
        }));
        if ["PENDING", "ONGOING"].contains(&word) {
            self.upcoming.insert(instance.to_owned(), maintenance);
        } else {
            self.upcoming.remove(instance);
        }
    }

    /// Returns all instances, as the list has them.
    fn instances(&self) -> Vec<Value> {
        let instances = INSTANCES.iter().map(|name| {
            let mut instance = json!({
                "id": number(name),
                "selfLink": format!("https://x/compute/v1/projects/p/zones/z/instances/{name}"),
                "scheduling": {"onHostMaintenance": "TERMINATE"},
            });
            if let Some(maintenance) = self.upcoming.get(*name) {
                instance["resourceStatus"] = json!({"upcomingMaintenance": maintenance});
            }
            instance
        });
        instances.collect()
    }

    /// Returns the entries of the time that the filter of a request names.
    fn entries(&self, asked: &Asked) -> Vec<&Value> {
        let request: Value = serde_json::from_str(asked.text()).unwrap();
        let filter = request["filter"].as_str().unwrap();
        let time = |start: &str| -> Timestamp {
            let (_, rest) = filter.split_once(start).unwrap();
            rest.split_once('"').unwrap().0.parse().unwrap()
        };
        let (from, to) = (time("timestamp > \""), time("timestamp <= \""));
        let entries = self.log.iter().filter(|entry| {
            let at: Timestamp = entry["timestamp"].as_str().unwrap().parse().unwrap();
            from < at && at <= to
        });
        entries.collect()
    }
}

/// Returns the number of an instance, which is not in its name.
fn number(instance: &str) -> String {
    instance.replace("i-", "70")
}

#[tokio::test]
async fn a_node_leaves_before_a_maintenance_that_gcp_announces_and_returns_after_it()
-> anyhow::Result<()> {
    let Some(mut story) = Story::new(Gcp::default()).await? else {
        return Ok(());
    };
    story
        .begins_and_ends(["PENDING", "ONGOING", "COMPLETED"])
        .await?;

    let begin = Timestamp::now() + SignedDuration::from_secs(30);
    story.cloud().announces("i-1", "PENDING", begin);
    story.goes_out(1, "QUARANTINE_TRIGGERED").await?;
    story.cloud().announces("i-1", "CANCELLED", begin);
    story.returns(1, "CANCELLED").await?;
    story.was_out_at_once(1).await?;

    let begin = Timestamp::now() + SignedDuration::from_hours(2);
    reboot(&story.group.nodes, &story.group.names[2]).await?;
    (story.cloud()).says("i-2", "UNSCHEDULED", "PENDING", begin);
    story.goes_out(2, "QUARANTINE_TRIGGERED").await?;
    (story.cloud()).says("i-2", "UNSCHEDULED", "ONGOING", begin);
    story.goes_out(2, "MAINTENANCE_ONGOING").await?;
    // The list has it no longer, and no entry says that it is over: the reboot does.
    reboot(&story.group.nodes, &story.group.names[2]).await?;
    story.cloud().upcoming.clear();
    story.returns(2, "HEALTHY_TRIGGERED").await?;
    story.was_out_at_once(2).await
}
