//! The journal: what was decided and done about a node, kept with the events, so that
//! `explain` can tell the whole story later.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// An entry about a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The time at which it was made.
    pub at: Timestamp,
    /// The node.
    pub node: String,
    /// Session it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The kind.
    pub kind: EntryKind,
    /// The text for people, of one line.
    pub text: String,
    /// The same for programs, in a shape of its kind; `null` where there is nothing more.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
}

/// Kinds of journal entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntryKind {
    /// The rules were asked: which matched, and which did not and why.
    Rules,
    /// A change of the node was decided, which is in `detail`.
    Decision,
    /// A change was decided in a dry run, and not written.
    DryRun,
    /// The API server was called; `detail` has the patch.
    Call,
    /// The API server has answered.
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
