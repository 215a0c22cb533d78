//! Stories of faults that say more together than each alone: who may be out of service, who never was, and
//! what is concluded, with a product that is killed after every step.

use std::collections::BTreeMap;

use contract::{HealthEvent, ProcessingStrategy, keys};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use testkit::{ControlPlane, Launch, NodeBuilder, Options, Version};

use crate::group::{Group, Said, concluded, from, of_gpu, xid};
use crate::remediation::ASKS;
use crate::support::{SOON, event, object, recovery};

const DOMAIN: &str = "nvidia.com/gpu.clique";
const RACK: &str = "topology.kubernetes.io/rack";

/// Returns a function that gives all nodes of a group this label.
fn labelled(key: &'static str) -> impl Fn(usize, NodeBuilder) -> NodeBuilder {
    let value = testkit::unique("place");
    move |_, node| node.label(key, &value)
}

/// Returns the outages of nodes that went out of service once.
fn once(names: &[String]) -> BTreeMap<String, usize> {
    names.iter().map(|name| (name.clone(), 1)).collect()
}

fn xids(nodes: &[String], code: &str, fatal: bool) -> Vec<HealthEvent> {
    nodes.iter().map(|node| xid(node, code, fatal)).collect()
}

#[tokio::test]
async fn the_crash_of_one_job_on_77_nodes_takes_none_out() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut group = Group::new(&plane, 78, labelled(DOMAIN), Launch::quarantine).await?;
    let (crashed, broken) = (group.names[..77].to_vec(), group.names[77..].to_vec());
    group
        .send_and_kill(xids(&crashed[..40], "45", false))
        .await?;
    group
        .send_and_kill(xids(&crashed[40..], "45", false))
        .await?;
    group.incident(77, 0).await?;
    group.kill().await?;
    group.incident(77, 0).await?;
    // A fault of another node takes that one out, so the crash has been judged, too.
    group.send_and_kill(xids(&broken, "79", true)).await?;
    group.until_out(&broken).await?;
    group.kill().await?;
    group.incident(78, 0).await?;
    assert_eq!(group.outages().await?, once(&broken));
    assert_eq!(group.said().await?, []);
    Ok(())
}

#[tokio::test]
async fn a_link_that_dies_in_a_domain_of_64_nodes_takes_one_out() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut group = Group::new(&plane, 64, labelled(DOMAIN), Launch::quarantine).await?;
    let names = group.names.clone();
    let (first, peers) = (&names[..1], &names[1..]);
    // Close together, however long the kills take.
    let codes = xids(first, "149.NETIR_LINK_EVT", true).into_iter();
    let codes = codes.chain(xids(peers, "145.RLW_SRC_TRACK", true));
    let mut events = from(Timestamp::now(), codes);
    let (others, half) = (events.split_off(32), events.split_off(1));
    group.send_and_kill(events).await?;
    group.until_out(first).await?;
    group.send_and_kill(half).await?;
    group.send_and_kill(others).await?;
    let incident = group.incident(64, 63).await?;
    assert_eq!(incident["primaryNode"], first[0]);
    // Half of the domain has failed: that is said, and asks for nothing.
    let said = [concluded("NVLinkDomainFault", &names[31])];
    group.until_said(&said).await?;
    group.kill().await?;
    group.incident(64, 63).await?;
    group.until_out(first).await?;
    let healthy = HealthEvent {
        is_healthy: true,
        ..xid(&first[0], "149.NETIR_LINK_EVT", false)
    };
    group.send_and_kill(vec![healthy]).await?;
    group.until_out(&[]).await?;
    group.kill().await?;
    // The followers are over. What is concluded lasts as long as its window.
    let over = || async {
        let shown = group.shown(&["status"]).await?;
        let nodes = shown["fleet"]["nodes"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let faults = nodes
            .iter()
            .filter_map(|node| node["faults"].as_array())
            .flatten();
        let xids = faults
            .filter(|fault| fault["check"] == keys::CHECK_XID)
            .count();
        anyhow::ensure!(xids == 0, "{xids} are open");
        Ok(())
    };
    group
        .product
        .wait_for("the end of the followers", SOON, over)
        .await?;
    assert_eq!(group.outages().await?, once(first));
    assert_eq!(group.said().await?, said);
    Ok(())
}

#[tokio::test]
async fn one_yes_approves_what_waits_on_all_nodes_of_an_incident() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let policy = tempfile::NamedTempFile::new()?;
    std::fs::write(policy.path(), ASKS)?;
    let asks = |launch: Launch| {
        let launch = launch.quarantine().arg("--drain");
        launch.option("--policy", policy.path())
    };
    let mut group = Group::new(&plane, 3, labelled(DOMAIN), asks).await?;
    let (both, third) = (group.names[..2].to_vec(), group.names[2..].to_vec());
    group.send_and_kill(xids(&both, "79", true)).await?;
    group.send_and_kill(xids(&third, "45", false)).await?;
    let waiting = || async {
        let incident = group.incident(3, 0).await?;
        let nodes = incident["nodes"].as_array().into_iter().flatten();
        let proposals = nodes.filter(|node| node["proposal"].is_object()).count();
        anyhow::ensure!(proposals == 2, "{incident}");
        Ok(incident["id"].as_str().unwrap_or_default().to_owned())
    };
    let product = &group.product;
    let id = product.wait_for("two proposals", SOON, waiting).await?;
    let command = format!("awaits an approval on 2 nodes: gpuwarden approve {id}");
    let status = product.client(["status"]).await?;
    assert!(status.stdout.contains(&command), "{}", status.stdout);

    let kubeconfig = plane.kubeconfig().display().to_string();
    let approve = async |what: &str| {
        product
            .client(["approve", what, "--kubeconfig", &kubeconfig])
            .await
    };
    let unknown = approve("nothing").await?;
    assert_eq!(unknown.code, Some(2));
    let what = format!("an approval is awaited in {id}");
    assert!(unknown.stderr.contains(&what), "{}", unknown.stderr);
    let approved = approve(&id).await?;
    let said = approved.expect(0)?;
    for node in &both {
        let line = format!("{node}: approved: drain of the node;");
        assert!(said.contains(&line), "{said}");
    }
    let other = format!("nothing waits on 1 other node: {}", third[0]);
    assert!(said.contains(&other), "{said}");
    let taken = || async {
        for node in &both {
            let node = object(&group.nodes, node).await?;
            let session = node["metadata"]["annotations"]["gpuwarden.dev/session"].to_string();
            anyhow::ensure!(session.contains("approved"), "{session}");
        }
        Ok(())
    };
    product.wait_for("both approvals", SOON, taken).await
}

#[tokio::test]
async fn the_power_of_a_rack_is_one_conclusion_and_the_brake_keeps_its_nodes() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    plane.namespace("warden").await?;
    // 16 of 20 nodes are in the rack; one in five of the cluster may be out.
    let describe = |number: usize, node: NodeBuilder| {
        let rack = if number < 16 { "r1" } else { "r2" };
        node.label(RACK, rack)
            .label("nvidia.com/gpu.present", "true")
    };
    let arrange = |launch: Launch| {
        let launch = launch.option("--namespace", "warden");
        launch.quarantine_with_brake()
    };
    let mut group = Group::new(&plane, 20, describe, arrange).await?;
    let names = group.names.clone();
    let faults = names[..16].iter().map(|node| event(node, "0"));
    let mut faults = from(Timestamp::now(), faults);
    let (last, second) = (faults.split_off(8), faults.split_off(4));
    let (out, held) = (&names[..4], &names[4..16]);
    group.send_and_kill(faults).await?;
    group.until_state("quarantined", out).await?;
    group.kill().await?;
    group.until_state("quarantined", out).await?;
    assert_eq!(group.said().await?, []);
    group.send_and_kill(second).await?;
    group.until_state("held", &held[..4]).await?;
    let said = [concluded("RackFault", &names[7])];
    group.until_said(&said).await?;
    group.kill().await?;
    group.send_and_kill(last).await?;
    group.until_state("held", held).await?;
    group.incident(16, 0).await?;
    group.kill().await?;
    group.until_state("held", held).await?;
    group.until_state("quarantined", out).await?;
    // The conclusion proposes, and takes none out.
    let events = group.events().await?;
    let fault = events
        .iter()
        .find(|event| event["checkName"] == "RackFault");
    let fault = fault.unwrap();
    assert_eq!(fault["metadata"][RACK], "r1");
    assert_eq!(
        (&fault["isFatal"], &fault["recommendedAction"]),
        (&json!(false), &json!("NONE"))
    );

    // The power is back, first where nodes were held.
    group
        .send_and_kill(held.iter().map(|node| recovery(node, "0")).collect())
        .await?;
    group.until_state("held", &[]).await?;
    group
        .send_and_kill(out.iter().map(|node| recovery(node, "0")).collect())
        .await?;
    group.until_out(&[]).await?;
    group.kill().await?;
    group.until_state("quarantined", &[]).await?;
    assert_eq!(group.outages().await?, once(out));
    assert_eq!(group.said().await?, said);
    Ok(())
}

/// Returns the event by which a monitor names a GPU of its node.
fn inventory(node: &str, gpu: usize) -> HealthEvent {
    let named = HealthEvent {
        agent: keys::GPU_AGENT.to_owned(),
        check_name: keys::CHECK_GPU_INVENTORY.to_owned(),
        is_healthy: true,
        error_code: Vec::new(),
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        ..xid(node, "", false)
    };
    of_gpu(named, gpu)
}

#[tokio::test]
async fn a_silent_gpu_among_71_noisy_ones_is_named_and_stays() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut group = Group::new(&plane, 18, labelled(DOMAIN), Launch::quarantine).await?;
    let names = group.names.clone();
    // The first GPUs of all nodes come first, so two GPUs at least are silent until the last one.
    let gpus = (0..4).flat_map(|gpu| names.iter().map(move |node| (node.as_str(), gpu)));
    let known = gpus
        .clone()
        .map(|(node, gpu)| inventory(node, gpu))
        .collect();
    group.send_and_kill(known).await?;
    let silent = (names[7].as_str(), 3);
    let noisy = gpus.filter(|gpu| *gpu != silent);
    let noisy = noisy.map(|(node, gpu)| of_gpu(xid(node, "45", false), gpu));
    // For five minutes the silent one could still have reported.
    let mut noisy = from(Timestamp::now() - SignedDuration::from_mins(6), noisy);
    assert_eq!(noisy.len(), 71);
    let (last, second) = (noisy.split_off(70), noisy.split_off(36));
    group.send_and_kill(noisy).await?;
    group.send_and_kill(second).await?;
    group.incident(18, 0).await?;
    assert_eq!(group.said().await?, []);
    group.send_and_kill(last).await?;
    let mut said = vec![concluded("SilentGPU", silent.0)];
    group.until_said(&said).await?;
    let events = group.events().await?;
    let named = events
        .iter()
        .find(|event| event["checkName"] == "SilentGPU");
    let named = named.unwrap();
    let uuid = format!("GPU-{}-3", silent.0);
    assert!(
        named["entitiesImpacted"].to_string().contains(&uuid),
        "{named}"
    );
    assert_eq!(
        (&named["isFatal"], &named["recommendedAction"]),
        (&json!(false), &json!("NONE"))
    );
    group.kill().await?;
    group.incident(18, 0).await?;

    // The hint is over once the GPU reports, and another fault takes its node out alone.
    let reports = of_gpu(xid(silent.0, "45", false), silent.1);
    group.send_and_kill(vec![reports]).await?;
    said.push(Said {
        is_healthy: true,
        ..said[0].clone()
    });
    group.until_said(&said).await?;
    let broken = &names[3..4];
    group
        .send_and_kill(vec![of_gpu(xid(&broken[0], "79", true), 0)])
        .await?;
    group.until_out(broken).await?;
    group.kill().await?;
    group.until_state("quarantined", broken).await?;
    assert_eq!(group.outages().await?, once(broken));
    assert_eq!(group.said().await?, said);
    Ok(())
}

#[tokio::test]
async fn a_lemon_is_shown_with_its_score_and_comes_back_like_any_other() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut group = Group::new(&plane, 2, |_, node| node, Launch::quarantine).await?;
    let names = group.names.clone();
    let (lemon, other) = (&names[..1], &names[1..]);
    let fails = |node: &str, code, hours| {
        let event = of_gpu(xid(node, code, true), 0);
        from(
            Timestamp::now() - SignedDuration::from_hours(hours),
            [event],
        )
    };
    let reset = |node: &str, hours| {
        let done = HealthEvent {
            is_healthy: true,
            error_code: Vec::new(),
            ..of_gpu(xid(node, "", false), 0)
        };
        from(Timestamp::now() - SignedDuration::from_hours(hours), [done])
    };
    group.send_and_kill(fails(&other[0], "48", 12)).await?;
    group.until_out(other).await?;
    group.send_and_kill(reset(&other[0], 11)).await?;
    group.until_out(&[]).await?;
    group.send_and_kill(fails(&lemon[0], "48", 10)).await?;
    group.until_out(lemon).await?;
    group.send_and_kill(reset(&lemon[0], 9)).await?;
    group.until_out(&[]).await?;
    group.send_and_kill(fails(&lemon[0], "95", 6)).await?;
    group.until_out(lemon).await?;
    group.send_and_kill(reset(&lemon[0], 5)).await?;
    // The second return within an hour waits for half a minute.
    group.send_and_kill(fails(&lemon[0], "48", 2)).await?;
    group.send_and_kill(reset(&lemon[0], 1)).await?;

    let uuid = format!("GPU-{}-0", lemon[0]);
    let shown = || async {
        let ledger = group.shown(&["ledger"]).await?;
        let first = &ledger["gpus"][0];
        let counts = (&first["id"], &first["faults"], &first["repairs"]);
        anyhow::ensure!(counts == (&json!(uuid), &json!(3), &json!(3)), "{ledger}");
        Ok(ledger)
    };
    let ledger = group.product.wait_for("the ledger", SOON, shown).await?;
    let score = |row: &serde_json::Value| row["score"].as_f64().unwrap_or_default();
    let (gpu, node) = (&ledger["gpus"][0], &ledger["nodes"][0]);
    assert_eq!(node["node"], lemon[0]);
    // Three fatal faults and three resets, some hours old.
    for row in [gpu, node] {
        assert!((3.8..3.9).contains(&score(row)), "{ledger}");
    }
    assert!((1.2..1.3).contains(&score(&ledger["gpus"][1])), "{ledger}");
    let entry = group.shown(&["ledger", &uuid]).await?;
    assert_eq!(
        entry["gpu"]["score"]["terms"].as_array().map(Vec::len),
        Some(6),
        "{entry}"
    );
    assert!(
        gpu["mark"].is_null() && gpu["isRmaCandidate"].is_null(),
        "{gpu}"
    );

    // Nothing acts on the score: the node comes back.
    group.until_out(&[]).await?;
    group.kill().await?;
    group.until_state("quarantined", &[]).await?;
    let mut outages = group.outages().await?;
    let of_lemon = outages.remove(&lemon[0]);
    // Three times where the last fault came after the wait.
    assert!(matches!(of_lemon, Some(2 | 3)), "{of_lemon:?}");
    assert_eq!(outages, once(other));
    assert_eq!(group.said().await?, []);
    Ok(())
}
