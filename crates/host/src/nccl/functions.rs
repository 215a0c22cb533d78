//! Bindings to the NCCL functions in use, with the signatures of `nccl.h` of NCCL 2. Each has a
//! safe method of [`Functions`].

#![allow(
    unsafe_code,
    reason = "functions of a C library; no other module calls them"
)]
#![allow(non_snake_case, reason = "the names of nccl.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use super::error::{Error, NcclError};
use crate::cuda::{Address, Device, StreamHandle};
use crate::library::functions;

/// Library name of NCCL 2.
const NAMES: &[&str] = &["libnccl.so.2"];
/// Length of a group identifier in bytes (`NCCL_UNIQUE_ID_BYTES`).
pub(super) const ID_BYTES: usize = 128;
/// Data type of 32-bit floats (`ncclFloat32`).
const FLOAT32: c_uint = 7;

type Code = c_uint;
/// The library's communicator handle (`ncclComm_t`).
type Handle = *mut c_void;

/// Identifier of a group of ranks (`ncclUniqueId`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub(super) bytes: [u8; ID_BYTES],
}

/// Communicator of a rank, valid until [`Functions::destroy`] or [`Functions::abort`].
#[derive(Debug)]
pub(super) struct Rank(Handle);

/// Part of a rank in an all-reduce: communicator, send and receive buffers, and stream.
pub(super) struct Reduced<'a> {
    pub(super) rank: &'a Rank,
    pub(super) send: Address,
    pub(super) receive: Address,
    pub(super) stream: StreamHandle,
}

functions! {
    "NCCL", NAMES;
    required {
        ncclGetVersion(*mut c_int) -> Code;
        ncclGetUniqueId(*mut RawId) -> Code;
        ncclCommInitRank(*mut Handle, c_int, RawId, c_int) -> Code;
        ncclCommGetAsyncError(Handle, *mut Code) -> Code;
        ncclCommAbort(Handle) -> Code;
        ncclCommDestroy(Handle) -> Code;
        ncclAllReduce(*const c_void, Address, usize, c_uint, c_uint, Handle, StreamHandle) -> Code;
        ncclGroupStart() -> Code;
        ncclGroupEnd() -> Code;
    }
    optional {
        ncclGetErrorString(Code) -> *const c_char;
        // Since 2.13.
        ncclGetLastError(Handle) -> *const c_char;
    }
}

// === impl Functions ===

impl Functions {
    /// Returns the library's version, such as 22809 for 2.28.9.
    pub(super) fn version(&self) -> Result<c_int, NcclError> {
        let mut version = 0;
        // SAFETY: The signature is that of the header, and the out-parameter is borrowed
        // exclusively.
        self.call("ncclGetVersion", None, || unsafe {
            (self.ncclGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Creates an identifier for a new group of ranks.
    pub(super) fn id(&self) -> Result<RawId, NcclError> {
        let mut id = RawId {
            bytes: [0; ID_BYTES],
        };
        // SAFETY: As above.
        self.call("ncclGetUniqueId", None, || unsafe {
            (self.ncclGetUniqueId)(&raw mut id)
        })?;
        Ok(id)
    }

    /// Joins a group of ranks with one device for each place. Waits for all ranks of the group,
    /// including those of other processes.
    pub(super) fn join(
        &self,
        id: &RawId,
        ranks: u32,
        places: &[(&Device, u32)],
    ) -> Result<Vec<Rank>, Error> {
        // The library writes the handles when the group call ends, so they must not move until
        // then.
        let mut handles = vec![ptr::null_mut(); places.len()];
        self.together(|| {
            for (handle, (device, rank)) in handles.iter_mut().zip(places) {
                device.select()?;
                self.call("ncclCommInitRank", Some(device.index()), || {
                    // SAFETY: The handle is an out-parameter that outlives the group call.
                    unsafe { (self.ncclCommInitRank)(handle, number(ranks), *id, number(*rank)) }
                })?;
            }
            Ok(())
        })?;
        Ok(handles.into_iter().map(Rank).collect())
    }

    /// Queues an all-reduce of `numbers` 32-bit floats by these ranks.
    pub(super) fn all_reduce(
        &self,
        parts: &[Reduced<'_>],
        numbers: usize,
        operation: u32,
    ) -> Result<(), Error> {
        self.together(|| {
            for part in parts {
                let (handle, stream) = (part.rank.0, part.stream);
                self.call("ncclAllReduce", None, || {
                    // SAFETY: The libraries created all handles and buffers, and the caller has
                    // checked the sizes of the buffers.
                    unsafe {
                        let (send, receive) = (part.send, part.receive);
                        (self.ncclAllReduce)(
                            send, receive, numbers, FLOAT32, operation, handle, stream,
                        )
                    }
                })?;
            }
            Ok(())
        })
    }

    /// Fails if a rank's work has failed.
    pub(super) fn check(&self, rank: &Rank) -> Result<(), NcclError> {
        let mut code = 0;
        self.call("ncclCommGetAsyncError", None, || {
            // SAFETY: The library created the communicator; the code is an out-parameter.
            unsafe { (self.ncclCommGetAsyncError)(rank.0, &raw mut code) }
        })?;
        if code == 0 {
            return Ok(());
        }
        Err(self.error("ncclCommGetAsyncError", code))
    }

    /// Aborts a communicator and its pending work.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the handle is invalid afterwards"
    )]
    pub(super) fn abort(&self, rank: Rank) -> Result<(), NcclError> {
        // SAFETY: The library created the communicator, and `rank` is its only owner.
        self.call("ncclCommAbort", None, || unsafe {
            (self.ncclCommAbort)(rank.0)
        })
    }

    /// Destroys a communicator, once its work is done.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the handle is invalid afterwards"
    )]
    pub(super) fn destroy(&self, rank: Rank) -> Result<(), NcclError> {
        // SAFETY: As above.
        self.call("ncclCommDestroy", None, || unsafe {
            (self.ncclCommDestroy)(rank.0)
        })
    }

    /// Runs calls that wait for each other as one group, as several ranks on one thread
    /// require.
    fn together(&self, calls: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        // SAFETY: Neither function takes arguments, and each start is matched by an end.
        self.call("ncclGroupStart", None, || unsafe {
            (self.ncclGroupStart)()
        })?;
        let called = calls();
        // SAFETY: As above.
        let ended = self.call("ncclGroupEnd", None, || unsafe { (self.ncclGroupEnd)() });
        called.and(ended.map_err(Error::from))
    }

    fn call(
        &self,
        call: &'static str,
        device: Option<u32>,
        make: impl FnOnce() -> Code,
    ) -> Result<(), NcclError> {
        (self.listener)(call, device);
        match make() {
            0 => Ok(()),
            code => Err(self.error(call, code)),
        }
    }

    /// Returns an error with the library's texts.
    fn error(&self, call: &'static str, code: Code) -> NcclError {
        let description = self.ncclGetErrorString.map_or(ptr::null(), |of| {
            // SAFETY: The function takes a number and returns a static string.
            unsafe { of(code) }
        });
        let last = self.ncclGetLastError.map_or(ptr::null(), |last| {
            // SAFETY: A null communicator is allowed; the string is valid until the next error.
            unsafe { last(ptr::null_mut()) }
        });
        NcclError {
            call,
            code,
            text: text(description),
            last: text(last),
        }
    }
}

/// Copies a string of the library.
fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: The library returned a zero-terminated string.
    let text = unsafe { CStr::from_ptr(at) }.to_string_lossy();
    text.trim().to_owned()
}

fn number(of: u32) -> c_int {
    c_int::try_from(of).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests;
