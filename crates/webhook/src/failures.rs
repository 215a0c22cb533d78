//! Tells the failed checks of pods as Kubernetes Events on these pods, by what their kubelets say of them. So a
//! check needs no way to the API server, and nobody can have something told of another's pod.
//!
//! Each replica does it: the name of an Event follows from pod and check, so that the second finds the first's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Event, EventPod, Kind, Signal};
use jiff::Timestamp;
use preflight::config::Config;
use preflight::failure::{FailedCheck, failed_checks};
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::seen::SeenPod;

/// Pods whose checks may have failed: they never run before their checks have passed.
const NOT_STARTED: &str = "status.phase!=Running,status.phase!=Succeeded";
/// The reason that an Event gives.
const REASON: &str = "PreflightCheckFailed";
/// Who reports it.
const REPORTER: &str = "gpuwarden-preflight";
/// Longest name of a pod that leaves room for the rest of an Event's name (bytes).
const MAX_POD_IN_NAME: usize = 150;
/// Pause before what could not be told is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// Most pods that wait for that.
const MAX_WAITING: usize = 1024;

/// The runs of each check of a pod that are told, and the pod's UID.
type Told = (String, BTreeMap<String, u64>);

/// The Events that are told.
struct Teller {
    cluster: Arc<Cluster>,
    checks: BTreeSet<String>,
    /// By namespace and name of the pod.
    told: BTreeMap<String, Told>,
    /// Pods of which something could not be told.
    waiting: BTreeMap<String, Arc<SeenPod>>,
    seldom: Seldom,
}

/// Tells failed checks until `cancel`.
pub async fn tell(cluster: Arc<Cluster>, config: Arc<Config>, cancel: CancellationToken) {
    let kind = Kind::new("", "v1", "pods");
    let mut pods = cluster.watch_objects_as(
        &kind,
        None,
        |all| all.with_fields(NOT_STARTED),
        cancel.clone(),
    );
    let mut teller = Teller {
        cluster,
        checks: config
            .checks
            .iter()
            .map(|check| check.name.clone())
            .collect(),
        told: BTreeMap::new(),
        waiting: BTreeMap::new(),
        seldom: Seldom::default(),
    };
    let mut next = Instant::now() + AGAIN;
    loop {
        tokio::select! {
            () = cancel.cancelled() => return,
            signal = pods.recv() => match signal {
                Some(Signal::Applied(pod)) => teller.look(pod).await,
                Some(Signal::Deleted(name)) => teller.forget(&name),
                // What goes away meanwhile is not told of; what is there finds its Events.
                Some(Signal::Restarted) => teller.told.clear(),
                Some(Signal::Listed | Signal::Failing { .. } | Signal::Recovered) => {}
                None => return,
            },
            () = tokio::time::sleep_until(next) => {
                next = Instant::now() + AGAIN;
                for pod in std::mem::take(&mut teller.waiting).into_values() {
                    teller.look(pod).await;
                }
            }
        }
    }
}

// === impl Teller ===

impl Teller {
    /// Tells what of a pod is not told yet.
    async fn look(&mut self, pod: Arc<SeenPod>) {
        let Some(about) = about(&pod.0) else {
            return;
        };
        let key = format!("{}/{}", about.namespace, about.name);
        let failed = failed_checks(&pod.0, &self.checks);
        if failed.is_empty() {
            return;
        }
        let told = self.told.entry(key.clone()).or_default();
        if told.0 != about.uid {
            *told = (about.uid.clone(), BTreeMap::new());
        }
        for one in failed {
            if told.1.get(&one.check) == Some(&one.runs) {
                continue;
            }
            let event = event(&pod.0, &about, &one);
            match write(&self.cluster, &event).await {
                Ok(()) => {
                    told.1.insert(one.check, one.runs);
                }
                Err(error) => {
                    if self.seldom.now().is_some() {
                        tracing::warn!(
                            pod = key,
                            err = chain(&error),
                            "a failed check is not told as an Event yet"
                        );
                    }
                    if self.waiting.len() < MAX_WAITING {
                        self.waiting.insert(key, pod);
                    }
                    return;
                }
            }
        }
    }

    /// Forgets a pod that has started, or is gone.
    fn forget(&mut self, name: &str) {
        self.told.remove(name);
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

fn about(pod: &Value) -> Option<EventPod> {
    let text = |key| pod.pointer(key).and_then(Value::as_str).map(str::to_owned);
    Some(EventPod {
        namespace: text("/metadata/namespace")?,
        name: text("/metadata/name")?,
        uid: text("/metadata/uid")?,
    })
}

fn event(pod: &Value, about: &EventPod, failed: &FailedCheck) -> Event {
    let before = if about.name.len() <= MAX_POD_IN_NAME {
        &about.name
    } else {
        "preflight"
    };
    let uid = about.uid.replace('-', "");
    let at = failed.at.parse().unwrap_or_else(|_| Timestamp::now());
    let node = pod.pointer("/spec/nodeName").and_then(Value::as_str);
    let FailedCheck { check, message, .. } = failed;
    Event {
        name: format!("{before}.{uid}.{check}"),
        node: node.unwrap_or_default().to_owned(),
        pod: Some(about.clone()),
        kind: "Warning".to_owned(),
        reason: REASON.to_owned(),
        message: format!("The preflight check {check} failed with {message}"),
        agent: REPORTER.to_owned(),
        count: failed.runs,
        first_seen: at,
        last_seen: at,
    }
}
