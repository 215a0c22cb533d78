//! Panels of the dashboards. Units are Grafana's: `short` for counts, `s` for seconds,
//! `percentunit` for 0 to 1, `ops` for a rate per second.

mod itself;

use super::PanelKind::{Lines, Numbers, States, Table};
use super::{Dashboard, Panel, PanelKind};

type Queries = &'static [(&'static str, &'static str)];

/// Colours of 0 and 1, where 1 is good, where it is bad, and where it is neither.
const GOOD: PanelKind = States(["red", "green"]);
const BAD: PanelKind = States(["green", "red"]);
const NEUTRAL: PanelKind = States(["blue", "green"]);

const HALF: u32 = 12;
const THIRD: u32 = 8;
const WHOLE: u32 = 24;

/// All dashboards.
pub(super) const ALL: [Dashboard; 5] = [
    Dashboard {
        name: "gpuwarden-fleet",
        title: "gpuwarden: Fleet",
        variables: &[],
        panels: FLEET,
    },
    Dashboard {
        name: "gpuwarden-node",
        title: "gpuwarden: Node",
        variables: &[
            ("node", "gpuwarden_node_phase_timestamp_seconds"),
            ("instance", "gpuwarden_source_up"),
        ],
        panels: NODE,
    },
    Dashboard {
        name: "gpuwarden-gpu",
        title: "gpuwarden: GPU",
        variables: &[
            ("instance", "gpuwarden_gpu_temperature_celsius"),
            (
                "gpu",
                "gpuwarden_gpu_temperature_celsius{instance=~\"$instance\"}",
            ),
        ],
        panels: GPU,
    },
    Dashboard {
        name: "gpuwarden-preflight",
        title: "gpuwarden: Preflight",
        variables: &[],
        panels: PREFLIGHT,
    },
    Dashboard {
        name: "gpuwarden-itself",
        title: "gpuwarden: Itself",
        variables: &[],
        panels: itself::PANELS,
    },
];

const fn panel(
    title: &'static str,
    kind: PanelKind,
    unit: &'static str,
    width: u32,
    queries: Queries,
) -> Panel {
    Panel {
        title,
        kind,
        unit,
        width,
        queries,
    }
}

const FLEET: &[Panel] = &[
    panel(
        "Nodes by state",
        Numbers,
        "short",
        WHOLE,
        &[("max by (state) (gpuwarden_nodes) > 0", "{{state}}")],
    ),
    panel(
        "Nodes that are not healthy",
        Lines,
        "short",
        HALF,
        &[(
            "max by (state) (gpuwarden_nodes{state!=\"healthy\"})",
            "{{state}}",
        )],
    ),
    panel(
        "Nodes out of service",
        BAD,
        "short",
        HALF,
        &[(
            "max by (node) (fault_quarantine_current_quarantined_nodes)",
            "{{node}}",
        )],
    ),
    panel(
        "Time in the present phase",
        Table,
        "s",
        HALF,
        &[(
            "time() - max by (node, phase) (gpuwarden_node_phase_timestamp_seconds)",
            "",
        )],
    ),
    panel(
        "Nodes taken out and returned, per hour",
        Lines,
        "short",
        HALF,
        &[
            (
                "sum(rate(fault_quarantine_nodes_quarantined_total[$__rate_interval])) * 3600",
                "taken out",
            ),
            (
                "sum(rate(fault_quarantine_nodes_unquarantined_total[$__rate_interval])) * 3600",
                "returned",
            ),
            (
                "sum(rate(fault_quarantine_nodes_manually_uncordoned_total[$__rate_interval])) * 3600",
                "uncordoned by hand",
            ),
        ],
    ),
    panel(
        "Use of the fullest limit",
        Lines,
        "percentunit",
        THIRD,
        &[("max(fault_quarantine_breaker_utilization)", "used")],
    ),
    panel(
        "Held back, paused, breaker",
        Lines,
        "short",
        THIRD,
        &[
            ("max(gpuwarden_quarantine_held_nodes)", "nodes held back"),
            ("max(gpuwarden_quarantine_paused)", "paused"),
            (
                "max(fault_quarantine_breaker_state{state=\"TRIPPED\"})",
                "breaker tripped",
            ),
        ],
    ),
    panel(
        "Time from the fault to out of service",
        Lines,
        "s",
        THIRD,
        &[
            (
                "histogram_quantile(0.5, sum by (le) \
             (rate(fault_quarantine_node_quarantine_duration_seconds_bucket[1h])))",
                "half of the nodes",
            ),
            (
                "histogram_quantile(0.99, sum by (le) \
             (rate(fault_quarantine_node_quarantine_duration_seconds_bucket[1h])))",
                "99% of the nodes",
            ),
        ],
    ),
    panel(
        "Remediations that ended, per hour",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (action, outcome) (rate(gpuwarden_remediation_attempts_total[$__rate_interval])) * 3600",
            "{{action}} {{outcome}}",
        )],
    ),
    panel(
        "Blind sources",
        Lines,
        "short",
        HALF,
        &[("count by (source) (gpuwarden_source_up == 0)", "{{source}}")],
    ),
    panel(
        "XID lines per hour, by code",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (err_code) (rate(syslog_health_monitor_xid_errors[$__rate_interval])) * 3600",
            "XID {{err_code}}",
        )],
    ),
    panel(
        "Taints of devices",
        Lines,
        "short",
        HALF,
        &[(
            "max by (taint_key, taint_effect) (gpuwarden_device_taints)",
            "{{taint_key}}:{{taint_effect}}",
        )],
    ),
];

const NODE: &[Panel] = &[
    panel(
        "Phase, and time in it",
        Table,
        "s",
        HALF,
        &[(
            "time() - max by (node, phase) (gpuwarden_node_phase_timestamp_seconds{node=~\"$node\"})",
            "",
        )],
    ),
    panel(
        "Out of service",
        BAD,
        "short",
        HALF,
        &[(
            "max by (node) (fault_quarantine_current_quarantined_nodes{node=~\"$node\"})",
            "{{node}}",
        )],
    ),
    panel(
        "Sources",
        GOOD,
        "short",
        HALF,
        &[(
            "min by (instance, source) (gpuwarden_source_up{instance=~\"$instance\"})",
            "{{instance}} {{source}}",
        )],
    ),
    panel(
        "XID lines per hour, by code",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (err_code) (rate(syslog_health_monitor_xid_errors{instance=~\"$instance\"}[$__rate_interval])) \
         * 3600",
            "XID {{err_code}}",
        )],
    ),
    panel(
        "Evictions of pods, and failed ones",
        Lines,
        "short",
        HALF,
        &[
            (
                "sum by (node) (rate(gpuwarden_drain_evictions_total{node=~\"$node\"}[$__rate_interval])) * 3600",
                "{{node}}",
            ),
            (
                "sum by (node, error_type) \
          (rate(node_drainer_processing_errors_total{node=~\"$node\"}[$__rate_interval])) * 3600",
                "{{node}} {{error_type}}",
            ),
        ],
    ),
    panel(
        "Maintenance of the janitor",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (node, action_type, status) (janitor_actions_count{node=~\"$node\"})",
            "{{node}} {{action_type}} {{status}}",
        )],
    ),
    panel(
        "Events that wait for the controller",
        Lines,
        "short",
        HALF,
        &[(
            "max by (instance) (gpuwarden_outbox_waiting_events{instance=~\"$instance\"})",
            "{{instance}}",
        )],
    ),
    panel(
        "Kernel log records",
        Lines,
        "ops",
        HALF,
        &[
            (
                "sum by (instance) (rate(gpuwarden_kernel_log_records_total{instance=~\"$instance\"}[$__rate_interval]))",
                "{{instance}} read",
            ),
            (
                "sum by (instance) \
          (rate(gpuwarden_kernel_log_lost_records_total{instance=~\"$instance\"}[$__rate_interval]))",
                "{{instance}} lost",
            ),
        ],
    ),
];

const GPU: &[Panel] = &[
    panel(
        "Temperature",
        Lines,
        "celsius",
        THIRD,
        &[(
            "gpuwarden_gpu_temperature_celsius{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Temperature of the memory",
        Lines,
        "celsius",
        THIRD,
        &[(
            "gpuwarden_gpu_memory_temperature_celsius{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Degrees until slow-down",
        Lines,
        "celsius",
        THIRD,
        &[(
            "gpuwarden_gpu_temperature_margin_celsius{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Power",
        Lines,
        "watt",
        THIRD,
        &[(
            "gpuwarden_gpu_power_watts{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Load",
        Lines,
        "percentunit",
        THIRD,
        &[(
            "gpuwarden_gpu_utilization_ratio{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Memory in use",
        Lines,
        "bytes",
        THIRD,
        &[(
            "gpuwarden_gpu_memory_used_bytes{instance=~\"$instance\",gpu=~\"$gpu\"}",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Share of time slowed down",
        Lines,
        "percentunit",
        THIRD,
        &[
            (
                "rate(gpuwarden_gpu_thermal_violation_seconds_total{instance=~\"$instance\",gpu=~\"$gpu\"}[$__rate_interval])",
                "{{instance}} GPU {{gpu}} heat",
            ),
            (
                "rate(gpuwarden_gpu_power_violation_seconds_total{instance=~\"$instance\",gpu=~\"$gpu\"}[$__rate_interval])",
                "{{instance}} GPU {{gpu}} power",
            ),
        ],
    ),
    panel(
        "Memory errors, since the driver was loaded",
        Lines,
        "short",
        THIRD,
        &[
            (
                "gpuwarden_gpu_ecc_uncorrected_volatile_total{instance=~\"$instance\",gpu=~\"$gpu\"}",
                "{{instance}} GPU {{gpu}} uncorrected",
            ),
            (
                "gpuwarden_gpu_ecc_corrected_volatile_total{instance=~\"$instance\",gpu=~\"$gpu\"}",
                "{{instance}} GPU {{gpu}} corrected",
            ),
        ],
    ),
    panel(
        "Remapped rows and retired pages",
        Lines,
        "short",
        THIRD,
        &[
            (
                "gpuwarden_gpu_remapped_rows_uncorrected{instance=~\"$instance\",gpu=~\"$gpu\"}",
                "{{instance}} GPU {{gpu}} rows",
            ),
            (
                "gpuwarden_gpu_remapped_rows_pending{instance=~\"$instance\",gpu=~\"$gpu\"}",
                "{{instance}} GPU {{gpu}} rows pending",
            ),
            (
                "gpuwarden_gpu_retired_pages_uncorrected{instance=~\"$instance\",gpu=~\"$gpu\"}",
                "{{instance}} GPU {{gpu}} pages",
            ),
        ],
    ),
    panel(
        "Links that are down",
        Lines,
        "short",
        THIRD,
        &[(
            "count by (instance, gpu) (gpuwarden_gpu_nvlink_up{instance=~\"$instance\",gpu=~\"$gpu\"} == 0)",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
    panel(
        "Replays on PCIe and NVLink",
        Lines,
        "ops",
        THIRD,
        &[
            (
                "rate(gpuwarden_gpu_pcie_replays_total{instance=~\"$instance\",gpu=~\"$gpu\"}[$__rate_interval])",
                "{{instance}} GPU {{gpu}} PCIe",
            ),
            (
                "sum by (instance, gpu) \
          (rate(gpuwarden_gpu_nvlink_replays_total{instance=~\"$instance\",gpu=~\"$gpu\"}[$__rate_interval]))",
                "{{instance}} GPU {{gpu}} NVLink",
            ),
        ],
    ),
    panel(
        "Recovery actions that the driver recommends",
        Lines,
        "short",
        THIRD,
        &[(
            "gpuwarden_gpu_recovery_action{instance=~\"$instance\",gpu=~\"$gpu\"} > 0",
            "{{instance}} GPU {{gpu}}",
        )],
    ),
];

const PREFLIGHT: &[Panel] = &[
    panel(
        "Pods by result of their admission",
        Lines,
        "ops",
        HALF,
        &[(
            "sum by (result) (rate(preflight_injection_total[$__rate_interval]))",
            "{{result}}",
        )],
    ),
    panel(
        "Time of an admission",
        Lines,
        "s",
        HALF,
        &[(
            "histogram_quantile(0.99, sum by (le) (rate(preflight_webhook_latency_seconds_bucket[$__rate_interval])))",
            "99%",
        )],
    ),
    panel(
        "Checks that ended, per hour",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (check, result) (rate(preflight_check_total[$__rate_interval])) * 3600",
            "{{check}} {{result}}",
        )],
    ),
    panel(
        "Failed checks by node and code",
        Table,
        "short",
        HALF,
        &[(
            "sum by (node, check, error_code) (preflight_check_failures_total)",
            "",
        )],
    ),
    panel(
        "Duration of checks",
        Lines,
        "s",
        HALF,
        &[(
            "histogram_quantile(0.9, sum by (le, check) (rate(preflight_check_duration_seconds_bucket[1h])))",
            "{{check}} 90%",
        )],
    ),
    panel(
        "Wait for a gang",
        Lines,
        "s",
        HALF,
        &[(
            "histogram_quantile(0.9, sum by (le) (rate(preflight_gang_wait_seconds_bucket[1h])))",
            "90%",
        )],
    ),
    panel(
        "Gangs",
        Lines,
        "short",
        HALF,
        &[
            ("max(gpuwarden_preflight_gangs)", "gangs"),
            ("max(gpuwarden_preflight_surplus_pods)", "surplus pods"),
            (
                "sum(gpuwarden_preflight_unreached_members_total)",
                "unreached members",
            ),
        ],
    ),
    panel(
        "Checks with an invalid setting",
        Lines,
        "short",
        HALF,
        &[(
            "sum by (error) (preflight_config_errors_total)",
            "{{error}}",
        )],
    ),
];
