//! Panels about gpuwarden itself.

use super::super::Panel;
use super::super::PanelKind::{Lines, Numbers, Table};
use super::{HALF, NEUTRAL, THIRD, panel};

pub(super) const PANELS: &[Panel] = &[
    panel(
        "Processes by role and version",
        Numbers,
        "short",
        HALF,
        &[(
            "count by (role, version) (gpuwarden_build_info)",
            "{{role}} {{version}}",
        )],
    ),
    panel(
        "Leader",
        NEUTRAL,
        "short",
        HALF,
        &[(
            "max by (instance) (leader_election_master_status)",
            "{{instance}}",
        )],
    ),
    panel(
        "Events",
        Lines,
        "ops",
        HALF,
        &[
            (
                "sum(rate(gpuwarden_events_accepted_total[$__rate_interval]))",
                "stored",
            ),
            (
                "sum(rate(gpuwarden_events_repeated_total[$__rate_interval]))",
                "repeated",
            ),
            (
                "sum(rate(gpuwarden_events_not_stored_total[$__rate_interval]))",
                "not stored",
            ),
            (
                "sum by (reason) (rate(gpuwarden_events_refused_total[$__rate_interval]))",
                "refused: {{reason}}",
            ),
        ],
    ),
    panel(
        "Events that wait for a decision",
        Lines,
        "short",
        HALF,
        &[(
            "max by (instance) (fault_quarantine_event_backlog_count)",
            "{{instance}}",
        )],
    ),
    panel(
        "Time from reading an event to its decision",
        Lines,
        "s",
        HALF,
        &[(
            "histogram_quantile(0.99, sum by (le) \
         (rate(fault_quarantine_event_handling_duration_seconds_bucket[$__rate_interval])))",
            "99%",
        )],
    ),
    panel(
        "Events that wait for the analysis",
        Lines,
        "short",
        THIRD,
        &[(
            "max by (instance) (gpuwarden_analysis_waiting_events)",
            "{{instance}}",
        )],
    ),
    panel(
        "Open conclusions, by rule",
        Lines,
        "short",
        THIRD,
        &[(
            "max by (rule_name) (gpuwarden_analysis_open_conclusions) > 0",
            "{{rule_name}}",
        )],
    ),
    panel(
        "Analysis: groups, refused events, rebuilds per hour",
        Lines,
        "short",
        THIRD,
        &[
            ("max(gpuwarden_analysis_groups)", "groups"),
            ("max(gpuwarden_analysis_refused_events)", "refused"),
            (
                "sum(rate(gpuwarden_analysis_rebuilds_total[$__rate_interval])) * 3600",
                "rebuilds",
            ),
        ],
    ),
    panel(
        "Requests to the API server",
        Lines,
        "ops",
        HALF,
        &[
            (
                "sum(rate(gpuwarden_api_server_requests_total[$__rate_interval]))",
                "sent",
            ),
            (
                "sum(rate(gpuwarden_api_server_requests_throttled_total[$__rate_interval]))",
                "throttled",
            ),
            (
                "sum(rate(gpuwarden_api_server_requests_failed_total[$__rate_interval]))",
                "failed",
            ),
        ],
    ),
    panel(
        "Store",
        Lines,
        "bytes",
        HALF,
        &[
            (
                "max by (instance) (gpuwarden_store_excess_bytes)",
                "{{instance}} beyond the limit",
            ),
            (
                "max by (instance) (gpuwarden_outbox_bytes)",
                "{{instance}} outbox",
            ),
        ],
    ),
    panel(
        "Errors",
        Lines,
        "ops",
        HALF,
        &[
            (
                "sum by (error_type) (rate(fault_quarantine_processing_errors_total[$__rate_interval]))",
                "quarantine: {{error_type}}",
            ),
            (
                "sum by (code) (rate(gpuwarden_delivery_failures_total[$__rate_interval]))",
                "delivery: {{code}}",
            ),
            (
                "sum(rate(gpuwarden_log_lines_lost_total[$__rate_interval]))",
                "log lines lost",
            ),
        ],
    ),
    panel(
        "Time until certificates end",
        Table,
        "s",
        HALF,
        &[(
            "min by (instance, file) (gpuwarden_certificate_expiry_timestamp_seconds) - time()",
            "",
        )],
    ),
    panel(
        "Policies and rules read",
        Lines,
        "short",
        HALF,
        &[
            (
                "sum by (result) (gpuwarden_policy_reload_total)",
                "policy: {{result}}",
            ),
            (
                "sum by (result) (gpuwarden_analysis_rules_reload_total)",
                "rules: {{result}}",
            ),
        ],
    ),
];
