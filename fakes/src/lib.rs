//! Fakes of NVIDIA's libraries, for tests and for trying gpuwarden out: of NVML and DCGM, which tell about
//! GPUs, and of the CUDA runtime and NCCL, which have them work.
//!
//! The crate is built twice. As a shared library it exports the functions of all, and is loaded by
//! the very path on which NVIDIA's are; it tells of the GPUs in the file [`SCENARIO`] beside it, and
//! reads that file again when it changes. As a Rust library it makes such directories: [`install`].

mod code;
mod cuda;
mod dcgm;
mod nccl;
mod nvml;
mod scenario;

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, io, process};

pub use scenario::{
    Behaviour, Fabric, FakeCuda, FakeDcgm, FakeEvent, FakeGpu, FakeIncident, FakeLink, FakeNccl,
    FakePartition, Scenario,
};

/// The directory of the fake that a gpuwarden shows, in its data directory.
pub const DIRECTORY: &str = "fake-gpus";
/// The file that says what the fake tells, in the directory of the library.
pub const SCENARIO: &str = "gpus.toml";
/// The name of the library, as drivers install it.
pub const LIBRARY: &str = "libnvidia-ml.so.1";
/// The name of DCGM's library, as its packages install it.
pub const DCGM_LIBRARY: &str = "libdcgm.so.4";
/// The name of the CUDA runtime, as its packages install it.
pub const CUDA_LIBRARY: &str = "libcudart.so.13";
/// The name of NCCL's library, as its packages install it. It is the same file as the CUDA runtime, so that
/// it knows what that gives out.
pub const NCCL_LIBRARY: &str = "libnccl.so.2";
/// The file with the number of events that were told, in the directory of the library.
const TOLD: &str = "gpus.told";
/// The name of the library, as cargo builds it.
pub const BUILT: &str = "libgpuwarden_fakes.so";

/// A scenario that cannot be used, or a directory that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is no scenario; the cause has line and column.
    #[error("{} is no scenario of fake GPUs: {what}", file.display())]
    Scenario {
        /// The file.
        file: PathBuf,
        /// The trouble with the file.
        what: String,
    },
    /// A file cannot be read or written.
    #[error("cannot use {}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The library is nowhere near the program.
    #[error(
        "the library of fake GPUs, {BUILT}, is not beside {}; `cargo build` puts it there, and an \
         installed gpuwarden needs it copied beside the program",
        program.display()
    )]
    NoLibrary {
        /// The program that runs.
        program: PathBuf,
    },
}

/// Puts the fake libraries and a scenario into a directory, and tells its events from the first on;
/// returns the path of NVML's. The others are beside it.
///
/// Each directory gets copies: a library that is loaded from two places is two, with a state each.
pub fn install(directory: &Path, scenario: &Scenario) -> Result<PathBuf, Error> {
    let built = built()?;
    let library = directory.join(LIBRARY);
    let told = directory.join(TOLD);
    fs::create_dir_all(directory)
        .and_then(|()| put(&built, directory, DCGM_LIBRARY))
        .and_then(|()| put(&built, directory, LIBRARY))
        .and_then(|()| link(directory, CUDA_LIBRARY))
        .and_then(|()| link(directory, NCCL_LIBRARY))
        .and_then(|()| match fs::remove_file(&told) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
        .map_err(|source| Error::File {
            file: library.clone(),
            source,
        })?;
    write(directory, scenario)?;
    Ok(library)
}

/// Copies the library. A program that has the old one loaded keeps it.
fn put(built: &Path, directory: &Path, name: &str) -> io::Result<()> {
    let new = directory.join(format!("{name}.{}", process::id()));
    fs::copy(built, &new)?;
    fs::rename(&new, directory.join(name))
}

/// Gives the copy that is NVML another name.
fn link(directory: &Path, name: &str) -> io::Result<()> {
    let new = directory.join(format!("{name}.{}", process::id()));
    symlink(LIBRARY, &new)?;
    fs::rename(&new, directory.join(name))
}

/// Writes a scenario for the library in a directory, which takes it up with the next call.
pub fn write(directory: &Path, scenario: &Scenario) -> Result<(), Error> {
    let file = directory.join(SCENARIO);
    let text = scenario.to_toml().map_err(|what| Error::Scenario {
        file: file.clone(),
        what,
    })?;
    // The library never sees half a file.
    let new = directory.join(format!("{SCENARIO}.{}", process::id()));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, &file))
        .map_err(|source| Error::File { file, source })
}

/// Reads a scenario.
pub fn read(file: &Path) -> Result<Scenario, Error> {
    let text = fs::read_to_string(file).map_err(|source| Error::File {
        file: file.to_owned(),
        source,
    })?;
    Scenario::from_toml(&text).map_err(|what| Error::Scenario {
        file: file.to_owned(),
        what,
    })
}

/// Has the library in a directory tell of an XID on a GPU: the event is put behind the text of its
/// scenario, unless that would be none any more.
pub fn tell_xid(directory: &Path, gpu: u32, xid: u32) -> Result<(), Error> {
    let file = directory.join(SCENARIO);
    let failed = |source| Error::File {
        file: file.clone(),
        source,
    };
    let event = format!("\n[[event]]\ngpu = {gpu}\nxid = {xid}\n");
    let text = fs::read_to_string(&file).map_err(failed)? + &event;
    Scenario::from_toml(&text).map_err(|what| Error::Scenario {
        file: file.clone(),
        what,
    })?;
    let mut opened = (OpenOptions::new().append(true).open(&file)).map_err(failed)?;
    opened.write_all(event.as_bytes()).map_err(failed)
}

/// Returns the built library: cargo puts it beside the programs, or into `deps` there.
fn built() -> Result<PathBuf, Error> {
    let program = env::current_exe().map_err(|source| Error::File {
        file: PathBuf::from("/proc/self/exe"),
        source,
    })?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(BUILT), beside.join("deps").join(BUILT)];
    let found = places.into_iter().find(|place| place.is_file());
    found.ok_or(Error::NoLibrary { program })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_the_scenario_cannot_have_is_not_put_into_it() {
        let directory = tempfile::tempdir().unwrap();
        let scenario = Scenario {
            gpus: 2,
            ..Scenario::default()
        };
        write(directory.path(), &scenario).unwrap();
        tell_xid(directory.path(), 1, 79).unwrap();
        let refused = tell_xid(directory.path(), 99, 79).unwrap_err().to_string();
        assert!(
            refused.contains("99") && refused.contains("gpus is 2"),
            "{refused}"
        );
        let events = read(&directory.path().join(SCENARIO)).unwrap().event;
        assert_eq!(events.len(), 1, "{events:?}");
    }
}
