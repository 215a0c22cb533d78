//! Facts about claims, device classes, gangs and nodes that pods refer to, read from the API
//! server.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::{ApiError, Cluster, ObjectKind, Selection, Signal, apply_signal};
use model::listing::Listing;
use preflight::config::Discovery;
use preflight::gang::{Gang, Size, SizeFrom};
use preflight::resources::ClusterClaims;
use runtime::logging::chain;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kept::{MemoryBudget, ObjectKey};
use crate::turns::memory;

/// Longest wait for all facts of one answer. The API server itself waits 10 s.
pub(crate) const DEADLINE: Duration = Duration::from_secs(3);
/// Time reserved for the answer itself after waiting for facts.
const LAST: Duration = Duration::from_secs(1);
/// Most claims that are looked up for one pod. Each is a request to the API server; a pod of
/// eight GPUs has a handful.
const MAX_CLAIMS: usize = 64;
/// Time that an object is cached. The spec of a claim is immutable, but another claim may take
/// its name.
const FRESH: Duration = Duration::from_secs(10);
/// Most cached objects. A pod of a job has its own claim, or shares a template with many. Bytes
/// are limited as well, in total and per namespace, since the creators of pods decide on the
/// size.
const MAX_ANSWERS: usize = 4096;
/// Number of cached objects above which expired ones are removed.
const MANY_ANSWERS: usize = 256;
/// Fields of an object that are cached, besides `spec`.
const NEEDED: [&str; 5] = [
    "/apiVersion",
    "/kind",
    "/metadata/name",
    "/metadata/uid",
    "/metadata/labels",
];
/// API versions of claims, newest first.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1beta1"];
const GROUP: &str = "resource.k8s.io";
/// Label of a namespace with the Pod Security level that its pods must meet.
const ENFORCED: &str = "pod-security.kubernetes.io/enforce";
/// Levels that forbid host volumes.
const FORBIDDING: [&str; 2] = ["baseline", "restricted"];
/// Interval for discovering the API of claims while the cluster does not serve it.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Cached reader of facts. Cheap to clone.
#[derive(Clone)]
pub struct Facts {
    cluster: Arc<Cluster>,
    answers: Arc<Mutex<Answers>>,
    classes: watch::Receiver<Option<Arc<Classes>>>,
}

/// Objects with the time of their request, by namespace, and by kind and name.
#[derive(Default)]
struct Answers {
    objects: HashMap<ObjectKey, (Instant, Arc<Value>)>,
    budget: MemoryBudget,
}

/// Device classes that stand for extended resources.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Classes {
    /// API version of claims; `None` if the cluster does not serve them.
    version: Option<&'static str>,
    /// Class by extended resource.
    by_resource: BTreeMap<String, String>,
}

/// Reason why a fact is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unknown {
    /// Temporary; a retry may succeed.
    #[error("{0}")]
    Now(String),
    /// Permanent until somebody changes something.
    #[error("{0}")]
    ForGood(String),
}

impl From<Unknown> for String {
    fn from(unknown: Unknown) -> Self {
        unknown.to_string()
    }
}

// === impl Facts ===

impl Facts {
    /// Creates the reader, and the task that watches device classes. No classes are known until
    /// they are listed.
    pub fn new(
        cluster: Arc<Cluster>,
        cancel: CancellationToken,
    ) -> (Self, impl Future<Output = ()>) {
        let (sender, classes) = watch::channel(None);
        let following = follow_classes(Arc::clone(&cluster), sender, cancel);
        let facts = Self {
            cluster,
            answers: Arc::default(),
            classes,
        };
        (facts, following)
    }

    /// Returns true once the device classes are listed.
    pub fn are_known(&self) -> bool {
        self.classes.borrow().is_some()
    }

    /// Fetches the claims and claim templates that [`preflight::resources::claims_named`]
    /// returned for a pod. The error names the one that could not be fetched by `until`.
    pub async fn claims(
        &self,
        (claims, templates): (BTreeSet<String>, BTreeSet<String>),
        namespace: &str,
        until: Instant,
    ) -> Result<ClusterClaims, String> {
        let classes = self.classes.borrow().clone().unwrap_or_default();
        let mut known = ClusterClaims {
            classes: classes.by_resource.clone(),
            ..ClusterClaims::default()
        };
        let Some(version) = classes.version else {
            return Ok(known);
        };
        let named = claims.len() + templates.len();
        if named > MAX_CLAIMS {
            return Err(format!(
                "the pod names {named} claims, and at most {MAX_CLAIMS} are looked up"
            ));
        }
        for (names, resource, spec, into) in [
            (claims, "resourceclaims", "/spec", &mut known.claims),
            (
                templates,
                "resourceclaimtemplates",
                "/spec/spec",
                &mut known.templates,
            ),
        ] {
            let kind = ObjectKind::new(GROUP, version, resource);
            for name in names {
                let found = self.object(&kind, Some(namespace), &name, until).await?;
                let spec = found.as_deref().and_then(|object| object.pointer(spec));
                into.extend(spec.map(|spec| (name, spec.clone())));
            }
        }
        Ok(known)
    }

    /// Returns the Pod Security level that a namespace enforces, if it forbids host paths. The
    /// error is the reason why it is not known by `until`.
    pub(crate) async fn forbids_host_paths(
        &self,
        namespace: &str,
        until: Instant,
    ) -> Result<Option<String>, String> {
        let kind = ObjectKind::new("", "v1", "namespaces");
        let found = self.object(&kind, None, namespace, until).await?;
        let labels = found.as_ref().and_then(|it| it.pointer("/metadata/labels"));
        let level = labels.and_then(|labels| labels.get(ENFORCED)?.as_str());
        let level = level.filter(|level| FORBIDDING.contains(level));
        Ok(level.map(str::to_owned))
    }

    /// Returns the value of a node's label, if set. The error is the reason why it is not
    /// known.
    pub(crate) async fn label_of_node(
        &self,
        node: &str,
        label: &str,
    ) -> Result<Option<String>, String> {
        let kind = ObjectKind::new("", "v1", "nodes");
        let until = Instant::now() + DEADLINE;
        let found = self.object(&kind, None, node, until).await?;
        let labels = found.as_ref().and_then(|it| it.pointer("/metadata/labels"));
        let label = labels.and_then(|labels| labels.get(label)?.as_str());
        Ok(label.map(str::to_owned))
    }

    /// Returns the size of a gang and the object that specifies it; `None` if the object does
    /// not exist. The error is the reason why it is not known by `until`.
    pub(crate) async fn size_of(
        &self,
        gang: &Gang,
        by: &Discovery,
        until: Instant,
    ) -> Result<Option<(Size, Arc<Value>)>, Unknown> {
        let Some(object) = self.gang_object(gang, until).await? else {
            return Ok(None);
        };
        let size = gang.size_in(&object, by);
        let size = size.map_err(|why| Unknown::ForGood(why.to_string()))?;
        Ok(Some((size, object)))
    }

    async fn gang_object(
        &self,
        gang: &Gang,
        until: Instant,
    ) -> Result<Option<Arc<Value>>, Unknown> {
        let SizeFrom::Object { kinds, name, .. } = &gang.size else {
            return Ok(None);
        };
        for kind in kinds {
            let kind = ObjectKind::new(&kind.group, &kind.version, &kind.resource);
            let found = self
                .object(&kind, Some(&gang.namespace), name, until)
                .await?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    async fn object(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        until: Instant,
    ) -> Result<Option<Arc<Value>>, Unknown> {
        let key = (
            namespace.unwrap_or_default().to_owned(),
            format!("{}/{}/{}/{name}", kind.group, kind.version, kind.resource),
        );
        if let Some(object) = self.cached(&key) {
            return Ok(Some(object));
        }
        let reading = self.cluster.object(kind, namespace, name);
        match tokio::time::timeout_at(until, reading).await {
            // A missing object is not cached, since it may appear at any moment.
            Ok(Ok(object)) => Ok(object.map(|object| self.store(key, Arc::new(needed(&object))))),
            Ok(Err(error)) => {
                let why = format!("{} {name}: {}", kind.resource, chain(&error));
                Err(match error {
                    ApiError::Forbidden { status: 403, .. } => Unknown::ForGood(why),
                    _ => Unknown::Now(why),
                })
            }
            Err(_) => Err(Unknown::Now(format!(
                "{} {name}: no answer in time",
                kind.resource
            ))),
        }
    }

    fn cached(&self, key: &ObjectKey) -> Option<Arc<Value>> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, object) = answers.objects.get_mut(key)?;
        if at.elapsed() >= FRESH {
            // This caller refreshes the object; concurrent callers use the old one meanwhile.
            *at = Instant::now();
            return None;
        }
        Some(Arc::clone(object))
    }

    fn store(&self, key: ObjectKey, object: Arc<Value>) -> Arc<Value> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let Answers { objects, budget } = &mut *answers;
        if objects.len() >= MANY_ANSWERS {
            objects.retain(|key, (at, _)| {
                let is_fresh = at.elapsed() < FRESH;
                if !is_fresh {
                    budget.remove(key);
                }
                is_fresh
            });
        }
        if objects.len() < MAX_ANSWERS {
            let gone = budget.add(&key, memory(object.to_string().as_bytes()));
            objects.insert(key, (Instant::now(), Arc::clone(&object)));
            for key in gone {
                objects.remove(&key);
            }
        }
        object
    }
}

/// Returns the deadline for all facts of an answer that is due at `due`.
pub(crate) fn known_by(due: Instant) -> Instant {
    let left = due.checked_sub(LAST).unwrap_or(due);
    left.min(Instant::now() + DEADLINE)
}

/// Returns the parts of an object that are read.
fn needed(object: &Value) -> Value {
    let part = |pointer: &str| object.pointer(pointer).cloned().unwrap_or_default();
    let [api_version, kind, name, uid, labels] = NEEDED.map(part);
    json!({
        "apiVersion": api_version, "kind": kind, "spec": object.get("spec"),
        "metadata": {"name": name, "uid": uid, "labels": labels},
    })
}

/// Watches the device classes until `cancel`.
async fn follow_classes(
    cluster: Arc<Cluster>,
    known: watch::Sender<Option<Arc<Classes>>>,
    cancel: CancellationToken,
) {
    let follow = async {
        let version = loop {
            match served(&cluster).await {
                Ok(Some(version)) => break version,
                Ok(None) => {
                    known.send_replace(Some(Arc::default()));
                    tokio::time::sleep(ASK_AGAIN).await;
                }
                Err(why) => {
                    tracing::warn!("device classes are not known yet: {why}");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        };
        let kind = ObjectKind::new(GROUP, version, "deviceclasses");
        let mut signals = cluster.watch::<Value>(Selection::of_kind(&kind, None), cancel.clone());
        // Resource by class, so that a deleted class also removes its resource.
        let mut resources: Listing<String, Option<String>> = Listing::default();
        while let Some(signal) = signals.recv().await {
            if matches!(signal, Signal::Failing { .. } | Signal::Recovered) {
                continue;
            }
            apply_signal(&mut resources, signal, |class| {
                let text = |pointer: &str| class.pointer(pointer).and_then(Value::as_str);
                let resource = text("/spec/extendedResourceName").map(str::to_owned);
                Some((text("/metadata/name")?.to_owned(), resource))
            });
            // The previous classes stay valid until a new list is complete.
            let listed = resources.is_complete() && !resources.is_arriving();
            if listed {
                let by_resource = resources.iter();
                let by_resource = by_resource
                    .filter_map(|(class, resource)| Some((resource.clone()?, class.clone())));
                known.send_replace(Some(Arc::new(Classes {
                    version: Some(version),
                    by_resource: by_resource.collect(),
                })));
            }
        }
    };
    cancel.run_until_cancelled(follow).await;
}

/// Returns the API version of claims that the cluster serves; `None` if it serves none.
async fn served(cluster: &Cluster) -> Result<Option<&'static str>, String> {
    let served = cluster.served_versions(GROUP).await;
    let served = served.map_err(|error| chain(&error))?;
    Ok(VERSIONS
        .into_iter()
        .find(|version| served.iter().any(|one| one == version)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anybody who may create pods may create claim templates, each of up to 1 MiB.
    #[tokio::test]
    async fn of_large_objects_only_so_many_are_kept() {
        let cluster = crate::server::tests::away().await;
        let (facts, _following) = Facts::new(cluster, CancellationToken::new());
        let of = |namespace: &str, number: usize| (namespace.to_owned(), number.to_string());
        let usual = Arc::new(json!({"spec": {"a": "b"}}));
        facts.store(of("other", 0), usual);
        let large = Arc::new(json!({"spec": {"a": "x".repeat(1_000_000)}}));
        for number in 0..20 {
            facts.store(of("tenant", number), Arc::clone(&large));
        }
        let answers = facts.answers.lock().expect("no panic elsewhere");
        let kept = answers.objects.len();
        assert!((2..10).contains(&kept), "{kept}");
        assert!(answers.objects.contains_key(&of("other", 0)));
    }
}
