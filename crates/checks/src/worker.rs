//! Child process that calls NVML, CUDA and NCCL for a check. A call that hangs or crashes
//! inside a vendor's library costs this process only, and the check still ends with a result.
//!
//! Requests and answers are JSON objects, one per line, over the child's standard input, which
//! is a socket: standard output is left to the libraries, which write to it at will. The child
//! announces each call before making it, and ends when the socket closes.

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

/// Configured paths of the libraries; unset ones are searched for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Libraries {
    cuda: Option<PathBuf>,
    nccl: Option<PathBuf>,
    nvml: Option<PathBuf>,
    driver_root: Option<PathBuf>,
}

/// Request to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerRequest {
    /// Asks for the GPUs that NVML reports.
    Gpus(Libraries),
    /// Asks for the number of CUDA devices.
    Devices(Libraries),
    /// Asks for the id of a new group, which can be joined while this worker lives.
    Id(Libraries),
    /// Asks for an all-reduce of a group.
    AllReduce(Libraries, Join, Benchmark),
    /// Asks for a copy within each device.
    Copy(Libraries, Benchmark),
}

/// Message from a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    /// Announces the next call.
    Doing {
        /// Name of the function.
        call: Cow<'static, str>,
        /// Number of the device, if the call has one.
        device: Option<u32>,
    },
    /// Answers with the GPUs.
    Gpus(Vec<SeenGpu>),
    /// Answers with the number of devices.
    Devices(u32),
    /// Answers with the id of a new group, in hexadecimal digits.
    Id(String),
    /// Answers with the measured times.
    Measured(Vec<Measured>),
    /// Answers with the reason why there is no result.
    Failed(WorkerFailure),
}

/// GPU as reported by NVML.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenGpu {
    pub(crate) uuid: String,
    pub(crate) pci: String,
    pub(crate) product: String,
    /// True if any NVLink of the GPU is connected.
    pub(crate) nvlink: bool,
    /// UUIDs of the GPU's partitions.
    pub(crate) partitions: Vec<String>,
}

/// Position of a process in a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    /// Id of the group, in hexadecimal digits.
    pub(crate) id: String,
    /// Number of ranks in the group.
    pub(crate) ranks: u32,
    /// Rank of the first device of this process; the others follow.
    pub(crate) first: u32,
}

/// Parameters of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Benchmark {
    /// Sizes of the messages (bytes).
    pub(crate) sizes: Vec<u64>,
    pub(crate) warmups: u32,
    pub(crate) iterations: u32,
    pub(crate) operation: Operation,
}

/// Arithmetic of a reduction, by the names of `NCCL_REDUCE_OP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
}

/// Result for one message size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) bytes: u64,
    /// Time of one iteration (seconds).
    pub(crate) seconds: f64,
}

/// Reason why there is no measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerFailure {
    /// A library is missing, or is not the expected one.
    #[error("{0}")]
    Library(String),
    /// NVML cannot report the GPUs.
    #[error("{0}")]
    Nvml(String),
    /// A call of CUDA failed.
    #[error("{text}")]
    Cuda {
        /// Number of the `cudaError`.
        code: u32,
        text: String,
    },
    /// A call of NCCL failed.
    #[error("{text}")]
    Nccl {
        /// Number of the `ncclResult_t`.
        code: u32,
        text: String,
    },
    /// A GPU has computed a wrong result.
    #[error("the GPU at {pci} has worked out {numbers}")]
    Wrong {
        /// PCI address of the GPU.
        pci: String,
        /// Difference from the expected numbers.
        numbers: WrongNumbers,
    },
    /// The time limit was exceeded.
    #[error("no result after {seconds} s, {doing}")]
    Late {
        seconds: u64,
        /// Description of the last call.
        doing: String,
    },
    /// The process ended without a message.
    #[error("the process that calls the libraries {0}")]
    Crashed(String),
}

// === impl Libraries ===

impl Libraries {
    /// Returns the paths set in the environment.
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

// === impl FromWorker ===

impl FromWorker {
    /// Returns the failure for an answer that does not fit the request.
    pub(crate) fn unexpected(&self) -> WorkerFailure {
        WorkerFailure::Crashed(format!("answered something else: {self:?}"))
    }
}

// === impl Operation ===

impl Operation {
    /// Parses a value of `NCCL_REDUCE_OP`.
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
    /// Returns the message's gigabytes per second (`algbw` of nccl-tests).
    #[expect(
        clippy::cast_precision_loss,
        reason = "a message is far smaller than what a number with a point holds"
    )]
    pub(crate) fn bandwidth(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }

    /// Returns the bandwidth at each rank in gigabytes per second, as computed by nccl-tests
    /// (`busbw`): an all-reduce sends and receives each byte `2 (n - 1) / n` times.
    pub(crate) fn bus_bandwidth(&self, ranks: u32) -> f64 {
        let ranks = f64::from(ranks);
        self.bandwidth() * 2.0 * (ranks - 1.0) / ranks
    }

    /// Returns the bandwidth of a copy, which reads and writes each byte, in gigabytes per
    /// second.
    pub(crate) fn copy_bandwidth(&self) -> f64 {
        self.bandwidth() * 2.0
    }
}

// === impl WorkerFailure ===

impl WorkerFailure {
    /// Returns a function that turns a GPU's wrong numbers into a failure.
    pub(crate) fn of_gpu(pci: &str) -> impl FnOnce(WrongNumbers) -> Self {
        let pci = pci.to_owned();
        move |numbers| Self::Wrong { pci, numbers }
    }
}

impl From<CudaError> for WorkerFailure {
    fn from(error: CudaError) -> Self {
        Self::Cuda {
            code: error.code,
            text: error.to_string(),
        }
    }
}

impl From<NcclError> for WorkerFailure {
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
