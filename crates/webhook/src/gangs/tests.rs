use connector::{AcceptNodes, Direct, token_header};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::tcp_grpc;
use serde_json::json;

use super::*;
use crate::admission::Admission;
use crate::fake::FakeApi;

const MAP: &str = "preflight-kubernetes-training-g";

/// Returns a pod of the gang `g`, whose size is specified by an object.
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

/// Returns a pod of the gang `gang`, whose pods carry its size.
fn labelled(namespace: &str, name: &str, gang: &str, size: &str) -> Value {
    let mut pod = pod(name);
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["labels"] = json!({"gang": gang, "size": size});
    pod
}

async fn keeper() -> (FakeApi, GangKeeper) {
    keeper_by("").await
}

/// Returns a keeper of gangs that are found by labels.
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
    apply(keeper, &mut board, pod("a"));
    let key = board.next().expect("a gang");
    (board, key)
}

fn apply(keeper: &GangKeeper, board: &mut Board, pod: Value) {
    let news = Arc::new(WatchedPod(pod));
    board.pod(Signal::Applied(news), &keeper.config, &keeper.discoveries);
}

async fn reconcile(keeper: &GangKeeper, board: &mut Board, key: &GangKey, counted: &mut Counted) {
    let looked = keeper.reconcile(&keeper.cluster, board, key, counted).await;
    looked.expect("an answer");
}

/// The gang's object owns the `ConfigMap`, so both are deleted together, and pods may exist for
/// a while longer.
#[tokio::test]
async fn no_map_is_made_for_a_gang_whose_object_is_not_there() {
    let (api, keeper) = keeper().await;
    let (mut board, key) = with_pod(&keeper);
    for _ in 0..2 {
        reconcile(&keeper, &mut board, &key, &mut Counted::new()).await;
    }
    assert_eq!(api.objects().created, 0);
    // An existing `ConfigMap` is still updated: no members are expected.
    let map = api.put_map("training", MAP, &json!({}));
    let seen = serde_json::from_value(map).expect("a ConfigMap");
    board.config_map(Signal::Applied(Arc::new(seen)));
    reconcile(&keeper, &mut board, &key, &mut Counted::new()).await;
    let objects = api.objects();
    assert_eq!((objects.created, objects.read, objects.replaced), (0, 1, 1));
    let written = &objects.maps[&("training".to_owned(), MAP.to_owned())];
    assert_eq!(written["data"]["expected_count"], "0");
}

/// A tenant with access to `ConfigMap`s or quotas can block writes to its namespace.
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
        // Once the quota has room, the other one is written, too.
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

/// A namespace may have thousands of pods, and many incomplete gangs.
#[tokio::test]
async fn the_pods_of_a_namespace_are_listed_once_for_all_gangs_that_are_short() {
    let (api, keeper) = keeper_by_labels().await;
    let mut board = Board::default();
    for gang in ["g", "h", "i"] {
        let pod = labelled("training", &format!("{gang}-0"), gang, "2");
        apply(&keeper, &mut board, pod);
    }
    let mut launcher = labelled("training", "launcher", "h", "2");
    launcher["spec"]["initContainers"] = json!([]);
    let key = ("training".to_owned(), "launcher".to_owned());
    api.objects().pods.insert(key, launcher);
    board.settle();
    let mut counted = Counted::new();
    while let Some(key) = board.next() {
        reconcile(&keeper, &mut board, &key, &mut counted).await;
    }
    let objects = api.objects();
    assert_eq!(objects.pod_lists, 1);
    for (gang, expected) in [("g", "2"), ("h", "1"), ("i", "2")] {
        let key = (
            "training".to_owned(),
            format!("preflight-labels-training-{gang}"),
        );
        assert_eq!(objects.maps[&key]["data"]["expected_count"], expected);
    }
}

/// Returns a pod whose check has ended without reaching the given pods.
fn ended(name: &str, not_reached: &[&str]) -> Value {
    let mut pod = labelled("training", name, "g", "3");
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
    pod["spec"]["nodeName"] = format!("node-of-{name}").into();
    if !not_reached.is_empty() {
        let message = preflight::rendezvous::not_reached(not_reached);
        let ended =
            json!({"exitCode": 1, "finishedAt": "2026-01-01T01:00:00Z", "message": message});
        let status = json!({"name": "preflight-nccl-allreduce", "state": {"terminated": ended}});
        pod["status"]["initContainerStatuses"] = json!([status]);
    }
    pod
}

/// Other gangs are reconciled while the controller is unreachable.
#[tokio::test]
async fn who_is_accused_is_reported_beside_the_looks_until_the_controller_has_it() {
    let (_api, keeper) = keeper_by_labels().await;
    let channel = tcp_grpc::channel("http://127.0.0.1:1", None).expect("an address");
    let direct = Direct::new(channel, token_header(None));
    let nodes = AcceptNodes::Own(String::new());
    let connector = Connector::new(direct, nodes, &Metrics::default(), Timestamp::now);
    let keeper = keeper.with_connector(Some(connector));
    let mut board = Board::default();
    for pod in [ended("a", &["c"]), ended("b", &["c"]), ended("c", &[])] {
        apply(&keeper, &mut board, pod);
    }
    let key = board.next().expect("the gang");
    let mut reports = Reports::new();
    keeper.report_unreached(&mut board, &key, &mut reports);
    assert!(reports.is_empty(), "its own word may be on its way");
    board.settle();
    for _ in 0..3 {
        keeper.report_unreached(&mut board, &key, &mut reports);
        assert_eq!(reports.len(), 1, "it is on its way");
    }
    let ended = reports.join_next().await.expect("a report");
    let (report, sent) = ended.expect("no panic");
    assert_eq!((&*report.pod, &*report.node), ("c", "node-of-c"));
    assert!(sent.is_err(), "nobody is there");
    keeper.reported(&mut board, report, sent);
    keeper.report_unreached(&mut board, &key, &mut reports);
    assert_eq!(reports.len(), 1, "it is reported once more");
    let ended = reports.join_next().await.expect("a report");
    let (report, _) = ended.expect("no panic");
    keeper.reported(&mut board, report, Ok(()));
    keeper.report_unreached(&mut board, &key, &mut reports);
    assert!(reports.is_empty(), "it is told once");
}

#[test]
fn of_many_names_a_line_has_the_first() {
    let names: Vec<String> = (0..12).map(|at| format!("p{at}")).collect();
    assert_eq!(few(&names[..2]), "p0, p1");
    assert_eq!(few(&names[..10]), "p0, p1, p2, p3, p4, p5, p6, p7, p8, p9");
    assert_eq!(
        few(&names),
        "p0, p1, p2, p3, p4, p5, p6, p7, p8, p9 and 2 more"
    );
}
