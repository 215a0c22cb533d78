//! Machines of nodes, played by tests: a provider behind gRPC that receives reboot requests, and
//! the boot ids that kubelets report.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use ::janitor::server::{self, Callers};
use ::janitor::{Provider, Signal};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use maintenance::janitor::{FoundOperation, ProviderFailure};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A provider that records its signals, may refuse the first ones, and responds once it is
/// permitted to.
pub(crate) struct Played {
    /// Operation of each call, including refused ones.
    asked: Mutex<Vec<String>>,
    /// Operations whose signal was accepted.
    taken: Mutex<BTreeSet<String>>,
    failures: Mutex<VecDeque<ProviderFailure>>,
    may_answer: watch::Sender<bool>,
}

impl Played {
    /// Creates a provider that responds at once.
    pub(crate) fn new() -> Arc<Self> {
        Self::failing([])
    }

    /// Creates a provider that accepts signals, and responds only after [`Self::answer`].
    pub(crate) fn silent() -> Arc<Self> {
        let silent = Self::new();
        silent.may_answer.send_replace(false);
        silent
    }

    /// Creates a provider whose first calls fail with these errors.
    pub(crate) fn failing(failures: impl IntoIterator<Item = ProviderFailure>) -> Arc<Self> {
        Arc::new(Self {
            asked: Mutex::default(),
            taken: Mutex::default(),
            failures: Mutex::new(failures.into_iter().collect()),
            may_answer: watch::Sender::new(true),
        })
    }

    /// Lets the provider respond from now on.
    pub(crate) fn answer(&self) {
        self.may_answer.send_replace(true);
    }

    /// Returns the operation of each signal received, including refused ones.
    pub(crate) fn signals(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

#[async_trait]
impl Provider for Played {
    fn name(&self) -> &'static str {
        "played"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        self.asked.lock().unwrap().push(signal.operation.clone());
        if let Some(failure) = self.failures.lock().unwrap().pop_front() {
            return Err(failure);
        }
        self.taken.lock().unwrap().insert(signal.operation.clone());
        let mut answers = self.may_answer.subscribe();
        drop(answers.wait_for(|may| *may).await);
        Ok(format!("request-{}", signal.operation))
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let known = self.taken.lock().unwrap().contains(&signal.operation);
        Ok(if known {
            FoundOperation::Sent(format!("request-{}", signal.operation))
        } else {
            FoundOperation::NotSent
        })
    }

    async fn is_ready(&self, _: &Signal, _: &str) -> Result<bool, ProviderFailure> {
        Ok(true)
    }
}

/// Serves a provider until the guard is dropped, and writes the configuration of a janitor that
/// calls it.
pub(crate) async fn serve(provider: Arc<dyn Provider>, config: &Path) -> anyhow::Result<DropGuard> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let text = format!("global: {{cspProviderHost: \"{address}\", cspProviderInsecure: true}}\n");
    std::fs::write(config, text)?;
    let end = CancellationToken::new();
    let guard = end.clone().drop_guard();
    tokio::spawn(server::serve(
        listener,
        None,
        provider,
        Callers::anybody(),
        end,
    ));
    Ok(guard)
}

/// Sets the boot id of a node, as its kubelet would.
pub(crate) async fn boots(nodes: &Api<Node>, name: &str, id: &str) -> anyhow::Result<()> {
    let patch = json!({"status": {"nodeInfo": {
        "bootID": id, "machineID": "m", "systemUUID": "s", "kernelVersion": "k", "osImage": "o",
        "containerRuntimeVersion": "c", "kubeletVersion": "v1.37.1", "kubeProxyVersion": "",
        "operatingSystem": "linux", "architecture": "amd64",
    }}});
    let params = PatchParams::default();
    nodes
        .patch_status(name, &params, &Patch::Merge(patch))
        .await?;
    Ok(())
}
