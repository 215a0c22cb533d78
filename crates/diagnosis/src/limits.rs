//! The thresholds by which readings of GPUs are judged, and their names in a file of changes
//! (`catalog/overrides/limits.rs`, `docs/gpu.md`).

use std::ops::RangeInclusive;

/// Longest time that a problem may be waited for, in seconds.
const LONGEST_WAIT: u32 = 3600;
/// Most pages or rows that a threshold may be: above what any GPU can take out of use.
const MOST_ROWS: u32 = 4096;

/// Thresholds of the checks. The defaults are those of DCGM where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of GPUs that the machine ought to have; `None`: any number is right. It is a setting
    /// of the machine, and no key of the file.
    pub expected_gpus: Option<usize>,
    /// Seconds for which a GPU has to be missing beside others before it counts as lost, unless the
    /// driver itself says so: a driver lists its GPUs anew in between.
    pub missing_seconds: u32,
    /// Seconds for which a link has to be down, a reading has to fail, or a PCIe link has to be slow
    /// under load: links train anew after a reset.
    pub settling_seconds: u32,
    /// Seconds for which a GPU has to be outside its fabric: to set a fabric up takes minutes.
    pub fabric_seconds: u32,
    /// Seconds for which nothing more may have come until what came is over, of what is counted.
    pub calm_seconds: u32,
    /// Seconds for which DCGM must not have told of something any more until it is over: as long as it
    /// takes two samples, so that a connection that was made anew proves nothing.
    pub dcgm_calm_seconds: u32,
    /// Degrees Celsius by which the margin has to be better again until heat is over.
    pub margin_hysteresis_c: u32,
    /// True if a GPU without margin to its slowdown opens a fault; else the report is only stored,
    /// as with NVSentinel.
    pub margin_counts: bool,
    /// Pages taken out of use from which on a GPU ought to be replaced.
    pub retired_pages: u32,
    /// Pages taken out of use because of errors that were not corrected, beyond which a GPU ought to
    /// be replaced if they become more.
    pub retired_pages_dbe: u32,
    /// Rows replaced because of errors that were not corrected, from which on a GPU ought to be
    /// replaced: as many as a GPU has spares.
    pub remapped_rows: u32,
    /// Wrong checksums of an `NVLink` per second from which on it is faulty.
    pub nvlink_crc_per_second: u32,
    /// Wrong checksums of an `NVLink` per second below which that is over.
    pub nvlink_crc_over_per_second: u32,
    /// Replays beyond which a PCIe link is faulty, in percent of what its generation and width allow.
    pub pcie_replay_percent: u32,
    /// Replays up to which that is over, in percent of the same.
    pub pcie_replay_over_percent: u32,
    /// Load in percent from which on a PCIe link ought to be at its best: without load it is slowed
    /// down to save power.
    pub load_percent: u32,
}

/// A key of the thresholds in a file.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) field: Field,
}

/// A threshold that a key sets.
#[derive(Debug)]
pub(crate) enum Field {
    /// A number, and the least and the most that it may be.
    Number(RangeInclusive<u32>, fn(&mut Limits) -> &mut u32),
    /// A switch.
    Switch(fn(&mut Limits) -> &mut bool),
}

/// Two thresholds of one problem: where it begins, and where it is over, which lies no higher. In
/// between it stays as it is.
#[derive(Debug)]
pub(crate) struct Hysteresis {
    pub(crate) begins: &'static str,
    pub(crate) ends: &'static str,
}

/// The keys, in the order in which they are shown.
pub(crate) static KEYS: [Key; 15] = [
    Key::number("missing-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.missing_seconds
    }),
    Key::number("settling-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.settling_seconds
    }),
    Key::number("fabric-seconds", 0..=LONGEST_WAIT, |it| {
        &mut it.fabric_seconds
    }),
    Key::number("calm-seconds", 1..=24 * LONGEST_WAIT, |it| {
        &mut it.calm_seconds
    }),
    Key::number("dcgm-calm-seconds", 1..=LONGEST_WAIT, |it| {
        &mut it.dcgm_calm_seconds
    }),
    Key::number("margin-hysteresis-c", 0..=50, |it| {
        &mut it.margin_hysteresis_c
    }),
    Key {
        name: "margin-counts",
        field: Field::Switch(|it| &mut it.margin_counts),
    },
    Key::number("retired-pages", 1..=MOST_ROWS, |it| &mut it.retired_pages),
    Key::number("retired-pages-dbe", 0..=MOST_ROWS, |it| {
        &mut it.retired_pages_dbe
    }),
    Key::number("remapped-rows", 1..=MOST_ROWS, |it| &mut it.remapped_rows),
    Key::number(CRC.begins, 1..=1_000_000_000, |it| {
        &mut it.nvlink_crc_per_second
    }),
    Key::number(CRC.ends, 1..=1_000_000_000, |it| {
        &mut it.nvlink_crc_over_per_second
    }),
    Key::number(REPLAYS.begins, 1..=100_000, |it| {
        &mut it.pcie_replay_percent
    }),
    Key::number(REPLAYS.ends, 0..=100_000, |it| {
        &mut it.pcie_replay_over_percent
    }),
    Key::number("load-percent", 1..=100, |it| &mut it.load_percent),
];

const CRC: Hysteresis = Hysteresis {
    begins: "nvlink-crc-per-second",
    ends: "nvlink-crc-over-per-second",
};
const REPLAYS: Hysteresis = Hysteresis {
    begins: "pcie-replay-percent",
    ends: "pcie-replay-over-percent",
};

/// The problems that begin and end at thresholds of their own.
pub(crate) const HYSTERESES: [Hysteresis; 2] = [CRC, REPLAYS];

// === impl Limits ===

impl Default for Limits {
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

// === impl Key ===

impl Key {
    const fn number(
        name: &'static str,
        range: RangeInclusive<u32>,
        field: fn(&mut Limits) -> &mut u32,
    ) -> Self {
        Self {
            name,
            field: Field::Number(range, field),
        }
    }

    /// Returns the key of this name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// Sets the threshold; of a switch, 0 is off.
    pub(crate) fn set(&self, limits: &mut Limits, value: u32) {
        match &self.field {
            Field::Number(_, field) => *field(limits) = value,
            Field::Switch(field) => *field(limits) = value != 0,
        }
    }

    /// Returns the value that limits have for this key, in words.
    pub(crate) fn shown(&self, limits: &Limits) -> String {
        let mut limits = limits.clone();
        match &self.field {
            Field::Number(_, field) => field(&mut limits).to_string(),
            Field::Switch(field) => field(&mut limits).to_string(),
        }
    }
}
