//! Maintenance that only the APIs of a cloud announce: from the notice to the node's return, cancelled, and as an
//! emergency, with a product that is killed after every step, and APIs that fail in between. Each test plays a
//! cloud; the clients' own tests check signatures and pages.

#[path = "cloud_apis/aws.rs"]
mod aws;
#[path = "cloud_apis/gcp.rs"]
mod gcp;
#[path = "cloud_apis/oci.rs"]
mod oci;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::ensure;
use clouds::loopback::{Asked, Reply, Server};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tempfile::TempDir;
use testkit::{ControlPlane, Launch, Options, Private, Version};

use crate::group::Group;
use crate::notices::{are, was_out_once};
use crate::support::SOON;

/// Names of the instances that the nodes are.
const INSTANCES: [&str; 3] = ["i-0", "i-1", "i-2"];

/// A cloud with the maintenance that it announces.
trait Cloud: Send + 'static {
    /// Section of the configuration.
    const NAME: &'static str;
    /// Keys of the section beside those of every cloud.
    const KEYS: &'static str;
    /// Names of the APIs in the status.
    const SOURCES: &'static [&'static str];

    /// Returns the provider id of the node that an instance is.
    fn provider_id(instance: &str) -> String;

    /// Returns variables with credentials for the APIs at `url`, whose files are in `files`.
    fn credentials(url: &str, files: &Path) -> anyhow::Result<Vec<(&'static str, String)>>;

    /// Announces a scheduled maintenance of an instance with the cloud's word for its progress.
    fn announces(&mut self, instance: &str, word: &str, begin: Timestamp);

    /// Returns the answer of the API that is asked.
    fn answer(&self, asked: &Asked) -> Reply;
}

/// Nodes that are instances of a cloud, and the product that asks its APIs.
struct Story<C> {
    group: Group,
    cloud: Arc<Mutex<C>>,
    /// True while every request fails.
    is_down: Arc<AtomicBool>,
    _apis: Server,
    _files: TempDir,
    _plane: Private,
}

// === impl Story ===

impl<C: Cloud> Story<C> {
    /// Starts everything; `None` without a control plane.
    async fn new(cloud: C) -> anyhow::Result<Option<Self>> {
        // A control plane of its own: the product takes all nodes for instances.
        let plane = ControlPlane::private(Version::V1_37, Options::default()).await?;
        let Some(plane) = plane else {
            return Ok(None);
        };
        let cloud = Arc::new(Mutex::new(cloud));
        let is_down: Arc<AtomicBool> = Arc::default();
        let (played, fails) = (Arc::clone(&cloud), Arc::clone(&is_down));
        let apis = Server::start(move |asked| {
            if fails.load(Ordering::Relaxed) {
                return Reply::new(503, "down for the test");
            }
            played.lock().unwrap().answer(asked)
        })
        .await;
        let files = tempfile::tempdir()?;
        let file = files.path().join("maintenance.toml");
        let (shared, section, keys) = (crate::notices::CONFIG, C::NAME, C::KEYS);
        let config = format!(
            "{shared}\n[{section}]\nenabled = true\nendpointOverride = '{}'\n{keys}\n",
            apis.url
        );
        std::fs::write(&file, config)?;
        let credentials = C::credentials(&apis.url, files.path())?;
        let arrange = |launch: Launch| {
            let launch = launch.quarantine().option("--maintenance", file);
            let credentials = credentials.into_iter();
            credentials.fold(launch, |launch, (name, value)| launch.env(name, value))
        };
        let group = Group::new(&plane, INSTANCES.len(), |_, node| node, arrange).await?;
        for (node, instance) in group.names.iter().zip(INSTANCES) {
            let provider = json!({"spec": {"providerID": C::provider_id(instance)}});
            let (params, patch) = (PatchParams::default(), Patch::Merge(provider));
            group.nodes.patch(node, &params, &patch).await?;
        }
        Ok(Some(Self {
            group,
            cloud,
            is_down,
            _apis: apis,
            _files: files,
            _plane: plane,
        }))
    }

    /// Returns the cloud, to change what it announces.
    fn cloud(&self) -> MutexGuard<'_, C> {
        self.cloud.lock().unwrap()
    }

    /// Waits until the only maintenance of a node is in this state.
    async fn is(&self, node: usize, state: &str) -> anyhow::Result<()> {
        are(&self.group, &self.group.names[node], &[state]).await
    }

    /// Waits until all APIs are in this state of the status.
    async fn until_apis(&self, state: &str) -> anyhow::Result<()> {
        let are = || async {
            let status = self.group.shown(&["status"]).await?;
            let sources = status["sources"].as_array().cloned().unwrap_or_default();
            let is = |name: &&str| {
                let mut sources = sources.iter();
                sources.any(|source| source["name"] == **name && source["state"] == state)
            };
            ensure!(C::SOURCES.iter().all(is), "{}", status["sources"]);
            Ok(())
        };
        let what = format!("the APIs to be {state}");
        self.group.product.wait_for(&what, SOON, are).await
    }

    /// Announces a maintenance of the first node, which begins and ends; the end is told while the APIs fail. `words`
    /// are the cloud's for a maintenance that is to come, that has begun, and that is over.
    async fn begins_and_ends(&mut self, words: [&str; 3]) -> anyhow::Result<()> {
        let (instance, node) = (INSTANCES[0], self.group.names[0].clone());
        let [to_come, ongoing, over] = words;
        let begin = Timestamp::now() + SignedDuration::from_hours(2);
        self.cloud().announces(instance, to_come, begin);
        self.group.kill().await?;
        self.is(0, "DETECTED").await?;
        self.group.until_out(&[]).await?;
        // The begin is brought forward.
        let begin = Timestamp::now() + SignedDuration::from_secs(3);
        self.cloud().announces(instance, to_come, begin);
        self.goes_out(0, "QUARANTINE_TRIGGERED").await?;
        let left = begin.duration_since(Timestamp::now());
        tokio::time::sleep(left.try_into().unwrap_or_default()).await;
        self.cloud().announces(instance, ongoing, begin);
        self.group.kill().await?;
        self.is(0, "MAINTENANCE_ONGOING").await?;

        self.is_down.store(true, Ordering::Relaxed);
        self.cloud().announces(instance, over, begin);
        self.group.kill().await?;
        self.until_apis("failing").await?;
        let shown = self.group.shown(&["maintenance"]).await?;
        let record = &shown["maintenances"][0];
        ensure!(record["vanished"].is_null(), "taken for gone: {record}");
        self.is(0, "MAINTENANCE_ONGOING").await?;
        self.group.until_out(std::slice::from_ref(&node)).await?;
        self.is_down.store(false, Ordering::Relaxed);
        self.group.kill().await?;
        self.until_apis("following").await?;
        self.returns(0, "HEALTHY_TRIGGERED").await?;
        was_out_once(&self.group, &node, &["announced", "fatal", "over"]).await
    }

    /// Kills the product, and waits until a node is out of service for a maintenance in this state, and no other one
    /// is.
    async fn goes_out(&mut self, node: usize, state: &str) -> anyhow::Result<()> {
        self.group.kill().await?;
        self.is(node, state).await?;
        let out = self.group.names[node].clone();
        self.group.until_out(&[out]).await
    }

    /// Kills the product, and waits until a node is back for a maintenance that has ended in this state, which lasts.
    async fn returns(&mut self, node: usize, state: &str) -> anyhow::Result<()> {
        for _ in 0..2 {
            self.group.kill().await?;
            self.is(node, state).await?;
            self.group.until_out(&[]).await?;
        }
        Ok(())
    }

    /// Checks that a node went out at once, and came back once.
    async fn was_out_at_once(&self, node: usize) -> anyhow::Result<()> {
        was_out_once(&self.group, &self.group.names[node], &["fatal", "over"]).await
    }
}
