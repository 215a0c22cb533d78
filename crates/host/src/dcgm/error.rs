//! Errors of DCGM and of the attempt to open it.

use std::fmt;
use std::path::PathBuf;

use crate::library;

/// Code for a structure version that the library does not support (`DCGM_ST_VER_MISMATCH`).
const VER_MISMATCH: i32 = -12;
/// Code for a function that the library lacks (`DCGM_ST_FUNCTION_NOT_FOUND`).
pub(super) const FUNCTION_NOT_FOUND: i32 = -20;

/// Error when DCGM is opened.
#[derive(Debug, thiserror::Error)]
pub enum DcgmOpenError {
    /// No library was found, or the file is another library.
    #[error(transparent)]
    Library(#[from] library::LibraryOpenError),
    /// The library failed to initialise.
    #[error("{} cannot be used: {source}", library.display())]
    NotUsable {
        /// Path or name of the library.
        library: PathBuf,
        /// Error that the library returned.
        source: DcgmError,
    },
    /// The host engine does not answer.
    #[error("no host engine answers at {address}: {source}")]
    NotConnected {
        /// Address that was tried, `HOST` or `HOST:PORT`.
        address: String,
        /// Error that the library returned.
        source: DcgmError,
    },
}

/// A failed call of DCGM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcgmError {
    /// Name of the library function.
    pub call: &'static str,
    /// Returned code, a value of `dcgmReturn_t`.
    pub(super) code: i32,
    /// Library's description of the code.
    pub(super) text: String,
}

// === impl DcgmError ===

impl DcgmError {
    /// Returns the error for a library that accepts none of the known layouts.
    pub(super) fn other_version() -> Self {
        Self {
            call: "dcgmHealthCheck",
            code: VER_MISMATCH,
            text: "this version of DCGM is not supported".to_owned(),
        }
    }

    /// Returns true if the library does not support the structure's version.
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
