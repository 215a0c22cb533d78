//! Queries one GPU or partition, and distinguishes unsupported values, failed calls and the
//! loss of the GPU.

use nvml_wrapper_sys::bindings::nvmlFieldValue_t;

use super::error::{NvmlError, code_name};
use super::functions::{Device, Functions, Plain, number};
use super::types::{Length, TEXT_BYTES, Text, text};

/// Queries to one device, with the failures so far.
pub(super) struct Query<'a> {
    functions: &'a Functions,
    pub(super) device: Device,
    /// Failed calls, each with its error.
    pub(super) failed: Vec<(String, String)>,
    /// Error that showed the loss of the GPU; no further calls are made after it.
    pub(super) lost: Option<NvmlError>,
}

// === impl Query ===

impl<'a> Query<'a> {
    pub(super) fn new(functions: &'a Functions, device: Device) -> Self {
        Self {
            functions,
            device,
            failed: Vec::new(),
            lost: None,
        }
    }

    /// Makes a call; returns `None` and records the error if it fails.
    pub(super) fn call<T>(
        &mut self,
        call: impl FnOnce(&Functions, Device) -> Result<T, NvmlError>,
    ) -> Option<T> {
        if self.lost.is_some() {
            return None;
        }
        match call(self.functions, self.device) {
            Ok(value) => Some(value),
            Err(error) => {
                self.record(error);
                None
            }
        }
    }

    /// Queries a value of a fixed size.
    pub(super) fn value<T: Plain>(
        &mut self,
        call: impl FnOnce(&Functions, Device, &mut T) -> Result<(), NvmlError>,
    ) -> Option<T> {
        self.call(|functions, device| {
            let mut value = T::zero();
            call(functions, device, &mut value).map(|()| value)
        })
    }

    /// Queries a text; an empty one is `None`.
    pub(super) fn text(
        &mut self,
        call: impl FnOnce(&Functions, Device, &mut Text, Length) -> Result<(), NvmlError>,
    ) -> Option<String> {
        let value = self.call(|functions, device| {
            let mut bytes: Text = [0; TEXT_BYTES];
            call(functions, device, &mut bytes, Length::OF_TEXT).map(|()| text(&bytes))
        });
        value.filter(|text| !text.is_empty())
    }

    /// Queries the field `ids[i].0` with scope `ids[i].1`, such as a link; a field that the
    /// driver does not support is `None`.
    pub(super) fn fields<const N: usize>(&mut self, ids: [(u32, u32); N]) -> [Option<i64>; N] {
        let mut values = ids.map(|(field, scope)| nvmlFieldValue_t {
            fieldId: field,
            scopeId: scope,
            ..nvmlFieldValue_t::zero()
        });
        let read = self.call(|functions, device| functions.field_values(device, &mut values));
        if read.is_none() {
            return [None; N];
        }
        values.map(|value| {
            let call = "nvmlDeviceGetFieldValues";
            match NvmlError::check(call, value.nvmlReturn) {
                Ok(()) => number(&value),
                // Old drivers return these codes for a field that they do not support.
                Err(error) if error.is_out_of_range() || error.is_not_found() => None,
                Err(error) if error.is_unsupported() || error.is_lost() => {
                    self.record(error);
                    None
                }
                Err(_) => {
                    let field = format!("{call}({})", value.fieldId);
                    self.failed.push((field, code_name(value.nvmlReturn)));
                    None
                }
            }
        })
    }

    /// Records a failed call, unless the value is unsupported.
    fn record(&mut self, error: NvmlError) {
        if error.is_lost() {
            self.lost = Some(error);
        } else if !error.is_unsupported() {
            let failed = (error.call.to_owned(), error.name());
            if !self.failed.contains(&failed) {
                self.failed.push(failed);
            }
        }
    }
}
