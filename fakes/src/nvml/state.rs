//! The scenario beside this library, read again when it changes.

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
/// The scenario as it was last read, and by what its file is known again.
static LAST: Mutex<Option<(Stamp, Arc<Scenario>)>> = Mutex::new(None);

/// The time of the last change of a file, its size and its inode.
type Stamp = (i64, i64, u64, u64);

/// The answer of `dladdr` about an address (`dlfcn.h`).
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

/// Returns the scenario as it is now. One that cannot be read leaves the last; the first is healthy
/// GPUs.
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

/// Returns the directory from which this library was loaded.
pub(crate) fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        // SAFETY: Pointers and nothing else.
        let mut found: Found = unsafe { mem::zeroed() };
        let here = directory as *const c_void;
        // SAFETY: The address is of this library; what is found is written to.
        if unsafe { dladdr(here, &raw mut found) } == 0 || found.file.is_null() {
            return PathBuf::new();
        }
        // SAFETY: A text of the loader, which lives as long as this library.
        let file = unsafe { CStr::from_ptr(found.file) };
        let file = Path::new(OsStr::from_bytes(file.to_bytes()));
        file.parent().map(Path::to_owned).unwrap_or_default()
    })
}
