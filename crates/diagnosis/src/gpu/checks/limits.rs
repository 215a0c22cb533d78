//! The thresholds of the checks.

use serde::Deserialize;

/// Thresholds of the checks. The defaults are those of DCGM where it has one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Number of GPUs that the machine ought to have; `None`: any number is right.
    pub expected_gpus: Option<usize>,
    /// Seconds for which a GPU has to be missing beside others before it counts as lost, unless the
    /// driver itself says so: a driver lists its GPUs anew in between.
    pub missing_seconds: u64,
    /// Seconds for which a link has to be down, a reading has to fail, or a PCIe link has to be slow
    /// under load: links train anew after a reset.
    pub settling_seconds: u64,
    /// Seconds for which a GPU has to be outside its fabric: to set a fabric up takes minutes.
    pub fabric_seconds: u64,
    /// Seconds for which nothing more may have come until what came is over, of what is counted.
    pub calm_seconds: u64,
    /// Seconds for which DCGM must not have told of something any more until it is over: as long as it
    /// takes two samples, so that a connection that was made anew proves nothing.
    pub dcgm_calm_seconds: u64,
    /// Degrees Celsius by which the margin has to be better again until heat is over.
    pub margin_hysteresis_c: i32,
    /// Pages taken out of use from which on a GPU ought to be replaced.
    pub retired_pages: u32,
    /// Pages taken out of use because of errors that were not corrected, beyond which a GPU ought to
    /// be replaced if they become more.
    pub retired_pages_dbe: u32,
    /// Rows replaced because of errors that were not corrected, from which on a GPU ought to be
    /// replaced: as many as a GPU has spares.
    pub remapped_rows: u32,
    /// Wrong checksums of an `NVLink` per second from which on it is faulty.
    pub nvlink_crc_per_second: u64,
    /// Load in percent from which on a PCIe link ought to be at its best: without load it is slowed
    /// down to save power.
    pub load_percent: u32,
}

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
            retired_pages: 63,
            retired_pages_dbe: 15,
            remapped_rows: 512,
            nvlink_crc_per_second: 100,
            load_percent: 50,
        }
    }
}
