//! Remediation of a quarantined and drained node by custom resources, and its return to service.
//! The test plays the controller of the custom resources.

use std::time::Duration;

use contract::{HealthEvent, RecommendedAction};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version};

use crate::runbook::Reader;
use crate::stages::recovered;
use crate::support::{SOON, Scene, event, install_crds, send_to, xid};

const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";
const REPAIRS: &str = "latestFaultRemediationState";

/// A node whose faults are remediated, and the custom resources created for it.
struct Repair {
    scene: Scene,
    reboots: Api<DynamicObject>,
}

impl Repair {
    async fn new(
        plane: &ControlPlane,
        arrange: impl FnOnce(Launch) -> Launch,
    ) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        install_crds(&client).await?;
        let repaired = |launch: Launch| arrange(launch.arg("--drain").arg("--remediate"));
        let scene = Scene::new(plane, |node| node, repaired).await?;
        let kind = GroupVersionKind::gvk("janitor.dgxc.nvidia.com", "v1alpha1", "RebootNode");
        let resource = ApiResource::from_gvk_with_plural(&kind, "rebootnodes");
        let reboots = Api::all_with(client, &resource);
        Ok(Self { scene, reboots })
    }

    fn fault(&self, code: u32) -> anyhow::Result<()> {
        let line = xid(code, "GPU has fallen off the bus.");
        self.scene.product.append_kernel_log(&line)
    }

    /// Returns the custom resources for the node, oldest first.
    async fn made(&self) -> anyhow::Result<Vec<Value>> {
        of_node(&self.reboots, &self.scene.node).await
    }

    /// Waits until there are `count` resources. Returns the name of the last one.
    async fn made_is(&self, count: usize) -> anyhow::Result<String> {
        self.made_within(SOON, count).await
    }

    /// Waits at most `time` until there are `count` resources. Returns the name of the last one.
    async fn made_within(&self, time: Duration, count: usize) -> anyhow::Result<String> {
        let there = || async {
            let made = self.made().await.map_err(|error| error.to_string())?;
            match made.last() {
                Some(last) if made.len() == count => Ok(last["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()),
                _ => Err(format!("{made:?}")),
            }
        };
        let product = &self.scene.product;
        product.wait_for("a custom resource", time, there).await
    }

    /// Waits until the record of the fault has this result of the remediation.
    async fn recorded(&self, remediated: bool) -> anyhow::Result<()> {
        let said = || async {
            let product = &self.scene.product;
            let events = product.client(["events", "-o", "json"]).await;
            let events: Value =
                serde_json::from_str(&events.map_err(|why| why.to_string())?.stdout)
                    .map_err(|why| why.to_string())?;
            let status = &events[0]["healtheventstatus"];
            let tried = status["lastremediationtimestamp"].is_string();
            if tried && status["faultremediated"] == remediated {
                Ok(())
            } else {
                Err(status.to_string())
            }
        };
        let product = &self.scene.product;
        product
            .wait_for("the record of the remediation", SOON, said)
            .await
    }

    /// Sets the status of a resource, as its controller does.
    async fn set(&self, name: &str, conditions: Value) -> anyhow::Result<()> {
        let status = json!({"status": {"conditions": conditions}});
        let patch = Patch::Merge(status);
        self.reboots
            .patch_status(name, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    async fn state(&self, wanted: &str) -> anyhow::Result<Value> {
        let what = format!("the state {wanted}");
        let is = |node: &Value| {
            let state = &node["metadata"]["labels"][STATE];
            if state == wanted {
                Ok(node.clone())
            } else {
                Err(state.to_string())
            }
        };
        self.scene.node_until(&what, is).await
    }

    async fn awaits(&self, text: &str) -> anyhow::Result<()> {
        let is = |session: &Value| {
            let awaits = session["awaits"].as_str();
            awaits.is_some_and(|it| it.contains(text))
        };
        self.scene.session(text, is).await
    }
}

/// Returns the custom resources of a kind for a node, oldest first.
pub(crate) async fn of_node(api: &Api<DynamicObject>, node: &str) -> anyhow::Result<Vec<Value>> {
    let list = api.list(&ListParams::default()).await?;
    let objects = list.items.iter().map(serde_json::to_value);
    let mut objects = objects.collect::<Result<Vec<Value>, _>>()?;
    objects.retain(|object| object["spec"]["nodeName"] == node);
    objects.sort_by_key(|object| object["metadata"]["creationTimestamp"].to_string());
    Ok(objects)
}

/// Returns a condition, as the controller of a custom resource writes it.
pub(crate) fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": "as the test says",
           "lastTransitionTime": "2026-11-24T00:00:00Z"})
}

#[tokio::test]
async fn a_fault_is_drained_repaired_and_given_back_through_kills() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut repair = Repair::new(&plane, |launch| launch).await?;
    repair.fault(79)?;
    let node = repair.state("remediating").await?;
    repair.scene.product.restart().await?;
    let name = repair.made_is(1).await?;
    repair
        .awaits(&format!("the end of RebootNode {name}"))
        .await?;
    let mut reader = Reader::beside(&repair.scene.product, Some(&plane))?;
    let names = [("NODE", repair.scene.node.as_str())];
    reader.runbook("GpuwardenRemediationStuck", &names).await?;
    let made = &repair.made().await?[0];
    assert!(
        name.starts_with(&format!("maintenance-{}-", repair.scene.node)),
        "{name}"
    );
    let owner = &made["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], node["metadata"]["uid"]);
    repair.scene.product.restart().await?;
    repair
        .set(&name, json!([condition("SignalSent", "True", "Succeeded")]))
        .await?;
    repair.awaits("the end of RebootNode").await?;
    repair.scene.product.restart().await?;
    let done = [
        condition("SignalSent", "True", "Succeeded"),
        condition("NodeReady", "True", "Succeeded"),
    ];
    repair.set(&name, json!(done)).await?;
    let node = repair.state("remediation-succeeded").await?;
    let repairs = node["metadata"]["annotations"][REPAIRS]
        .as_str()
        .unwrap_or_default();
    let repairs: Value = serde_json::from_str(repairs)?;
    repair.recorded(true).await?;
    assert_eq!(
        repairs["equivalenceGroups"]["restart"]["maintenanceCR"],
        name.as_str()
    );
    repair.scene.product.restart().await?;
    repair.awaits("the recovery of its faults").await?;
    recovered(&repair.scene).await?;
    repair.scene.restored().await?;
    // One resource was created, across all kills.
    assert_eq!(repair.made().await?.len(), 1);
    Ok(())
}

/// A preflight check is a reporter like any other, also with the access of a normal user on its
/// node.
#[tokio::test]
async fn what_a_preflight_check_has_found_is_repaired_and_its_pass_gives_the_node_back()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let repair = Repair::new(&plane, |launch| launch).await?;
    let report = |is_healthy: bool| HealthEvent {
        agent: "preflight-dcgm-diag".to_owned(),
        check_name: "DcgmDiagnosticMemory".to_owned(),
        is_healthy,
        is_fatal: !is_healthy,
        error_code: (!is_healthy)
            .then(|| "DCGM_FR_FAULTY_MEMORY".to_owned())
            .into_iter()
            .collect(),
        recommended_action: if is_healthy {
            RecommendedAction::None.into()
        } else {
            RecommendedAction::RestartBm.into()
        },
        ..event(&repair.scene.node, "GPU-1")
    };
    send_to(&repair.scene.product, vec![report(false)]).await?;
    repair.scene.cordoned().await?;
    repair.state("remediating").await?;
    let name = repair.made_is(1).await?;
    let done = [
        condition("SignalSent", "True", "Succeeded"),
        condition("NodeReady", "True", "Succeeded"),
    ];
    repair.set(&name, json!(done)).await?;
    repair.state("remediation-succeeded").await?;
    repair.awaits("the recovery of its faults").await?;
    send_to(&repair.scene.product, vec![report(true)]).await?;
    repair.scene.restored().await
}

#[tokio::test]
async fn what_failed_for_now_is_made_again_and_for_good_asks_a_person() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let repair = Repair::new(&plane, |launch| launch).await?;
    repair.fault(79)?;
    let name = repair.made_is(1).await?;
    let failed = |reason| {
        json!([
            condition("NodeReady", "False", "Failed"),
            condition("AttemptComplete", "True", reason),
        ])
    };
    let failed_at = Timestamp::now();
    repair.set(&name, failed("TransientFailure")).await?;
    repair.awaits("another try of").await?;
    // The next attempt follows a minute later.
    let minute = Duration::from_secs(60);
    let again = repair.made_within(minute + SOON, 2).await?;
    assert_eq!(again, format!("{name}-2"));
    let made = repair.made().await?;
    let created = made[1]["metadata"]["creationTimestamp"]
        .as_str()
        .unwrap_or_default();
    // Kubernetes truncates the time to seconds.
    let waited = created.parse::<Timestamp>()?.duration_since(failed_at);
    assert!(waited.as_secs() >= 59, "{waited}");
    repair.set(&again, failed("PermanentFailure")).await?;
    repair.state("remediation-failed").await?;
    repair
        .scene
        .told("attention", "the repair makes no progress")
        .await?;
    let patch = json!({"spec": {"unschedulable": null}});
    repair.scene.patch(patch).await?;
    let ended = |session: &Value| session.is_null();
    repair.scene.session("a session that ends", ended).await
}

/// Policy that asks a person about every fault.
pub(crate) const ASKS: &str = r#"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"

[[routes]]
name = "ask"
drain = "forceful"
approve = true
[[routes.match.all]]
kind = "HealthEvent"
expression = "true"
"#;

#[tokio::test]
async fn what_asks_waits_through_kills_until_a_person_approves_it() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let policy = tempfile::NamedTempFile::new()?;
    std::fs::write(policy.path(), ASKS)?;
    let asks = |launch: Launch| launch.option("--policy", policy.path());
    let mut repair = Repair::new(&plane, asks).await?;
    let (node, client) = (repair.scene.node.clone(), plane.client().await?);
    plane.namespace(&node).await?;
    let pod = testkit::pod(&node, "job").on(&node);
    pod.create(&client).await?;
    repair.fault(79)?;
    let proposal = "drain of the node, RESTART_BM";
    let awaits = format!("a person's approval of {proposal}: gpuwarden approve {node}");
    repair.awaits(&awaits).await?;
    repair.scene.product.restart().await?;
    repair.awaits(&awaits).await?;
    let status = repair.scene.product.client(["status"]).await?;
    assert!(status.stdout.contains(&awaits), "{}", status.stdout);
    let why = repair.scene.product.client(["why-not", &node]).await?;
    assert!(why.stdout.contains(&awaits), "{}", why.stdout);
    repair
        .scene
        .told("attention", &format!("proposed: {proposal}"))
        .await?;
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let told = || async {
        let list = events.list(&ListParams::default()).await;
        let events = list.map_err(|error| error.to_string())?.items;
        let of_node = events.iter().filter(|event| {
            let about = event.involved_object.name.as_deref() == Some(node.as_str());
            about && event.reason.as_deref() == Some("ApprovalNeeded")
        });
        match of_node.count() {
            1 => Ok(()),
            count => Err(format!("{count} Events")),
        }
    };
    let product = &repair.scene.product;
    product.wait_for("one Event", SOON, told).await?;
    let pods: Api<Pod> = Api::namespaced(client, &node);
    let pod = pods.get("job").await?;
    assert!(pod.metadata.deletion_timestamp.is_none(), "it stays");
    assert!(repair.made().await?.is_empty(), "and nothing is repaired");

    let mut reader = Reader::beside(product, Some(&plane))?;
    let names = [("NODE", node.as_str())];
    reader.runbook("GpuwardenApprovalWaits", &names).await?;
    repair
        .scene
        .told("session", &format!(": {proposal}"))
        .await?;
    let leaves = || async {
        match pods.get_opt("job").await {
            Ok(None) => Ok(()),
            Ok(Some(pod)) if pod.metadata.deletion_timestamp.is_some() => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    product.wait_for("the pod to leave", SOON, leaves).await?;
    repair.scene.product.restart().await?;
    pods.delete("job", &DeleteParams::default().grace_period(0))
        .await
        .ok();
    let name = repair.made_is(1).await?;
    let done = [
        condition("SignalSent", "True", "Succeeded"),
        condition("NodeReady", "True", "Succeeded"),
    ];
    repair.set(&name, json!(done)).await?;
    repair.state("remediation-succeeded").await?;
    recovered(&repair.scene).await?;
    repair.scene.restored().await?;
    let nothing = repair.scene.product.command(["approve", &node]).await?;
    assert_ne!(nothing.code, Some(0), "nothing waits: {}", nothing.stdout);
    Ok(())
}

#[tokio::test]
async fn an_uncordon_withdraws_a_repair_that_has_not_begun() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let repair = Repair::new(&plane, |launch| launch).await?;
    repair.fault(79)?;
    repair.made_is(1).await?;
    repair.awaits("the end of RebootNode").await?;
    let patch = json!({"spec": {"unschedulable": null}});
    repair.scene.patch(patch).await?;
    let gone = || async {
        let made = repair.made().await.map_err(|error| error.to_string())?;
        if made.is_empty() {
            Ok(())
        } else {
            Err(format!("{made:?}"))
        }
    };
    let product = &repair.scene.product;
    product.wait_for("no custom resource", SOON, gone).await
}

/// Returns a configuration of reboots and of a validation Job, which waits until it is resumed
/// if `suspend` is true.
pub(crate) fn with_validation(suspend: bool) -> String {
    let mut text = String::new();
    for action in ["COMPONENT_RESET", "RESTART_VM", "RESTART_BM"] {
        text += &format!(
            r#"
[remediationActions.{action}]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "reboot"
equivalenceGroup = "restart"
"#
        );
    }
    let validation = r#"
[remediationActions.VALIDATE]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "default"
completeConditionType = "Complete"
templateFileName = "validate"
equivalenceGroup = "validation"

[validation]
action = "VALIDATE"

[templates]
reboot = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "maintenance-{{ .NodeName }}-{{ .HealthEventID }}"}
spec: {nodeName: {{ .NodeName }}}
"""
validate = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "validate-{{ .HealthEventID }}"}
spec:
  suspend: SUSPEND
  template:
    spec:
      nodeName: {{ .NodeName }}
      restartPolicy: Never
      tolerations: [{operator: Exists}]
      containers: [{name: validate, image: validate}]
"""
"#;
    text + &validation.replace("SUSPEND", &suspend.to_string())
}

#[tokio::test]
async fn what_was_repaired_comes_back_once_its_job_has_succeeded() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("remediation.toml");
    std::fs::write(&config, with_validation(true))?;
    let config = config.display().to_string();
    let mut repair = Repair::new(&plane, |launch| {
        launch.option("--remediate-config", &config)
    })
    .await?;
    repair.fault(79)?;
    let name = repair.made_is(1).await?;
    let done = [condition("NodeReady", "True", "Succeeded")];
    repair.set(&name, json!(done)).await?;
    repair.state("remediation-succeeded").await?;
    recovered(&repair.scene).await?;
    repair.awaits("the end of Job validate-").await?;
    repair.scene.product.restart().await?;
    repair.awaits("the end of Job validate-").await?;
    let node = repair.state("remediating").await?;
    assert_eq!(node["spec"]["unschedulable"], true);
    // Kubernetes runs the Job; kwok plays the node's kubelet.
    let jobs: Api<Job> = Api::namespaced(plane.client().await?, "default");
    let validations = validations(&jobs, &repair.scene.node).await?;
    assert_eq!(validations.len(), 1, "{validations:?}");
    resume(&jobs, &validations[0]).await?;
    repair.scene.restored().await
}

/// Returns the Jobs that validate a node.
pub(crate) async fn validations(jobs: &Api<Job>, node: &str) -> anyhow::Result<Vec<Job>> {
    let mut list = jobs.list(&ListParams::default()).await?.items;
    list.retain(|job| {
        let template = job.spec.as_ref().map(|spec| &spec.template);
        let pod = template.and_then(|template| template.spec.as_ref());
        pod.and_then(|pod| pod.node_name.as_deref()) == Some(node)
    });
    Ok(list)
}

/// Resumes a waiting Job.
pub(crate) async fn resume(jobs: &Api<Job>, job: &Job) -> anyhow::Result<()> {
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let resume = Patch::Merge(json!({"spec": {"suspend": false}}));
    jobs.patch(name, &PatchParams::default(), &resume).await?;
    Ok(())
}
