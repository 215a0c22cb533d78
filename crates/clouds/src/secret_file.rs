//! Files of credentials, which are small and may be rotated: they are read each time.

use std::path::Path;

use runtime::text_file;

use crate::http::Failure;

/// Largest file of credentials, or with a token or key (bytes).
const MAX_FILE: usize = 64 * 1024;

/// Reads a file. Failures name its path.
pub(crate) async fn read(path: &Path) -> Result<String, Failure> {
    let place = path.to_owned();
    let read = tokio::task::spawn_blocking(move || text_file::read(&place, MAX_FILE));
    let read = read.await.map_err(Failure::new)?;
    read.map_err(|error| Failure::new(format!("cannot read {}: {error}", path.display())))
}
