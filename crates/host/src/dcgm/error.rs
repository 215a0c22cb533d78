//! What DCGM answers where it does not answer.

use std::fmt;
use std::path::PathBuf;

use crate::library;

/// The answer to a structure of a version that it does not know (`DCGM_ST_VER_MISMATCH`).
const VER_MISMATCH: i32 = -12;
/// The answer of a function that the library does not have (`DCGM_ST_FUNCTION_NOT_FOUND`).
pub(super) const FUNCTION_NOT_FOUND: i32 = -20;

/// DCGM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No library was found, or another one.
    #[error(transparent)]
    Library(#[from] library::OpenError),
    /// The library does not start.
    #[error("{} cannot be used: {source}", library.display())]
    NotUsable {
        /// The library.
        library: PathBuf,
        /// Its answer.
        source: DcgmError,
    },
    /// No host engine answers.
    #[error("no host engine answers at {address}: {source}")]
    NotConnected {
        /// The address that was tried.
        address: String,
        /// The answer of the library.
        source: DcgmError,
    },
}

/// A call of DCGM that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcgmError {
    /// The function.
    pub call: &'static str,
    /// The code that it answered.
    pub(super) code: i32,
    /// The library's text for that.
    pub(super) text: String,
}

// === impl DcgmError ===

impl DcgmError {
    /// Returns the error that no form of an answer is known to both.
    pub(super) fn other_version() -> Self {
        Self {
            call: "dcgmHealthCheck",
            code: VER_MISMATCH,
            text: "this version of DCGM is not known here".to_owned(),
        }
    }

    /// Returns whether a structure of this version is unknown to the library.
    pub(super) fn is_other_version(&self) -> bool {
        self.code == VER_MISMATCH
    }
}

impl fmt::Display for DcgmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}", self.call, self.code)?;
        if self.text.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", self.text)
        }
    }
}

impl std::error::Error for DcgmError {}
