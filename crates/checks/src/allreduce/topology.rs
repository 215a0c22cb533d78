//! Topology file for NCCL: the user's; otherwise the one that the webhook names for this
//! machine, from the image or built in; otherwise none, and NCCL detects the topology.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use preflight::rendezvous::Topology;
use preflight::topology::{self, DIRECTORY, VARIABLE};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::environment::{BadVariable, Environment};

/// Variable of NCCL for the user's topology file.
pub(super) const USERS: &str = "NCCL_TOPO_FILE";

/// Settings of topology files in the environment.
pub(super) struct Settings {
    /// True if the user's file exists.
    is_users: bool,
    /// Name of the file for all machines.
    named: Option<String>,
    /// Directory of the image's files.
    directory: PathBuf,
}

/// Topology file that exists until this value is dropped.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    /// Memory behind the path, for a built-in file.
    _memory: Option<fs::File>,
}

// === impl Settings ===

impl Settings {
    pub(super) fn read(environment: &Environment) -> Result<Self, BadVariable> {
        let users = environment.first(&[USERS]);
        let allowed = "the name of a file without a directory, such as azure-ndv5.xml";
        let named = environment.parsed(&[VARIABLE], allowed, |name| {
            topology::is_name(name).then(|| name.to_owned())
        })?;
        Ok(Self {
            // The variable alone is not enough: its mount may exist only in the user's own
            // container.
            is_users: users.is_some_and(|(_, path)| Path::new(path).is_file()),
            named,
            directory: PathBuf::from(DIRECTORY),
        })
    }

    /// Returns the description of this machine's file for the gang, and the file.
    pub(super) fn choose(&self, assigned: Option<&Topology>) -> (Option<Topology>, Option<File>) {
        if self.is_users {
            return (None, None);
        }
        let chosen = self.named.as_ref().map(|name| Topology::File {
            name: name.clone(),
            required: false,
        });
        let chosen = chosen.or_else(|| assigned.cloned());
        let Some(Topology::File { name, required }) = &chosen else {
            return (chosen, None);
        };
        let why = match self.find(name) {
            Ok(Some(file)) => {
                tracing::info!(name, "NCCL gets a topology file");
                return (chosen, Some(file));
            }
            Ok(None) => format!("there is no topology file {name}"),
            Err(error) => format!("the topology file {name} cannot be used: {error}"),
        };
        tracing::warn!("{why}");
        (required.then_some(Topology::Missing(why)), None)
    }

    /// Returns the file with a name: the image's, or the built-in one.
    fn find(&self, name: &str) -> io::Result<Option<File>> {
        let path = self.directory.join(name);
        if topology::is_name(name) && path.is_file() {
            return Ok(Some(File {
                path,
                _memory: None,
            }));
        }
        topology::file(name).map(|text| File::of(&text)).transpose()
    }
}

// === impl File ===

impl File {
    /// Returns a file outside any directory: a container may have none that it can write.
    fn of(text: &str) -> io::Result<Self> {
        let mut memory = fs::File::from(memfd_create("nccl-topology", MemfdFlags::CLOEXEC)?);
        memory.write_all(text.as_bytes())?;
        let (process, descriptor) = (std::process::id(), memory.as_raw_fd());
        Ok(Self {
            path: PathBuf::from(format!("/proc/{process}/fd/{descriptor}")),
            _memory: Some(memory),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AZURE: &str = "azure-ndv5.xml";

    fn settings(variables: &[(&str, &str)], directory: &Path) -> Settings {
        let variables = variables.iter();
        let variables = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let environment: Environment = variables.collect();
        Settings {
            directory: directory.to_owned(),
            ..Settings::read(&environment).unwrap()
        }
    }

    /// Returns the name reported to the gang, and the contents for NCCL.
    fn chosen(
        settings: &Settings,
        assigned: Option<&Topology>,
    ) -> (Option<Topology>, Option<String>) {
        let (name, file) = settings.choose(assigned);
        let text = file.map(|file| fs::read_to_string(&file.path).unwrap());
        (name, text)
    }

    #[test]
    fn the_users_file_goes_before_the_named_one_and_that_before_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, required| {
            let name = name.to_owned();
            Some(Topology::File { name, required })
        };
        let named = |name: &str| file(name, false);
        let ours = topology::file(AZURE);
        assert!(ours.is_some());

        let users = directory.path().join("users.xml");
        fs::write(&users, "<system/>").unwrap();
        let users = [(USERS, users.to_str().unwrap()), (VARIABLE, AZURE)];
        let with_users = settings(&users, directory.path());
        assert_eq!(chosen(&with_users, named(AZURE).as_ref()), (None, None));
        // A file that only the user's own container has does not exist here.
        let absent = settings(&[(USERS, "/nowhere/topo.xml")], directory.path());
        assert_eq!(
            chosen(&absent, named(AZURE).as_ref()),
            (named(AZURE), ours.clone())
        );

        let of_all = settings(&[(VARIABLE, AZURE)], directory.path());
        assert_eq!(chosen(&of_all, None), (named(AZURE), ours.clone()));
        let plain = settings(&[], directory.path());
        assert_eq!(chosen(&plain, named(AZURE).as_ref()), (named(AZURE), ours));
        // The image's file takes precedence over the built-in one.
        fs::write(directory.path().join(AZURE), "of the image").unwrap();
        let of_image = Some("of the image".to_owned());
        assert_eq!(
            chosen(&plain, named(AZURE).as_ref()),
            (named(AZURE), of_image)
        );

        assert_eq!(chosen(&plain, None), (None, None));
        for name in ["gcp-a3-mega.xml", "../users.xml", ""] {
            assert_eq!(chosen(&plain, named(name).as_ref()), (None, None), "{name}");
        }
        let missing = |why: &str| Some(Topology::Missing(why.to_owned()));
        assert_eq!(
            chosen(&plain, missing("none").as_ref()),
            (missing("none"), None)
        );
        let required = file("gcp-a3-mega.xml", true);
        let why = missing("there is no topology file gcp-a3-mega.xml");
        assert_eq!(chosen(&plain, required.as_ref()), (why, None));
    }
}
