//! The child process that calls NVML, CUDA and NCCL for a check, so that a call that hangs or crashes inside
//! a vendor's library costs this process, and the check still ends with a result.
//!
//! It is asked and answers by one JSON object a line over its standard input, which is a socket: its
//! standard output is the libraries', which write to it what they like. It says each call before it is
//! made, and ends when the socket closes.

mod benchmark;
mod copy;
mod process;
mod start;

use std::borrow::Cow;
use std::path::PathBuf;

use host::cuda::CudaError;
use host::nccl::{Error as NcclError, Reduction};
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::numbers::WrongNumbers;

pub use process::run;
pub use start::Launcher;
pub(crate) use start::Worker;

/// The places of the libraries, where they are not to be looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Libraries {
    cuda: Option<PathBuf>,
    nccl: Option<PathBuf>,
    nvml: Option<PathBuf>,
    driver_root: Option<PathBuf>,
}

/// What a worker is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// The GPUs that NVML sees.
    Gpus(Libraries),
    /// The number of devices that CUDA sees.
    Devices(Libraries),
    /// The name of a new group. It can be joined as long as this worker lives.
    Id(Libraries),
    /// An all-reduce of a group.
    AllReduce(Libraries, Join, Benchmark),
    /// A copy within each device.
    Copy(Libraries, Benchmark),
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// A call begins.
    Doing {
        /// The function.
        call: Cow<'static, str>,
        /// The number of the device that it is about.
        device: Option<u32>,
    },
    /// The GPUs.
    Gpus(Vec<SeenGpu>),
    /// The number of devices.
    Devices(u32),
    /// The name of a group, in hexadecimal digits.
    Id(String),
    /// The bandwidths.
    Measured(Vec<Measured>),
    /// The reason why there is none.
    Failed(Failure),
}

/// A GPU as NVML tells of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenGpu {
    pub(crate) uuid: String,
    pub(crate) pci: String,
    pub(crate) product: String,
    /// True if it has NVLinks that lead somewhere.
    pub(crate) nvlink: bool,
    /// The UUIDs of its partitions.
    pub(crate) partitions: Vec<String>,
}

/// The place of a process in a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    /// The name of the group, in hexadecimal digits.
    pub(crate) id: String,
    /// The number of all ranks.
    pub(crate) ranks: u32,
    /// The rank of the first device of this process; the others follow.
    pub(crate) first: u32,
}

/// What is measured, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Benchmark {
    /// Sizes of the messages in bytes.
    pub(crate) sizes: Vec<u64>,
    pub(crate) warmups: u32,
    pub(crate) iterations: u32,
    pub(crate) operation: Operation,
}

/// The arithmetic of a reduction, by the name of `NCCL_REDUCE_OP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
}

/// The bandwidth of one size of message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) bytes: u64,
    /// Time of one iteration in seconds.
    pub(crate) seconds: f64,
}

/// The reason why nothing was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// A library is not there, or not the one that is wanted.
    #[error("{0}")]
    Library(String),
    /// NVML does not tell.
    #[error("{0}")]
    Nvml(String),
    /// A call of CUDA failed.
    #[error("{text}")]
    Cuda {
        /// The number of `cudaError`.
        code: u32,
        text: String,
    },
    /// A call of NCCL failed.
    #[error("{text}")]
    Nccl {
        /// The number of `ncclResult_t`.
        code: u32,
        text: String,
    },
    /// A GPU has worked out something wrong.
    #[error("the GPU at {pci} has worked out {numbers}")]
    Wrong {
        /// Its PCI address.
        pci: String,
        /// What is wrong.
        numbers: WrongNumbers,
    },
    /// It took too long.
    #[error("no result after {seconds} s, {doing}")]
    Late {
        seconds: u64,
        /// What was done last.
        doing: String,
    },
    /// The process ended, and said nothing of it.
    #[error("the process that calls the libraries {0}")]
    Crashed(String),
}

// === impl Libraries ===

impl Libraries {
    /// Returns the places that the environment names.
    pub(crate) fn of(environment: &Environment) -> Self {
        let path = |name| {
            environment
                .first(&[name])
                .map(|(_, path)| PathBuf::from(path))
        };
        Self {
            cuda: path("GPUWARDEN_CUDA_LIBRARY"),
            nccl: path("GPUWARDEN_NCCL_LIBRARY"),
            nvml: path("GPUWARDEN_NVML_LIBRARY"),
            driver_root: path("GPUWARDEN_NVML_DRIVER_ROOT"),
        }
    }
}

// === impl Said ===

impl Said {
    /// Returns that this is no answer to what was asked.
    pub(crate) fn unexpected(&self) -> Failure {
        Failure::Crashed(format!("answered something else: {self:?}"))
    }
}

// === impl Operation ===

impl Operation {
    /// Reads it as `NCCL_REDUCE_OP` has it.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text.to_ascii_lowercase().as_str() {
            "sum" => Self::Sum,
            "prod" => Self::Prod,
            "min" => Self::Min,
            "max" => Self::Max,
            "avg" => Self::Avg,
            _ => return None,
        })
    }

    fn of_nccl(self) -> Reduction {
        match self {
            Self::Sum => Reduction::Sum,
            Self::Prod => Reduction::Product,
            Self::Min => Reduction::Min,
            Self::Max => Reduction::Max,
            Self::Avg => Reduction::Average,
        }
    }
}

// === impl Measured ===

impl Measured {
    /// Returns the gigabytes of the message a second (`algbw` of nccl-tests).
    #[expect(
        clippy::cast_precision_loss,
        reason = "a message is far smaller than what a number with a point holds"
    )]
    pub(crate) fn bandwidth(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }

    /// Returns the bandwidth at each rank in gigabytes a second, as nccl-tests reckon it (`busbw`): an
    /// all-reduce sends and receives each byte `2 (n - 1) / n` times.
    pub(crate) fn bus_bandwidth(&self, ranks: u32) -> f64 {
        let ranks = f64::from(ranks);
        self.bandwidth() * 2.0 * (ranks - 1.0) / ranks
    }

    /// Returns the bandwidth of a copy, which reads and writes each byte, in gigabytes a second.
    pub(crate) fn copy_bandwidth(&self) -> f64 {
        self.bandwidth() * 2.0
    }
}

// === impl Failure ===

impl Failure {
    /// Returns what makes a GPU's wrong numbers a failure.
    pub(crate) fn of_gpu(pci: &str) -> impl FnOnce(WrongNumbers) -> Self {
        let pci = pci.to_owned();
        move |numbers| Self::Wrong { pci, numbers }
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Cuda {
            code: error.code,
            text: error.to_string(),
        }
    }
}

impl From<NcclError> for Failure {
    fn from(error: NcclError) -> Self {
        match error {
            NcclError::Nccl(error) => Self::Nccl {
                code: error.code,
                text: error.to_string(),
            },
            NcclError::Cuda(error) => error.into(),
            error @ NcclError::Room { .. } => Self::Crashed(format!("made a mistake: {error}")),
        }
    }
}
