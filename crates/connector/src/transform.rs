//! Transformers of the platform connector, which change a health event after its check and
//! before it is stored, in the configured order.
//!
//! The transformers and their files are NVSentinel's: [`augment`] adds data of the node from the
//! cluster, [`overrides`] changes gravity, health or action by rules, and [`dedup`] hides
//! repeats from the reactions. [`load`] reads the files. All functions are pure; the connector
//! holds the state, the clock and the counters.
//!
//! An event gets its id before the transformers run: the id depends only on what the sender
//! wrote.

pub mod augment;
pub mod dedup;
pub mod load;
pub mod overrides;

use contract::HealthEvent;

use model::event::{MAX_METADATA, MAX_METADATA_BYTES};

/// A transformer with its configuration.
#[derive(Clone, Debug)]
pub enum Transformer {
    /// `MetadataAugmentor`, with the labels to copy.
    Augment(augment::Labels),
    /// `OverrideTransformer`, with its rules.
    Override(overrides::Overrides),
    /// `Deduplicator`, with its settings.
    Deduplicate(dedup::Settings),
}

/// Writes a metadata entry. Returns false if it exceeds the limits of an event, which the next
/// connector would enforce.
fn annotate(event: &mut HealthEvent, key: &str, value: &str) -> bool {
    let fits = key.len() <= MAX_METADATA_BYTES
        && value.len() <= MAX_METADATA_BYTES
        && (event.metadata.len() < MAX_METADATA || event.metadata.contains_key(key));
    if fits {
        event.metadata.insert(key.to_owned(), value.to_owned());
    }
    fits
}
