//! Tests of who may write what, of the resulting state, and of its versions.

use contract::device::{Condition, ConditionStatus, Gpu, GpuPhase, GpuSpec, GpuStatus};
use diagnosis::gpu::{Gpu as Found, Inventory, UnreadableGpu};
use jiff::{SignedDuration, Timestamp};

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second)
}

fn board(gpus: u32) -> Board {
    let mut board = Board::new("e".to_owned());
    assert_eq!(board.set_inventory(&inventory(0..gpus), at(0)), 0);
    board
}

fn inventory(gpus: impl IntoIterator<Item = u32>) -> Inventory {
    let found = |index: u32| Found {
        index,
        uuid: format!("GPU-{index}"),
        pci: format!("0000:0{index}:00.0"),
        ..Found::default()
    };
    Inventory {
        gpus: gpus.into_iter().map(found).collect(),
        ..Inventory::default()
    }
}

fn provider(id: &str) -> Provider {
    Provider {
        id: id.to_owned(),
        uid: 0,
        is_operator: true,
    }
}

/// Returns a provider of a user who does not administer the machine.
fn other(id: &str, uid: u32) -> Provider {
    Provider {
        id: id.to_owned(),
        uid,
        is_operator: false,
    }
}

fn condition(kind: &str, status: ConditionStatus, reason: &str) -> Condition {
    Condition {
        r#type: kind.to_owned(),
        status: status.into(),
        reason: reason.to_owned(),
        ..Condition::default()
    }
}

fn status_of(conditions: impl IntoIterator<Item = Condition>) -> GpuStatus {
    GpuStatus {
        conditions: conditions.into_iter().collect(),
        ..GpuStatus::default()
    }
}

/// Returns each condition of a GPU as `type=Status/Reason@second`.
fn seen(board: &Board, name: &str) -> Vec<String> {
    let gpu: &Gpu = board.gpu(name).unwrap();
    let status = gpu.status.as_ref().unwrap();
    let seen = status.conditions.iter().map(|one| {
        let since = one.last_transition_time.unwrap().seconds;
        format!("{}={:?}/{}@{since}", one.r#type, one.status(), one.reason)
    });
    seen.collect()
}

fn phase(board: &Board, name: &str) -> GpuPhase {
    board.gpu(name).unwrap().status.as_ref().unwrap().phase()
}

#[test]
fn another_reason_for_the_same_status_does_not_begin_it_anew() {
    let mut board = board(1);
    for (second, status, reason, expected) in [
        (10, ConditionStatus::False, "A", "Hot=False/A@10"),
        (20, ConditionStatus::False, "B", "Hot=False/B@10"),
        (30, ConditionStatus::False, "A", "Hot=False/A@10"),
        (40, ConditionStatus::True, "A", "Hot=True/A@40"),
    ] {
        let status = status_of([condition("Hot", status, reason)]);
        let by = provider("a");
        let spec = GpuSpec::default();
        board
            .register(&by, "GPU-0", spec, Some(status), at(second))
            .unwrap();
        assert!(
            seen(&board, "gpu-0").contains(&expected.to_owned()),
            "{:?}",
            seen(&board, "gpu-0")
        );
    }
    // A provider's time counts, unless it is in the future.
    for (told, expected) in [(41, "Hot=False/A@41"), (99, "Hot=True/A@60")] {
        let mut one = condition("Hot", ConditionStatus::False, "A");
        if told == 99 {
            one.status = ConditionStatus::True.into();
        }
        one.last_transition_time = Some(contract::json::proto_timestamp(at(told)));
        board
            .update_condition(&provider("a"), "GPU-0", one, at(60))
            .unwrap();
        assert!(
            seen(&board, "gpu-0").contains(&expected.to_owned()),
            "{:?}",
            seen(&board, "gpu-0")
        );
    }
}

#[test]
fn ready_is_false_if_one_is_else_unknown_if_one_is_else_true() {
    use ConditionStatus::{False, True, Unknown};
    let table = [
        (vec![], ConditionStatus::True, GpuPhase::Ready),
        (vec![True], True, GpuPhase::Ready),
        (vec![True, Unknown], Unknown, GpuPhase::Unknown),
        (vec![Unknown, False], False, GpuPhase::NotReady),
        (vec![False, True], False, GpuPhase::NotReady),
    ];
    for (said, expected, in_phase) in table {
        let mut board = board(1);
        let said = said.iter().enumerate();
        let conditions = said.map(|(index, status)| condition(&index.to_string(), *status, "R"));
        let status = status_of(conditions);
        let by = provider("a");
        board
            .register(&by, "GPU-0", GpuSpec::default(), Some(status), at(1))
            .unwrap();
        assert_eq!(phase(&board, "GPU-0"), in_phase);
        let ready = format!("Ready={expected:?}/");
        assert!(
            seen(&board, "GPU-0")
                .iter()
                .any(|one| one.starts_with(&ready)),
            "{ready}"
        );
    }
}

#[test]
fn a_provider_that_is_silent_is_unknown_until_it_is_heard() {
    let mut board = board(1);
    let by = provider("a");
    let bad = status_of([condition("Hot", ConditionStatus::False, "A")]);
    board
        .register(&by, "GPU-0", GpuSpec::default(), Some(bad), at(0))
        .unwrap();
    board.heartbeat(&by, &[], at(30)).unwrap();
    board.expire(at(89));
    assert_eq!(seen(&board, "GPU-0")[0], "Hot=False/A@0");
    board.expire(at(90));
    board.expire(at(91));
    assert_eq!(seen(&board, "GPU-0")[0], "Hot=Unknown/ProviderSilent@90");
    assert_eq!(
        (phase(&board, "GPU-0"), board.silent()),
        (GpuPhase::Unknown, 1)
    );
    // A heartbeat for another GPU does not count for this one.
    let unknown = board.heartbeat(&by, &["GPU-7".to_owned()], at(95)).unwrap();
    assert_eq!(unknown, ["GPU-7"]);
    assert_eq!(seen(&board, "GPU-0")[0], "Hot=Unknown/ProviderSilent@90");
    board
        .heartbeat(&by, &["gpu-0".to_owned()], at(100))
        .unwrap();
    assert_eq!(seen(&board, "GPU-0")[0], "Hot=False/A@100");
    assert_eq!(board.silent(), 0);
}

#[test]
fn nobody_writes_or_erases_what_is_anothers() {
    let mut board = board(1);
    let (a, b) = (provider("a"), provider("b"));
    let hot = || status_of([condition("Hot", ConditionStatus::False, "A")]);
    board
        .register(&a, "GPU-0", GpuSpec::default(), Some(hot()), at(0))
        .unwrap();
    let before = seen(&board, "GPU-0");
    let refused = board
        .register(&b, "GPU-0", GpuSpec::default(), Some(hot()), at(1))
        .unwrap_err();
    assert!(
        matches!(&refused, BoardError::Owned { owner, .. } if owner == "a"),
        "{refused}"
    );
    board
        .register(&b, "GPU-0", GpuSpec::default(), None, at(1))
        .unwrap();
    board
        .update_status(&b, "GPU-0", GpuStatus::default(), at(1))
        .unwrap();
    assert_eq!(seen(&board, "GPU-0"), before);

    let thief = Provider {
        uid: 1000,
        ..a.clone()
    };
    for refused in [
        board.unregister(&thief, "GPU-0", at(2)).unwrap_err(),
        board
            .heartbeat(&provider("nvml-provider"), &[], at(2))
            .unwrap_err(),
    ] {
        assert!(matches!(refused, BoardError::Taken { .. }), "{refused}");
    }
    // The last registration frees its types and its name.
    board.unregister(&a, "GPU-0", at(3)).unwrap();
    assert_eq!(
        seen(&board, "GPU-0"),
        ["NVMLReady=True/Initialized@0", "Ready=True/AllTrue@3"]
    );
    board.update_status(&b, "GPU-0", hot(), at(4)).unwrap();
    board
        .register(&thief, "GPU-0", GpuSpec::default(), None, at(4))
        .unwrap();
}

#[test]
fn a_gpu_goes_when_nobody_has_it_registered_any_more() {
    let mut board = board(1);
    let (a, b) = (provider("a"), provider("b"));
    for by in [&a, &b] {
        for name in ["GPU-0", "GPU-x"] {
            board
                .register(by, name, GpuSpec::default(), None, at(0))
                .unwrap();
        }
    }
    assert_eq!(phase(&board, "GPU-x"), GpuPhase::Pending);
    for by in [&a, &b] {
        assert!(board.gpu("GPU-x").is_ok());
        board.unregister(by, "GPU-0", at(1)).unwrap();
        board.unregister(by, "GPU-x", at(1)).unwrap();
    }
    assert!(board.gpu("GPU-x").is_err());
    assert!(board.gpu("GPU-0").is_ok());
}

/// Sources within this process report on each GPU, whoever registered it.
#[test]
fn what_our_own_sources_say_keeps_no_gpu() {
    let mut board = board(1);
    let by = provider("a");
    board
        .register(&by, "GPU-x", GpuSpec::default(), None, at(0))
        .unwrap();
    for own in [Own::Health, Own::Dcgm] {
        for name in ["GPU-0", "GPU-x"] {
            board
                .set_own(own, name, Said::well("W", ""), at(1))
                .unwrap();
        }
    }
    board.unregister(&by, "GPU-x", at(2)).unwrap();
    assert!(board.gpu("GPU-x").is_err());
    // A GPU that the driver has listed stays.
    board
        .register(&by, "GPU-0", GpuSpec::default(), None, at(3))
        .unwrap();
    board.unregister(&by, "GPU-0", at(4)).unwrap();
    assert!(board.gpu("GPU-0").is_ok());
}

#[test]
fn users_who_do_not_administer_the_machine_leave_room_for_those_who_do() {
    let mut board = board(0);
    let spec = GpuSpec::default;
    // One user gets an eighth of the GPUs and of the providers; all of them together get half.
    for index in 0..MAX_OF_PROVIDERS / 8 {
        let name = format!("GPU-{index}");
        board
            .register(&other("a", 1000), &name, spec(), None, at(0))
            .unwrap();
    }
    let refused = board
        .register(&other("a", 1000), "GPU-x", spec(), None, at(0))
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "there are too many GPUs of providers of users who do not administer the machine: one of them \
         can have 32, and all of them 128"
    );
    for index in 1..MAX_PROVIDERS / 8 {
        let by = other(&format!("a{index}"), 1000);
        board.register(&by, "GPU-0", spec(), None, at(0)).unwrap();
    }
    assert!(board.heartbeat(&other("ax", 1000), &[], at(0)).is_err());
    let mut taken = 0;
    for uid in 1001..1020 {
        for index in 0..MAX_PROVIDERS {
            let by = other(&format!("u{uid}-{index}"), uid);
            let name = format!("GPU-{uid}-{index}");
            taken += usize::from(board.register(&by, &name, spec(), None, at(0)).is_ok());
        }
    }
    assert_eq!(taken, MAX_PROVIDERS / 2 - MAX_PROVIDERS / 8);
    // The rest is reserved for users who administer the machine.
    for index in 0..MAX_PROVIDERS / 2 {
        let by = provider(&format!("root{index}"));
        let name = format!("GPU-root-{index}");
        board.register(&by, &name, spec(), None, at(0)).unwrap();
    }
}

/// People and scripts would confuse a name that looks like another, or like none.
#[test]
fn names_that_pass_for_others_are_refused() {
    let mut board = board(1);
    let by = provider("a");
    let good = condition("Hot", ConditionStatus::False, "R");
    board
        .register(
            &by,
            "GPU-0",
            GpuSpec::default(),
            Some(status_of([good])),
            at(0),
        )
        .unwrap();
    let version = board.version();
    for odd in [
        "",
        " ",
        "Hot ",
        " Hot",
        "Hot\u{200b}",
        "\u{202e}toH",
        "Hót",
        "H t",
        "-Hot",
        "Hot.",
    ] {
        let one = condition(odd, ConditionStatus::True, "R");
        board
            .update_condition(&by, "GPU-0", one, at(1))
            .unwrap_err();
        board
            .register(&by, odd, GpuSpec::default(), None, at(1))
            .unwrap_err();
        board.heartbeat(&provider(odd), &[], at(1)).unwrap_err();
    }
    let b = provider("b");
    board
        .register(&b, "GPU-0", GpuSpec::default(), None, at(0))
        .unwrap();
    for taken in ["NVMLReady", "nvmlready", "READY", "dcgmHealth", "hot"] {
        let one = condition(taken, ConditionStatus::True, "R");
        let refused = board.update_condition(&b, "GPU-0", one, at(1)).unwrap_err();
        assert!(matches!(refused, BoardError::Owned { .. }), "{refused}");
    }
    for taken in ["gpuwarden", "NVML-Provider", "A", "nvsentinel"] {
        let refused = board.heartbeat(&provider(taken), &[], at(1)).unwrap_err();
        assert!(matches!(refused, BoardError::Taken { .. }), "{refused}");
    }
    assert_eq!(board.version(), version);
    for fine in ["x", "example.com/Hot-1", "a_b.c:d"] {
        let one = condition(fine, ConditionStatus::True, "R");
        board.update_condition(&by, "GPU-0", one, at(1)).unwrap();
    }
}

#[test]
fn a_gpu_is_described_as_the_driver_describes_it() {
    let mut board = board(0);
    let found = Found {
        index: 3,
        uuid: "GPU-3".to_owned(),
        pci: "0000:1b:00.0".to_owned(),
        product: "NVIDIA H100 80GB HBM3".to_owned(),
        architecture: Some("Hopper".to_owned()),
        memory_bytes: Some(85_520_809_984),
        mig_devices: vec![diagnosis::gpu::MigDevice {
            uuid: "MIG-1".to_owned(),
            gpu_instance: 1,
            compute_instance: 2,
            memory_bytes: Some(10_468_982_784),
        }],
        ..Found::default()
    };
    let mut inventory = Inventory {
        gpus: vec![found],
        ..Inventory::default()
    };
    board.set_inventory(&inventory, at(0));
    let gpu = board.gpu("GPU-3").unwrap();
    let expected = GpuSpec {
        uuid: "GPU-3".to_owned(),
        index: 3,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        architecture: "Hopper".to_owned(),
        memory_bytes: 85_520_809_984,
        pci_bus_id: "0000:1b:00.0".to_owned(),
        mig_devices: vec![contract::device::MigDevice {
            uuid: "MIG-1".to_owned(),
            gpu_instance: 1,
            compute_instance: 2,
            memory_bytes: 10_468_982_784,
        }],
    };
    assert_eq!(gpu.spec, Some(expected));
    let message = |board: &Board| {
        let status = board.gpu("GPU-3").unwrap().status.clone().unwrap();
        status.conditions[0].message.clone()
    };
    assert_eq!(message(&board), "GPU enumerated via NVML");
    // The UUID is not case-sensitive, also if the GPU cannot be read.
    inventory.gpus.clear();
    inventory.unreadable.push(UnreadableGpu {
        uuid: Some("gpu-3".to_owned()),
        error: "NVML_ERROR_X".to_owned(),
        ..UnreadableGpu::default()
    });
    board.set_inventory(&inventory, at(1));
    assert_eq!(seen(&board, "GPU-3")[0], "NVMLReady=Unknown/Unreadable@1");
    assert_eq!(message(&board), "NVML cannot read it: NVML_ERROR_X");
    board.set_inventory(&Inventory::default(), at(2));
    assert_eq!(message(&board), "NVML does not list any GPU");
}

/// The absence of one source does not affect the conditions of others.
#[test]
fn a_source_that_goes_away_takes_back_only_what_it_has_said() {
    let mut board = board(1);
    let hot = condition("Hot", ConditionStatus::False, "R");
    board
        .register(
            &provider("a"),
            "GPU-0",
            GpuSpec::default(),
            Some(status_of([hot])),
            at(1),
        )
        .unwrap();
    for own in [Own::Dcgm, Own::Health] {
        board
            .set_own(own, "GPU-0", Said::well("W", ""), at(1))
            .unwrap();
    }
    board.own_away(Own::Nvml, "DriverGone", "", at(2));
    assert_eq!(
        seen(&board, "GPU-0"),
        [
            "DCGMHealth=True/W@1",
            "Hot=False/R@1",
            "NVMLReady=Unknown/DriverGone@2",
            "NVSentinelHealth=True/W@1",
            "Ready=False/R@1",
        ]
    );
    board.own_away(Own::Dcgm, "Away", "", at(3));
    assert_eq!(seen(&board, "GPU-0")[0], "DCGMHealth=Unknown/Away@3");
    assert_eq!(seen(&board, "GPU-0")[3], "NVSentinelHealth=True/W@1");
}

#[test]
fn one_gpu_that_vanishes_is_lost_and_all_that_vanish_are_unknown() {
    let mut board = board(2);
    board.set_inventory(&inventory([0]), at(10));
    assert_eq!(seen(&board, "GPU-1")[0], "NVMLReady=False/GPULost@10");
    assert_eq!(seen(&board, "GPU-0")[0], "NVMLReady=True/Initialized@0");
    board.set_inventory(&inventory([]), at(20));
    assert_eq!(seen(&board, "GPU-0")[0], "NVMLReady=Unknown/NoGPUs@20");
    board.own_away(Own::Nvml, "DriverGone", "", at(25));
    assert_eq!(seen(&board, "GPU-0")[0], "NVMLReady=Unknown/DriverGone@20");
    board.set_inventory(&inventory([0, 1]), at(30));
    assert_eq!(seen(&board, "GPU-0")[0], "NVMLReady=True/Initialized@30");
    assert_eq!(seen(&board, "GPU-1")[0], "NVMLReady=True/Recovered@30");
}

#[test]
fn a_gpu_that_does_not_answer_is_lost_only_where_the_driver_says_so() {
    let unreadable = |uuid: Option<&str>, pci: Option<&str>, is_lost| UnreadableGpu {
        uuid: uuid.map(str::to_owned),
        pci: pci.map(str::to_owned),
        error: "NVML_ERROR_X".to_owned(),
        is_lost,
        ..UnreadableGpu::default()
    };
    let look = |board: &mut Board, one, second| {
        let mut inventory = inventory([0]);
        inventory.unreadable.push(one);
        board.set_inventory(&inventory, at(second));
    };
    let mut board = board(2);
    look(
        &mut board,
        unreadable(None, Some("0000:01:00.0"), false),
        10,
    );
    assert_eq!(seen(&board, "GPU-1")[0], "NVMLReady=Unknown/Unreadable@10");
    look(&mut board, unreadable(Some("gpu-1"), None, true), 20);
    assert_eq!(seen(&board, "GPU-1")[0], "NVMLReady=False/GPULost@20");
    // A GPU that was never read still has a name.
    look(&mut board, unreadable(Some("GPU-5"), None, false), 30);
    assert_eq!(seen(&board, "GPU-5")[0], "NVMLReady=Unknown/Unreadable@30");
}

#[test]
fn a_look_at_the_gpus_takes_no_fault_back() {
    let mut board = board(1);
    board
        .set_own(Own::Nvml, "GPU-0", Said::bad("XidError", "79"), at(5))
        .unwrap();
    let version = board.version();
    board.set_inventory(&inventory([0]), at(10));
    board.own_away(Own::Nvml, "DriverGone", "", at(20));
    board.set_inventory(&inventory([0]), at(30));
    assert_eq!(seen(&board, "GPU-0")[0], "NVMLReady=False/XidError@30");
    // The first poll changed nothing, so it made no version.
    assert_eq!(board.version(), version + 2);
}

#[test]
fn what_is_too_much_or_malformed_is_refused_by_name_and_changes_nothing() {
    let mut board = board(1);
    let by = provider("a");
    board
        .register(&by, "GPU-0", GpuSpec::default(), None, at(0))
        .unwrap();
    let version = board.version();
    let good = || condition("Hot", ConditionStatus::True, "R");
    let long = |length| "x".repeat(length + 1);
    let many =
        (0..=MAX_CONDITIONS).map(|index| condition(&index.to_string(), ConditionStatus::True, ""));
    let bad = [
        (
            vec![condition("", ConditionStatus::True, "R")],
            "condition.type: it is missing",
        ),
        (
            vec![condition("a\nb", ConditionStatus::True, "R")],
            "condition.type: \"a\\nb\" is not a valid name",
        ),
        (
            vec![condition("Hot", ConditionStatus::Unspecified, "R")],
            "condition.status: it is missing",
        ),
        (
            vec![condition("Hot", ConditionStatus::True, &long(MAX_WORD))],
            "condition.reason: it has 129",
        ),
        (
            vec![Condition {
                message: long(MAX_MESSAGE),
                ..good()
            }],
            "condition.message: it has 1025",
        ),
        (vec![good(), good()], "\"Hot\" is given twice"),
        (many.collect(), "there are 16 types of conditions"),
    ];
    for (conditions, expected) in bad {
        let refused = board
            .update_status(&by, "GPU-0", status_of(conditions), at(1))
            .unwrap_err();
        assert!(
            refused.to_string().contains(expected),
            "{expected}: {refused}"
        );
    }
    let other = GpuSpec {
        uuid: "GPU-1".to_owned(),
        ..GpuSpec::default()
    };
    let refused = board
        .register(&by, "GPU-9", other, None, at(1))
        .unwrap_err();
    assert!(refused.to_string().contains("is not the name"), "{refused}");
    assert_eq!(board.version(), version);
    // A status of a later version is accepted.
    let later = Condition {
        status: 9,
        ..good()
    };
    board.update_condition(&by, "GPU-0", later, at(1)).unwrap();
    assert_eq!(seen(&board, "GPU-0")[0], "Hot=Unknown/R@1");
}

#[test]
fn there_is_room_for_so_many_and_no_more() {
    let mut board = board(0);
    let by = provider("a");
    for index in 0..MAX_OF_PROVIDERS {
        board
            .register(
                &by,
                &format!("GPU-{index}"),
                GpuSpec::default(),
                None,
                at(0),
            )
            .unwrap();
    }
    let refused = board
        .register(&by, "GPU-x", GpuSpec::default(), None, at(0))
        .unwrap_err();
    assert!(refused.to_string().contains("256 GPUs"), "{refused}");
    // The driver's GPUs have a limit of their own.
    assert_eq!(board.set_inventory(&inventory(250..506), at(1)), 0);
    assert_eq!(board.set_inventory(&inventory(250..508), at(1)), 2);
    assert_eq!(board.left_out(), 2);
    assert_eq!(seen(&board, "GPU-505")[0], "NVMLReady=True/Initialized@1");
    assert_eq!(board.set_inventory(&inventory(250..300), at(1)), 0);
    assert_eq!(board.left_out(), 0);
    for index in 1..MAX_PROVIDERS {
        let by = provider(&index.to_string());
        board
            .register(&by, "GPU-0", GpuSpec::default(), None, at(1))
            .unwrap();
    }
    let refused = board.heartbeat(&provider("x"), &[], at(1)).unwrap_err();
    assert!(refused.to_string().contains("32 providers"), "{refused}");
    for index in 0..MAX_CONDITIONS {
        let one = condition(&index.to_string(), ConditionStatus::True, "");
        board.update_condition(&by, "GPU-0", one, at(1)).unwrap();
    }
    let one = condition("x", ConditionStatus::True, "");
    let refused = board
        .update_condition(&by, "GPU-0", one, at(1))
        .unwrap_err();
    assert!(
        refused.to_string().contains("16 types of conditions"),
        "{refused}"
    );
}
