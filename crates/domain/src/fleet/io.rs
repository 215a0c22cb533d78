//! What comes into a fleet, and what it wants to be done outside.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::HealthEvent;
use jiff::{SignedDuration, Timestamp};

use super::Switched;
use crate::event::Record;
use crate::fault::Rereading;
use crate::journal::Entry;
use crate::node::NodeView;
use crate::policy::Policy;
use crate::position::Position;
use crate::session::Patch;
use crate::status::Status;

/// Something that has come in.
#[derive(Debug)]
pub enum Input {
    /// All events that the feed had at the start are recorded.
    CaughtUp,
    /// What had found no room in the book was read again.
    Reread(Box<Rereading>),
    /// The policy that holds; `None`: not known yet.
    Policy(Option<Arc<Policy>>),
    /// What people have set in the cluster.
    Switched(Box<Switched>),
    /// A list of the nodes begins.
    ListBegun,
    /// A node, as part of the list or since.
    Seen(Arc<NodeView>),
    /// The cluster does not have the node any more.
    Gone(String),
    /// The list is complete: what was not part of it is not there.
    Listed,
    /// The answer to an [`Effect::Patch`].
    Answered {
        /// The node.
        node: String,
        /// The answer.
        answer: Answer,
    },
    /// What was asked has ended without an answer, and nobody knows of which node.
    AnswersLost,
    /// The answer to an [`Effect::LookUp`]; `None`: the store does not answer.
    Found {
        /// The node.
        node: String,
        /// What the store has of each id.
        found: Option<BTreeMap<String, Found>>,
    },
    /// The answer to an [`Effect::Append`].
    Appended {
        /// The node.
        node: String,
        /// Whether the store has them, and then the position of the last that it had not.
        result: Result<Option<Position>, ()>,
    },
}

/// What became of a patch.
#[derive(Clone, Debug)]
pub enum Answer {
    /// It is made, and the node is this now.
    Made(Arc<NodeView>),
    /// The node was not as the decision had seen it.
    Conflict,
    /// The cluster does not have the node.
    NotFound,
    /// It is refused.
    Refused {
        /// After what time the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
    /// Nobody knows whether it was made.
    Unknown,
}

/// What the store has of an event that a node lists.
#[derive(Clone, Debug)]
pub enum Found {
    /// It is one of those that count.
    Current,
    /// It is of before another store was acted on.
    History(Box<Record>),
    /// Nothing.
    Nothing,
}

/// What events are appended for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To take over what a node lists.
    TakeOver,
    /// To close faults of a machine that is gone.
    Close,
}

/// Something to be done outside.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make a patch. Asks for an [`Input::Answered`].
    Patch(Box<Planned>),
    /// Look events up in the store. Asks for an [`Input::Found`].
    LookUp {
        /// The node that lists them.
        node: String,
        /// Their ids.
        ids: Vec<String>,
    },
    /// Append events to the store. Asks for an [`Input::Appended`].
    Append {
        /// The node that they are about.
        node: String,
        /// Each, and when it counts as received.
        events: Vec<(HealthEvent, Timestamp)>,
        /// What for.
        purpose: Purpose,
    },
    /// Write an entry into the journal; with a level, log it too.
    Note(Entry, Option<Level>),
    /// Write what became of an event, or of those of a quarantine, into their records.
    Status(Status),
    /// Log a line for people.
    Log {
        /// How grave it is.
        level: Level,
        /// The node that it is about.
        node: Option<String>,
        /// The line.
        text: String,
    },
    /// The rules were asked about a node, with another outcome than before.
    Evaluated(Vec<RuleSetOutcome>),
    /// Something was decided about a node, for all that was recorded of it.
    Decided(String),
    /// Tell on the node what is known of it.
    Tell(String),
    /// The API server went back to an older state of the node.
    Restored(String),
    /// Trip the circuit breaker.
    Trip,
}

/// A patch to be made.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The node.
    pub node: String,
    /// The node as the decision has seen it.
    pub view: Arc<NodeView>,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The patch.
    pub patch: Patch,
    /// When the oldest of the faults was first seen.
    pub first_seen: Option<Timestamp>,
}

/// What a rule set says of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSetOutcome {
    /// Its name.
    pub rule_set: String,
    /// Whether it asks for anything.
    pub passed: bool,
}

/// How grave a line for people is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Info,
    /// Somebody should know.
    Warn,
}
