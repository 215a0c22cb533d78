//! Reports about a node: the gravest of its records, or that none is left.

use std::collections::BTreeMap;

use contract::{Entity, HealthEvent, RecommendedAction, keys};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::notice::Kind;
use crate::record::Record;

/// Agent of the events, as in NVSentinel.
pub const AGENT: &str = "csp-health-monitor";

/// Last report about a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Reported {
    /// True if the node is to be out of service.
    pub(crate) fatal: bool,
    /// Id of the record.
    pub(crate) id: String,
    provider: String,
    kind: Kind,
    resource: (String, String),
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<Timestamp>,
    emergency: bool,
}

/// A report of one node, to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the node.
    pub node: String,
    /// True if the maintenance is over.
    pub healthy: bool,
    /// The maintenance; `None` to end one that nothing is known of.
    about: Option<Reported>,
}

// === impl Reported ===

impl Reported {
    pub(crate) fn of(record: &Record) -> Self {
        Self {
            fatal: record.out_since.is_some(),
            id: record.id.clone(),
            provider: record.provider.clone(),
            kind: record.kind,
            resource: (record.resource_type.clone(), record.resource_id.clone()),
            start: record.start,
            end: record.end,
            emergency: record.is_emergency(),
        }
    }

    /// Returns whether a report of `next` can follow without a healthy one between them: a fault
    /// never becomes less grave, and shows the times of its first report.
    pub(crate) fn can_become(&self, next: &Self) -> bool {
        self.resource == next.resource && next.fatal
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let time = |key: &str, at: Option<Timestamp>| Some((key.to_owned(), at?.to_string()));
        let kind = (keys::META_MAINTENANCE_KIND, self.kind.name());
        let id = (keys::META_MAINTENANCE_ID, self.id.as_str());
        [kind, id]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into_iter()
            .chain(time(keys::META_MAINTENANCE_START, self.start))
            .chain(time(keys::META_MAINTENANCE_END, self.end))
            .collect()
    }
}

// === impl Report ===

impl Report {
    pub(crate) fn of(node: &str, about: Reported) -> Self {
        Self {
            node: node.to_owned(),
            healthy: false,
            about: Some(about),
        }
    }

    pub(crate) fn healthy(node: &str, about: Option<Reported>) -> Self {
        Self {
            node: node.to_owned(),
            healthy: true,
            about,
        }
    }

    /// Returns whether the node is to be out of service.
    pub fn is_fatal(&self) -> bool {
        !self.healthy && self.about.as_ref().is_some_and(|about| about.fatal)
    }

    /// Fills in an event of the check [`keys::CHECK_CSP_MAINTENANCE`]. `action` returns the
    /// action that a kind of maintenance recommends, once the node is to be out of service.
    pub fn fill(&self, event: &mut HealthEvent, action: impl Fn(Kind) -> RecommendedAction) {
        event.is_healthy = self.healthy;
        event.is_fatal = self.is_fatal();
        let Some(about) = &self.about else {
            "CSP maintenance completed".clone_into(&mut event.message);
            return;
        };
        event.message = self.message(about);
        // Before that, an action such as REPLACE_VM would take the node out.
        if self.is_fatal() {
            event.recommended_action = action(about.kind).into();
        }
        if !about.resource.1.is_empty() {
            event.entities_impacted = vec![Entity {
                entity_type: about.resource.0.clone(),
                entity_value: about.resource.1.clone(),
            }];
        }
        event.metadata.extend(about.metadata());
    }

    fn message(&self, about: &Reported) -> String {
        let (kind, provider) = (about.kind.name(), &about.provider);
        if self.healthy {
            return format!("CSP maintenance completed: {kind} by {provider}");
        }
        let when = match about.start {
            _ if about.emergency => ", an emergency".to_owned(),
            Some(start) => format!(", from {start}"),
            None => ", at a time that is not told".to_owned(),
        };
        format!("CSP maintenance scheduled: {kind} by {provider}{when}")
    }
}
