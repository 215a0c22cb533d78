//! `authorization` header of the requests.

use std::path::PathBuf;
use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};

/// Function that creates the header of a request; `None` sends no header. The error explains
/// why the header is not available now.
pub type Header = Arc<dyn Fn() -> Result<Option<MetadataValue<Ascii>>, String> + Send + Sync>;

/// Returns a header with the token in `file`; without a file, none is sent. The token is read
/// for every request: the kubelet replaces it long before it expires.
pub fn token_header(file: Option<PathBuf>) -> Header {
    Arc::new(move || {
        let Some(path) = &file else {
            return Ok(None);
        };
        let shown = path.display();
        let token = std::fs::read_to_string(path);
        let token = token.map_err(|error| format!("cannot read the token {shown}: {error}"))?;
        let value = format!("Bearer {}", token.trim()).parse();
        value
            .map(Some)
            .map_err(|_| format!("{shown} holds no token"))
    })
}
