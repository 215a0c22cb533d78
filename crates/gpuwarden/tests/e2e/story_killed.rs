//! The story of `story.rs` with a product that is killed at every step, and loses its store in
//! the drain, in the remediation and in the validation: no action is repeated, and nothing is
//! left behind.

use std::time::Duration;

use contract::keys;
use k8s_openapi::api::batch::v1::Job;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version};

use crate::machines::Played;
use crate::remediation::{resume, with_validation};
use crate::requests::has;
use crate::stages::recovered;
use crate::story::{LATE, Story};
use crate::support::{SOON, object, shape};

/// Lifetimes of a product that is killed during a step: from one too short to read anything to
/// one that may complete the step.
const LIVES: [Duration; 7] = [
    Duration::ZERO,
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
];

/// A story with kills that counts the actions on pods.
struct Killed {
    story: Story,
    evictions: u64,
    deletions: u64,
}

impl Killed {
    /// Counts the actions of this process of the product, before it is killed.
    async fn count(&mut self) -> anyhow::Result<()> {
        let scene = &self.story.drain.scene;
        let metrics = scene.product.get("/metrics").await?;
        let count = |name: &str| -> u64 {
            let own = |line: &&str| line.starts_with(name) && line.contains(&scene.node);
            let lines = metrics.lines().filter(own);
            lines
                .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
                .sum()
        };
        self.evictions += count("gpuwarden_drain_evictions_total{");
        self.deletions += count("node_drainer_force_delete_pods_after_timeout");
        Ok(())
    }

    /// Kills the product, and starts it again.
    async fn kill(&mut self) -> anyhow::Result<()> {
        self.count().await?;
        self.story.drain.scene.product.restart().await
    }

    /// Kills the product, and starts it again without its store.
    async fn lose(&mut self) -> anyhow::Result<()> {
        self.count().await?;
        self.story.drain.scene.restart_without_store().await
    }

    /// Blocks the deletion of the pod `a`, or unblocks it.
    async fn keep(&self, namespace: &str, keep: bool) -> anyhow::Result<()> {
        let finalizers = if keep {
            json!(["example.com/volume"])
        } else {
            json!([])
        };
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        let pods = self.story.drain.pods(namespace);
        pods.patch("a", &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Returns the session as recorded on the node.
    async fn session(&self) -> anyhow::Result<Value> {
        let scene = &self.story.drain.scene;
        let node = object(&scene.nodes, &scene.node).await?;
        let text = node["metadata"]["annotations"]["gpuwarden.dev/session"].as_str();
        Ok(serde_json::from_str(text.unwrap_or("null"))?)
    }

    /// Sets or removes a veto of the next step.
    async fn veto(&self, more: &[&str]) -> anyhow::Result<()> {
        let drain = &self.story.drain;
        let kubeconfig = drain.kubeconfig.display().to_string();
        let mut args = vec!["veto", &drain.scene.node, "--kubeconfig", &kubeconfig];
        args.extend(more);
        drain.scene.product.command(args).await?.expect(0)?;
        Ok(())
    }

    /// Kills the product again and again, each time a little later, until the cluster meets
    /// `reached`. Leaves the product running.
    async fn until(
        &mut self,
        what: &str,
        reached: impl AsyncFn(&Story) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        for life in LIVES {
            self.story.drain.scene.product.restart().await?;
            tokio::time::sleep(life).await;
            self.story.drain.scene.product.kill9()?;
            if reached(&self.story).await? {
                break;
            }
        }
        self.story.drain.scene.product.restart().await?;
        let story = &self.story;
        let looked = || async {
            match reached(story).await {
                Ok(true) => Ok(()),
                Ok(false) => match story.drain.scene.shown().await {
                    Ok(shown) => Err(shown.to_string()),
                    Err(error) => Err(error.to_string()),
                },
                Err(error) => Err(error.to_string()),
            }
        };
        let product = &story.drain.scene.product;
        product.wait_for(what, SOON, looked).await
    }

    /// Returns the only Job that validates the node.
    async fn validation(&self) -> anyhow::Result<Job> {
        let mut jobs = self.story.validations().await?;
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        Ok(jobs.remove(0))
    }
}

#[tokio::test]
async fn killed_at_every_step_it_does_nothing_twice_and_leaves_nothing_behind() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let remediation = with_validation(true);
    let story = Story::new(&plane, LATE, &remediation, Played::silent()).await?;
    let [now, late, jobs] = story.drain.namespaces.clone();
    story.drain.pods_of_all_modes().await?;
    story.drain.protect(&late).await?;
    let (evictions, deletions) = (0, 0);
    let mut killed = Killed {
        story,
        evictions,
        deletions,
    };
    killed.keep(&now, true).await?;
    // Not through the kernel log, which is a file here: after the loss of the position, the
    // product would read it again. A real machine's log is new after a boot.
    let fault = ["inject", "xid", "79"];
    let product = &killed.story.drain.scene.product;
    product.client(fault).await?.expect(0)?;
    // Killed during the cordon.
    killed.story.drain.scene.cordoned().await?;
    killed.kill().await?;
    // Killed while one pod ends, and others are awaited.
    let ending = format!("{now}/a is ending");
    killed.story.drain.awaits(&ending).await?;
    let session = killed.session().await?;
    killed.kill().await?;
    killed.story.drain.awaits(&ending).await?;
    killed.lose().await?;
    killed.story.drain.awaits(&ending).await?;
    let after = killed.session().await?;
    assert_eq!(
        (&after["id"], &after["drain"]),
        (&session["id"], &session["drain"])
    );
    killed.keep(&now, false).await?;
    killed.story.left(&now, "a").await?;
    // Killed while an eviction is refused.
    killed.story.is_late().await?;
    killed.story.drain.awaits("disruption budget").await?;
    killed.kill().await?;
    killed.story.drain.awaits("disruption budget").await?;
    assert!(killed.story.drain.is_there(&late).await?);
    killed.story.is_too_late().await?;
    killed.story.left(&late, "a").await?;
    let last = format!("a pod to leave: {jobs}/a is waited for");
    killed.story.drain.awaits(&last).await?;
    killed.kill().await?;
    // Killed between the drain and the remediation, which a veto holds back.
    killed
        .veto(&["--reason", "between drain and repair"])
        .await?;
    killed.story.drain.awaits("the end of the veto").await?;
    killed.story.ends(&jobs).await?;
    killed.story.drain.state("drain-succeeded").await?;
    killed.kill().await?;
    killed.story.drain.awaits("the end of the veto").await?;
    killed.story.drain.state("drain-succeeded").await?;
    assert!(killed.story.made().await?.is_empty());
    killed.veto(&["--end"]).await?;
    // The product has sent the signal, and is killed before the response.
    killed.story.signalled(1).await?;
    let sending = |object: &Value| has(object, "SignalSent", "Unknown");
    let made = killed.story.reboot("the signal", 1, sending).await?;
    killed.kill().await?;
    killed.story.provider.answer();
    let sent = |object: &Value| has(object, "SignalSent", "True");
    killed.story.reboot("its answer", 1, sent).await?;
    killed.lose().await?;
    killed.story.drain.awaits("the end of RebootNode").await?;
    killed.kill().await?;
    // Killed while the machine boots.
    killed.story.drain.scene.product.kill9()?;
    killed.story.boots("boot-2").await?;
    killed.story.drain.scene.product.restart().await?;
    let done = |object: &Value| has(object, "AttemptComplete", "True");
    let done = killed.story.reboot("its end", 1, done).await?;
    assert_eq!(done["metadata"]["uid"], made["metadata"]["uid"]);
    killed.story.drain.state("remediation-succeeded").await?;
    killed.lose().await?;
    killed.story.drain.state("remediation-succeeded").await?;
    let recovery = "the recovery of its faults";
    killed.story.drain.awaits(recovery).await?;
    recovered(&killed.story.drain.scene).await?;
    // Killed while the Job runs, which ends while the product is down.
    killed
        .story
        .drain
        .awaits("the end of Job validate-")
        .await?;
    let job = killed.validation().await?;
    killed.kill().await?;
    killed
        .story
        .drain
        .awaits("the end of Job validate-")
        .await?;
    let again = killed.validation().await?;
    assert_eq!(again.metadata.uid, job.metadata.uid);
    killed.lose().await?;
    killed
        .story
        .drain
        .awaits("the end of Job validate-")
        .await?;
    let again = killed.validation().await?;
    assert_eq!(again.metadata.uid, job.metadata.uid);
    killed.count().await?;
    killed.story.drain.scene.product.kill9()?;
    resume(&killed.story.jobs, &job).await?;
    let ended = || async {
        let jobs = killed.story.validations().await;
        let jobs = jobs.map_err(|error| error.to_string())?;
        let ended = |job: &Job| {
            let status = job.status.as_ref();
            status.is_some_and(|status| status.completion_time.is_some())
        };
        match jobs.as_slice() {
            [job] if ended(job) => Ok(()),
            _ => Err(format!("{jobs:?}")),
        }
    };
    testkit::wait_for("the end of the Job", SOON, ended).await?;
    // Killed while the node is returned: each process lives a little longer than the one before.
    killed.until("the node as it was", is_restored).await?;
    killed.story.drain.scene.restored().await?;
    killed.story.drain.condition("Drained", "False").await?;
    let over = |session: &Value| session.is_null();
    killed.story.drain.scene.session("its end", over).await?;
    // No action is repeated: one reboot, one signal, one Job, and each pod removed once.
    assert_eq!(killed.story.made().await?.len(), 1);
    assert_eq!(killed.story.provider.signals().len(), 1);
    assert_eq!(killed.validation().await?.metadata.uid, job.metadata.uid);
    // Actions in the moment of a kill are not counted.
    let removed = (killed.evictions, killed.deletions);
    assert!(removed.0 <= 1 && removed.1 <= 1, "{removed:?}");
    // Nothing is left behind, and a later process does not start again.
    killed.kill().await?;
    killed.story.drain.scene.ready().await?;
    let scene = &killed.story.drain.scene;
    let node = object(&scene.nodes, &scene.node).await?;
    assert_eq!(shape(&node), scene.before);
    assert_eq!(scene.product.client(["status"]).await?.code, Some(0));
    Ok(())
}

async fn state(story: &Story) -> anyhow::Result<Value> {
    let scene = &story.drain.scene;
    let node = object(&scene.nodes, &scene.node).await?;
    Ok(node["metadata"]["labels"][keys::STATE_LABEL].clone())
}

async fn is_restored(story: &Story) -> anyhow::Result<bool> {
    let scene = &story.drain.scene;
    Ok(shape(&object(&scene.nodes, &scene.node).await?) == scene.before)
}

#[tokio::test]
async fn however_old_it_is_when_it_is_killed_in_a_step_the_story_ends_the_same()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let remediation = with_validation(false);
    let story = Story::new(&plane, LATE, &remediation, Played::new()).await?;
    let [now, late, jobs] = story.drain.namespaces.clone();
    story.drain.pods_of_all_modes().await?;
    story.drain.protect(&late).await?;
    let (evictions, deletions) = (0, 0);
    let mut killed = Killed {
        story,
        evictions,
        deletions,
    };
    killed.story.drain.fault()?;
    let drains = async |story: &Story| Ok(state(story).await? == "draining");
    killed.until("a drain", drains).await?;
    let is_gone = async |story: &Story, namespace: &str| {
        let pod = story.drain.pods(namespace).get_opt("a").await?;
        anyhow::Ok(pod.is_none())
    };
    let left = async |story: &Story| is_gone(story, &now).await;
    killed.until("its eviction", left).await?;
    killed.story.is_late().await?;
    killed.story.is_too_late().await?;
    let left = async |story: &Story| is_gone(story, &late).await;
    killed.until("its deletion", left).await?;
    assert!(killed.story.drain.is_there(&jobs).await?);
    // Killed at times between the last pod and the signal.
    killed.story.ends(&jobs).await?;
    let signalled = async |story: &Story| Ok(!story.provider.signals().is_empty());
    killed.until("the signal", signalled).await?;
    killed.story.boots("boot-2").await?;
    let repaired = async |story: &Story| Ok(state(story).await? == "remediation-succeeded");
    killed.until("the end of the repair", repaired).await?;
    // A process that has just started knows no fault yet.
    recovered(&killed.story.drain.scene).await?;
    killed.until("the node as it was", is_restored).await?;
    killed.story.drain.scene.restored().await?;
    assert_eq!(killed.story.made().await?.len(), 1);
    // Requests of a killed process may arrive late, and are recognised by their operation.
    let mut signals = killed.story.provider.signals();
    signals.dedup();
    assert_eq!(signals.len(), 1);
    let validations = killed.story.validations().await?;
    assert_eq!(validations.len(), 1, "{validations:?}");
    Ok(())
}
