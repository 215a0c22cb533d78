//! The selection of the objects that a watch follows.

use kube::Resource;

use crate::kind::Kind;

/// Events that wait for the consumer; when it is slower, the API server waits.
pub(super) const QUEUE: usize = 1024;
/// Objects in one answer to a list.
const PAGE: u32 = 500;
/// Objects in one answer, and events that wait, where only what an object says of itself is asked for: of anybody's
/// objects, such as every `ConfigMap` with a label. Each may have 256 KiB of annotations.
const METADATA_PAGE: u32 = 32;

/// Selects the objects that a watch follows.
#[derive(Clone, Debug)]
pub struct Selection {
    pub(super) path: String,
    /// The field selector of the objects below `path`; `None`: all.
    pub(super) fields: Option<String>,
    /// The label selector; `None`: all.
    pub(super) labels: Option<String>,
    /// Only `metadata` of the objects is wanted.
    pub(super) metadata_only: bool,
}

// === impl Selection ===

impl Selection {
    /// Returns all objects of a kind, or those in one namespace. `kind` is `()` for types that
    /// know their kind.
    pub fn of<K: Resource>(kind: &K::DynamicType, namespace: Option<&str>) -> Self {
        Self {
            path: K::url_path(kind, namespace),
            fields: None,
            labels: None,
            metadata_only: false,
        }
    }

    /// Returns all objects of a kind that is named, or those in one namespace.
    pub(crate) fn of_kind(kind: &Kind, namespace: Option<&str>) -> Self {
        Self {
            path: kind.path(namespace),
            fields: None,
            labels: None,
            metadata_only: false,
        }
    }

    /// Returns of these the one of this name.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self {
            fields: Some(format!("metadata.name={name}")),
            ..self
        }
    }

    /// Returns of these the ones that a field selector selects.
    #[must_use]
    pub fn with_fields(self, selector: &str) -> Self {
        let fields = Some(selector.to_owned());
        Self { fields, ..self }
    }

    /// Returns of these the ones that a label selector selects.
    #[must_use]
    pub fn with_labels(self, selector: &str) -> Self {
        let labels = Some(selector.to_owned());
        Self { labels, ..self }
    }

    /// Returns of these only `metadata`: an API server sends nothing else, however large the objects are.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self {
            metadata_only: true,
            ..self
        }
    }

    /// Returns how many objects are in one answer to a list.
    pub(super) fn page(&self) -> u32 {
        if self.metadata_only {
            METADATA_PAGE
        } else {
            PAGE
        }
    }

    /// Returns how many events wait for the consumer.
    pub(super) fn queue(&self) -> usize {
        if self.metadata_only {
            METADATA_PAGE as usize
        } else {
            QUEUE
        }
    }
}
