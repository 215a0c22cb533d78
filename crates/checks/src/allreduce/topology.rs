//! The topology file that NCCL gets: the user's; else the one that the webhook has named for this machine, from
//! the image, or of ours; else none, and NCCL looks for itself.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use preflight::rendezvous::Topology;
use preflight::topology::{self, DIRECTORY, VARIABLE};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::environment::{BadVariable, Environment};

/// Variable of NCCL: the user's topology file.
pub(super) const USERS: &str = "NCCL_TOPO_FILE";

/// What the environment says of topology files.
pub(super) struct Settings {
    /// The user's file is there.
    is_users: bool,
    /// The name of the file of all machines.
    named: Option<String>,
    /// The files of the image.
    directory: PathBuf,
}

/// A topology file that is there as long as this is.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    /// What the path leads to, where the file is ours.
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
            // A variable alone says nothing to NCCL: the mount that it needs may be the user's only.
            is_users: users.is_some_and(|(_, path)| Path::new(path).is_file()),
            named,
            directory: PathBuf::from(DIRECTORY),
        })
    }

    /// Returns what the gang is told of the file of this machine, and the file.
    pub(super) fn choose(&self, told: Option<&Topology>) -> (Option<Topology>, Option<File>) {
        if self.is_users {
            return (None, None);
        }
        let chosen = self.named.as_ref().map(|name| Topology::File {
            name: name.clone(),
            required: false,
        });
        let chosen = chosen.or_else(|| told.cloned());
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

    /// Returns the file of a name: that of the image, or else ours.
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
    /// Returns a file that is in no directory: a container may have none that it can write.
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

    /// Returns the name that the gang is told, and what NCCL would read.
    fn chosen(settings: &Settings, told: Option<&Topology>) -> (Option<Topology>, Option<String>) {
        let (name, file) = settings.choose(told);
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
        // A file that only the user's own container has is none here.
        let absent = settings(&[(USERS, "/nowhere/topo.xml")], directory.path());
        assert_eq!(
            chosen(&absent, named(AZURE).as_ref()),
            (named(AZURE), ours.clone())
        );

        let of_all = settings(&[(VARIABLE, AZURE)], directory.path());
        assert_eq!(chosen(&of_all, None), (named(AZURE), ours.clone()));
        let told = settings(&[], directory.path());
        assert_eq!(chosen(&told, named(AZURE).as_ref()), (named(AZURE), ours));
        // The image's goes before ours.
        fs::write(directory.path().join(AZURE), "of the image").unwrap();
        let of_image = Some("of the image".to_owned());
        assert_eq!(
            chosen(&told, named(AZURE).as_ref()),
            (named(AZURE), of_image)
        );

        assert_eq!(chosen(&told, None), (None, None));
        for name in ["gcp-a3-mega.xml", "../users.xml", ""] {
            assert_eq!(chosen(&told, named(name).as_ref()), (None, None), "{name}");
        }
        let missing = |why: &str| Some(Topology::Missing(why.to_owned()));
        assert_eq!(
            chosen(&told, missing("none").as_ref()),
            (missing("none"), None)
        );
        let required = file("gcp-a3-mega.xml", true);
        let why = missing("there is no topology file gcp-a3-mega.xml");
        assert_eq!(chosen(&told, required.as_ref()), (why, None));
    }
}
