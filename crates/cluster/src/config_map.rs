//! Following one `ConfigMap`.

use std::collections::BTreeMap;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::Cluster;
use crate::watch::{Signal, Watch};

/// Events that wait for the consumer. There is one object, and it rarely changes.
const QUEUE: usize = 16;

/// What is said of a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigMapEvent {
    /// Its `data`, at first and after each change.
    Seen(BTreeMap<String, String>),
    /// There is none of this name.
    Missing,
    /// It cannot be watched; it is tried again for ever, and each failed try is told.
    Failing {
        /// Why, for people.
        error: String,
    },
}

// === impl Cluster ===

impl Cluster {
    /// Follows a `ConfigMap` until `cancel` is cancelled or the receiver is dropped; what it
    /// is now comes first. Takes the permissions `list` and `watch` in its namespace. Must
    /// be called within a tokio runtime.
    pub fn watch_config_map(
        &self,
        namespace: &str,
        name: &str,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<ConfigMapEvent> {
        let (signals, mut incoming) = mpsc::channel(QUEUE);
        let (events, receiver) = mpsc::channel(QUEUE);
        let watch = Watch::new(
            self.client.clone(),
            format!("/api/v1/namespaces/{namespace}/configmaps"),
            Some(format!("metadata.name={name}")),
            Some,
            signals,
        );
        tokio::spawn(async move { cancel.run_until_cancelled(watch.run()).await });
        tokio::spawn(async move {
            let mut listed = false;
            let mut last = None;
            while let Some(signal) = incoming.recv().await {
                let event = match signal {
                    Signal::Restarted => {
                        listed = false;
                        continue;
                    }
                    Signal::Applied(object) => {
                        listed = true;
                        ConfigMapEvent::Seen(data(&object))
                    }
                    Signal::Listed if listed => continue,
                    Signal::Listed | Signal::Deleted(_) => ConfigMapEvent::Missing,
                    Signal::Failing { error } => ConfigMapEvent::Failing { error },
                    // It goes on from where it was: what was known holds again.
                    Signal::Recovered => match last.clone() {
                        Some(event) => event,
                        None => continue,
                    },
                };
                if !matches!(event, ConfigMapEvent::Failing { .. }) {
                    last = Some(event.clone());
                }
                if events.send(event).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }
}

fn data(object: &Value) -> BTreeMap<String, String> {
    let pairs = object["data"].as_object().into_iter().flatten();
    pairs
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake::{self, Answer};

    fn object(text: &str, version: u32) -> Value {
        json!({"metadata": {"name": "p", "resourceVersion": version.to_string()}, "data": {"a": text}})
    }

    fn list(items: &[Value], version: &str) -> Answer {
        let metadata = json!({"resourceVersion": version});
        Answer::Now(
            200,
            json!({"metadata": metadata, "items": items}).to_string(),
        )
    }

    fn line(kind: &str, object: &Value) -> String {
        json!({"type": kind, "object": object}).to_string()
    }

    #[tokio::test]
    async fn a_config_map_is_followed_through_change_deletion_and_return() {
        let forbidden =
            json!({"kind": "Status", "status": "Failure", "code": 403, "message": "no"});
        let answers = vec![
            Answer::Now(403, forbidden.to_string()),
            list(&[object("1", 1)], "1"),
            Answer::Lines(vec![
                line("MODIFIED", &object("2", 2)),
                line("DELETED", &object("2", 3)),
            ]),
            Answer::Now(410, json!({"kind": "Status", "code": 410}).to_string()),
            list(&[], "4"),
            Answer::Lines(vec![line("ADDED", &object("3", 5))]),
            Answer::Now(500, String::new()),
            Answer::Open(Vec::new()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let mut events = cluster.watch_config_map("ns", "p", CancellationToken::new());
        let seen = |text: &str| ConfigMapEvent::Seen([("a".to_owned(), text.to_owned())].into());
        assert!(matches!(
            events.recv().await,
            Some(ConfigMapEvent::Failing { .. })
        ));
        for expected in [
            seen("1"),
            seen("2"),
            ConfigMapEvent::Missing,
            ConfigMapEvent::Missing,
            seen("3"),
        ] {
            assert_eq!(events.recv().await, Some(expected));
        }
        // Nothing has changed when the watch works again: it is said all the same.
        assert!(matches!(
            events.recv().await,
            Some(ConfigMapEvent::Failing { .. })
        ));
        assert_eq!(events.recv().await, Some(seen("3")));
        let [_, uri, _] = requests.recv().await.unwrap();
        assert!(
            uri.starts_with("/api/v1/namespaces/ns/configmaps?")
                && uri.contains("fieldSelector=metadata.name%3Dp"),
            "{uri}"
        );
    }
}
