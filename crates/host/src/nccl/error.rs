//! What NCCL answers where it does not answer.

use std::fmt;

use crate::cuda::CudaError;

/// The codes that have a name, in their order from 0 on (`ncclResult_t`).
pub(super) const NAMES: [&str; 8] = [
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
];

/// Something that NCCL needs has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call of NCCL.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// A call of the CUDA runtime for it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A buffer has less room than what is to be reduced.
    #[error("{numbers} numbers of four bytes are to be reduced in a buffer of {bytes} bytes")]
    Room {
        /// Number of numbers.
        numbers: usize,
        /// Size of the buffer.
        bytes: usize,
    },
}

/// A call of NCCL that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// The code that it answered, as a number of `ncclResult_t`.
    pub code: u32,
    /// The library's text for that.
    pub(super) text: String,
    /// The last thing that the library says has gone wrong; empty where it says nothing.
    pub(super) last: String,
}

// === impl NcclError ===

impl NcclError {
    /// Returns the name of the code, such as `ncclSystemError`; one without a name keeps its number.
    pub fn name(&self) -> String {
        let named = usize::try_from(self.code).ok();
        let named = named.and_then(|at| NAMES.get(at));
        named.map_or_else(|| format!("NCCL error {}", self.code), ToString::to_string)
    }
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}", self.call, self.name())?;
        if !self.text.is_empty() {
            write!(f, " ({})", self.text)?;
        }
        if !self.last.is_empty() {
            write!(f, ": {}", self.last)?;
        }
        Ok(())
    }
}

impl std::error::Error for NcclError {}
