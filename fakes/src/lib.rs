//! Fakes of NVIDIA's libraries, for tests and for trying gpuwarden without GPUs: NVML and DCGM,
//! which report on GPUs, and the CUDA runtime and NCCL, which run work on them.
//!
//! The crate is built twice. As a shared library it exports the functions of all four, and is
//! loaded under the names of NVIDIA's. It reports the GPUs of the file [`SCENARIO`] beside it,
//! and reads that file again when it changes. As a Rust library it creates such directories:
//! [`install`].

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

/// Directory of the fake libraries, in gpuwarden's data directory.
pub const DIRECTORY: &str = "fake-gpus";
/// File name of the scenario, in the directory of the library.
pub const SCENARIO: &str = "gpus.toml";
/// File name of NVML, as drivers install it.
pub const LIBRARY: &str = "libnvidia-ml.so.1";
/// File name of DCGM, as its packages install it.
pub const DCGM_LIBRARY: &str = "libdcgm.so.4";
/// File name of the CUDA runtime, as its packages install it.
pub const CUDA_LIBRARY: &str = "libcudart.so.13";
/// File name of NCCL, as its packages install it. The library is the same file as the CUDA
/// runtime's, because it uses the runtime's streams and memory.
pub const NCCL_LIBRARY: &str = "libnccl.so.2";
/// File with the number of events already reported, in the directory of the library.
const TOLD: &str = "gpus.told";
/// File name of the library, as cargo builds it.
pub const BUILT: &str = "libgpuwarden_fakes.so";

/// An invalid scenario, or a failure to create a directory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not a valid scenario. The message has the line and the column.
    #[error("{} is no scenario of fake GPUs: {what}", file.display())]
    Scenario {
        /// Path of the scenario.
        file: PathBuf,
        /// Reason why the scenario is invalid.
        what: String,
    },
    /// A file cannot be read or written.
    #[error("cannot use {}", file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The fake library is not in the directory of the program.
    #[error(
        "the library of fake GPUs, {BUILT}, is not beside {}; `cargo build` puts it there, and an \
         installed gpuwarden needs it copied beside the program",
        program.display()
    )]
    NoLibrary {
        /// Path of the running program.
        program: PathBuf,
    },
}

/// Installs the fake libraries and a scenario in a directory, and resets the count of reported
/// events. Returns the path of NVML; the others are beside it.
///
/// Each directory gets copies: a library that is loaded from two paths is loaded twice, with
/// separate state.
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

/// Copies the library. A program that has loaded the old one keeps it.
fn put(built: &Path, directory: &Path, name: &str) -> io::Result<()> {
    let new = directory.join(format!("{name}.{}", process::id()));
    fs::copy(built, &new)?;
    fs::rename(&new, directory.join(name))
}

/// Links another name to the copy of NVML.
fn link(directory: &Path, name: &str) -> io::Result<()> {
    let new = directory.join(format!("{name}.{}", process::id()));
    symlink(LIBRARY, &new)?;
    fs::rename(&new, directory.join(name))
}

/// Writes a scenario into a directory. The library reads it at the next call.
pub fn write(directory: &Path, scenario: &Scenario) -> Result<(), Error> {
    let file = directory.join(SCENARIO);
    let text = scenario.to_toml().map_err(|what| Error::Scenario {
        file: file.clone(),
        what,
    })?;
    // Renamed into place, so that the library does not read half a file.
    let new = directory.join(format!("{SCENARIO}.{}", process::id()));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, &file))
        .map_err(|source| Error::File { file, source })
}

/// Reads and checks a scenario.
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

/// Makes the library in a directory report an XID on a GPU, by appending the event to its
/// scenario. Fails if the result would be invalid.
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

/// Returns the path of the built library: beside the program, or in `deps` there.
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
