//! Acceptance of health events: validation, normalisation, and an id that is a hash of the
//! content, so an event that is sent again is not counted twice.

use contract::{HealthEvent, ProcessingStrategy, RecommendedAction, json, keys};
use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use crate::position::Position;
use crate::reporter::Reporter;

pub use contract::{MAX_METADATA_BYTES, accepted, mark_accepted};

/// Most events in one request.
pub const MAX_EVENTS: usize = 10_000;
/// Longest name (bytes): agent, component class, check, node, code, entity type.
pub const MAX_NAME_BYTES: usize = 253;
/// Longest entity value and custom action (bytes).
pub const MAX_VALUE_BYTES: usize = 1024;
/// Longest message (bytes). A longer one is cut and marked, never refused: no fault is lost
/// because of its text.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024;
/// Most error codes, and most entities, of one event.
pub const MAX_ITEMS: usize = 256;
/// Most metadata entries of one event.
pub const MAX_METADATA: usize = 128;
/// Longest credible age of an event's acceptance: covers a machine that was off or disconnected
/// for a weekend. A larger age comes from a wrong clock, and must not hide a fault.
pub const MAX_ACCEPTANCE_AGE: SignedDuration = SignedDuration::from_hours(48);
/// Most that a sender's clock may run ahead. Times further in the future are replaced.
pub const MAX_AHEAD: SignedDuration = SignedDuration::from_secs(60);

/// Metadata keys that a connector adds to an event.
const CONNECTOR_MARKS: [&str; 4] = [
    keys::META_FUTURE_TIME,
    keys::META_MESSAGE_CUT,
    keys::META_TIME_OF_RECEIPT,
    keys::META_REPORTED_BY,
];

/// An accepted event, as all readers of the store see it.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRecord {
    /// Position in the store's feed.
    pub seq: Position,
    /// Id of the event: 24 hexadecimal digits, a hash of the content. Also in `event.id`.
    pub id: String,
    /// Time when the connector accepted the event.
    pub created_at: Timestamp,
    /// The event itself, after [`normalise`].
    pub event: HealthEvent,
}

/// Problem with a field of a submitted event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct FieldProblem {
    /// Proto name of the field, with an index if it repeats: `errorCode[3]`.
    pub field: String,
    /// Problem in words: the found value (shortened), and what is expected.
    pub what: String,
}

// === impl FieldProblem ===

impl FieldProblem {
    /// Creates a problem of the named field.
    pub fn new(field: &str, what: String) -> Self {
        Self {
            field: field.to_owned(),
            what,
        }
    }
}

/// Checks an event against the contract and the limits of this module.
pub fn validate(event: &HealthEvent) -> Result<(), FieldProblem> {
    let required = [
        ("nodeName", &event.node_name),
        ("agent", &event.agent),
        ("componentClass", &event.component_class),
        ("checkName", &event.check_name),
    ];
    for (field, value) in required {
        if value.trim().is_empty() {
            return Err(FieldProblem::new(
                field,
                "is empty; it is required".to_owned(),
            ));
        }
        limit(field, value, MAX_NAME_BYTES)?;
    }
    if event.recommended_action == RecommendedAction::Custom as i32
        && event.custom_recommended_action.trim().is_empty()
    {
        return Err(FieldProblem::new(
            "customRecommendedAction",
            "is empty; it is required where recommendedAction is CUSTOM (27)".to_owned(),
        ));
    }
    limit(
        "customRecommendedAction",
        &event.custom_recommended_action,
        MAX_VALUE_BYTES,
    )?;
    if let Some(time) = event.generated_timestamp
        && json::timestamp(time).is_none()
    {
        return Err(FieldProblem::new(
            "generatedTimestamp",
            format!(
                "{{seconds: {}, nanos: {}}} is not a time: seconds must lie in the years 0001 to \
                 9999, nanos in 0 to 999999999",
                time.seconds, time.nanos
            ),
        ));
    }
    validate_lists(event)
}

/// Checks codes, entities and metadata.
fn validate_lists(event: &HealthEvent) -> Result<(), FieldProblem> {
    count("errorCode", event.error_code.len(), MAX_ITEMS)?;
    for (index, code) in event.error_code.iter().enumerate() {
        limit(&format!("errorCode[{index}]"), code, MAX_NAME_BYTES)?;
    }
    count("entitiesImpacted", event.entities_impacted.len(), MAX_ITEMS)?;
    for (index, entity) in event.entities_impacted.iter().enumerate() {
        let field = format!("entitiesImpacted[{index}]");
        limit(
            &format!("{field}.entityType"),
            &entity.entity_type,
            MAX_NAME_BYTES,
        )?;
        limit(
            &format!("{field}.entityValue"),
            &entity.entity_value,
            MAX_VALUE_BYTES,
        )?;
        if entity.entity_type.is_empty() {
            return Err(FieldProblem::new(
                &field,
                "has an empty entityType".to_owned(),
            ));
        }
    }
    // Entries added by a connector do not count: the next connector has to accept the event
    // too.
    let marks = CONNECTOR_MARKS
        .iter()
        .filter(|key| event.metadata.contains_key(**key))
        .count();
    count("metadata", event.metadata.len() - marks, MAX_METADATA)?;
    for (key, value) in &event.metadata {
        limit("metadata key", key, MAX_METADATA_BYTES)?;
        limit(
            &format!("metadata[{}]", shorten(key)),
            value,
            MAX_METADATA_BYTES,
        )?;
    }
    Ok(())
}

/// Clears `is_fatal` of our own event if the event asks for no action (`NONE`). Otherwise its
/// node would leave service and never return. Every monitor and every check passes its events
/// through this function; events of other senders stay unchanged. A cloud's maintenance needs no
/// action of ours: the provider acts, and the monitor takes the node back.
pub fn not_fatal_without_action(event: &mut HealthEvent) {
    let asks = event.recommended_action != RecommendedAction::None as i32;
    event.is_fatal &= asks || event.check_name == keys::CHECK_CSP_MAINTENANCE;
}

/// Brings a valid event into its stored form, and sets its id.
///
/// - An `UNSPECIFIED` strategy becomes the default strategy.
/// - A missing timestamp becomes `received_at`, and the metadata say so.
/// - A timestamp more than [`MAX_AHEAD`] after `received_at` becomes `received_at`; the
///   metadata keep the original.
/// - A message over [`MAX_MESSAGE_BYTES`] is cut and marked.
/// - The sender's `id` is replaced by ours, since two senders may choose the same.
pub fn normalise(event: &mut HealthEvent, received_at: Timestamp) {
    if event.processing_strategy == ProcessingStrategy::Unspecified as i32 {
        event.processing_strategy = ProcessingStrategy::ExecuteRemediation as i32;
    }
    if event.message.len() > MAX_MESSAGE_BYTES {
        let full = event.message.len();
        event
            .message
            .truncate(floor_char_boundary(&event.message, MAX_MESSAGE_BYTES));
        event
            .metadata
            .insert(keys::META_MESSAGE_CUT.to_owned(), full.to_string());
    }
    event.id.clear();
    if event.generated_timestamp.is_none() {
        event
            .metadata
            .insert(keys::META_TIME_OF_RECEIPT.to_owned(), "true".to_owned());
        event.generated_timestamp = Some(json::proto_timestamp(received_at));
    }
    // Must happen before the timestamp is replaced: a retry arrives at another time and has to
    // get the same id.
    event.id = event_id(event);
    let generated = event.generated_timestamp.and_then(json::timestamp);
    if let Some(time) = generated.filter(|time| time.duration_since(received_at) > MAX_AHEAD) {
        // An earlier connector may have recorded the original time; that entry stays.
        let noted = event.metadata.entry(keys::META_FUTURE_TIME.to_owned());
        noted.or_insert_with(|| time.to_string());
        event.generated_timestamp = Some(json::proto_timestamp(received_at));
    }
}

/// Returns the acceptance time to use for an event that a trusted sender claims, at `now`, to
/// have accepted at `claimed`: never later than `now`. A claim older than
/// [`MAX_ACCEPTANCE_AGE`] comes from a wrong clock. A fault then counts as new, and a recovery
/// as old as the limit allows.
pub fn accepted_at(event: &HealthEvent, claimed: Timestamp, now: Timestamp) -> Timestamp {
    let oldest = now.checked_sub(MAX_ACCEPTANCE_AGE).unwrap_or(now);
    if claimed >= oldest {
        claimed.min(now)
    } else if event.is_healthy {
        oldest
    } else {
        now
    }
}

/// Removes and returns the time that [`mark_accepted`] recorded. The time is not part of the
/// event's content.
pub fn take_accepted(event: &mut HealthEvent) -> Option<Timestamp> {
    event.metadata.remove(keys::META_ACCEPTED_AT)?.parse().ok()
}

/// Converts the time that [`mark_accepted`] recorded from the sender's clock to ours, where
/// `sent` and `now` are the same moment on both clocks. Only the age of the event is used, so a
/// wrong clock makes no event look older or newer. If the sender's clock was set back in
/// between, the event counts as new.
pub fn accepted_by_our_clock(event: &mut HealthEvent, sent: Timestamp, now: Timestamp) {
    if let Some(accepted) = take_accepted(event) {
        let age = sent.duration_since(accepted).max(SignedDuration::ZERO);
        mark_accepted(event, now.checked_sub(age).unwrap_or(now));
    }
}

/// Returns the id of an event: a hash of its content and its reporter. An event that is sent
/// again (by a client's retry, or by a monitor that reads a log again) keeps its id, and no
/// sender can claim the id of an event that another will report.
///
/// The id of an event that names a log record depends only on that record: the event's time,
/// and the details of the GPU, may differ when the record is read again.
///
/// The format, 24 hexadecimal digits, is that of ids in NVSentinel's stores.
pub fn event_id(event: &HealthEvent) -> String {
    let mut plain = as_sent(event);
    if names_record(&plain) {
        plain
            .metadata
            .retain(|key, _| RECORD_NAMES.contains(&key.as_str()));
        plain.generated_timestamp = None;
        plain.entities_impacted.clear();
        plain.recommended_action = 0;
    }
    hash(&plain)
}

/// Metadata keys that name the log record of an event, and its reader.
const RECORD_NAMES: [&str; 4] = [
    keys::META_REPORTED_BY,
    keys::META_BOOT_ID,
    keys::META_KERNEL_SEQUENCE,
    keys::META_LOG_PLACE,
];

/// Returns whether an event names the log record that it was read from.
pub fn names_record(event: &HealthEvent) -> bool {
    let has = |key| event.metadata.contains_key(key);
    has(keys::META_LOG_PLACE) || (has(keys::META_BOOT_ID) && has(keys::META_KERNEL_SEQUENCE))
}

/// Returns a hash of an event without its time: equal for two reports of the same content.
///
/// Detects retries of senders that give no timestamp, which would otherwise look like new
/// events.
pub fn content_fingerprint(event: &HealthEvent) -> String {
    let mut plain = as_sent(event);
    plain.generated_timestamp = None;
    plain.metadata.remove(keys::META_TIME_OF_RECEIPT);
    hash(&plain)
}

/// Returns whether an event may open or close a fault. An event may not if its strategy asks
/// for storing only, or if it is older than the history that its monitor was configured to
/// read.
pub fn counts(event: &HealthEvent) -> bool {
    let strategy = event.processing_strategy;
    strategy != ProcessingStrategy::StoreOnly as i32
        && strategy != ProcessingStrategy::StoreAndAnalyse as i32
        && !event.metadata.contains_key(keys::META_EARLIER_IN_BOOT)
}

/// Returns whether an event is a notice: not fatal and without a requested action, such as an
/// XID caused by a bug in a job. A notice is displayed for a while and is not an open fault,
/// unless a policy makes it one.
pub fn is_notice(event: &HealthEvent) -> bool {
    let overrides = event.quarantine_overrides.as_ref();
    !event.is_healthy
        && !event.is_fatal
        && event.recommended_action == RecommendedAction::None as i32
        && !overrides.is_some_and(|one| one.force)
}

/// Restores the future timestamp of the sender that [`normalise`] replaced.
fn restore_future_time(event: &mut HealthEvent) {
    let noted = event.metadata.remove(keys::META_FUTURE_TIME);
    if let Some(time) = noted.and_then(|time| time.parse().ok()) {
        event.generated_timestamp = Some(json::proto_timestamp(time));
    }
}

/// Returns whether the sender gave no timestamp.
pub fn lacks_own_time(event: &HealthEvent) -> bool {
    event.metadata.contains_key(keys::META_TIME_OF_RECEIPT)
}

/// Returns an event in the form of its sender, without its id and without the reporter's pid: a
/// restarted check reports the same event.
fn as_sent(event: &HealthEvent) -> HealthEvent {
    let mut plain = event.clone();
    plain.id.clear();
    restore_future_time(&mut plain);
    if let Some(reporter) = Reporter::of(&plain) {
        reporter.without_pid().note_in(&mut plain);
    }
    plain
}

fn hash(event: &HealthEvent) -> String {
    // The encoding is deterministic: fields are ordered by number, and maps are sorted.
    let digest = Sha256::digest(prost::Message::encode_to_vec(event));
    digest
        .iter()
        .take(12)
        .fold(String::with_capacity(24), |mut text, byte| {
            for nibble in [byte >> 4, byte & 15] {
                text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
            }
            text
        })
}

fn limit(field: &str, value: &str, max: usize) -> Result<(), FieldProblem> {
    if value.len() <= max {
        return Ok(());
    }
    let found = value.len();
    Err(FieldProblem::new(
        field,
        format!(
            "{:?} has {found} bytes, at most {max} are taken",
            shorten(value)
        ),
    ))
}

fn count(field: &str, found: usize, max: usize) -> Result<(), FieldProblem> {
    if found <= max {
        return Ok(());
    }
    Err(FieldProblem::new(
        field,
        format!("has {found} entries, at most {max} are taken"),
    ))
}

fn shorten(value: &str) -> String {
    const SHOWN: usize = 40;
    if value.len() <= SHOWN {
        return value.to_owned();
    }
    format!("{}...", &value[..floor_char_boundary(value, SHOWN)])
}

/// Returns the largest index up to `max` that is a character boundary of `text`.
pub fn floor_char_boundary(text: &str, max: usize) -> usize {
    (0..=max.min(text.len()))
        .rev()
        .find(|&index| text.is_char_boundary(index))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests;
