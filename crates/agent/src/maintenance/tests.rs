use std::sync::Mutex;

use clouds::loopback::{Asked, Reply, Server};
use clouds::metadata::Provider;
use runtime::sources::Sources;

use super::*;

const EVENTS: &str = r#"{"Events": [{"EventId": "A", "EventType": "Reboot",
    "Resources": ["vm-1"], "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Jan 2026 18:29:47 GMT",
    "DurationInSeconds": 60}]}"#;
const NONE: &str = r#"{"Events": []}"#;

/// A reporter of a machine in Azure, with its cloud and its controller.
struct World {
    reporter: MaintenanceReporter,
    last: LastReport,
    azure: Server,
    /// Document of Azure; `None` for an error.
    events: Arc<Mutex<Option<&'static str>>>,
    /// Reports to the controller.
    told: Arc<Mutex<Vec<ReportMaintenanceRequest>>>,
    /// Answer of the controller.
    answer: Arc<Mutex<Result<Vec<String>, String>>>,
    sources: Sources,
}

// === impl World ===

impl World {
    async fn new() -> Self {
        let events = Arc::new(Mutex::new(Some(EVENTS)));
        let shown = Arc::clone(&events);
        let azure = Server::start(move |asked: &Asked| {
            if asked.target.starts_with("/metadata/instance") {
                return Reply::new(200, r#"{"name": "vm-1"}"#);
            }
            match *shown.lock().unwrap() {
                Some(events) => Reply::new(200, events),
                None => Reply::new(500, "later"),
            }
        })
        .await;
        let told: Arc<Mutex<Vec<ReportMaintenanceRequest>>> = Arc::default();
        let answer = Arc::new(Mutex::new(Ok(Vec::new())));
        let (telling, answering) = (Arc::clone(&told), Arc::clone(&answer));
        let tell: Tell = Arc::new(move |report| {
            telling.lock().unwrap().push(report);
            let answer = answering.lock().unwrap().clone();
            Box::pin(async move { answer })
        });
        let sources = Sources::default();
        let reporter = MaintenanceReporter {
            node_name: "gpu-1".to_owned(),
            service: MetadataService::new(Provider::Azure, &azure.url).unwrap(),
            tell,
            source: sources.add_optional("metadata-service", "", Timestamp::UNIX_EPOCH),
            clock: || Timestamp::UNIX_EPOCH,
        };
        let last = LastReport::default();
        Self {
            reporter,
            last,
            azure,
            events,
            told,
            answer,
            sources,
        }
    }

    async fn poll(&mut self) -> Result<(), String> {
        self.reporter.poll(&mut self.last).await
    }

    /// Returns the numbers of notices of all reports since the last call.
    fn told(&self) -> Vec<usize> {
        let told = std::mem::take(&mut *self.told.lock().unwrap());
        told.iter().map(|report| report.notices.len()).collect()
    }

    fn set_events(&self, events: Option<&'static str>) {
        *self.events.lock().unwrap() = events;
    }

    fn set_answer(&self, answer: Result<Vec<String>, String>) {
        *self.answer.lock().unwrap() = answer;
    }

    /// Returns what Azure was told to begin.
    fn begun(&self) -> Vec<String> {
        let asked = self.azure.asked();
        let posts = asked.iter().filter(|one| one.method == "POST");
        posts.map(|one| one.text().to_owned()).collect()
    }
}

#[tokio::test]
async fn a_change_is_told_at_once_and_the_same_again_after_a_while() {
    let mut world = World::new().await;
    world.poll().await.unwrap();
    let report = world.told.lock().unwrap()[0].clone();
    assert_eq!(report.node_name, "gpu-1");
    let notice = &report.notices[0];
    assert_eq!(
        [
            &notice.event,
            &notice.provider,
            &notice.resource_id,
            &notice.kind,
            &notice.phase,
            &notice.word,
        ],
        [
            "A",
            "azure",
            "vm-1",
            "reboot",
            "scheduled",
            "Reboot Scheduled"
        ]
    );
    let (start, end) = (notice.start.unwrap(), notice.end.unwrap());
    assert_eq!(end.seconds - start.seconds, 60);
    assert_eq!(world.told(), [1]);
    world.poll().await.unwrap();
    assert!(world.told().is_empty());
    world.last.again_at = Some(Instant::now());
    world.poll().await.unwrap();
    assert_eq!(world.told(), [1]);
    world.set_events(Some(NONE));
    world.poll().await.unwrap();
    world.poll().await.unwrap();
    assert_eq!(world.told(), [0]);
}

#[tokio::test]
async fn an_end_is_told_again_soon_and_then_rarely() {
    let mut world = World::new().await;
    world.poll().await.unwrap();
    world.set_events(Some(NONE));
    world.poll().await.unwrap();
    let is_soon = |world: &World| {
        let again = world.last.again_at.unwrap();
        again <= Instant::now() + REPEAT
    };
    assert!(is_soon(&world));
    world.last.again_at = Some(Instant::now());
    world.poll().await.unwrap();
    assert!(!is_soon(&world));
    assert_eq!(world.told(), [1, 0, 0]);
}

#[tokio::test]
async fn a_service_that_cannot_be_read_says_nothing() {
    let mut world = World::new().await;
    world.poll().await.unwrap();
    world.told();
    world.set_events(None);
    let why = world.poll().await.unwrap_err();
    assert!(why.contains("status 500: later"), "{why}");
    let status = &world.sources.statuses()[0];
    assert_eq!(status.state, SourceState::Failing);
    assert!(status.detail.contains("status 500"), "{status:?}");
    assert!(world.told().is_empty());
    world.set_events(Some(EVENTS));
    world.poll().await.unwrap();
    let status = &world.sources.statuses()[0];
    assert_eq!((status.state, status.records), (SourceState::Following, 2));
}

#[tokio::test]
async fn what_was_not_accepted_is_told_again() {
    let mut world = World::new().await;
    world.set_answer(Err("gone".to_owned()));
    let why = world.poll().await.unwrap_err();
    assert_eq!(why, "announced maintenance cannot be reported: gone");
    world.set_answer(Ok(Vec::new()));
    world.poll().await.unwrap();
    world.poll().await.unwrap();
    assert_eq!(world.told(), [1, 1]);
}

#[tokio::test]
async fn azure_is_told_once_that_a_maintenance_may_begin() {
    let mut world = World::new().await;
    world.set_answer(Ok(vec!["A".to_owned()]));
    for _ in 0..3 {
        world.last.again_at = None;
        world.poll().await.unwrap();
    }
    let begin = r#"{"StartRequests":[{"EventId":"A"}]}"#;
    assert_eq!(world.begun(), [begin]);
    // Another one of the same name, once it was gone.
    world.set_answer(Ok(Vec::new()));
    world.set_events(Some(NONE));
    world.poll().await.unwrap();
    world.set_answer(Ok(vec!["A".to_owned()]));
    world.set_events(Some(EVENTS));
    world.poll().await.unwrap();
    assert_eq!(world.begun(), [begin, begin]);
}
