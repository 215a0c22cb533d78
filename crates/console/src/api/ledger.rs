//! Ledger of GPUs in the API.

use analysis::ledger::{GpuRow, Ledger, Mark, MarkKind, NodeRow, Score};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Response of `/api/v1/ledger`: the GPUs and nodes, first those that are marked as bad, then those
/// that repairs do not help, then by score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerView {
    /// Time of the response, by the server's clock.
    pub now: Timestamp,
    /// GPUs, as many as were asked for.
    pub gpus: Vec<LedgerGpu>,
    /// Number of all GPUs.
    pub total_gpus: usize,
    /// Nodes, as many as were asked for.
    pub nodes: Vec<LedgerNode>,
    /// Number of all nodes.
    pub total_nodes: usize,
    /// Number of rows that had to make room for others.
    pub left_out: u64,
}

/// GPU of the ledger in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerGpu {
    /// Serial number, or the UUID if no event named a serial number.
    pub id: String,
    /// Node where the GPU was seen last; empty if it was never seen.
    pub node: String,
    /// PCI address there without function; empty if unknown.
    pub slot: String,
    /// Time when the GPU was first seen there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Time when the GPU was last seen there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Timestamp>,
    /// True if another GPU was seen in that slot since.
    pub is_replaced: bool,
    /// Two nodes on which the GPU is at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_two_nodes: Option<(String, String)>,
    /// Number of faults that are kept.
    pub faults: usize,
    /// Number of repairs that are kept.
    pub repairs: usize,
    /// Score; its terms are in the details.
    pub score: f64,
    /// Latest mark of a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    /// True if a conclusion is open that repairs do not help: the GPU is a candidate for a return to
    /// its vendor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_rma_candidate: bool,
}

/// Node of the ledger in short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerNode {
    /// Name of the node.
    pub node: String,
    /// Number of faults that are kept.
    pub faults: usize,
    /// Number of repairs that are kept.
    pub repairs: usize,
    /// Score; its terms are in the details.
    pub score: f64,
}

/// Response of `/api/v1/ledger/{name}`: a GPU by serial number or UUID, or a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerEntry {
    /// Time of the response, by the server's clock.
    pub now: Timestamp,
    /// GPU with that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuEntry>,
    /// Node with that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeEntry>,
}

/// GPU with its whole row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuEntry {
    /// GPU in short.
    pub short: LedgerGpu,
    /// Row of the ledger.
    pub row: GpuRow,
    /// Score with its terms.
    pub score: Score,
}

/// Node with its whole row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeEntry {
    /// Row of the ledger.
    pub row: NodeRow,
    /// Score with its terms.
    pub score: Score,
    /// GPUs that were seen on the node last, and in no slot that another one has now.
    pub gpus: Vec<LedgerGpu>,
}

// === impl LedgerView ===

impl LedgerView {
    /// Returns at most `limit` GPUs and as many nodes.
    pub fn of(ledger: &Ledger, limit: usize, now: Timestamp) -> Self {
        let mut gpus: Vec<LedgerGpu> = ledger
            .gpus()
            .map(|(key, row)| LedgerGpu::of(ledger, key, row, now))
            .collect();
        gpus.sort_by(|one, other| {
            let first = |gpu: &LedgerGpu| (gpu.is_bad(), gpu.is_rma_candidate);
            let by_score = other.score.total_cmp(&one.score);
            first(other)
                .cmp(&first(one))
                .then(by_score)
                .then(one.id.cmp(&other.id))
        });
        let mut nodes: Vec<LedgerNode> = ledger
            .nodes()
            .map(|(name, row)| LedgerNode::of(name, row, now))
            .collect();
        nodes.sort_by(|one, other| {
            let by_score = other.score.total_cmp(&one.score);
            by_score.then(one.node.cmp(&other.node))
        });
        let (total_gpus, total_nodes) = (gpus.len(), nodes.len());
        gpus.truncate(limit);
        nodes.truncate(limit);
        Self {
            now,
            gpus,
            total_gpus,
            nodes,
            total_nodes,
            left_out: ledger.left_out(),
        }
    }
}

// === impl LedgerGpu ===

impl LedgerGpu {
    /// Returns true if a person has marked the GPU as bad, or as returned to its vendor.
    pub fn is_bad(&self) -> bool {
        let mark = self.mark.as_ref();
        mark.is_some_and(|mark| mark.kind != MarkKind::Good)
    }

    fn of(ledger: &Ledger, key: &str, row: &GpuRow, now: Timestamp) -> Self {
        let place = row.latest_place();
        let owned = |name: &str| name.to_owned();
        let both = row.on_two_nodes();
        Self {
            id: key.to_owned(),
            node: place.map(|place| place.node.clone()).unwrap_or_default(),
            slot: place.map(|place| place.slot.clone()).unwrap_or_default(),
            since: place.map(|place| place.from),
            last_seen: place.map(|place| place.to),
            is_replaced: place.is_some_and(|place| !ledger.is_in(key, place)),
            on_two_nodes: both.map(|(one, other)| (owned(one), owned(other))),
            faults: row.history.faults.len(),
            repairs: row.history.repairs.len(),
            score: Score::of(&row.history, now).value,
            mark: row.mark.clone(),
            is_rma_candidate: !row.rma.is_empty(),
        }
    }
}

// === impl LedgerNode ===

impl LedgerNode {
    fn of(name: &str, row: &NodeRow, now: Timestamp) -> Self {
        Self {
            node: name.to_owned(),
            faults: row.history.faults.len(),
            repairs: row.history.repairs.len(),
            score: Score::of(&row.history, now).value,
        }
    }
}

// === impl LedgerEntry ===

impl LedgerEntry {
    /// Returns the GPU, or the node, with this name; `None` if the ledger has neither.
    pub fn of(ledger: &Ledger, name: &str, now: Timestamp) -> Option<Self> {
        let gpu = ledger.gpu(name).map(|(key, row)| GpuEntry {
            short: LedgerGpu::of(ledger, key, row, now),
            row: row.clone(),
            score: Score::of(&row.history, now),
        });
        let gpus: Vec<LedgerGpu> = ledger
            .gpus()
            .filter(|(_, row)| row.latest_place().is_some_and(|place| place.node == name))
            .map(|(key, row)| LedgerGpu::of(ledger, key, row, now))
            .filter(|gpu| !gpu.is_replaced)
            .collect();
        let row = ledger.node(name).cloned();
        let is_known = row.is_some() || !gpus.is_empty();
        let row = row.unwrap_or_default();
        let node = is_known.then(|| NodeEntry {
            score: Score::of(&row.history, now),
            row,
            gpus,
        });
        (gpu.is_some() || node.is_some()).then_some(Self { now, gpu, node })
    }
}
