//! The scenario beside this library, reloaded when it changes.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{fs, mem};

use crate::SCENARIO;
use crate::scenario::Scenario;

/// True while the library is initialised.
static OPEN: AtomicBool = AtomicBool::new(false);
/// Last loaded scenario, with the stamp of its file.
static LAST: Mutex<Option<(Stamp, Arc<Scenario>)>> = Mutex::new(None);

/// Modification time of a file (seconds and nanoseconds), its size and its inode.
type Stamp = (i64, i64, u64, u64);

/// Result of `dladdr` (`dlfcn.h`).
#[repr(C)]
struct Found {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, found: *mut Found) -> c_int;
}

pub(super) fn is_open() -> bool {
    OPEN.load(Ordering::Relaxed)
}

pub(super) fn set_open(open: bool) {
    OPEN.store(open, Ordering::Relaxed);
}

/// Returns the current scenario. If the file cannot be read, the last one stays; initially, all
/// GPUs are healthy.
pub(crate) fn current() -> Arc<Scenario> {
    let file = directory().join(SCENARIO);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let stamp = fs::metadata(&file)
        .map(|file| (file.mtime(), file.mtime_nsec(), file.len(), file.ino()))
        .unwrap_or_default();
    if let Some((known, scenario)) = last.as_ref()
        && *known == stamp
    {
        return Arc::clone(scenario);
    }
    let before = last.take().map(|(_, scenario)| scenario);
    let scenario = match crate::read(&file) {
        Ok(scenario) => Arc::new(scenario),
        Err(error) => {
            #[expect(
                clippy::print_stderr,
                reason = "a C library has no other way to say it"
            )]
            {
                eprintln!("{error}");
            }
            before.unwrap_or_default()
        }
    };
    *last = Some((stamp, Arc::clone(&scenario)));
    scenario
}

/// Returns the directory that this library was loaded from.
pub(crate) fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        // SAFETY: The structure consists of pointers only.
        let mut found: Found = unsafe { mem::zeroed() };
        let here = directory as *const c_void;
        // SAFETY: The address is in this library, and `found` is writable.
        if unsafe { dladdr(here, &raw mut found) } == 0 || found.file.is_null() {
            return PathBuf::new();
        }
        // SAFETY: A NUL-terminated string of the loader, which lives as long as this library.
        let file = unsafe { CStr::from_ptr(found.file) };
        let file = Path::new(OsStr::from_bytes(file.to_bytes()));
        file.parent().map(Path::to_owned).unwrap_or_default()
    })
}
