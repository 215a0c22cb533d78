//! The story of `story.rs` with failures: a provider that throttles and then refuses, a second
//! fault during the drain, and a GPU whose reset fails.

use jiff::SignedDuration;
use kube::api::{DeleteParams, Patch, PatchParams};
use maintenance::janitor::{Class, ProviderFailure};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version};

use crate::janitor::resources;
use crate::machines::Played;
use crate::remediation::{condition, of_node};
use crate::requests::{UUID, has};
use crate::runbook::Reader;
use crate::stages::recovered;
use crate::story::Story;
use crate::support::{SOON, xid};

/// Returns a configuration that remediates with this kind if a reset of the GPU is enough, and
/// with a reboot otherwise.
fn resets_by(kind: &str) -> String {
    let action = |name: &str, kind: &str, condition: &str, group: &str, more: &str| {
        format!(
            r#"
[remediationActions.{name}]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "{kind}"
scope = "Cluster"
completeConditionType = "{condition}"
templateFileName = "any"
equivalenceGroup = "{group}"
{more}
"#
        )
    };
    let supersedes = r#"supersedingEquivalenceGroups = ["restart"]"#;
    let single = format!("impactedEntityScope = \"GPU_UUID\"\n{supersedes}");
    let reset = match kind {
        "GPUReset" => action("COMPONENT_RESET", kind, "Complete", "reset", &single),
        _ => action("COMPONENT_RESET", kind, "NodeReady", "reset", supersedes),
    };
    let reboot = action("RESTART_BM", "RebootNode", "NodeReady", "restart", "");
    let template = r#"
[templates]
any = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "maintenance-{{ .NodeName }}-{{ .HealthEventID }}"}
spec:
  nodeName: {{ .NodeName }}
  {{- if .ImpactedEntityScopeValue }}
  selector: {uuids: [{{ .ImpactedEntityScopeValue | printf "%q" }}]}
  {{- end }}
"""
"#;
    reset + &reboot + template
}

/// Reports a fault of a GPU whose remediation is a reset.
fn memory_fault(story: &Story) -> anyhow::Result<()> {
    let name = format!("[  100.000000] NVRM: GPU at PCI:0000:b3:00: {UUID}\n");
    let lines = name + &xid(48, "DBE (double bit error) ECC Error");
    story.drain.scene.product.append_kernel_log(&lines)
}

#[tokio::test]
async fn a_provider_that_throttles_is_asked_again_and_where_it_refuses_a_person_is()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let busy = |seconds| {
        let busy = ProviderFailure::new(Class::Transient, "RATE_LIMITED", "too many requests");
        busy.after(SignedDuration::from_secs(seconds))
    };
    let refuses = || ProviderFailure::new(Class::Permanent, "PERMISSION_DENIED", "not for you");
    // The second try is to be seen, also by a busy machine.
    let provider = Played::failing([busy(1), busy(10), refuses(), refuses()]);
    // First a gentle reboot, then a harder one.
    let story = Story::new(&plane, "", &resets_by("RebootNode"), provider).await?;
    let drain = &story.drain;
    memory_fault(&story)?;
    // A temporary refusal repeats the same request, and counts the attempts.
    let waits = |object: &Value| {
        let conditions = object["status"]["conditions"].to_string();
        has(object, "SignalSent", "Unknown") && conditions.contains("try 2 of 6: RATE_LIMITED")
    };
    story.reboot("the second try", 1, waits).await?;
    drain.state("remediating").await?;
    // A final refusal leads to the next group and, after the last group, to a person.
    let refused = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array();
        let ends = |one: &Value| one["reason"] == "PermanentFailure";
        conditions.into_iter().flatten().any(ends)
    };
    story.reboot("the second reboot's end", 2, refused).await?;
    drain.state("remediation-failed").await?;
    let mut reader = Reader::beside(&drain.scene.product, Some(&plane))?;
    let names = [("NODE", drain.scene.node.as_str())];
    reader.runbook("GpuwardenRemediationFailed", &names).await?;
    let made = story.made().await?;
    let tries = made[0]["status"]["conditions"].to_string();
    assert!(
        refused(&made[0]) && tries.contains(r#"\"try\":3"#),
        "{made:?}"
    );
    let uid = |one: &Value| one["metadata"]["uid"].as_str().unwrap().to_owned();
    let (first, second) = (uid(&made[0]), uid(&made[1]));
    // All attempts of one request share an operation; the next request has another.
    let signals = [first.clone(), first.clone(), first, second];
    assert_eq!(story.provider.signals(), signals);
    drain
        .awaits("a person: no repair is left to be tried")
        .await?;
    let name = made[0]["metadata"]["name"].as_str().unwrap_or_default();
    story
        .page(&[
            &format!("repair 1: RebootNode {name} (COMPONENT_RESET)"),
            &format!("RebootNode {name} has failed: "),
            "PERMISSION_DENIED: not for you",
            &format!("repair 2: RebootNode {name}-2 (RESTART_BM)"),
            "the repair makes no progress: no repair is left to be tried",
            "repair the node by hand, and release it",
            "awaited   a person: no repair is left",
        ])
        .await?;
    let metrics = drain.scene.product.get("/metrics").await?;
    for action in ["COMPONENT_RESET", "RESTART_BM"] {
        let node = &drain.scene.node;
        let counted = format!(
            "gpuwarden_remediation_attempts_total{{node_name=\"{node}\",action=\"{action}\",outcome=\"failed\"}} 1"
        );
        assert!(metrics.contains(&counted), "{counted} in {metrics}");
    }
    let refusals = metrics.lines().find(|line| {
        let failed = line.starts_with("janitor_actions_count{") && line.contains("\"failed\"");
        failed && line.contains(&drain.scene.node)
    });
    assert!(
        refusals.is_some_and(|line| line.ends_with(" 2")),
        "{refusals:?}"
    );
    // The node stays quarantined until a person has acted.
    drain.scene.cordoned().await?;
    recovered(&drain.scene).await?;
    drain.scene.restored().await
}

#[tokio::test]
async fn a_second_fault_while_pods_leave_is_taken_in_and_the_graver_repair_is_made()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let partial = "partialDrainEnabled = true\n";
    let remediation = resets_by("GPUReset");
    let story = Story::new(&plane, partial, &remediation, Played::new()).await?;
    let drain = &story.drain;
    let [now, ..] = drain.namespaces.clone();
    for (name, gpu) in [("a", UUID), ("b", "GPU-other")] {
        drain.pod(&now, name).await?;
        drain.holds(&now, name, gpu).await?;
    }
    let budgets = drain.protect(&now).await?;
    memory_fault(&story)?;
    drain.state("draining").await?;
    // Only the pod of the faulty GPU leaves, and its budget blocks it.
    drain.awaits("a pod to leave: ").await?;
    drain.awaits("disruption budget").await?;
    let session = |node: &Value| {
        let text = node["metadata"]["annotations"]["gpuwarden.dev/session"].as_str();
        let session: Value = serde_json::from_str(text.unwrap_or("null")).unwrap_or_default();
        session["id"].clone()
    };
    let before = session(&drain.scene.cordoned().await?);
    assert!(drain.pods(&now).get_opt("b").await?.is_some());
    // The machine needs a reboot: now all pods leave, in the same session.
    drain.fault()?;
    story.left(&now, "b").await?;
    drain.awaits("disruption budget").await?;
    assert!(drain.is_there(&now).await?);
    assert_eq!(session(&drain.scene.cordoned().await?), before);
    assert!(story.made().await?.is_empty());
    budgets.delete("keep", &DeleteParams::default()).await?;
    story.signalled(1).await?;
    story.boots("boot-2").await?;
    let done = |object: &Value| has(object, "AttemptComplete", "True");
    story.reboot("the end of the reboot", 1, done).await?;
    drain.state("remediation-succeeded").await?;
    let resets = resources(&drain.client, "GPUReset", "gpuresets");
    let made = of_node(&resets, &drain.scene.node).await?;
    assert!(made.is_empty(), "the reboot does it: {made:?}");
    recovered(&drain.scene).await?;
    drain.scene.restored().await?;
    assert_eq!(story.made().await?.len(), 1);
    assert_eq!(story.provider.signals().len(), 1);
    Ok(())
}

#[tokio::test]
async fn where_the_reset_of_a_gpu_fails_all_pods_leave_and_the_machine_boots() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let partial = "partialDrainEnabled = true\n";
    let remediation = resets_by("GPUReset");
    let mut story = Story::new(&plane, partial, &remediation, Played::new()).await?;
    let [now, ..] = story.drain.namespaces.clone();
    for (name, gpu) in [("a", "GPU-other"), ("b", UUID)] {
        story.drain.pod(&now, name).await?;
        story.drain.holds(&now, name, gpu).await?;
    }
    let budgets = story.drain.protect(&now).await?;
    memory_fault(&story)?;
    // The pod of the GPU leaves, and the other one continues.
    story.left(&now, "b").await?;
    let node = story.drain.scene.node.clone();
    let resets = resources(&story.drain.client, "GPUReset", "gpuresets");
    let made = || async {
        let made = of_node(&resets, &node).await;
        match made.map_err(|error| error.to_string())?.as_slice() {
            [reset] => Ok(reset.clone()),
            made => Err(format!("{made:?}")),
        }
    };
    let product = &story.drain.scene.product;
    let reset = product.wait_for("the reset", SOON, made).await?;
    assert_eq!(reset["spec"]["selector"]["uuids"], json!([UUID]));
    assert!(story.drain.is_there(&now).await?);
    story.drain.scene.product.restart().await?;
    // No controller resets GPUs here: the test sets the result.
    let failed = json!({"status": {"conditions": [
        condition("Complete", "False", "ResetFailed"),
        condition("AttemptComplete", "True", "PermanentFailure"),
    ]}});
    let name = reset["metadata"]["name"].as_str().unwrap_or_default();
    let how = PatchParams::default();
    resets
        .patch_status(name, &how, &Patch::Merge(failed))
        .await?;
    // A reboot would end the other pod, so it leaves first, in accordance with its budget.
    story.drain.awaits("disruption budget").await?;
    assert!(story.drain.is_there(&now).await? && story.made().await?.is_empty());
    story.drain.scene.product.restart().await?;
    story.drain.awaits("disruption budget").await?;
    assert!(story.drain.is_there(&now).await? && story.made().await?.is_empty());
    budgets.delete("keep", &DeleteParams::default()).await?;
    story.left(&now, "a").await?;
    story.signalled(1).await?;
    story.boots("boot-2").await?;
    let done = |object: &Value| has(object, "AttemptComplete", "True");
    let reboot = story.reboot("the end of the reboot", 1, done).await?;
    assert_eq!(reboot["metadata"]["name"], format!("{name}-2"));
    story.drain.state("remediation-succeeded").await?;
    recovered(&story.drain.scene).await?;
    story.drain.scene.restored().await?;
    assert_eq!(of_node(&resets, &node).await?.len(), 1);
    assert_eq!(story.made().await?.len(), 1);
    Ok(())
}
