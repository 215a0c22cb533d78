//! Least bandwidth that passes: a configured number, or a share of the published bandwidth of
//! such GPUs on such a fabric (`data/bandwidth.tsv`).

use crate::environment::{BadVariable, Environment};
use crate::worker::SeenGpu;

const TABLE: &str = include_str!("../data/bandwidth.tsv");
/// Default for GPUs that are connected by PCIe alone (GB/s), as recommended by the preflight
/// configuration.
const PCIE: f64 = 15.0;

/// Number of GPUs on one node below which healthy ones may miss the default: two GPUs that face
/// each other on a board without a switch have a third of their links between them.
const FEW: usize = 4;
/// Number of GPUs in the machines measured for gangs.
const WHOLE: u32 = 8;

/// Extent of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// GPUs of one node.
    Node,
    /// GPUs of several nodes.
    Gang,
}

/// Settings of the threshold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ThresholdSettings {
    scope: Scope,
    /// Configured bandwidth, in GB/s.
    absolute: Option<f64>,
    /// Default bandwidth, in GB/s.
    default: f64,
    percent: Option<u64>,
    fabric: Option<String>,
    skip: bool,
}

/// Least bandwidth that passes, with its source.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Threshold {
    /// Bandwidth in GB/s; `None` lets any pass.
    pub(crate) gb_s: Option<f64>,
    /// Source of the number, for people.
    pub(crate) basis: String,
}

/// Row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    product: &'static str,
    fabric: &'static str,
    scope: &'static str,
    gb_s: f64,
    source: &'static str,
}

// === impl ThresholdSettings ===

impl ThresholdSettings {
    /// Reads the settings from the environment; `names` are the variables of the absolute
    /// number.
    pub(crate) fn read(
        environment: &Environment,
        scope: Scope,
        names: &[&str],
        default: f64,
    ) -> Result<Self, BadVariable> {
        let percent = environment.parsed(
            &["GPUWARDEN_BW_PERCENT"],
            "a whole number from 1 to 100: percent of the published bandwidth",
            |text| {
                text.parse()
                    .ok()
                    .filter(|percent| (1..=100).contains(percent))
            },
        )?;
        let fabrics = fabrics();
        let allowed = format!("one of {}", fabrics.join(", "));
        let fabric = environment.parsed(&["GPUWARDEN_FABRIC"], &allowed, |text| {
            let text = text.to_ascii_lowercase();
            fabrics.contains(&text.as_str()).then_some(text)
        })?;
        Ok(Self {
            scope,
            absolute: environment.bandwidth(names)?,
            default,
            percent,
            fabric,
            skip: environment.yes("SKIP_BANDWIDTH_CHECK")?,
        })
    }

    /// Returns the threshold for these GPUs.
    pub(crate) fn of(&self, gpus: &[SeenGpu]) -> Threshold {
        if self.skip {
            return Threshold {
                gb_s: None,
                basis: "any is good enough, for SKIP_BANDWIDTH_CHECK is set".to_owned(),
            };
        }
        let nvlink = gpus.iter().all(|gpu| gpu.nvlink);
        let fabric = match (&self.fabric, self.scope) {
            (Some(fabric), _) => Some(fabric.as_str()),
            (None, Scope::Node) => Some(if nvlink { "nvlink" } else { "pcie" }),
            (None, Scope::Gang) => None,
        };
        if let Some(percent) = self.percent
            && let Some(row) = fabric.and_then(|fabric| self.row(gpus, fabric))
        {
            let share = f64::from(u32::try_from(percent).unwrap_or(100)) / 100.0;
            // A pod with a part of a machine's GPUs has that part of its network cards.
            let part = match (self.scope, u32::try_from(gpus.len())) {
                (Scope::Gang, Ok(found)) => (f64::from(found) / f64::from(WHOLE)).min(1.0),
                _ => 1.0,
            };
            return Threshold {
                gb_s: Some(row.gb_s * share * part),
                basis: format!(
                    "{percent} % of the {} GB/s that {} does over {} ({})",
                    row.gb_s, row.product, row.fabric, row.source
                ),
            };
        }
        let (gb_s, basis) = match (self.absolute, self.scope) {
            (Some(set), _) => (Some(set), "as set"),
            (None, Scope::Node) => match fabric.and_then(|fabric| self.row(gpus, fabric)) {
                // Healthy GPUs with bridges, or on another board, may miss the default.
                None => (None, "none is set, and none is known of these GPUs"),
                Some(_) if !nvlink => (Some(PCIE), "the default for GPUs without NVLink"),
                Some(_) if gpus.len() < FEW => (
                    Some(self.default / 3.0),
                    "a third of the default, for so few GPUs",
                ),
                Some(_) => (Some(self.default), "the default"),
            },
            (None, Scope::Gang) if gpus.len() < WHOLE as usize => (
                None,
                "none is set, and the default is for eight GPUs in a pod",
            ),
            (None, Scope::Gang) => (Some(self.default), "the default"),
        };
        let unknown = if self.percent.is_some() {
            ", for no bandwidth of these GPUs on this fabric is known"
        } else {
            ""
        };
        Threshold {
            gb_s,
            basis: format!("{basis}{unknown}"),
        }
    }

    /// Returns the row for these GPUs; the slowest if they are of several products.
    fn row(&self, gpus: &[SeenGpu], fabric: &str) -> Option<Row> {
        let scope = match self.scope {
            Scope::Node => "node",
            Scope::Gang => "gang",
        };
        let of_gpu = |gpu: &SeenGpu| {
            let words: Vec<&str> = gpu.product.split([' ', '-', '_']).collect();
            // Such cards have bridges between two GPUs, or none, where others have a switch.
            let is_card = words.contains(&"NVL") || words.contains(&"PCIe");
            let mut rows = rows().filter(|row| row.fabric != "nvlink" || !is_card);
            rows.find(|row| {
                row.fabric == fabric && row.scope == scope && words.contains(&row.product)
            })
        };
        let found: Vec<Row> = gpus.iter().map(of_gpu).collect::<Option<_>>()?;
        found.into_iter().min_by(|a, b| a.gb_s.total_cmp(&b.gb_s))
    }
}

// === impl Threshold ===

impl Threshold {
    /// Returns true if a bandwidth passes.
    pub(crate) fn passes(&self, gb_s: f64) -> bool {
        self.gb_s.is_none_or(|least| gb_s >= least)
    }
}

fn rows() -> impl Iterator<Item = Row> {
    TABLE.lines().skip(1).filter_map(|line| {
        let mut fields = line.split('\t');
        Some(Row {
            product: fields.next()?,
            fabric: fields.next()?,
            scope: fields.next()?,
            gb_s: fields.next()?.parse().ok()?,
            source: fields.next()?,
        })
    })
}

fn fabrics() -> Vec<&'static str> {
    let mut fabrics: Vec<&str> = rows().map(|row| row.fabric).collect();
    fabrics.sort_unstable();
    fabrics.dedup();
    fabrics
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(scope: Scope, all: &[(&str, &str)]) -> Result<ThresholdSettings, BadVariable> {
        let all = all.iter();
        let environment: Environment = all
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        ThresholdSettings::read(&environment, scope, &["BW_THRESHOLD_GBPS"], 150.0)
    }

    fn gpus(product: &str, nvlink: bool) -> Vec<SeenGpu> {
        let gpu = SeenGpu {
            uuid: String::new(),
            pci: String::new(),
            product: product.to_owned(),
            nvlink,
            partitions: Vec::new(),
        };
        vec![gpu; 8]
    }

    #[test]
    fn healthy_gpus_of_which_nothing_is_known_are_held_to_no_default() {
        let node = |gpus: &[SeenGpu]| settings(Scope::Node, &[]).unwrap().of(gpus).gb_s;
        // Two on a board without a switch; bridged cards; unpublished products; no NVML.
        let h100 = gpus("NVIDIA H100 80GB HBM3", true);
        for (count, least) in [(2, 50.0), (3, 50.0), (4, 150.0), (8, 150.0)] {
            assert_eq!(node(&h100[..count]), Some(least), "{count}");
        }
        for (product, nvlink) in [
            ("NVIDIA H100 NVL", true),
            ("NVIDIA A100-PCIE-80GB", false),
            ("NVIDIA A40", true),
            ("NVIDIA L4", false),
        ] {
            assert_eq!(node(&gpus(product, nvlink)), None, "{product}");
        }
        assert_eq!(node(&[]), None);
        let gang = |gpus: &[SeenGpu], all| settings(Scope::Gang, all).unwrap().of(gpus).gb_s;
        assert_eq!(gang(&h100, &[]), Some(150.0));
        assert_eq!(gang(&h100[..1], &[]), None);
        let ib = [("GPUWARDEN_BW_PERCENT", "100"), ("GPUWARDEN_FABRIC", "ib")];
        assert_eq!(gang(&h100[..4], &ib), Some(75.0));
    }

    #[test]
    fn of_several_products_the_slowest_counts() {
        let percent = [("GPUWARDEN_BW_PERCENT", "100")];
        let settings = settings(Scope::Node, &percent).unwrap();
        let mut mixed = gpus("NVIDIA H100 80GB HBM3", true);
        assert_eq!(settings.of(&mixed).gb_s, Some(460.0));
        mixed[3].product = "NVIDIA A100-SXM4-80GB".to_owned();
        mixed[5].product = "NVIDIA H200".to_owned();
        assert_eq!(settings.of(&mixed).gb_s, Some(230.0));
        mixed.reverse();
        assert_eq!(settings.of(&mixed).gb_s, Some(230.0));
        // One unknown product makes the group's bandwidth unknown.
        mixed[0].product = "NVIDIA X".to_owned();
        assert_eq!(settings.of(&mixed).gb_s, None);
    }

    /// Second copy of the table, since a changed number decides which nodes are taken out of
    /// service.
    #[test]
    fn the_numbers_are_those_that_were_published() {
        let numbers: Vec<_> = rows()
            .map(|row| (row.scope, row.fabric, row.product, row.gb_s))
            .collect();
        let published = [
            ("node", "nvlink", "H100", 460.0),
            ("node", "nvlink", "H200", 431.0),
            ("node", "nvlink", "A100", 230.0),
            ("node", "nvlink", "GB200", 580.0),
            ("node", "nvlink", "GB300", 630.0),
            ("node", "pcie", "L40S", 20.0),
            ("gang", "efa", "H100", 335.0),
            ("gang", "tcpx", "H100", 60.0),
            ("gang", "tcpxo", "H100", 328.0),
            ("gang", "ib", "H100", 150.0),
            ("gang", "ib", "A100", 165.0),
            ("gang", "roce", "H200", 250.0),
            ("gang", "roce", "B200", 250.0),
            ("gang", "roce", "GB200", 160.0),
            ("gang", "mnnvl", "GB200", 617.0),
        ];
        assert_eq!(numbers, published);
    }

    #[test]
    fn every_row_of_the_table_is_read_and_has_a_source() {
        assert_eq!(rows().count(), TABLE.lines().count() - 1);
        for row in rows() {
            assert!(row.gb_s > 0.0 && row.source.len() > 10, "{row:?}");
            assert!(["node", "gang"].contains(&row.scope), "{row:?}");
        }
        let places: std::collections::BTreeSet<_> = rows()
            .map(|row| (row.product, row.fabric, row.scope))
            .collect();
        assert_eq!(places.len(), rows().count(), "a place has two rows");
    }

    #[test]
    #[allow(clippy::type_complexity, reason = "a table")]
    fn a_threshold_is_what_was_set_or_a_share_of_what_is_published() {
        let h100 = gpus("NVIDIA H100 80GB HBM3", true);
        let l40s = gpus("NVIDIA L40S", false);
        let percent = ("GPUWARDEN_BW_PERCENT", "50");
        let cases: [(Scope, &[(&str, &str)], &[SeenGpu], Option<f64>); 10] = [
            (Scope::Node, &[], &h100, Some(150.0)),
            (Scope::Node, &[], &[], None),
            (Scope::Node, &[], &l40s, Some(15.0)),
            (
                Scope::Node,
                &[("BW_THRESHOLD_GBPS", "40")],
                &l40s,
                Some(40.0),
            ),
            (Scope::Node, &[percent], &h100, Some(230.0)),
            (
                Scope::Node,
                &[percent, ("BW_THRESHOLD_GBPS", "40")],
                &h100,
                Some(230.0),
            ),
            (
                Scope::Node,
                &[percent],
                &gpus("NVIDIA H100 NVL", false),
                None,
            ),
            (Scope::Gang, &[percent], &h100, Some(150.0)),
            (
                Scope::Gang,
                &[percent, ("GPUWARDEN_FABRIC", "EFA")],
                &h100,
                Some(167.5),
            ),
            (
                Scope::Node,
                &[percent, ("SKIP_BANDWIDTH_CHECK", "true")],
                &h100,
                None,
            ),
        ];
        for (scope, set, gpus, expected) in cases {
            let threshold = settings(scope, set).unwrap().of(gpus);
            assert_eq!(threshold.gb_s, expected, "{set:?} {threshold:?}");
        }
        // The preflight ADR measured 164 to 169 GB/s with A100 over InfiniBand.
        let ib = [("GPUWARDEN_BW_PERCENT", "100"), ("GPUWARDEN_FABRIC", "ib")];
        let a100 = gpus("NVIDIA A100-SXM4-80GB", true);
        let threshold = settings(Scope::Gang, &ib).unwrap().of(&a100);
        assert!(
            threshold.passes(168.0) && !threshold.passes(160.0),
            "{threshold:?}"
        );
        let refused = settings(Scope::Gang, &[("GPUWARDEN_FABRIC", "string")]).unwrap_err();
        assert!(
            refused.to_string().contains("efa, ib, mnnvl, nvlink, pcie"),
            "{refused}"
        );
    }
}
