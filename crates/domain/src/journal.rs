//! The journal: what was decided and done about a node, kept with the events, so that
//! `explain` can tell the whole story later.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// When.
    pub at: Timestamp,
    /// Node it is about.
    pub node: String,
    /// Session it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// What kind of entry it is.
    pub kind: EntryKind,
    /// For people, one line.
    pub text: String,
    /// For programs; the shape depends on the kind. `null` where there is nothing more.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
}

/// Kinds of journal entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntryKind {
    /// Which rules matched, and which did not and why.
    Rules,
    /// What was decided; `detail` is the change to the node.
    Decision,
    /// The same in a dry run: nothing was written.
    DryRun,
    /// A call to the API server; `detail` has the patch.
    Call,
    /// Its answer.
    Answer,
    /// A session moved on: from, to, why.
    Session,
    /// A person is asked to look.
    Attention,
}

// === impl EntryKind ===

impl EntryKind {
    /// Returns the kind's name, as serialised.
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
