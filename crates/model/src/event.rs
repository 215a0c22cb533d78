//! A health event as it is accepted: checked, brought into one form, and named by a
//! hash of its content, so that sending it again does not double it.

use contract::{HealthEvent, ProcessingStrategy, RecommendedAction, json, keys};
use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use crate::position::Position;
use crate::reporter::Reporter;

pub use contract::{MAX_METADATA_BYTES, accepted, mark_accepted};

/// Most events in one request.
pub const MAX_EVENTS: usize = 10_000;
/// Longest name: agent, component class, check, node, code, entity type (bytes).
pub const MAX_NAME_BYTES: usize = 253;
/// Longest entity value and custom action (bytes).
pub const MAX_VALUE_BYTES: usize = 1024;
/// Longest message (bytes). A longer one is cut and marked, never refused: a fault is
/// not lost because its text is long.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024;
/// Most error codes, and most entities, on one event.
pub const MAX_ITEMS: usize = 256;
/// Most metadata entries on one event.
pub const MAX_METADATA: usize = 128;
/// Longest time ago that an event can be told to have been accepted. A machine that was off, or cut
/// off, for a weekend is within it. A longer one comes from a clock that was wrong, and must not
/// hide a fault.
pub const MAX_ACCEPTANCE_AGE: SignedDuration = SignedDuration::from_hours(48);
/// The time by which the clock of a sender may be ahead: the clocks of a cluster differ. A time
/// that lies further in the future is none.
pub const MAX_AHEAD: SignedDuration = SignedDuration::from_secs(60);

/// The metadata keys that a connector adds to what a sender has said.
const CONNECTOR_MARKS: [&str; 4] = [
    keys::META_FUTURE_TIME,
    keys::META_MESSAGE_CUT,
    keys::META_TIME_OF_RECEIPT,
    keys::META_REPORTED_BY,
];

/// An accepted event, as every reader of the store sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Position in the feed of the store.
    pub seq: Position,
    /// Identity: 24 hexadecimal digits, a hash of the content. Also in `event.id`.
    pub id: String,
    /// The time at which the connector accepted it.
    pub created_at: Timestamp,
    /// The event, normalised.
    pub event: HealthEvent,
}

/// A problem with a field of an event that a sender offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct Problem {
    /// The field's proto name, with an index where it repeats: `errorCode[3]`.
    pub field: String,
    /// The problem in words: what the field held (shortened), and what is expected.
    pub what: String,
}

// === impl Problem ===

impl Problem {
    /// Returns a problem with a field.
    pub fn new(field: &str, what: String) -> Self {
        Self {
            field: field.to_owned(),
            what,
        }
    }
}

/// Checks an event against the contract and the limits of this module.
pub fn validate(event: &HealthEvent) -> Result<(), Problem> {
    let required = [
        ("nodeName", &event.node_name),
        ("agent", &event.agent),
        ("componentClass", &event.component_class),
        ("checkName", &event.check_name),
    ];
    for (field, value) in required {
        if value.trim().is_empty() {
            return Err(Problem::new(field, "is empty; it is required".to_owned()));
        }
        limit(field, value, MAX_NAME_BYTES)?;
    }
    if event.recommended_action == RecommendedAction::Custom as i32
        && event.custom_recommended_action.trim().is_empty()
    {
        return Err(Problem::new(
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
        return Err(Problem::new(
            "generatedTimestamp",
            format!(
                "{{seconds: {}, nanos: {}}} is no time: seconds must lie in the years 0001 to \
                 9999, nanos in 0 to 999999999",
                time.seconds, time.nanos
            ),
        ));
    }
    validate_lists(event)
}

/// Checks codes, entities and metadata.
fn validate_lists(event: &HealthEvent) -> Result<(), Problem> {
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
            return Err(Problem::new(&field, "has an empty entityType".to_owned()));
        }
    }
    // What a connector adds does not count: the next one has to take it too.
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

/// Makes an event of our own that asks for nothing (`NONE`) one that is not fatal: else its node would go out
/// of service, and nothing would ever bring it back. Every monitor and every check passes its events through
/// here; the events of others are theirs, and stay as they are.
pub fn not_fatal_without_action(event: &mut HealthEvent) {
    event.is_fatal &= event.recommended_action != RecommendedAction::None as i32;
}

/// Brings a valid event into the one form in which it is stored, and names it.
///
/// - `UNSPECIFIED` strategy is the normal one.
/// - A missing timestamp becomes `received_at` and is marked so in the metadata.
/// - So does one that lies more than [`MAX_AHEAD`] behind it; the metadata keep what it was.
/// - A message over [`MAX_MESSAGE_BYTES`] is cut and marked.
/// - `id` is ours: the sender's is dropped, since two senders may choose the same.
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
    // Before the next: it depends on when the event comes, and a retry has to be the same event.
    event.id = event_id(event);
    let generated = event.generated_timestamp.and_then(json::timestamp);
    if let Some(time) = generated.filter(|time| time.duration_since(received_at) > MAX_AHEAD) {
        // A connector before this one may have noted it; what the sender said stays.
        let noted = event.metadata.entry(keys::META_FUTURE_TIME.to_owned());
        noted.or_insert_with(|| time.to_string());
        event.generated_timestamp = Some(json::proto_timestamp(received_at));
    }
}

/// Returns when an event counts as accepted that a trusted sender says at `now` was accepted at
/// `told`: never later than now. Where that is more than [`MAX_ACCEPTANCE_AGE`] ago, a clock was
/// wrong: a fault is new then, and a recovery no newer than it has to be.
pub fn accepted_at(event: &HealthEvent, told: Timestamp, now: Timestamp) -> Timestamp {
    let oldest = now.checked_sub(MAX_ACCEPTANCE_AGE).unwrap_or(now);
    if told >= oldest {
        told.min(now)
    } else if event.is_healthy {
        oldest
    } else {
        now
    }
}

/// Removes and returns the time that [`mark_accepted`] has noted. It is no part of what an event
/// says.
pub fn take_accepted(event: &mut HealthEvent) -> Option<Timestamp> {
    event.metadata.remove(keys::META_ACCEPTED_AT)?.parse().ok()
}

/// Converts the time that [`mark_accepted`] has noted from the clock of a sender, which says `sent`
/// while ours says `now`, to our own: an event is as old as its sender says. So a clock that is
/// wrong makes no event look older, or newer, than it is; where it was set back on the way the
/// event is new.
pub fn accepted_by_our_clock(event: &mut HealthEvent, sent: Timestamp, now: Timestamp) {
    if let Some(accepted) = take_accepted(event) {
        let age = sent.duration_since(accepted).max(SignedDuration::ZERO);
        mark_accepted(event, now.checked_sub(age).unwrap_or(now));
    }
}

/// Returns the identity of an event: a hash of its content and its reporter. So a batch that is
/// sent again (a client's retry, a monitor that reads a log again) is recognised, and nobody can
/// take the place of an event that another will report.
///
/// An event that names the log record it was read from is that record's: its time, and
/// what we knew of the GPU when we read it, may differ when it is read again.
///
/// 24 hexadecimal digits, the form of the ids that NVSentinel's stores give.
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

/// The metadata keys that name the log record an event was read from, and its reader.
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

/// Returns a hash of an event without its time: equal for two reports of the same thing.
///
/// For senders that give no timestamp, whose retries look like new events.
pub fn content_fingerprint(event: &HealthEvent) -> String {
    let mut plain = as_sent(event);
    plain.generated_timestamp = None;
    plain.metadata.remove(keys::META_TIME_OF_RECEIPT);
    hash(&plain)
}

/// Returns whether an event may open or close a fault. It may not where its strategy asks for
/// storing only, or where it is older than the history that its monitor was told to look at.
pub fn counts(event: &HealthEvent) -> bool {
    let strategy = event.processing_strategy;
    strategy != ProcessingStrategy::StoreOnly as i32
        && strategy != ProcessingStrategy::StoreAndAnalyse as i32
        && !event.metadata.contains_key(keys::META_EARLIER_IN_BOOT)
}

/// Returns whether an event is a notice: it is not fatal and asks for nothing, such as an XID
/// that a job's own bug brought about. Nothing waits for its repair, so it is shown for a while
/// and is no open fault, unless a policy wants more.
pub fn is_notice(event: &HealthEvent) -> bool {
    let overrides = event.quarantine_overrides.as_ref();
    !event.is_healthy
        && !event.is_fatal
        && event.recommended_action == RecommendedAction::None as i32
        && !overrides.is_some_and(|one| one.force)
}

/// Puts back the time in the future that a sender gave, and [`normalise`] has replaced.
fn restore_future_time(event: &mut HealthEvent) {
    let noted = event.metadata.remove(keys::META_FUTURE_TIME);
    if let Some(time) = noted.and_then(|time| time.parse().ok()) {
        event.generated_timestamp = Some(json::proto_timestamp(time));
    }
}

/// Returns whether the sender gave no timestamp of its own.
pub fn lacks_own_time(event: &HealthEvent) -> bool {
    event.metadata.contains_key(keys::META_TIME_OF_RECEIPT)
}

/// Returns an event as it was sent, without its id, and without the pid of its reporter: a check
/// that is started once more reports the same.
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
    // The encoding is deterministic: fields in order of number, maps sorted.
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

fn limit(field: &str, value: &str, max: usize) -> Result<(), Problem> {
    if value.len() <= max {
        return Ok(());
    }
    let found = value.len();
    Err(Problem::new(
        field,
        format!(
            "{:?} has {found} bytes, at most {max} are taken",
            shorten(value)
        ),
    ))
}

fn count(field: &str, found: usize, max: usize) -> Result<(), Problem> {
    if found <= max {
        return Ok(());
    }
    Err(Problem::new(
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

/// Returns the largest index up to `max` at which `text` can be cut.
pub fn floor_char_boundary(text: &str, max: usize) -> usize {
    (0..=max.min(text.len()))
        .rev()
        .find(|&index| text.is_char_boundary(index))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests;
