//! Rules for the readings of one GPU. They match DCGM's health watches where the driver reports
//! what DCGM uses; `docs/gpu.md` lists them.

mod fabric;

use std::time::Duration;

use contract::keys;

use super::trail::{Counter, Growth, Trails, WINDOW};
use super::{KnownGpu, Problem, Sight};
use crate::catalog::{recovery_code, recovery_codes};
use crate::gpu::dcgm::ImexUse;
use crate::gpu::{FabricState, Gpu, NvlinkReadings, Readings, RecoveryAction};
use crate::limits::CheckLimits;

/// Usual PCIe replays per lane and minute, in hundredths, by generation from the first on.
const PCIE_REPLAYS: [u64; 6] = [15, 30, 48, 96, 192, 384];
/// Call that reads the power draw of a GPU.
const POWER_CALL: &str = "nvmlDeviceGetPowerUsage";
/// Clock reason for a power brake by the machine, such as for its power supply
/// (`nvmlClocksEventReasonHwPowerBrakeSlowdown`).
const POWER_BRAKE: u64 = 0x80;
/// Code of a driver's request to recover the IMEX domain.
const IMEX_UNHEALTHY: &str = "DCGM_FR_IMEX_UNHEALTHY";

/// Evaluates the readings of one GPU.
pub(super) struct Rules<'a> {
    pub(super) key: &'a str,
    pub(super) gpu: &'a Gpu,
    pub(super) readings: &'a Readings,
    pub(super) limits: &'a CheckLimits,
    /// Decides whether a report about IMEX counts.
    pub(super) imex: ImexUse,
    pub(super) known: &'a mut KnownGpu,
    pub(super) trails: &'a mut Trails,
    pub(super) now: Duration,
    pub(super) sights: &'a mut Vec<Sight>,
}

// === impl Rules ===

impl Rules<'_> {
    /// Applies all rules to the readings.
    pub(super) fn judge(mut self) {
        self.pcie();
        self.memory();
        self.retired_pages();
        self.remapped_rows();
        self.thermal();
        self.power();
        self.driver();
        self.fabric();
        // Links of a partitioned GPU are down by design.
        if self.gpu.mig_enabled != Some(true) {
            for link in &self.readings.nvlinks {
                self.link(link);
            }
        }
    }

    fn pcie(&mut self) {
        let (gpu, readings) = (self.gpu, self.readings);
        // The maximum, since an idle link slows down at once.
        let generation = gpu.pcie_max_generation.max(readings.pcie_generation);
        let width = gpu.pcie_max_width.max(readings.pcie_width);
        if let (Some(generation), Some(width)) = (generation, width) {
            let allowed = |percent| allowed_replays(generation, width, percent);
            let most = allowed(self.limits.pcie_replay_percent);
            let few = allowed(self.limits.pcie_replay_over_percent);
            let growth = self.growth(&[(Counter::PcieReplays, readings.pcie_replays)]);
            self.judge_growth(
                self.of(keys::CHECK_GPU_PCIE, "DCGM_FR_PCI_REPLAY_RATE"),
                growth,
                growth.and_then(|growth| between(growth.by > most, growth.by <= few)),
                |growth| {
                    format!(
                        "{} PCIe replays in {} seconds, where {most} a minute are allowed",
                        growth.by,
                        growth.within.as_secs()
                    )
                },
            );
        }
        let is_loaded = readings.utilization_percent >= Some(self.limits.load_percent);
        let below = |now: Option<u32>, most: Option<u32>| Some(now? < most?);
        let slower = below(readings.pcie_generation, gpu.pcie_max_generation);
        let narrower = below(readings.pcie_width, gpu.pcie_max_width);
        let is_below = match (slower, narrower) {
            (None, None) => None,
            (slower, narrower) => Some(slower == Some(true) || narrower == Some(true)),
        };
        let shown = |value: Option<u32>| value.map_or("?".to_owned(), |value| value.to_string());
        self.lasting(
            self.of(keys::CHECK_GPU_PCIE, "GPU_PCIE_LINK_DEGRADED"),
            is_below.filter(|_| is_loaded),
            || {
                format!(
                    "the PCIe link runs under load with {} lanes of generation {}, and could with {} of {}",
                    shown(readings.pcie_width),
                    shown(readings.pcie_generation),
                    shown(gpu.pcie_max_width),
                    shown(gpu.pcie_max_generation)
                )
            },
        );
    }

    fn memory(&mut self) {
        let errors = self.readings.ecc_uncorrected_volatile;
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_VOLATILE_DBE_DETECTED"),
            errors.map(|errors| errors > 0),
            || {
                format!(
                    "{} memory errors were not corrected since the driver was loaded",
                    errors.unwrap_or_default()
                )
            },
        );
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_SRAM_THRESHOLD"),
            self.readings.sram_threshold_exceeded,
            || "the on-chip memory has passed its threshold of errors".to_owned(),
        );
    }

    fn retired_pages(&mut self) {
        let (sbe, dbe) = (
            self.readings.retired_pages_sbe,
            self.readings.retired_pages_dbe,
        );
        let limits = self.limits;
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_PENDING_PAGE_RETIREMENTS"),
            self.readings.retired_pages_pending,
            || "memory pages wait for a reset to be taken out of use".to_owned(),
        );
        let pages = sbe.zip(dbe).map(|(sbe, dbe)| sbe.saturating_add(dbe));
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_RETIRED_PAGES_LIMIT"),
            pages.map(|pages| pages >= limits.retired_pages),
            || {
                format!(
                    "{} memory pages are taken out of use, {} are too many",
                    pages.unwrap_or_default(),
                    limits.retired_pages
                )
            },
        );
        // Pages that were retired before the GPU was first seen may be old.
        let first = dbe.map(|dbe| *self.known.first_retired_dbe.get_or_insert(dbe));
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_RETIRED_PAGES_DBE_LIMIT"),
            dbe.map(|dbe| dbe > limits.retired_pages_dbe && Some(dbe) > first),
            || {
                format!(
                    "{} memory pages are taken out of use because of errors that were not corrected, and they become more",
                    dbe.unwrap_or_default()
                )
            },
        );
    }

    fn remapped_rows(&mut self) {
        let most = self.limits.remapped_rows;
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_ROW_REMAP_FAILURE"),
            self.readings.remap_failed,
            || "a failing memory row could not be replaced".to_owned(),
        );
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_PENDING_ROW_REMAP"),
            self.readings.remap_pending,
            || "a failing memory row waits for a reset to be replaced".to_owned(),
        );
        let rows = self.readings.remapped_rows_uncorrectable;
        self.is(
            self.of(keys::CHECK_GPU_MEMORY, "DCGM_FR_UNCORRECTABLE_ROW_REMAP_LIMIT"),
            rows.map(|rows| rows >= most),
            || {
                format!(
                    "{} memory rows were replaced because of errors that were not corrected, {most} are too many",
                    rows.unwrap_or_default()
                )
            },
        );
    }

    fn thermal(&mut self) {
        self.grown(
            self.of(keys::CHECK_GPU_THERMAL, "DCGM_FR_CLOCKS_EVENT_THERMAL"),
            &[(
                Counter::ThermalViolation,
                self.readings.thermal_violation_ns,
            )],
            |growth| growth.by > 0,
            |growth| format!("heat slowed the GPU down {}", share(growth)),
        );
        let margin = self.readings.margin_c;
        let Some((margin, slowdown)) = margin.zip(self.gpu.slowdown_margin_c) else {
            return;
        };
        let end = slowdown.saturating_add_unsigned(self.limits.margin_hysteresis_c);
        let is_broken = between(margin < slowdown, margin >= end);
        self.is(
            self.of(
                keys::CHECK_GPU_THERMAL_MARGIN,
                "GPU_TEMP_HW_SLOWDOWN_VIOLATION",
            ),
            is_broken,
            || format!("the margin is {margin} C, and below {slowdown} C the GPU slows down"),
        );
    }

    fn power(&mut self) {
        // A GPU at its power limit is just busy; a power brake slows it down from outside.
        let reasons = self.readings.clock_reasons;
        self.see(
            self.of(keys::CHECK_GPU_POWER, "DCGM_FR_CLOCKS_EVENT_POWER"),
            reasons.map(|reasons| reasons & POWER_BRAKE != 0),
            (0, self.limits.calm_seconds),
            || "the machine's power brake slows the GPU down".to_owned(),
        );
        let mut failed = self.readings.failed.iter();
        let failure = failed.find(|(call, _)| call == POWER_CALL);
        let is_readable = self.readings.power_mw.map(|_| false);
        self.lasting(
            self.of(keys::CHECK_GPU_POWER, "DCGM_FR_POWER_UNREADABLE"),
            failure.map(|_| true).or(is_readable),
            || {
                let error = failure.map_or("", |(_, error)| error.as_str());
                format!("the power of the GPU cannot be read: {error}")
            },
        );
    }

    /// Evaluates the requested recovery actions. A request for one partition is one for the
    /// whole GPU, since a reset affects all of it.
    fn driver(&mut self) {
        let partitions = (self.readings.mig_recovery_actions.iter())
            .map(|(uuid, action)| (format!("its partition {uuid}"), *action));
        let own = (self.readings.recovery_action).map(|action| ("the GPU".to_owned(), action));
        let requested: Vec<(String, RecoveryAction)> = own.into_iter().chain(partitions).collect();
        let is_known = !requested.is_empty();
        let request = |by: Option<&(String, RecoveryAction)>| {
            by.map_or_else(String::new, |(by, action)| {
                format!("the driver asks for {action}, because of {by}")
            })
        };
        for code in recovery_codes() {
            let mut requested = requested.iter();
            let by =
                requested.find(|(_, requested)| recovery_code(requested.number()) == Some(code));
            let is_requested = is_known.then_some(by.is_some());
            self.is(
                self.of(keys::CHECK_GPU_DRIVER, code),
                // The domain matters only if a pod relies on it; otherwise it may not even
                // exist.
                match self.imex {
                    _ if code != IMEX_UNHEALTHY => is_requested,
                    ImexUse::Used => is_requested,
                    ImexUse::Unused => Some(false),
                    ImexUse::Unknown => None,
                },
                || request(by),
            );
        }
        self.is(
            self.of(keys::CHECK_GPU_DRIVER, "GPU_UNMONITORED"),
            Some(self.gpu.unmonitored.is_some()),
            || {
                let why = self.gpu.unmonitored.as_deref().unwrap_or_default();
                format!("XIDs of the GPU cannot be received: {why}")
            },
        );
    }

    fn fabric(&mut self) {
        let fabric = self.readings.fabric.as_ref();
        let Some(fabric) = fabric.filter(|fabric| fabric.state != FabricState::NotSupported) else {
            return;
        };
        let wait = (self.limits.fabric_seconds, 0);
        let trouble = fabric::registration_trouble(fabric);
        self.see(
            self.of(keys::CHECK_GPU_NVLINK, "DCGM_FR_FABRIC_PROBE_STATE"),
            Some(trouble.is_some()),
            wait,
            || trouble.unwrap_or_default(),
        );
        let ailments = fabric.health_mask.and_then(fabric::ailments);
        self.see(
            self.of(keys::CHECK_GPU_NVLINK, "DCGM_FR_FIELD_VIOLATION"),
            ailments.as_ref().map(|ailments| !ailments.is_empty()),
            wait,
            || {
                let ailments = ailments.unwrap_or_default().join(", ");
                format!("the fabric of the GPU is not well: {ailments}")
            },
        );
    }

    fn link(&mut self, link: &NvlinkReadings) {
        let number = link.link;
        if link.up == Some(true) {
            self.known.links_up.insert(number);
        }
        // A link that was never up is unconnected, as on PCIe boards without a bridge.
        let is_down = (link.up.map(|up| !up)).filter(|_| self.known.links_up.contains(&number));
        self.see(
            self.of(keys::CHECK_GPU_NVLINK, "DCGM_FR_NVLINK_DOWN")
                .on_link(number),
            is_down,
            (self.limits.settling_seconds, 0),
            || format!("NVLink {number} is down"),
        );
        self.grown(
            self.of(keys::CHECK_GPU_NVLINK, "DCGM_FR_NVLINK_ERROR_CRITICAL")
                .on_link(number),
            &[
                (Counter::NvlinkReplays(number), link.replays),
                (Counter::NvlinkRecoveries(number), link.recoveries),
                (
                    Counter::NvlinkEffectiveErrors(number),
                    link.effective_errors,
                ),
            ],
            |growth| growth.by > 0,
            |growth| {
                format!(
                    "NVLink {number} sent again, recovered, or had errors left {} times",
                    growth.by
                )
            },
        );
        let rate = |limit: u32, growth: Growth| u64::from(limit).saturating_mul(seconds(growth));
        let (begins, ends) = (
            self.limits.nvlink_crc_per_second,
            self.limits.nvlink_crc_over_per_second,
        );
        let too_many = |growth: Growth| growth.by >= rate(begins, growth);
        let few = |growth: Growth| growth.by < rate(ends, growth);
        let message = |growth: Growth| {
            let (errors, within) = (growth.by, growth.within.as_secs());
            format!("NVLink {number} had {errors} wrong checksums in {within} seconds")
        };
        let counter = [(Counter::NvlinkCrcErrors(number), link.crc_errors)];
        let threshold = "DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD";
        let some = "DCGM_FR_NVLINK_ERROR_THRESHOLD";
        let growth = self.growth(&counter);
        for (code, is_it) in [
            (
                threshold,
                growth.and_then(|it| between(too_many(it), few(it))),
            ),
            (some, growth.map(|it| it.by > 0 && !too_many(it))),
        ] {
            let problem = self.of(keys::CHECK_GPU_NVLINK, code).on_link(number);
            self.judge_growth(problem, growth, is_it, message);
        }
    }

    /// Returns the sum of the growth of several counters; `None` if none can be compared.
    fn growth(&mut self, counters: &[(Counter, Option<u64>)]) -> Option<Growth> {
        let mut sum: Option<Growth> = None;
        for (counter, value) in counters {
            let growth = value.and_then(|value| self.trails.record(*counter, value, self.now));
            sum = match (sum, growth) {
                (Some(a), Some(b)) => Some(Growth {
                    by: a.by.saturating_add(b.by),
                    within: a.within.min(b.within),
                }),
                (sum, growth) => sum.or(growth),
            };
        }
        sum
    }

    /// Evaluates counters by their growth.
    fn grown(
        &mut self,
        problem: Problem,
        counters: &[(Counter, Option<u64>)],
        is_broken: impl FnOnce(Growth) -> bool,
        message: impl FnOnce(Growth) -> String,
    ) {
        let growth = self.growth(counters);
        self.judge_growth(problem, growth, growth.map(is_broken), message);
    }

    fn judge_growth(
        &mut self,
        problem: Problem,
        growth: Option<Growth>,
        is_broken: Option<bool>,
        message: impl FnOnce(Growth) -> String,
    ) {
        let Some(growth) = growth else {
            return;
        };
        // No growth in a part of the window proves nothing.
        let is_broken = is_broken.filter(|is_broken| *is_broken || growth.is_whole());
        let wait = (0, self.limits.calm_seconds);
        self.see(problem, is_broken, wait, || message(growth));
    }

    /// Evaluates a state that counts at once.
    fn is(&mut self, problem: Problem, is_broken: Option<bool>, message: impl FnOnce() -> String) {
        self.see(problem, is_broken, (0, 0), message);
    }

    /// Evaluates a state that counts after it has lasted for a while.
    fn lasting(
        &mut self,
        problem: Problem,
        is_broken: Option<bool>,
        message: impl FnOnce() -> String,
    ) {
        let wait = (self.limits.settling_seconds, 0);
        self.see(problem, is_broken, wait, message);
    }

    fn of(&self, check: &'static str, code: &'static str) -> Problem {
        Problem::of(self.key, check, code)
    }

    /// Records a state, unless the value is missing.
    fn see(
        &mut self,
        problem: Problem,
        is_broken: Option<bool>,
        wait: (u32, u32),
        message: impl FnOnce() -> String,
    ) {
        if let Some(is_broken) = is_broken {
            let message = is_broken.then(message);
            self.sights.push(Sight::new(problem, message, wait));
        }
    }
}

/// Returns true or false for a problem with different thresholds for its begin and its end;
/// `None` between them, where the state stays.
fn between(begins: bool, ends: bool) -> Option<bool> {
    if begins {
        Some(true)
    } else {
        ends.then_some(false)
    }
}

/// Returns the allowed PCIe replays per minute, at `percent` of the usual number.
fn allowed_replays(generation: u32, width: u32, percent: u32) -> u64 {
    let index = usize::try_from(generation.saturating_sub(1)).unwrap_or(usize::MAX);
    let per_lane = PCIE_REPLAYS.get(index).or(PCIE_REPLAYS.last());
    let hundredths = per_lane.map_or(0, |rate| rate.saturating_mul(u64::from(width)));
    hundredths
        .saturating_mul(percent.into())
        .div_ceil(100 * 100)
}

fn seconds(growth: Growth) -> u64 {
    growth.within.as_secs().max(1)
}

/// Describes the growth of a counter of nanoseconds and its time span.
fn share(growth: Growth) -> String {
    let slowed = Duration::from_nanos(growth.by).as_millis();
    let within = growth.within.min(2 * WINDOW).as_secs();
    format!("for {slowed} ms in {within} seconds")
}
