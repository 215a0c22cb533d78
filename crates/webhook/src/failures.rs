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
    waiting: BTreeMap<String, Failed>,
    seldom: Seldom,
}

/// The failed checks of a pod: of the pod only what is told. All of it may have 256 KiB of annotations.
struct Failed {
    about: EventPod,
    node: String,
    checks: Vec<FailedCheck>,
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
                Some(signal) => teller.take(signal).await,
                None => return,
            },
            () = tokio::time::sleep_until(next) => {
                next = Instant::now() + AGAIN;
                for failed in std::mem::take(&mut teller.waiting).into_values() {
                    teller.tell(failed).await;
                }
            }
        }
    }
}

// === impl Teller ===

impl Teller {
    /// Takes in news of a pod.
    async fn take(&mut self, signal: Signal<SeenPod>) {
        match signal {
            Signal::Applied(pod) => {
                let failed = Failed::of(&pod.0, &self.checks);
                if let Some(failed) = failed.filter(|failed| !failed.checks.is_empty()) {
                    self.tell(failed).await;
                }
            }
            Signal::Deleted(name) => self.forget(&name),
            // What goes away meanwhile is not told of; what is there comes again, and finds its Events.
            Signal::Restarted => {
                self.told.clear();
                self.waiting.clear();
            }
            Signal::Listed | Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    /// Tells what of a pod is not told yet.
    async fn tell(&mut self, failed: Failed) {
        let about = &failed.about;
        let key = format!("{}/{}", about.namespace, about.name);
        let told = self.told.entry(key.clone()).or_default();
        if told.0 != about.uid {
            *told = (about.uid.clone(), BTreeMap::new());
        }
        for one in &failed.checks {
            if told.1.get(&one.check) == Some(&one.runs) {
                continue;
            }
            match write(&self.cluster, &event(&failed, one)).await {
                Ok(()) => {
                    told.1.insert(one.check.clone(), one.runs);
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
                        self.waiting.insert(key, failed);
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

    fn pod(name: &str, code: i32) -> Signal<SeenPod> {
        let ended = json!({"exitCode": code, "message": "GPU-1 fails"});
        Signal::Applied(Arc::new(SeenPod(json!({
            "metadata": {"namespace": "training", "name": name, "uid": format!("uid-of-{name}")},
            "spec": {"nodeName": "n"},
            "status": {"initContainerStatuses": [
                {"name": "preflight-dcgm-diag", "state": {"terminated": ended}},
            ]},
        }))))
    }

    /// A pod may start, or go, while the API server is away and nobody hears of it.
    #[tokio::test]
    async fn what_could_not_be_told_waits_until_its_pod_goes_or_all_come_anew() {
        let mut teller = Teller {
            cluster: crate::server::tests::away().await,
            checks: BTreeSet::from(["preflight-dcgm-diag".to_owned()]),
            told: BTreeMap::new(),
            waiting: BTreeMap::new(),
            seldom: Seldom::default(),
        };
        for signal in [pod("a", 1), pod("b", 1), pod("c", 0)] {
            teller.take(signal).await;
        }
        let waiting: Vec<&str> = teller.waiting.keys().map(String::as_str).collect();
        assert_eq!(waiting, ["training/a", "training/b"]);
        let failed = &teller.waiting["training/a"];
        let event = event(failed, &failed.checks[0]);
        assert_eq!(event.name, "a.uidofa.preflight-dcgm-diag");
        assert_eq!((&*event.node, event.count), ("n", 1));
        teller.take(Signal::Deleted("training/a".into())).await;
        assert_eq!(teller.waiting.len(), 1);
        teller.take(Signal::Restarted).await;
        assert!(teller.waiting.is_empty());
    }
}
