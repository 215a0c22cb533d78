//! Metrics of the analysis. Names without `gpuwarden_` are NVSentinel's.

use std::collections::BTreeMap;
use std::time::Duration;

use analysis::{Rule, Saying};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{BoundedFamily, Labels, LegacyCounter, Metrics};

/// Bounds of the time that an event takes (seconds): one takes some microseconds.
const BUCKETS: [f64; 8] = [0.000_005, 0.000_02, 0.000_1, 0.000_5, 0.002, 0.01, 0.1, 1.0];

/// Most series of a metric by node or device: names come from outside.
const MAX_SERIES: usize = 10_000;
/// Label of further ones.
const OTHERS: &str = "others";

runtime::metrics! {
    /// Counts events, conclusions and errors of the analysis.
    #[derive(Clone)]
    pub(super) struct AnalysisMetrics {
        /// Events taken from the feed.
        received: BoundedFamily<Labels<1, String>, Counter> =
            "health_event_analyzer_events_received" {node_name} (
                MAX_SERIES,
                [("node_name", OTHERS.to_owned())],
            ),
        /// Events recorded by the analysis.
        processed: Counter = "health_event_analyzer_events_successfully_processed",
        /// Errors of processing: `store_error`, `save_error`, `expression_error`.
        errors: Family<Labels<1>, LegacyCounter> =
            "health_event_analyzer_event_processing_errors" {error_type},
        /// Time that the analysis takes for one event.
        handling: Histogram = "health_event_analyzer_event_handling_duration_seconds"(BUCKETS),
        /// Conclusions reported, by rule and node.
        matched: BoundedFamily<Labels<2, String>, Counter> =
            "rule_matched" {rule_name, node_name} (
                MAX_SERIES,
                [("rule_name", OTHERS.to_owned()), ("node_name", OTHERS.to_owned())],
            ),
        /// Fatal conclusions reported, by the first entity that they name.
        published: BoundedFamily<Labels<1, String>, Counter> =
            "fatal_events_published" {entity_value} (
                MAX_SERIES,
                [("entity_value", OTHERS.to_owned())],
            ),
        /// Conclusions that could not be reported: `event_rejected`,
        /// `event_publishing_to_UDS_error`.
        publishing: Family<Labels<1>, LegacyCounter> = "fatal_event_publishing_errors" {error_type},
        /// Open conclusions, by rule.
        open: Family<Labels<1, String>, Gauge> = "gpuwarden_analysis_open_conclusions" {rule_name},
        /// Groups of events that are kept.
        groups: Gauge = "gpuwarden_analysis_groups",
        /// Events without effect on a rule, because too many groups are kept.
        refused: Gauge = "gpuwarden_analysis_refused_events",
        /// Stored events that the analysis has not read yet.
        backlog: Gauge = "gpuwarden_analysis_waiting_events",
        /// Nodes whose events were read again, because one came late.
        pub(super) rebuilds: Counter = "gpuwarden_analysis_rebuilds",
    }
}

runtime::metrics! {
    /// Counts readings of the rules.
    pub(super) struct RulesMetrics {
        /// Rules of the analysis read after the start: `loaded`, `rejected`, `missing`.
        results: Family<Labels<1>, Counter> = "gpuwarden_analysis_rules_reload" {result},
    }
}

// === impl RulesMetrics ===

impl RulesMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first rejection sees an increase from 0.
        for result in ["loaded", "rejected", "missing"] {
            drop(own.results.get_or_create(&[("result", result)]));
        }
        own
    }

    pub(super) fn read(&self, result: &'static str) {
        self.results.get_or_create(&[("result", result)]).inc();
    }
}

// === impl AnalysisMetrics ===

impl AnalysisMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first one sees an increase from 0.
        for kind in ["event_rejected", "event_publishing_to_UDS_error"] {
            drop(own.publishing.get_or_create(&[("error_type", kind)]));
        }
        own
    }

    pub(super) fn received(&self, node: &str) {
        let labels = [("node_name", node.to_owned())];
        self.received.get(&labels).inc();
    }

    pub(super) fn processed(&self, took: Duration) {
        self.processed.inc();
        self.handling.observe(took.as_secs_f64());
    }

    pub(super) fn error(&self, kind: &'static str) {
        self.errors.get_or_create(&[("error_type", kind)]).inc();
    }

    pub(super) fn publishing_error(&self, kind: &'static str) {
        self.publishing.get_or_create(&[("error_type", kind)]).inc();
    }

    /// Counts a reported conclusion.
    pub(super) fn said(&self, saying: &Saying) {
        if saying.finding.is_none() {
            return;
        }
        let event = &saying.event;
        let labels = [
            ("rule_name", event.check_name.clone()),
            ("node_name", event.node_name.clone()),
        ];
        self.matched.get(&labels).inc();
        if event.is_fatal {
            let entity = event.entities_impacted.first();
            let entity = entity.map(|entity| entity.entity_value.clone());
            let labels = [("entity_value", entity.unwrap_or_default())];
            self.published.get(&labels).inc();
        }
    }

    /// Sets the sizes of the state.
    pub(super) fn state(&self, groups: usize, refused: u64) {
        self.groups.set(i64::try_from(groups).unwrap_or(i64::MAX));
        self.refused.set(i64::try_from(refused).unwrap_or(i64::MAX));
    }

    /// Sets the number of stored events that are not read yet.
    pub(super) fn backlog(&self, events: u64) {
        self.backlog.set(i64::try_from(events).unwrap_or(i64::MAX));
    }

    /// Sets the number of open conclusions of each rule.
    pub(super) fn open<'a>(&self, rules: &[Rule], open: impl Iterator<Item = &'a str>) {
        let mut counts: BTreeMap<&str, i64> =
            rules.iter().map(|rule| (rule.name.as_str(), 0)).collect();
        for rule in open {
            *counts.entry(rule).or_default() += 1;
        }
        for (rule, count) in counts {
            let labels = [("rule_name", rule.to_owned())];
            self.open.get_or_create(&labels).set(count);
        }
    }
}
