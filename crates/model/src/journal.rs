//! Journal entries: the decisions and actions about a node, stored with the events. `explain`
//! reconstructs from them what happened.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Journal entry about a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JournalEntry {
    /// Time of the entry.
    pub at: Timestamp,
    /// Name of the node.
    pub node: String,
    /// Session of the entry, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Kind of the entry.
    pub kind: EntryKind,
    /// Text for people, in one line.
    pub text: String,
    /// Details for programs, in a form that depends on the kind. `null` if there are none.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
}

/// Kind of a journal entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntryKind {
    /// The rules were evaluated: which ones matched, and why others did not.
    Rules,
    /// A change of the node was decided; `detail` has the change.
    Decision,
    /// A change was decided in a dry run and not written.
    DryRun,
    /// A request was sent to the API server; `detail` has the patch.
    Call,
    /// The API server responded.
    Answer,
    /// A session changed its phase: from, to, why.
    Session,
    /// A person is asked to look at the node.
    Attention,
}

// === impl EntryKind ===

impl EntryKind {
    /// Returns the name of the kind, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rules => "rules",
            Self::Decision => "decision",
            Self::DryRun => "dry-run",
            Self::Call => "call",
            Self::Answer => "answer",
            Self::Session => "session",
            Self::Attention => "attention",
        }
    }
}
