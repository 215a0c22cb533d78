//! Exports the readings of the GPUs, and counters of the processes that read them. The readings
//! are those of the last poll: a GPU that is gone, or a missing value, has no series.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use diagnosis::gpu::{Inventory, NvlinkReadings, Readings, RecoveryAction};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge as Current;
use runtime::metrics::{Description, Kind, Labels, Metrics};

use super::probe::MOST_STUCK;

/// Value of a GPU or a link: kind, name, help, and a function for the value, if any.
type Value<T> = (Kind, &'static str, &'static str, fn(&T) -> Option<f64>);

/// Values of a GPU, in Prometheus' base units.
const OF_GPU: [Value<Readings>; 26] = [
    (
        Kind::Gauge,
        "gpuwarden_gpu_temperature_celsius",
        "Temperature of the GPU",
        |it| small(it.temperature_c),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_memory_temperature_celsius",
        "Temperature of the GPU's memory",
        |it| small(it.memory_temperature_c),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_temperature_margin_celsius",
        "Degrees until the GPU slows down",
        |it| small(it.margin_c),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_power_watts",
        "Power that the GPU draws",
        |it| Some(whole(it.power_mw)? / 1e3),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_power_limit_watts",
        "Limit of the GPU's power that is enforced",
        |it| Some(whole(it.power_limit_mw)? / 1e3),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_clock_reasons",
        "Why the clocks are below what they could be, as the bits of NVML",
        |it| whole(it.clock_reasons),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_thermal_violation_seconds",
        "Time for which heat has slowed the GPU down",
        |it| Some(whole(it.thermal_violation_ns)? / 1e9),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_power_violation_seconds",
        "Time for which the power limit has slowed the GPU down",
        |it| Some(whole(it.power_violation_ns)? / 1e9),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_utilization_ratio",
        "Load of the GPU; 1 is full",
        |it| Some(small(it.utilization_percent)? / 100.0),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_memory_used_bytes",
        "Memory of the GPU that is in use",
        |it| whole(it.memory_used_bytes),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_ecc_corrected_volatile",
        "Memory errors that were corrected, since the driver was loaded",
        |it| whole(it.ecc_corrected_volatile),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_ecc_uncorrected_volatile",
        "Memory errors that were not corrected, since the driver was loaded",
        |it| whole(it.ecc_uncorrected_volatile),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_ecc_corrected_aggregate",
        "Memory errors that were corrected, in the life of the GPU",
        |it| whole(it.ecc_corrected_aggregate),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_ecc_uncorrected_aggregate",
        "Memory errors that were not corrected, in the life of the GPU",
        |it| whole(it.ecc_uncorrected_aggregate),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_retired_pages_corrected",
        "Memory pages retired because of corrected errors",
        |it| small(it.retired_pages_sbe),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_retired_pages_uncorrected",
        "Memory pages retired because of uncorrected errors",
        |it| small(it.retired_pages_dbe),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_retired_pages_pending",
        "1 if memory pages wait for their retirement",
        |it| flag(it.retired_pages_pending),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_remapped_rows_corrected",
        "Memory rows remapped because of corrected errors",
        |it| small(it.remapped_rows_correctable),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_remapped_rows_uncorrected",
        "Memory rows remapped because of uncorrected errors",
        |it| small(it.remapped_rows_uncorrectable),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_remapped_rows_pending",
        "1 if memory rows wait to be remapped",
        |it| flag(it.remap_pending),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_remapped_rows_failed",
        "1 if a memory row could not be remapped",
        |it| flag(it.remap_failed),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_sram_threshold_exceeded",
        "1 if the on-chip memory has had too many errors",
        |it| flag(it.sram_threshold_exceeded),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_pcie_replays",
        "Replays on the PCIe link",
        |it| whole(it.pcie_replays),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_pcie_generation",
        "Generation at which the PCIe link runs",
        |it| small(it.pcie_generation),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_pcie_width",
        "Lanes of the PCIe link that are in use",
        |it| small(it.pcie_width),
    ),
    (
        Kind::Gauge,
        "gpuwarden_gpu_recovery_action",
        "Recovery action that the driver recommends for the GPU, as the number of NVML; 0 is none",
        |it| small(it.recovery_action.map(RecoveryAction::number)),
    ),
];

/// Values of a link of a GPU.
const OF_LINK: [Value<NvlinkReadings>; 5] = [
    (
        Kind::Gauge,
        "gpuwarden_gpu_nvlink_up",
        "1 if the NVLink is up",
        |it| flag(it.up),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_nvlink_replays",
        "Replays on the NVLink",
        |it| whole(it.replays),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_nvlink_recoveries",
        "Recoveries of the NVLink",
        |it| whole(it.recoveries),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_nvlink_crc_errors",
        "Wrong checksums of the NVLink",
        |it| whole(it.crc_errors),
    ),
    (
        Kind::Counter,
        "gpuwarden_gpu_nvlink_effective_errors",
        "Errors of the NVLink after correction",
        |it| whole(it.effective_errors),
    ),
];

runtime::metrics! {
    /// Counts the processes that query GPUs, by source.
    pub(super) struct ProbeMetrics {
        /// Restarts of the process that queries the GPUs.
        restarts: Family<Labels<1>, Counter> = "gpuwarden_gpu_probe_restarts" {source},
        /// Processes that query the GPUs and cannot be ended.
        stuck: Family<Labels<1>, Current> = "gpuwarden_gpu_probe_stuck" {source},
    }
}

/// Readings of the present GPUs. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuMetrics {
    shown: Arc<Mutex<Vec<ShownGpu>>>,
}

#[derive(Debug)]
struct ShownGpu {
    labels: [(&'static str, String); 2],
    readings: Readings,
}

// === impl ProbeMetrics ===

impl ProbeMetrics {
    /// Counts an interruption, and records the number of processes that cannot be killed.
    pub(super) fn blind(&self, source: &'static str, stuck: usize) {
        let source = [("source", source)];
        if stuck < MOST_STUCK {
            self.restarts.get_or_create(&source).inc();
        }
        let stuck = i64::try_from(stuck).unwrap_or(i64::MAX);
        self.stuck.get_or_create(&source).set(stuck);
    }
}

// === impl GpuMetrics ===

impl GpuMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.collect_from(own.clone());
        own
    }

    /// Sets the values from a poll.
    pub(super) fn show(&self, inventory: &Inventory, readings: &[Readings]) {
        let shown = inventory.gpus.iter().filter_map(|gpu| {
            let read = readings.iter().find(|read| read.uuid == gpu.uuid)?;
            Some(ShownGpu {
                labels: [("gpu", gpu.index.to_string()), ("uuid", gpu.uuid.clone())],
                readings: read.clone(),
            })
        });
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown.collect();
    }
}

impl Collector for GpuMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.is_empty() {
            return Ok(());
        }
        for (kind, name, help, value) in OF_GPU {
            let of_kind = metric_type(kind);
            let mut metric = encoder.encode_descriptor(name, help, None, of_kind)?;
            for gpu in shown.iter() {
                if let Some(value) = value(&gpu.readings) {
                    encode(kind, metric.encode_family(&gpu.labels)?, value)?;
                }
            }
        }
        for (kind, name, help, value) in OF_LINK {
            let of_kind = metric_type(kind);
            let mut metric = encoder.encode_descriptor(name, help, None, of_kind)?;
            for gpu in shown.iter() {
                for link in &gpu.readings.nvlinks {
                    let labels = (gpu.labels.clone(), [("link", link.link.to_string())]);
                    if let Some(value) = value(link) {
                        encode(kind, metric.encode_family(&labels)?, value)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn metric_type(kind: Kind) -> MetricType {
    match kind {
        Kind::Counter => MetricType::Counter,
        _ => MetricType::Gauge,
    }
}

fn encode(kind: Kind, mut metric: MetricEncoder<'_>, value: f64) -> Result<(), fmt::Error> {
    match kind {
        Kind::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        _ => metric.encode_gauge(&value),
    }
}

fn small(value: Option<impl Into<f64>>) -> Option<f64> {
    value.map(Into::into)
}

fn flag(value: Option<bool>) -> Option<f64> {
    value.map(|set| f64::from(u8::from(set)))
}

/// Converts a count; beyond 2^53 its last digits are lost.
#[expect(
    clippy::cast_precision_loss,
    reason = "metrics are floating-point numbers"
)]
fn whole(value: Option<u64>) -> Option<f64> {
    value.map(|value| value as f64)
}

/// Returns the descriptions of all values.
fn values() -> impl Iterator<Item = Description> {
    let of_gpu = OF_GPU
        .into_iter()
        .map(|(kind, name, help, _)| Description::new(kind, name, &["gpu", "uuid"], help));
    let of_link = OF_LINK
        .into_iter()
        .map(|(kind, name, help, _)| Description::new(kind, name, &["gpu", "uuid", "link"], help));
    of_gpu.chain(of_link)
}

/// Returns the descriptions of all metrics of this file.
pub(super) fn described() -> Vec<Description> {
    values().chain(ProbeMetrics::described()).collect()
}
