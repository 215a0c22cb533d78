//! The custom resource of an attempt, and requests that are retried until one succeeds.

use contract::keys;
use jiff::Timestamp;
use model::attempt::{Attempt, ResourceKind};
use model::node::NodeView;
use serde_json::{Value, json};

use super::StageRequests;
use crate::session::{RequestFailure, retry_after};
use crate::{Effect, PlannedResource};

/// State of a request that is retried until it succeeds.
#[derive(Debug, Default)]
pub(super) struct Retry {
    /// Number of failed tries in a row.
    pub(super) failures: u32,
    /// Time before which the request is not retried.
    not_before: Option<Timestamp>,
    /// Reason of the last failure.
    pub(super) why: Option<String>,
}

/// The custom resource of an attempt: created once, watched while that is wanted, and withdrawn
/// once. `S` is the state that a stage reads from the resource.
#[derive(Debug, Default)]
pub(super) struct ManagedResource<S> {
    /// The attempt that the rest is about; `None` until this process has one.
    pub(super) attempt: Option<Box<Attempt>>,
    /// State of the resource as last observed.
    pub(super) state: S,
    /// True if the last look wanted the resource watched.
    pub(super) watch: bool,
    /// Kind and name of the watched resource.
    watched: Option<Box<(ResourceKind, String)>>,
    /// True once the watch has delivered the resource: the answer to its creation may be old.
    pub(super) confirmed: bool,
    /// Reason why the watch fails.
    pub(super) watch_error: Option<String>,
    /// True while a request to create the resource is in flight.
    pub(super) creating: bool,
    pub(super) retry: Retry,
    /// Key of the attempt that was withdrawn last.
    withdrawn: Option<String>,
}

// === impl Retry ===

impl Retry {
    /// Records a failed try. Returns whether the reason differs from the last one.
    pub(super) fn failed(&mut self, why: &str, failure: RequestFailure, now: Timestamp) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + retry_after(self.failures, failure));
        let before = self.why.replace(why.to_owned());
        before.as_deref() != Some(why)
    }

    /// Records that the request succeeded.
    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Returns whether the next try has to wait.
    pub(super) fn waits(&self, now: Timestamp) -> bool {
        self.not_before.is_some_and(|at| now < at)
    }

    /// Returns when the next try may be made.
    pub(super) fn at(&self) -> Option<Timestamp> {
        self.not_before
    }

    /// Ends the wait: a try is made now, or may be made at once.
    pub(super) fn clear_wait(&mut self) {
        self.not_before = None;
    }
}

// === impl ManagedResource ===

impl<S: Default> ManagedResource<S> {
    /// Returns whether the attempt has this key.
    pub(super) fn is_for(&self, key: &str) -> bool {
        self.attempt.as_ref().is_some_and(|one| one.key() == key)
    }

    /// Sets the attempt. Returns whether it differs from the last one, whose state is then
    /// dropped.
    pub(super) fn set_attempt(&mut self, attempt: &Attempt) -> bool {
        if self.is_for(&attempt.key()) {
            return false;
        }
        *self = Self {
            attempt: Some(Box::new(attempt.clone())),
            watch: self.watch,
            watched: self.watched.take(),
            confirmed: self.confirmed,
            withdrawn: self.withdrawn.take(),
            ..Self::default()
        };
        true
    }

    /// Drops the attempt, which is done with.
    pub(super) fn forget(&mut self) {
        *self = Self {
            watched: self.watched.take(),
            ..Self::default()
        };
    }

    /// Returns whether the resource of this name is watched for the attempt.
    pub(super) fn is_watched(&self, name: &str) -> bool {
        let watched = self.watched.as_ref().filter(|one| one.1 == name);
        watched.is_some_and(|one| self.resource().as_ref() == Some(one))
    }

    /// Starts or stops the watch, to match what the last look asked for.
    pub(super) fn settle(&mut self, requests: &mut StageRequests<'_>) {
        let resource = self.resource().filter(|_| self.watch);
        if self.watched == resource {
            return;
        }
        (self.watch_error, self.confirmed) = (None, false);
        let before = std::mem::replace(&mut self.watched, resource.clone());
        let stop = before.map(|one| (one, false));
        let start = resource.map(|one| (one, true));
        for (watched, watch) in [stop, start].into_iter().flatten() {
            let (kind, name) = *watched;
            let node = requests.node().to_owned();
            requests.effect(Effect::WatchResource {
                node,
                kind,
                name,
                watch,
            });
        }
    }

    /// Returns whether the resource may be created now: no request is in flight, and none waits.
    pub(super) fn may_create(&self, now: Timestamp) -> bool {
        !self.creating && !self.retry.waits(now)
    }

    /// Requests the creation of the resource.
    pub(super) fn create(&mut self, action: &str, object: Value, requests: &mut StageRequests<'_>) {
        let Some(attempt) = &self.attempt else {
            return;
        };
        self.creating = true;
        self.retry.clear_wait();
        self.withdrawn = None;
        requests.effect(Effect::CreateResource(Box::new(PlannedResource {
            node: requests.node().to_owned(),
            session: requests.session(),
            key: attempt.key(),
            action: action.to_owned(),
            kind: attempt.resource.clone(),
            name: attempt.name.clone(),
            object,
        })));
    }

    /// Records that the resource exists. A resource that was withdrawn during its creation is
    /// deleted.
    pub(super) fn created(&mut self, begun: bool, requests: &mut StageRequests<'_>) {
        self.retry.succeeded();
        if let Some(attempt) = &self.attempt
            && self.withdrawn == Some(attempt.key())
        {
            delete(attempt.clone(), begun, requests);
        }
    }

    /// Handles a failed creation, which may have been carried out all the same. A resource that was
    /// withdrawn meanwhile is deleted again: the deletion may have come first.
    pub(super) fn not_created(&mut self, begun: bool, requests: &mut StageRequests<'_>) {
        if let Some(attempt) = &self.attempt
            && self.withdrawn == Some(attempt.key())
        {
            delete(attempt.clone(), begun, requests);
        }
    }

    /// Deletes the resource of the attempt, once; with `begun` even if its work has begun.
    pub(super) fn withdraw(
        &mut self,
        attempt: &Attempt,
        begun: bool,
        requests: &mut StageRequests<'_>,
    ) {
        let key = Some(attempt.key());
        if self.withdrawn != key {
            self.withdrawn = key;
            delete(Box::new(attempt.clone()), begun, requests);
        }
    }

    /// Records that the resource is wanted: after a withdrawal it may be withdrawn again.
    pub(super) fn mark_wanted(&mut self) {
        self.withdrawn = None;
    }

    /// Gives up a request whose answer was lost.
    pub(super) fn answers_lost(&mut self) {
        self.creating = false;
    }

    fn resource(&self) -> Option<Box<(ResourceKind, String)>> {
        let attempt = self.attempt.as_ref()?;
        Some(Box::new((attempt.resource.clone(), attempt.name.clone())))
    }
}

/// Deletes the resource of an attempt; with `begun` even if its work has begun. No answer is
/// expected.
pub(super) fn delete(attempt: Box<Attempt>, begun: bool, requests: &mut StageRequests<'_>) {
    requests.effect(Effect::DeleteResource {
        node: requests.node().to_owned(),
        attempt,
        begun,
    });
}

/// Adds the name, the attempt and the owner to the object of an attempt. The owner reference
/// deletes it with the node.
pub(super) fn complete(object: &mut Value, open: &Attempt, node: &NodeView) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return; // Unreachable: the template has given it a name.
    };
    metadata.insert("name".to_owned(), json!(open.name));
    if let Some(namespace) = &open.resource.namespace {
        metadata.insert("namespace".to_owned(), json!(namespace));
    }
    let annotations = metadata.entry("annotations").or_insert(Value::Null);
    if annotations.is_null() {
        *annotations = json!({});
    }
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.insert(keys::ATTEMPT.to_owned(), json!(open.key()));
    }
    metadata.insert(
        "ownerReferences".to_owned(),
        json!([{
            "apiVersion": "v1",
            "kind": "Node",
            "name": node.name,
            "uid": node.uid,
            "controller": false,
            "blockOwnerDeletion": false,
        }]),
    );
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::agenda::Agenda;
    use crate::session::Session;

    fn attempt() -> Attempt {
        Attempt {
            id: "1".to_owned(),
            action: "RESTART_BM".to_owned(),
            group: String::new(),
            event: "e".to_owned(),
            entity: String::new(),
            resource: ResourceKind::default(),
            name: "maintenance-n1".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            timeout_minutes: 30,
            made: None,
            end: None,
        }
    }

    /// Returns the names of the effects that `run` requests.
    fn effects(run: impl FnOnce(&mut StageRequests<'_>)) -> Vec<&'static str> {
        let (mut agenda, mut awaits) = (Agenda::default(), None);
        let session = Session::idle(Timestamp::UNIX_EPOCH);
        let node = ("n1", &session);
        let now = Timestamp::UNIX_EPOCH;
        run(&mut StageRequests::new(&mut agenda, &mut awaits, node, now));
        let name = |effect: &Effect| match effect {
            Effect::CreateResource(_) => "create",
            Effect::DeleteResource { .. } => "delete",
            Effect::WatchResource { watch: true, .. } => "watch",
            Effect::WatchResource { watch: false, .. } => "unwatch",
            _ => "other",
        };
        agenda.effects.iter().map(name).collect()
    }

    #[test]
    fn what_is_withdrawn_while_it_is_created_is_deleted_unless_it_is_wanted_again() {
        for again in [false, true] {
            let (attempt, mut wanted) = (attempt(), ManagedResource::<()>::default());
            assert!(wanted.set_attempt(&attempt) && !wanted.set_attempt(&attempt));
            assert!(wanted.may_create(Timestamp::UNIX_EPOCH));
            let create = |wanted: &mut ManagedResource<()>| {
                effects(|requests| wanted.create("RESTART_BM", json!({}), requests))
            };
            assert_eq!(create(&mut wanted), ["create"]);
            assert!(!wanted.may_create(Timestamp::UNIX_EPOCH));
            let withdraw = |wanted: &mut ManagedResource<()>| {
                effects(|requests| wanted.withdraw(&attempt, false, requests))
            };
            assert_eq!(withdraw(&mut wanted), ["delete"]);
            assert_eq!(withdraw(&mut wanted), [""; 0], "once");
            if again {
                wanted.mark_wanted();
            }
            let created = effects(|requests| wanted.created(false, requests));
            let expected: &[&str] = if again { &[] } else { &["delete"] };
            assert_eq!(created, expected);
            wanted.mark_wanted();
            assert_eq!(withdraw(&mut wanted), ["delete"], "once more");
        }
    }

    #[test]
    fn what_may_have_been_created_after_it_was_deleted_is_deleted_again() {
        let (attempt, mut wanted) = (attempt(), ManagedResource::<()>::default());
        wanted.set_attempt(&attempt);
        effects(|requests| wanted.create("RESTART_BM", json!({}), requests));
        let failed = |wanted: &mut ManagedResource<()>| {
            effects(|requests| wanted.not_created(false, requests))
        };
        assert_eq!(failed(&mut wanted), [""; 0], "it is wanted");
        effects(|requests| wanted.withdraw(&attempt, false, requests));
        assert_eq!(failed(&mut wanted), ["delete"]);
    }

    #[test]
    fn another_attempt_ends_the_watch_of_the_one_before() {
        let mut wanted = ManagedResource::<()>::default();
        wanted.set_attempt(&attempt());
        wanted.watch = true;
        assert_eq!(effects(|requests| wanted.settle(requests)), ["watch"]);
        assert_eq!(effects(|requests| wanted.settle(requests)), [""; 0]);
        assert!(wanted.is_watched("maintenance-n1"));
        let other = Attempt {
            name: "maintenance-n1-2".to_owned(),
            since: Timestamp::MAX,
            ..attempt()
        };
        wanted.set_attempt(&other);
        assert!(!wanted.is_watched("maintenance-n1") && !wanted.is_watched("maintenance-n1-2"));
        assert_eq!(
            effects(|requests| wanted.settle(requests)),
            ["unwatch", "watch"]
        );
        wanted.forget();
        assert_eq!(effects(|requests| wanted.settle(requests)), ["unwatch"]);
    }
}
