//! Tests of the conditions of GPUs that faults make false.

use std::collections::BTreeSet;

use contract::device::{Condition, ConditionStatus, GpuSpec};
use contract::node::FaultEntity;
use diagnosis::gpu::{Gpu as Found, Inventory};
use fleet::view::FaultView;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use serde_json::json;

use super::*;
use crate::board::Provider;
use crate::gate::Fitness;

fn api() -> DeviceApi {
    let api = DeviceApi::new(&Metrics::default(), Timestamp::now);
    let found = |index: u32| Found {
        index,
        uuid: format!("GPU-{index}"),
        pci: format!("0000:b{index}:00.0"),
        ..Found::default()
    };
    api.set_inventory(&Inventory {
        gpus: vec![found(0), found(1)],
        ..Inventory::default()
    });
    api
}

fn fault(class: &str, entity: (&str, &str), edit: impl FnOnce(&mut FaultView)) -> FaultView {
    let now = Timestamp::UNIX_EPOCH;
    let mut fault = serde_json::from_value(json!({
        "agent": "syslog-health-monitor", "componentClass": class, "check": "SysLogsXIDError",
        "code": "79", "subject": "", "fatal": true, "recommendedAction": "RESTART_BM",
        "entities": [{"entityType": entity.0, "entityValue": entity.1}],
        "message": "", "firstSeen": now, "lastSeen": now, "count": 1, "eventId": "1",
    }))
    .unwrap();
    edit(&mut fault);
    fault
}

/// Returns the GPUs whose condition is false, and checks that it is true for all others.
fn bad(api: &DeviceApi) -> BTreeSet<String> {
    let mut bad = BTreeSet::new();
    for gpu in api.gpus() {
        let status = gpu.status.as_ref().unwrap();
        let health = status
            .conditions
            .iter()
            .find(|one| one.r#type == Own::Health.kind());
        assert_eq!(health.unwrap().source, "nvsentinel");
        match health.unwrap().status() {
            ConditionStatus::False => assert!(bad.insert(gpu.name.clone())),
            status => assert_eq!(status, ConditionStatus::True),
        }
    }
    bad
}

#[test]
fn a_fatal_fault_is_a_condition_of_the_gpus_that_it_concerns() {
    let nothing = |_: &mut FaultView| {};
    let table: [(FaultView, &[&str]); 10] = [
        (fault("GPU", ("GPU_UUID", "gpu-1"), nothing), &["GPU-1"]),
        (fault("GPU", ("PCI", "00000000:B1:00"), nothing), &["GPU-1"]),
        (fault("GPU", ("GPU", "0"), nothing), &["GPU-0"]),
        (fault("GPU", ("GPU", "GPU-1"), nothing), &["GPU-1"]),
        (fault("GPU", ("GPU_UUID", "GPU-7"), nothing), &[]),
        (
            fault("GPU", ("NVSWITCH", "0"), nothing),
            &["GPU-0", "GPU-1"],
        ),
        (fault("NIC", ("NIC", "mlx5_0"), nothing), &[]),
        (fault("GPU", ("GPU", "1"), |fault| fault.fatal = false), &[]),
        (
            fault("GPU", ("GPU", "1"), |fault| fault.dismissed = true),
            &[],
        ),
        (
            fault("GPU", ("GPU", "1"), |fault| {
                fault.agent = PROVIDERS_AGENT.to_owned();
            }),
            &[],
        ),
    ];
    for (fault, expected) in table {
        let api = api();
        let view = fleet(vec![node(std::slice::from_ref(&fault))]);
        show(&api, &known_faults(&view, "n1"));
        let expected = expected.iter().map(ToString::to_string).collect();
        assert_eq!(bad(&api), expected, "{fault:?}");
        show(&api, &known_faults(&fleet(Vec::new()), "n1"));
        assert_eq!(bad(&api), BTreeSet::new());
        show(&api, &known_faults(&view, "another"));
        assert_eq!(bad(&api), BTreeSet::new());
    }
}

#[test]
fn a_gpu_that_the_driver_has_not_named_has_no_number() {
    let gpu = Gpu {
        name: "GPU-x".to_owned(),
        spec: Some(GpuSpec::default()),
        ..Gpu::default()
    };
    let of_number = fault("GPU", ("GPU", "0"), |_| {});
    let of_number = OpenFault::from(&of_number);
    assert_eq!(health_of(&gpu, &[of_number]).status, ConditionStatus::True);
}

#[tokio::test]
async fn it_waits_until_the_faults_are_known_and_then_follows_them_and_the_gpus() {
    let api = api();
    let (view, seen) = tokio::sync::watch::channel(Arc::default());
    let cancel = CancellationToken::new();
    let (node_name, store_id) = ("n1".to_owned(), "s".to_owned());
    let telling = tell(api.clone(), node_name, store_id, seen, cancel.clone());
    let telling = tokio::spawn(telling);
    let following = tokio::spawn(follow(api.clone(), cancel.clone()));
    tokio::task::yield_now().await;
    assert!(
        api.gpus()
            .iter()
            .all(|gpu| gpu.status.as_ref().unwrap().conditions.len() == 2)
    );
    let fault = fault("GPU", ("GPU_UUID", "GPU-2"), |_| {});
    view.send_replace(Arc::new(fleet(vec![node(&[fault])])));
    let mut versions = api.versions();
    let has_three = || {
        api.gpus()
            .iter()
            .all(|gpu| gpu.status.as_ref().unwrap().conditions.len() == 3)
    };
    while !has_three() {
        versions.changed().await.unwrap();
    }
    assert_eq!(bad(&api), BTreeSet::new());
    // A GPU that appears after its fault.
    api.set_inventory(&Inventory {
        gpus: vec![Found {
            index: 2,
            uuid: "GPU-2".to_owned(),
            ..Found::default()
        }],
        ..Inventory::default()
    });
    while !has_three() {
        versions.changed().await.unwrap();
    }
    assert_eq!(bad(&api), BTreeSet::from(["GPU-2".to_owned()]));
    cancel.cancel();
    telling.await.unwrap();
    following.await.unwrap();
}

/// A condition must not assert something that is not known now.
#[test]
fn faults_that_are_not_told_any_more_make_the_condition_unknown() {
    let api = api();
    show(&api, &NodeFaults::Untold);
    let health = |gpu: &Gpu| {
        let status = gpu.status.clone().unwrap();
        let mut conditions = status.conditions.into_iter();
        conditions.find(|one| one.r#type == Own::Health.kind())
    };
    assert!(api.gpus().iter().all(|gpu| health(gpu).is_none()));
    let bad = fault("GPU", ("GPU", "1"), |_| {});
    let told = known_faults(&fleet(vec![node(&[bad])]), "n1");
    for before in [None, Some(told)] {
        if let Some(told) = &before {
            show(&api, told);
        }
        let why = "The controller has not answered".to_owned();
        show(&api, &NodeFaults::Unseen { why });
        for gpu in api.gpus() {
            let health = health(&gpu).unwrap();
            assert_eq!(health.status(), ConditionStatus::Unknown, "{before:?}");
            assert_eq!(health.reason, "FaultsNotSeen");
        }
    }
}

fn fleet(nodes: Vec<fleet::view::NodeStatus>) -> FleetView {
    FleetView {
        ready: true,
        nodes,
        ..FleetView::default()
    }
}

fn known_faults(view: &FleetView, node: &str) -> NodeFaults {
    NodeFaults::Told(view.faults_of(node, "s").unwrap())
}

fn node(faults: &[FaultView]) -> fleet::view::NodeStatus {
    serde_json::from_value(json!({
        "name": "n1", "state": "unhealthy", "faults": faults, "notes": [],
    }))
    .unwrap()
}

/// A GPU beyond the limit, or one that is gone, has no condition, but its fault still counts.
#[test]
fn a_fault_of_a_gpu_that_is_not_listed_makes_the_node_unfit() {
    let api = api();
    let open = |class: &str, agent: &str, fatal, entities: &[(&str, &str)]| OpenFault {
        agent: agent.to_owned(),
        component_class: class.to_owned(),
        check: "GpuMemWatch".to_owned(),
        code: "DCGM_FR_ROW_REMAP_FAILURE".to_owned(),
        fatal,
        entities: entities
            .iter()
            .map(|(kind, value)| FaultEntity {
                r#type: (*kind).to_owned(),
                value: (*value).to_owned(),
            })
            .collect(),
    };
    let tell = |faults: Vec<OpenFault>| {
        api.take_faults(NodeFaults::Told(ListFaultsResponse {
            store_id: "s".to_owned(),
            faults,
        }));
        Fitness::of(&api.list())
    };
    let lost = [("GPU_UUID", "GPU-9"), ("PCI", "0000:b9:00.0")];
    let fit = tell(vec![
        open("GPU", "gpu-health-monitor", false, &lost),
        open("NIC", "gpu-health-monitor", true, &lost),
        // Already a condition of a provider.
        open("GPU", PROVIDERS_AGENT, true, &lost),
        open("GPU", "gpu-health-monitor", true, &[("GPU_UUID", "gpu-1")]),
    ]);
    assert_eq!(fit.bad, [""; 0]);
    let unfit = tell(vec![open("GPU", "gpu-health-monitor", true, &lost)]);
    assert_eq!(
        unfit.bad,
        [
            "GpuMemWatch DCGM_FR_ROW_REMAP_FAILURE of GPU_UUID GPU-9, PCI 0000:b9:00.0, which is not \
          listed"
        ]
    );
    assert_eq!((unfit.gpus, unfit.unknown.len()), (2, 0));
}

#[test]
fn gpus_for_which_there_is_no_room_are_not_known_to_be_well() {
    let api = DeviceApi::new(&Metrics::default(), Timestamp::now);
    let found = |index| Found {
        index,
        uuid: format!("GPU-{index}"),
        ..Found::default()
    };
    let gpus = (0..257).map(found).collect();
    api.set_inventory(&Inventory {
        gpus,
        ..Inventory::default()
    });
    let fitness = Fitness::of(&api.list());
    assert_eq!(fitness.gpus, 256);
    assert_eq!(
        fitness.unknown,
        ["1 GPUs beyond the limit of the Device API"]
    );
}

/// NVML, providers and the fault book write from separate tasks.
#[test]
fn sources_that_write_at_the_same_time_lose_nothing_of_each_other() {
    const TIMES: u32 = 200;
    let api = api();
    let by = Provider {
        id: "site".to_owned(),
        uid: 0,
        is_operator: true,
    };
    api.change(|board, now| board.register(&by, "GPU-0", GpuSpec::default(), None, now))
        .unwrap();
    std::thread::scope(|scope| {
        for own in [Own::Nvml, Own::Dcgm, Own::Health] {
            let api = &api;
            scope.spawn(move || {
                for time in 0..=TIMES {
                    let said = Said::bad(&format!("R{time}"), "");
                    api.set_condition(own, "GPU-0", said).unwrap();
                }
            });
        }
        scope.spawn(|| {
            for time in 0..=TIMES {
                let condition = Condition {
                    r#type: "Site".to_owned(),
                    status: ConditionStatus::False.into(),
                    reason: format!("R{time}"),
                    ..Condition::default()
                };
                api.change(|board, now| board.update_condition(&by, "GPU-0", condition, now))
                    .unwrap();
            }
        });
    });
    let gpus = api.gpus();
    let status = gpus[0].status.as_ref().unwrap();
    let last = format!("R{TIMES}");
    let kinds = status.conditions.iter().filter(|one| one.reason == last);
    let kinds: BTreeSet<&str> = kinds.map(|one| one.r#type.as_str()).collect();
    let expected = [
        "DCGMHealth",
        "NVMLReady",
        "NVSentinelHealth",
        "Ready",
        "Site",
    ];
    assert_eq!(kinds, expected.into());
}
