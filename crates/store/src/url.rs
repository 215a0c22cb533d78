//! URLs of stores, and the list of backends that can be opened by one.
//!
//! A URL is the scheme of a backend, a colon, and the place of the store in the form that the
//! backend wants: `sqlite:/var/lib/gpuwarden`. Outside this room, product code names no backend.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::backend::Backend;
use crate::{EventStore, Inspection, StoreError, StoreOpenError, sqlite};

/// Backends that a URL can name. A further backend is one more line.
const BACKENDS: &[&Backend] = &[&sqlite::BACKEND];

/// URL of a store: a backend, and the place of the store.
#[derive(Clone)]
pub struct StoreUrl {
    backend: &'static Backend,
    place: OsString,
}

/// Reason why a text is not the URL of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The scheme is missing, or no backend has it.
    #[error(
        "{url:?} does not name a store of a known kind: write {}",
        known_forms()
    )]
    UnknownScheme {
        /// Text that was rejected.
        url: String,
    },
    /// Nothing follows the scheme.
    #[error("{url:?} does not say where the store is: write {}", known_forms())]
    NoPlace {
        /// Text that was rejected.
        url: String,
    },
}

/// Returns the form of every known URL, for messages.
fn known_forms() -> String {
    let forms = BACKENDS
        .iter()
        .map(|backend| format!("{}:{}", backend.scheme, backend.place));
    forms.collect::<Vec<_>>().join(" or ")
}

// === impl StoreUrl ===

impl StoreUrl {
    /// Returns the URL of the embedded store in a data directory.
    pub fn in_data_dir(dir: &Path) -> Self {
        Self {
            backend: &sqlite::BACKEND,
            place: dir.into(),
        }
    }

    /// Opens the store, which is created if missing. An embedded store belongs to this process
    /// until it is [closed](crate::Upkeep::close).
    pub async fn open(&self) -> Result<Arc<dyn EventStore>, StoreOpenError> {
        (self.backend.open)(&self.place).await
    }

    /// Inspects the store without opening it. Only reads, and takes no lock that blocks the
    /// store; may block this thread.
    pub fn inspect(&self) -> Result<Inspection, StoreError> {
        (self.backend.inspect)(&self.place)
    }

    /// Returns the path of the store's main file, which need not exist; `None` if the backend
    /// keeps no file on this machine. The names of further files begin with the same path.
    pub fn file(&self) -> Option<PathBuf> {
        (self.backend.file)(&self.place)
    }
}

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        let parts = url.split_once(':').and_then(|(scheme, place)| {
            let mut backends = BACKENDS.iter();
            Some((backends.find(|known| known.scheme == scheme)?, place))
        });
        match parts {
            None => Err(UrlError::UnknownScheme { url: url.into() }),
            Some((_, "")) => Err(UrlError::NoPlace { url: url.into() }),
            Some((backend, place)) => Ok(Self {
                backend,
                place: place.into(),
            }),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend.scheme, self.place.display())
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{event, read_feed};

    #[tokio::test]
    async fn a_store_is_opened_and_inspected_by_its_url() {
        let dir = tempfile::TempDir::new().unwrap();
        let url: StoreUrl = format!("sqlite:{}", dir.path().display()).parse().unwrap();
        assert_eq!(
            url.to_string(),
            StoreUrl::in_data_dir(dir.path()).to_string()
        );
        assert!(!url.file().unwrap().exists());
        let store = url.open().await.unwrap();
        store.append(vec![event("n1", 1)]).await.unwrap();
        assert_eq!(read_feed(&*store, 10).await.len(), 1);
        assert_eq!(url.inspect().unwrap().events, 1);
        assert!(url.file().unwrap().exists());
        let error = url.open().await.map(drop).unwrap_err();
        assert!(error.to_string().contains("in use by"), "{error}");
        store.close().await;
    }

    #[test]
    fn a_wrong_url_is_refused_with_the_forms_that_are_known() {
        for (url, says) in [
            ("", "known kind"),
            ("/var/lib/gpuwarden", "known kind"),
            ("mysql:/var/lib/gpuwarden", "known kind"),
            ("SQLITE:/var/lib/gpuwarden", "known kind"),
            ("sqlite:", "where the store is"),
        ] {
            let error = url.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{url:?}")), "{error}");
            assert!(error.contains(says), "{error}");
            assert!(error.ends_with("write sqlite:DIRECTORY"), "{error}");
        }
    }
}
