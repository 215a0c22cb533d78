//! What rank 0 and the members of a gang say to each other.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use preflight::rendezvous::Topology;
use serde::{Deserialize, Serialize};

use crate::worker::{Benchmark, Failure, Measured};

/// The version of what is said: all members of a gang run the same image, or are told.
pub(super) const PROTOCOL: u32 = 3;

/// What a member says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromMember {
    /// Who it is; comes first.
    Hello(Hello),
    /// The name of a group that it has made.
    Group {
        step: u64,
        group: Result<String, Failure>,
    },
    /// The result of a test.
    Result {
        step: u64,
        result: Result<Vec<Measured>, Failure>,
    },
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    pub(super) rank: usize,
    pub(super) pod: String,
    pub(super) node: String,
    /// The number of its devices.
    pub(super) devices: u32,
    /// The place where others of a group reach it, where they have to.
    pub(super) endpoint: Option<SocketAddr>,
    /// The topology file that was chosen for its machine; `None` where NCCL is left to itself.
    pub(super) topology: Option<Topology>,
    /// The variables that its check has inherited from the pod.
    pub(super) inherited: BTreeMap<String, String>,
}

/// What rank 0 says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank0 {
    /// A group is to be made.
    Lead { step: u64 },
    /// A test is to be made.
    Test(Test),
    /// A test is over for everybody.
    Over { step: u64 },
    /// What follows is tested without topology files.
    WithoutTopology,
    /// The end.
    Verdict(Verdict),
}

/// A test of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Test {
    pub(super) step: u64,
    /// The name of the group.
    pub(super) group: String,
    /// The number of all ranks of devices.
    pub(super) ranks: u32,
    /// The rank of the first device of the member.
    pub(super) first: u32,
    /// The place of the member in the group.
    pub(super) place: usize,
    /// The places where the members of the group are reached, in order.
    pub(super) endpoints: Vec<Option<SocketAddr>>,
    pub(super) benchmark: Benchmark,
}

/// What came out for one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Verdict {
    pub(super) kind: Kind,
    /// In one line, for people.
    pub(super) text: String,
    /// The bandwidth of all members together, in gigabytes a second.
    pub(super) gb_s: Option<f64>,
    /// The reason for which the gang fails, where it is no bandwidth.
    pub(super) failure: Option<Failure>,
    /// The ranks of those who are missing or to blame, as far as a text names them: who hears it looks
    /// whether it reaches them.
    #[serde(default)]
    pub(super) suspects: Vec<usize>,
}

/// The meaning for the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// All together pass.
    Passed,
    /// Fails with everybody, or is alone and one of its GPUs fails by itself.
    Culprit,
    /// It fails together with another one.
    Pair,
    /// Others are the reason.
    Innocent,
    /// Nobody can say who is the reason.
    Unclear,
    /// Members are not there.
    Missing,
    /// There is nothing that may be tested.
    Untested,
}
