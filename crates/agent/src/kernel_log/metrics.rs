//! Metrics of the kernel-log monitor, in addition to those of each monitor. Names that start with
//! `syslog_health_monitor` are NVSentinel's.

use std::time::Duration;

use diagnosis::decode::{Finding, FindingKind};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{BoundedFamily, Description, Kind, Labels, LegacyCounter, Metrics};

/// Most XID codes, and most combinations of code, switch and link of `SXid`s, with a series of
/// their own. The catalogue has 172 codes, and of a machine's six switches with 64 links each,
/// few fail; but a line may have any number, and each series is kept until the process ends.
/// Further ones count as `other`.
const MAX_SERIES: usize = 1_000;
/// Label value of lines beyond [`MAX_SERIES`].
const OTHER: &str = "other";

pub(super) struct KernelLogMetrics {
    node: String,
    xids: BoundedFamily<Labels<2, String>, LegacyCounter>,
    sxids: BoundedFamily<Labels<4, String>, LegacyCounter>,
    lines: LineMetrics,
    /// Events that the connector refused because of their content.
    pub(super) refused: LegacyCounter,
    garbled: LegacyCounter,
}

runtime::metrics! {
    /// Metrics of lines, without those whose `other` series has the node's name.
    struct LineMetrics {
        /// Lines of NIC drivers by pattern; `severity` is `fatal` or `non_fatal`.
        nics: Family<Labels<3, String>, LegacyCounter> =
            "syslog_health_monitor_nic_driver_errors" {node, event, severity},
        /// Lines about a GPU that has fallen off the bus, without XID.
        fallen: Family<Labels<1, String>, LegacyCounter> =
            "syslog_health_monitor_gpu_fallen_errors" {node},
        /// Lines that could not be read (`line_garbled`) and events that were refused
        /// (`event_refused`).
        errors: Family<Labels<2, String>, LegacyCounter>
            = "syslog_health_monitor_xid_processing_errors" {node, error_type},
        /// Time to decode a line that is a fault.
        latency: Histogram = "syslog_health_monitor_xid_processing_latency_seconds"(
            [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
        ),
        /// Kernel log records that were left out because a program wrote them.
        user_space: Counter = "gpuwarden_kernel_log_user_space_records",
    }
}

/// Returns the descriptions of the counters of lines by code.
fn by_code() -> [Description; 2] {
    let described = |name, labels, help| Description::new(Kind::LegacyCounter, name, labels, help);
    [
        described(
            "syslog_health_monitor_xid_errors",
            &["node", "err_code"],
            "XID lines by code",
        ),
        described(
            "syslog_health_monitor_sxid_errors",
            &["node", "err_code", "link", "nvswitch"],
            "SXid lines by code, switch and link",
        ),
    ]
}

impl KernelLogMetrics {
    /// Returns the descriptions of all metrics of this file.
    pub(super) fn described() -> Vec<Description> {
        by_code()
            .into_iter()
            .chain(LineMetrics::described())
            .collect()
    }

    pub(super) fn new(metrics: &Metrics, node: &str) -> Self {
        let node_label = || ("node", node.to_owned());
        let other = |label: &'static str| (label, OTHER.to_owned());
        let lines = LineMetrics::registered(metrics);
        // Created at the start, so that the first error shows as a rise from 0.
        let error = |error_type: &str| {
            let labels = [node_label(), ("error_type", error_type.to_owned())];
            lines.errors.get_or_create_owned(&labels)
        };
        let [xids, sxids] = by_code();
        let (refused, garbled) = (error("event_refused"), error("line_garbled"));
        Self {
            node: node.to_owned(),
            xids: metrics.bounded_family(&xids, MAX_SERIES, [node_label(), other("err_code")]),
            sxids: metrics.bounded_family(
                &sxids,
                MAX_SERIES,
                [
                    node_label(),
                    other("err_code"),
                    other("link"),
                    other("nvswitch"),
                ],
            ),
            lines,
            refused,
            garbled,
        }
    }

    /// Counts a record that was ignored because a program wrote it.
    pub(super) fn user_space(&self) {
        self.lines.user_space.inc();
    }

    /// Counts XID and `SXid` lines that could not be parsed.
    pub(super) fn garbled(&self, lines: u64) {
        for _ in 0..lines {
            self.garbled.inc();
        }
    }

    pub(super) fn found(&self, finding: &Finding, took: Duration) {
        self.lines.latency.observe(took.as_secs_f64());
        let node = ("node", self.node.clone());
        match &finding.kind {
            FindingKind::Xid { code, .. } => {
                self.xids.get(&[node, ("err_code", code.to_string())]).inc();
            }
            FindingKind::Sxid { code, switch } => {
                let link = finding.parts.first().map(|(_, link)| link.clone());
                let switch = switch.map(|switch| switch.to_string());
                let labels = [
                    node,
                    ("err_code", code.to_string()),
                    ("link", link.unwrap_or_default()),
                    ("nvswitch", switch.unwrap_or_default()),
                ];
                self.sxids.get(&labels).inc();
            }
            FindingKind::Nic { pattern, .. } => {
                let severity = if finding.fatal { "fatal" } else { "non_fatal" };
                let labels = [
                    node,
                    ("event", pattern.clone()),
                    ("severity", severity.to_owned()),
                ];
                self.lines.nics.get_or_create(&labels).inc();
            }
            // NVSentinel does not count these.
            FindingKind::Reset | FindingKind::InitFailed => {}
            FindingKind::FallenOffBus { .. } => {
                self.lines.fallen.get_or_create(&[node]).inc();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use diagnosis::decode::KernelLogDecoder;
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn lines_cannot_make_series_without_end() {
        let metrics = Metrics::default();
        let own = KernelLogMetrics::new(&metrics, "n1");
        let mut decoder = KernelLogDecoder::default();
        let mut read = |line: &str| {
            for finding in decoder.record(line.as_bytes(), Timestamp::UNIX_EPOCH) {
                own.found(&finding, Duration::ZERO);
            }
        };
        for code in 0..2 * MAX_SERIES {
            read(&format!("NVRM: Xid (PCI:0000:b3:00): {code}, x"));
            read(&format!(
                "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link {code} x"
            ));
        }
        // A known series still counts.
        read("NVRM: Xid (PCI:0000:b3:00): 79, x");
        let text = metrics.encode();
        for (name, other) in [
            ("syslog_health_monitor_xid_errors{", "err_code=\"other\""),
            ("syslog_health_monitor_sxid_errors{", "nvswitch=\"other\""),
        ] {
            let series: Vec<&str> = text.lines().filter(|line| line.starts_with(name)).collect();
            assert_eq!(series.len(), MAX_SERIES + 1, "{name}");
            let beyond = series.iter().find(|line| line.contains(other)).unwrap();
            assert!(beyond.ends_with(&format!(" {MAX_SERIES}")), "{beyond}");
        }
        let known = "syslog_health_monitor_xid_errors{node=\"n1\",err_code=\"79\"} 2";
        assert!(text.contains(known), "{text}");
    }
}
