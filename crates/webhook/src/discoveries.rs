//! How gangs are known in each namespace: by the `PreflightConfig` of the namespace, or else as the
//! configuration says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, Signal};
use jiff::Timestamp;
use preflight::config::Discovery;
use runtime::logging::{Seldom, chain};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::review::shortened;

const GROUP: &str = "preflight.nvsentinel.nvidia.com";
const VERSION: &str = "v1alpha1";
/// Pause before a cluster without that kind is asked for it again.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// Most bytes of what a `PreflightConfig` says, as JSON. Whoever may make one decides how large it is, and a usual one has
/// some hundred.
const MAX_BYTES: usize = 16 * 1024;
/// Most bytes of a status that is kept: more than what is said on the largest config that is read.
const MAX_STATUS_BYTES: usize = 64 * 1024;

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
type Configs = BTreeMap<(String, String), Arc<SeenConfig>>;

/// A `PreflightConfig`, as the watch delivers it: what is kept of it.
#[derive(Deserialize)]
#[serde(from = "Config")]
struct SeenConfig {
    metadata: Metadata,
    /// The way that it says, or why it cannot be used.
    discovery: Result<Arc<Discovery>, String>,
    /// The status but for times; nothing where that is too large to be ours.
    said: Value,
}

#[derive(Deserialize)]
struct Config {
    metadata: Metadata,
    spec: Option<Spec>,
    #[serde(default)]
    status: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    namespace: String,
    name: String,
    #[serde(default)]
    creation_timestamp: String,
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    generation: Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    gang_discovery: Value,
}

// === impl SeenConfig ===

impl From<Config> for SeenConfig {
    fn from(config: Config) -> Self {
        let keys = config.spec.unwrap_or_default().gang_discovery;
        let bytes = keys.to_string().len();
        let discovery = if bytes > MAX_BYTES {
            Err(format!(
                "gangDiscovery has {bytes} bytes, at most {MAX_BYTES} are read"
            ))
        } else {
            Discovery::from_json(&keys).map(Arc::new)
        };
        let said = without_time(config.status);
        let is_small = said.to_string().len() <= MAX_STATUS_BYTES;
        Self {
            metadata: config.metadata,
            discovery: discovery.map_err(|why| shortened(&why).into_owned()),
            said: if is_small { said } else { Value::Null },
        }
    }
}

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
        let own = oldest.and_then(|config| config.discovery.as_ref().ok());
        Arc::clone(own.unwrap_or(&self.otherwise))
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
            let unsaid = Seldom::default();
            let mut signals = cluster.watch_objects_as(&kind(), None, |all| all, cancel.clone());
            while let Some(signal) = signals.recv().await {
                for (config, status) in self.take(signal) {
                    if let Err(error) = say(&cluster, &config, status).await
                        && let Some(not_logged_before) = unsaid.now()
                    {
                        tracing::warn!(
                            namespace = config.metadata.namespace,
                            err = chain(&error),
                            not_logged_before,
                            "whether a PreflightConfig is used cannot be said on it"
                        );
                    }
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    /// Takes in a signal. Returns the configs of which something else may be to say now, and what.
    fn take(&self, signal: Signal<SeenConfig>) -> Vec<(Arc<SeenConfig>, Value)> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut *known;
        let is_listing = known.listing.is_some();
        let configs = known.listing.as_mut().unwrap_or(&mut known.by_namespace);
        let (namespace, changed) = match signal {
            Signal::Restarted => {
                known.listing = Some(BTreeMap::new());
                return Vec::new();
            }
            Signal::Listed => {
                known.by_namespace = known.listing.take().unwrap_or_default();
                known.was_listed = true;
                let all = known.by_namespace.values();
                return all.flat_map(|all| said(all, |_| true)).collect();
            }
            Signal::Applied(config) => {
                let metadata = &config.metadata;
                let namespace = metadata.namespace.clone();
                let key = (metadata.creation_timestamp.clone(), metadata.name.clone());
                let all = configs.entry(namespace.clone()).or_default();
                all.insert(key.clone(), config);
                (namespace, Some(key))
            }
            Signal::Deleted(full) => {
                let Some((namespace, name)) = full.split_once('/') else {
                    return Vec::new();
                };
                if let Some(all) = configs.get_mut(namespace) {
                    all.retain(|(_, known), _| known != name);
                    if all.is_empty() {
                        configs.remove(namespace);
                    }
                }
                (namespace.to_owned(), None)
            }
            Signal::Failing { .. } | Signal::Recovered => return Vec::new(),
        };
        // Which is the oldest is not known before the list is whole.
        let all = configs.get(&namespace).filter(|_| !is_listing);
        let is_changed = |key: &(String, String)| Some(key) == changed.as_ref();
        all.map_or_else(Vec::new, |all| said(all, is_changed))
    }
}

/// Returns what is to be said on the configs of a namespace that have changed, on the oldest, and on the next one, which
/// may have been the oldest before. Of all others it is the same as before.
fn said(
    all: &Configs,
    is_changed: impl Fn(&(String, String)) -> bool,
) -> Vec<(Arc<SeenConfig>, Value)> {
    let said = all.iter().enumerate();
    let said = said.filter(|(place, (key, _))| *place < 2 || is_changed(key));
    said.map(|(place, (_, config))| (Arc::clone(config), status(config, place == 0)))
        .collect()
}

/// Says on a config whether it is used, where that is not said yet. Of the object only the status is written.
async fn say(cluster: &Cluster, config: &SeenConfig, status: Value) -> Result<(), ApiError> {
    if config.said == without_time(status.clone()) {
        return Ok(());
    }
    let Metadata {
        namespace,
        name,
        resource_version,
        ..
    } = &config.metadata;
    let config = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "PreflightConfig",
        "metadata": {"namespace": namespace, "name": name, "resourceVersion": resource_version},
        "status": status,
    });
    match cluster
        .replace_status(&kind(), namespace, name, &config)
        .await
    {
        // Another replica was first, or it has changed: the watch tells.
        Ok(()) | Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn kind() -> Kind {
    Kind::new(GROUP, VERSION, "preflightconfigs")
}

/// Returns what is said on a config: whether it is used, and why not.
fn status(config: &SeenConfig, is_oldest: bool) -> Value {
    let (ready, reason, message, discoverer) = match (is_oldest, &config.discovery) {
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
        "observedGeneration": config.metadata.generation,
    });
    json!({
        "observedGeneration": config.metadata.generation,
        "discoverer": discoverer,
        "conditions": [condition],
    })
}

/// Returns a status without the time of its first condition, by which alone it is said no second time.
fn without_time(mut status: Value) -> Value {
    let condition = status.pointer_mut("/conditions/0");
    if let Some(condition) = condition.and_then(Value::as_object_mut) {
        condition.remove("lastTransitionTime");
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str, created: &str, discovery: &Value) -> Signal<SeenConfig> {
        let config = serde_json::from_value(json!({
            "metadata": {
                "namespace": "training", "name": name, "creationTimestamp": created, "generation": 3,
            },
            "spec": {"gangDiscovery": discovery},
        }));
        Signal::Applied(Arc::new(config.expect("a config")))
    }

    fn reasons(said: &[(Arc<SeenConfig>, Value)]) -> Vec<(&str, &str)> {
        let said = said.iter().map(|(config, status)| {
            let reason = status["conditions"][0]["reason"].as_str();
            (&*config.metadata.name, reason.unwrap_or_default())
        });
        said.collect()
    }

    #[test]
    fn the_oldest_of_a_namespace_counts_and_the_others_learn_it() {
        let discoveries = Discoveries::new(Discovery::Native);
        let kueue = json!({"method": "kueue"});
        let said = discoveries.take(config("b", "2026-02-01T00:00:00Z", &kueue));
        assert_eq!(reasons(&said), [("b", "DiscovererActive")]);
        assert_eq!(said[0].1["discoverer"], "kueue");
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert_eq!(*discoveries.of("elsewhere"), Discovery::Native);

        let volcano = json!({"method": "volcano"});
        let said = discoveries.take(config("a", "2026-01-01T00:00:00Z", &volcano));
        let (used, other) = (("a", "DiscovererActive"), ("b", "InvalidOrConflicting"));
        assert_eq!(reasons(&said), [used, other]);
        assert_eq!(discoveries.of("training").name(), "volcano");

        discoveries.take(Signal::Deleted("training/a".into()));
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert!(!discoveries.are_known(), "no list was whole");
        // A list that begins anew takes nothing away until it is whole.
        discoveries.take(Signal::Restarted);
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        let said = discoveries.take(config("b", "2026-02-01T00:00:00Z", &kueue));
        assert!(said.is_empty(), "an older one may come");
        let said = discoveries.take(Signal::Listed);
        assert_eq!(reasons(&said), [("b", "DiscovererActive")]);
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
        let condition = &said[0].1["conditions"][0];
        assert_eq!(condition["status"], "False");
        let message = condition["message"].as_str().unwrap_or_default();
        assert!(message.contains("`podGroupGVR` is missing"), "{message}");
        assert_eq!(*discoveries.of("training"), Discovery::Native);
        let mut later = said[0].1.clone();
        later["conditions"][0]["lastTransitionTime"] = "2026-01-02T00:00:00Z".into();
        assert_eq!(
            without_time(later),
            without_time(said[0].1.clone()),
            "it is not said again for its time alone"
        );
    }

    /// Tenants may make many, and large ones.
    #[test]
    fn many_and_large_ones_cost_little() {
        let discoveries = Discoveries::new(Discovery::Native);
        let kueue = json!({"method": "kueue"});
        for number in 0..100 {
            let name = format!("c{number:02}");
            discoveries.take(config(&name, "2026-02-01T00:00:00Z", &kueue));
        }
        let said = discoveries.take(config("c77", "2026-02-01T00:00:00Z", &kueue));
        let (used, other) = ("DiscovererActive", "InvalidOrConflicting");
        assert_eq!(
            reasons(&said),
            [("c00", used), ("c01", other), ("c77", other)]
        );
        let said = discoveries.take(Signal::Deleted("training/c00".into()));
        assert_eq!(reasons(&said), [("c01", used), ("c02", other)]);
        let large = json!({"method": "kueue", "name": "x".repeat(1_000_000)});
        let said = discoveries.take(config("a", "2026-01-01T00:00:00Z", &large));
        let message = said[0].1["conditions"][0]["message"].as_str();
        let message = message.unwrap_or_default();
        assert!(message.contains("at most 16384 are read"), "{message}");
        assert_eq!(*discoveries.of("training"), Discovery::Native);
        // Nor is a status kept that is none of ours.
        let foreign: SeenConfig = serde_json::from_value(json!({
            "metadata": {"namespace": "training", "name": "b"},
            "status": {"discoverer": "x".repeat(100_000)},
        }))
        .expect("a config");
        assert_eq!(foreign.said, Value::Null);
    }
}
