use runtime::metrics::Metrics;
use serde_json::json;

use super::*;
use crate::admission::Admission;
use crate::fake::FakeApi;

const MAP: &str = "preflight-kubernetes-training-g";

/// A pod of the gang `g`, whose size an object says.
fn pod(name: &str) -> Value {
    json!({
        "metadata": {"namespace": "training", "name": name},
        "spec": {
            "schedulingGroup": {"podGroupName": "g"},
            "initContainers": [{"name": "preflight-nccl-allreduce"}],
        },
        "status": {"phase": "Pending", "podIP": "10.0.0.1"},
    })
}

const ENOUGH: Duration = Duration::from_secs(60);

/// A pod of the gang `gang`, whose size the pods say.
fn labelled(namespace: &str, name: &str, gang: &str, size: &str) -> Value {
    let mut pod = pod(name);
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["labels"] = json!({"gang": gang, "size": size});
    pod
}

async fn keeper() -> (FakeApi, GangKeeper) {
    keeper_by("").await
}

/// A keeper of gangs that labels name.
async fn keeper_by_labels() -> (FakeApi, GangKeeper) {
    let labels = "{method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}";
    keeper_by(&format!("\ngangDiscovery: {labels}\n")).await
}

async fn keeper_by(discovery: &str) -> (FakeApi, GangKeeper) {
    let (api, cluster) = FakeApi::start().await;
    let config = format!("image: i{discovery}");
    let config = Config::parse(&config, "test").expect("a configuration");
    let (facts, _following) = Facts::new(Arc::clone(&cluster), CancellationToken::new());
    let by = Discoveries::new(config.discovery.clone());
    let metrics = Metrics::default();
    let admission = Admission::new(Arc::new(config), by, facts.clone(), &metrics);
    let keeper = GangKeeper::new(cluster, facts, &admission, "own", "me".to_owned());
    (api, keeper)
}

fn with_pod(keeper: &GangKeeper) -> (Board, GangKey) {
    let mut board = Board::default();
    let news = Arc::new(SeenPod(pod("a")));
    board.pod(Signal::Applied(news), &keeper.config, &keeper.discoveries);
    let key = board.next().expect("a gang");
    (board, key)
}

/// The object of a gang takes the `ConfigMap` along when it goes, and pods may be there for a while after that.
#[tokio::test]
async fn no_map_is_made_for_a_gang_whose_object_is_not_there() {
    let (api, keeper) = keeper().await;
    let (mut board, key) = with_pod(&keeper);
    for _ in 0..2 {
        let looked = keeper.look_at(&keeper.cluster, &mut board, &key).await;
        looked.expect("an answer");
    }
    assert_eq!(api.objects().created, 0);
    // One that is there says how many are known, which is none.
    let map = api.put_map("training", MAP, &json!({}));
    let seen = serde_json::from_value(map).expect("a ConfigMap");
    board.map(Signal::Applied(Arc::new(seen)));
    let looked = keeper.look_at(&keeper.cluster, &mut board, &key).await;
    looked.expect("an answer");
    let objects = api.objects();
    assert_eq!((objects.created, objects.read, objects.replaced), (0, 1, 1));
    let written = &objects.maps[&("training".to_owned(), MAP.to_owned())];
    assert_eq!(written["data"]["expected_count"], "0");
}

/// Tenants who may write `ConfigMap`s, or quotas, can keep us from writing in their namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_that_cannot_be_written_holds_up_no_other() {
    let (api, keeper) = keeper_by_labels().await;
    for namespace in ["a-tenant", "training"] {
        let key = (namespace.to_owned(), "a".to_owned());
        let pod = labelled(namespace, "a", "g", "1");
        api.objects().pods.insert(key, pod);
    }
    api.objects().full.insert("a-tenant".to_owned());
    let cancel = CancellationToken::new();
    let written = async {
        let key = (
            "training".to_owned(),
            "preflight-labels-training-g".to_owned(),
        );
        while !api.objects().maps.contains_key(&key) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // Once there is room, the other one is written, too.
        api.objects().full.clear();
        while api.objects().maps.len() < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = keeper.keep(&keeper.cluster, &cancel) => panic!("it ends only when it is told to"),
        written = tokio::time::timeout(ENOUGH, written) => written.expect("both are written"),
    }
}
