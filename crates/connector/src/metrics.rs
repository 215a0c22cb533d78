//! Metrics of the connector, under NVSentinel's names where it has them.

use contract::HealthEvent;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::metrics::{BoundedFamily, Metrics};
use runtime::work_queue::WorkQueue;
use store::Appended;

use crate::{Reason, Refused};

/// Most combinations of check, node and codes that repeats are counted by. Senders choose
/// them, and each is kept until the process ends; what comes beyond counts as `other`.
const MAX_REPEAT_SERIES: usize = 2_000;
/// Longest value of a label; a longer one is counted as `other`, too.
const MAX_LABEL_BYTES: usize = 256;
/// Beyond [`MAX_REPEAT_SERIES`].
const OTHER: &str = "other";
/// NVSentinel's queue before its store. Here a call waits until its events are stored.
const QUEUE: &str = "databaseStore";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RuleLabels {
    rule_name: String,
    field: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RepeatLabels {
    check: String,
    node: String,
    err_code: String,
}

#[derive(Clone)]
pub(super) struct ConnectorMetrics {
    /// Events received, good or bad.
    pub(super) received: Counter,
    accepted: Counter,
    repeated: Counter,
    refused: Family<ReasonLabels, Counter>,
    /// Metadata entries that only we may write, taken off events of others.
    pub(super) metadata_taken_off: Counter,
    /// Events that the sink did not take.
    pub(super) not_stored: Counter,
    /// Batches from the end of their checks until they are stored, or are known not to be.
    pub(super) queue: WorkQueue,
}

pub(super) struct PipelineMetrics {
    /// Rules of overrides that could not be evaluated.
    pub(super) evaluation_errors: Counter,
    /// Repeats that were left out because the sink was full.
    pub(super) left_out: Counter,
    /// Faults that the deduplicator had no room for.
    pub(super) not_remembered: Counter,
    applied: Family<RuleLabels, Counter>,
    repeats: BoundedFamily<RepeatLabels, Counter>,
    unaugmented: Family<ReasonLabels, Counter>,
}

// === impl ConnectorMetrics ===

impl ConnectorMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self {
            received: Counter::default(),
            accepted: Counter::default(),
            repeated: Counter::default(),
            refused: Family::default(),
            metadata_taken_off: Counter::default(),
            not_stored: Counter::default(),
            queue: WorkQueue::new(metrics, QUEUE, "batches of events for the store"),
        };
        // From the start, so that an alert on the first refusal sees it grow from nought.
        for reason in ["invalid", "foreign_node", "too_many", "too_fast"] {
            drop(own.refused.get_or_create(&ReasonLabels { reason }));
        }
        metrics.register(|registry| {
            registry.register(
                "platform_connector_health_events_received",
                "Health events received, valid or not",
                own.received.clone(),
            );
            registry.register(
                "gpuwarden_events_accepted",
                "Health events stored",
                own.accepted.clone(),
            );
            registry.register(
                "gpuwarden_events_repeated",
                "Health events that were stored before, such as a sender's retry",
                own.repeated.clone(),
            );
            registry.register(
                "gpuwarden_events_refused",
                "Health events refused: invalid, of a node that the sender may not speak for, too \
                 many in one request, or faster than users may report",
                own.refused.clone(),
            );
            registry.register(
                "gpuwarden_event_metadata_taken_off",
                "Metadata entries under gpuwarden.dev/ that senders of health events had chosen, \
                 and that were taken off",
                own.metadata_taken_off.clone(),
            );
            registry.register(
                "gpuwarden_events_not_stored",
                "Health events that the store did not take; their senders were told so",
                own.not_stored.clone(),
            );
        });
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
            self.refused.get_or_create(&ReasonLabels { reason }).inc();
        }
    }

    /// Counts events of a batch that was refused as a whole.
    pub(super) fn not_taken(&self, found: usize, reason: &'static str) {
        let counter = self.refused.get_or_create(&ReasonLabels { reason });
        counter.inc_by(found as u64);
    }
}

// === impl PipelineMetrics ===

impl PipelineMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self {
            evaluation_errors: Counter::default(),
            left_out: Counter::default(),
            not_remembered: Counter::default(),
            applied: Family::default(),
            repeats: BoundedFamily::new(
                MAX_REPEAT_SERIES,
                RepeatLabels {
                    check: OTHER.to_owned(),
                    node: OTHER.to_owned(),
                    err_code: OTHER.to_owned(),
                },
            ),
            unaugmented: Family::default(),
        };
        for reason in ["unknown_node", "no_room"] {
            drop(own.unaugmented.get_or_create(&ReasonLabels { reason }));
        }
        metrics.register(|registry| {
            registry.register(
                "nvsentinel_overrides_applied",
                "Fields of events that overrides have changed",
                own.applied.clone(),
            );
            registry.register(
                "nvsentinel_override_evaluation_errors",
                "Expressions of overrides that could not be evaluated for an event",
                own.evaluation_errors.clone(),
            );
            registry.register(
                "nvsentinel_platform_connector_dedup_store_and_analyse",
                "Repeats that were stored to be analysed only (STORE_AND_ANALYSE), and open no fault",
                own.repeats.family(),
            );
            registry.register(
                "gpuwarden_dedup_not_remembered",
                "Faults that were let through unseen, for want of room",
                own.not_remembered.clone(),
            );
            registry.register(
                "gpuwarden_events_left_out",
                "Repeats of stored events that were not stored, because the sink was full",
                own.left_out.clone(),
            );
            registry.register(
                "gpuwarden_events_unaugmented",
                "Events that lack what the cluster knows of their node",
                own.unaugmented.clone(),
            );
        });
        own
    }

    /// Counts the fields that a rule has changed.
    pub(super) fn applied(&self, rule: &str, fields: &[&'static str]) {
        for field in fields {
            let labels = RuleLabels {
                rule_name: rule.to_owned(),
                field,
            };
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
        let labels = [&event.check_name, &event.node_name, &err_code];
        let short = labels.iter().all(|label| label.len() <= MAX_LABEL_BYTES);
        let counter = if short {
            self.repeats.get(&RepeatLabels {
                check: event.check_name.clone(),
                node: event.node_name.clone(),
                err_code,
            })
        } else {
            self.repeats.others()
        };
        counter.inc();
    }

    /// Counts an event that lacks what the cluster knows of its node.
    pub(super) fn unaugmented(&self, reason: &'static str) {
        let labels = ReasonLabels { reason };
        self.unaugmented.get_or_create(&labels).inc();
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
