//! Google's own client reads the fake and sends our requests itself.

use testkit::Component;

use super::*;
use crate::witness::Witness;

/// Returns the arguments of the requests for the list, and the bodies of those for the log.
fn calls(asked: &[Asked]) -> (Vec<BTreeMap<&str, &str>>, Vec<Value>) {
    let path = "/compute/v1/projects/p/aggregated/instances?";
    let lists = asked.iter().filter_map(|one| one.target.strip_prefix(path));
    let lists = lists.map(|query| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        // Google's client asks for the form that is the default.
        pairs.filter(|pair| *pair != ("alt", "json")).collect()
    });
    let logs = asked.iter().filter(|one| is_log(one));
    let logs = logs.map(|one| {
        let mut body: Value = serde_json::from_slice(&one.body).unwrap();
        // An empty token is that of the first page.
        let fields = body.as_object_mut().unwrap();
        fields.retain(|key, value| key != "pageToken" || value != "");
        body
    });
    (lists.collect(), logs.collect())
}

#[tokio::test]
async fn googles_own_client_reads_the_same_and_asks_the_same() {
    let Some(python) = testkit::require(Component::PythonGrpc) else {
        return;
    };
    let list = |asked: &Asked| {
        if asked.target.contains("pageToken=l%2F2") {
            listed(&[("b", "ONGOING")], "")
        } else {
            listed(&[("a", "PENDING")], "l/2")
        }
    };
    let log = |asked: &Asked| {
        let body: Value = serde_json::from_slice(&asked.body).unwrap();
        match body["pageToken"].as_str() {
            Some("e2") => logged(&[(2, "c", "COMPLETED")], ""),
            _ => logged(&[(1, "d", "CANCELLED")], "e2"),
        }
    };
    let (server, mut gcp) = google(list, log).await;
    let all = poll(&mut gcp, &Since::new()).await[0].clone().unwrap();
    let ours = server.asked();
    let (our_lists, our_logs) = calls(&ours);
    let asked = json!({"url": server.url, "fields": FIELDS, "body": our_logs[0]});
    let host = server.url.strip_prefix("http://").unwrap();
    let variables = [("GCE_METADATA_HOST", host)];
    let google = Witness::start(&python, "google_client.py", &variables, &asked).await;

    let theirs = server.asked().split_off(ours.len());
    assert_eq!((our_lists.len(), our_logs.len()), (2, 2), "pages");
    assert_eq!(calls(&theirs), (our_lists, our_logs));
    let shown = all.announced.iter().map(|Announced { instance, notice }| {
        let [_, name] = instance.names() else {
            panic!("{instance:?}")
        };
        json!({
            "number": notice.resource.1, "name": name.rsplit('/').next(), "word": notice.word,
            "start": notice.start, "end": notice.end,
        })
    });
    let sorted = |mut values: Vec<Value>| {
        values.sort_by_key(Value::to_string);
        values
    };
    let read = google.said.as_array().unwrap().clone();
    assert_eq!((read.len(), sorted(read)), (4, sorted(shown.collect())));
}
