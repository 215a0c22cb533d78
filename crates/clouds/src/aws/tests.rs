//! The client of AWS against a fake of its services, which checks signatures.

mod fake;
mod moto;
mod vendor;

use notices::{Kind, Phase};
use serde_json::{Value, json};

use super::*;
use crate::loopback::Reply;
use crate::{Failure, Told};
use fake::{Fake, refusal};

/// Time of the polls, in seconds since 1970.
const NOW: i64 = 1_800_000_000;
const REBOOT: &str = "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED";

fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

/// Returns an event of this many instances, which begins in an hour.
fn event(number: usize, status: &str, instances: usize) -> Value {
    let arn = format!("arn:aws:health:eu-west-1::event/EC2/{REBOOT}/{number}");
    let entities = (0..instances).map(|at| {
        json!({
            "entityArn": format!("{arn}/{at}"), "eventArn": arn, "entityValue": format!("i-{number}-{at}"),
            "awsAccountId": "1", "statusCode": "PENDING", "lastUpdatedTime": NOW,
        })
    });
    json!({
        "arn": arn, "service": "EC2", "eventTypeCode": REBOOT, "eventTypeCategory": "scheduledChange",
        "region": "eu-west-1", "statusCode": status, "startTime": NOW + 3600, "endTime": NOW + 7200,
        "lastUpdatedTime": NOW - 1000, "text": "What do I need to do? Launch a new instance.",
        "entities": entities.collect::<Vec<_>>(),
    })
}

fn instance(number: usize) -> (String, String) {
    let event = "<item><instanceEventId>e</instanceEventId><code>system-reboot</code><description>d &amp; e\
                 </description><notBefore>2027-01-15T09:00:00.000Z</notBefore></item>";
    (format!("i-{number}"), event.to_owned())
}

/// Polls once; returns what Health and EC2 said.
async fn poll(aws: &mut Aws, since: &Since) -> [Result<Told, Failure>; 2] {
    let answers = aws.poll(since, now()).await;
    let sources: Vec<&str> = answers.iter().map(|answer| answer.source).collect();
    assert_eq!(sources, SOURCES);
    answers
        .into_iter()
        .map(|answer| answer.told)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

#[tokio::test]
async fn all_pages_of_both_apis_are_read_with_signed_requests() {
    let fake = Fake::start().await;
    {
        let mut state = fake.state();
        state.page = 4;
        state.events = (0..13).map(|number| event(number, "upcoming", 3)).collect();
        state.instances = (0..9).map(instance).collect();
        state
            .instances
            .push(("i-without".to_owned(), String::new()));
    }
    let [health, ec2] = poll(&mut fake.client(), &Since::new())
        .await
        .map(Result::unwrap);
    assert!(health.complete && ec2.complete);
    let mut ids: Vec<&str> = health
        .announced
        .iter()
        .map(|one| one.notice.event.as_str())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), ec2.announced.len()), (39, 9));
    let notice = &health.announced[0].notice;
    assert_eq!(
        (notice.kind, notice.phase),
        (Kind::Replacement, Phase::Scheduled)
    );
    // 13 events are 4 pages, and 2 batches of details; 30 and 9 entities are 8 and 3 pages.
    let operations = fake.operations();
    let count = |name: &str| operations.iter().filter(|one| *one == name).count();
    assert_eq!(
        [
            "DescribeEvents",
            "DescribeEventDetails",
            "DescribeAffectedEntities"
        ]
        .map(count),
        [4, 2, 11]
    );
    assert_eq!(count("DescribeInstanceStatus"), 3);
    assert_eq!(fake.state().fetched, 1, "credentials are kept");
}

#[tokio::test]
async fn what_was_closed_since_the_last_success_is_told_and_what_is_open_always() {
    let fake = Fake::start().await;
    fake.state().events = vec![
        event(0, "open", 1),
        event(1, "closed", 1),
        event(2, "upcoming", 1),
    ];
    let mut aws = fake.client();
    let mut told = async |since: Option<i64>| {
        let since = since.map(|at| {
            (
                "aws-health".to_owned(),
                Timestamp::from_second(NOW + at).unwrap(),
            )
        });
        let [health, _] = poll(&mut aws, &since.into_iter().collect()).await;
        let announced = health.unwrap().announced.into_iter();
        announced.map(|one| one.notice.word).collect::<Vec<_>>()
    };
    assert_eq!(told(None).await, ["open", "upcoming"]);
    // The event was closed 1,000 s ago; the window reaches back 300 s further than the last success.
    assert_eq!(told(Some(-600)).await, ["open", "upcoming"]);
    assert_eq!(told(Some(-800)).await, ["open", "closed", "upcoming"]);
}

#[tokio::test]
async fn a_busy_service_is_asked_again_and_its_word_about_the_pause_is_kept() {
    let fake = Fake::start().await;
    fake.state().events = vec![event(0, "open", 1)];
    let busy = |status, code| refusal("x", status, code, "slow down").with("retry-after", "0");
    fake.state().scripted = [
        ("DescribeEvents", busy(400, "ThrottlingException")),
        ("DescribeEvents", busy(503, "ServiceUnavailable")),
        (
            "DescribeEventDetails",
            Reply::new(502, "<html>bad gateway</html>").with("retry-after", "0"),
        ),
        (
            "DescribeAffectedEntities",
            busy(400, "TooManyRequestsException"),
        ),
        (
            "DescribeInstanceStatus",
            refusal("", 503, "RequestLimitExceeded", "slow").with("retry-after", "0"),
        ),
    ]
    .into();
    let mut aws = fake.client();
    let [health, ec2] = poll(&mut aws, &Since::new()).await.map(Result::unwrap);
    assert_eq!((health.announced.len(), ec2.announced.len()), (1, 0));
    assert!(fake.state().scripted.is_empty());
    // For longer pauses, the poll ends.
    let busy = refusal("x", 400, "ThrottlingException", "slow down").with("retry-after", "90");
    fake.state().scripted = [("DescribeEvents", busy)].into();
    let before = fake.operations().len();
    let [health, ec2] = poll(&mut aws, &Since::new()).await;
    let failure = health.unwrap_err();
    assert_eq!(failure.retry_after.unwrap().as_secs(), 90);
    assert!(
        failure
            .what
            .contains("status 400: ThrottlingException: slow down"),
        "{failure}"
    );
    assert!(ec2.is_ok(), "the other API is asked all the same");
    assert_eq!(fake.operations().len(), before + 2);
    // A service that stays busy is left alone after four attempts.
    let busy = || refusal("x", 500, "InternalFailure", "").with("retry-after", "0");
    fake.state().scripted = (0..4).map(|_| ("DescribeEvents", busy())).collect();
    let [health, _] = poll(&mut aws, &Since::new()).await;
    assert!(health.unwrap_err().what.contains("InternalFailure"));
    assert!(fake.state().scripted.is_empty());
}

#[tokio::test]
async fn credentials_that_have_ended_are_renewed_once() {
    let fake = Fake::start().await;
    fake.state().events = vec![event(0, "open", 1)];
    let mut aws = fake.client();
    assert!(
        poll(&mut aws, &Since::new())
            .await
            .iter()
            .all(Result::is_ok)
    );
    fake.state().expired.insert(0);
    assert!(
        poll(&mut aws, &Since::new())
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(fake.state().fetched, 2);
    // New ones are refused too: each API renews once and gives up.
    fake.state().expired.extend(1..10);
    let told = poll(&mut aws, &Since::new()).await;
    let failures = told.map(Result::unwrap_err);
    assert!(
        failures
            .iter()
            .all(|failure| failure.what.contains("ExpiredTokenException")),
        "{failures:?}"
    );
    assert_eq!(fake.state().fetched, 4);
}

#[tokio::test]
async fn a_signature_by_another_secret_is_refused_and_not_repeated() {
    let fake = Fake::start().await;
    fake.state().secret = "another";
    let told = poll(&mut fake.client(), &Since::new()).await;
    let failures = told.map(Result::unwrap_err);
    assert!(
        failures
            .iter()
            .all(|failure| failure.what.contains("SignatureDoesNotMatch")),
        "{failures:?}"
    );
    assert_eq!(
        fake.operations(),
        ["DescribeEvents", "DescribeInstanceStatus"]
    );
}

#[tokio::test]
async fn an_account_without_a_support_plan_is_told_so_and_has_the_events_of_ec2() {
    let fake = Fake::start().await;
    fake.state().instances = vec![instance(1)];
    let none = refusal(
        "x",
        400,
        "SubscriptionRequiredException",
        "needs a subscription",
    );
    fake.state().scripted = [("DescribeEvents", none)].into();
    let [health, ec2] = poll(&mut fake.client(), &Since::new()).await;
    let failure = health.unwrap_err();
    assert!(failure.what.contains("paid support plan"), "{failure}");
    assert_eq!(ec2.unwrap().announced.len(), 1);
}

#[tokio::test]
async fn whatever_the_apis_answer_a_poll_ends_with_a_statement_or_a_failure() {
    let fake = Fake::start().await;
    fake.state().events = vec![event(0, "open", 1)];
    let mut aws = fake.client();
    let json = |body: &str| Reply::new(200, body);
    for (word, reply, says) in [
        (
            "DescribeEvents",
            json(r#"{"events": [{"arn": "a"#),
            "not understood",
        ),
        ("DescribeEvents", json(""), "not understood"),
        ("DescribeEvents", json("[]"), "no list \"events\""),
        (
            "DescribeEvents",
            json(r#"{"events": {}}"#),
            "no list \"events\"",
        ),
        ("DescribeEventDetails", json("null?"), "not understood"),
        (
            "DescribeAffectedEntities",
            json("{}"),
            "no list \"entities\"",
        ),
        (
            "DescribeEvents",
            json(&"[".repeat(100_000)),
            "not understood",
        ),
        (
            "DescribeEvents",
            json(&" ".repeat(5 << 20)),
            "cannot be read",
        ),
        (
            "DescribeEvents",
            Reply::new(404, "\u{7}nothing here"),
            "status 404:  nothing here",
        ),
    ] {
        fake.state().scripted = [(word, reply)].into();
        let [health, _] = poll(&mut aws, &Since::new()).await;
        let failure = health.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
    }
    for (body, says) in [
        (
            "<DescribeInstanceStatusResponse><instanceStatusSet><item>",
            "ends within",
        ),
        ("{}", "no XML"),
        ("<html/>", "\"html\""),
    ] {
        let body = Reply::new(200, body);
        fake.state().scripted = [("DescribeInstanceStatus", body)].into();
        let [_, ec2] = poll(&mut aws, &Since::new()).await;
        let failure = ec2.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
    }
    // Items of other types are counted, and the statement is not complete.
    let odd = r#"{"events": [7, {"arn": []}, {"startTime": "soon"}, {}, null]}"#;
    fake.state().scripted = [("DescribeEvents", json(odd))].into();
    let [health, _] = poll(&mut aws, &Since::new()).await.map(Result::unwrap);
    assert_eq!(
        (health.odd, health.complete, health.announced.len()),
        (4, false, 0)
    );
}

#[tokio::test]
async fn a_list_without_an_end_is_left() {
    let fake = Fake::start().await;
    let mut aws = fake.client();
    let page = || Reply::new(200, r#"{"events": [], "nextToken": "again"}"#);
    fake.state().scripted = [("DescribeEvents", page()), ("DescribeEvents", page())].into();
    let [health, _] = poll(&mut aws, &Since::new()).await;
    assert!(health.unwrap_err().what.contains("names itself"));
    let page = |number: usize| {
        let body = format!(
            "<DescribeInstanceStatusResponse><nextToken>{number}</nextToken></DescribeInstanceStatusResponse>"
        );
        ("DescribeInstanceStatus", Reply::new(200, body))
    };
    fake.state().scripted = (0..250).map(page).collect();
    let [_, ec2] = poll(&mut aws, &Since::new()).await;
    assert!(ec2.unwrap_err().what.contains("more than 200 pages"));
    assert_eq!(fake.state().scripted.len(), 50);
}

#[test]
fn hosts_are_those_of_the_regions_partition_or_the_endpoint() {
    let url = |service: &str, region: &str, endpoint: &str| {
        Partition::of(region).url(service, region, endpoint)
    };
    assert_eq!(
        url("ec2", "eu-west-1", ""),
        "https://ec2.eu-west-1.amazonaws.com/"
    );
    assert_eq!(
        url("sts", "cn-north-1", ""),
        "https://sts.cn-north-1.amazonaws.com.cn/"
    );
    assert_eq!(
        url("ec2", "eu-west-1", "http://127.0.0.1:1/"),
        "http://127.0.0.1:1/"
    );
    let health = |region: &str| Partition::of(region).health;
    assert_eq!(
        ["eu-west-1", "us-gov-east-1"].map(health),
        ["us-east-1", "us-gov-west-1"]
    );
}
