//! The parts of a cordon, from the node's story that `explain` shows.

use std::time::{Duration, Instant};

use anyhow::bail;
use console::api::{Explain, TimelineEntry, TimelineKind};
use jiff::Timestamp;
use model::journal::EntryKind;

use super::millis;
use crate::client::Client;

/// Longest wait for a complete story: the journal is written asynchronously.
const LIMIT: Duration = Duration::from_secs(5);
/// Pause before the story is requested again.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Parts of a cordon, in their order (ms).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Parts {
    /// From the writing of the line until its event was received.
    pub(super) line_to_event: f64,
    /// From then until the event was stored and decided about, and the call was started.
    pub(super) event_to_call: f64,
    /// From then until the API server's answer was processed.
    pub(super) call_to_answer: f64,
}

/// Reads the story of the line that was written at `written`.
pub(super) async fn read(client: &Client, node: &str, written: Timestamp) -> anyhow::Result<Parts> {
    let began = Instant::now();
    loop {
        let story: Explain = client.get(&format!("/api/v1/nodes/{node}/explain")).await?;
        if let Some(parts) = parts(&story.entries, written) {
            return Ok(parts);
        }
        if began.elapsed() > LIMIT {
            bail!("the story of {node} lacks the cordon that the watch has just shown");
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Returns the parts of the first decision after `written`; `None` while its answer is missing.
fn parts(entries: &[TimelineEntry], written: Timestamp) -> Option<Parts> {
    let first = |kind, from| {
        let kind = TimelineKind::Journal(kind);
        let mut of_kind = entries.iter().filter(|entry| entry.kind == kind);
        of_kind.find(|entry| entry.at >= from)
    };
    let decision = first(EntryKind::Decision, written)?;
    let cause = decision.detail.get("events")?.as_array()?.last()?;
    let event = entries
        .iter()
        .find(|entry| entry.kind == TimelineKind::Event && entry.detail.get("id") == Some(cause))?;
    let call = first(EntryKind::Call, decision.at)?;
    let answer = first(EntryKind::Answer, call.at)?;
    let between = |from: Timestamp, to: Timestamp| {
        millis(to.duration_since(from).try_into().unwrap_or_default())
    };
    Some(Parts {
        line_to_event: between(written, event.at),
        event_to_call: between(event.at, call.at),
        call_to_answer: between(call.at, answer.at),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(ms).unwrap()
    }

    fn entry(ms: i64, kind: TimelineKind, detail: Value) -> TimelineEntry {
        TimelineEntry {
            at: at(ms),
            kind,
            text: String::new(),
            detail,
            session: None,
        }
    }

    #[test]
    fn the_parts_are_of_this_round_and_of_its_own_event() {
        let [decision, call, answer] =
            [EntryKind::Decision, EntryKind::Call, EntryKind::Answer].map(TimelineKind::Journal);
        let mut entries = vec![
            entry(90, decision, json!({"events": ["old"]})),
            entry(91, call, Value::Null),
            entry(99, answer, Value::Null),
            entry(101, TimelineKind::Event, json!({"id": "another"})),
            entry(103, TimelineKind::Event, json!({"id": "this"})),
            entry(108, decision, json!({"events": ["this"]})),
            entry(109, call, Value::Null),
        ];
        assert_eq!(parts(&entries, at(100)), None);
        entries.push(entry(116, answer, Value::Null));
        let expected = Parts {
            line_to_event: 3.0,
            event_to_call: 6.0,
            call_to_answer: 7.0,
        };
        assert_eq!(parts(&entries, at(100)), Some(expected));
    }
}
