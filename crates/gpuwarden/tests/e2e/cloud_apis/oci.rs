//! OCI: the maintenance events of a compartment, with the API key of a user.

use std::collections::BTreeMap;
use std::path::Path;

use clouds::loopback::{Asked, Reply, private_key};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Cloud, Story};

/// OCI, as it is now.
#[derive(Default)]
struct Oci {
    /// Maintenance event of each instance that has one, also of one that is over.
    events: BTreeMap<String, Value>,
}

// === impl Oci ===

impl Cloud for Oci {
    const NAME: &'static str = "oci";
    const KEYS: &'static str =
        "compartmentId = 'ocid1.compartment.oc1..c'\npollingIntervalSeconds = 30";
    const SOURCES: &'static [&'static str] = &[clouds::oci::SOURCE];

    fn provider_id(instance: &str) -> String {
        format!("ocid1.instance.oc1..{instance}")
    }

    fn credentials(_url: &str, files: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
        let (config, key) = (files.join("config"), files.join("key.pem"));
        std::fs::write(&key, private_key())?;
        let key = key.display();
        let text = format!("[DEFAULT]\ntenancy=t\nuser=u\nfingerprint=20:3b\nkey_file={key}\n");
        std::fs::write(&config, text)?;
        Ok(vec![("OCI_CONFIG_FILE", config.display().to_string())])
    }

    fn announces(&mut self, instance: &str, word: &str, begin: Timestamp) {
        self.says(instance, "SCHEDULED", word, begin);
    }

    fn answer(&self, asked: &Asked) -> Reply {
        let path = "/20160918/instanceMaintenanceEvents?compartmentId=ocid1.compartment.oc1..c&";
        let signature = asked.header("authorization");
        if !signature.contains("keyId=\"t/u/20:3b\"") {
            return Reply::new(401, "not signed");
        }
        if !asked.target.starts_with(path) {
            return Reply::new(404, "no such compartment");
        }
        let events: Vec<&Value> = self.events.values().collect();
        Reply::new(200, json!(events).to_string())
    }
}

impl Oci {
    /// Announces the maintenance of an instance, or says that it is over.
    fn says(&mut self, instance: &str, category: &str, word: &str, begin: Timestamp) {
        let mut event = json!({
            "id": format!("ocid1.instancemaintenanceevent.oc1..{instance}"),
            "instanceId": Self::provider_id(instance),
            "maintenanceCategory": category,
            "instanceAction": "REBOOT_MIGRATION",
            "lifecycleState": word,
            "timeWindowStart": begin.to_string(),
            "startWindowDuration": "PT30M",
        });
        if word == "SUCCEEDED" {
            event["timeFinished"] = json!(Timestamp::now().to_string());
        }
        self.events.insert(instance.to_owned(), event);
    }
}

#[tokio::test]
async fn a_node_leaves_before_a_maintenance_that_oci_announces_and_returns_after_it()
-> anyhow::Result<()> {
    let Some(mut story) = Story::new(Oci::default()).await? else {
        return Ok(());
    };
    story
        .begins_and_ends(["SCHEDULED", "STARTED", "SUCCEEDED"])
        .await?;

    let begin = Timestamp::now() + SignedDuration::from_secs(30);
    story.cloud().announces("i-1", "SCHEDULED", begin);
    story.goes_out(1, "QUARANTINE_TRIGGERED").await?;
    story.cloud().announces("i-1", "CANCELED", begin);
    story.returns(1, "CANCELLED").await?;
    story.was_out_at_once(1).await?;

    let begin = Timestamp::now() + SignedDuration::from_hours(2);
    (story.cloud()).says("i-2", "EMERGENCY", "SCHEDULED", begin);
    story.goes_out(2, "QUARANTINE_TRIGGERED").await?;
    (story.cloud()).says("i-2", "EMERGENCY", "SUCCEEDED", begin);
    story.returns(2, "HEALTHY_TRIGGERED").await?;
    story.was_out_at_once(2).await
}
