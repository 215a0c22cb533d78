//! Kubernetes Events about nodes.

use cluster::Event;
use fleet::EventReason;
use jiff::Timestamp;
use model::reporter::OWN_AGENT;
use runtime::logging::chain;
use sha2::{Digest as _, Sha256};

use super::{Client, RequestAnswer};

/// Type of Events about drains, as in NVSentinel.
const EVENT_TYPE: &str = "NodeDraining";
/// Source of Events about drains, as in NVSentinel.
const EVENT_SOURCE: &str = "nvsentinel-node-drainer";
/// Type of gpuwarden's own Events.
const WARNING: &str = "Warning";

/// Emits an Event about a node. The same text and `since` result in the same Event, even after a
/// restart.
pub(crate) async fn emit(
    client: Client,
    node: String,
    since: Timestamp,
    reason: EventReason,
    message: String,
) -> RequestAnswer {
    let (kind, source) = match reason {
        EventReason::QuarantineUndone | EventReason::Incident | EventReason::ApprovalNeeded => {
            (WARNING, OWN_AGENT)
        }
        EventReason::AwaitingPodCompletion | EventReason::WaitingBeforeForceDelete => {
            (EVENT_TYPE, EVENT_SOURCE)
        }
    };
    let reason = reason.name();
    let now = (client.clock)();
    let event = Event {
        name: event_name(&node, since, reason, &message),
        node,
        pod: None,
        kind: kind.to_owned(),
        reason: reason.to_owned(),
        message,
        agent: source.to_owned(),
        count: 1,
        first_seen: now,
        last_seen: now,
    };
    // Best effort: a lost Event changes no decision.
    if let Err(error) = client.cluster.create_event(&event).await {
        tracing::debug!(err = chain(&error), "an Event was not created");
    }
    RequestAnswer {
        input: None,
        entry: None,
    }
}

/// Returns the name of an Event. It differs between drains, even if two wait for pods of the
/// same names.
fn event_name(node: &str, since: Timestamp, reason: &str, message: &str) -> String {
    let hash = format!(
        "{:x}",
        Sha256::digest(format!("{reason} {message} {since}"))
    );
    let hash: String = hash.chars().take(16).collect();
    format!("{node}-{hash}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_drain_tells_who_is_waited_for_and_tells_it_once() {
        let name = |since, message| {
            let since = Timestamp::from_second(since).unwrap();
            event_name("n1", since, "AwaitingPodCompletion", message)
        };
        let first = name(1_800_000_000, "[jobs/a]");
        assert_eq!(first, name(1_800_000_000, "[jobs/a]"));
        assert_ne!(first, name(1_800_000_000, "[jobs/b]"));
        assert_ne!(first, name(1_800_009_000, "[jobs/a]"));
        assert!(first.starts_with("n1-"), "{first}");
    }
}
