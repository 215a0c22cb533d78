//! AWS: the events of Health, and the scheduled events of EC2.

use std::collections::BTreeMap;
use std::path::Path;

use clouds::loopback::{Asked, Reply};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Cloud, Story};

/// AWS, as it is now.
#[derive(Default)]
struct Aws {
    /// Events of Health, each with its entity, by instance.
    events: BTreeMap<String, (Value, Value)>,
    /// Scheduled events of EC2, in XML.
    instances: String,
}

// === impl Aws ===

impl Cloud for Aws {
    const NAME: &'static str = "aws";
    const KEYS: &'static str = "region = 'eu-west-1'\npollingIntervalSeconds = 30";
    const SOURCES: &'static [&'static str] = &clouds::aws::SOURCES;

    fn provider_id(instance: &str) -> String {
        format!("aws:///eu-west-1a/{instance}")
    }

    fn credentials(_url: &str, _files: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
        let pairs = [
            ("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE"),
            ("AWS_SECRET_ACCESS_KEY", "none"),
        ];
        Ok(pairs.map(|(name, value)| (name, value.to_owned())).into())
    }

    /// Announces a maintenance by Health.
    fn announces(&mut self, instance: &str, word: &str, begin: Timestamp) {
        let arn = format!("arn:aws:health:::event/{instance}");
        let event = json!({
            "arn": arn, "eventTypeCode": "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED", "statusCode": word,
            "startTime": begin.as_second(), "lastUpdatedTime": Timestamp::now().as_second(),
        });
        let entity = json!({
            "entityArn": format!("{arn}/entity"), "eventArn": arn, "entityValue": instance,
        });
        self.events.insert(instance.to_owned(), (event, entity));
    }

    fn answer(&self, asked: &Asked) -> Reply {
        let key = "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/";
        if !asked.header("authorization").starts_with(key) {
            return Reply::new(403, "not signed");
        }
        let target = asked.header("x-amz-target");
        if target.is_empty() {
            let instances = &self.instances;
            return Reply::new(
                200,
                format!(
                    "<DescribeInstanceStatusResponse><instanceStatusSet>{instances}</instanceStatusSet>\
                     </DescribeInstanceStatusResponse>"
                ),
            );
        }
        let request: Value = serde_json::from_str(asked.text()).unwrap();
        let answer = match target.rsplit('.').next().unwrap() {
            "DescribeEvents" => json!({"events": self.listed(&request["filter"])}),
            "DescribeEventDetails" => json!({"successfulSet": [], "failedSet": []}),
            _ => {
                let entities: Vec<&Value> = self.events.values().map(|(_, one)| one).collect();
                json!({"entities": entities})
            }
        };
        Reply::new(200, answer.to_string())
    }
}

impl Aws {
    /// Returns the events that a filter lets pass.
    fn listed(&self, filter: &Value) -> Vec<&Value> {
        let statuses = filter["eventStatusCodes"].as_array().unwrap();
        let from = filter["lastUpdatedTimes"][0]["from"].as_i64();
        let events = self.events.values().map(|(event, _)| event);
        let events = events.filter(|event| {
            statuses.contains(&event["statusCode"])
                && event["lastUpdatedTime"].as_i64() >= Some(from.unwrap_or_default())
        });
        events.collect()
    }

    /// Announces the maintenance of an instance by EC2, within a minute.
    fn schedules(&mut self, instance: &str, description: &str) {
        let start = Timestamp::now() + SignedDuration::from_secs(30);
        self.instances = format!(
            "<item><instanceId>{instance}</instanceId><eventsSet><item><instanceEventId>e-1</instanceEventId>\
             <code>system-reboot</code><description>{description}</description><notBefore>{start}</notBefore>\
             </item></eventsSet></item>"
        );
    }
}

#[tokio::test]
async fn a_node_leaves_before_a_maintenance_that_aws_announces_and_returns_after_it()
-> anyhow::Result<()> {
    let Some(mut story) = Story::new(Aws::default()).await? else {
        return Ok(());
    };
    story
        .begins_and_ends(["upcoming", "open", "closed"])
        .await?;

    story.cloud().schedules("i-1", "scheduled reboot");
    story.goes_out(1, "QUARANTINE_TRIGGERED").await?;
    (story.cloud()).schedules("i-1", "[Canceled] scheduled reboot");
    story.returns(1, "CANCELLED").await?;
    story.was_out_at_once(1).await?;

    // AWS has no word for an emergency: an event that nothing has announced is open.
    let begin = Timestamp::now();
    story.cloud().announces("i-2", "open", begin);
    story.goes_out(2, "MAINTENANCE_ONGOING").await?;
    story.cloud().announces("i-2", "closed", begin);
    story.returns(2, "HEALTHY_TRIGGERED").await?;
    story.was_out_at_once(2).await
}
