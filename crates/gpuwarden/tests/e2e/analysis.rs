//! Conclusions from many events, in a controller that is killed between them.

use contract::{Entity, HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version, unique};

use crate::support::{SOON, Scene, event, send_to};

const RULE: &str = "RepeatedXIDErrorOnSameGPU";

/// A rule that concludes from the second XID on.
const TWICE: &str = r#"
[[rules]]
name = "Twice"
checks = ["SysLogsXIDError"]
group_by = ["gpu"]
kind = "count"
window = "24h"
threshold = 2
action = "CONTACT_SUPPORT"
message = "The GPU had two XIDs."
"#;

/// Returns an XID that asks for nothing, some minutes ago.
fn xid(node: &str, minutes: i64) -> HealthEvent {
    let at = Timestamp::now() - SignedDuration::from_mins(minutes);
    HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.into(),
        component_class: "GPU".into(),
        check_name: keys::CHECK_XID.into(),
        error_code: vec!["62".into()],
        message: format!("{minutes} minutes ago"),
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_GPU_UUID.into(),
            entity_value: "GPU-1".into(),
        }],
        generated_timestamp: Some(contract::json::proto_timestamp(at)),
        node_name: node.into(),
        ..HealthEvent::default()
    }
}

/// Returns the stored events, oldest first.
async fn events(scene: &Scene) -> anyhow::Result<Vec<Value>> {
    let output = scene.product.client(["events", "-o", "json"]).await?;
    Ok(serde_json::from_str(output.expect(0)?)?)
}

/// Waits until there are this many events of a rule's conclusion; returns them.
async fn conclusions(scene: &Scene, rule: &str, count: usize) -> anyhow::Result<Vec<Value>> {
    let found = || async {
        let mut all = events(scene).await.map_err(|error| error.to_string())?;
        all.retain(|one| one["event"]["checkName"] == rule);
        if all.len() == count {
            Ok(all)
        } else {
            Err(json!(all).to_string())
        }
    };
    scene.product.wait_for("the conclusions", SOON, found).await
}

#[tokio::test]
async fn what_comes_back_is_concluded_once_through_kills_and_anew_after_a_release()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let rules = tempfile::NamedTempFile::new()?;
    std::fs::write(rules.path(), "# none of our own\n")?;
    let with_rules = |launch: Launch| launch.option("--rules", rules.path());
    let mut scene = Scene::new(&plane, |node| node, with_rules).await?;
    let node = scene.node.clone();
    for minutes in [250, 240, 230, 220, 210] {
        send_to(&scene.product, vec![xid(&node, minutes)]).await?;
        scene.product.kill9()?;
        scene.product.restart().await?;
    }
    scene.cordoned().await?;
    let concluded = conclusions(&scene, RULE, 1).await?;
    let shown = || async {
        let text = scene
            .product
            .get("/metrics")
            .await
            .map_err(|error| error.to_string())?;
        let line = format!("gpuwarden_analysis_open_conclusions{{rule_name=\"{RULE}\"}} 1\n");
        if text.contains(&line) {
            Ok(())
        } else {
            Err(text)
        }
    };
    scene.product.wait_for("the metrics", SOON, shown).await?;
    let said = &concluded[0]["event"];
    assert_eq!(said["agent"], keys::ANALYZER_AGENT);
    assert_eq!(said["recommendedAction"], "CONTACT_SUPPORT");
    assert_eq!(said["entitiesImpacted"][0]["entityValue"], "GPU-1");
    let evidence = said["metadata"][keys::META_EVIDENCE].as_str();
    let evidence: Vec<&str> = evidence.unwrap_or_default().split(',').collect();
    assert_eq!(evidence.len(), 5);
    for one in events(&scene).await? {
        let is_evidence = evidence.contains(&one["event"]["id"].as_str().unwrap_or_default());
        assert_eq!(one["analysis"][0]["rule"] == RULE, is_evidence, "{one}");
    }

    // With other rules the analysis reads all events again, and says nothing twice.
    std::fs::write(rules.path(), TWICE)?;
    let reread = || async {
        let log = scene.product.stderr();
        if log.contains("because of its state: it is of other rules") {
            Ok(())
        } else {
            Err("the events were not read again")
        }
    };
    scene
        .product
        .wait_for("the new rules", SOON, reread)
        .await?;
    send_to(&scene.product, vec![xid(&node, 200)]).await?;
    conclusions(&scene, "Twice", 1).await?;
    conclusions(&scene, RULE, 1).await?;

    // A person's release closes both, and what came before does not count any longer.
    let kubeconfig = plane.kubeconfig().display().to_string();
    let release = [
        "release",
        &node,
        "--reason",
        "replaced",
        "--kubeconfig",
        &kubeconfig,
    ];
    scene.product.command(release).await?.expect(0)?;
    let both = conclusions(&scene, RULE, 2).await?;
    assert_eq!(both[1]["event"]["isHealthy"], true);
    let in_service = |node: &Value| match &node["spec"]["unschedulable"] {
        Value::Null => Ok(()),
        other => Err(other.to_string()),
    };
    scene.node_until("the node in service", in_service).await?;
    send_to(&scene.product, vec![xid(&node, 30), xid(&node, 0)]).await?;
    scene.taken_in(12).await?;
    conclusions(&scene, "Twice", 2).await?;
    let mut again = xid(&node, 0);
    again.message = "once more".to_owned();
    send_to(&scene.product, vec![again]).await?;
    scene.cordoned().await?;
    conclusions(&scene, "Twice", 3).await?;
    conclusions(&scene, RULE, 2).await?;
    Ok(())
}

#[tokio::test]
async fn half_of_a_rack_that_fails_is_one_conclusion_that_takes_none_out() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let rack = unique("rack");
    let mut nodes = Vec::new();
    for _ in 0..8 {
        let name = unique("e2e");
        testkit::node(&name)
            .label("topology.kubernetes.io/rack", &rack)
            .create(&client)
            .await?;
        nodes.push(name);
    }
    let product = Launch::new()?
        .node_name(&nodes[0])
        .kubeconfig(plane.kubeconfig())
        .option("--accept-nodes", "any")
        .start()
        .await?;
    let status = || async {
        let output = product.client(["status", "-o", "json"]).await;
        let text = output.map_err(|error| error.to_string())?.stdout;
        let status: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let read = status["fleet"]["cluster"]["nodes"].as_u64();
        if status["ready"] == true && read >= Some(nodes.len() as u64) {
            Ok(())
        } else {
            Err(text)
        }
    };
    product.wait_for("the nodes", SOON, status).await?;
    let faults = nodes.iter().take(4).map(|node| event(node, "0")).collect();
    send_to(&product, faults).await?;
    let concluded = || async {
        let output = product.client(["events", "-o", "json"]).await;
        let text = output.map_err(|error| error.to_string())?.stdout;
        let all: Vec<Value> = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let mut all = all.into_iter().map(|mut one| one["event"].take());
        all.find(|one| one["checkName"] == "RackFault").ok_or(text)
    };
    let fault = product
        .wait_for("the fault of the rack", SOON, concluded)
        .await?;
    assert_eq!(fault["metadata"]["topology.kubernetes.io/rack"], rack);
    let evidence = fault["metadata"]["gpuwarden.dev/evidence"].as_str();
    assert_eq!(evidence.unwrap_or_default().split(',').count(), 4);
    assert_eq!(
        (&fault["isFatal"], &fault["recommendedAction"]),
        (&json!(false), &json!("NONE"))
    );
    Ok(())
}
