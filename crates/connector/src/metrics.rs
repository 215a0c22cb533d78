//! Metrics of the connector, under NVSentinel's names where it has them.

use contract::HealthEvent;
use contract::preflight::{CheckResult, ReportCheckRequest};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{BoundedFamily, Group, Labels, Metrics};
use store::Appended;

use crate::{Reason, Refused};

/// Most combinations of check, node and codes in the count of repeats. Senders choose them, and
/// each is kept until the process ends; further ones count as `other`.
const MAX_REPEAT_SERIES: usize = 2_000;
/// Most series of each counter of preflight checks. Any user of the socket chooses their
/// labels, and each is kept until the process ends; further ones count as `other`. A node has a
/// few dozen combinations of checks and results, a connector for many nodes some hundreds.
const MAX_CHECK_SERIES: usize = 500;
/// Most series of each histogram of preflight checks, which has one line per bucket. There are
/// few checks; gangs are new with each job, and a node takes days to be part of as many.
const MAX_CHECK_HISTOGRAMS: usize = 100;
/// Longest value of a label (bytes); a longer one counts as `other`, too.
const MAX_LABEL_BYTES: usize = 256;
/// Label value for series beyond the limit.
const OTHER: &str = "other";
/// Upper bounds of the durations of checks and of the waits for gangs (seconds): around the
/// limits in the preflight documents (300 s for a check, 600 s for a gang, 3 h for the longest
/// diagnosis).
const CHECK_SECONDS: [f64; 11] = [
    1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 10800.0,
];

runtime::metrics! {
    /// Counts received events and their outcome.
    #[derive(Clone)]
    pub(super) struct ConnectorMetrics {
        /// Health events received, valid or not.
        pub(super) received: Counter = "platform_connector_health_events_received",
        /// Health events that were stored.
        accepted: Counter = "gpuwarden_events_accepted",
        /// Health events that were stored before, such as a sender's retry.
        repeated: Counter = "gpuwarden_events_repeated",
        /// Health events refused: `invalid`, `foreign_node` (about a node that the sender may not
        /// report on), `too_many` (in one request), `too_fast` (faster than users may report).
        refused: Family<Labels<1>, Counter> = "gpuwarden_events_refused" {reason},
        /// Metadata entries under `gpuwarden.dev/` that senders of health events had set, and
        /// that were removed.
        pub(super) metadata_taken_off: Counter = "gpuwarden_event_metadata_taken_off",
        /// Health events that the store did not accept; their senders got an error.
        pub(super) not_stored: Counter = "gpuwarden_events_not_stored",
    }
}

runtime::metrics! {
    /// Counts the work of transformers.
    pub(super) struct PipelineMetrics {
        /// Expressions of overrides that could not be evaluated for an event.
        pub(super) evaluation_errors: Counter = "nvsentinel_override_evaluation_errors",
        /// Repeats of stored events that were not stored, because the sink was full.
        pub(super) left_out: Counter = "gpuwarden_events_left_out",
        /// Faults that were let through without being remembered, for want of room.
        pub(super) not_remembered: Counter = "gpuwarden_dedup_not_remembered",
        /// Fields of events that overrides have changed.
        applied: Family<Labels<2, String>, Counter> =
            "nvsentinel_overrides_applied" {rule_name, field},
        /// Repeats that were stored to be analysed only (STORE_AND_ANALYSE), and open no fault.
        repeats: BoundedFamily<Labels<3, String>, Counter> =
            "nvsentinel_platform_connector_dedup_store_and_analyse" {check, node, err_code} (
                MAX_REPEAT_SERIES,
                others(["check", "node", "err_code"]),
            ),
        /// Events without the cluster's data about their node: `unknown_node`, or `no_room` for
        /// further data.
        unaugmented: Family<Labels<1>, Counter> = "gpuwarden_events_unaugmented" {reason},
    }
}

runtime::metrics! {
    /// Counts the preflight checks of pods, under the names of ADR-026.
    #[derive(Clone)]
    pub(super) struct PreflightMetrics {
        /// Preflight checks of pods that have ended: `passed`, `failed`, `not_tested` (nothing
        /// was tested, for a reason outside of the pod or by the result cache; the pod starts),
        /// `config_error`; `unknown` for results of a later version. A check that a signal ended
        /// is not counted.
        ended: BoundedFamily<Labels<2, String>, Counter> =
            "preflight_check" {check, result} (MAX_CHECK_SERIES, others(["check", "result"])),
        /// Duration of preflight checks that passed or failed.
        seconds: BoundedFamily<Labels<1, String>, Histogram> =
            "preflight_check_duration_seconds" {check} (
                MAX_CHECK_HISTOGRAMS,
                others(["check"]),
                check_seconds as fn() -> Histogram,
            ),
        /// Preflight checks that failed, each once, by the code of its termination message.
        failures: BoundedFamily<Labels<3, String>, Counter> =
            "preflight_check_failures" {check, node, error_code} (
                MAX_CHECK_SERIES,
                others(["check", "node", "error_code"]),
            ),
        /// Time until all members of a gang were known, by the gang's id. A gang that does not
        /// form is a failure `NCCL_GANG_TIMEOUT`.
        gang_waits: BoundedFamily<Labels<1, String>, Histogram> =
            "preflight_gang_wait_seconds" {workload} (
                MAX_CHECK_HISTOGRAMS,
                others(["workload"]),
                check_seconds as fn() -> Histogram,
            ),
        /// Preflight checks with an invalid setting, by the name of the variable;
        /// `CONFIGURATION` or `NCCL_GANG_CONFIG_ERROR` for other causes, such as a missing
        /// library.
        config_errors: BoundedFamily<Labels<1, String>, Counter> =
            "preflight_config_errors" {error} (MAX_CHECK_SERIES, others(["error"])),
    }
}

/// Returns the descriptions of the metrics of this file.
pub(super) fn described() -> [Group; 2] {
    let events = ConnectorMetrics::described().into_iter();
    [
        Group::new("events", events.chain(PipelineMetrics::described())),
        Group::new("preflight-checks", PreflightMetrics::described()),
    ]
}

/// Returns the labels of the series for everything beyond the limit.
fn others<const N: usize>(names: [&'static str; N]) -> Labels<N, String> {
    names.map(|name| (name, OTHER.to_owned()))
}

fn check_seconds() -> Histogram {
    Histogram::new(CHECK_SECONDS)
}

/// Returns the metric with labels chosen by a sender.
fn chosen<const N: usize, M: Clone>(
    family: &BoundedFamily<Labels<N, String>, M>,
    labels: &Labels<N, String>,
) -> M {
    let mut values = labels.iter().map(|(_, value)| value);
    if values.all(|value| value.len() <= MAX_LABEL_BYTES) {
        family.get(labels)
    } else {
        family.others()
    }
}

// === impl ConnectorMetrics ===

impl ConnectorMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first refusal sees the count grow from
        // zero.
        for reason in ["invalid", "foreign_node", "too_many", "too_fast"] {
            own.not_taken(0, reason);
        }
        own
    }

    /// Counts events that the sink has stored.
    pub(super) fn appended(&self, appended: &[Appended]) {
        let new = appended.iter().filter(|one| one.new).count();
        self.accepted.inc_by(new as u64);
        self.repeated.inc_by((appended.len() - new) as u64);
    }

    /// Counts events that were refused individually.
    pub(super) fn refused(&self, refused: &[Refused]) {
        for one in refused {
            let reason = match one.reason {
                Reason::Invalid => "invalid",
                Reason::ForeignNode => "foreign_node",
            };
            self.not_taken(1, reason);
        }
    }

    /// Counts the events of a batch that was refused as a whole.
    pub(super) fn not_taken(&self, found: usize, reason: &'static str) {
        let counter = self.refused.get_or_create(&[("reason", reason)]);
        counter.inc_by(found as u64);
    }
}

// === impl PipelineMetrics ===

impl PipelineMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        for reason in ["unknown_node", "no_room"] {
            drop(own.unaugmented.get_or_create(&[("reason", reason)]));
        }
        own
    }

    /// Counts the fields that a rule has changed.
    pub(super) fn applied(&self, rule: &str, fields: &[&'static str]) {
        for field in fields {
            let labels = [
                ("rule_name", rule.to_owned()),
                ("field", (*field).to_owned()),
            ];
            self.applied.get_or_create(&labels).inc();
        }
    }

    /// Counts an event that was withheld from reactions.
    pub(super) fn repeat(&self, event: &HealthEvent) {
        let mut codes = event.error_code.clone();
        codes.sort();
        let err_code = if codes.is_empty() {
            "none".to_owned()
        } else {
            codes.join(",")
        };
        let labels = [
            ("check", event.check_name.clone()),
            ("node", event.node_name.clone()),
            ("err_code", err_code),
        ];
        chosen(&self.repeats, &labels).inc();
    }

    /// Counts an event that lacks the cluster's data about its node.
    pub(super) fn unaugmented(&self, reason: &'static str) {
        self.unaugmented.get_or_create(&[("reason", reason)]).inc();
    }
}

// === impl PreflightMetrics ===

impl PreflightMetrics {
    /// Counts a finished check on a node.
    pub(super) fn count(&self, report: &ReportCheckRequest, node: &str) {
        let result = match CheckResult::try_from(report.result) {
            Ok(CheckResult::Passed) => "passed",
            Ok(CheckResult::Failed) => "failed",
            Ok(CheckResult::NotTested) => "not_tested",
            Ok(CheckResult::ConfigError) => "config_error",
            // A newer check may send results that this version does not know.
            Ok(CheckResult::Unspecified) | Err(_) => "unknown",
        };
        let check = || ("check", report.check.clone());
        chosen(&self.ended, &[check(), ("result", result.to_owned())]).inc();
        if let Some(seconds) = report.seconds {
            chosen(&self.seconds, &[check()]).observe(seconds);
        }
        let error = if report.error.is_empty() {
            "none".to_owned()
        } else {
            report.error.clone()
        };
        match result {
            "failed" => {
                let labels = [check(), ("node", node.to_owned()), ("error_code", error)];
                chosen(&self.failures, &labels).inc();
            }
            "config_error" => drop(chosen(&self.config_errors, &[("error", error)]).inc()),
            _ => {}
        }
        if let Some(wait) = &report.gang_wait {
            let labels = [("workload", wait.gang_id.clone())];
            chosen(&self.gang_waits, &labels).observe(wait.seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use contract::preflight::GangWait;

    use super::*;

    #[test]
    fn senders_cannot_make_series_without_end() {
        let metrics = Metrics::default();
        let own = PipelineMetrics::new(&metrics);
        let repeat = |check_name: String| {
            own.repeat(&HealthEvent {
                check_name,
                ..HealthEvent::default()
            });
        };
        repeat("x".repeat(MAX_LABEL_BYTES + 1));
        for check in 0..MAX_REPEAT_SERIES + 10 {
            repeat(check.to_string());
        }
        let text = metrics.encode();
        let name = "nvsentinel_platform_connector_dedup_store_and_analyse_total{";
        let series: Vec<&str> = text.lines().filter(|line| line.starts_with(name)).collect();
        assert_eq!(series.len(), MAX_REPEAT_SERIES + 1);
        let beyond = format!("{name}check=\"other\",node=\"other\",err_code=\"other\"}} 11");
        assert!(series.contains(&beyond.as_str()), "{text}");
    }

    fn series<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
        let name = format!("{name}{{");
        text.lines()
            .filter(|line| line.starts_with(&name))
            .collect()
    }

    #[test]
    fn checks_cannot_make_series_without_end() {
        let metrics = Metrics::default();
        let own = PreflightMetrics::registered(&metrics);
        let report = |name: &str, result: CheckResult| ReportCheckRequest {
            check: name.to_owned(),
            result: result as i32,
            error: name.to_owned(),
            seconds: Some(2.0),
            gang_wait: Some(GangWait {
                gang_id: name.to_owned(),
                seconds: 2.0,
            }),
            ..ReportCheckRequest::default()
        };
        let names = (0..MAX_CHECK_SERIES).map(|name| name.to_string());
        for name in names.chain(["x".repeat(MAX_LABEL_BYTES + 1)]) {
            for result in [CheckResult::Failed, CheckResult::ConfigError] {
                own.count(&report(&name, result), "n1");
            }
        }
        // Labels that were counted before stay.
        own.count(&report("0", CheckResult::Failed), "n1");
        let text = metrics.encode();
        for (name, most) in [
            ("preflight_check_total", MAX_CHECK_SERIES),
            ("preflight_check_failures_total", MAX_CHECK_SERIES),
            ("preflight_config_errors_total", MAX_CHECK_SERIES),
            (
                "preflight_check_duration_seconds_count",
                MAX_CHECK_HISTOGRAMS,
            ),
            ("preflight_gang_wait_seconds_count", MAX_CHECK_HISTOGRAMS),
        ] {
            assert_eq!(series(&text, name).len(), most + 1, "{name}");
        }
        for line in [
            "preflight_check_failures_total{check=\"0\",node=\"n1\",error_code=\"0\"} 2",
            "preflight_check_failures_total{check=\"other\",node=\"other\",error_code=\"other\"} 1",
            "preflight_config_errors_total{error=\"other\"} 1",
            "preflight_gang_wait_seconds_bucket{le=\"5.0\",workload=\"0\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn what_nobody_knows_yet_is_counted_as_that() {
        let metrics = Metrics::default();
        let own = PreflightMetrics::registered(&metrics);
        let report = ReportCheckRequest {
            check: "c".to_owned(),
            result: 77,
            ..ReportCheckRequest::default()
        };
        own.count(&report, "n1");
        let failed = CheckResult::Failed as i32;
        own.count(
            &ReportCheckRequest {
                result: failed,
                ..report
            },
            "n1",
        );
        let text = metrics.encode();
        assert_eq!(series(&text, "preflight_check_total").len(), 2, "{text}");
        assert!(
            text.contains("{check=\"c\",result=\"unknown\"} 1"),
            "{text}"
        );
        assert!(text.contains("error_code=\"none\"} 1"), "{text}");
        assert!(series(&text, "preflight_check_duration_seconds_count").is_empty());
    }
}
