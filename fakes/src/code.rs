//! Error codes of NVML, by name.

use nvml_wrapper_sys::bindings as sys;

pub(crate) const SUCCESS: u32 = sys::nvmlReturn_enum_NVML_SUCCESS;

/// Defines the error codes, and the table of their names.
macro_rules! codes {
    ($($name:ident = $code:ident,)*) => {
        $(pub(crate) const $name: u32 = sys::$code;)*

        /// Errors that a scenario may name; others are written as a number.
        pub(crate) const NAMED: &[(&str, u32)] = &[
            $((concat!("NVML_ERROR_", stringify!($name)), $name)),*
        ];
    };
}

codes! {
    UNINITIALIZED = nvmlReturn_enum_NVML_ERROR_UNINITIALIZED,
    INVALID_ARGUMENT = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
    NO_PERMISSION = nvmlReturn_enum_NVML_ERROR_NO_PERMISSION,
    NOT_FOUND = nvmlReturn_enum_NVML_ERROR_NOT_FOUND,
    INSUFFICIENT_SIZE = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
    DRIVER_NOT_LOADED = nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
    TIMEOUT = nvmlReturn_enum_NVML_ERROR_TIMEOUT,
    IRQ_ISSUE = nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE,
    FUNCTION_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
    GPU_IS_LOST = nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST,
    RESET_REQUIRED = nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
    LIB_RM_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    NO_DATA = nvmlReturn_enum_NVML_ERROR_NO_DATA,
    ARGUMENT_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    NOT_READY = nvmlReturn_enum_NVML_ERROR_NOT_READY,
    GPU_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND,
    UNKNOWN = nvmlReturn_enum_NVML_ERROR_UNKNOWN,
}
