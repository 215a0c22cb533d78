use serde_json::{Value, json};

use super::*;
use crate::fake::{self, FakeAnswer};

fn lease(version: u32, holder: &str) -> String {
    let metadata = json!({"name": "c", "resourceVersion": version.to_string()});
    json!({"metadata": metadata, "spec": {"holderIdentity": holder}}).to_string()
}

fn failure(code: u16, message: &str) -> FakeAnswer {
    let status = json!({"kind": "Status", "code": code, "message": message});
    FakeAnswer::Now(code, status.to_string())
}

#[tokio::test]
async fn the_lease_is_made_and_kept_until_another_has_it() {
    let (cluster, mut requests) = fake::serve(vec![
        failure(404, "no Lease"),
        FakeAnswer::Now(201, lease(1, "me")),
        failure(409, "changed"),
        FakeAnswer::Now(200, lease(2, "other")),
    ])
    .await;
    let name = LeaseName {
        namespace: "g".into(),
        name: "c".into(),
    };
    let mut candidate = cluster.candidate(name, "me".into()).unwrap();
    let standing = candidate.standing();
    let tenure = candidate.elected().await;
    assert!(tenure.time_left().is_ok());
    assert_eq!(standing.borrow().leader, "me");
    assert!(standing.borrow().leads);
    let deposed = candidate.keep().await;
    assert_eq!(deposed, Deposed::Taken("other".into()));
    assert!(tenure.time_left().is_err());
    assert_eq!(standing.borrow().leader, "other");
    assert!(!standing.borrow().leads);
    let list = "/apis/coordination.k8s.io/v1/namespaces/g/leases";
    let one = format!("{list}/c");
    for (method, uri) in [
        ("GET", one.as_str()),
        ("POST", list),
        ("PATCH", &one),
        ("GET", &one),
    ] {
        let request = requests.recv().await.unwrap();
        assert_eq!(request[..2], [method, uri]);
    }
    // The Lease of another holder is not released.
    candidate.resign().await;
    assert!(requests.try_recv().is_err());
}

#[tokio::test]
async fn it_is_given_back_at_the_end_and_ends_where_it_is_dropped() {
    let (cluster, mut requests) = fake::serve(vec![
        FakeAnswer::Now(200, lease(1, "")),
        FakeAnswer::Now(200, lease(2, "me")),
        FakeAnswer::Now(200, lease(2, "me")),
        FakeAnswer::Now(200, lease(3, "")),
        FakeAnswer::Now(200, lease(4, "")),
        FakeAnswer::Now(200, lease(5, "me")),
    ])
    .await;
    let name = LeaseName {
        namespace: "g".into(),
        name: "c".into(),
    };
    let mut candidate = cluster.candidate(name.clone(), "me".into()).unwrap();
    let tenure = candidate.elected().await;
    candidate.resign().await;
    assert!(tenure.time_left().is_err(), "no write after it");
    let mut methods = Vec::new();
    for _ in 0..4 {
        methods.push(requests.recv().await.unwrap()[0].clone());
    }
    assert_eq!(methods, ["GET", "PATCH", "GET", "PATCH"]);

    let mut candidate = cluster.candidate(name, "me".into()).unwrap();
    let tenure = candidate.elected().await;
    drop(candidate);
    assert!(tenure.time_left().is_err(), "nobody renews it any more");
}

#[tokio::test]
async fn the_store_of_the_last_leader_is_seen_and_ours_is_written_with_a_renewal() {
    let with_store = |version: u32, holder: &str, store: &str| {
        let mut lease: Value = serde_json::from_str(&lease(version, holder)).unwrap();
        lease["metadata"]["annotations"] = json!({ "gpuwarden.dev/store": store });
        lease.to_string()
    };
    let (cluster, mut requests) = fake::serve(vec![
        FakeAnswer::Now(200, with_store(1, "", "theirs")),
        FakeAnswer::Now(200, with_store(2, "me", "theirs")),
        FakeAnswer::Now(200, with_store(3, "me", "ours")),
    ])
    .await;
    let name = LeaseName {
        namespace: "g".into(),
        name: "c".into(),
    };
    let mut candidate = cluster.candidate(name, "me".into()).unwrap();
    let note = candidate.store();
    assert_eq!(note.seen(), None);
    candidate.elected().await;
    assert_eq!(note.seen().as_deref(), Some("theirs"));
    // The call waits until the Lease shows the id, not until the request is sent.
    tokio::select! {
        () = note.write("ours") => {}
        deposed = candidate.keep() => panic!("{deposed}"),
    }
    assert_eq!(note.seen().as_deref(), Some("ours"));
    note.write("ours").await;
    let mut methods = Vec::new();
    for _ in 0..3 {
        methods.push(requests.recv().await.unwrap()[0].clone());
    }
    assert_eq!(methods, ["GET", "PATCH", "PATCH"]);
    let mut change = ObjectMeta::default();
    candidate.store.write_into(&mut change);
    assert_eq!(change.annotations.unwrap()["gpuwarden.dev/store"], "ours");
}

/// The error stays the same over all attempts.
#[tokio::test]
async fn a_namespace_that_is_missing_stays_what_is_wrong() {
    let (cluster, _requests) = fake::serve(vec![
        failure(404, "no Lease"),
        failure(404, "no namespace"),
        failure(404, "no Lease"),
        FakeAnswer::Now(201, lease(1, "me")),
    ])
    .await;
    let name = LeaseName {
        namespace: "g".into(),
        name: "c".into(),
    };
    let mut candidate = cluster.candidate(name, "me".into()).unwrap();
    let mut standing = candidate.standing();
    let seen = tokio::spawn(async move {
        let mut seen = Vec::new();
        while seen.last() != Some(&None) && standing.changed().await.is_ok() {
            seen.push(standing.borrow_and_update().error.clone());
        }
        (seen, standing.borrow().leads)
    });
    candidate.elected().await;
    let (seen, leads) = seen.await.unwrap();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(leads, "{seen:?}");
}

#[test]
fn what_answers_mean() {
    let refused = || ApiError::Forbidden {
        status: 403,
        message: "no".into(),
    };
    let missing = || ApiError::NotFound {
        message: "not there".into(),
    };
    let record = LeaseRecord {
        version: "7".into(),
        holder: "x".into(),
        duration: Some(Duration::from_secs(15)),
        transitions: 3,
    };
    let object = json!({
        "metadata": {"resourceVersion": "7"},
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15, "leaseTransitions": 3},
    });
    let bare = json!({"metadata": {"resourceVersion": "7"}});
    let lease = |object: &Value| -> Lease { serde_json::from_value(object.clone()).unwrap() };
    let (take, renew) = (Ask::Take(record.clone()), Ask::Renew(record.clone()));
    let nobodys = LeaseRecord {
        holder: String::new(),
        duration: None,
        transitions: 0,
        ..record.clone()
    };
    let table = [
        (
            &Ask::Read,
            Ok(lease(&object)),
            LeaseAnswer::Found(Some(record.clone())),
            "",
        ),
        (
            &Ask::Read,
            Ok(lease(&bare)),
            LeaseAnswer::Found(Some(nobodys)),
            "",
        ),
        (
            &Ask::Read,
            Ok(Lease::default()),
            LeaseAnswer::Unknown,
            "no Lease",
        ),
        (&Ask::Read, Err(missing()), LeaseAnswer::Found(None), ""),
        (
            &Ask::Read,
            Err(refused()),
            LeaseAnswer::Unknown,
            "not allowed: no",
        ),
        (
            &Ask::Create,
            Err(ApiError::Conflict { status: 409 }),
            LeaseAnswer::Changed,
            "",
        ),
        (
            &Ask::Create,
            Err(missing()),
            LeaseAnswer::Unknown,
            "not there",
        ),
        (&take, Ok(lease(&object)), LeaseAnswer::Written(record), ""),
        (&take, Err(missing()), LeaseAnswer::Changed, ""),
        (
            &renew,
            Err(ApiError::Conflict { status: 409 }),
            LeaseAnswer::Changed,
            "",
        ),
        (
            &renew,
            Err(refused()),
            LeaseAnswer::Unknown,
            "not allowed: no",
        ),
    ];
    for (index, (ask, result, expected, error)) in table.into_iter().enumerate() {
        let (answer, told) = answer_of(ask, result);
        assert_eq!(answer, expected, "row {index}");
        assert_eq!(told.is_some(), !error.is_empty(), "row {index}");
        assert!(told.unwrap_or_default().contains(error), "row {index}");
    }
}
