//! Errors of NVML, with the names of its header.

use std::fmt;
use std::path::PathBuf;

use nvml_wrapper_sys::bindings as sys;

use crate::library;

/// Code for a function that the library lacks.
pub(super) const FUNCTION_NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND;

/// Names of the codes from 0 on; 999 is `NVML_ERROR_UNKNOWN`.
const NAMES: [&str; 31] = [
    "NVML_SUCCESS",
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_ALREADY_INITIALIZED",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_INSUFFICIENT_SIZE",
    "NVML_ERROR_INSUFFICIENT_POWER",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_TIMEOUT",
    "NVML_ERROR_IRQ_ISSUE",
    "NVML_ERROR_LIBRARY_NOT_FOUND",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_CORRUPTED_INFOROM",
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_OPERATING_SYSTEM",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "NVML_ERROR_IN_USE",
    "NVML_ERROR_MEMORY",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
    "NVML_ERROR_INSUFFICIENT_RESOURCES",
    "NVML_ERROR_FREQ_NOT_SUPPORTED",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
    "NVML_ERROR_NOT_READY",
    "NVML_ERROR_GPU_NOT_FOUND",
    "NVML_ERROR_INVALID_STATE",
    "NVML_ERROR_RESET_TYPE_NOT_SUPPORTED",
];

/// Error when NVML is opened.
#[derive(Debug, thiserror::Error)]
pub enum NvmlOpenError {
    /// No library was found, or the file is another library.
    #[error(transparent)]
    Library(#[from] library::LibraryOpenError),
    /// The library failed to initialise, for example without a driver.
    #[error("{} cannot be used: {source}", library.display())]
    NotUsable {
        /// Path or name of the library.
        library: PathBuf,
        /// Error that the library returned.
        source: NvmlError,
    },
}

/// A failed call of NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlError {
    /// Name of the library function.
    pub call: &'static str,
    /// Returned code, a value of `nvmlReturn_t`.
    pub(super) code: u32,
}

// === impl NvmlError ===

impl NvmlError {
    /// Converts a function's return code to a result.
    pub(super) fn check(call: &'static str, code: u32) -> Result<(), Self> {
        if code == sys::nvmlReturn_enum_NVML_SUCCESS {
            Ok(())
        } else {
            Err(Self { call, code })
        }
    }

    /// Returns the name of the code, such as `NVML_ERROR_GPU_IS_LOST`.
    pub(super) fn name(self) -> String {
        code_name(self.code)
    }

    /// Returns true if the GPU or the driver does not support the query, which is not a
    /// failure.
    pub(super) fn is_unsupported(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
                | FUNCTION_NOT_FOUND
                | sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED
                | sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED
        )
    }

    /// Returns true if the driver does not support this version of a structure.
    pub(super) fn is_other_version(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
                | FUNCTION_NOT_FOUND
        )
    }

    /// Returns true if the GPU is gone.
    pub(super) fn is_lost(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST
                | sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND
        )
    }

    /// Returns true if the driver is gone or was replaced, rather than one GPU.
    pub(super) fn is_driver_error(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
                | sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
                | sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH
        )
    }

    /// Returns true if no event came within the time.
    pub(super) fn is_timeout(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT
    }

    /// Returns true if an argument was out of range, such as a link that the GPU does not have.
    pub(super) fn is_out_of_range(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
    }

    /// Returns true if the slot is empty, such as one for a partition.
    pub(super) fn is_not_found(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND
    }

    /// Returns true if the result did not fit into the buffer.
    pub(super) fn is_too_small(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE
    }
}

impl fmt::Display for NvmlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}", self.call, self.name())
    }
}

impl std::error::Error for NvmlError {}

/// Returns the name of a code of NVML; an unknown code is shown as a number.
pub(super) fn code_name(code: u32) -> String {
    if code == sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN {
        return "NVML_ERROR_UNKNOWN".to_owned();
    }
    let named = usize::try_from(code).ok().and_then(|at| NAMES.get(at));
    named.map_or_else(|| format!("NVML error {code}"), ToString::to_string)
}
