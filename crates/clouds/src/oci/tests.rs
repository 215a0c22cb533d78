mod vendor;

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::SignedDuration;
use notices::Phase;
use serde_json::json;
use tempfile::TempDir;

use super::signature::tests::signed_by;
use super::*;
use crate::Instance;
use crate::loopback::{Asked, Reply, Server};
use crate::rsa::tests::TestKey;

const NOW: &str = "2026-03-01T00:00:00Z";

/// Tenancy, user and fingerprint of the key of the tests, in the forms of OCI.
const KEY: [&str; 3] = [
    "ocid1.tenancy.oc1..t",
    "ocid1.user.oc1..u",
    "20:3b:97:13:55:1c:00:01:02:03:04:05:06:07:08:09",
];

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

/// Starts a fake of OCI that checks each signature, and a client with the API key of a user.
async fn oci(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> (Server, Oci, TempDir) {
    let server = Server::start(move |asked| {
        let key_id = signed_by(asked, TestKey::get().public()).map(|(key_id, _)| key_id);
        if key_id == Some(KEY.join("/")) {
            answer(asked)
        } else {
            Reply::new(401, r#"{"code": "NotAuthenticated"}"#)
        }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (config, key) = (dir.path().join("config"), dir.path().join("key.pem"));
    fs::write(&key, TestKey::get().pem()).unwrap();
    let [tenancy, user, fingerprint] = KEY;
    let text = format!(
        "[P]\ntenancy={tenancy}\nuser={user}\nfingerprint={fingerprint}\nkey_file={}\n",
        key.display()
    );
    fs::write(&config, text).unwrap();
    let variables = BTreeMap::from([
        ("OCI_CONFIG_FILE".to_owned(), config.display().to_string()),
        ("OCI_CLI_PROFILE".to_owned(), "P".to_owned()),
    ]);
    let config = OciConfig {
        compartment_id: "ocid1.compartment.oc1..c".to_owned(),
        region: String::new(),
        poll: SignedDuration::from_mins(1),
        endpoint: format!("{}/", server.url),
    };
    let oci = Oci::new(&config, Http::new().unwrap(), Environment::of(variables));
    (server, oci, dir)
}

async fn poll(oci: &mut Oci) -> Result<Told, Failure> {
    let mut answers = oci.poll(now()).await;
    assert_eq!(answers.len(), 1);
    let answer = answers.remove(0);
    assert_eq!(answer.source, SOURCE);
    answer.told
}

fn page(events: &[(&str, &str)]) -> Reply {
    let events = events.iter().map(|(id, state)| {
        json!({
            "id": id,
            "instanceId": format!("ocid1.instance.{id}"),
            "instanceAction": "REBOOT_MIGRATION",
            "lifecycleState": state,
            "timeWindowStart": "2026-03-02T10:00:00Z",
        })
    });
    Reply::new(200, json!(events.collect::<Vec<_>>()).to_string())
}

#[tokio::test]
async fn all_pages_are_read_with_signed_requests() {
    let (server, mut oci, _dir) = oci(|asked| match asked.target.split_once("&page=") {
        None => page(&[("a", "SCHEDULED")]).with("opc-next-page", "t/2"),
        Some((_, "t%2F2")) => page(&[]).with("opc-next-page", "t3"),
        Some(_) => page(&[("b", "CANCELED")]),
    })
    .await;
    let told = poll(&mut oci).await.unwrap();
    assert!(told.complete);
    let found: Vec<_> = told
        .announced
        .iter()
        .map(|one| (one.instance.clone(), one.notice.phase))
        .collect();
    assert_eq!(
        found,
        [
            (Instance::oci("ocid1.instance.a"), Phase::Scheduled),
            (Instance::oci("ocid1.instance.b"), Phase::Cancelled)
        ]
    );
    let asked = server.asked();
    assert_eq!(asked.len(), 3);
    assert_eq!(
        asked[0].target,
        "/20160918/instanceMaintenanceEvents?compartmentId=ocid1.compartment.oc1..c&limit=500"
    );
    let (_, headers) = signed_by(&asked[2], TestKey::get().public()).unwrap();
    assert_eq!(headers, ["date", "(request-target)", "host"]);
}

#[tokio::test]
async fn what_is_not_understood_is_unseen_or_makes_the_list_partial() {
    let (_server, mut oci, _dir) = oci(|asked| {
        if asked.target.contains("page=") {
            Reply::new(200, r#"[{"id": "x"}]"#)
        } else {
            Reply::new(200, r#"[{"id": 7, "instanceId": "ocid1.instance.a"}]"#)
                .with("opc-next-page", "2")
        }
    })
    .await;
    let told = poll(&mut oci).await.unwrap();
    assert_eq!(told.unseen, [Instance::oci("ocid1.instance.a")]);
    assert_eq!((told.odd, told.complete), (2, false));
}

#[tokio::test]
async fn a_refused_key_is_read_again_once() {
    let tries = AtomicUsize::new(0);
    let (server, mut first, dir) = oci(move |_| match tries.fetch_add(1, Ordering::Relaxed) {
        1 => Reply::new(401, "rotated"),
        _ => page(&[]),
    })
    .await;
    poll(&mut first).await.unwrap();
    poll(&mut first).await.unwrap();
    assert_eq!(server.asked().len(), 3);
    // A key that is gone is noticed when it is read again.
    fs::remove_file(dir.path().join("key.pem")).unwrap();
    poll(&mut first).await.unwrap();

    let (server, mut never, _dir) = oci(|_| Reply::new(401, "NotAuthenticated")).await;
    let failure = poll(&mut never).await.unwrap_err();
    assert!(
        failure.what.contains("status 401: NotAuthenticated"),
        "{failure}"
    );
    assert_eq!(server.asked().len(), 2);
}

#[tokio::test]
async fn failures_say_where_and_how_long_to_wait() {
    let (_server, mut busy, _dir) =
        oci(|_| Reply::new(429, r#"{"code": "TooManyRequests"}"#).with("retry-after", "9")).await;
    let failure = poll(&mut busy).await.unwrap_err();
    assert_eq!(failure.retry_after, Some(Duration::from_secs(9)));
    let says = "/20160918/instanceMaintenanceEvents: status 429: {\"code\": \"TooManyRequests\"}";
    assert!(failure.what.contains(says), "{failure}");
    for (answer, says) in [
        (Reply::new(503, "later"), "status 503: later"),
        (
            Reply::new(404, "NotAuthorizedOrNotFound"),
            "status 404: NotAuth",
        ),
        (Reply::new(200, r#"[{"id": "#), "not understood"),
        (Reply::new(200, "{}"), "not understood"),
    ] {
        let (_server, mut oci, _dir) = oci(move |_| answer.clone()).await;
        let failure = poll(&mut oci).await.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
    }
}

#[tokio::test]
async fn a_list_without_end_is_given_up() {
    let (server, mut oci, _dir) = oci(|_| page(&[]).with("opc-next-page", "again")).await;
    let failure = poll(&mut oci).await.unwrap_err();
    assert!(failure.what.contains("more than 200 pages"), "{failure}");
    assert_eq!(server.asked().len(), MAX_PAGES);
}

#[tokio::test]
async fn settings_that_are_missing_are_named() {
    let (_server, mut oci, _dir) = oci(|_| page(&[])).await;
    oci.config.endpoint = String::new();
    let failure = poll(&mut oci).await.unwrap_err();
    assert!(failure.what.contains("write oci.region"), "{failure}");
    oci.config.region = "us-phoenix-1.evil.example/".to_owned();
    let failure = poll(&mut oci).await.unwrap_err();
    assert!(failure.what.contains("is not a region"), "{failure}");
    oci.config.region = "us-phoenix-1".to_owned();
    let identity = oci.identities.current(now()).await.unwrap();
    let url = base(&oci.config, identity).unwrap();
    assert_eq!(url, "https://iaas.us-phoenix-1.oraclecloud.com");
    oci.config.compartment_id = String::new();
    let failure = poll(&mut oci).await.unwrap_err();
    assert!(
        failure.what.contains("write oci.compartmentId"),
        "{failure}"
    );
}
