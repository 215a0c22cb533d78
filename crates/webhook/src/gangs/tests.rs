use preflight::config::Discovery;
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

async fn keeper() -> (FakeApi, GangKeeper) {
    let (api, cluster) = FakeApi::start().await;
    let config = Config::parse("image: i", "test").expect("a configuration");
    let (facts, _following) = Facts::new(Arc::clone(&cluster), CancellationToken::new());
    let by = Discoveries::new(Discovery::Native);
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
