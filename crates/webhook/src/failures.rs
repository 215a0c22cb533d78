//! Publishes failed checks of pods as Kubernetes Events on these pods, based on the statuses
//! that the kubelets write. So a check needs no access to the API server, and cannot cause
//! Events on another pod.
//!
//! Each replica does this. The name of an Event is derived from pod and check, so all replicas
//! write the same Event.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Event, EventPod, ObjectKind, Selection, Signal};
use jiff::Timestamp;
use preflight::config::Config;
use preflight::failure::{FailedCheck, failed_checks};
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::seen::WatchedPod;

/// Pods whose checks may have failed: a pod runs only after its checks have passed.
const NOT_STARTED: &str = "status.phase!=Running,status.phase!=Succeeded";
/// Reason of the Events.
const REASON: &str = "PreflightCheckFailed";
const REPORTER: &str = "gpuwarden-preflight";
/// Longest pod name in bytes that leaves room for the rest of an Event's name.
const MAX_POD_IN_NAME: usize = 150;
/// Interval for retrying Events that could not be written.
const RETRY: Duration = Duration::from_secs(10);
/// Most pods that wait for a retry.
const MAX_WAITING: usize = 1024;

/// UID of a pod, and by check the number of failed runs that were published.
type Published = (String, BTreeMap<String, u64>);

/// Publishes failed checks as Events.
struct Publisher {
    cluster: Arc<Cluster>,
    checks: BTreeSet<String>,
    /// Published runs, by namespace and name of the pod.
    published: BTreeMap<String, Published>,
    /// Pods with an Event that could not be written.
    waiting: BTreeMap<String, Failed>,
    seldom: Seldom,
}

/// Failed checks of a pod, with only the fields of the pod that Events need. A whole pod may
/// have 256 KiB of annotations.
struct Failed {
    about: EventPod,
    node: String,
    checks: Vec<FailedCheck>,
}

/// Publishes failed checks until `cancel`.
pub async fn tell(cluster: Arc<Cluster>, config: Arc<Config>, cancel: CancellationToken) {
    let kind = ObjectKind::new("", "v1", "pods");
    let not_started = Selection::of_kind(&kind, None).with_fields(NOT_STARTED);
    let mut pods = cluster.watch(not_started, cancel.clone());
    let mut publisher = Publisher {
        cluster,
        checks: config
            .checks
            .iter()
            .map(|check| check.name.clone())
            .collect(),
        published: BTreeMap::new(),
        waiting: BTreeMap::new(),
        seldom: Seldom::default(),
    };
    let mut next = Instant::now() + RETRY;
    loop {
        tokio::select! {
            () = cancel.cancelled() => return,
            signal = pods.recv() => match signal {
                Some(signal) => publisher.handle(signal).await,
                None => return,
            },
            () = tokio::time::sleep_until(next) => {
                next = Instant::now() + RETRY;
                for failed in std::mem::take(&mut publisher.waiting).into_values() {
                    publisher.publish(failed).await;
                }
            }
        }
    }
}

// === impl Publisher ===

impl Publisher {
    /// Handles an event of the pod watch.
    async fn handle(&mut self, signal: Signal<WatchedPod>) {
        match signal {
            Signal::Applied(pod) => {
                let failed = Failed::of(&pod.0, &self.checks);
                if let Some(failed) = failed.filter(|failed| !failed.checks.is_empty()) {
                    self.publish(failed).await;
                }
            }
            Signal::Deleted(name) => self.forget(&name),
            // A pod that disappeared meanwhile gets no Event. The others are delivered again,
            // and their Events already exist.
            Signal::Restarted => {
                self.published.clear();
                self.waiting.clear();
            }
            Signal::Listed | Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    /// Publishes failed runs that have no Event yet.
    async fn publish(&mut self, failed: Failed) {
        let about = &failed.about;
        let key = format!("{}/{}", about.namespace, about.name);
        let published = self.published.entry(key.clone()).or_default();
        if published.0 != about.uid {
            *published = (about.uid.clone(), BTreeMap::new());
        }
        for one in &failed.checks {
            if published.1.get(&one.check) == Some(&one.runs) {
                continue;
            }
            match write(&self.cluster, &event(&failed, one)).await {
                Ok(()) => {
                    published.1.insert(one.check.clone(), one.runs);
                }
                Err(error) => {
                    if self.seldom.now().is_some() {
                        tracing::warn!(
                            pod = key,
                            err = chain(&error),
                            "cannot write the Event of a failed check yet"
                        );
                    }
                    if self.waiting.len() < MAX_WAITING {
                        self.waiting.insert(key, failed);
                    }
                    return;
                }
            }
        }
    }

    /// Forgets a pod that has started or was deleted.
    fn forget(&mut self, name: &str) {
        self.published.remove(name);
        self.waiting.remove(name);
    }
}

async fn write(cluster: &Cluster, event: &Event) -> Result<(), ApiError> {
    if event.count > 1 {
        match cluster.repeat_event(event).await {
            Err(ApiError::NotFound { .. }) => {}
            written => return written,
        }
    }
    cluster.create_event(event).await
}

// === impl Failed ===

impl Failed {
    fn of(pod: &Value, checks: &BTreeSet<String>) -> Option<Self> {
        let text = |key| pod.pointer(key).and_then(Value::as_str).map(str::to_owned);
        let about = EventPod {
            namespace: text("/metadata/namespace")?,
            name: text("/metadata/name")?,
            uid: text("/metadata/uid")?,
        };
        Some(Self {
            about,
            node: text("/spec/nodeName").unwrap_or_default(),
            checks: failed_checks(pod, checks),
        })
    }
}

fn event(failed: &Failed, one: &FailedCheck) -> Event {
    let about = &failed.about;
    let before = if about.name.len() <= MAX_POD_IN_NAME {
        &about.name
    } else {
        "preflight"
    };
    let uid = about.uid.replace('-', "");
    let at = one.at.parse().unwrap_or_else(|_| Timestamp::now());
    let FailedCheck { check, message, .. } = one;
    Event {
        name: format!("{before}.{uid}.{check}"),
        node: failed.node.clone(),
        pod: Some(about.clone()),
        kind: "Warning".to_owned(),
        reason: REASON.to_owned(),
        message: format!("The preflight check {check} failed with {message}"),
        agent: REPORTER.to_owned(),
        count: one.runs,
        first_seen: at,
        last_seen: at,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, code: i32) -> Signal<WatchedPod> {
        let ended = json!({"exitCode": code, "message": "GPU-1 fails"});
        Signal::Applied(Arc::new(WatchedPod(json!({
            "metadata": {"namespace": "training", "name": name, "uid": format!("uid-of-{name}")},
            "spec": {"nodeName": "n"},
            "status": {"initContainerStatuses": [
                {"name": "preflight-dcgm-diag", "state": {"terminated": ended}},
            ]},
        }))))
    }

    /// A pod may start or disappear while the API server is unreachable.
    #[tokio::test]
    async fn what_could_not_be_told_waits_until_its_pod_goes_or_all_come_anew() {
        let mut publisher = Publisher {
            cluster: crate::server::tests::away().await,
            checks: BTreeSet::from(["preflight-dcgm-diag".to_owned()]),
            published: BTreeMap::new(),
            waiting: BTreeMap::new(),
            seldom: Seldom::default(),
        };
        for signal in [pod("a", 1), pod("b", 1), pod("c", 0)] {
            publisher.handle(signal).await;
        }
        let waiting: Vec<&str> = publisher.waiting.keys().map(String::as_str).collect();
        assert_eq!(waiting, ["training/a", "training/b"]);
        let failed = &publisher.waiting["training/a"];
        let event = event(failed, &failed.checks[0]);
        assert_eq!(event.name, "a.uidofa.preflight-dcgm-diag");
        assert_eq!((&*event.node, event.count), ("n", 1));
        publisher.handle(Signal::Deleted("training/a".into())).await;
        assert_eq!(publisher.waiting.len(), 1);
        publisher.handle(Signal::Restarted).await;
        assert!(publisher.waiting.is_empty());
    }
}
