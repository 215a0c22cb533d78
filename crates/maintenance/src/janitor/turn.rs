//! One resource of a node at a time: who has begun goes on, then the oldest.
//!
//! It follows from the resources themselves, so nobody holds a lock that could stay behind.

use crate::Resource;

/// The place of a resource among those of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It is its turn.
    Own,
    /// Another one is before it.
    Behind {
        /// Its kind and name.
        before: String,
        /// True if that has begun, and asks for the same.
        same: bool,
    },
}

/// Returns the turn of a resource among `all` of its node.
pub(super) fn turn<'a>(resource: &Resource, all: impl Iterator<Item = &'a Resource>) -> Turn {
    let first = all
        .filter(|other| !other.is_over())
        .min_by_key(|other| place(other));
    match first {
        Some(first) if first.uid != resource.uid => Turn::Behind {
            before: first.key().title(),
            same: first.status.start.is_some() && first.kind == resource.kind,
        },
        _ => Turn::Own,
    }
}

/// Returns the order of resources: those that have begun first, and of each kind the oldest.
fn place(resource: &Resource) -> impl Ord + use<> {
    let start = resource.status.start;
    (
        start.is_none(),
        start.unwrap_or(resource.created),
        resource.created,
        resource.kind,
        resource.name.clone(),
    )
}
