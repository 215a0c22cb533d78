mod vendor;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use notices::{Book, NodeState, Phase, Reading, Settings, State};
use serde_json::Value;

use super::*;
use crate::loopback::{Asked, Reply, Server};

const NOW: &str = "2026-03-01T00:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

/// Path of the metadata server's account.
const ACCOUNT: &str = "/computeMetadata/v1/instance/service-accounts/default/";

fn is_token(asked: &Asked) -> bool {
    let path = asked.target.strip_prefix(ACCOUNT);
    path.is_some_and(|path| path.starts_with("token"))
}

/// Answers what the metadata server says beside tokens.
fn metadata(asked: &Asked) -> Reply {
    if asked.target.starts_with(ACCOUNT) {
        let account = json!({"email": "n@p.iam.gserviceaccount.com", "scopes": ["s"]});
        page(&account)
    } else {
        Reply::new(404, "not found")
    }
}

fn is_log(asked: &Asked) -> bool {
    asked.target.starts_with("/v2/entries:list")
}

/// Starts a fake of Google: `list` and `log` answer the two APIs, and tokens are `t0`, `t1` and so on.
async fn google(
    list: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    log: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
) -> (Server, Gcp) {
    let tokens = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        if is_token(asked) {
            let number = tokens.fetch_add(1, Ordering::Relaxed);
            let token = json!({"access_token": format!("t{number}"), "expires_in": 3600});
            page(&token)
        } else if asked.target.starts_with("/computeMetadata/") {
            metadata(asked)
        } else if is_log(asked) {
            log(asked)
        } else {
            list(asked)
        }
    })
    .await;
    let config = GcpConfig {
        project: "p".to_owned(),
        poll: SignedDuration::from_mins(1),
        log_filter: String::new(),
        endpoint: format!("{}/", server.url),
    };
    let host = server.url.strip_prefix("http://").unwrap().to_owned();
    let variables = BTreeMap::from([("GCE_METADATA_HOST".to_owned(), host)]);
    let gcp = Gcp::new(&config, Http::new().unwrap(), Environment::of(variables));
    (server, gcp)
}

fn page(body: &Value) -> Reply {
    Reply::new(200, body.to_string()).with("content-type", "application/json")
}

/// Returns the number of an instance with a name of one letter.
fn number(name: &str) -> String {
    format!("1{}", name.as_bytes()[0])
}

fn nothing(_: &Asked) -> Reply {
    page(&json!({}))
}

/// Returns a page of the list; each instance is a name and the status of its maintenance.
fn listed(instances: &[(&str, &str)], next: &str) -> Reply {
    let instances = instances.iter().map(|(name, status)| {
        json!({
            "id": number(name),
            "selfLink": format!("https://x/compute/v1/projects/p/zones/z/instances/{name}"),
            "resourceStatus": {"upcomingMaintenance": {
                "maintenanceStatus": status,
                "windowStartTime": "2026-03-02T10:00:00Z",
            }},
        })
    });
    let instances: Vec<Value> = instances.collect();
    page(&json!({"items": {"zones/z": {"instances": instances}}, "nextPageToken": next}))
}

/// Returns a page of the log; each entry is a minute, the name of an instance, and a status.
fn logged(entries: &[(u8, &str, &str)], next: &str) -> Reply {
    let entries = entries.iter().map(|(minute, name, status)| {
        json!({
            "timestamp": format!("2026-02-28T10:{minute:02}:00Z"),
            "resource": {
                "type": "gce_instance",
                "labels": {"instance_id": number(name), "project_id": "p", "zone": "z"},
            },
            "protoPayload": {
                "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
                "methodName": "compute.instances.upcomingMaintenance",
                "resourceName": format!("projects/p/zones/z/instances/{name}"),
                "metadata": {"maintenanceStatus": status},
            },
        })
    });
    let entries: Vec<Value> = entries.collect();
    page(&json!({"entries": entries, "nextPageToken": next}))
}

/// Polls, and returns what each source told.
async fn poll(gcp: &mut Gcp, since: &Since) -> [Result<Told, Failure>; 3] {
    let answers = gcp.poll(since, now()).await;
    let sources: Vec<&str> = answers.iter().map(|answer| answer.source).collect();
    assert_eq!(sources, SOURCES);
    let told: Vec<_> = answers.into_iter().map(|answer| answer.told).collect();
    told.try_into().unwrap()
}

/// Returns name and phase of each notice.
fn phases(told: &Told) -> Vec<(&str, Phase)> {
    let phase = |one: &'static str, told: &Told| {
        let instance = Instance::gcp("p", "z", one, &number(one));
        let mut all = told.announced.iter();
        all.find(|it| it.instance == instance)
            .map(|it| (one, it.notice.phase))
    };
    let found: Vec<_> = ["a", "b", "c", "d"]
        .into_iter()
        .filter_map(|one| phase(one, told))
        .collect();
    assert_eq!(found.len(), told.announced.len(), "{told:?}");
    found
}

#[tokio::test]
async fn five_thousand_instances_take_a_token_ten_pages_and_one_of_the_log() {
    let list = |asked: &Asked| {
        let (_, query) = asked.target.split_once('?').unwrap();
        let value = |key| query.split('&').find_map(|pair| pair.strip_prefix(key));
        let first = value("pageToken=").map_or(0, |token| token.parse().unwrap());
        let next = first + value("maxResults=").unwrap().parse::<usize>().unwrap();
        let names: Vec<String> = (first..next.min(5_000))
            .map(|number| format!("i{number}"))
            .collect();
        let instances: Vec<_> = names.iter().map(|name| (&**name, "PENDING")).collect();
        let token = Some(next.to_string()).filter(|_| next < 5_000);
        listed(&instances, &token.unwrap_or_default())
    };
    let (server, mut gcp) = google(list, nothing).await;
    let [all, ..] = poll(&mut gcp, &Since::new()).await;
    assert_eq!(all.unwrap().announced.len(), 5_000);
    assert_eq!(server.asked().len(), 12);
}

#[tokio::test]
async fn all_pages_of_both_apis_are_read() {
    let (server, mut gcp) = google(
        |asked| match asked.target.split_once("pageToken=") {
            None => listed(&[("a", "PENDING")], "l/2"),
            Some((_, "l%2F2")) => listed(&[], "l3"),
            Some(_) => listed(&[("b", "ONGOING")], ""),
        },
        |asked| {
            let body: Value = serde_json::from_slice(&asked.body).unwrap();
            match body["pageToken"].as_str().unwrap() {
                // A page may be empty although others follow.
                "" => logged(&[], "e2"),
                "e2" => logged(&[(1, "c", "PENDING"), (2, "c", "ONGOING")], "e3"),
                _ => logged(&[(3, "c", "COMPLETED"), (4, "d", "CANCELLED")], ""),
            }
        },
    )
    .await;
    let [all, list, log] = poll(&mut gcp, &Since::new()).await;
    let all = all.unwrap();
    assert!(all.complete);
    assert_eq!(
        phases(&all),
        [
            ("a", Phase::Scheduled),
            ("b", Phase::Ongoing),
            ("c", Phase::Completed),
            ("d", Phase::Cancelled)
        ]
    );
    assert_eq!((list, log), (Ok(Told::default()), Ok(Told::default())));
    let asked = server.asked();
    assert_eq!(asked.len(), 7, "one token and three pages each");
    for asked in asked.iter().filter(|asked| !is_token(asked)) {
        assert_eq!(asked.header("authorization"), "Bearer t0");
    }
    let first = &asked[1].target;
    assert!(
        first.starts_with(
            "/compute/v1/projects/p/aggregated/instances?maxResults=500&fields=items%2F"
        ),
        "{first}"
    );
}

#[tokio::test]
async fn the_log_is_read_from_a_minute_before_the_last_look() {
    let (server, mut gcp) = google(nothing, nothing).await;
    gcp.config.log_filter = "logName=x OR y".to_owned();
    poll(&mut gcp, &Since::new()).await[2].as_ref().unwrap();
    let last = "2026-02-28T23:00:00.25Z".parse().unwrap();
    let since = Since::from([(LOG.to_owned(), last)]);
    poll(&mut gcp, &since).await[2].as_ref().unwrap();
    let asked = server.asked();
    let filters: Vec<Value> = asked
        .iter()
        .filter(|asked| is_log(asked))
        .map(|asked| serde_json::from_slice(&asked.body).unwrap())
        .collect();
    assert_eq!(filters[0]["resourceNames"], json!(["projects/p"]));
    assert_eq!(
        filters[0]["filter"],
        "(logName=x OR y) AND timestamp > \"2026-01-30T00:00:00Z\" \
         AND timestamp <= \"2026-03-01T00:00:00Z\""
    );
    assert_eq!(
        filters[1]["filter"],
        "(logName=x OR y) AND timestamp > \"2026-02-28T22:59:00.25Z\" \
         AND timestamp <= \"2026-03-01T00:00:00Z\""
    );
}

#[tokio::test]
async fn the_list_decides_and_without_it_the_log_does() {
    let log = |_: &Asked| {
        logged(
            &[
                (1, "a", "COMPLETED"),
                (2, "b", "PENDING"),
                (3, "c", "PENDING"),
                (4, "c", "CANCELLED"),
                (5, "d", "ONGOING"),
            ],
            "",
        )
    };
    // The maintenance of `a` that is listed is another one; those of `b` and `d` are over.
    let (_server, mut gcp) = google(|_| listed(&[("a", "PENDING")], ""), log).await;
    let [all, ..] = poll(&mut gcp, &Since::new()).await;
    let all = all.unwrap();
    let with_list = [("a", Phase::Scheduled), ("c", Phase::Cancelled)];
    assert_eq!((phases(&all), all.complete), (with_list.to_vec(), true));

    let denied = |_: &Asked| Reply::new(403, "compute.instances.list is required");
    let (_server, mut gcp) = google(denied, log).await;
    let [all, list, log_state] = poll(&mut gcp, &Since::new()).await;
    let by_log = [
        ("a", Phase::Completed),
        ("b", Phase::Scheduled),
        ("c", Phase::Cancelled),
        ("d", Phase::Ongoing),
    ];
    let all = all.unwrap();
    assert_eq!((phases(&all), all.complete), (by_log.to_vec(), false));
    assert_eq!(log_state, Ok(Told::default()));
    let failure = list.unwrap_err().what;
    assert!(
        failure.contains("status 403: compute.instances.list"),
        "{failure}"
    );

    // A zone that could not be read says nothing about its instances.
    let zone = |_: &Asked| page(&json!({"unreachables": ["zones/z"]}));
    let (_server, mut gcp) = google(zone, log).await;
    let all = poll(&mut gcp, &Since::new()).await[0].clone().unwrap();
    assert_eq!((phases(&all), all.complete), (by_log.to_vec(), false));

    let broken = |_: &Asked| Reply::new(500, "");
    let (_server, mut gcp) = google(|_| listed(&[("a", "PENDING")], ""), broken).await;
    let [all, _, log_state] = poll(&mut gcp, &Since::new()).await;
    assert!(log_state.is_err());
    assert!(all.unwrap().complete, "the list alone is complete");
}

#[tokio::test]
async fn an_instance_whose_maintenance_is_not_understood_stays_unseen() {
    let list = |_: &Asked| {
        page(&json!({"items": {"zones/z": {"instances": [{
            "id": number("a"),
            "selfLink": "projects/p/zones/z/instances/a",
            "resourceStatus": {"upcomingMaintenance": {"windowStartTime": "soon"}},
        }]}}}))
    };
    let log = |_: &Asked| logged(&[(1, "a", "COMPLETED"), (2, "b", "COMPLETED")], "");
    let (_server, mut gcp) = google(list, log).await;
    let all = poll(&mut gcp, &Since::new()).await[0].clone().unwrap();
    assert_eq!(all.unseen, [Instance::gcp("p", "z", "a", &number("a"))]);
    assert_eq!(phases(&all), [("b", Phase::Completed)]);
    assert_eq!((all.odd, all.complete), (1, true));
}

#[tokio::test]
async fn a_refused_token_is_renewed_once() {
    let first = |asked: &Asked| match asked.header("authorization") {
        "Bearer t0" => Reply::new(401, "expired"),
        _ => page(&json!({})),
    };
    let (server, mut gcp) = google(first, nothing).await;
    poll(&mut gcp, &Since::new()).await[0].as_ref().unwrap();
    assert_eq!(
        server
            .asked()
            .iter()
            .filter(|asked| is_token(asked))
            .count(),
        2
    );

    let never = |_: &Asked| Reply::new(401, "no");
    let (server, mut gcp) = google(never, nothing).await;
    let [_, list, _] = poll(&mut gcp, &Since::new()).await;
    assert!(list.unwrap_err().what.contains("status 401: no"));
    let tried = server
        .asked()
        .iter()
        .filter(|asked| asked.target.starts_with("/compute/"))
        .count();
    assert_eq!(tried, 2);
}

#[tokio::test]
async fn failures_say_where_and_how_long_to_wait() {
    let busy = |_: &Asked| Reply::new(429, "quota").with("retry-after", "17");
    let broken = |_: &Asked| Reply::new(503, "later").with("retry-after", "40");
    let (_server, mut gcp) = google(busy, broken).await;
    let [all, list, log] = poll(&mut gcp, &Since::new()).await.map(Result::unwrap_err);
    let wait = |seconds| Some(Duration::from_secs(seconds));
    assert_eq!((list.retry_after, log.retry_after), (wait(17), wait(40)));
    assert_eq!(all.retry_after, wait(40));
    assert!(
        all.what
            .contains("/aggregated/instances: status 429: quota"),
        "{all}"
    );
    assert!(
        all.what.contains("/v2/entries:list: status 503: later"),
        "{all}"
    );

    let cut = |_: &Asked| Reply::new(200, r#"{"items": {"zones/z": {"inst"#);
    let other = |_: &Asked| Reply::new(200, "<html>");
    let (_server, mut gcp) = google(cut, other).await;
    for failure in poll(&mut gcp, &Since::new()).await {
        let failure = failure.unwrap_err();
        assert!(failure.what.contains("not understood"), "{failure}");
    }
    for project in ["", "p/../q", "p q"] {
        project.clone_into(&mut gcp.config.project);
        let [failure, list, log] = poll(&mut gcp, &Since::new()).await.map(Result::unwrap_err);
        assert_eq!((&failure, &failure), (&list, &log), "said once");
        assert!(failure.what.contains("gcp.targetProjectId"), "{failure}");
    }
}

#[tokio::test]
async fn a_list_without_end_is_given_up() {
    let (server, mut gcp) = google(
        |_| page(&json!({"nextPageToken": "again"})),
        |_| page(&json!({"nextPageToken": "again"})),
    )
    .await;
    let [all, list, log] = poll(&mut gcp, &Since::new()).await.map(Result::unwrap_err);
    assert!(
        list.what.contains("more than 200 pages of instances"),
        "{list}"
    );
    assert!(log.what.contains("more than 200 pages of entries"), "{log}");
    assert!(all.what.contains("instances"), "{all}");
    assert_eq!(server.asked().len(), 1 + 2 * MAX_PAGES);
}

/// Node, book and clock of a story.
struct Story {
    book: Book,
    minutes: i64,
    boot_id: &'static str,
}

// === impl Story ===

impl Story {
    /// Takes what both APIs say two minutes later, and returns state and fatality of the newest
    /// record. `list` is `None` if it cannot be read.
    fn then(&mut self, list: Option<&[(&str, &str)]>, log: &[(u8, &str, &str)]) -> (State, bool) {
        self.minutes += 2;
        let at = now() + SignedDuration::from_mins(self.minutes);
        let list = list.map(|list| Instances::parse(&listed(list, "").body).unwrap());
        let log = Entries::parse(&logged(log, "").body, at).unwrap();
        let told = together(list, log);
        let notices = told.announced.into_iter().map(|mut one| {
            "n".clone_into(&mut one.notice.node);
            one.notice
        });
        let reading = Reading {
            notices: notices.collect(),
            complete: told.complete,
            ..Reading::default()
        };
        self.book.read(SOURCE, &reading, at);
        let node = NodeState {
            ready: true,
            boot_id: self.boot_id.to_owned(),
            is_out: false,
        };
        let settings = Settings {
            limit: SignedDuration::from_hours(48),
            delay: SignedDuration::ZERO,
            readiness: SignedDuration::from_hours(1),
            missing: SignedDuration::from_mins(1),
        };
        self.book.step(|_| Some(node.clone()), &settings, 100, at);
        let record = self.book.records().last().unwrap();
        (record.state, record.out_since.is_some())
    }

    fn new() -> Self {
        Self {
            book: Book::default(),
            minutes: 0,
            boot_id: "b1",
        }
    }
}

#[test]
fn a_maintenance_ends_by_the_list_or_by_the_log() {
    let out = |state| (state, true);
    // The list alone: another boot shows the end.
    let mut story = Story::new();
    assert_eq!(
        story.then(Some(&[("a", "PENDING")]), &[]),
        out(State::QuarantineTriggered)
    );
    assert_eq!(
        story.then(Some(&[("a", "ONGOING")]), &[]),
        out(State::MaintenanceOngoing)
    );
    story.boot_id = "b2";
    story.then(Some(&[]), &[]);
    assert_eq!(story.then(Some(&[]), &[]), out(State::HealthyTriggered));

    // An entry of the log ends it at once, and one that is read again begins nothing.
    let mut story = Story::new();
    story.then(Some(&[("a", "ONGOING")]), &[(1, "a", "PENDING")]);
    let entries = [(1, "a", "PENDING"), (9, "a", "COMPLETED")];
    assert_eq!(
        story.then(Some(&[]), &entries),
        out(State::HealthyTriggered)
    );
    assert_eq!(
        story.then(Some(&[]), &entries),
        out(State::HealthyTriggered)
    );
    assert_eq!(story.book.records().len(), 1);
    story.then(Some(&[("a", "PENDING")]), &entries);
    assert_eq!(story.book.records().len(), 2, "another one");

    // Without the list, the log tells all.
    let mut story = Story::new();
    assert_eq!(
        story.then(None, &[(1, "a", "PENDING")]),
        out(State::QuarantineTriggered)
    );
    assert_eq!(story.then(None, &[]), out(State::QuarantineTriggered));
    assert_eq!(
        story.then(None, &[(5, "a", "ONGOING")]),
        out(State::MaintenanceOngoing)
    );
    assert_eq!(
        story.then(None, &[(9, "a", "COMPLETED")]),
        out(State::HealthyTriggered)
    );

    // A maintenance that was told by the log is taken over by the list.
    let mut story = Story::new();
    story.then(None, &[(1, "a", "PENDING")]);
    story.then(Some(&[("a", "PENDING")]), &[]);
    assert_eq!(story.book.records().len(), 1);
    story.boot_id = "b2";
    story.then(Some(&[]), &[]);
    assert_eq!(story.then(Some(&[]), &[]), out(State::HealthyTriggered));
}
