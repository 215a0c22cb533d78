//! Objects of attempts: their state, and the deletion of those that are no longer needed.

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::{Act, Decision};
use crate::validation_request::ValidationRequest;
use crate::validation_request::cluster_view::ObjectState;
use crate::validation_request::status::{Attempt, TestGroup};

/// Time for the object of an ended attempt to disappear. Its pods may be on a machine that is
/// gone.
const GOES_WITHIN: SignedDuration = SignedDuration::from_mins(15);

// === impl Decision ===

impl Decision<'_> {
    /// Returns the deletions of objects whose attempts have ended.
    pub(super) fn sweep(&self) -> Vec<Act> {
        let groups = self.status.test_groups.iter();
        let ended = groups.flat_map(|group| {
            let attempts = group.attempts.iter().filter(|one| one.phase.is_over());
            attempts.filter_map(|one| self.delete(&group.provider, &one.object_name))
        });
        ended.collect()
    }

    /// Returns the groups with an object of an ended attempt that has not disappeared, and may
    /// still use the GPUs.
    pub(super) fn lingering(&self) -> impl Iterator<Item = &TestGroup> {
        let groups = self.status.test_groups.iter();
        groups.filter(|group| self.lingers(self.request, group))
    }

    /// Returns whether an object of an ended attempt of the group still exists, for this or
    /// another request.
    pub(super) fn lingers(&self, request: &ValidationRequest, group: &TestGroup) -> bool {
        let mut ended = group.attempts.iter().filter(|one| one.phase.is_over());
        ended.any(|one| self.is_there(request, group, one))
    }

    /// Returns the earliest time limit of a lingering object.
    pub(super) fn goes_by(&self) -> Option<Timestamp> {
        let attempts = self.lingering().flat_map(|group| {
            let ended = group.attempts.iter().filter(|one| one.phase.is_over());
            ended.filter(|one| self.is_there(self.request, group, one))
        });
        let ends = attempts.filter_map(|one| one.end_time?.checked_add(GOES_WITHIN).ok());
        ends.min()
    }

    /// Returns whether an attempt's object exists and belongs to the request.
    pub(super) fn is_there(
        &self,
        request: &ValidationRequest,
        group: &TestGroup,
        attempt: &Attempt,
    ) -> bool {
        let state = self.object(request, &group.provider, &attempt.object_name);
        !matches!(state, ObjectState::Gone | ObjectState::Foreign)
    }

    /// Returns the state of an object.
    pub(super) fn object(
        &self,
        request: &ValidationRequest,
        provider: &str,
        name: &str,
    ) -> ObjectState {
        let key = (provider.to_owned(), name.to_owned());
        let Some(object) = self.cluster.objects.get(&key) else {
            return ObjectState::Gone;
        };
        let owners = object.pointer("/metadata/ownerReferences");
        let mut owners = owners.and_then(Value::as_array).into_iter().flatten();
        if !owners.any(|one| one["uid"] == request.uid.as_str()) {
            return ObjectState::Foreign;
        }
        let Some(rules) = self.config.providers.get(provider) else {
            return ObjectState::UnderWay;
        };
        if rules.succeeded.of(object).is_some() {
            return ObjectState::Succeeded;
        }
        match rules.failed.of(object) {
            Some(why) => ObjectState::Failed(why),
            None => ObjectState::UnderWay,
        }
    }

    /// Returns the deletion of an object, if it belongs to the request and is not being deleted
    /// yet.
    pub(super) fn delete(&self, provider: &str, name: &str) -> Option<Act> {
        let key = (provider.to_owned(), name.to_owned());
        let metadata = self.cluster.objects.get(&key)?.get("metadata")?;
        let state = self.object(self.request, provider, name);
        if state == ObjectState::Foreign || metadata.get("deletionTimestamp").is_some() {
            return None;
        }
        Some(Act::Delete {
            provider: provider.to_owned(),
            name: name.to_owned(),
            uid: metadata["uid"].as_str()?.to_owned(),
        })
    }
}

/// Returns the reason to wait for the object of a group.
pub(super) fn not_gone(group: &TestGroup) -> String {
    format!("{}: the object of its last attempt is not gone", group.name)
}
