//! Errors of NCCL, also from the CUDA runtime below it.

use std::fmt;

use crate::cuda::CudaError;

/// Names of the codes from 0 on (`ncclResult_t`).
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

/// Error of NCCL, or of the CUDA runtime on its behalf.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call of NCCL failed.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// A call of the CUDA runtime failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A buffer is too small for the reduction.
    #[error("cannot reduce {numbers} four-byte elements in a buffer of {bytes} bytes")]
    Room {
        /// Number of elements to reduce.
        numbers: usize,
        /// Size of the buffer, in bytes.
        bytes: usize,
    },
}

/// A failed call of NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// Name of the library function.
    pub call: &'static str,
    /// Returned code, a value of `ncclResult_t`.
    pub code: u32,
    /// Library's description of the code.
    pub(super) text: String,
    /// Last error message of the library; empty if there is none.
    pub(super) last: String,
}

// === impl NcclError ===

impl NcclError {
    /// Returns the name of the code, such as `ncclSystemError`; an unknown code is shown as a
    /// number.
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
