use super::*;
use crate::loopback::{Asked, Reply, Server};

const SCHEDULED: &str = r#"[{"NotBefore": "21 Jan 2026 09:00:43 GMT", "Code": "system-reboot",
    "Description": "scheduled reboot", "EventId": "instance-event-1", "State": "active"}]"#;

async fn service(
    provider: Provider,
    answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
) -> (MetadataService, Server) {
    let server = Server::start(answer).await;
    let service = MetadataService::new(provider, &server.url).unwrap();
    (service, server)
}

/// Returns the requests as `METHOD target`.
fn requests(server: &Server) -> Vec<String> {
    let asked = server.asked();
    let shown = asked
        .iter()
        .map(|one| format!("{} {}", one.method, one.target));
    shown.collect()
}

/// Answers as EC2 does, with tokens by their number.
fn ec2(asked: &Asked, valid: &str) -> Reply {
    match asked.target.as_str() {
        "/latest/api/token" => {
            assert_eq!(
                asked.header("x-aws-ec2-metadata-token-ttl-seconds"),
                "21600"
            );
            Reply::new(200, valid)
        }
        _ if asked.header("x-aws-ec2-metadata-token") != valid => Reply::new(401, ""),
        "/latest/meta-data/instance-id" => Reply::new(200, "i-0abc"),
        "/latest/meta-data/events/maintenance/scheduled" => Reply::new(200, SCHEDULED),
        _ => Reply::new(404, "<html>not found</html>"),
    }
}

#[tokio::test]
async fn ec2_is_asked_with_a_token_which_is_kept() {
    let (mut service, server) = service(Provider::Aws, |asked| ec2(asked, "token-1")).await;
    let first = service.notices("gpu-1").await.unwrap();
    assert_eq!((first.len(), first[0].resource.1.as_str()), (1, "i-0abc"));
    assert_eq!(service.notices("gpu-1").await.unwrap(), first);
    let events = [
        "GET /latest/meta-data/events/maintenance/scheduled",
        "GET /latest/meta-data/events/maintenance/history",
    ];
    let once = ["PUT /latest/api/token", "GET /latest/meta-data/instance-id"];
    assert_eq!(requests(&server), [&once[..], &events, &events].concat());
}

#[tokio::test]
async fn a_token_that_is_refused_is_renewed_once() {
    let (mut service, server) = service(Provider::Aws, |asked| ec2(asked, "token-2")).await;
    service.token = Some(("token-1".to_owned(), Instant::now()));
    assert_eq!(service.notices("gpu-1").await.unwrap().len(), 1);
    let tokens = |server: &Server| {
        let asked = requests(server);
        asked.iter().filter(|one| one.starts_with("PUT")).count()
    };
    assert_eq!(tokens(&server), 1);

    let refuse = |asked: &Asked| match asked.method {
        Method::PUT => Reply::new(200, "token"),
        _ => Reply::new(401, "no"),
    };
    let (mut service, server) = self::service(Provider::Aws, refuse).await;
    let failure = service.notices("gpu-1").await.unwrap_err();
    assert!(failure.what.contains("status 401"), "{failure}");
    assert_eq!(tokens(&server), 2);
}

#[tokio::test]
async fn azure_tells_its_events_and_may_begin() {
    let answer = |asked: &Asked| {
        assert_eq!(asked.header("metadata"), "true");
        match (asked.method.as_str(), asked.target.as_str()) {
            ("GET", AZURE_NAME) => Reply::new(200, r#"{"name": "gpu_0", "location": "x"}"#),
            ("GET", AZURE_EVENTS) => Reply::new(
                200,
                r#"{"Events": [{"EventId": "A", "EventType": "Redeploy", "Resources": ["gpu_0"],
                    "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Jan 2026 18:29:47 GMT"}]}"#,
            ),
            ("POST", AZURE_EVENTS) => Reply::new(200, ""),
            other => panic!("{other:?}"),
        }
    };
    let (mut service, server) = service(Provider::Azure, answer).await;
    let notices = service.notices("gpu-1").await.unwrap();
    assert_eq!(notices[0].event, "A");
    assert!(service.begin("A").await.unwrap());
    let asked = server.asked();
    let last = asked.last().unwrap();
    assert_eq!(last.text(), r#"{"StartRequests":[{"EventId":"A"}]}"#);
    assert_eq!(last.header("content-type"), "application/json");
}

#[tokio::test]
async fn no_other_cloud_is_told_to_begin() {
    for provider in [Provider::Aws, Provider::Gcp] {
        let (mut service, server) = service(provider, |_| Reply::new(200, "")).await;
        assert!(!service.begin("A").await.unwrap());
        assert_eq!(requests(&server), [""; 0]);
    }
}

#[tokio::test]
async fn gcp_tells_its_event_whatever_it_says_of_the_upcoming() {
    for (status, upcoming) in [
        (404, "<html>"),
        (200, "NONE"),
        (
            503,
            r#"{ "error": "no notifications have been received yet, try again later" }"#,
        ),
    ] {
        let answer = move |asked: &Asked| {
            assert_eq!(asked.header("metadata-flavor"), "Google");
            match asked.target.as_str() {
                GCP_ID => Reply::new(200, "123"),
                GCP_EVENT => Reply::new(200, "TERMINATE_ON_HOST_MAINTENANCE"),
                _ => Reply::new(status, upcoming),
            }
        };
        let (mut service, _server) = service(Provider::Gcp, answer).await;
        let notices = service.notices("gpu-1").await.unwrap();
        assert_eq!(notices[0].word, "TERMINATE_ON_HOST_MAINTENANCE");
    }
}

#[tokio::test]
async fn a_failure_says_what_failed() {
    let answers = [
        (Reply::new(500, "try later"), "status 500: try later"),
        (Reply::new(200, "<html>"), "the response is not understood"),
        (
            Reply::new(200, format!("[{}]", ["null"; 7].join(","))),
            "the response is not understood",
        ),
    ];
    for (reply, expected) in answers {
        let answer = move |asked: &Asked| match asked.target.as_str() {
            "/latest/api/token" | "/latest/meta-data/instance-id" => Reply::new(200, "x"),
            _ => reply.clone(),
        };
        let (mut service, _server) = service(Provider::Aws, answer).await;
        let failure = service.notices("gpu-1").await.unwrap_err();
        assert!(failure.what.contains(expected), "{failure}");
    }
    // A page of a proxy is no id.
    let page = |_: &Asked| Reply::new(200, "<html>".repeat(100));
    let (mut service, _server) = service(Provider::Gcp, page).await;
    assert!(service.notices("gpu-1").await.is_err());
}

#[tokio::test]
async fn a_machine_has_no_more_notices_than_the_limit() {
    let event = r#"{"NotBefore": "21 Jan 2026 09:00:43 GMT", "Code": "x", "EventId": "e"}"#;
    let many = format!("[{}]", vec![event; MAX_NOTICES + 1].join(","));
    let answer = move |asked: &Asked| match asked.target.as_str() {
        "/latest/meta-data/events/maintenance/scheduled" => Reply::new(200, many.clone()),
        "/latest/meta-data/events/maintenance/history" => Reply::new(404, ""),
        _ => Reply::new(200, "x"),
    };
    let (mut service, _server) = service(Provider::Aws, answer).await;
    let failure = service.notices("gpu-1").await.unwrap_err();
    assert!(failure.what.contains("at most 100"), "{failure}");
}
