//! Nodes of a real control plane: conditional changes, restoration to the byte, and watches.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use contract::keys;
use gpuwarden_cluster::{ApiError, Cluster, ConnectOptions, NodeEvent};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, GetParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use kube::{Client, config::Kubeconfig};
use model::node::{NodeChange, NodeView, Taint};
use serde_json::{Value, json};
use testkit::{ControlPlane, NodeBuilder, Options, Program, Version, node, unique, wait_for};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

#[path = "cluster/requests.rs"]
mod requests;

/// Longest time for the controller manager, or for an API server that was killed.
const SOON: Duration = Duration::from_secs(60);
/// Taint that the controller manager adds to a cordoned node.
const CORDON_TAINT: &str = "node.kubernetes.io/unschedulable";
/// Annotation that the controller manager sets on every node.
const TTL: &str = "node.alpha.kubernetes.io/ttl";

async fn connect(kubeconfig: &Path) -> Result<Cluster> {
    let kubeconfig = Some(kubeconfig.to_owned());
    Ok(Cluster::connect(ConnectOptions {
        kubeconfig,
        ..ConnectOptions::default()
    })
    .await?)
}

/// Connects as a new service account with these permissions, if any. Unlike the administrator,
/// the account is subject to authorization and to the limits of the API server.
async fn connect_as(plane: &ControlPlane, role: Option<&str>) -> Result<Cluster> {
    let name = unique("account");
    plane.namespace(&name).await?;
    plane
        .kubectl(["-n", &name, "create", "serviceaccount", &name])
        .await?;
    if let Some(role) = role {
        let account = format!("--serviceaccount={name}:{name}");
        let role = format!("--clusterrole={role}");
        plane
            .kubectl(["create", "clusterrolebinding", &name, &role, &account])
            .await?;
    }
    let token = plane
        .kubectl(["-n", &name, "create", "token", &name])
        .await?;

    let mut kubeconfig = serde_json::to_value(Kubeconfig::read_from(plane.kubeconfig())?)?;
    let user = kubeconfig["users"][0]["name"].clone();
    kubeconfig["users"] = json!([{"name": user, "user": {"token": token.trim()}}]);
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), kubeconfig.to_string())?;
    connect(file.path()).await
}

async fn object(client: &Client, name: &str) -> Result<Value> {
    let request = Request::new("/api/v1/nodes").get(name, &GetParams::default())?;
    Ok(client.request(request).await?)
}

async fn view(client: &Client, name: &str) -> Result<NodeView> {
    NodeView::from_object(object(client, name).await?).context("not a node")
}

/// Creates a node, and waits until the controller manager has nothing to add.
async fn enter(client: &Client, builder: NodeBuilder) -> Result<NodeView> {
    let made = builder.create(client).await?;
    let name = made.metadata.name.context("no name")?;
    wait_for("the node as it stays", SOON, || async {
        let node = view(client, &name).await?;
        let done = node.annotations.contains_key(TTL) && is_marked(&node) == node.unschedulable;
        ensure!(done, "{:?} {:?}", node.annotations, node.taints);
        Ok(node)
    })
    .await
}

/// Returns the parts of a node that must not differ after a session.
async fn lasting(client: &Client, name: &str) -> Result<String> {
    let mut object = object(client, name).await?;
    let metadata = object["metadata"].as_object_mut().context("no metadata")?;
    metadata.remove("resourceVersion");
    metadata.remove("managedFields");
    Ok(serde_json::to_string_pretty(&object)?)
}

/// Changes the node as another client.
async fn meddle(client: &Client, name: &str, patch: Value) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    nodes
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

fn is_marked(node: &NodeView) -> bool {
    node.taints
        .iter()
        .any(|on_node| on_node.taint.key == CORDON_TAINT)
}

fn raw_taints(node: &NodeView) -> Vec<Value> {
    node.taints
        .iter()
        .map(|on_node| on_node.raw.clone())
        .collect()
}

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    Taint {
        key: key.into(),
        value: value.into(),
        effect: effect.into(),
    }
}

fn ours() -> Taint {
    taint("gpuwarden.dev/fault", "XID-79", "NoSchedule")
}

fn entries<const N: usize>(entries: [(&str, Option<&str>); N]) -> BTreeMap<String, Option<String>> {
    entries
        .into_iter()
        .map(|(key, value)| (key.into(), value.map(str::to_owned)))
        .collect()
}

/// Returns a quarantine with every kind of change.
fn quarantine(node: &NodeView) -> NodeChange {
    NodeChange {
        unschedulable: (!node.unschedulable).then_some(true),
        add_taints: vec![ours(), taint("gpuwarden.dev/drain", "", "NoExecute")],
        remove_taints: vec![],
        labels: entries([
            (keys::STATE_LABEL, Some(keys::STATE_QUARANTINED)),
            ("k8saas.nvidia.com/cordon-by", Some("NVSentinel")),
        ]),
        annotations: entries([
            (
                keys::QUARANTINE_HEALTH_EVENT,
                Some(r#"[{"message":"a/b ~1 \"c\""}]"#),
            ),
            (keys::QUARANTINE_IS_CORDONED, Some(keys::TRUE)),
            (keys::SESSION, Some("{}")),
        ]),
    }
}

/// Returns the change that undoes `quarantine` on a node that was as `before`.
fn release(before: &NodeView) -> NodeChange {
    let change = quarantine(before);
    let back = |now: BTreeMap<String, Option<String>>, old: &BTreeMap<String, String>| {
        now.into_keys()
            .map(|key| (key.clone(), old.get(&key).cloned()))
            .collect()
    };
    NodeChange {
        unschedulable: change.unschedulable.map(|_| false),
        add_taints: vec![],
        remove_taints: change.add_taints,
        labels: back(change.labels, &before.labels),
        annotations: back(change.annotations, &before.annotations),
    }
}

/// Returns the error of a change that must fail.
async fn refused(cluster: &Cluster, node: &NodeView, change: &NodeChange) -> Result<ApiError> {
    let result = cluster.apply(node, change).await;
    result.err().context("the change was made")
}

/// Applies the change that `decide` returns, and decides again after each conflict. Returns the
/// node and the number of conflicts.
async fn settle(
    cluster: &Cluster,
    client: &Client,
    mut node: NodeView,
    decide: impl Fn(&NodeView) -> NodeChange,
) -> Result<(NodeView, usize)> {
    for conflicts in 0..10 {
        match cluster.apply(&node, &decide(&node)).await {
            Err(ApiError::Conflict { .. }) => node = view(client, &node.name).await?,
            result => return Ok((result?, conflicts)),
        }
    }
    bail!("ten conflicts in a row")
}

#[tokio::test]
async fn a_node_comes_back_to_the_byte() -> Result<()> {
    let Some(plane) = ControlPlane::private(Version::LATEST, Options::default()).await? else {
        return Ok(());
    };
    // The controller manager would annotate the nodes, and taint each cordoned one.
    plane.kill(Program::ControllerManager)?;
    let (client, cluster) = (plane.client().await?, connect(plane.kubeconfig()).await?);
    assert_eq!(cluster.server(), plane.server());

    let labels = json!({"zone": "a", keys::STATE_LABEL: "theirs"});
    let annotations = json!({"example.com/a-b": "1", keys::QUARANTINE_HEALTH_EVENT: ""});
    let taints = json!([
        {"key": "theirs", "value": "x", "effect": "NoExecute"},
        {"key": "gpuwarden.dev/fault", "effect": "PreferNoSchedule"},
    ]);
    let cases = [
        ("bare", json!({}), json!({})),
        ("labels", json!({"labels": labels}), json!({})),
        (
            "annotations",
            json!({"annotations": annotations}),
            json!({}),
        ),
        ("taints", json!({}), json!({"taints": taints})),
        ("cordoned", json!({}), json!({"unschedulable": true})),
        (
            "all",
            json!({"labels": labels, "annotations": annotations}),
            json!({"taints": taints, "unschedulable": true}),
        ),
    ];
    for (name, mut metadata, spec) in cases {
        metadata["name"] = json!(name);
        let node: Node = serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?;
        Api::<Node>::all(client.clone())
            .create(&PostParams::default(), &node)
            .await?;
        // Admission has added `not-ready`, and there is no kubelet to remove the taint.
        let born = view(&client, name).await?;
        let not_ready = born.taints.iter().map(|on_node| on_node.taint.clone());
        let remove_taints = not_ready
            .filter(|t| t.key.ends_with("/not-ready"))
            .collect();
        let start = NodeChange {
            remove_taints,
            ..NodeChange::default()
        };
        let before = cluster.apply(&born, &start).await?;
        for (there, given) in [
            (!before.labels.is_empty(), metadata.get("labels")),
            (!before.annotations.is_empty(), metadata.get("annotations")),
            (!before.taints.is_empty(), spec.get("taints")),
        ] {
            assert_eq!(there, given.is_some(), "{name}: {given:?}");
        }
        let bytes = lasting(&client, name).await?;

        let change = quarantine(&before);
        let during = cluster.apply(&before, &change).await?;
        let expected = before.after(&change);
        let plain = |node: &NodeView| -> Vec<Taint> {
            node.taints
                .iter()
                .map(|on_node| on_node.taint.clone())
                .collect()
        };
        assert_eq!(plain(&during), plain(&expected), "{name}");
        assert_eq!(during.labels, expected.labels, "{name}");
        assert_eq!(during.annotations, expected.annotations, "{name}");
        assert!(during.unschedulable, "{name}");
        assert_eq!(
            during,
            view(&client, name).await?,
            "{name}: the answer is the node"
        );

        cluster.apply(&during, &release(&before)).await?;
        assert_eq!(lasting(&client, name).await?, bytes, "{name}");
    }
    Ok(())
}

/// Uses a control plane of its own: tests of gpuwarden in the shared one react to these changes.
#[tokio::test]
async fn nodes_are_changed_with_others_at_work() -> Result<()> {
    let Some(plane) = ControlPlane::private(Version::LATEST, Options::default()).await? else {
        return Ok(());
    };
    let (client, cluster) = (plane.client().await?, connect(plane.kubeconfig()).await?);
    let nobody = connect_as(&plane, None).await?;
    tokio::try_join!(
        the_taint_of_a_cordon_is_not_ours(&client, &cluster),
        what_others_write_survives(&client, &cluster),
        what_the_decision_read_must_still_hold(&client, &cluster),
        refusals_are_told_apart(&client, &cluster, &nobody),
        the_watch_sees_changes(&client, &cluster),
        the_watch_and_a_burst_share_one_connection(&plane, &client),
    )?;
    Ok(())
}

async fn the_taint_of_a_cordon_is_not_ours(client: &Client, cluster: &Cluster) -> Result<()> {
    let before = enter(client, node(unique("cordon"))).await?;
    let (during, _) = settle(cluster, client, before.clone(), quarantine).await?;
    let marked = async |expected: bool| {
        wait_for("the taint of the cordon to come or go", SOON, || async {
            let node = view(client, &before.name).await?;
            ensure!(is_marked(&node) == expected, "{:?}", node.taints);
            Ok(node)
        })
        .await
    };
    marked(true).await?;

    // Not in the view: our taints are removed, the cordon and its taint stay.
    let untaint = |_: &NodeView| NodeChange {
        remove_taints: quarantine(&before).add_taints,
        ..NodeChange::default()
    };
    let (untainted, _) = settle(cluster, client, during, untaint).await?;
    let left: BTreeSet<&str> = untainted
        .taints
        .iter()
        .map(|it| it.taint.key.as_str())
        .collect();
    assert_eq!(left, BTreeSet::from([CORDON_TAINT]));

    settle(cluster, client, untainted, |_| release(&before)).await?;
    let after = marked(false).await?;
    assert_eq!(
        (
            after.labels,
            after.annotations,
            after.unschedulable,
            after.taints
        ),
        (
            before.labels,
            before.annotations,
            before.unschedulable,
            before.taints
        )
    );
    Ok(())
}

async fn what_others_write_survives(client: &Client, cluster: &Cluster) -> Result<()> {
    let name = unique("foreign");
    let built = node(&name)
        .label("zone", "a")
        .taint("first", "1", "NoExecute")
        .unschedulable();
    let seen = enter(client, built).await?;

    // Between read and patch: an annotation, a label, a taint at the head of the list.
    let mut taints = raw_taints(&seen);
    taints.insert(0, json!({"key": "theirs", "effect": "NoSchedule"}));
    let metadata = json!({"annotations": {"theirs": "1"}, "labels": {"theirs": "1"}});
    meddle(
        client,
        &name,
        json!({"metadata": metadata, "spec": {"taints": taints}}),
    )
    .await?;

    let during = cluster.apply(&seen, &quarantine(&seen)).await?;
    assert_eq!(
        during.annotations.get("theirs").map(String::as_str),
        Some("1")
    );
    assert_eq!(during.labels.get("theirs").map(String::as_str), Some("1"));
    let key = |it: &model::node::NodeTaint| it.taint.key.clone();
    assert_eq!(during.taints.first().map(key).as_deref(), Some("theirs"));
    assert!(during.has_taint(&ours()));

    // The list shifts under the removal: a conflict, and success the second time.
    let mut taints = raw_taints(&during);
    taints.remove(0);
    meddle(client, &name, json!({"spec": {"taints": taints}})).await?;
    let (after, conflicts) = settle(cluster, client, during, |_| release(&seen)).await?;
    assert_eq!(conflicts, 1);
    assert_eq!(after.taints, seen.taints);
    assert_eq!(
        after.annotations.get("theirs").map(String::as_str),
        Some("1")
    );
    Ok(())
}

async fn what_the_decision_read_must_still_hold(client: &Client, cluster: &Cluster) -> Result<()> {
    let annotate = |key: &str| json!({"metadata": {"annotations": {key: "theirs"}}});
    let cases = [
        ("cordoned", json!({"spec": {"unschedulable": true}})),
        ("quarantined", annotate(keys::QUARANTINE_HEALTH_EVENT)),
        ("marked", annotate(keys::QUARANTINE_CORDON_PRE_EXISTING)),
        (
            "labelled",
            json!({"metadata": {"labels": {keys::STATE_LABEL: "theirs"}}}),
        ),
        (
            "tainted",
            json!({"spec": {"taints": [{"key": "theirs", "effect": "NoSchedule"}]}}),
        ),
    ];
    for (what, patch) in cases {
        let name = unique(what);
        let seen = enter(client, node(&name).label("zone", "a")).await?;
        meddle(client, &name, patch).await?;
        let result = cluster.apply(&seen, &quarantine(&seen)).await;
        let Err(error) = result else {
            bail!("{what}: not a conflict")
        };
        ensure!(
            matches!(error, ApiError::Conflict { status: 422 }),
            "{what}: {error}"
        );
        let after = view(client, &name).await?;
        assert!(!after.has_taint(&ours()), "{what}");
        assert!(!after.annotations.contains_key(keys::SESSION), "{what}");
        assert_eq!(after.unschedulable, what == "cordoned", "{what}");
    }

    // A recreated node of the same name is another node.
    let name = unique("again");
    let seen = enter(client, node(&name).label("zone", "a")).await?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.delete(&name, &DeleteParams::default()).await?;
    let gone = cluster.apply(&seen, &quarantine(&seen)).await;
    assert!(matches!(gone, Err(ApiError::NotFound { .. })), "{gone:?}");
    node(&name).label("zone", "a").create(client).await?;
    let other = cluster.apply(&seen, &quarantine(&seen)).await;
    assert!(matches!(other, Err(ApiError::Conflict { .. })), "{other:?}");
    Ok(())
}

async fn refusals_are_told_apart(
    client: &Client,
    cluster: &Cluster,
    nobody: &Cluster,
) -> Result<()> {
    let name = unique("refused");
    let seen = enter(client, node(&name).taint("theirs", "1", "NoExecute")).await?;
    let adding = |taint: Taint| NodeChange {
        add_taints: vec![taint],
        ..NodeChange::default()
    };

    let doubled = adding(taint("theirs", "2", "NoExecute"));
    let error = refused(cluster, &seen, &doubled).await?;
    let ApiError::Invalid {
        status: 422,
        message,
    } = &error
    else {
        bail!("{error:?}")
    };
    assert!(message.contains("Duplicate value"), "{message}");
    assert!(!error.is_retryable());

    // Another client adds the same taint first: a conflict.
    let mut taints = raw_taints(&seen);
    taints.push(json!({"key": ours().key, "effect": ours().effect}));
    meddle(client, &name, json!({"spec": {"taints": taints}})).await?;
    let error = refused(cluster, &seen, &adding(ours())).await?;
    assert!(
        matches!(error, ApiError::Conflict { status: 422 }),
        "{error:?}"
    );

    let labels = entries([("zone", Some("not a label value!"))]);
    let change = NodeChange {
        labels,
        ..NodeChange::default()
    };
    let error = refused(cluster, &view(client, &name).await?, &change).await?;
    let ApiError::Invalid {
        status: 422,
        message,
    } = &error
    else {
        bail!("{error:?}")
    };
    assert!(message.contains("not a label value!"), "{message}");

    let error = refused(nobody, &seen, &adding(ours())).await?;
    let ApiError::Forbidden {
        status: 403,
        message,
    } = &error
    else {
        bail!("{error:?}")
    };
    assert!(message.contains("cannot patch resource"), "{message}");

    let nothing = cluster.apply(&seen, &NodeChange::default()).await?;
    assert_eq!(nothing, seen);
    Ok(())
}

/// Returns the next event of the watch that is not about another node.
async fn next(events: &mut mpsc::Receiver<NodeEvent>, name: &str) -> Result<NodeEvent> {
    loop {
        let event = tokio::time::timeout(SOON, events.recv()).await;
        let event = event
            .context("the watch says nothing")?
            .context("the watch has ended")?;
        match &event {
            NodeEvent::Applied(node) if node.name != name => {}
            NodeEvent::Deleted(other) if other != name => {}
            _ => return Ok(event),
        }
    }
}

/// Returns the next state of the node that satisfies `is`. Fails at any other event.
async fn until(
    events: &mut mpsc::Receiver<NodeEvent>,
    name: &str,
    is: impl Fn(&NodeView) -> bool,
) -> Result<()> {
    loop {
        match next(events, name).await? {
            NodeEvent::Applied(node) if is(&node) => return Ok(()),
            NodeEvent::Applied(_) => {}
            other => bail!("not expected: {other:?}"),
        }
    }
}

async fn the_watch_sees_changes(client: &Client, cluster: &Cluster) -> Result<()> {
    let name = unique("watched");
    node(&name).create(client).await?;

    let cancel = CancellationToken::new();
    let mut events = cluster.watch_nodes(cancel.clone());
    assert_eq!(next(&mut events, &name).await?, NodeEvent::Restarted);
    until(&mut events, &name, |node| !node.unschedulable).await?;
    assert_eq!(next(&mut events, &name).await?, NodeEvent::Listed);

    let seen = view(client, &name).await?;
    let (during, _) = settle(cluster, client, seen, quarantine).await?;
    until(&mut events, &name, |node| {
        node.has_taint(&ours()) && node.annotations == during.annotations && node.unschedulable
    })
    .await?;

    let nodes: Api<Node> = Api::all(client.clone());
    nodes.delete(&name, &DeleteParams::default()).await?;
    let deleted = loop {
        match next(&mut events, &name).await? {
            NodeEvent::Applied(_) => {}
            other => break other,
        }
    };
    assert_eq!(deleted, NodeEvent::Deleted(name));
    cancel.cancel();
    Ok(())
}

/// Forwards connections to `server`, and counts them.
async fn counting_proxy(server: &str) -> Result<(u16, Arc<AtomicUsize>)> {
    let server = server.trim_start_matches("https://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let (port, count) = (listener.local_addr()?.port(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            let server = server.clone();
            tokio::spawn(async move {
                let mut server = TcpStream::connect(server).await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    Ok((port, count))
}

/// The first patch after a quiet month uses the open connection of the watch.
async fn the_watch_and_a_burst_share_one_connection(
    plane: &ControlPlane,
    client: &Client,
) -> Result<()> {
    let (port, connections) = counting_proxy(plane.server()).await?;
    let mut kubeconfig = serde_json::to_value(Kubeconfig::read_from(plane.kubeconfig())?)?;
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(format!("https://127.0.0.1:{port}"));
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), kubeconfig.to_string())?;
    let cluster = connect(file.path()).await?;

    let mut events = cluster.watch_nodes(CancellationToken::new());
    while events.recv().await.context("the watch has ended")? != NodeEvent::Listed {}
    let seen = enter(client, node(unique("burst"))).await?;
    let change = NodeChange {
        labels: entries([("burst", Some("x"))]),
        ..NodeChange::default()
    };
    let calls = (0..64).map(|_| cluster.apply(&seen, &change));
    let results = futures::future::join_all(calls).await;
    let made = results.iter().filter(|result| result.is_ok()).count();
    ensure!(made == 1, "one of 64 equal changes is made: {results:?}");
    ensure!(cluster.requests().sent == 64, "{:?}", cluster.requests());
    let connections = connections.load(Ordering::Relaxed);
    ensure!(connections == 1, "{connections} connections");
    Ok(())
}

#[tokio::test]
async fn trouble_of_the_api_server_is_survived() -> Result<()> {
    let options = Options::default()
        .arg(Program::ApiServer, "--enable-priority-and-fairness=false")
        .arg(Program::ApiServer, "--max-mutating-requests-inflight=1");
    let Some(plane) = ControlPlane::private(Version::LATEST, options).await? else {
        return Ok(());
    };
    let (client, cluster) = (plane.client().await?, connect(plane.kubeconfig()).await?);
    node("n").label("zone", "a").create(&client).await?;
    let label = |value: &str| NodeChange {
        labels: entries([("zone", Some(value))]),
        ..NodeChange::default()
    };

    // One request at a time is served; the others are asked to retry later.
    let limited = connect_as(&plane, Some("cluster-admin")).await?;
    let seen = view(&client, "n").await?;
    let throttled = wait_for("an answer 429", SOON, || async {
        let change = label("a");
        let calls = (0..64).map(|_| limited.apply(&seen, &change));
        let results = futures::future::join_all(calls).await;
        let error = results.into_iter().find_map(|result| match result {
            Err(ApiError::Throttled { retry_after }) => Some(retry_after),
            _ => None,
        });
        error.ok_or("64 calls at once, and none is throttled")
    })
    .await?;
    assert_eq!(throttled, Some(Duration::from_secs(1)));
    assert!(
        limited.requests().limit < 32,
        "fewer are tried at once after that: {:?}",
        limited.requests()
    );

    let mut events = cluster.watch_nodes(CancellationToken::new());
    assert_eq!(next(&mut events, "n").await?, NodeEvent::Restarted);
    until(&mut events, "n", |_| true).await?;
    assert_eq!(next(&mut events, "n").await?, NodeEvent::Listed);

    plane.kill(Program::ApiServer)?;
    let failing = loop {
        match next(&mut events, "n").await? {
            NodeEvent::Applied(_) => {}
            other => break other,
        }
    };
    assert!(matches!(failing, NodeEvent::Failing { .. }), "{failing:?}");
    let error = refused(&cluster, &seen, &label("b")).await?;
    assert!(
        matches!(error, ApiError::Unavailable { status: None, .. }),
        "{error:?}"
    );
    assert!(error.is_retryable());

    plane.restart(Program::ApiServer)?;
    loop {
        match next(&mut events, "n").await? {
            NodeEvent::Failing { .. } => {}
            NodeEvent::Recovered => break,
            other => bail!("not expected: {other:?}"),
        }
    }
    let seen = view(&client, "n").await?;
    settle(&cluster, &client, seen, |_| label("b")).await?;
    // With or without another list.
    let mut last = None;
    while last.as_deref() != Some("b") {
        match next(&mut events, "n").await? {
            NodeEvent::Applied(node) => last = node.labels.get("zone").cloned(),
            NodeEvent::Deleted(_) => bail!("the node is not gone"),
            _ => {}
        }
    }
    Ok(())
}
