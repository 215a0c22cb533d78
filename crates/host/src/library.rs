//! Finds and opens a shared library of a driver, wherever it was installed.
//!
//! With a path given, that is the only place. Without one the driver's root is looked through, for
//! containers with the machine's driver mounted, and then the loader's own places by the name.

#![allow(
    unsafe_code,
    reason = "loading a library runs its code; there is no safe way"
)]

use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix;

/// The places below a driver's root where distributions install libraries. Those of Debian lie in the
/// directory of a driver, and the link to them is an absolute one, which leads nowhere below a root.
const BELOW_ROOT: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib",
];

/// The places in which a library is looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The library itself; nothing else is tried where it is given.
    pub path: Option<PathBuf>,
    /// The directory at which the driver is mounted, such as `/run/nvidia/driver`.
    pub driver_root: Option<PathBuf>,
}

/// An open library. It stays loaded until this is dropped.
#[derive(Debug)]
pub(crate) struct Library {
    library: unix::Library,
    /// The path or the name by which it was found.
    pub(crate) found_at: PathBuf,
}

/// Hears of each call before it is made: the function, and the index of the GPU that it is about.
pub type Listener = Box<dyn Fn(&'static str, Option<u32>) + Send + Sync>;

/// A library cannot be used as the one that is wanted.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No library was found, or none that can be loaded.
    #[error(transparent)]
    NotOpened(#[from] NotOpened),
    /// A library was found that is another one.
    #[error("{} is not {wanted}: it has no function {function}", library.display())]
    Other {
        /// The library.
        library: PathBuf,
        /// The name of the one that is wanted, such as `NVML`.
        wanted: &'static str,
        /// The function that it lacks.
        function: &'static str,
    },
}

/// A library that was not found, or could not be loaded: each place, and why not there.
#[derive(Debug)]
pub struct NotOpened {
    names: &'static [&'static str],
    tried: Vec<(PathBuf, String)>,
}

// === impl Library ===

impl Library {
    /// Opens the library with the first of these names, such as `libnvidia-ml.so.1`, that is at any
    /// of the places.
    pub(crate) fn open(names: &'static [&'static str], places: &Places) -> Result<Self, NotOpened> {
        let mut tried = Vec::new();
        for path in candidates(names, places) {
            let why = if path.is_absolute() && !path.exists() {
                "not there".to_owned()
            } else {
                let flags = unix::RTLD_NOW | unix::RTLD_LOCAL;
                // SAFETY: What runs now is the library's own initialisation. It is the vendor's, at
                // the place that the operator named or the loader trusts, and its functions are
                // called only by the signatures of its header.
                match unsafe { unix::Library::open(Some(&path), flags) } {
                    Ok(library) => {
                        return Ok(Self {
                            library,
                            found_at: path,
                        });
                    }
                    Err(error) => error.to_string(),
                }
            };
            tried.push((path, why));
        }
        Err(NotOpened { names, tried })
    }

    /// Returns a function of the library by its name; `None` where the library lacks it.
    ///
    /// # Safety
    ///
    /// `F` is the type of a pointer to that very function, and is not called after the library was
    /// dropped.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: The caller answers for the type.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.ok().map(|symbol| *symbol)
    }

    /// Returns a function without which the library is not the one that is wanted.
    ///
    /// # Safety
    ///
    /// As [`Self::function`].
    pub(crate) unsafe fn required<F: Copy>(
        &self,
        name: &'static str,
        wanted: &'static str,
    ) -> Result<F, OpenError> {
        // SAFETY: The caller answers for the type.
        unsafe { self.function(name) }.ok_or_else(|| OpenError::Other {
            library: self.found_at.clone(),
            wanted,
            function: name,
        })
    }
}

/// Declares `Functions`, a library with the table of its functions, and how it is opened. Its users add
/// a method for each, for the table itself is full of unsafe functions.
macro_rules! functions {
    (
        $wanted:literal, $names:expr;
        required { $($needed:ident($($needed_type:ty),*) -> $needed_answer:ty;)* }
        optional { $($optional:ident($($optional_type:ty),*) -> $optional_answer:ty;)* }
    ) => {
        /// The library, and its functions.
        pub(super) struct Functions {
            $($needed: unsafe extern "C" fn($($needed_type),*) -> $needed_answer,)*
            $($optional: Option<unsafe extern "C" fn($($optional_type),*) -> $optional_answer>,)*
            listener: $crate::library::Listener,
            /// Last, for its functions are gone when it is dropped.
            library: $crate::library::Library,
        }

        impl Functions {
            /// Opens the library and looks its functions up.
            pub(super) fn open(
                places: &$crate::library::Places,
                listener: $crate::library::Listener,
            ) -> Result<Self, $crate::library::OpenError> {
                listener("dlopen", None);
                let library = $crate::library::Library::open($names, places)?;
                // SAFETY: The names go with the signatures, which are those of the headers, and
                // the table lives no longer than the library.
                unsafe {
                    Ok(Self {
                        $($needed: library.required(stringify!($needed), $wanted)?,)*
                        $($optional: library.function(stringify!($optional)),)*
                        listener,
                        library,
                    })
                }
            }

            /// Returns where the library was found.
            pub(super) fn found_at(&self) -> &std::path::Path {
                &self.library.found_at
            }

            /// The functions, the answer of each and what it takes.
            #[cfg(test)]
            #[allow(dead_code, reason = "DCGM's headers are not to be had")]
            pub(super) const SIGNATURES: &[(&str, &str, &[&str])] = &[
                $((
                    stringify!($needed),
                    stringify!($needed_answer),
                    &[$(stringify!($needed_type)),*],
                ),)*
                $((
                    stringify!($optional),
                    stringify!($optional_answer),
                    &[$(stringify!($optional_type)),*],
                ),)*
            ];
        }
    };
}
pub(crate) use functions;

/// Returns what to try, in order.
fn candidates(names: &[&str], places: &Places) -> Vec<PathBuf> {
    if let Some(path) = &places.path {
        return vec![path.clone()];
    }
    let mut paths = Vec::new();
    for name in names {
        let root = places.driver_root.as_deref();
        let below = |root: &Path| BELOW_ROOT.map(|directory| root.join(directory).join(name));
        paths.extend(root.map(below).into_iter().flatten());
        paths.push(PathBuf::from(name));
    }
    paths
}

// === impl NotOpened ===

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be loaded:", self.names.join(" or "))?;
        for (index, (path, why)) in self.tried.iter().enumerate() {
            let comma = if index == 0 { "" } else { ";" };
            write!(f, "{comma} {}: {why}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for NotOpened {}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A library that every machine has.
    const LIBC: &[&str] = &["libc.so.6"];

    #[test]
    fn an_error_names_each_place_and_its_reason() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("usr/lib64")).unwrap();
        fs::write(root.path().join("usr/lib64/libmissing.so.1"), "no library").unwrap();
        let places = Places {
            path: None,
            driver_root: Some(root.path().to_owned()),
        };
        let error = Library::open(&["libmissing.so.1"], &places).unwrap_err();
        let text = error.to_string();
        let root = root.path().display();
        for part in [
            "libmissing.so.1 cannot be loaded:".to_owned(),
            format!("{root}/usr/lib64/libmissing.so.1: "),
            "file too short".to_owned(),
            format!("{root}/usr/lib/aarch64-linux-gnu/libmissing.so.1: not there"),
            "; libmissing.so.1: libmissing.so.1: cannot open shared object file".to_owned(),
        ] {
            assert!(text.contains(&part), "{part} in {text}");
        }
    }

    #[test]
    fn the_loaders_own_places_come_last_and_a_path_stands_alone() {
        let root = tempfile::tempdir().unwrap();
        let mut places = Places {
            path: None,
            driver_root: Some(root.path().to_owned()),
        };
        let library = Library::open(LIBC, &places).unwrap();
        assert_eq!(library.found_at, Path::new("libc.so.6"));
        let library = Library::open(&["libmissing.so.1", "libc.so.6"], &places).unwrap();
        assert_eq!(library.found_at, Path::new("libc.so.6"));
        places.path = Some(root.path().join("other.so"));
        let error = Library::open(LIBC, &places).unwrap_err();
        assert_eq!(error.tried.len(), 1, "{error}");
    }
}
