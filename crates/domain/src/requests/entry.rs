//! One request: what of it is read, and what a change of it means to others.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::io::{Act, RequestNews};
use super::{RequestKey, RequestKind};
use crate::node::NodeView;
use crate::request_status::RequestStatus;
use crate::{gpu_reset, handover};

/// A request, as it is read.
#[derive(Clone, Debug)]
pub(super) enum Request {
    Reset(Box<gpu_reset::Request>),
    HandOver(Box<handover::Request>),
}

/// A request, and what is known of it.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) request: Request,
    pub(super) version: String,
    pub(super) finalizers: Vec<String>,
    /// True until what was done last is answered.
    pub(super) busy: bool,
    pub(super) refused: Option<String>,
    pub(super) not_before: Option<Timestamp>,
    pub(super) wake: Option<Timestamp>,
}

/// Returns what a change of a request means to others.
pub(super) fn news(
    key: &RequestKey,
    before: Option<&Request>,
    after: Option<&Request>,
    active: usize,
    now: Timestamp,
) -> Option<RequestNews> {
    let since = |at: Option<Timestamp>| at.map(|at| now.duration_since(at));
    match (before, after) {
        (Some(Request::Reset(before)), after) => {
            let after = match after {
                Some(Request::Reset(after)) => Some(after),
                _ => None,
            };
            let node = before.node.clone();
            if after.is_some_and(|after| after.is_active()) && !before.is_active() {
                return Some(RequestNews::ResetBegun { node });
            }
            let ends = before.is_active() && !after.is_some_and(|after| after.is_active());
            ends.then(|| RequestNews::ResetEnded {
                node,
                failure: after.map_or_else(|| Some("Deleted".to_owned()), |after| after.failure()),
                took: since(before.status.start),
                active,
            })
        }
        (before, after) => {
            let read = |one: Option<&Request>| match one {
                Some(Request::HandOver(one)) => Some(one.clone()),
                _ => None,
            };
            let (before, after) = (read(before), read(after));
            let request = after.clone().or_else(|| before.clone())?;
            let (before, after) = (before.map(|one| one.phase()), after.map(|one| one.phase()));
            (before != after).then(|| RequestNews::HandOver {
                name: key.name.clone(),
                node: request.node.clone(),
                action: request.action.clone(),
                before,
                after,
                reason: request
                    .status
                    .words(handover::RELEASED)
                    .unwrap_or_default()
                    .0,
                age: since(request.created),
            })
        }
    }
}

// === impl Entry ===

impl Entry {
    pub(super) fn read(kind: RequestKind, object: &Value) -> Option<Self> {
        let request = match kind {
            RequestKind::Reset => Request::Reset(Box::new(gpu_reset::Request::read(object).ok()?)),
            RequestKind::HandOver => {
                Request::HandOver(Box::new(handover::Request::read(object).ok()?))
            }
        };
        let finalizers = object["metadata"]["finalizers"]
            .as_array()
            .into_iter()
            .flatten();
        let finalizers = finalizers.filter_map(Value::as_str).map(str::to_owned);
        Some(Self {
            request,
            version: object["metadata"]["resourceVersion"].as_str()?.to_owned(),
            finalizers: finalizers.collect(),
            busy: false,
            refused: None,
            not_before: None,
            wake: None,
        })
    }

    pub(super) fn finalizer(&self, name: &str, on: bool) -> Act {
        let mut list = self.finalizers.clone();
        list.retain(|one| one != name);
        if on {
            list.push(name.to_owned());
        }
        Act::Merge(json!({"metadata": {"resourceVersion": self.version, "finalizers": list}}))
    }

    pub(super) fn status(&self, status: &RequestStatus) -> Act {
        let version = json!({"resourceVersion": self.version});
        Act::Status(json!({"metadata": version, "status": status.patch()}))
    }
}

// === impl Request ===

impl Request {
    pub(super) fn node(&self) -> &str {
        match self {
            Self::Reset(one) => &one.node,
            Self::HandOver(one) => &one.node,
        }
    }

    pub(super) fn uid(&self) -> &str {
        match self {
            Self::Reset(one) => &one.uid,
            Self::HandOver(one) => &one.uid,
        }
    }

    /// Returns whether anything may be left to be done.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Reset(one) => one.finalizer || one.status.completion.is_none(),
            Self::HandOver(one) => one.finalizer || one.status.completion.is_none(),
        }
    }

    /// Returns whether it is at work on its node.
    pub(super) fn holds(&self, node: Option<&NodeView>) -> bool {
        match self {
            Self::Reset(one) => one.holds(node),
            Self::HandOver(one) => one.holds(node),
        }
    }
}
