//! What the cluster says of the claims, device classes and gangs that pods name, and of their nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, Signal, take_signal};
use model::listing::Listing;
use preflight::config::Discovery;
use preflight::gang::{Gang, Size, SizeFrom};
use preflight::resources::ClusterClaims;
use runtime::logging::chain;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kept::{Kept, Key};
use crate::turns::memory;

/// Longest wait for all that the cluster says for one answer. The API server waits 10 s for us.
pub(crate) const DEADLINE: Duration = Duration::from_secs(3);
/// Time that is left for an answer itself when the cluster is not waited for any longer.
const LAST: Duration = Duration::from_secs(1);
/// Most claims that are looked up for one pod: each is a request to the API server, and a pod of eight GPUs has a
/// handful.
const MAX_CLAIMS: usize = 64;
/// Time for which an answer is good. What claims ask for never changes, but one of the same name may
/// take their place.
const FRESH: Duration = Duration::from_secs(10);
/// Answers that are kept. A pod of a job has a claim of its own, or shares a template with many. How many bytes they
/// have is bounded as well, for all and for those of a namespace: who may create pods writes them.
const MAX_ANSWERS: usize = 4096;
/// Answers beyond which those that are no good any more are let go each time.
const MANY_ANSWERS: usize = 256;
/// The parts of an object that are kept.
const NEEDED: [&str; 5] = [
    "/apiVersion",
    "/kind",
    "/metadata/name",
    "/metadata/uid",
    "/metadata/labels",
];
/// Versions of the API of claims, the newest first.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1beta1"];
const GROUP: &str = "resource.k8s.io";
/// Label of a namespace: the level of Pod Security that its pods have to keep.
const ENFORCED: &str = "pod-security.kubernetes.io/enforce";
/// The levels that forbid volumes of the host.
const FORBIDDING: [&str; 2] = ["baseline", "restricted"];
/// Pause before versions that nobody serves are asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// What the cluster says of what pods name. Cheap to clone.
#[derive(Clone)]
pub struct Facts {
    cluster: Arc<Cluster>,
    answers: Arc<Mutex<Answers>>,
    classes: watch::Receiver<Option<Arc<Classes>>>,
}

/// The objects that were asked for, and when, by namespace, and by kind and name.
#[derive(Default)]
struct Answers {
    objects: HashMap<Key, (Instant, Arc<Value>)>,
    kept: Kept,
}

/// The device classes that stand for extended resources.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Classes {
    /// The version of the API of claims; `None` where nobody serves it.
    version: Option<&'static str>,
    /// Class by resource.
    by_resource: BTreeMap<String, String>,
}

/// The cluster does not say something, and why.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unknown {
    /// It may say it the next time.
    #[error("{0}")]
    Now(String),
    /// Somebody has to change something first.
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
    /// Returns what is known, which is nothing until the device classes are listed, and the task that
    /// follows them.
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

    /// Returns whether the device classes are known.
    pub fn are_known(&self) -> bool {
        self.classes.borrow().is_some()
    }

    /// Returns what the claims and the claim templates of a pod ask for, which are named as by
    /// [`preflight::resources::claims_named`]. The error says what is not known by `until`.
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
            let kind = Kind::new(GROUP, version, resource);
            for name in names {
                let found = self.object(&kind, Some(namespace), &name, until).await?;
                let spec = found.as_deref().and_then(|object| object.pointer(spec));
                into.extend(spec.map(|spec| (name, spec.clone())));
            }
        }
        Ok(known)
    }

    /// Returns the level of Pod Security that a namespace enforces, if it forbids paths of the host. The
    /// error says why that is not known by `until`.
    pub(crate) async fn forbids_host_paths(
        &self,
        namespace: &str,
        until: Instant,
    ) -> Result<Option<String>, String> {
        let kind = Kind::new("", "v1", "namespaces");
        let found = self.object(&kind, None, namespace, until).await?;
        let labels = found.as_ref().and_then(|it| it.pointer("/metadata/labels"));
        let level = labels.and_then(|labels| labels.get(ENFORCED)?.as_str());
        let level = level.filter(|level| FORBIDDING.contains(level));
        Ok(level.map(str::to_owned))
    }

    /// Returns a label of a node, if it has it. The error says why that is not known.
    pub(crate) async fn label_of_node(
        &self,
        node: &str,
        label: &str,
    ) -> Result<Option<String>, String> {
        let kind = Kind::new("", "v1", "nodes");
        let until = Instant::now() + DEADLINE;
        let found = self.object(&kind, None, node, until).await?;
        let labels = found.as_ref().and_then(|it| it.pointer("/metadata/labels"));
        let label = labels.and_then(|labels| labels.get(label)?.as_str());
        Ok(label.map(str::to_owned))
    }

    /// Returns what the object of a gang says of its size, and that object; `None` if there is none yet. The error
    /// says why that is not known by `until`.
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
            let kind = Kind::new(&kind.group, &kind.version, &kind.resource);
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
        kind: &Kind,
        namespace: Option<&str>,
        name: &str,
        until: Instant,
    ) -> Result<Option<Arc<Value>>, Unknown> {
        let key = (
            namespace.unwrap_or_default().to_owned(),
            format!("{}/{}/{}/{name}", kind.group, kind.version, kind.resource),
        );
        if let Some(object) = self.kept(&key) {
            return Ok(Some(object));
        }
        let asked = self.cluster.object(kind, namespace, name);
        match tokio::time::timeout_at(until, asked).await {
            // What is not there may come at any moment, and is asked for again.
            Ok(Ok(object)) => Ok(object.map(|object| self.keep(key, Arc::new(needed(&object))))),
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

    fn kept(&self, key: &Key) -> Option<Arc<Value>> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, object) = answers.objects.get_mut(key)?;
        if at.elapsed() >= FRESH {
            // One asks anew; the others go on with this one, and do not all ask at once.
            *at = Instant::now();
            return None;
        }
        Some(Arc::clone(object))
    }

    fn keep(&self, key: Key, object: Arc<Value>) -> Arc<Value> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let Answers { objects, kept } = &mut *answers;
        if objects.len() >= MANY_ANSWERS {
            objects.retain(|key, (at, _)| {
                let is_fresh = at.elapsed() < FRESH;
                if !is_fresh {
                    kept.let_go(key);
                }
                is_fresh
            });
        }
        if objects.len() < MAX_ANSWERS {
            let gone = kept.keep(&key, memory(object.to_string().as_bytes()));
            objects.insert(key, (Instant::now(), Arc::clone(&object)));
            for key in gone {
                objects.remove(&key);
            }
        }
        object
    }
}

/// Returns until when the cluster is waited for, for all that it is asked for an answer that is due at `due`.
pub(crate) fn known_by(due: Instant) -> Instant {
    let left = due.checked_sub(LAST).unwrap_or(due);
    left.min(Instant::now() + DEADLINE)
}

/// Returns the parts of an object that somebody looks at.
fn needed(object: &Value) -> Value {
    let part = |pointer: &str| object.pointer(pointer).cloned().unwrap_or_default();
    let [api_version, kind, name, uid, labels] = NEEDED.map(part);
    json!({
        "apiVersion": api_version, "kind": kind, "spec": object.get("spec"),
        "metadata": {"name": name, "uid": uid, "labels": labels},
    })
}

/// Follows the device classes until `cancel`.
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
        let kind = Kind::new(GROUP, version, "deviceclasses");
        let mut signals = cluster.watch_objects(&kind, None, |all| all, cancel.clone());
        // The resource of each class; so that a class that goes away takes its resource along.
        let mut resources: Listing<String, Option<String>> = Listing::default();
        while let Some(signal) = signals.recv().await {
            if matches!(signal, Signal::Failing { .. } | Signal::Recovered) {
                continue;
            }
            take_signal(&mut resources, signal, |class| {
                let text = |pointer: &str| class.pointer(pointer).and_then(Value::as_str);
                let resource = text("/spec/extendedResourceName").map(str::to_owned);
                Some((text("/metadata/name")?.to_owned(), resource))
            });
            // Until the list is whole, what was known holds.
            let listed = resources.is_complete() && !resources.is_coming();
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

/// Returns the version in which the cluster serves claims; `None` where it serves none.
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
        facts.keep(of("other", 0), usual);
        let large = Arc::new(json!({"spec": {"a": "x".repeat(1_000_000)}}));
        for number in 0..20 {
            facts.keep(of("tenant", number), Arc::clone(&large));
        }
        let answers = facts.answers.lock().expect("no panic elsewhere");
        let kept = answers.objects.len();
        assert!((2..10).contains(&kept), "{kept}");
        assert!(answers.objects.contains_key(&of("other", 0)));
    }
}
