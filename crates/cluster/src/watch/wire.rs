//! Lists and lines of a watch in the form that the API server sends.

use std::io;

use futures::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::core::Status;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Longest line of a watch (bytes). The API server stores objects up to about 1.5 MiB.
const LINE_BYTES: u64 = 8 * 1024 * 1024;

/// A list whose items are still JSON text.
#[derive(Deserialize)]
pub(super) struct RawList<'a> {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    #[serde(borrow)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

/// A line of a watch whose object is still JSON text.
#[derive(Deserialize)]
pub(super) struct Line<'a> {
    #[serde(rename = "type")]
    pub(super) kind: LineKind,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum LineKind {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

/// The fields of an object that the watch itself reads, even if the rest is malformed.
#[derive(Default, Deserialize)]
pub(super) struct WatchedObject {
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    namespace: Value,
    name: Value,
    resource_version: Value,
}

// === impl WatchedObject ===

impl WatchedObject {
    /// Reads the fields that can be read.
    pub(super) fn of(text: &RawValue) -> Self {
        serde_json::from_str(text.get()).unwrap_or_default()
    }

    /// Returns the version of the object.
    pub(super) fn version(&self) -> Option<&str> {
        self.metadata.resource_version.as_str()
    }

    /// Returns the name, as `NAMESPACE/NAME` where the object has a namespace.
    pub(super) fn name(&self) -> Option<String> {
        let name = self.metadata.name.as_str()?;
        Some(match self.metadata.namespace.as_str() {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name.to_owned(),
        })
    }
}

/// Reads the next line of a watch; `None` at its end. A line that is too long comes in pieces.
pub(super) async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let mut limited = stream.take(LINE_BYTES);
    limited.read_until(b'\n', &mut line).await?;
    Ok((!line.is_empty()).then_some(line))
}

pub(super) fn is_version_too_large(status: &Status) -> bool {
    let causes = status
        .details
        .as_ref()
        .map(|details| details.causes.as_slice());
    causes
        .unwrap_or_default()
        .iter()
        .any(|cause| cause.reason == "ResourceVersionTooLarge")
}
