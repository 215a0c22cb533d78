//! The `authorization` header of the requests.

use std::path::PathBuf;
use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};

/// A function that makes the header of a request; `None`: none is sent. An error says why it
/// cannot be made now.
pub type Header = Arc<dyn Fn() -> Result<Option<MetadataValue<Ascii>>, String> + Send + Sync>;

/// Returns the header with the token that `file` holds; without one none is sent. The token is read
/// for every request: the kubelet replaces it long before it ends.
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
