//! Thresholds for readings of GPUs, and their names in an override file
//! (`catalog/overrides/limits.rs`, `docs/gpu.md`).

use std::ops::RangeInclusive;

/// Longest delay of a problem, in seconds.
const LONGEST_WAIT: u32 = 3600;
/// Highest threshold of pages or rows: above what any GPU can retire.
const MOST_ROWS: u32 = 4096;

/// Thresholds of the checks. The defaults are DCGM's where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckLimits {
    /// Number of GPUs that the machine should have; `None` accepts any number. A setting of the
    /// machine, not a key of the file.
    pub expected_gpus: Option<usize>,
    /// Seconds before a GPU that is missing beside others counts as lost, unless the driver
    /// itself reports the loss. A driver relists its GPUs now and then.
    pub missing_seconds: u32,
    /// Seconds before a link that is down, a reading that fails, or a PCIe link that is slow
    /// under load is a problem: links retrain after a reset.
    pub settling_seconds: u32,
    /// Seconds before a GPU outside its fabric is a problem: setting up a fabric takes minutes.
    pub fabric_seconds: u32,
    /// Seconds without new occurrences before a counted problem closes.
    pub calm_seconds: u32,
    /// Seconds without a report by DCGM before a problem closes: two samples, so that a
    /// connection that was just restored proves nothing.
    pub dcgm_calm_seconds: u32,
    /// Recovery of the margin that closes a heat problem, in degrees Celsius.
    pub margin_hysteresis_c: u32,
    /// True if a GPU without slowdown margin opens a fault; else the report is only stored, as
    /// with NVSentinel.
    pub margin_counts: bool,
    /// Fewest retired pages that require a GPU's replacement.
    pub retired_pages: u32,
    /// Pages retired because of uncorrected errors; beyond this number, a GPU should be
    /// replaced if more are added.
    pub retired_pages_dbe: u32,
    /// Fewest rows remapped because of uncorrected errors that require a GPU's replacement: as
    /// many as a GPU has spares.
    pub remapped_rows: u32,
    /// Fewest CRC errors per second that make an `NVLink` faulty.
    pub nvlink_crc_per_second: u32,
    /// CRC errors per second that close the problem if there are fewer.
    pub nvlink_crc_over_per_second: u32,
    /// Most PCIe replays before a link is faulty, in percent of the number allowed for its
    /// generation and width.
    pub pcie_replay_percent: u32,
    /// Most PCIe replays for the problem to close, in percent of the same.
    pub pcie_replay_over_percent: u32,
    /// Lowest load, in percent, that requires a PCIe link to run at its maximum: without load
    /// it is slowed down to save power.
    pub load_percent: u32,
}

/// A threshold's key in a file.
#[derive(Debug)]
pub(crate) struct ThresholdKey {
    pub(crate) name: &'static str,
    pub(crate) field: Field,
}

/// A threshold that a key sets.
#[derive(Debug)]
pub(crate) enum Field {
    /// A number, with its range.
    Number(RangeInclusive<u32>, fn(&mut CheckLimits) -> &mut u32),
    /// A switch, true or false.
    Switch(fn(&mut CheckLimits) -> &mut bool),
}

/// Two thresholds of one problem: where it opens, and where it closes, which is not higher.
/// Between them the problem keeps its state.
#[derive(Debug)]
pub(crate) struct Hysteresis {
    pub(crate) begins: &'static str,
    pub(crate) ends: &'static str,
}

/// Keys in the order of output.
pub(crate) static KEYS: [ThresholdKey; 15] = [
    ThresholdKey::number("missing-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.missing_seconds
    }),
    ThresholdKey::number("settling-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.settling_seconds
    }),
    ThresholdKey::number("fabric-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.fabric_seconds
    }),
    ThresholdKey::number("calm-seconds", 1..=24 * LONGEST_WAIT, |it| {
        &mut it.calm_seconds
    }),
    ThresholdKey::number("dcgm-calm-seconds", 1..=LONGEST_WAIT, |it| {
        &mut it.dcgm_calm_seconds
    }),
    ThresholdKey::number("margin-hysteresis-c", 0..=50, |it| {
        &mut it.margin_hysteresis_c
    }),
    ThresholdKey {
        name: "margin-counts",
        field: Field::Switch(|it| &mut it.margin_counts),
    },
    ThresholdKey::number("retired-pages", 1..=MOST_ROWS, |it| &mut it.retired_pages),
    ThresholdKey::number("retired-pages-dbe", 0..=MOST_ROWS, |it| {
        &mut it.retired_pages_dbe
    }),
    ThresholdKey::number("remapped-rows", 1..=MOST_ROWS, |it| &mut it.remapped_rows),
    ThresholdKey::number(CRC.begins, 1..=1_000_000_000, |it| {
        &mut it.nvlink_crc_per_second
    }),
    ThresholdKey::number(CRC.ends, 1..=1_000_000_000, |it| {
        &mut it.nvlink_crc_over_per_second
    }),
    ThresholdKey::number(REPLAYS.begins, 1..=100_000, |it| {
        &mut it.pcie_replay_percent
    }),
    ThresholdKey::number(REPLAYS.ends, 0..=100_000, |it| {
        &mut it.pcie_replay_over_percent
    }),
    ThresholdKey::number("load-percent", 1..=100, |it| &mut it.load_percent),
];

const CRC: Hysteresis = Hysteresis {
    begins: "nvlink-crc-per-second",
    ends: "nvlink-crc-over-per-second",
};
const REPLAYS: Hysteresis = Hysteresis {
    begins: "pcie-replay-percent",
    ends: "pcie-replay-over-percent",
};

/// Problems that open and close at different thresholds.
pub(crate) const HYSTERESES: [Hysteresis; 2] = [CRC, REPLAYS];

// === impl CheckLimits ===

impl Default for CheckLimits {
    fn default() -> Self {
        Self {
            expected_gpus: None,
            missing_seconds: 30,
            settling_seconds: 60,
            fabric_seconds: 300,
            calm_seconds: 300,
            dcgm_calm_seconds: 60,
            margin_hysteresis_c: 3,
            margin_counts: false,
            retired_pages: 63,
            retired_pages_dbe: 15,
            remapped_rows: 512,
            nvlink_crc_per_second: 100,
            nvlink_crc_over_per_second: 100,
            pcie_replay_percent: 100,
            pcie_replay_over_percent: 100,
            load_percent: 50,
        }
    }
}

// === impl ThresholdKey ===

impl ThresholdKey {
    const fn number(
        name: &'static str,
        range: RangeInclusive<u32>,
        field: fn(&mut CheckLimits) -> &mut u32,
    ) -> Self {
        Self {
            name,
            field: Field::Number(range, field),
        }
    }

    /// Returns the key with this name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// Sets the threshold; for a switch, 0 is off.
    pub(crate) fn set(&self, limits: &mut CheckLimits, value: u32) {
        match &self.field {
            Field::Number(_, field) => *field(limits) = value,
            Field::Switch(field) => *field(limits) = value != 0,
        }
    }

    /// Formats the threshold's value.
    pub(crate) fn shown(&self, limits: &CheckLimits) -> String {
        let mut limits = limits.clone();
        match &self.field {
            Field::Number(_, field) => field(&mut limits).to_string(),
            Field::Switch(field) => field(&mut limits).to_string(),
        }
    }
}
