//! Interface between a backend and the list of backends in `url.rs`.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use crate::{EventStore, Inspection, StoreError, StoreOpenError};

/// Outcome of opening a store.
pub(crate) type Opening<'a> =
    Pin<Box<dyn Future<Output = Result<Arc<dyn EventStore>, StoreOpenError>> + Send + 'a>>;

/// Functions of a backend that need no open store. Each takes the place from the URL.
pub(crate) struct Backend {
    pub(crate) scheme: &'static str,
    /// Placeholder of the place in messages, such as `DIRECTORY`.
    pub(crate) place: &'static str,
    /// Opens the store; creates it if missing.
    pub(crate) open: fn(&OsStr) -> Opening<'_>,
    /// Reads figures from a store that may be open elsewhere. May block.
    pub(crate) inspect: fn(&OsStr) -> Result<Inspection, StoreError>,
    /// Returns the main file of a store on this machine.
    pub(crate) file: fn(&OsStr) -> Option<PathBuf>,
}
