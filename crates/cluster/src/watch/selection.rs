//! Selection of the objects that a watch follows.

use kube::Resource;

use crate::kind::ObjectKind;

/// Events that wait for the consumer; when it is slower, the API server waits.
pub(super) const QUEUE: usize = 1024;
/// Objects per page of a list.
const PAGE: u32 = 500;
/// Objects per page, and events that wait, for watches of only `metadata`. These select objects
/// of any size and origin, such as every `ConfigMap` with a label. Each may have 256 KiB of
/// annotations.
const METADATA_PAGE: u32 = 32;

/// Objects that a watch follows.
#[derive(Clone, Debug)]
pub struct Selection {
    pub(super) path: String,
    /// Field selector; `None` for all objects below `path`.
    pub(super) fields: Option<String>,
    /// Label selector; `None` for all objects below `path`.
    pub(super) labels: Option<String>,
    /// True if only `metadata` of the objects is requested.
    pub(super) metadata_only: bool,
}

// === impl Selection ===

impl Selection {
    /// Selects all objects of a type, or those in one namespace. `kind` is `()` for types that
    /// know their kind.
    pub fn of<K: Resource>(kind: &K::DynamicType, namespace: Option<&str>) -> Self {
        Self::all(K::url_path(kind, namespace))
    }

    /// Selects all objects of a kind, or those in one namespace.
    pub fn of_kind(kind: &ObjectKind, namespace: Option<&str>) -> Self {
        Self::all(kind.path(namespace))
    }

    fn all(path: String) -> Self {
        Self {
            path,
            fields: None,
            labels: None,
            metadata_only: false,
        }
    }

    /// Limits the selection to the object of a name.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self {
            fields: Some(format!("metadata.name={name}")),
            ..self
        }
    }

    /// Limits the selection by a field selector.
    #[must_use]
    pub fn with_fields(self, selector: &str) -> Self {
        let fields = Some(selector.to_owned());
        Self { fields, ..self }
    }

    /// Limits the selection by a label selector.
    #[must_use]
    pub fn with_labels(self, selector: &str) -> Self {
        let labels = Some(selector.to_owned());
        Self { labels, ..self }
    }

    /// Requests only `metadata` of the objects: the API server sends nothing else, however large
    /// they are.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self {
            metadata_only: true,
            ..self
        }
    }

    /// Returns the number of objects per page of a list.
    pub(super) fn page(&self) -> u32 {
        if self.metadata_only {
            METADATA_PAGE
        } else {
            PAGE
        }
    }

    /// Returns the number of events that wait for the consumer.
    pub(super) fn queue(&self) -> usize {
        if self.metadata_only {
            METADATA_PAGE as usize
        } else {
            QUEUE
        }
    }
}
