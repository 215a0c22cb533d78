//! What NVML answers where it does not answer: its codes, by the names of its header.

use std::fmt;
use std::path::PathBuf;

use nvml_wrapper_sys::bindings as sys;

use crate::library;

/// The answer of a function that the library does not have.
pub(super) const FUNCTION_NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND;

/// The codes that have a name, in their order from 0 on; 999 is `NVML_ERROR_UNKNOWN`.
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

/// NVML cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No library was found, or another one.
    #[error(transparent)]
    Library(#[from] library::OpenError),
    /// The library does not find its driver.
    #[error("{} cannot be used: {source}", library.display())]
    NotUsable {
        /// The library.
        library: PathBuf,
        /// Its answer.
        source: NvmlError,
    },
}

/// A call of NVML that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlError {
    /// The function.
    pub call: &'static str,
    /// The code that it answered.
    pub(super) code: u32,
}

// === impl NvmlError ===

impl NvmlError {
    /// Returns what a function has answered as a result.
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

    /// Returns whether the GPU or the driver does not know what was asked for, which is no failure.
    pub(super) fn is_not_told(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
                | FUNCTION_NOT_FOUND
                | sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED
                | sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED
        )
    }

    /// Returns whether a structure of this version is unknown to the driver.
    pub(super) fn is_other_version(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
                | FUNCTION_NOT_FOUND
        )
    }

    /// Returns whether the GPU is gone.
    pub(super) fn is_lost(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST
                | sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND
        )
    }

    /// Returns whether it is the driver that is gone or was exchanged, and not one GPU.
    pub(super) fn is_of_driver(self) -> bool {
        matches!(
            self.code,
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
                | sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
                | sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH
        )
    }

    /// Returns whether no event came within the time.
    pub(super) fn is_timeout(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT
    }

    /// Returns whether an argument was out of range, such as a link that the GPU does not have.
    pub(super) fn is_out_of_range(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
    }

    /// Returns whether there is nothing at a place, such as an unused slot for a partition.
    pub(super) fn is_not_found(self) -> bool {
        self.code == sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND
    }

    /// Returns whether more was to be told than there was room for.
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

/// Returns the name of a code of NVML; one without a name keeps its number.
pub(super) fn code_name(code: u32) -> String {
    if code == sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN {
        return "NVML_ERROR_UNKNOWN".to_owned();
    }
    let named = usize::try_from(code).ok().and_then(|at| NAMES.get(at));
    named.map_or_else(|| format!("NVML error {code}"), ToString::to_string)
}
