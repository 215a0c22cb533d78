//! Events that known monitors send, one of each kind. Policies are compared by them, and
//! checked against them.
//!
//! Events of the kernel log come from the catalogue. The others have NVSentinel's names, each
//! once fatal and once not.

use std::fmt::Display;

use contract::{
    EVENT_VERSION, Entity, HealthEvent, ProcessingStrategy, RecommendedAction, action_name, keys,
};

use diagnosis::catalog::{Catalog, LineVerdict};

/// Event of a known kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Standard {
    /// Name for people, such as `XID 79`.
    pub name: String,
    /// Event on the node [`NODE`].
    pub event: HealthEvent,
}

/// Name of the node in all events.
pub const NODE: &str = "node";

/// NVSentinel's other monitors: agent, component class and checks. The class of a cloud event
/// is the type of resource.
const OTHERS: [(&str, &str, &[&str]); 9] = [
    (
        "gpu-health-monitor",
        "GPU",
        &[
            "GpuPcieWatch",
            "GpuNvlinkWatch",
            "GpuPmuWatch",
            "GpuMcuWatch",
            "GpuMemWatch",
            "GpuSmWatch",
            "GpuInforomWatch",
            "GpuThermalWatch",
            "GpuPowerWatch",
            "GpuDriverWatch",
            "GpuNvswitchNonfatalWatch",
            "GpuNvswitchFatalWatch",
            "GpuConnectxWatch",
            "GpuAllWatch",
            "GpuThermalMarginWatch",
            "GpuDcgmConnectivityFailure",
        ],
    ),
    ("csp-health-monitor", "EC2", &["CSPMaintenance"]),
    (
        "nic-health-monitor",
        "NIC",
        &[
            "InfiniBandStateCheck",
            "InfiniBandDegradationCheck",
            "EthernetStateCheck",
            "EthernetDegradationCheck",
        ],
    ),
    ("kubernetes-object-monitor", "Node", &["a policy's name"]),
    ("slurm-drain-monitor", "Node", &["a pattern's name"]),
    ("health-events-analyzer", "GPU", &["a rule's name"]),
    ("preflight-dcgm-diag", "GPU", &["DcgmDiagnosticMemory"]),
    ("preflight-nccl-loopback", "Node", &["NCCLLoopbackTest"]),
    ("preflight-nccl-allreduce", "Node", &["NCCLAllReduceTest"]),
];

/// Returns one event of each known kind; those of the kernel log have the verdicts of
/// `catalog`.
pub fn events(catalog: &Catalog) -> Vec<Standard> {
    // The driver never prints these codes.
    let xids = catalog.xids().filter(|row| row.scope != "unused");
    let xids = xids.map(|row| {
        let verdict = catalog.judge_xid(row.code, "");
        of_code("XID", keys::CHECK_XID, row.code, &verdict)
    });
    let sxids = catalog.sxids().map(|row| {
        let verdict = catalog.judge_sxid(row.code, None);
        of_code("SXid", keys::CHECK_SXID, row.code, &verdict)
    });
    let mut events: Vec<Standard> = xids.chain(sxids).collect();
    events.push(kernel_log(
        "GPU fallen off the bus, without an XID".to_owned(),
        keys::CHECK_GPU_FALLEN_OFF,
        keys::CODE_GPU_FALLEN_OFF,
        &LineVerdict {
            healthy: false,
            fatal: true,
            action: RecommendedAction::RestartBm,
            meaning: "".into(),
            basis: None,
        },
    ));
    events.push(kernel_log(
        "GPU that the driver cannot start".to_owned(),
        keys::CHECK_GPU_INIT,
        keys::CODE_GPU_INIT_FAILED,
        &LineVerdict {
            healthy: false,
            fatal: true,
            action: RecommendedAction::ComponentReset,
            meaning: "".into(),
            basis: None,
        },
    ));
    for row in catalog.nics() {
        let name = format!("NIC driver {}", row.name);
        let mut standard = kernel_log(name, keys::CHECK_NIC_DRIVER, &row.name, &row.verdict());
        keys::COMPONENT_NIC.clone_into(&mut standard.event.component_class);
        standard.event.entities_impacted = vec![entity(keys::ENTITY_NIC, "mlx5_0")];
        events.push(standard);
    }
    events.retain(|standard| !standard.event.is_healthy);
    for (agent, class, checks) in OTHERS {
        for check in checks {
            events.extend([true, false].map(|fatal| other(agent, class, check, fatal)));
        }
    }
    events
}

/// Returns the agents of the known monitors.
pub fn agents() -> impl Iterator<Item = &'static str> {
    [keys::SYSLOG_AGENT]
        .into_iter()
        .chain(OTHERS.map(|(agent, ..)| agent))
}

/// Returns the component classes of the known monitors.
pub fn component_classes() -> [&'static str; 4] {
    [keys::COMPONENT_GPU, keys::COMPONENT_NIC, "Node", "EC2"]
}

/// Returns the checks of the known monitors that have fixed names.
pub fn checks() -> impl Iterator<Item = &'static str> {
    let own = [
        keys::CHECK_XID,
        keys::CHECK_SXID,
        keys::CHECK_GPU_FALLEN_OFF,
        keys::CHECK_GPU_INIT,
        keys::CHECK_NIC_DRIVER,
        keys::CHECK_GPU_COUNT,
        keys::CHECK_GPU_IMEX,
        keys::CHECK_REPAIRED,
    ];
    let others = OTHERS
        .into_iter()
        .flat_map(|(_, _, checks)| checks.iter().copied());
    own.into_iter()
        .chain(others.filter(|check| !check.contains(' ')))
}

fn of_code(kind: &str, check: &str, code: impl Display, verdict: &LineVerdict) -> Standard {
    let code = code.to_string();
    kernel_log(format!("{kind} {code}"), check, &code, verdict)
}

fn kernel_log(name: String, check: &str, code: &str, verdict: &LineVerdict) -> Standard {
    Standard {
        name,
        event: HealthEvent {
            is_fatal: verdict.fatal,
            is_healthy: verdict.healthy,
            recommended_action: verdict.action as i32,
            error_code: vec![code.to_owned()],
            entities_impacted: vec![
                entity(keys::ENTITY_PCI, "0000:b3:00"),
                entity(
                    keys::ENTITY_GPU_UUID,
                    "GPU-00000000-0000-0000-0000-000000000000",
                ),
            ],
            message: verdict.meaning.to_string(),
            ..event(keys::SYSLOG_AGENT, keys::COMPONENT_GPU, check)
        },
    }
}

fn other(agent: &str, class: &str, check: &str, fatal: bool) -> Standard {
    let action = if fatal {
        RecommendedAction::ContactSupport
    } else {
        RecommendedAction::None
    };
    let gravity = if fatal { "fatal" } else { "not fatal" };
    Standard {
        name: format!("{agent} {check}, {gravity}"),
        event: HealthEvent {
            is_fatal: fatal,
            recommended_action: action as i32,
            ..event(agent, class, check)
        },
    }
}

fn event(agent: &str, class: &str, check: &str) -> HealthEvent {
    HealthEvent {
        version: EVENT_VERSION,
        agent: agent.to_owned(),
        component_class: class.to_owned(),
        check_name: check.to_owned(),
        node_name: NODE.to_owned(),
        processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
        ..HealthEvent::default()
    }
}

fn entity(kind: &str, value: &str) -> Entity {
    Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    }
}

// === impl Standard ===

impl Standard {
    /// Returns true if the source considers the event harmless: not fatal, and without a
    /// recommended action.
    pub fn is_harmless(&self) -> bool {
        !self.event.is_fatal && self.event.recommended_action == RecommendedAction::None as i32
    }

    /// Returns gravity and recommended action, for people.
    pub fn judged(&self) -> String {
        let fatal = if self.event.is_fatal { "fatal, " } else { "" };
        format!("{fatal}{}", action_name(self.event.recommended_action))
    }
}
