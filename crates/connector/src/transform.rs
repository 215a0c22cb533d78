//! The transformers of the platform connector, which change a health event between its check and
//! its storing, in the order in which they are configured.
//!
//! They are NVSentinel's, and so are their files: [`augment`] adds what the cluster knows of
//! the node, [`overrides`] changes gravity, health or action by rules, [`dedup`] takes
//! repeats out of the reactions. [`load`] reads the files. All of it is pure; the connector
//! holds the state, the clock and the counters.
//!
//! An event gets its id before it comes here: it is known by what its sender said.

pub mod augment;
pub mod dedup;
pub mod load;
pub mod overrides;

use contract::HealthEvent;

use model::event::{MAX_METADATA, MAX_METADATA_BYTES};

/// A transformer as it is configured.
#[derive(Clone, Debug)]
pub enum Transformer {
    /// `MetadataAugmentor`.
    Augment(augment::Labels),
    /// `OverrideTransformer`.
    Override(overrides::Overrides),
    /// `Deduplicator`.
    Deduplicate(dedup::Settings),
}

/// Writes a metadata entry, and returns whether it fits the limits of an event, which the next
/// connector on its way will ask for too.
fn annotate(event: &mut HealthEvent, key: &str, value: &str) -> bool {
    let fits = key.len() <= MAX_METADATA_BYTES
        && value.len() <= MAX_METADATA_BYTES
        && (event.metadata.len() < MAX_METADATA || event.metadata.contains_key(key));
    if fits {
        event.metadata.insert(key.to_owned(), value.to_owned());
    }
    fits
}
