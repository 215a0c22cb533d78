//! Errors of the CUDA runtime.

use std::fmt;

/// Code of a query on a stream that still has work (`cudaErrorNotReady`).
pub(super) const NOT_READY: u32 = 600;

/// A failed call of the CUDA runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// Name of the library function.
    pub call: &'static str,
    /// Returned code, a value of `cudaError`.
    pub code: u32,
    /// Library's name for the code, such as `cudaErrorNoDevice`.
    pub(super) name: String,
    /// Library's description of the code.
    pub(super) text: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code, .. } = self;
        if self.name.is_empty() {
            return write!(f, "{call} answered {code}");
        }
        write!(f, "{call} answered {} ({})", self.name, self.text)
    }
}

impl std::error::Error for CudaError {}
