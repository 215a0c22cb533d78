//! Store that a request is meant for, and store that answers: gRPC metadata beside the contract
//! that NVSentinel's senders use.
//!
//! ```text
//! request   gpuwarden-expected-store: ID   store that received the sender's last events
//! answer    gpuwarden-store: ID            store that accepted or refused these
//! ```
//!
//! A store refuses requests for another store (`FAILED_PRECONDITION`), and accepts requests
//! that name none. Nothing is therefore stored before the sender knows which store it talks to,
//! and events that the store may lack are sent before new ones. The id also changes when a
//! store begins anew ([`store::Identity`]).

use store::Identity;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Code, Response, Status};

/// Metadata of a request: the store that is meant.
const EXPECTED: &str = "gpuwarden-expected-store";
/// Metadata of an answer: the store that gives it.
const ANSWERS: &str = "gpuwarden-store";
/// Id sent by a sender that has not met a store yet; no store has it.
const NONE: &str = "none";
/// Longest id accepted from an answer (bytes): gpuwarden's have up to 53, and the id has to fit
/// into the outbox's cursor.
pub(crate) const MAX_STORE_BYTES: usize = 64;

/// Sets the expected store in a request's metadata.
pub(crate) fn expect(metadata: &mut MetadataMap, store: Option<&str>) {
    if let Ok(value) = store.unwrap_or(NONE).parse() {
        metadata.insert(EXPECTED, value);
    }
}

/// Refuses a request that is meant for another store than `ours`.
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

/// Returns the answer of a store that has accepted a request.
pub(crate) fn taken(ours: Option<&Identity>) -> Response<()> {
    let mut response = Response::new(());
    if let Some(ours) = ours {
        name(response.metadata_mut(), &ours.to_string());
    }
    response
}

/// Returns the store that gave an answer.
pub(crate) fn from_answer(metadata: &MetadataMap) -> Option<String> {
    let store = metadata.get(ANSWERS)?.to_str().ok()?;
    (1..=MAX_STORE_BYTES)
        .contains(&store.len())
        .then(|| store.to_owned())
}

/// Returns the store that refused a request because the request is meant for another one.
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
