//! Metrics of the connector, under NVSentinel's names where it has them.

use contract::HealthEvent;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::metrics::{BoundedFamily, Labels, Metrics};
use store::Appended;

use crate::{Reason, Refused};

/// Most combinations of check, node and codes that repeats are counted by. Senders choose
/// them, and each is kept until the process ends; what comes beyond counts as `other`.
const MAX_REPEAT_SERIES: usize = 2_000;
/// Longest value of a label; a longer one is counted as `other`, too.
const MAX_LABEL_BYTES: usize = 256;
/// The label of series beyond [`MAX_REPEAT_SERIES`].
const OTHER: &str = "other";

runtime::metrics! {
    /// Counts what comes in, and what becomes of it.
    #[derive(Clone)]
    pub(super) struct ConnectorMetrics {
        /// Health events received, valid or not.
        pub(super) received: Counter = "platform_connector_health_events_received",
        /// Health events stored.
        accepted: Counter = "gpuwarden_events_accepted",
        /// Health events that were stored before, such as a sender's retry.
        repeated: Counter = "gpuwarden_events_repeated",
        /// Health events refused: invalid, of a node that the sender may not speak for, too
        /// many in one request, or faster than users may report.
        refused: Family<Labels<1>, Counter> = "gpuwarden_events_refused",
        /// Metadata entries under gpuwarden.dev/ that senders of health events had chosen,
        /// and that were taken off.
        pub(super) metadata_taken_off: Counter = "gpuwarden_event_metadata_taken_off",
        /// Health events that the store did not take; their senders were told so.
        pub(super) not_stored: Counter = "gpuwarden_events_not_stored",
    }
}

runtime::metrics! {
    /// Counts what transformers do.
    pub(super) struct PipelineMetrics {
        /// Expressions of overrides that could not be evaluated for an event.
        pub(super) evaluation_errors: Counter = "nvsentinel_override_evaluation_errors",
        /// Repeats of stored events that were not stored, because the sink was full.
        pub(super) left_out: Counter = "gpuwarden_events_left_out",
        /// Faults that were let through unseen, for want of room.
        pub(super) not_remembered: Counter = "gpuwarden_dedup_not_remembered",
        /// Fields of events that overrides have changed.
        applied: Family<Labels<2, String>, Counter> = "nvsentinel_overrides_applied",
        /// Repeats that were stored to be analysed only (STORE_AND_ANALYSE), and open no fault.
        repeats: BoundedFamily<Labels<3, String>, Counter> =
            "nvsentinel_platform_connector_dedup_store_and_analyse"(
                MAX_REPEAT_SERIES,
                ["check", "node", "err_code"].map(|label| (label, OTHER.to_owned())),
            ),
        /// Events that lack what the cluster knows of their node.
        unaugmented: Family<Labels<1>, Counter> = "gpuwarden_events_unaugmented",
    }
}

// === impl ConnectorMetrics ===

impl ConnectorMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // From the start, so that an alert on the first refusal sees it grow from nought.
        for reason in ["invalid", "foreign_node", "too_many", "too_fast"] {
            own.not_taken(0, reason);
        }
        own
    }

    /// Counts what the sink has taken.
    pub(super) fn appended(&self, appended: &[Appended]) {
        let new = appended.iter().filter(|one| one.new).count();
        self.accepted.inc_by(new as u64);
        self.repeated.inc_by((appended.len() - new) as u64);
    }

    /// Counts events that were refused one by one.
    pub(super) fn refused(&self, refused: &[Refused]) {
        for one in refused {
            let reason = match one.reason {
                Reason::Invalid => "invalid",
                Reason::ForeignNode => "foreign_node",
            };
            self.not_taken(1, reason);
        }
    }

    /// Counts events of a batch that was refused as a whole.
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

    /// Counts an event that was kept from the reactions.
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
        let short = labels
            .iter()
            .all(|(_, value)| value.len() <= MAX_LABEL_BYTES);
        let counter = if short {
            self.repeats.get(&labels)
        } else {
            self.repeats.others()
        };
        counter.inc();
    }

    /// Counts an event that lacks what the cluster knows of its node.
    pub(super) fn unaugmented(&self, reason: &'static str) {
        self.unaugmented.get_or_create(&[("reason", reason)]).inc();
    }
}

#[cfg(test)]
mod tests {
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
}
