//! Finds and opens a shared library of a driver, wherever it is installed.
//!
//! An explicit path is the only candidate. Otherwise the driver's root is searched, for
//! containers with the machine's driver mounted, and then the loader's own search path by name.

#![allow(
    unsafe_code,
    reason = "loading a library runs its code; there is no safe way"
)]

use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix;

/// Library directories of distributions, below a driver's root. Debian keeps the libraries in a
/// directory of the driver's own, and links to them with absolute paths, which are dangling
/// below a root.
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

/// Places to search for a library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPlaces {
    /// Path of the library; if given, nothing else is tried.
    pub path: Option<PathBuf>,
    /// Directory where the driver is mounted, such as `/run/nvidia/driver`.
    pub driver_root: Option<PathBuf>,
}

/// An open library, which stays loaded until this is dropped.
#[derive(Debug)]
pub(crate) struct Library {
    library: unix::Library,
    /// Path or name that the library was loaded from.
    pub(crate) found_at: PathBuf,
}

/// Callback before each library call: name of the function, and index of the GPU that the call
/// is about.
pub type Listener = Box<dyn Fn(&'static str, Option<u32>) + Send + Sync>;

/// Error when a library is opened.
#[derive(Debug, thiserror::Error)]
pub enum LibraryOpenError {
    /// No library was found, or none that can be loaded.
    #[error(transparent)]
    NotOpened(#[from] NotOpened),
    /// The file is another library.
    #[error("{} is not {wanted}: it has no function {function}", library.display())]
    Other {
        /// Path or name of the library.
        library: PathBuf,
        /// Name of the expected library, such as `NVML`.
        wanted: &'static str,
        /// Function that the library lacks.
        function: &'static str,
    },
}

/// Error for a library that was not found or could not be loaded, with the reason for each
/// place.
#[derive(Debug)]
pub struct NotOpened {
    names: &'static [&'static str],
    tried: Vec<(PathBuf, String)>,
}

// === impl Library ===

impl Library {
    /// Opens the library with the first of these names, such as `libnvidia-ml.so.1`, that
    /// exists at any of the places.
    pub(crate) fn open(
        names: &'static [&'static str],
        places: &LibraryPlaces,
    ) -> Result<Self, NotOpened> {
        let mut tried = Vec::new();
        for path in candidates(names, places) {
            let why = if path.is_absolute() && !path.exists() {
                "not there".to_owned()
            } else {
                let flags = unix::RTLD_NOW | unix::RTLD_LOCAL;
                // SAFETY: This runs the library's initialisation. The library is the vendor's,
                // at the path that the operator set or in the loader's search path, and its
                // functions are called only with the signatures of its header.
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

    /// Returns a function of the library by name; `None` if the library lacks it.
    ///
    /// # Safety
    ///
    /// `F` must be the pointer type of that function, and must not be called after the library
    /// was dropped.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: The caller guarantees the type.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.ok().map(|symbol| *symbol)
    }

    /// Returns a function that the expected library must have.
    ///
    /// # Safety
    ///
    /// As [`Self::function`].
    pub(crate) unsafe fn required<F: Copy>(
        &self,
        name: &'static str,
        wanted: &'static str,
    ) -> Result<F, LibraryOpenError> {
        // SAFETY: The caller guarantees the type.
        unsafe { self.function(name) }.ok_or_else(|| LibraryOpenError::Other {
            library: self.found_at.clone(),
            wanted,
            function: name,
        })
    }
}

/// Declares `Functions`, a library with a table of its functions, and its constructor. Users
/// add a safe method for each function, since the table holds unsafe ones.
macro_rules! functions {
    (
        $wanted:literal, $names:expr;
        required { $($needed:ident($($needed_type:ty),*) -> $needed_answer:ty;)* }
        optional { $($optional:ident($($optional_type:ty),*) -> $optional_answer:ty;)* }
    ) => {
        /// A loaded library and its functions.
        pub(super) struct Functions {
            $($needed: unsafe extern "C" fn($($needed_type),*) -> $needed_answer,)*
            $($optional: Option<unsafe extern "C" fn($($optional_type),*) -> $optional_answer>,)*
            listener: $crate::library::Listener,
            /// Declared last, since its functions are invalid after it is dropped.
            library: $crate::library::Library,
        }

        impl Functions {
            /// Opens the library and looks up its functions.
            pub(super) fn open(
                places: &$crate::library::LibraryPlaces,
                listener: $crate::library::Listener,
            ) -> Result<Self, $crate::library::LibraryOpenError> {
                listener("dlopen", None);
                let library = $crate::library::Library::open($names, places)?;
                // SAFETY: The signatures are those of the headers, and the table does not
                // outlive the library.
                unsafe {
                    Ok(Self {
                        $($needed: library.required(stringify!($needed), $wanted)?,)*
                        $($optional: library.function(stringify!($optional)),)*
                        listener,
                        library,
                    })
                }
            }

            /// Returns the path or name that the library was loaded from.
            pub(super) fn found_at(&self) -> &std::path::Path {
                &self.library.found_at
            }

            /// Name, return type and parameter types of each function.
            #[cfg(test)]
            #[allow(dead_code, reason = "DCGM's headers are not available")]
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

/// Returns the paths and names to try, in order.
fn candidates(names: &[&str], places: &LibraryPlaces) -> Vec<PathBuf> {
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
        let places = LibraryPlaces {
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
        let mut places = LibraryPlaces {
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
