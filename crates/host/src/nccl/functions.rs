//! The functions of NCCL that are called, by the signatures of its header (`nccl.h` of NCCL 2), each by a
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

/// The name under which it is installed.
const NAMES: &[&str] = &["libnccl.so.2"];
/// Bytes of the name of a group of ranks (`NCCL_UNIQUE_ID_BYTES`).
pub(super) const ID_BYTES: usize = 128;
/// Elements of four bytes (`ncclFloat32`).
const FLOAT32: c_uint = 7;

type Code = c_uint;
/// A communicator, as the library knows it (`ncclComm_t`).
type Handle = *mut c_void;

/// The name of a group of ranks (`ncclUniqueId`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub(super) bytes: [u8; ID_BYTES],
}

/// A rank's part in a group, until [`Functions::destroy`] or [`Functions::abort`].
#[derive(Debug)]
pub(super) struct Rank(Handle);

/// A rank's part in an all-reduce: what it sends, where it receives, and in which order with its
/// other work.
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
    /// Returns its version, such as 22809 for 2.28.9.
    pub(super) fn version(&self) -> Result<c_int, NcclError> {
        let mut version = 0;
        // SAFETY: The signature is its own, and what it writes to is borrowed for it alone.
        self.call("ncclGetVersion", None, || unsafe {
            (self.ncclGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns a name for a new group of ranks.
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

    /// Takes places in a group of ranks, each with a device. It waits for all ranks of the group, also
    /// those that other processes take.
    pub(super) fn join(
        &self,
        id: &RawId,
        ranks: u32,
        places: &[(&Device, u32)],
    ) -> Result<Vec<Rank>, Error> {
        // The library writes them by the end of the group, so they stay where they are until then.
        let mut handles = vec![ptr::null_mut(); places.len()];
        self.together(|| {
            for (handle, (device, rank)) in handles.iter_mut().zip(places) {
                device.select()?;
                self.call("ncclCommInitRank", Some(device.index()), || {
                    // SAFETY: The handle is written to, and outlives the group.
                    unsafe { (self.ncclCommInitRank)(handle, number(ranks), *id, number(*rank)) }
                })?;
            }
            Ok(())
        })?;
        Ok(handles.into_iter().map(Rank).collect())
    }

    /// Begins an all-reduce of so many numbers of four bytes by these ranks.
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
                    // SAFETY: The libraries have given out all of them, and the caller has looked
                    // whether there is so much memory.
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

    /// Fails with what has gone wrong in the work of a rank.
    pub(super) fn check(&self, rank: &Rank) -> Result<(), NcclError> {
        let mut code = 0;
        self.call("ncclCommGetAsyncError", None, || {
            // SAFETY: The library has given out the communicator; the code is written to.
            unsafe { (self.ncclCommGetAsyncError)(rank.0, &raw mut code) }
        })?;
        if code == 0 {
            return Ok(());
        }
        Err(self.error("ncclCommGetAsyncError", code))
    }

    /// Ends a rank's part, and all of its work at once.
    #[expect(clippy::needless_pass_by_value, reason = "nobody may use it again")]
    pub(super) fn abort(&self, rank: Rank) -> Result<(), NcclError> {
        // SAFETY: The library has given it out, and nobody has it any more.
        self.call("ncclCommAbort", None, || unsafe {
            (self.ncclCommAbort)(rank.0)
        })
    }

    /// Ends a rank's part, once its work is done.
    #[expect(clippy::needless_pass_by_value, reason = "nobody may use it again")]
    pub(super) fn destroy(&self, rank: Rank) -> Result<(), NcclError> {
        // SAFETY: As above.
        self.call("ncclCommDestroy", None, || unsafe {
            (self.ncclCommDestroy)(rank.0)
        })
    }

    /// Makes calls that wait for each other, as those of several ranks by one thread do.
    fn together(&self, calls: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        // SAFETY: Both take nothing, and each start has its end.
        self.call("ncclGroupStart", None, || unsafe {
            (self.ncclGroupStart)()
        })?;
        let called = calls();
        // SAFETY: As above.
        let ended = self.call("ncclGroupEnd", None, || unsafe { (self.ncclGroupEnd)() });
        called.and(ended.map_err(Error::from))
    }

    /// Makes a call.
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

    /// Returns an error with the library's words for it.
    fn error(&self, call: &'static str, code: Code) -> NcclError {
        let said = self.ncclGetErrorString.map_or(ptr::null(), |of| {
            // SAFETY: It takes a number, and returns a text that stays.
            unsafe { of(code) }
        });
        let last = self.ncclGetLastError.map_or(ptr::null(), |last| {
            // SAFETY: It takes no communicator, and returns a text that stays until the next error.
            unsafe { last(ptr::null_mut()) }
        });
        NcclError {
            call,
            code,
            text: text(said),
            last: text(last),
        }
    }
}

/// Returns a text of the library.
fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: A text of the library, closed by a zero.
    let text = unsafe { CStr::from_ptr(at) }.to_string_lossy();
    text.trim().to_owned()
}

fn number(of: u32) -> c_int {
    c_int::try_from(of).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests;
