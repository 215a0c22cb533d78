use contract::{BehaviourOverrides, Entity, HealthEvent};
use model::device::test_util::slice;
use model::device::{Inventory, SliceDevice};
use model::event::{EventRecord, normalise};
use model::fault::FaultBook;
use model::reporter::Reporter;

use super::*;
use crate::Policy;
use crate::assess::{Desired, assess};

/// A rule set that taints one faulty GPU, and takes the node out for two.
const ONE: &str = r#"
    [[rule-sets]]
    name = "fatal"
    taint-devices = 1
    cordon = { shouldCordon = true }
    [[rule-sets.match.all]]
    kind = "HealthEvent"
    expression = "event.isFatal"
"#;

/// Returns a report of our own monitor. Entities are written as `GPU_UUID=GPU-0`.
fn report(check: &str, code: &str, entities: &[&str], fatal: bool) -> HealthEvent {
    let entity = |text: &&str| {
        let (kind, value) = text.split_once('=').unwrap();
        Entity {
            entity_type: kind.into(),
            entity_value: value.into(),
        }
    };
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: check.into(),
        error_code: Some(code.to_owned())
            .into_iter()
            .filter(|code| !code.is_empty())
            .collect(),
        entities_impacted: entities.iter().map(entity).collect(),
        is_fatal: fatal,
        recommended_action: 2,
        node_name: "n1".into(),
        ..HealthEvent::default()
    };
    Reporter::Monitor.note_in(&mut event);
    event
}

fn recovery(event: &HealthEvent) -> HealthEvent {
    HealthEvent {
        is_fatal: false,
        is_healthy: true,
        recommended_action: 0,
        ..event.clone()
    }
}

fn desired(events: &[HealthEvent], table: &str, published: &[DeviceTaint]) -> Desired {
    let policy = format!("[device-taints]\n{table}\n{ONE}");
    desired_on(&NodeView::unknown("n1"), events, &policy, published)
}

fn desired_on(
    node: &NodeView,
    events: &[HealthEvent],
    policy: &str,
    published: &[DeviceTaint],
) -> Desired {
    let mut book = FaultBook::default();
    for (seq, event) in (1_u64..).zip(events) {
        let mut event = event.clone();
        let created_at = Timestamp::from_second(i64::try_from(seq).unwrap()).unwrap();
        normalise(&mut event, created_at);
        book.record(&EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
    }
    let policy = Policy::parse(policy, "p").unwrap();
    let mut slice = slice("n1", 3);
    slice.devices[0].taints = published.to_vec();
    slice.devices.push(SliceDevice {
        name: "gpu-2-mig".into(),
        mig: Some("MIG-1".into()),
        ..slice.devices[2].clone()
    });
    let mut inventory = Inventory::default();
    inventory.take("s", Some(slice));
    let devices = inventory.of_node("n1", [].iter());
    assess(
        book.faults("n1"),
        &policy,
        node,
        &devices,
        None,
        Timestamp::MAX,
    )
}

/// Returns the taints as `device taint`, without the keys' domain, and `node` if it is taken out.
fn taints(events: &[HealthEvent], table: &str) -> Vec<String> {
    formatted(&desired(events, table, &[]))
}

fn formatted(desired: &Desired) -> Vec<String> {
    let mut lines: Vec<String> = (desired.devices.iter())
        .flat_map(|(device, taints)| {
            taints.iter().map(|taint| {
                let taint = taint.to_string();
                let taint = taint.strip_prefix("gpu.nvidia.com/").unwrap();
                format!("{} {taint}", device.name)
            })
        })
        .collect();
    lines.extend(desired.takes_node_out().then(|| "node".to_owned()));
    lines
}

#[test]
fn each_dimension_has_its_taint() {
    let gpu = &["GPU_UUID=GPU-0"][..];
    let all = ["gpu-0", "gpu-1", "gpu-2", "gpu-2-mig"];
    let of_all = |taint: &str| all.map(|device| format!("{device} {taint}")).to_vec();
    let of = |taints: &[&str]| taints.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (check, code, entities, fatal, expected) in [
        (
            "SysLogsXIDError",
            "48",
            gpu,
            true,
            of(&["gpu-0 xid=48:NoSchedule"]),
        ),
        (
            "SysLogsXIDError",
            "48",
            &["PCI=0000:01:00"],
            true,
            of(&["gpu-1 xid=48:NoSchedule"]),
        ),
        (
            "SysLogsXIDError",
            "63",
            gpu,
            false,
            of(&["gpu-0 xid=63:None"]),
        ),
        (
            "SysLogsXIDError",
            "79",
            gpu,
            true,
            of(&["gpu-0 xid=79:NoSchedule", "gpu-0 gpu-lost:NoSchedule"]),
        ),
        (
            "SysLogsGPUFallenOff",
            "GPU_FALLEN_OFF_BUS",
            gpu,
            true,
            of(&["gpu-0 gpu-lost:NoSchedule"]),
        ),
        (
            "GpuPcieWatch",
            "DCGM_FR_FALLEN_OFF_BUS",
            gpu,
            true,
            of(&["gpu-0 gpu-lost:NoSchedule"]),
        ),
        (
            "GpuMemWatch",
            "C",
            gpu,
            true,
            of(&["gpu-0 memory=retired:NoSchedule"]),
        ),
        (
            "GpuThermalWatch",
            "C",
            gpu,
            false,
            of(&["gpu-0 thermal=throttled:None"]),
        ),
        (
            "GpuThermalMarginWatch",
            "GPU_TEMP_HW_SLOWDOWN_VIOLATION",
            gpu,
            true,
            of(&["gpu-0 thermal=throttled:NoSchedule"]),
        ),
        (
            "SysLogsGPUInitFailed",
            "GPU_INIT_FAILED",
            gpu,
            true,
            of(&["gpu-0 gpu-lost:NoSchedule"]),
        ),
        (
            "GpuNvswitchFatalWatch",
            "C",
            gpu,
            true,
            of(&["gpu-0 nvlink=degraded:NoSchedule", "node"]),
        ),
        // A link has two ends, so the rule set does not spare the node.
        (
            "GpuNvlinkWatch",
            "C",
            gpu,
            true,
            of(&["gpu-0 nvlink=degraded:NoSchedule", "node"]),
        ),
        // A partitioned GPU.
        (
            "GpuMemWatch",
            "C",
            &["GPU_UUID=MIG-1"],
            true,
            of(&[
                "gpu-2 memory=retired:NoSchedule",
                "gpu-2-mig memory=retired:NoSchedule",
            ]),
        ),
        (
            "GpuDriverWatch",
            "GPU_UNMONITORED",
            &["GPU_UUID=GPU-2"],
            false,
            of(&["gpu-2 unmonitored:None", "gpu-2-mig unmonitored:None"]),
        ),
        // An unknown GPU is lost.
        (
            "SysLogsGPUFallenOff",
            "GPU_FALLEN_OFF_BUS",
            &[],
            true,
            [of_all("gpu-lost:NoSchedule"), of(&["node"])].concat(),
        ),
        (
            "GpuDcgmConnectivityFailure",
            "C",
            &[],
            false,
            of_all("unmonitored:None"),
        ),
        // A GPU that no slice lists may be any device.
        (
            "SysLogsXIDError",
            "48",
            &["GPU_UUID=GPU-9"],
            true,
            [of_all("unmonitored:None"), of(&["node"])].concat(),
        ),
        // A fault without a dimension.
        ("GpuDriverWatch", "C", gpu, true, of(&["node"])),
    ] {
        let found = taints(&[report(check, code, entities, fatal)], "");
        assert_eq!(found, expected, "{check} {code} {entities:?}");
    }
}

#[test]
fn a_device_has_a_taint_of_each_dimension_at_most() {
    let gpu = &["GPU_UUID=GPU-0"][..];
    let all: Vec<HealthEvent> = CHECKS
        .iter()
        .map(|(check, _)| report(check, "C", gpu, true))
        .chain(["48", "79", "63", "95"].map(|xid| report("SysLogsXIDError", xid, gpu, true)))
        .chain([report("GpuDriverWatch", "GPU_UNMONITORED", gpu, true)])
        .collect();
    let mut keys: Vec<String> = taints(&all, "")
        .iter()
        .filter_map(|taint| taint.strip_prefix("gpu-0 "))
        .map(|taint| taint.split(['=', ':']).next().unwrap().to_owned())
        .collect();
    keys.sort();
    // Kubernetes accepts sixteen.
    let expected = [
        "gpu-lost",
        "memory",
        "nvlink",
        "thermal",
        "unmonitored",
        "xid",
    ];
    assert_eq!(keys, expected);
}

/// Without a rule set that taints, the taint is informational, unless the table sets an effect.
#[test]
fn what_marks_a_device_keeps_no_pod_away_by_default() {
    let rules = ONE.replace("taint-devices = 1\n", "");
    assert_ne!(rules, ONE);
    let gpu = &["GPU_UUID=GPU-0"][..];
    for (check, code, expected) in [
        ("GpuMemWatch", "C", "gpu-0 memory=retired:None"),
        ("GpuThermalWatch", "C", "gpu-0 thermal=throttled:None"),
        ("SysLogsXIDError", "48", "gpu-0 xid=48:None"),
        ("GpuNvlinkWatch", "C", "gpu-0 nvlink=degraded:None"),
    ] {
        let policy = format!("[device-taints]\n{rules}");
        let events = [report(check, code, gpu, true)];
        let desired = desired_on(&NodeView::unknown("n1"), &events, &policy, &[]);
        assert_eq!(formatted(&desired), [expected, "node"], "{check}");
    }
}

/// Faults caused by a job need no remediation.
#[test]
fn the_xids_of_jobs_taint_no_device() {
    for code in ["13", "31", "43", "45"] {
        let notice = HealthEvent {
            recommended_action: 0,
            ..report("SysLogsXIDError", code, &["GPU_UUID=GPU-0"], false)
        };
        assert_eq!(taints(&[notice], ""), [""; 0], "{code}");
    }
}

#[test]
fn faults_that_somebody_has_set_aside_taint_no_device() {
    let grave = |edit: fn(&mut HealthEvent)| {
        let mut event = report("SysLogsXIDError", "48", &["GPU_UUID=GPU-0"], true);
        edit(&mut event);
        event
    };
    assert_eq!(taints(&[grave(|_| {})], ""), ["gpu-0 xid=48:NoSchedule"]);
    // The sender rules out a quarantine.
    let skipped = grave(|event| {
        event.quarantine_overrides = Some(BehaviourOverrides {
            skip: true,
            ..BehaviourOverrides::default()
        });
    });
    assert_eq!(taints(&[skipped], ""), [""; 0]);
    // The node is handed over, or opted out.
    let opt_out = format!(
        "[[rule-sets.match.all]]\nkind = \"Node\"\n\
         expression = \"!('{0}' in node.metadata.labels && node.metadata.labels['{0}'] == 'false')\"\n",
        keys::MANAGED_LABEL
    );
    for (label, expected) in [
        ("x", &["gpu-0 xid=48:NoSchedule"][..]),
        (keys::HANDED_OVER_LABEL, &[]),
        (keys::MANAGED_LABEL, &[]),
    ] {
        let object = serde_json::json!({"metadata": {"name": "n1", "labels": {label: "false"}}});
        let node = NodeView::from_object(object).unwrap();
        let rules = format!("[device-taints]\n{ONE}{opt_out}");
        let desired = desired_on(&node, &[grave(|_| {})], &rules, &[]);
        assert_eq!(formatted(&desired), expected, "{label}");
    }
}

#[test]
fn the_highest_effect_counts_and_falls_only_with_the_fault_that_asked_for_it() {
    let gpu = &["GPU_UUID=GPU-0"][..];
    let grave = report("SysLogsXIDError", "48", gpu, true);
    let slight = report("SysLogsXIDError", "63", gpu, false);
    let events = [grave.clone(), slight.clone()];
    // The newest XID, with the effect of the gravest fault.
    assert_eq!(taints(&events, ""), ["gpu-0 xid=63:NoSchedule"]);
    let one_left = [grave.clone(), slight.clone(), recovery(&slight)];
    assert_eq!(taints(&one_left, ""), ["gpu-0 xid=48:NoSchedule"]);
    let other_left = [grave.clone(), slight, recovery(&grave)];
    assert_eq!(taints(&other_left, ""), ["gpu-0 xid=63:None"]);
    let none_left = [grave.clone(), recovery(&grave)];
    assert!(taints(&none_left, "").is_empty());
}

#[test]
fn more_gpus_than_the_rule_set_spares_take_the_node_out() {
    let of = |gpu: &str, code: &str| report("SysLogsXIDError", code, &[gpu], true);
    let (first, second) = ("GPU_UUID=GPU-0", "GPU_UUID=GPU-1");
    let of_one = [of(first, "48"), of(first, "64")];
    assert_eq!(taints(&of_one, ""), ["gpu-0 xid=64:NoSchedule"]);
    let of_two = [of(first, "48"), of(second, "48")];
    let both = ["gpu-0 xid=48:NoSchedule", "gpu-1 xid=48:NoSchedule", "node"];
    assert_eq!(taints(&of_two, ""), both);
}

#[test]
fn what_has_no_taint_of_its_own_goes_with_the_others_of_its_gpu() {
    let of = |check: &str, code: &str| report(check, code, &["GPU_UUID=GPU-0"], true);
    let asks = of("GpuDriverWatch", "RESET");
    assert_eq!(taints(std::slice::from_ref(&asks), ""), ["node"]);
    let both = [of("SysLogsXIDError", "48"), asks];
    assert_eq!(taints(&both, ""), ["gpu-0 xid=48:NoSchedule"]);
}

#[test]
fn pods_are_deleted_only_where_a_monitor_says_that_this_gpu_is_gone() {
    let table = "gpu-lost = \"NoExecute\"";
    let lost =
        |entities: &[&str]| report("SysLogsGPUFallenOff", "GPU_FALLEN_OFF_BUS", entities, true);
    let named = lost(&["GPU_UUID=GPU-0"]);
    assert_eq!(
        taints(std::slice::from_ref(&named), table),
        ["gpu-0 gpu-lost:NoExecute"]
    );
    let any = taints(&[lost(&[])], table);
    assert!(
        any.contains(&"gpu-0 gpu-lost:NoSchedule".to_owned()),
        "{any:?}"
    );
    // Reported by an unknown user.
    let mut claimed = named;
    claimed.metadata.clear();
    assert_eq!(taints(&[claimed], table), ["gpu-0 gpu-lost:NoSchedule"]);
}

#[test]
fn why_no_pods_are_deleted_is_said_where_it_was_asked_for() {
    let lost =
        |entities: &[&str]| report("SysLogsGPUFallenOff", "GPU_FALLEN_OFF_BUS", entities, true);
    let mut claimed = lost(&["GPU_UUID=GPU-0"]);
    claimed.metadata.clear();
    let xid = report("SysLogsXIDError", "48", &["GPU_UUID=GPU-0"], true);
    let by_a_user = "it was reported by a user, not by a monitor or an administrator";
    for (event, expected) in [
        (lost(&["GPU_UUID=GPU-0"]), None),
        (xid, None),
        (lost(&[]), Some("it names no GPU")),
        (lost(&["GPU_UUID=GPU-9"]), Some("no slice lists its GPU")),
        (claimed, Some(by_a_user)),
    ] {
        let events = std::slice::from_ref(&event);
        let ruling = desired(events, "", &[]).rulings.remove(0);
        assert_eq!(ruling.lowered, None, "it is not asked for");
        let asked = desired(events, "gpu-lost = \"NoExecute\"", &[]);
        let ruling = &asked.rulings[0];
        assert_eq!(ruling.lowered, expected, "{event:?}");
        let text = ruling.to_string();
        let ending = expected.map(|why| format!("; NoExecute is requested but not set: {why}"));
        assert!(text.ends_with(&ending.unwrap_or_default()), "{text}");
    }
}

#[test]
fn what_the_driver_itself_says_is_not_said_again() {
    let fault = report("SysLogsXIDError", "48", &["GPU_UUID=GPU-0"], true);
    let published = |effect| DeviceTaint {
        key: Dimension::Xid.key(),
        value: "31".into(),
        effect,
    };
    let weaker = desired(
        std::slice::from_ref(&fault),
        "",
        &[published(TaintEffect::None)],
    );
    assert_eq!(formatted(&weaker), ["gpu-0 xid=48:NoSchedule"]);
    let as_strong = desired(&[fault], "", &[published(TaintEffect::NoSchedule)]);
    assert!(formatted(&as_strong).is_empty());
}
