//! What the CUDA runtime answers where it does not answer.

use std::fmt;

/// The answer of a stream that has work left (`cudaErrorNotReady`).
pub(super) const NOT_READY: u32 = 600;

/// A call of the CUDA runtime that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The function.
    pub call: &'static str,
    /// The code that it answered, as a number of `cudaError`.
    pub code: u32,
    /// The library's name of that, such as `cudaErrorNoDevice`.
    pub(super) name: String,
    /// The library's text for it.
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
