//! AWS's own client, boto3, reads the fake and sends our requests itself.

use std::collections::BTreeMap;

use testkit::Component;

use super::*;
use crate::loopback::Asked;
use crate::witness::Witness;

/// Returns what both clients have of each notice, in some order of their own.
fn shown(told: &Told) -> Vec<Value> {
    let notices = told.announced.iter().map(|one| &one.notice);
    let shown = notices.map(|notice| {
        let second = |time: Option<Timestamp>| time.map(Timestamp::as_second);
        json!({
            "event": notice.event, "instance": notice.resource.1, "word": notice.word,
            "start": second(notice.start), "end": second(notice.end),
        })
    });
    sorted(shown.collect())
}

fn sorted(mut values: Vec<Value>) -> Vec<Value> {
    values.sort_by_key(Value::to_string);
    values
}

/// Returns operation, type and arguments of the requests to Health.
fn health_calls(asked: &[Asked]) -> Vec<(String, String, Value)> {
    let asked = asked
        .iter()
        .filter(|one| one.headers.contains_key("x-amz-target"));
    let call = asked.map(|one| {
        let header = |name| one.header(name).to_owned();
        let arguments = serde_json::from_slice(&one.body).unwrap();
        (header("x-amz-target"), header("content-type"), arguments)
    });
    call.collect()
}

/// Returns the forms of the requests to EC2.
fn forms(asked: &[Asked]) -> Vec<BTreeMap<&str, &str>> {
    let kind = "application/x-www-form-urlencoded";
    let asked = asked
        .iter()
        .filter(|one| one.header("content-type").starts_with(kind));
    let pairs = asked.map(|one| {
        one.text()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
    });
    pairs.map(Iterator::collect).collect()
}

#[tokio::test]
async fn aws_own_client_reads_the_same_and_asks_the_same() {
    let Some(python) = testkit::require(Component::PythonGrpc) else {
        return;
    };
    let fake = Fake::start().await;
    {
        let mut state = fake.state();
        state.page = 4;
        let status = |number| ["upcoming", "open", "closed"][number % 3];
        let events = (0..13).map(|number| event(number, status(number), 3));
        state.events = events.collect();
        state.instances = (0..9).map(instance).collect();
    }
    // The poll after a success asks for what was closed too.
    let last = Timestamp::from_second(NOW - 800).unwrap();
    let since = Since::from([("aws-health".to_owned(), last)]);
    let [health, ec2] = poll(&mut fake.client(), &since).await.map(Result::unwrap);
    let ours = fake.server.asked();
    let calls = health_calls(&ours);
    let named = calls.iter().map(|(target, _, arguments)| {
        let (_, operation) = target.split_once('.').unwrap();
        json!([operation, arguments])
    });
    let asked = json!({"url": fake.server.url, "calls": named.collect::<Vec<_>>()});
    let busy = |target, status, code| ("refused", refusal(target, status, code, "slow down"));
    fake.state().scripted = [
        busy("x", 400, "ThrottlingException"),
        busy("", 503, "RequestLimitExceeded"),
    ]
    .into();
    let keys = format!("{}/keys", fake.server.url);
    let variables = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", keys.as_str())];
    let boto = Witness::start(&python, "aws_client.py", &variables, &asked).await;

    let theirs = fake.server.asked().split_off(ours.len());
    assert_eq!(health_calls(&theirs)[..calls.len()], calls);
    let (our_forms, their_forms) = (forms(&ours), forms(&theirs));
    assert_eq!(our_forms.len(), 3, "pages");
    assert_eq!(their_forms[..3], our_forms);

    let read = |value: &Value| sorted(value.as_array().unwrap().clone());
    assert_eq!(read(&boto.said["health"]["notices"]), shown(&health));
    assert_eq!(health.announced.len(), 39);
    let text = "What do I need to do? Launch a new instance.";
    assert_eq!(boto.said["health"]["texts"], json!([text]));
    let mut events = read(&boto.said["ec2"]);
    for event in &mut events {
        // We keep the description's word only.
        assert_eq!(event["word"].take(), "d & e");
        event["word"] = "active".into();
    }
    assert_eq!((events.len(), &events), (9, &shown(&ec2)));
    let refusals = json!([
        ["ThrottlingException", "slow down"],
        ["RequestLimitExceeded", "slow down"]
    ]);
    assert_eq!(boto.said["refusals"], refusals);
}
