//! How gangs are known in each namespace: by the `PreflightConfig` of the namespace, or else as the
//! configuration says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, Signal};
use jiff::Timestamp;
use preflight::config::Discovery;
use runtime::logging::chain;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const GROUP: &str = "preflight.nvsentinel.nvidia.com";
const VERSION: &str = "v1alpha1";
/// Pause before a cluster without that kind is asked for it again.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// How gangs are known in each namespace. Cheap to clone.
#[derive(Clone)]
pub struct Discoveries {
    otherwise: Arc<Discovery>,
    known: Arc<Mutex<Known>>,
}

/// The `PreflightConfig`s that are known.
#[derive(Default)]
struct Known {
    by_namespace: BTreeMap<String, Configs>,
    /// A list of them was whole once, or the cluster has no such kind.
    was_listed: bool,
    /// Those of a list that is not whole yet; until it is, the others hold.
    listing: Option<BTreeMap<String, Configs>>,
}

/// The `PreflightConfig`s of a namespace, the oldest first: by creation, then by name.
type Configs = BTreeMap<(String, String), Arc<Value>>;

// === impl Discoveries ===

impl Discoveries {
    /// Returns the ways of namespaces without a `PreflightConfig`, and of the others once
    /// [`follow`](Self::follow) has seen theirs.
    pub fn new(otherwise: Discovery) -> Self {
        Self {
            otherwise: Arc::new(otherwise),
            known: Arc::default(),
        }
    }

    /// Returns the way of a namespace. Of several `PreflightConfig`s the oldest counts; where that
    /// cannot be used, no other does.
    pub fn of(&self, namespace: &str) -> Arc<Discovery> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let configs = known.by_namespace.get(namespace);
        let oldest = configs.and_then(|configs| configs.values().next());
        let own = oldest.and_then(|config| read(config).ok());
        own.map_or_else(|| Arc::clone(&self.otherwise), Arc::new)
    }

    /// Returns whether the `PreflightConfig`s have been listed, or are known not to be served.
    pub fn are_known(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.was_listed
    }

    fn note_none(&self) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.was_listed = true;
    }

    /// Follows the `PreflightConfig`s until `cancel`, and says on each whether it is used.
    pub async fn follow(self, cluster: Arc<Cluster>, cancel: CancellationToken) {
        let follow = async {
            loop {
                match cluster.served_versions(GROUP).await {
                    Ok(versions) if versions.iter().any(|version| version == VERSION) => break,
                    Ok(_) => {
                        self.note_none();
                        tokio::time::sleep(ASK_AGAIN).await;
                    }
                    Err(_) => tokio::time::sleep(RETRY).await,
                }
            }
            let mut signals = cluster.watch_objects(&kind(), None, |all| all, cancel.clone());
            while let Some(signal) = signals.recv().await {
                for (namespace, config, status) in self.take(signal) {
                    let said = self.say(&cluster, &namespace, &config, status).await;
                    if let Err(error) = said {
                        tracing::warn!(
                            namespace,
                            err = chain(&error),
                            "whether a PreflightConfig is used cannot be said on it"
                        );
                    }
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    /// Takes in a signal. Returns the configs of the namespaces that it is about, and what is to be said
    /// on each.
    fn take(&self, signal: Signal<Value>) -> Vec<(String, Arc<Value>, Value)> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut *known;
        let configs = known.listing.as_mut().unwrap_or(&mut known.by_namespace);
        let namespace = match signal {
            Signal::Restarted => {
                known.listing = Some(BTreeMap::new());
                return Vec::new();
            }
            Signal::Listed => {
                known.by_namespace = known.listing.take().unwrap_or_default();
                known.was_listed = true;
                return Vec::new();
            }
            Signal::Applied(config) => {
                let text = |pointer: &str| {
                    let text = config.pointer(pointer).and_then(Value::as_str);
                    text.unwrap_or_default().to_owned()
                };
                let namespace = text("/metadata/namespace");
                let key = (text("/metadata/creationTimestamp"), text("/metadata/name"));
                let all = configs.entry(namespace.clone()).or_default();
                all.insert(key, config);
                namespace
            }
            Signal::Deleted(full) => {
                let Some((namespace, name)) = full.split_once('/') else {
                    return Vec::new();
                };
                if let Some(all) = configs.get_mut(namespace) {
                    all.retain(|(_, known), _| known != name);
                }
                namespace.to_owned()
            }
            Signal::Failing { .. } | Signal::Recovered => return Vec::new(),
        };
        let all = configs.get(&namespace).into_iter().flatten();
        let said = all.enumerate().map(|(place, ((_, _), config))| {
            let status = status(config, place == 0);
            (namespace.clone(), Arc::clone(config), status)
        });
        said.collect()
    }

    /// Says on a config whether it is used, where that is not said yet.
    async fn say(
        &self,
        cluster: &Cluster,
        namespace: &str,
        config: &Value,
        status: Value,
    ) -> Result<(), ApiError> {
        if is_said(&config["status"], &status) {
            return Ok(());
        }
        let mut config = config.clone();
        config["status"] = status;
        let name = config["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        match cluster
            .replace_status(&kind(), namespace, &name, &config)
            .await
        {
            // Another replica was first, or it has changed: the watch tells.
            Ok(()) | Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn kind() -> Kind {
    Kind::new(GROUP, VERSION, "preflightconfigs")
}

fn read(config: &Value) -> Result<Discovery, String> {
    Discovery::from_json(&config["spec"]["gangDiscovery"])
}

/// Returns what is said on a config: whether it is used, and why not.
fn status(config: &Value, is_oldest: bool) -> Value {
    let (ready, reason, message, discoverer) = match (is_oldest, read(config)) {
        (true, Ok(discovery)) => {
            let name = discovery.name().to_owned();
            let message = format!("gangs of this namespace are known by {name}");
            ("True", "DiscovererActive", message, name)
        }
        (true, Err(why)) => {
            let message = format!("{why}; the webhook's own configuration counts meanwhile");
            ("False", "InvalidOrConflicting", message, String::new())
        }
        (false, _) => {
            let message = "another PreflightConfig of this namespace is older, and counts";
            (
                "False",
                "InvalidOrConflicting",
                message.to_owned(),
                String::new(),
            )
        }
    };
    let condition = json!({
        "type": "Ready",
        "status": ready,
        "reason": reason,
        "message": message,
        "lastTransitionTime": Timestamp::now().to_string(),
        "observedGeneration": config["metadata"]["generation"],
    });
    json!({
        "observedGeneration": config["metadata"]["generation"],
        "discoverer": discoverer,
        "conditions": [condition],
    })
}

/// Returns whether a status says the same but for its time.
fn is_said(there: &Value, wanted: &Value) -> bool {
    let without_time = |status: &Value| {
        let mut status = status.clone();
        if let Some(condition) = status
            .pointer_mut("/conditions/0")
            .and_then(Value::as_object_mut)
        {
            condition.remove("lastTransitionTime");
        }
        status
    };
    without_time(there) == without_time(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str, created: &str, discovery: &Value) -> Signal<Value> {
        Signal::Applied(Arc::new(json!({
            "metadata": {
                "namespace": "training", "name": name, "creationTimestamp": created, "generation": 3,
            },
            "spec": {"gangDiscovery": discovery},
        })))
    }

    #[test]
    fn the_oldest_of_a_namespace_counts_and_the_others_learn_it() {
        let discoveries = Discoveries::new(Discovery::Native);
        let kueue = json!({"method": "kueue"});
        let said = discoveries.take(config("b", "2026-02-01T00:00:00Z", &kueue));
        assert_eq!(said[0].2["conditions"][0]["reason"], "DiscovererActive");
        assert_eq!(said[0].2["discoverer"], "kueue");
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert_eq!(*discoveries.of("elsewhere"), Discovery::Native);

        let volcano = json!({"method": "volcano"});
        let said = discoveries.take(config("a", "2026-01-01T00:00:00Z", &volcano));
        let reasons: Vec<_> = said
            .iter()
            .map(|(.., status)| &status["conditions"][0]["reason"])
            .collect();
        assert_eq!(reasons, ["DiscovererActive", "InvalidOrConflicting"]);
        assert_eq!(discoveries.of("training").name(), "volcano");

        discoveries.take(Signal::Deleted("training/a".into()));
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert!(!discoveries.are_known(), "no list was whole");
        // A list that begins anew takes nothing away until it is whole.
        discoveries.take(Signal::Restarted);
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        discoveries.take(config("b", "2026-02-01T00:00:00Z", &kueue));
        discoveries.take(Signal::Listed);
        assert!(discoveries.are_known());
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        discoveries.take(Signal::Deleted("training/b".into()));
        assert_eq!(*discoveries.of("training"), Discovery::Native);
    }

    #[test]
    fn one_that_cannot_be_used_says_why_and_changes_nothing() {
        let discoveries = Discoveries::new(Discovery::Native);
        let wrong = json!({"name": "x"});
        let said = discoveries.take(config("a", "2026-01-01T00:00:00Z", &wrong));
        let condition = &said[0].2["conditions"][0];
        assert_eq!(condition["status"], "False");
        let message = condition["message"].as_str().unwrap_or_default();
        assert!(message.contains("`podGroupGVR` is missing"), "{message}");
        assert_eq!(*discoveries.of("training"), Discovery::Native);
        let mut later = said[0].2.clone();
        later["conditions"][0]["lastTransitionTime"] = "2026-01-02T00:00:00Z".into();
        assert!(
            is_said(&later, &said[0].2),
            "it is not said again for its time alone"
        );
    }
}
