//! Messages between rank 0 and the members of a gang.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use preflight::rendezvous::Topology;
use serde::{Deserialize, Serialize};

use crate::worker::{Benchmark, Measured, WorkerFailure};

/// Version of the messages. All members of a gang must run the same version; others are
/// refused.
pub(super) const PROTOCOL: u32 = 3;

/// Message of a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromMember {
    /// Introduces the member; the first message.
    Hello(Hello),
    /// Answers with the id of a new group.
    Group {
        step: u64,
        group: Result<String, WorkerFailure>,
    },
    /// Answers with the result of a test.
    Result {
        step: u64,
        result: Result<Vec<Measured>, WorkerFailure>,
    },
}

/// Description of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    pub(super) rank: usize,
    pub(super) pod: String,
    pub(super) node: String,
    /// Number of the member's devices.
    pub(super) devices: u32,
    /// Address for other members of a group, if the collective needs one.
    pub(super) endpoint: Option<SocketAddr>,
    /// Topology file chosen for the machine; `None` leaves the choice to NCCL.
    pub(super) topology: Option<Topology>,
    /// Variables that the member's check has inherited from the pod.
    pub(super) inherited: BTreeMap<String, String>,
}

/// Message of rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank0 {
    /// Orders the creation of a group.
    Lead { step: u64 },
    /// Orders a test of a group.
    Test(Test),
    /// Announces the end of a test for all members.
    Over { step: u64 },
    /// Orders that further tests use no topology files.
    WithoutTopology,
    /// Sends the verdict, which ends the check.
    Verdict(MemberVerdict),
}

/// Test of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Test {
    pub(super) step: u64,
    /// Id of the group.
    pub(super) group: String,
    /// Number of all ranks of devices.
    pub(super) ranks: u32,
    /// Rank of the member's first device.
    pub(super) first: u32,
    /// Position of the member in the group.
    pub(super) place: usize,
    /// Addresses of the group's members, in order.
    pub(super) endpoints: Vec<Option<SocketAddr>>,
    pub(super) benchmark: Benchmark,
}

/// Verdict for one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MemberVerdict {
    pub(super) kind: VerdictKind,
    /// Text in one line, for people.
    pub(super) text: String,
    /// Bandwidth of all members together (GB/s).
    pub(super) gb_s: Option<f64>,
    /// Failure of the gang, unless it is a low bandwidth.
    pub(super) failure: Option<WorkerFailure>,
    /// Ranks of missing members or culprits named by the text: the receiver checks whether it
    /// can reach them.
    #[serde(default)]
    pub(super) suspects: Vec<usize>,
}

/// Meaning for the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum VerdictKind {
    /// The whole gang passes.
    Passed,
    /// The member fails with every other one, or is alone and one of its GPUs fails.
    Culprit,
    /// The member fails only together with one other member.
    Pair,
    /// The cause is in other members.
    Innocent,
    /// The cause cannot be determined.
    Unclear,
    /// Members are missing from the gang.
    Missing,
    /// Nothing may be tested without a topology file.
    Untested,
}
