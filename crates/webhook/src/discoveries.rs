//! Gang discovery by namespace: the namespace's `PreflightConfig`, or the webhook's own
//! configuration.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::{ApiError, Cluster, ObjectKind, Selection, Signal};
use jiff::Timestamp;
use preflight::config::Discovery;
use runtime::logging::{Seldom, chain};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::review::shortened;

const GROUP: &str = "preflight.nvsentinel.nvidia.com";
const VERSION: &str = "v1alpha1";
/// Interval for discovering the kind while the cluster does not serve it.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// Most bytes of `gangDiscovery` in a `PreflightConfig`, as JSON. A usual one has some hundred
/// bytes, but its author decides.
const MAX_BYTES: usize = 16 * 1024;
/// Most bytes of a status that is compared; above the size of any status written here.
const MAX_STATUS_BYTES: usize = 64 * 1024;

/// Discovery of gangs in each namespace. Cheap to clone.
#[derive(Clone)]
pub struct Discoveries {
    otherwise: Arc<Discovery>,
    known: Arc<Mutex<Known>>,
}

/// State of the watched `PreflightConfig`s.
#[derive(Default)]
struct Known {
    by_namespace: BTreeMap<String, Configs>,
    /// True once a list was complete, or the cluster is known to lack the kind.
    was_listed: bool,
    /// Objects of a list in progress; `by_namespace` stays in use until the list is complete.
    listing: Option<BTreeMap<String, Configs>>,
}

/// `PreflightConfig`s of a namespace by creation time and name, oldest first.
type Configs = BTreeMap<(String, String), Arc<WatchedConfig>>;

/// `PreflightConfig` as received from the watch, reduced to the fields in use.
#[derive(Deserialize)]
#[serde(from = "Config")]
struct WatchedConfig {
    metadata: ConfigMetadata,
    /// Configured discovery, or the reason why it is not usable.
    discovery: Result<Arc<Discovery>, String>,
    /// Status without times; null if it is too large to be written by this program.
    status: Value,
}

#[derive(Deserialize)]
struct Config {
    metadata: ConfigMetadata,
    spec: Option<Spec>,
    #[serde(default)]
    status: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigMetadata {
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

// === impl WatchedConfig ===

impl From<Config> for WatchedConfig {
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
        let status = without_time(config.status);
        let is_small = status.to_string().len() <= MAX_STATUS_BYTES;
        Self {
            metadata: config.metadata,
            discovery: discovery.map_err(|why| shortened(&why).into_owned()),
            status: if is_small { status } else { Value::Null },
        }
    }
}

// === impl Discoveries ===

impl Discoveries {
    /// Creates discoveries that use `otherwise` for every namespace, until
    /// [`follow`](Self::follow) receives its `PreflightConfig`.
    pub fn new(otherwise: Discovery) -> Self {
        Self {
            otherwise: Arc::new(otherwise),
            known: Arc::default(),
        }
    }

    /// Returns the discovery of a namespace. Only the oldest `PreflightConfig` counts; if it is
    /// not usable, the webhook's configuration does.
    pub fn of(&self, namespace: &str) -> Arc<Discovery> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let configs = known.by_namespace.get(namespace);
        let oldest = configs.and_then(|configs| configs.values().next());
        let own = oldest.and_then(|config| config.discovery.as_ref().ok());
        Arc::clone(own.unwrap_or(&self.otherwise))
    }

    /// Returns true once the `PreflightConfig`s are listed, or the cluster is known not to
    /// serve them.
    pub fn are_known(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.was_listed
    }

    fn note_none(&self) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.was_listed = true;
    }

    /// Watches the `PreflightConfig`s until `cancel`, and writes to the status of each whether
    /// it is in use.
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
            let failures = Seldom::default();
            let mut signals = cluster.watch(Selection::of_kind(&kind(), None), cancel.clone());
            while let Some(signal) = signals.recv().await {
                for (config, status) in self.handle(signal) {
                    if let Err(error) = write_status(&cluster, &config, status).await
                        && let Some(not_logged_before) = failures.now()
                    {
                        tracing::warn!(
                            namespace = config.metadata.namespace,
                            err = chain(&error),
                            not_logged_before,
                            "cannot write the status of a PreflightConfig"
                        );
                    }
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    /// Handles an event of the watch. Returns the configs whose status may have changed, with
    /// their new status.
    fn handle(&self, signal: Signal<WatchedConfig>) -> Vec<(Arc<WatchedConfig>, Value)> {
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
                return all.flat_map(|all| statuses(all, |_| true)).collect();
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
        // The oldest config is not known until the list is complete.
        let all = configs.get(&namespace).filter(|_| !is_listing);
        let is_changed = |key: &(String, String)| Some(key) == changed.as_ref();
        all.map_or_else(Vec::new, |all| statuses(all, is_changed))
    }
}

/// Returns the status of changed configs, of the oldest, and of the next, which may have been
/// the oldest before. The status of all others is unchanged.
fn statuses(
    all: &Configs,
    is_changed: impl Fn(&(String, String)) -> bool,
) -> Vec<(Arc<WatchedConfig>, Value)> {
    let places = all.iter().enumerate();
    let changed = places.filter(|(place, (key, _))| *place < 2 || is_changed(key));
    changed
        .map(|(place, (_, config))| (Arc::clone(config), status(config, place == 0)))
        .collect()
}

/// Writes the status of a config if it differs. No other part of the object is written.
async fn write_status(
    cluster: &Cluster,
    config: &WatchedConfig,
    status: Value,
) -> Result<(), ApiError> {
    if config.status == without_time(status.clone()) {
        return Ok(());
    }
    let ConfigMetadata {
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
        // Another replica wrote first, or the config changed; the watch will report it.
        Ok(()) | Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn kind() -> ObjectKind {
    ObjectKind::new(GROUP, VERSION, "preflightconfigs")
}

/// Returns the status: true if the config is in use, or the reason why not.
fn status(config: &WatchedConfig, is_oldest: bool) -> Value {
    let (ready, reason, message, discoverer) = match (is_oldest, &config.discovery) {
        (true, Ok(discovery)) => {
            let name = discovery.name().to_owned();
            let message = format!("gangs of this namespace are found by {name}");
            ("True", "DiscovererActive", message, name)
        }
        (true, Err(why)) => {
            let message = format!("{why}; the webhook's own configuration is used instead");
            ("False", "InvalidOrConflicting", message, String::new())
        }
        (false, _) => {
            let message = "an older PreflightConfig of this namespace takes precedence";
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

/// Returns a status without the time of its first condition. A status that differs only in this
/// time is not written again.
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

    fn config(name: &str, created: &str, discovery: &Value) -> Signal<WatchedConfig> {
        let config = serde_json::from_value(json!({
            "metadata": {
                "namespace": "training", "name": name, "creationTimestamp": created, "generation": 3,
            },
            "spec": {"gangDiscovery": discovery},
        }));
        Signal::Applied(Arc::new(config.expect("a config")))
    }

    fn reasons(changed: &[(Arc<WatchedConfig>, Value)]) -> Vec<(&str, &str)> {
        let changed = changed.iter().map(|(config, status)| {
            let reason = status["conditions"][0]["reason"].as_str();
            (&*config.metadata.name, reason.unwrap_or_default())
        });
        changed.collect()
    }

    #[test]
    fn the_oldest_of_a_namespace_counts_and_the_others_learn_it() {
        let discoveries = Discoveries::new(Discovery::Native);
        let kueue = json!({"method": "kueue"});
        let changed = discoveries.handle(config("b", "2026-02-01T00:00:00Z", &kueue));
        assert_eq!(reasons(&changed), [("b", "DiscovererActive")]);
        assert_eq!(changed[0].1["discoverer"], "kueue");
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert_eq!(*discoveries.of("elsewhere"), Discovery::Native);

        let volcano = json!({"method": "volcano"});
        let changed = discoveries.handle(config("a", "2026-01-01T00:00:00Z", &volcano));
        let (used, other) = (("a", "DiscovererActive"), ("b", "InvalidOrConflicting"));
        assert_eq!(reasons(&changed), [used, other]);
        assert_eq!(discoveries.of("training").name(), "volcano");

        discoveries.handle(Signal::Deleted("training/a".into()));
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        assert!(!discoveries.are_known(), "no list was whole");
        // A new list removes nothing until it is complete.
        discoveries.handle(Signal::Restarted);
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        let changed = discoveries.handle(config("b", "2026-02-01T00:00:00Z", &kueue));
        assert!(changed.is_empty(), "an older one may come");
        let changed = discoveries.handle(Signal::Listed);
        assert_eq!(reasons(&changed), [("b", "DiscovererActive")]);
        assert!(discoveries.are_known());
        assert_eq!(*discoveries.of("training"), Discovery::Kueue);
        discoveries.handle(Signal::Deleted("training/b".into()));
        assert_eq!(*discoveries.of("training"), Discovery::Native);
    }

    #[test]
    fn one_that_cannot_be_used_says_why_and_changes_nothing() {
        let discoveries = Discoveries::new(Discovery::Native);
        let wrong = json!({"name": "x"});
        let changed = discoveries.handle(config("a", "2026-01-01T00:00:00Z", &wrong));
        let condition = &changed[0].1["conditions"][0];
        assert_eq!(condition["status"], "False");
        let message = condition["message"].as_str().unwrap_or_default();
        assert!(message.contains("`podGroupGVR` is missing"), "{message}");
        assert_eq!(*discoveries.of("training"), Discovery::Native);
        let mut later = changed[0].1.clone();
        later["conditions"][0]["lastTransitionTime"] = "2026-01-02T00:00:00Z".into();
        assert_eq!(
            without_time(later),
            without_time(changed[0].1.clone()),
            "a change of the time alone is not written"
        );
    }

    /// Tenants may create many configs, and large ones.
    #[test]
    fn many_and_large_ones_cost_little() {
        let discoveries = Discoveries::new(Discovery::Native);
        let kueue = json!({"method": "kueue"});
        for number in 0..100 {
            let name = format!("c{number:02}");
            discoveries.handle(config(&name, "2026-02-01T00:00:00Z", &kueue));
        }
        let changed = discoveries.handle(config("c77", "2026-02-01T00:00:00Z", &kueue));
        let (used, other) = ("DiscovererActive", "InvalidOrConflicting");
        assert_eq!(
            reasons(&changed),
            [("c00", used), ("c01", other), ("c77", other)]
        );
        let changed = discoveries.handle(Signal::Deleted("training/c00".into()));
        assert_eq!(reasons(&changed), [("c01", used), ("c02", other)]);
        let large = json!({"method": "kueue", "name": "x".repeat(1_000_000)});
        let changed = discoveries.handle(config("a", "2026-01-01T00:00:00Z", &large));
        let message = changed[0].1["conditions"][0]["message"].as_str();
        let message = message.unwrap_or_default();
        assert!(message.contains("at most 16384 are read"), "{message}");
        assert_eq!(*discoveries.of("training"), Discovery::Native);
        // A status of another program is not stored.
        let foreign: WatchedConfig = serde_json::from_value(json!({
            "metadata": {"namespace": "training", "name": "b"},
            "status": {"discoverer": "x".repeat(100_000)},
        }))
        .expect("a config");
        assert_eq!(foreign.status, Value::Null);
    }
}
