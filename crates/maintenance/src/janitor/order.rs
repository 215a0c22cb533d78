//! Order of the resources of a node. Only one resource is processed at a time: a started one
//! first, then the oldest.
//!
//! The order follows from the resources themselves, so there is no lock that a crash could
//! leave behind.

use crate::MaintenanceResource;

/// Position of a resource among those of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Position {
    /// The resource is first.
    First,
    /// Another resource comes first.
    Behind {
        /// Kind and name of the first resource.
        before: String,
        /// True if that resource has started and requests the same.
        same: bool,
    },
}

/// Returns the position of a resource among `all` resources of its node.
pub(super) fn position<'a>(
    resource: &MaintenanceResource,
    all: impl Iterator<Item = &'a MaintenanceResource>,
) -> Position {
    let first = all
        .filter(|other| !other.is_over())
        .min_by_key(|other| place(other));
    match first {
        Some(first) if first.uid != resource.uid => Position::Behind {
            before: first.key().title(),
            same: first.status.start.is_some() && first.kind == resource.kind,
        },
        _ => Position::First,
    }
}

/// Returns the sort key of a resource: started ones first, then by age.
fn place(resource: &MaintenanceResource) -> impl Ord + use<> {
    let start = resource.status.start;
    (
        start.is_none(),
        start.unwrap_or(resource.created),
        resource.created,
        resource.kind,
        resource.name.clone(),
    )
}
