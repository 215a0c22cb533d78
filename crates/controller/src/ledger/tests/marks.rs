//! Marks in the `ConfigMap` of a real API server.

use cluster::ConnectOptions;
use testkit::{ControlPlane, Version, unique};

use super::*;

fn has_mark(ledger: &Ledger, kind: &str) -> bool {
    let mark = ledger.gpu("17").and_then(|(_, row)| row.mark.as_ref());
    mark.is_some_and(|mark| mark.kind.name() == kind)
}

/// Starts the ledger of a controller with this store.
fn start(bench: &Bench, cluster: &Arc<Cluster>, namespace: &str) -> Running {
    let (mut keeper, cancel) = (bench.keeper(), CancellationToken::new());
    let marks = keeper.keep_marks(Arc::clone(cluster), namespace.to_owned(), true);
    tokio::spawn(marks.run(cancel.clone()));
    Running::of(keeper, cancel)
}

/// Waits until the cluster has a mark of this kind.
async fn kept(cluster: &Cluster, namespace: &str, kind: &str) {
    let is_kept = async {
        loop {
            let map = cluster
                .config_map(namespace, keys::CONFIG_MAP)
                .await
                .unwrap();
            let text = map.and_then(|map| map.data.get(keys::GPU_MARKS).cloned());
            if text.is_some_and(|text| text.contains(&format!("\"kind\":\"{kind}\""))) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), is_kept).await;
    waited.unwrap();
}

#[tokio::test]
async fn a_controller_with_another_store_takes_the_marks_over() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let namespace = unique("marks");
    plane.namespace(&namespace).await?;
    let options = ConnectOptions {
        kubeconfig: Some(plane.kubeconfig().to_owned()),
        ..ConnectOptions::default()
    };
    let cluster = Arc::new(Cluster::connect(options).await?);

    let (first, second) = (Bench::new(), Bench::new());
    let running = start(&first, &cluster, &namespace);
    first.report(mark("bad")).await;
    kept(&cluster, &namespace, "bad").await;
    running.end().await;

    let mut running = start(&second, &cluster, &namespace);
    running.until(|ledger| has_mark(ledger, "bad")).await;
    second.report(inventory("b")).await;
    running.until(|ledger| is_reported(ledger, "b")).await;
    second.report(mark("good")).await;
    kept(&cluster, &namespace, "good").await;
    running.until(|ledger| !is_reported(ledger, "b")).await;
    running.end().await;

    // The later mark counts, though the first store has the earlier one.
    let mut running = start(&first, &cluster, &namespace);
    running.until(|ledger| has_mark(ledger, "good")).await;
    running.end().await;

    // What cannot be read, such as a later version's, is left alone, and taken over once it can be.
    let map = async || {
        let map = cluster.config_map(&namespace, keys::CONFIG_MAP).await;
        map.unwrap().unwrap()
    };
    let set = async |text: &str| {
        let data = [(keys::GPU_MARKS.to_owned(), Some(text.to_owned()))].into();
        let change = cluster::ConfigMapChange {
            data,
            ..Default::default()
        };
        let seen = map().await;
        let name = keys::CONFIG_MAP;
        let set = cluster.change_config_map(&namespace, name, Some(&seen), &change);
        set.await.unwrap();
    };
    let readable = map().await.data[keys::GPU_MARKS].clone();
    set("[{}]").await;
    let mut running = start(&first, &cluster, &namespace);
    first.report(mark("rma")).await;
    running.until(|ledger| has_mark(ledger, "rma")).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(map().await.data[keys::GPU_MARKS], "[{}]");
    set(&readable).await;
    kept(&cluster, &namespace, "rma").await;
    running.end().await;
    Ok(())
}
