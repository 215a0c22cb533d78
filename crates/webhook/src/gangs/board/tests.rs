use std::sync::Arc;

use preflight::roster::Roster;
use serde_json::json;

use super::*;

const MAP: &str = "preflight-labels-training-g";

fn config() -> Config {
    let text = "image: i\ngangDiscovery: {method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}\n";
    Config::parse(text, "test").expect("a configuration")
}

fn by() -> Discoveries {
    Discoveries::new(config().discovery)
}

fn pod(name: &str, address: Option<&str>) -> Value {
    json!({
        "metadata": {"namespace": "training", "name": name, "labels": {"gang": "g", "size": "2"}},
        "spec": {"initContainers": [{"name": "preflight-dcgm-diag"}, {"name": "preflight-nccl-allreduce"}]},
        "status": {"phase": "Pending", "podIP": address},
    })
}

fn key() -> GangKey {
    GangKey {
        namespace: "training".into(),
        name: MAP.into(),
    }
}

/// Returns a board that has listed these pods and no `ConfigMap`s.
fn board(pods: &[Value]) -> Board {
    let mut board = Board::default();
    relist(&mut board, pods);
    assert!(!board.is_listed());
    board.config_map(Signal::Restarted);
    board.config_map(Signal::Listed);
    assert!(board.is_listed());
    board
}

fn watched(pod: Value) -> Arc<WatchedPod> {
    Arc::new(WatchedPod(pod))
}

fn relist(board: &mut Board, pods: &[Value]) {
    board.pod(Signal::Restarted, &config(), &by());
    for pod in pods {
        board.pod(Signal::Applied(watched(pod.clone())), &config(), &by());
    }
    board.pod(Signal::Listed, &config(), &by());
}

/// Reconciles the gang, and stores the update as if it were written. Returns the peers.
fn write(board: &mut Board) -> Option<String> {
    while board.next().is_some() {}
    let gang = board.gang(&key())?;
    let update = board.update_for(&key(), &gang, Ok(2), None, &config());
    let map = update.map?;
    let peers = map["data"]["peers"].as_str().map(str::to_owned);
    board.wrote(&key(), map);
    peers
}

#[test]
fn a_gang_is_written_when_it_changes_and_not_again() {
    let mut board = board(&[pod("b", Some("10.0.0.2")), pod("a", None)]);
    assert_eq!(board.next(), Some(key()));
    // The other checks run per pod, without the gang.
    let checks = "preflight-nccl-allreduce";
    assert_eq!(write(&mut board), Some(format!("b;10.0.0.2;0;{checks}")));
    assert_eq!(write(&mut board), None);
    board.pod(
        Signal::Applied(watched(pod("a", Some("10.0.0.1")))),
        &config(),
        &by(),
    );
    let both = format!("a;10.0.0.1;0;{checks}\nb;10.0.0.2;1;{checks}");
    assert_eq!(write(&mut board), Some(both));
    assert_eq!((board.gangs(), board.surplus()), (1, 0));
    board.pod(
        Signal::Applied(watched(pod("0", Some("10.0.0.9")))),
        &config(),
        &by(),
    );
    assert_eq!(write(&mut board), None, "a surplus pod changes nothing");
    assert_eq!(board.surplus(), 1);
}

/// Returns a pod whose gang check has ended with an exit code.
fn ended(name: &str, address: &str, code: i32) -> Value {
    let mut pod = pod(name, Some(address));
    let state = json!({"terminated": {"exitCode": code}});
    let status = json!({"name": "preflight-nccl-allreduce", "state": state});
    pod["status"]["initContainerStatuses"] = json!([status]);
    pod
}

/// Returns the member that the `ConfigMap` names as started.
fn started(board: &mut Board) -> Option<String> {
    write(board);
    let known = board.gangs.get(&key())?;
    let named = known.map.as_ref()?.read.as_ref()?;
    let named = named.pointer("/data/started")?;
    named.as_str().map(str::to_owned)
}

/// Delivers a `ConfigMap` to the board, as a watch event.
fn see(board: &mut Board, map: &Value) {
    let seen = serde_json::from_value(json!({"metadata": map["metadata"]}));
    board.config_map(Signal::Applied(Arc::new(seen.expect("a ConfigMap"))));
}

fn apply(board: &mut Board, pod: Value) {
    board.pod(Signal::Applied(watched(pod)), &config(), &by());
}

#[test]
fn who_replaces_a_member_of_a_gang_that_has_passed_is_told_so() {
    let mut board = board(&[pod("a", Some("10.0.0.1")), pod("b", Some("10.0.0.2"))]);
    apply(&mut board, ended("a", "10.0.0.1", 1));
    assert_eq!(started(&mut board), None, "who fails comes again");
    apply(&mut board, ended("b", "10.0.0.2", 0));
    apply(&mut board, ended("a", "10.0.0.1", 0));
    assert_eq!(started(&mut board).as_deref(), Some("a"));
    board.pod(Signal::Deleted("training/a".into()), &config(), &by());
    apply(&mut board, pod("c", Some("10.0.0.3")));
    assert_eq!(started(&mut board).as_deref(), Some("b"));
    // All members are recreated, and test again.
    board.pod(Signal::Deleted("training/b".into()), &config(), &by());
    apply(&mut board, pod("d", Some("10.0.0.4")));
    assert_eq!(started(&mut board), None);
    // Containers that restart in place test again, too.
    apply(&mut board, ended("c", "10.0.0.3", 0));
    assert_eq!(started(&mut board).as_deref(), Some("c"));
    let mut again = ended("c", "10.0.0.3", 0);
    again["status"]["initContainerStatuses"][0]["state"] = json!({"running": {}});
    apply(&mut board, again);
    assert_eq!(started(&mut board), None);
}

#[test]
fn members_without_checks_are_counted_out_of_a_gang_that_is_short_of_others() {
    let mut board = board(&[pod("a", Some("10.0.0.1"))]);
    assert!(!board.is_short(&key(), 2), "others may be on their way");
    board.settle();
    assert!(board.is_short(&key(), 2));
    board.count_without_checks(&key(), 1);
    assert_eq!(board.with_checks(&key(), 2), 1);
    assert_eq!(board.with_checks(&key(), 1), 1, "one member has checks");
    board.settle();
    assert!(!board.is_short(&key(), 2), "it is whole");
    assert!(board.is_short(&key(), 3));
    board.count_without_checks(&key(), 1);
    assert!(!board.is_short(&key(), 3), "it is not asked all the time");
    // A pod that joins with checks completes the gang without another count.
    apply(&mut board, pod("b", Some("10.0.0.2")));
    board.settle();
    assert!(!board.is_short(&key(), 3));
}

#[test]
fn a_pod_without_a_check_of_the_gang_is_none_of_those_who_meet() {
    let mut without = pod("b", Some("10.0.0.2"));
    without["spec"]["initContainers"] = json!([{"name": "preflight-dcgm-diag"}]);
    let mut board = board(&[pod("a", Some("10.0.0.1")), without]);
    assert_eq!(board.pods(&key()), 1);
    let checks = "preflight-nccl-allreduce";
    assert_eq!(write(&mut board), Some(format!("a;10.0.0.1;0;{checks}")));
}

#[test]
fn why_a_gang_cannot_be_tested_is_said_until_it_can_be() {
    let mut board = board(&[pod("a", Some("10.0.0.1"))]);
    let gang = board.gang(&key()).expect("the gang");
    let mut told = |expected| {
        let update = board.update_for(&key(), &gang, expected, None, &config());
        let map = update.map.expect("something new");
        board.wrote(&key(), map.clone());
        map["data"].clone()
    };
    let data = told(Err("minMember is 0".to_owned()));
    assert_eq!(
        (&data["untestable"], &data["expected_count"]),
        (&json!("minMember is 0"), &json!("0"))
    );
    let data = told(Ok(2));
    assert_eq!(
        (data.get("untestable"), &data["expected_count"]),
        (None, &json!("2"))
    );
}

#[test]
fn of_two_gangs_that_are_written_alike_the_first_is_kept_apart() {
    let of = |name: &str, gang: &str, address: &str| {
        let mut pod = pod(name, Some(address));
        pod["metadata"]["labels"]["gang"] = gang.into();
        pod
    };
    let mut board = board(&[of("a", "g.1", "10.0.0.1"), of("b", "g-1", "10.0.0.2")]);
    let key = GangKey {
        name: "preflight-labels-training-g-1".into(),
        ..key()
    };
    assert_eq!(board.pods(&key), 1);
    assert_eq!(
        board.gang(&key).map(|gang| gang.name).as_deref(),
        Some("g.1")
    );
    apply(&mut board, of("c", "g.1", "10.0.0.3"));
    assert_eq!(board.pods(&key), 2);
    // The name is free again.
    for pod in ["training/a", "training/c"] {
        board.pod(Signal::Deleted(pod.into()), &config(), &by());
    }
    apply(&mut board, of("b", "g-1", "10.0.0.2"));
    assert_eq!(
        board.gang(&key).map(|gang| gang.name).as_deref(),
        Some("g-1")
    );
}

#[test]
fn pods_that_are_over_or_that_a_list_lacks_are_gone() {
    let both = [pod("a", Some("10.0.0.1")), pod("b", Some("10.0.0.2"))];
    let mut board = board(&both);
    write(&mut board);
    let mut failed = pod("b", Some("10.0.0.2"));
    failed["status"]["phase"] = "Failed".into();
    board.pod(Signal::Applied(watched(failed)), &config(), &by());
    assert_eq!(board.pods(&key()), 1);
    relist(&mut board, &both);
    assert_eq!(board.pods(&key()), 2);
    relist(&mut board, &both[..1]);
    assert_eq!(board.pods(&key()), 1);
    board.pod(Signal::Deleted("training/a".into()), &config(), &by());
    assert_eq!(board.pods(&key()), 0);
    assert!(board.gang(&key()).is_none());
}

#[test]
fn a_gang_that_fails_is_looked_at_ever_later_but_for_its_news() {
    let mut board = board(&[pod("a", None)]);
    assert_eq!(board.next(), Some(key()));
    for _ in 0..4 {
        board.failed(&key());
    }
    board.queue_all();
    board.queue_due();
    assert_eq!(board.next(), None, "it is not due");
    // The fourth pause is 8 s, half of it random.
    let later = Instant::now() + Duration::from_secs(3);
    assert!(board.next_due().is_some_and(|due| due > later));
    apply(&mut board, pod("a", Some("10.0.0.1")));
    assert_eq!(board.next(), Some(key()));
    assert_eq!(board.next_due(), None);
    board.succeeded(&key());
    board.failed(&key());
    let later = Instant::now() + RETRY;
    assert!(board.next_due().is_some_and(|due| due <= later));
    // A gang that no longer exists is not retried.
    let mut gone = key();
    gone.name.push('x');
    board.failed(&gone);
    assert_eq!(board.delayed.len(), 1);
}

#[test]
fn what_another_wrote_into_the_map_is_put_right_and_other_maps_are_left_alone() {
    let mut board = board(&[pod("a", Some("10.0.0.1")), pod("b", Some("10.0.0.2"))]);
    let right = write(&mut board).expect("the peers");
    let map = |name: &str, peers: &str| {
        let metadata =
            json!({"namespace": "training", "name": name, "uid": "u", "resourceVersion": "7"});
        json!({"metadata": metadata, "data": {"peers": peers}})
    };
    see(&mut board, &map(MAP, "nonsense"));
    assert!(board.is_unread(&key()));
    board.set_read(&key(), Some(map(MAP, "nonsense")));
    assert_eq!(write(&mut board).as_ref(), Some(&right));
    while board.next().is_some() {}
    see(&mut board, &map("somebody-elses", "nonsense"));
    assert_eq!(board.next(), None);
    board.config_map(Signal::Deleted(format!("training/{MAP}")));
    assert_eq!(
        write(&mut board),
        Some(right),
        "one that was deleted is made again"
    );
}

#[test]
fn the_map_of_a_gang_without_pods_is_kept_for_a_while() {
    let mut board = board(&[pod("a", Some("10.0.0.1"))]);
    write(&mut board);
    board.pod(Signal::Deleted("training/a".into()), &config(), &by());
    assert_eq!(board.left_over(&key()), None);
    let known = board.gangs.get_mut(&key()).expect("the gang");
    known.empty_since = Instant::now().checked_sub(KEPT);
    known.map = Some(Map::of(json!({"metadata": {"uid": "u"}})));
    assert_eq!(board.left_over(&key()).as_deref(), Some("u"));
    board.config_map(Signal::Deleted(format!("training/{MAP}")));
    assert_eq!(board.left_over(&key()), None);
    assert!(board.gangs.is_empty(), "it is forgotten");
}

#[test]
fn of_the_maps_of_gangs_without_pods_and_of_large_ones_little_is_kept() {
    let map = |name: &str, version: u32, bytes: usize| {
        let metadata = json!({
            "namespace": "training", "name": name, "uid": "u", "resourceVersion": version.to_string(),
            "managedFields": [{"manager": "x".repeat(1000)}],
        });
        json!({"metadata": metadata, "data": {"peers": "x".repeat(bytes)}})
    };
    let mut board = board(&[pod("a", Some("10.0.0.1"))]);
    for number in 0..1000 {
        see(
            &mut board,
            &map(&format!("preflight-{number}"), 1, 1_000_000),
        );
    }
    assert_eq!(board.memory.bytes(), 0);
    // The `ConfigMap` of a gang with pods is read when it is reconciled, and a watch event of
    // the same version is ignored.
    see(&mut board, &map(MAP, 3, 0));
    assert!(board.has_map(&key()) && board.is_unread(&key()));
    board.set_read(&key(), Some(map(MAP, 3, 1000)));
    while board.next().is_some() {}
    for version in [2, 3] {
        see(&mut board, &map(MAP, version, 0));
        assert!(!board.is_unread(&key()), "{version}");
    }
    assert_eq!(board.next(), None);
    let bytes = board.memory.bytes();
    assert!((1000..1500).contains(&bytes), "{bytes}");
    see(&mut board, &map(MAP, 4, 0));
    assert!(board.is_unread(&key()) && board.memory.bytes() == 0);
    // A `ConfigMap` above the limit is not cached, but read each time.
    board.set_read(&key(), Some(map(MAP, 4, 7 * 1024 * 1024)));
    assert!(board.is_unread(&key()) && board.memory.bytes() == 0);
    board.set_read(&key(), Some(map(MAP, 4, 1000)));
    board.pod(Signal::Deleted("training/a".into()), &config(), &by());
    assert_eq!(board.memory.bytes(), 0);
    board.set_read(&key(), None);
    assert!(!board.has_map(&key()));
}

/// Each change of a member matters, but each write reaches the kubelets of all members.
#[test]
fn a_large_gang_is_written_a_few_times_and_at_once_when_it_is_whole() {
    const MEMBERS: u32 = 300;
    let name = |at: u32| format!("member-{at:04}");
    let address = |at: u32| format!("10.0.{}.{}", at / 250, at % 250 + 1);
    let all: Vec<Value> = (0..MEMBERS).map(|at| pod(&name(at), None)).collect();
    let mut board = board(&all);
    let (mut writes, mut whole) = (0, false);
    let began = Instant::now();
    for at in 0..MEMBERS {
        apply(&mut board, pod(&name(at), Some(&address(at))));
        assert_eq!(board.next(), Some(key()));
        let gang = board.gang(&key()).expect("the gang");
        let update = board.update_for(&key(), &gang, Ok(MEMBERS), None, &config());
        let Some(map) = update.map else {
            assert!(board.next_due().is_some(), "it is looked at once more");
            continue;
        };
        writes += 1;
        let data = |key| map["data"][key].as_str().map(str::to_owned);
        whole = Roster::parse(data).expect("a roster").is_complete();
        board.wrote(&key(), map);
    }
    assert!(whole, "the last write waits for nothing");
    // Two at the beginning, one per second, and the last.
    let most = 4 + began.elapsed().as_secs();
    assert!(writes <= most, "{writes} of {most}");
}
