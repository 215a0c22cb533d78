//! For which store a request is, and which store answers: in the metadata of gRPC, beside
//! the contract that NVSentinel's senders know.
//!
//! ```text
//! request   gpuwarden-expected-store: ID   the store to which the sender brought the last events
//! answer    gpuwarden-store: ID            the store that took these, or that refuses them
//! ```
//!
//! A store refuses what is for another one (`FAILED_PRECONDITION`), and takes what is for
//! nobody: so nothing is stored before the sender knows whom it talks to, and what the store
//! may lack is sent before what is new. The id changes, too, where a store begins anew
//! ([`store::Identity`]).

use store::Identity;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Code, Response, Status};

/// Metadata of a request: the store that is meant.
const EXPECTED: &str = "gpuwarden-expected-store";
/// Metadata of an answer: the store that gives it.
const ANSWERS: &str = "gpuwarden-store";
/// The store that a sender expects that has met none yet: none is called so.
const NONE: &str = "none";
/// Longest id that is taken from an answer (bytes): ours have up to 53, and it has to fit
/// into the outbox's note.
pub(crate) const MAX_STORE_BYTES: usize = 64;

/// Says in a request for which store it is.
pub(crate) fn expect(metadata: &mut MetadataMap, store: Option<&str>) {
    if let Ok(value) = store.unwrap_or(NONE).parse() {
        metadata.insert(EXPECTED, value);
    }
}

/// Refuses a request that is for another store than `ours`.
pub(crate) fn check(metadata: &MetadataMap, ours: Option<&Identity>) -> Result<(), Status> {
    let (Some(ours), Some(expected)) = (ours, metadata.get(EXPECTED)) else {
        return Ok(());
    };
    let ours = ours.to_string();
    if expected.as_bytes() == ours.as_bytes() {
        return Ok(());
    }
    let text = "this is not the store to which the events before these were brought";
    let mut status = Status::failed_precondition(text);
    name(status.metadata_mut(), &ours);
    Err(status)
}

/// Returns the answer of a store that has taken a request.
pub(crate) fn taken(ours: Option<&Identity>) -> Response<()> {
    let mut response = Response::new(());
    if let Some(ours) = ours {
        name(response.metadata_mut(), &ours.to_string());
    }
    response
}

/// Returns which store an answer is from.
pub(crate) fn from_answer(metadata: &MetadataMap) -> Option<String> {
    let store = metadata.get(ANSWERS)?.to_str().ok()?;
    (1..=MAX_STORE_BYTES)
        .contains(&store.len())
        .then(|| store.to_owned())
}

/// Returns which store refuses a request, because it is for another one.
pub(crate) fn from_refusal(status: &Status) -> Option<String> {
    (status.code() == Code::FailedPrecondition)
        .then(|| from_answer(status.metadata()))
        .flatten()
}

fn name(metadata: &mut MetadataMap, store: &str) {
    if let Ok(value) = store.parse::<MetadataValue<Ascii>>() {
        metadata.insert(ANSWERS, value);
    }
}
