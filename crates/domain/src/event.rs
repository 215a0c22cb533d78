//! A health event as it is accepted: checked, brought into one form, and named by a
//! hash of its content, so that sending it again does not double it.

use contract::{HealthEvent, ProcessingStrategy, RecommendedAction, json, keys};
use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use crate::reporter::Reporter;

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
/// Longest metadata key or value (bytes).
pub const MAX_METADATA_BYTES: usize = 4 * 1024;
/// Furthest back that an event can be told to have been accepted. A machine that was off, or
/// cut off, for a weekend is within it. What says more comes from a clock that was wrong, and
/// must not hide a fault.
pub const MAX_ACCEPTANCE_AGE: SignedDuration = SignedDuration::from_hours(48);
/// How far the clock of a sender may be ahead: the clocks of a cluster differ. A time that lies
/// further in the future is none.
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
    /// Position in the store's feed; grows by acceptance, from 1.
    pub seq: u64,
    /// Identity: 24 hexadecimal digits, a hash of the content. Also in `event.id`.
    pub id: String,
    /// When the connector accepted it.
    pub created_at: Timestamp,
    /// The event, normalised.
    pub event: HealthEvent,
}

/// What is wrong with a field of an event that a sender offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct Problem {
    /// The field's proto name, with an index where it repeats: `errorCode[3]`.
    pub field: String,
    /// What is wrong, what it held (shortened), and what is expected.
    pub what: String,
}

// === impl Problem ===

impl Problem {
    /// A problem with a field.
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
            return Err(problem(field, "is empty; it is required".to_owned()));
        }
        limit(field, value, MAX_NAME_BYTES)?;
    }
    if event.recommended_action == RecommendedAction::Custom as i32
        && event.custom_recommended_action.trim().is_empty()
    {
        return Err(problem(
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
        return Err(problem(
            "generatedTimestamp",
            format!(
                "{{seconds: {}, nanos: {}}} is no time: seconds must lie in the years 0001 to \
                 9999, nanos in 0 to 999999999",
                time.seconds, time.nanos
            ),
        ));
    }
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
            return Err(problem(&field, "has an empty entityType".to_owned()));
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

/// Notes on an event when it was accepted, for the connector that it is sent on to.
pub fn mark_accepted(event: &mut HealthEvent, at: Timestamp) {
    event
        .metadata
        .insert(keys::META_ACCEPTED_AT.to_owned(), at.to_string());
}

/// What [`mark_accepted`] has noted.
pub fn accepted(event: &HealthEvent) -> Option<Timestamp> {
    event.metadata.get(keys::META_ACCEPTED_AT)?.parse().ok()
}

/// When an event counts as accepted of which somebody whom we trust says at `now` that it was
/// at `told`: never later than now. Where that is more than [`MAX_ACCEPTANCE_AGE`] ago, a clock
/// was wrong: a fault is new then, and a recovery no newer than it has to be.
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

/// Takes off what [`mark_accepted`] has noted. It is no part of what an event says.
pub fn take_accepted(event: &mut HealthEvent) -> Option<Timestamp> {
    event.metadata.remove(keys::META_ACCEPTED_AT)?.parse().ok()
}

/// Puts what [`mark_accepted`] has noted by the clock of a sender, which says `sent` while
/// ours says `now`, on our own: an event is as old as its sender says. So a clock that is
/// wrong makes no event look older, or newer, than it is; where it was set back on the way
/// the event is new.
pub fn accepted_by_our_clock(event: &mut HealthEvent, sent: Timestamp, now: Timestamp) {
    if let Some(accepted) = take_accepted(event) {
        let age = sent.duration_since(accepted).max(SignedDuration::ZERO);
        mark_accepted(event, now.checked_sub(age).unwrap_or(now));
    }
}

/// The identity of an event: a hash of all that it says and of who says it, so that a batch
/// sent again (a client's retry, a monitor that reads a log again) is recognised, and nobody
/// can say beforehand, in another's place, what that one will report.
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

/// Whether an event names the log record that it was read from.
pub fn names_record(event: &HealthEvent) -> bool {
    let has = |key| event.metadata.contains_key(key);
    has(keys::META_LOG_PLACE) || (has(keys::META_BOOT_ID) && has(keys::META_KERNEL_SEQUENCE))
}

/// A hash of what an event says apart from when: equal for two reports of the same thing.
///
/// For senders that give no timestamp, whose retries look like new events.
pub fn content_fingerprint(event: &HealthEvent) -> String {
    let mut plain = as_sent(event);
    plain.generated_timestamp = None;
    plain.metadata.remove(keys::META_TIME_OF_RECEIPT);
    hash(&plain)
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

/// Whether the sender gave no timestamp of its own.
pub fn lacks_own_time(event: &HealthEvent) -> bool {
    event.metadata.contains_key(keys::META_TIME_OF_RECEIPT)
}

/// For `#[serde(with)]`: an event inside something else, in the public JSON form.
pub mod public_form {
    use contract::{HealthEvent, json};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer, de::Error as _};

    /// Writes the public form.
    pub fn serialize<S: Serializer>(event: &HealthEvent, to: S) -> Result<S::Ok, S::Error> {
        json::to_value(event).serialize(to)
    }

    /// Reads the public form.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<HealthEvent, D::Error> {
        json::from_value(serde_json::Value::deserialize(from)?).map_err(D::Error::custom)
    }
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

fn problem(field: &str, what: String) -> Problem {
    Problem::new(field, what)
}

fn limit(field: &str, value: &str, max: usize) -> Result<(), Problem> {
    if value.len() <= max {
        return Ok(());
    }
    let found = value.len();
    Err(problem(
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
    Err(problem(
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

/// The largest index up to `max` at which `text` can be cut.
pub fn floor_char_boundary(text: &str, max: usize) -> usize {
    (0..=max.min(text.len()))
        .rev()
        .find(|&index| text.is_char_boundary(index))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use contract::{BehaviourOverrides, Entity};

    use super::*;
    use crate::reporter::Process;

    fn good() -> HealthEvent {
        HealthEvent {
            version: 1,
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "GpuMemWatch".into(),
            node_name: "n1".into(),
            error_code: vec!["48".into()],
            ..HealthEvent::default()
        }
    }

    type Break = fn(&mut HealthEvent);

    #[test]
    fn required_fields_are_named() {
        validate(&good()).unwrap();
        // NVSentinel's monitor of clouds sets none.
        let without_version = HealthEvent {
            version: 0,
            ..good()
        };
        validate(&without_version).unwrap();
        let table: [(&str, Break); 10] = [
            ("nodeName", |e| e.node_name.clear()),
            ("agent", |e| e.agent = "  ".into()),
            ("componentClass", |e| e.component_class.clear()),
            ("checkName", |e| e.check_name.clear()),
            ("customRecommendedAction", |e| e.recommended_action = 27),
            ("generatedTimestamp", |e| {
                e.generated_timestamp = Some(prost_types::Timestamp {
                    seconds: 0,
                    nanos: 1_000_000_000,
                });
            }),
            ("errorCode[1]", |e| {
                e.error_code.push("x".repeat(MAX_NAME_BYTES + 1));
            }),
            ("entitiesImpacted", |e| {
                e.entities_impacted = vec![Entity::default(); MAX_ITEMS + 1];
            }),
            ("entitiesImpacted[0]", |e| {
                e.entities_impacted.push(Entity::default());
            }),
            ("metadata[k]", |e| {
                e.metadata
                    .insert("k".into(), "v".repeat(MAX_METADATA_BYTES + 1));
            }),
        ];
        for (field, break_it) in table {
            let mut event = good();
            break_it(&mut event);
            assert_eq!(validate(&event).unwrap_err().field, field);
        }
    }

    #[test]
    fn an_event_sent_again_has_the_same_id_and_another_has_not() {
        let time: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let later: Timestamp = "2026-01-01T00:00:09Z".parse().unwrap();
        let mut first = good();
        first.generated_timestamp = Some(json::proto_timestamp(time));
        let mut again = HealthEvent {
            id: "sender's own".into(),
            ..first.clone()
        };
        normalise(&mut first, time);
        normalise(&mut again, later);
        assert_eq!(first, again);
        assert_eq!(first.id.len(), 24);

        let mut other = HealthEvent {
            quarantine_overrides: Some(BehaviourOverrides {
                force: true,
                skip: false,
            }),
            ..first.clone()
        };
        normalise(&mut other, time);
        assert_ne!(first.id, other.id);
        assert_eq!(
            content_fingerprint(&first),
            content_fingerprint(&first.clone())
        );
        assert_ne!(content_fingerprint(&first), content_fingerprint(&other));
    }

    /// Otherwise whoever knows what the next line will be has it pass for a retry.
    #[test]
    fn who_reports_is_part_of_the_identity_and_the_pid_is_not() {
        let process = |uid, pid| Reporter::User(Process { uid, pid });
        let of_line: fn(&mut HealthEvent) = |event| {
            let place = (keys::META_LOG_PLACE.to_owned(), "1:2:3:4".to_owned());
            event.metadata.extend([place]);
        };
        for edit in [of_line, |_| ()] {
            let ids = |reporter: Reporter| {
                let mut event = good();
                edit(&mut event);
                reporter.note_in(&mut event);
                (event_id(&event), content_fingerprint(&event))
            };
            let first = ids(process(1000, Some(7)));
            assert_eq!(first, ids(process(1000, Some(8))));
            assert_eq!(first, ids(process(1000, None)));
            let others = [
                process(1001, Some(7)),
                Reporter::Operator(Process {
                    uid: 1000,
                    pid: None,
                }),
                Reporter::Monitor,
                Reporter::Node,
            ];
            for other in others {
                let other = ids(other);
                assert!(other.0 != first.0 && other.1 != first.1);
            }
        }
    }

    #[test]
    fn what_differs_in_any_part_is_another_event() {
        let with = |edit: Break| {
            let mut event = good();
            edit(&mut event);
            event_id(&event)
        };
        let edits: [Break; 9] = [
            |e| e.node_name = "n2".into(),
            |e| e.agent = "a".into(),
            |e| e.component_class = "NIC".into(),
            |e| e.check_name = "c".into(),
            |e| e.error_code.push("49".into()),
            |e| e.is_fatal = true,
            |e| e.is_healthy = true,
            |e| e.recommended_action = 15,
            |e| e.generated_timestamp = Some(prost_types::Timestamp::default()),
        ];
        let mut ids: Vec<String> = edits.into_iter().map(with).collect();
        ids.push(with(|_| ()));
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 10);
        // A record of a log is one of its node, too.
        let of_log: Break = |e| {
            e.metadata.insert(keys::META_LOG_PLACE.into(), "1".into());
        };
        assert_ne!(
            with(of_log),
            with(|e| {
                e.node_name = "n2".into();
                e.metadata.insert(keys::META_LOG_PLACE.into(), "1".into());
            })
        );
    }

    #[test]
    fn a_time_in_the_future_counts_as_the_time_of_receipt_and_a_retry_stays_one() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let said: Timestamp = "9998-01-01T00:00:00.000000001Z".parse().unwrap();
        let mut first = good();
        first.generated_timestamp = Some(json::proto_timestamp(said));
        first.processing_strategy = 1;
        let (sent, mut again) = (first.clone(), first.clone());
        normalise(&mut first, at(0));
        assert_eq!(
            first.generated_timestamp,
            Some(json::proto_timestamp(at(0)))
        );
        assert_eq!(first.metadata[keys::META_FUTURE_TIME], said.to_string());
        // Named by what was sent: however late it comes again, and at the next connector,
        // for whose clock it may be in the future still.
        assert_eq!(first.id, event_id(&sent));
        normalise(&mut again, at(500));
        assert_eq!(again.id, first.id);
        let mut onward = first.clone();
        normalise(&mut onward, at(-500));
        assert_eq!(onward.id, first.id);
        assert_eq!(onward.metadata, first.metadata);
        assert_eq!(
            onward.generated_timestamp,
            Some(json::proto_timestamp(at(-500)))
        );
        // Clocks differ a little.
        for (ahead, counts) in [(60, 60), (61, 0)] {
            let mut event = good();
            event.generated_timestamp = Some(json::proto_timestamp(at(ahead)));
            normalise(&mut event, at(0));
            assert_eq!(
                event.generated_timestamp,
                Some(json::proto_timestamp(at(counts)))
            );
        }
    }

    #[test]
    fn acceptance_lies_in_the_last_two_days_and_doubt_hides_no_fault() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let bound = MAX_ACCEPTANCE_AGE.as_secs();
        let well = HealthEvent {
            is_healthy: true,
            ..good()
        };
        for (told, fault, recovery) in [
            (0, 0, 0),
            (-7, -7, -7),
            (7, 0, 0),
            (-bound, -bound, -bound),
            (-bound - 1, 0, -bound),
            (-250_000_000_000, 0, -bound),
        ] {
            let told = Timestamp::from_second(1_800_000_000 + told).unwrap_or(Timestamp::MIN);
            assert_eq!(accepted_at(&good(), told, at(0)), at(fault));
            assert_eq!(accepted_at(&well, told, at(0)), at(recovery));
        }
    }

    #[test]
    fn a_log_record_read_again_is_the_same_event() {
        let with = |pairs: &[(&str, &str)], edit: fn(&mut HealthEvent)| {
            let mut event = good();
            event.message = "NVRM: Xid (PCI:0000:b3:00): 48, DBE".into();
            for (key, value) in pairs {
                event
                    .metadata
                    .insert((*key).to_owned(), (*value).to_owned());
            }
            edit(&mut event);
            event_id(&event)
        };
        let kernel = [(keys::META_BOOT_ID, "b"), (keys::META_KERNEL_SEQUENCE, "7")];
        let later: fn(&mut HealthEvent) = |event| {
            event.generated_timestamp = Some(prost_types::Timestamp {
                seconds: 9,
                nanos: 0,
            });
            event
                .metadata
                .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
            event.recommended_action = 15;
        };
        assert_eq!(with(&kernel, |_| ()), with(&kernel, later));
        assert_ne!(with(&kernel[..1], |_| ()), with(&kernel[..1], later));
        let place = [(keys::META_LOG_PLACE, "1:2:300")];
        assert_eq!(with(&place, |_| ()), with(&place, later));
        let other = [(keys::META_LOG_PLACE, "1:2:301")];
        assert_ne!(with(&place, |_| ()), with(&other, |_| ()));
    }

    #[test]
    fn without_a_timestamp_the_time_of_receipt_counts_and_is_marked() {
        let mut first = good();
        let mut second = good();
        normalise(&mut first, "2026-01-01T00:00:00Z".parse().unwrap());
        normalise(&mut second, "2026-01-01T00:00:09Z".parse().unwrap());
        assert!(lacks_own_time(&first));
        assert_ne!(first.id, second.id);
        assert_eq!(content_fingerprint(&first), content_fingerprint(&second));
        assert_eq!(first.processing_strategy, 1);
    }

    #[test]
    fn on_its_way_from_connector_to_connector_an_event_stays_what_it_is() {
        let first: Timestamp = "2026-01-01T00:00:00.123456Z".parse().unwrap();
        let later: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let mut full = good();
        full.message = "x".repeat(MAX_MESSAGE_BYTES + 1);
        for index in 0..MAX_METADATA {
            full.metadata.insert(index.to_string(), "v".into());
        }
        let from_log = {
            let mut event = good();
            let place = (keys::META_LOG_PLACE.to_owned(), "1:2:3:4".to_owned());
            event.metadata.extend([place]);
            event
        };
        for mut event in [good(), full, from_log] {
            validate(&event).unwrap();
            normalise(&mut event, first);
            let mut sent = event.clone();
            mark_accepted(&mut sent, first);
            assert_eq!(take_accepted(&mut sent), Some(first));
            validate(&sent).unwrap();
            normalise(&mut sent, later);
            assert_eq!(sent, event);
        }
        assert_eq!(take_accepted(&mut good()), None);
    }

    #[test]
    fn what_was_accepted_is_as_old_as_its_sender_says_and_never_newer_than_now() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        for (accepted, sent, expected) in [(0, 7, 993), (5_000, 5_007, 993), (7, 0, 1_000)] {
            let mut event = good();
            mark_accepted(&mut event, at(accepted));
            accepted_by_our_clock(&mut event, at(sent), at(1_000));
            assert_eq!(take_accepted(&mut event), Some(at(expected)));
        }
        let mut event = good();
        accepted_by_our_clock(&mut event, at(0), at(1_000));
        assert_eq!(event, good());
    }

    #[test]
    fn a_long_message_is_cut_between_characters_and_marked() {
        let mut event = good();
        event.message = "ü".repeat(MAX_MESSAGE_BYTES);
        validate(&event).unwrap();
        normalise(&mut event, Timestamp::UNIX_EPOCH);
        assert_eq!(event.message.len(), MAX_MESSAGE_BYTES);
        assert_eq!(
            event.metadata[keys::META_MESSAGE_CUT],
            (2 * MAX_MESSAGE_BYTES).to_string()
        );
    }
}
