//! A request to the platform connector: any bytes, as the message of the gRPC call.

use contract::{HealthEvents, json};
use jiff::{SignedDuration, Timestamp};
use model::event::{self, EventRecord};
use model::fault::{FaultBook, FaultChange, Ignored, MAX_OPEN_FAULTS_PER_NODE};
use prost::Message as _;

/// Panics if the connector breaks an invariant on this input.
pub fn run(request: &[u8]) {
    let Ok(request) = HealthEvents::decode(request) else {
        return;
    };
    let received_at = Timestamp::UNIX_EPOCH;
    let mut book = FaultBook::default();
    for (seq, mut event) in (1_u64..).zip(request.events) {
        if let Err(problem) = event::validate(&event) {
            assert!(!problem.field.is_empty() && !problem.what.is_empty());
            // The message is for people, and is bounded whatever the size of its subject.
            assert!(problem.to_string().len() < 1024, "{problem}");
            continue;
        }
        event::normalise(&mut event, received_at);
        assert_eq!(event::validate(&event), Ok(()), "normalised, and refused");

        let mut again = event.clone();
        event::normalise(&mut again, received_at + SignedDuration::from_secs(1));
        assert_eq!(again, event, "normalised twice is another event");
        assert_eq!(event::event_id(&event), event.id);

        let text = json::to_string(&event);
        assert_eq!(json::from_str(&text).ok().as_ref(), Some(&event), "{text}");
        let annotation = json::annotation::to_value(&event).to_string();
        assert_eq!(
            json::annotation::parse(&annotation).ok().as_deref(),
            Some([event.clone()].as_slice()),
            "{annotation}"
        );
        assert!(json::rule::to_value(&event).is_object());

        let record = EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at: received_at,
            event,
        };
        assert!(!book.record(&record).is_empty());
        assert!(book.faults(&record.event.node_name).len() <= MAX_OPEN_FAULTS_PER_NODE);
        assert_eq!(
            book.record(&record),
            [FaultChange::Ignored(Ignored::AlreadyRecorded)]
        );
    }
    // A fault book is equal to itself after a round trip through its stored form.
    let kept = serde_json::to_string(&book).expect("a fault book is written");
    let mut read: FaultBook = serde_json::from_str(&kept).expect("a fault book is read");
    read.index();
    assert_eq!(read, book);
}
