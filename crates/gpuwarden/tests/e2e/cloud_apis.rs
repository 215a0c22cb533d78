//! Maintenance that only the API of a cloud announces: from the notice to the node's return, with a product that is
//! killed after every step, and an API that fails in between. The test plays AWS; the client's own tests check
//! signatures and pages.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Version};

use crate::group::Group;
use crate::notices::{are, was_out_once};
use crate::support::SOON;

/// AWS, as it is now.
#[derive(Default)]
struct State {
    /// Events of Health, each with its entity.
    events: Vec<(Value, Value)>,
    /// Scheduled events of EC2, in XML.
    instances: String,
    /// True while every request fails.
    is_down: bool,
}

/// AWS on loopback.
#[derive(Clone, Default)]
struct Aws(Arc<Mutex<State>>);

impl Aws {
    /// Serves the APIs, and returns their URL.
    async fn serve(&self) -> anyhow::Result<String> {
        let aws = self.clone();
        let answer =
            move |headers: HeaderMap, body: String| async move { aws.answer(&headers, &body) };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        Ok(url)
    }

    fn answer(&self, headers: &HeaderMap, body: &str) -> (StatusCode, String) {
        let state = self.0.lock().unwrap();
        if state.is_down {
            return (
                StatusCode::SERVICE_UNAVAILABLE,
                "down for the test".to_owned(),
            );
        }
        let Some(target) = headers.get("x-amz-target") else {
            return (StatusCode::OK, instance_status(&state.instances));
        };
        let target = target.to_str().unwrap();
        let request: Value = serde_json::from_str(body).unwrap();
        let answer = match target.rsplit('.').next().unwrap() {
            "DescribeEvents" => {
                let filter = &request["filter"];
                let statuses = filter["eventStatusCodes"].as_array().unwrap();
                let from = filter["lastUpdatedTimes"][0]["from"]
                    .as_i64()
                    .unwrap_or_default();
                let events = state.events.iter().map(|(event, _)| event);
                let events = events.filter(|event| {
                    statuses.contains(&event["statusCode"])
                        && event["lastUpdatedTime"].as_i64() >= Some(from)
                });
                json!({"events": events.collect::<Vec<_>>()})
            }
            "DescribeEventDetails" => json!({"successfulSet": [], "failedSet": []}),
            _ => {
                let entities = state.events.iter().map(|(_, entity)| entity);
                json!({"entities": entities.collect::<Vec<_>>()})
            }
        };
        (StatusCode::OK, answer.to_string())
    }

    /// Announces the maintenance of an instance by Health.
    fn tells(&self, instance: &str, status: &str, start: SignedDuration) {
        let (now, arn) = (
            Timestamp::now(),
            format!("arn:aws:health:::event/{instance}"),
        );
        let event = json!({
            "arn": arn, "eventTypeCode": "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED", "statusCode": status,
            "startTime": (now + start).as_second(), "lastUpdatedTime": now.as_second(),
        });
        let entity = json!({
            "entityArn": format!("{arn}/entity"), "eventArn": arn, "entityValue": instance,
        });
        self.0.lock().unwrap().events = vec![(event, entity)];
    }

    /// Announces the maintenance of an instance by EC2, within a minute.
    fn schedules(&self, instance: &str, description: &str) {
        let start = Timestamp::now() + SignedDuration::from_secs(30);
        self.0.lock().unwrap().instances = format!(
            "<item><instanceId>{instance}</instanceId><eventsSet><item><instanceEventId>e-1</instanceEventId>\
             <code>system-reboot</code><description>{description}</description><notBefore>{start}</notBefore>\
             </item></eventsSet></item>"
        );
    }

    fn is_down(&self, is_down: bool) {
        self.0.lock().unwrap().is_down = is_down;
    }
}

fn instance_status(items: &str) -> String {
    format!(
        "<DescribeInstanceStatusResponse><instanceStatusSet>{items}</instanceStatusSet>\
         </DescribeInstanceStatusResponse>"
    )
}

/// Waits until both APIs are in this state.
async fn until_apis(group: &Group, state: &str) -> anyhow::Result<()> {
    let are = || async {
        let status = group.shown(&["status"]).await?;
        let sources = status["sources"].as_array().into_iter().flatten();
        let apis = sources.filter(|source| {
            source["name"]
                .as_str()
                .is_some_and(|name| name.starts_with("aws-"))
        });
        let states: Vec<&Value> = apis.map(|api| &api["state"]).collect();
        anyhow::ensure!(states == [state, state], "{}", status["sources"]);
        Ok(())
    };
    (group.product)
        .wait_for(&format!("the APIs to be {state}"), SOON, are)
        .await
}

/// Announces a maintenance by Health, which begins and ends; the end is told while the API fails.
async fn begins_and_ends(group: &mut Group, aws: &Aws, node: &str) -> anyhow::Result<()> {
    let out = [node.to_owned()];
    aws.tells("i-1", "upcoming", SignedDuration::from_hours(2));
    group.kill().await?;
    are(group, node, &["DETECTED"]).await?;
    group.until_out(&[]).await?;
    aws.tells("i-1", "upcoming", SignedDuration::from_secs(3));
    group.kill().await?;
    group.until_out(&out).await?;
    are(group, node, &["QUARANTINE_TRIGGERED"]).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    aws.tells("i-1", "open", SignedDuration::ZERO);
    group.kill().await?;
    are(group, node, &["MAINTENANCE_ONGOING"]).await?;

    aws.is_down(true);
    aws.tells("i-1", "closed", SignedDuration::from_secs(-1));
    group.kill().await?;
    until_apis(group, "failing").await?;
    are(group, node, &["MAINTENANCE_ONGOING"]).await?;
    group.until_out(&out).await?;
    aws.is_down(false);
    group.kill().await?;
    until_apis(group, "following").await?;
    are(group, node, &["HEALTHY_TRIGGERED"]).await?;
    group.until_out(&[]).await?;
    group.kill().await?;
    are(group, node, &["HEALTHY_TRIGGERED"]).await?;
    // The event that is open has another begin, which is reported.
    was_out_once(group, node, &["announced", "fatal", "fatal", "over"]).await
}

/// Announces a maintenance by EC2, and cancels it.
async fn is_cancelled(group: &mut Group, aws: &Aws, node: &str) -> anyhow::Result<()> {
    aws.schedules("i-2", "scheduled reboot");
    group.kill().await?;
    group.until_out(&[node.to_owned()]).await?;
    aws.schedules("i-2", "[Canceled] scheduled reboot");
    group.kill().await?;
    are(group, node, &["CANCELLED"]).await?;
    group.until_out(&[]).await?;
    group.kill().await?;
    are(group, node, &["CANCELLED"]).await?;
    was_out_once(group, node, &["fatal", "over"]).await
}

#[tokio::test]
async fn a_node_leaves_before_a_maintenance_that_aws_announces_and_returns_after_it()
-> anyhow::Result<()> {
    // A control plane of its own: the product takes all nodes for instances.
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let aws = Aws::default();
    let url = aws.serve().await?;
    let file = tempfile::NamedTempFile::new()?;
    let config = format!(
        "{}\n[aws]\nenabled = true\nregion = 'eu-west-1'\npollingIntervalSeconds = 30\nendpointOverride = '{url}'\n",
        crate::notices::CONFIG
    );
    std::fs::write(file.path(), config)?;
    let arrange = |launch: Launch| {
        let launch = launch.quarantine().option("--maintenance", file.path());
        launch
            .env("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
            .env("AWS_SECRET_ACCESS_KEY", "none")
    };
    let mut group = Group::new(&plane, 2, |_, node| node, arrange).await?;
    let [first, second] = [0, 1].map(|number| group.names[number].clone());
    for (node, instance) in [(&first, "i-1"), (&second, "i-2")] {
        let provider = json!({"spec": {"providerID": format!("aws:///eu-west-1a/{instance}")}});
        group
            .nodes
            .patch(node, &PatchParams::default(), &Patch::Merge(provider))
            .await?;
    }
    begins_and_ends(&mut group, &aws, &first).await?;
    is_cancelled(&mut group, &aws, &second).await
}
