//! Message of a condition: a list of faults in NVSentinel's grammar, within a size limit.
//!
//! ```text
//! ErrorCode:79 PCI:0000:b3:00 GPU has fallen off the bus Recommended Action=RESTART_BM;
//! \__ identity ____________/ \__ diagnostic ___________/ \__ action _________________/
//! ```
//!
//! One piece stands for the faults of one event. Pieces are joined by `;`, and the message ends
//! in `;`. If the message is too long, diagnostics are shortened first. After that, the last
//! pieces are cut off and `...` marks the cut.

use contract::{Entity, HealthEvent, RecommendedAction, action_name};

use crate::event::floor_char_boundary;
use crate::fault::{Fault, Subject};

/// Mark of a cut.
const CUT: &str = "...";
/// Smallest limit that a configuration may set (bytes): room for one code, one address and an
/// action.
const SHORTEST_MESSAGE: usize = 128;
/// Largest limit that a configuration may set (bytes): 64 such conditions fit into the 1.5 MiB
/// that etcd accepts as one object.
const LONGEST_MESSAGE: usize = 16 * 1024;
/// Start of the action. Parsers of the grammar search for this text.
const ACTION: &str = "Recommended Action=";

/// Size limits of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageLimits {
    message: usize,
    compacted: usize,
}

/// Error for unusable size limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// The limit of the message is too small.
    #[error("a condition's message needs {SHORTEST_MESSAGE} bytes at least, not {0}")]
    Message(usize),
    /// The limit of the message is too large.
    #[error("a condition's message may have {LONGEST_MESSAGE} bytes at most, not {0}")]
    Long(usize),
    /// The size of a compacted fault is zero.
    #[error("a compacted fault needs 1 byte at least")]
    Compacted,
}

/// Text of the faults of one event.
struct Piece {
    identity: String,
    diagnostic: String,
    action: String,
}

/// Faults of one event that have the same codes.
struct FaultGroup<'a> {
    codes: Vec<&'a str>,
    subjects: Vec<&'a Subject>,
}

// === impl MessageLimits ===

impl MessageLimits {
    /// Creates limits of `message` bytes for a message, and of `compacted` bytes for the text
    /// before the action of each fault if the message would be too long. NVSentinel's
    /// `MaxNodeConditionMessageLength` and `CompactedHealthEventMsgLen`.
    pub fn new(message: usize, compacted: usize) -> Result<Self, LimitsError> {
        if message < SHORTEST_MESSAGE {
            return Err(LimitsError::Message(message));
        }
        if message > LONGEST_MESSAGE {
            return Err(LimitsError::Long(message));
        }
        if compacted == 0 {
            return Err(LimitsError::Compacted);
        }
        Ok(Self { message, compacted })
    }

    /// Returns the limit of a message, in bytes.
    pub fn message_bytes(&self) -> usize {
        self.message
    }

    /// Returns the limit of a compacted fault's text before the action, in bytes.
    pub fn compacted_bytes(&self) -> usize {
        self.compacted
    }
}

impl Default for MessageLimits {
    /// Returns the default limits of NVSentinel.
    fn default() -> Self {
        Self {
            message: 1024,
            compacted: 72,
        }
    }
}

/// Returns the message for the open faults of one check.
pub(super) fn render(faults: &[&Fault], limits: &MessageLimits) -> String {
    let pieces = pieces(faults);
    let whole: Vec<String> = pieces.iter().map(Piece::whole).collect();
    if let Some(message) = joined(&whole, limits.message) {
        return message;
    }
    let compacted: Vec<String> = pieces
        .iter()
        .map(|piece| piece.compacted(limits.compacted))
        .collect();
    joined(&compacted, limits.message).unwrap_or_else(|| cut(&compacted, limits.message))
}

/// Returns the worst fault in words, with the number of other faults.
pub(super) fn in_words(worst: &Fault, others: usize, limits: &MessageLimits) -> String {
    let more = if others == 0 {
        String::new()
    } else {
        format!(" (and {others} more)")
    };
    let text = if worst.event.message.is_empty() {
        worst.title()
    } else {
        printable(&worst.event.message)
    };
    let room = limits.message.saturating_sub(more.len());
    format!("{}{more}", shortened(&text, room))
}

/// Returns the joined pieces if they fit into `max` bytes.
fn joined(pieces: &[String], max: usize) -> Option<String> {
    let bytes: usize = pieces.iter().map(|piece| piece.len() + 1).sum();
    (bytes <= max).then(|| {
        let mut message = pieces.join(";");
        message.push(';');
        message
    })
}

/// Returns as many pieces as fit, a part of the next one, and the cut mark, all within `max`
/// bytes.
fn cut(pieces: &[String], max: usize) -> String {
    let mut message = String::new();
    for piece in pieces {
        let room = max.saturating_sub(message.len() + 1 + CUT.len());
        if piece.len() > room {
            let part = piece.get(..floor_char_boundary(piece, room)).unwrap_or("");
            let part = part.trim_end();
            if !part.is_empty() {
                message.push_str(part);
                message.push(';');
            }
            break;
        }
        message.push_str(piece);
        message.push(';');
    }
    message.push_str(CUT);
    message
}

/// Returns one piece for each event and set of codes, in the order of the faults' opening.
fn pieces(faults: &[&Fault]) -> Vec<Piece> {
    let mut events: Vec<(&HealthEvent, Vec<FaultGroup<'_>>)> = Vec::new();
    for fault in faults {
        let known = events
            .iter()
            .position(|(event, _)| event.id == fault.event.id);
        let index = known.unwrap_or(events.len());
        if known.is_none() {
            events.push((&fault.event, Vec::new()));
        }
        let Some((_, parts)) = events.get_mut(index) else {
            continue;
        };
        match parts
            .iter_mut()
            .find(|part| part.subjects == [&fault.subject])
        {
            Some(part) => part.codes.push(&fault.code),
            None => parts.push(FaultGroup {
                codes: vec![&fault.code],
                subjects: vec![&fault.subject],
            }),
        }
    }
    let mut pieces = Vec::new();
    for (event, parts) in events {
        let mut merged: Vec<FaultGroup<'_>> = Vec::new();
        for part in parts {
            match merged.iter_mut().find(|known| known.codes == part.codes) {
                Some(known) => known.subjects.extend(part.subjects),
                None => merged.push(part),
            }
        }
        pieces.extend(merged.iter().map(|part| Piece::of(event, part)));
    }
    pieces
}

// === impl Piece ===

impl Piece {
    fn of(event: &HealthEvent, part: &FaultGroup<'_>) -> Self {
        let mut identity: Vec<String> = part
            .codes
            .iter()
            .filter(|code| !code.is_empty())
            .map(|code| format!("ErrorCode:{}", token(code)))
            .collect();
        identity.extend(
            entities(event, &part.subjects)
                .iter()
                .map(|one| format!("{}:{}", token(&one.entity_type), token(&one.entity_value))),
        );
        let action = if event.recommended_action == RecommendedAction::Custom as i32
            && !event.custom_recommended_action.is_empty()
        {
            format!("CUSTOM:{}", token(&event.custom_recommended_action))
        } else {
            action_name(event.recommended_action).into_owned()
        };
        Self {
            identity: identity.join(" "),
            // Delimiters of the grammar in the text would break the list apart.
            diagnostic: printable(&event.message)
                .replace(';', ".")
                .replace(ACTION, "Recommended Action:"),
            action: format!("{ACTION}{action}"),
        }
    }

    fn whole(&self) -> String {
        let parts = [&self.identity, &self.diagnostic, &self.action];
        let parts = parts.iter().filter(|part| !part.is_empty());
        parts
            .map(|part| part.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Returns the piece with at most `max` bytes before the action. The identity is never cut.
    fn compacted(&self, max: usize) -> String {
        let before = match (self.identity.is_empty(), self.diagnostic.is_empty()) {
            (_, true) => self.identity.clone(),
            (true, false) => shortened(&self.diagnostic, max),
            (false, false) => {
                let room = max.saturating_sub(self.identity.len() + 1);
                if room > CUT.len() {
                    format!("{} {}", self.identity, shortened(&self.diagnostic, room))
                } else {
                    format!("{} {CUT}", self.identity)
                }
            }
        };
        if before.is_empty() {
            self.action.clone()
        } else {
            format!("{before} {}", self.action)
        }
    }
}

/// Returns the entities of an event that name these subjects, in the event's own form and
/// order. Entities that have recovered are left out.
fn entities(event: &HealthEvent, subjects: &[&Subject]) -> Vec<Entity> {
    let concerns = |entity: &&Entity| subjects.iter().any(|subject| subject.concerns(entity));
    let found: Vec<Entity> = event
        .entities_impacted
        .iter()
        .filter(concerns)
        .cloned()
        .collect();
    if found.is_empty() {
        // The newest event of the fault names the subject differently than the one that opened
        // it.
        return subjects.iter().flat_map(|one| one.entities()).collect();
    }
    found
}

/// Returns a code or entity as a single token of the grammar.
fn token(text: &str) -> String {
    let word = |c: char| match c {
        ';' => '.',
        c if c.is_whitespace() || c.is_control() => '_',
        c => c,
    };
    text.chars().map(word).collect()
}

/// Returns the text as one line without control characters.
fn printable(text: &str) -> String {
    let line = |c: char| if c.is_control() { ' ' } else { c };
    text.trim().chars().map(line).collect()
}

/// Returns the text, cut to `max` bytes including the cut mark.
fn shortened(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let end = floor_char_boundary(text, max.saturating_sub(CUT.len()));
    let kept = text.get(..end).unwrap_or("").trim_end();
    format!("{kept}{CUT}")
}
