//! Exports the readings of the GPUs as gauges, and counters of the processes that read them.
//! The gauges reflect the last poll: a GPU that is gone, or a missing value, has no series.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use diagnosis::gpu::{Inventory, NvlinkReadings, Readings};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge as Current;
use runtime::metrics::{Labels, Metrics};

use super::probe::MOST_STUCK;

/// A gauge: name, help, and a function for its value, if any.
type Gauge<T, V = i64> = (&'static str, &'static str, fn(&T) -> Option<V>);

/// Gauges that are converted from the driver's smaller units to Prometheus' base units.
const IN_BASE_UNITS: [Gauge<Readings, f64>; 4] = [
    (
        "gpuwarden_gpu_power_watts",
        "Power that the GPU draws",
        |it| watts(it.power_mw),
    ),
    (
        "gpuwarden_gpu_power_limit_watts",
        "Limit of the GPU's power that is enforced",
        |it| watts(it.power_limit_mw),
    ),
    (
        "gpuwarden_gpu_thermal_violation_seconds",
        "Time for which heat has slowed the GPU down",
        |it| seconds(it.thermal_violation_ns),
    ),
    (
        "gpuwarden_gpu_power_violation_seconds",
        "Time for which the power limit has slowed the GPU down",
        |it| seconds(it.power_violation_ns),
    ),
];

/// Other gauges of a GPU.
const OF_GPU: [Gauge<Readings>; 22] = [
    (
        "gpuwarden_gpu_temperature_celsius",
        "Temperature of the GPU",
        |it| it.temperature_c.map(i64::from),
    ),
    (
        "gpuwarden_gpu_memory_temperature_celsius",
        "Temperature of the GPU's memory",
        |it| it.memory_temperature_c.map(i64::from),
    ),
    (
        "gpuwarden_gpu_temperature_margin_celsius",
        "Degrees until the GPU slows down",
        |it| it.margin_c.map(i64::from),
    ),
    (
        "gpuwarden_gpu_clock_reasons",
        "Why the clocks are below what they could be, as the bits of NVML",
        |it| whole(it.clock_reasons),
    ),
    (
        "gpuwarden_gpu_utilization_percent",
        "Load of the GPU",
        |it| it.utilization_percent.map(i64::from),
    ),
    (
        "gpuwarden_gpu_memory_used_bytes",
        "Memory of the GPU that is in use",
        |it| whole(it.memory_used_bytes),
    ),
    (
        "gpuwarden_gpu_ecc_corrected_volatile",
        "Memory errors that were corrected, since the driver was loaded",
        |it| whole(it.ecc_corrected_volatile),
    ),
    (
        "gpuwarden_gpu_ecc_uncorrected_volatile",
        "Memory errors that were not corrected, since the driver was loaded",
        |it| whole(it.ecc_uncorrected_volatile),
    ),
    (
        "gpuwarden_gpu_ecc_corrected_aggregate",
        "Memory errors that were corrected, in the life of the GPU",
        |it| whole(it.ecc_corrected_aggregate),
    ),
    (
        "gpuwarden_gpu_ecc_uncorrected_aggregate",
        "Memory errors that were not corrected, in the life of the GPU",
        |it| whole(it.ecc_uncorrected_aggregate),
    ),
    (
        "gpuwarden_gpu_retired_pages_corrected",
        "Memory pages taken out of use because of errors that were corrected",
        |it| it.retired_pages_sbe.map(i64::from),
    ),
    (
        "gpuwarden_gpu_retired_pages_uncorrected",
        "Memory pages taken out of use because of errors that were not corrected",
        |it| it.retired_pages_dbe.map(i64::from),
    ),
    (
        "gpuwarden_gpu_retired_pages_pending",
        "1 where memory pages wait to be taken out of use",
        |it| it.retired_pages_pending.map(i64::from),
    ),
    (
        "gpuwarden_gpu_remapped_rows_corrected",
        "Memory rows replaced because of errors that were corrected",
        |it| it.remapped_rows_correctable.map(i64::from),
    ),
    (
        "gpuwarden_gpu_remapped_rows_uncorrected",
        "Memory rows replaced because of errors that were not corrected",
        |it| it.remapped_rows_uncorrectable.map(i64::from),
    ),
    (
        "gpuwarden_gpu_remapped_rows_pending",
        "1 where memory rows wait to be replaced",
        |it| it.remap_pending.map(i64::from),
    ),
    (
        "gpuwarden_gpu_remapped_rows_failed",
        "1 where a memory row could not be replaced",
        |it| it.remap_failed.map(i64::from),
    ),
    (
        "gpuwarden_gpu_sram_threshold_exceeded",
        "1 where the on-chip memory has had too many errors",
        |it| it.sram_threshold_exceeded.map(i64::from),
    ),
    (
        "gpuwarden_gpu_pcie_replays",
        "Times that something was sent again over PCIe",
        |it| whole(it.pcie_replays),
    ),
    (
        "gpuwarden_gpu_pcie_generation",
        "Generation at which the PCIe link runs",
        |it| it.pcie_generation.map(i64::from),
    ),
    (
        "gpuwarden_gpu_pcie_width",
        "Lanes of the PCIe link that are in use",
        |it| it.pcie_width.map(i64::from),
    ),
    (
        "gpuwarden_gpu_recovery_action",
        "What the driver asks for to mend the GPU, as the number of NVML; 0 is nothing",
        |it| it.recovery_action.map(|action| action.number().into()),
    ),
];

/// Gauges of a link of a GPU.
const OF_LINK: [Gauge<NvlinkReadings>; 5] = [
    (
        "gpuwarden_gpu_nvlink_up",
        "1 where the NVLink is up",
        |it| it.up.map(i64::from),
    ),
    (
        "gpuwarden_gpu_nvlink_replays",
        "Times that the NVLink sent something again",
        |it| whole(it.replays),
    ),
    (
        "gpuwarden_gpu_nvlink_recoveries",
        "Times that the NVLink was made anew",
        |it| whole(it.recoveries),
    ),
    (
        "gpuwarden_gpu_nvlink_crc_errors",
        "Wrong checksums of the NVLink",
        |it| whole(it.crc_errors),
    ),
    (
        "gpuwarden_gpu_nvlink_effective_errors",
        "Errors of the NVLink that were left after correction",
        |it| whole(it.effective_errors),
    ),
];

runtime::metrics! {
    /// Counts the processes that query GPUs, by source.
    pub(super) struct ProbeMetrics {
        /// Times that the process which asks about the GPUs ended, or was ended, and another follows it, by source.
        restarts: Family<Labels<1>, Counter> = "gpuwarden_gpu_probe_restarts",
        /// Processes that ask about the GPUs and cannot be ended, by source.
        stuck: Family<Labels<1>, Current> = "gpuwarden_gpu_probe_stuck",
    }
}

/// Gauges of the present GPUs. Cheap to clone.
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

    /// Sets the gauges from a poll.
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
        for (name, help, value) in IN_BASE_UNITS {
            let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for gpu in shown.iter() {
                if let Some(value) = value(&gpu.readings) {
                    gauge.encode_family(&gpu.labels)?.encode_gauge(&value)?;
                }
            }
        }
        for (name, help, value) in OF_GPU {
            let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for gpu in shown.iter() {
                if let Some(value) = value(&gpu.readings) {
                    gauge.encode_family(&gpu.labels)?.encode_gauge(&value)?;
                }
            }
        }
        for (name, help, value) in OF_LINK {
            let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for gpu in shown.iter() {
                for link in &gpu.readings.nvlinks {
                    let labels = (gpu.labels.clone(), [("link", link.link.to_string())]);
                    if let Some(value) = value(link) {
                        gauge.encode_family(&labels)?.encode_gauge(&value)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Converts a count to a gauge's type; `None` beyond its range, which no GPU reaches.
fn whole(value: Option<u64>) -> Option<i64> {
    value.and_then(|value| i64::try_from(value).ok())
}

/// Converts milliwatts to watts; `None` beyond what a GPU can draw.
fn watts(milliwatts: Option<u64>) -> Option<f64> {
    Some(f64::from(u32::try_from(milliwatts?).ok()?) / 1000.0)
}

fn seconds(nanoseconds: Option<u64>) -> Option<f64> {
    nanoseconds.map(|nanoseconds| Duration::from_nanos(nanoseconds).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_metrics_has_each_of_them() {
        let page = include_str!("../../../../docs/metrics.md");
        let of_gpu = OF_GPU.iter().map(|(name, ..)| *name);
        let in_base_units = IN_BASE_UNITS.iter().map(|(name, ..)| *name);
        for name in of_gpu
            .chain(in_base_units)
            .chain(OF_LINK.iter().map(|(name, ..)| *name))
        {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
    }
}
