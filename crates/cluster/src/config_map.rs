//! Watches and changes a single `ConfigMap`; a change fails if another client has changed it
//! meanwhile.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap as Object;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::signals::{ObjectState, SingleObject, forward};
use crate::watch::{Selection, Signal};

/// Events that wait for the consumer; few, as one object rarely changes.
const QUEUE: usize = 16;

/// A change of a `ConfigMap`, or of the watch of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigMapEvent {
    /// The `ConfigMap` exists; sent first, and after each change.
    Seen(ConfigMap),
    /// There is no such `ConfigMap`.
    Missing,
    /// The watch fails and is retried for ever; each failed try sends this event.
    Failing {
        /// Error of the watch, in words.
        error: String,
        /// True if a permission is missing, so waiting alone does not help.
        refused: bool,
    },
}

/// The parts of a `ConfigMap` that are used here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigMap {
    /// Version of the object, from `metadata.resourceVersion`.
    pub resource_version: String,
    /// Annotations by key, from `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// Values by key, from `data`.
    pub data: BTreeMap<String, String>,
}

/// A change to a `ConfigMap`: values to set, or with `None` to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigMapChange {
    /// Changes of `metadata.annotations`, by key.
    pub annotations: BTreeMap<String, Option<String>>,
    /// Changes of `data`, by key.
    pub data: BTreeMap<String, Option<String>>,
}

// === impl ConfigMap ===

impl From<Object> for ConfigMap {
    fn from(object: Object) -> Self {
        let metadata = object.metadata;
        Self {
            resource_version: metadata.resource_version.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            data: object.data.unwrap_or_default(),
        }
    }
}

// === impl Cluster ===

impl Cluster {
    /// Watches a `ConfigMap` until `cancel` is cancelled or the receiver is dropped. The first event
    /// is its current state. Takes the permissions `list` and `watch` in its namespace. Must be
    /// called within a tokio runtime.
    pub fn watch_config_map(
        &self,
        namespace: &str,
        name: &str,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<ConfigMapEvent> {
        let selection = Selection::of::<Object>(&(), Some(namespace)).named(name);
        let signals = self.watch::<Object>(selection, cancel);
        let (events, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(async move { forward(signals, &events, config_map_events()).await });
        receiver
    }

    /// Reads a `ConfigMap`; `None` if it does not exist.
    pub async fn config_map(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ConfigMap>, ApiError> {
        let map = found(self.config_maps(namespace).get(name).await)?;
        Ok(map.map(ConfigMap::from))
    }

    /// Creates a `ConfigMap`, or changes it if it is still in the version of `seen`. Returns its
    /// state afterwards.
    pub async fn change_config_map(
        &self,
        namespace: &str,
        name: &str,
        seen: Option<&ConfigMap>,
        change: &ConfigMapChange,
    ) -> Result<ConfigMap, ApiError> {
        let maps = self.config_maps(namespace);
        let map = if let Some(seen) = seen {
            let change = Patch::Merge(json!({
                "metadata": {
                    "resourceVersion": seen.resource_version,
                    "annotations": change.annotations,
                },
                "data": change.data,
            }));
            maps.patch(name, &PatchParams::default(), &change).await?
        } else {
            let metadata = ObjectMeta {
                name: Some(name.to_owned()),
                annotations: Some(set(&change.annotations)),
                ..ObjectMeta::default()
            };
            let object = Object {
                metadata,
                data: Some(set(&change.data)),
                ..Object::default()
            };
            maps.create(&PostParams::default(), &object).await?
        };
        Ok(map.into())
    }

    fn config_maps(&self, namespace: &str) -> Api<Object> {
        // Settings of people take precedence over reports.
        Api::namespaced(self.client(Urgency::Act), namespace)
    }
}

/// Returns a reader of the signals of a watch of one `ConfigMap`.
fn config_map_events() -> impl FnMut(Signal<Object>) -> Option<ConfigMapEvent> {
    let (mut object, mut last) = (SingleObject::default(), None);
    move |signal| {
        let event = match object.apply(signal)? {
            ObjectState::Present(object) => ConfigMapEvent::Seen(Object::clone(&object).into()),
            ObjectState::Missing => ConfigMapEvent::Missing,
            ObjectState::Failing { error, refused } => {
                return Some(ConfigMapEvent::Failing { error, refused });
            }
            // The consumer has received `Failing`: it needs the unchanged state once more.
            ObjectState::Recovered => last.clone()?,
        };
        last = Some(event.clone());
        Some(event)
    }
}

/// Returns the values that a change sets, without those that it removes.
fn set(change: &BTreeMap<String, Option<String>>) -> BTreeMap<String, String> {
    let pairs = change.iter();
    pairs
        .filter_map(|(key, value)| Some((key.clone(), value.clone()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fake::{self, FakeAnswer};

    fn object(text: &str, version: u32) -> Value {
        json!({"metadata": {"name": "p", "resourceVersion": version.to_string()}, "data": {"a": text}})
    }

    fn list(items: &[Value], version: &str) -> FakeAnswer {
        let metadata = json!({"resourceVersion": version});
        FakeAnswer::Now(
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
            FakeAnswer::Now(403, forbidden.to_string()),
            list(&[object("1", 1)], "1"),
            FakeAnswer::Lines(vec![
                line("MODIFIED", &object("2", 2)),
                line("DELETED", &object("2", 3)),
            ]),
            FakeAnswer::Now(410, json!({"kind": "Status", "code": 410}).to_string()),
            list(&[], "4"),
            FakeAnswer::Lines(vec![line("ADDED", &object("3", 5))]),
            FakeAnswer::Now(500, String::new()),
            FakeAnswer::Open(Vec::new()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let mut events = cluster.watch_config_map("ns", "p", CancellationToken::new());
        let seen = |text: &str, version: u32| {
            ConfigMapEvent::Seen(ConfigMap {
                resource_version: version.to_string(),
                annotations: BTreeMap::new(),
                data: [("a".to_owned(), text.to_owned())].into(),
            })
        };
        assert!(matches!(
            events.recv().await,
            Some(ConfigMapEvent::Failing { refused: true, .. })
        ));
        for expected in [
            seen("1", 1),
            seen("2", 2),
            ConfigMapEvent::Missing,
            ConfigMapEvent::Missing,
            seen("3", 5),
        ] {
            assert_eq!(events.recv().await, Some(expected));
        }
        // The unchanged state is sent again when the watch works again.
        assert!(matches!(
            events.recv().await,
            Some(ConfigMapEvent::Failing { refused: false, .. })
        ));
        assert_eq!(events.recv().await, Some(seen("3", 5)));
        let [_, uri, _] = requests.recv().await.unwrap();
        assert!(
            uri.starts_with("/api/v1/namespaces/ns/configmaps?")
                && uri.contains("fieldSelector=metadata.name%3Dp"),
            "{uri}"
        );
    }
}
