//! The objects of all watches, and what is decided when one changes: which policies look at it
//! again, and which events follow (`judge`, `step`).

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, ProcessingStrategy};
use jiff::{SignedDuration, Timestamp};
use model::listing::Listing;
use policy::{LookedUp, ObjectName};

use crate::event::About;
use crate::judge::{Judged, Verdict, judge};
use crate::marks::policy_of;
use crate::policies::{EventForm, ObjectPolicy, Watched};
use crate::reduce::{Kept, Reducer, looked_up, watches};
use crate::step::{Change, Matches, Observed, Say, step};

/// Time after which a watch that works again has delivered what it missed, if it lists nothing.
const CATCH_UP: SignedDuration = SignedDuration::from_secs(5);
/// Pause between two looks at objects whose answer changes with time.
const LOOK_EVERY: SignedDuration = SignedDuration::from_secs(10);

/// Input of a watch, which is named by its place in [`ObjectMonitor::watched`], or the time.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A list begins.
    Restarted(usize),
    /// The list is complete: objects that it does not have are gone.
    Listed(usize),
    /// An object is new or has changed.
    Applied(usize, Kept),
    /// The object with this key is gone.
    Deleted(usize, String),
    /// The watch fails.
    Failing(usize),
    /// The watch works again.
    Recovered(usize),
    /// Time has passed.
    Time,
}

/// The objects, and the policies that look at them.
#[derive(Debug)]
pub struct ObjectMonitor {
    policies: Vec<ObjectPolicy>,
    sights: Vec<Sight>,
    /// For each policy, the place of its watch.
    sight_of: Vec<usize>,
    /// Time and other objects that the last look of a policy at an object rests on.
    rests: BTreeMap<Looked, Rests>,
    /// Looks that rest on an object that was looked up.
    users: BTreeMap<ObjectName, BTreeSet<Looked>>,
    looked_at: Option<Timestamp>,
    /// Policies and reasons of looks that determined nothing, since they were last taken.
    errors: Vec<(String, String)>,
}

/// Policy, by its place, and key of an object.
type Looked = (usize, String);

#[derive(Debug, Default)]
struct Rests {
    on_time: bool,
    looked_up: BTreeSet<ObjectName>,
}

/// A watch and its objects.
#[derive(Debug)]
struct Sight {
    watched: Watched,
    reducer: Reducer,
    objects: Listing<String, Box<str>>,
    blind: Option<Blind>,
}

/// State of a watch that misses changes.
#[derive(Debug)]
enum Blind {
    /// The watch fails.
    Failing,
    /// The watch works again since this time, and what was missed arrives.
    CatchesUp(Timestamp),
}

// === impl ObjectMonitor ===

impl ObjectMonitor {
    /// Creates a monitor without objects.
    pub fn new(policies: Vec<ObjectPolicy>) -> Self {
        let sights: Vec<Sight> = watches(&policies)
            .into_iter()
            .map(|(watched, reducer)| Sight {
                watched,
                reducer,
                objects: Listing::default(),
                blind: None,
            })
            .collect();
        let place = |policy: &ObjectPolicy| {
            let mut all = sights.iter();
            all.position(|sight| sight.watched == policy.watched)
        };
        Self {
            sight_of: policies.iter().filter_map(place).collect(),
            policies,
            sights,
            rests: BTreeMap::new(),
            users: BTreeMap::new(),
            looked_at: None,
            errors: Vec::new(),
        }
    }

    /// Returns the policies.
    pub fn policies(&self) -> &[ObjectPolicy] {
        &self.policies
    }

    /// Returns what is to be watched, with the reducer of its objects.
    pub fn watched(&self) -> impl Iterator<Item = (&Watched, &Reducer)> {
        (self.sights.iter()).map(|sight| (&sight.watched, &sight.reducer))
    }

    /// Returns the names of the policies that depend on a watch.
    pub fn policies_of(&self, sight: usize) -> Vec<&str> {
        let of = (0..self.policies.len()).filter(|policy| self.rests_on(*policy, sight));
        of.filter_map(|policy| Some(self.policies.get(policy)?.name.as_str()))
            .collect()
    }

    /// Returns whether the objects of a watch are known as they are now.
    pub fn sees(&self, sight: usize) -> bool {
        self.sights.get(sight).is_some_and(Sight::sees)
    }

    /// Returns the policy and the reason of each look since the last call that determined nothing.
    pub fn take_errors(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.errors)
    }

    /// Returns the number of objects of a watch, and their size (bytes).
    pub fn size(&self, sight: usize) -> (usize, usize) {
        let objects = self.sights.get(sight).map(|sight| &sight.objects);
        let sizes = objects.into_iter().flat_map(Listing::values);
        sizes.fold((0, 0), |(count, bytes), text| {
            (count + 1, bytes + text.len())
        })
    }

    /// Returns the time of the next look that no watch causes.
    pub fn next_time(&self, matches: &Matches) -> Option<Timestamp> {
        let waits = matches.iter().filter_map(|(key, state)| {
            let policy = policy_of(key, &self.policies)?;
            match state.clearing {
                Some(since) => Some(since + policy.clear_after),
                None if !state.open => Some(state.since + policy.open_after),
                None => None,
            }
        });
        let timed = self.rests.values().any(|rests| rests.on_time);
        let look = self
            .looked_at
            .map_or(Timestamp::UNIX_EPOCH, |at| at + LOOK_EVERY);
        let look = timed.then_some(look);
        let caught_up = self.sights.iter().filter_map(Sight::catches_up);
        waits.chain(look).chain(caught_up).min()
    }

    /// Returns the ends of matches whose policy is gone.
    pub fn orphans(&self, matches: &Matches, now: Timestamp) -> Vec<Change> {
        let gone = matches
            .iter()
            .filter(|(key, _)| policy_of(key, &self.policies).is_none());
        gone.map(|(key, state)| {
            let (check, object) = key.split_once('/').unwrap_or((key, ""));
            let form = EventForm {
                component_class: "Node".to_owned(),
                strategy: ProcessingStrategy::ExecuteRemediation,
                ..EventForm::default()
            };
            let about = About {
                check,
                kind: &state.kind,
                key: object,
                node: &state.node,
                now,
            };
            let event = form.end(&about, "its policy is gone");
            Change {
                key: key.clone(),
                state: None,
                events: state.open.then_some(event).into_iter().collect(),
                nodes: vec![state.node.clone()],
            }
        })
        .collect()
    }

    /// Processes an input. `matches` are the states so far.
    pub fn handle(&mut self, input: Input, matches: &Matches, now: Timestamp) -> Vec<Change> {
        let mut looks = BTreeSet::new();
        let mut changed = None;
        match input {
            Input::Restarted(sight) => {
                if let Some(sight) = self.sights.get_mut(sight) {
                    sight.objects.begin();
                }
            }
            Input::Listed(sight) => self.listed(sight, matches, &mut looks),
            Input::Applied(sight, Kept { key, text }) => {
                let Some(of) = self.sights.get_mut(sight) else {
                    return Vec::new();
                };
                let before = of.objects.set(key.clone(), text.clone());
                if before.as_ref() == Some(&text) {
                    return Vec::new();
                }
                self.wake(sight, &key, &mut looks);
                changed = Some((sight, key));
            }
            Input::Deleted(sight, key) => {
                if let Some(of) = self.sights.get_mut(sight) {
                    of.objects.remove(&key);
                    self.wake(sight, &key, &mut looks);
                }
            }
            Input::Failing(sight) => {
                if let Some(of) = self.sights.get_mut(sight) {
                    of.blind = Some(Blind::Failing);
                    return self.interrupt(sight, matches);
                }
            }
            Input::Recovered(sight) => {
                if let Some(of) = self.sights.get_mut(sight) {
                    of.blind = Some(Blind::CatchesUp(now));
                }
            }
            Input::Time => {
                self.catch_up(matches, now, &mut looks);
                self.due(matches, now, &mut looks);
            }
        }
        let looks = looks.into_iter();
        looks
            .filter_map(|(policy, key)| {
                let is_changed = changed.as_ref().is_some_and(|(sight, changed)| {
                    self.sight_of.get(policy) == Some(sight) && *changed == key
                });
                self.look(policy, key, is_changed, matches, now)
            })
            .collect()
    }

    /// Completes a list. The first one says what is gone since the states were kept.
    fn listed(&mut self, sight: usize, matches: &Matches, looks: &mut BTreeSet<Looked>) {
        let Some(of) = self.sights.get_mut(sight) else {
            return;
        };
        let was_blind = !of.sees();
        let gone = of.objects.end();
        of.blind = None;
        if was_blind {
            self.all_of(sight, matches, looks);
        }
        for (key, _) in gone {
            self.wake(sight, &key, looks);
        }
    }

    /// Looks again at the objects of the watches that have delivered what they missed.
    fn catch_up(&mut self, matches: &Matches, now: Timestamp, looks: &mut BTreeSet<Looked>) {
        for sight in 0..self.sights.len() {
            let of = self.sights.get_mut(sight);
            let Some(of) = of.filter(|of| of.catches_up().is_some_and(|until| until <= now)) else {
                continue;
            };
            of.blind = None;
            self.all_of(sight, matches, looks);
        }
    }

    /// Returns whether a policy reads objects of a watch.
    fn rests_on(&self, policy: usize, sight: usize) -> bool {
        let of = self.sights.get(sight).map(|sight| &sight.watched);
        self.sight_of.get(policy) == Some(&sight)
            || (self.policies.get(policy)).is_some_and(|policy| {
                let all = [Some(&policy.predicate), policy.association.as_ref()];
                let mut roots = all.into_iter().flatten().flat_map(|one| one.reads().keys());
                roots.any(|root| match root {
                    policy::Root::Lookup { api_version, kind } => {
                        Some(&looked_up(api_version, kind)) == of
                    }
                    policy::Root::Resource => false,
                })
            })
    }

    /// Adds a look of every policy that rests on a watch at each of its objects and states.
    fn all_of(&self, sight: usize, matches: &Matches, looks: &mut BTreeSet<Looked>) {
        for (policy, of) in self.policies.iter().enumerate() {
            if !self.rests_on(policy, sight) {
                continue;
            }
            let own = self
                .sight_of
                .get(policy)
                .and_then(|own| self.sights.get(*own));
            let objects = own.into_iter().flat_map(|own| own.objects.iter());
            looks.extend(objects.map(|(key, _)| (policy, key.clone())));
            let prefix = format!("{}/", of.name);
            let states = matches.keys().filter_map(|key| key.strip_prefix(&prefix));
            looks.extend(states.map(|key| (policy, key.to_owned())));
        }
    }

    /// Adds a look of the policies that an object of a watch concerns.
    fn wake(&self, sight: usize, key: &str, looks: &mut BTreeSet<Looked>) {
        let own = (self.sight_of.iter().enumerate()).filter(|(_, of)| **of == sight);
        looks.extend(own.map(|(policy, _)| (policy, key.to_owned())));
        let Some(watched) = self.sights.get(sight).map(|sight| &sight.watched) else {
            return;
        };
        let (namespace, name) = key.split_once('/').unwrap_or(("", key));
        let name = ObjectName {
            api_version: watched.kind.api_version(),
            kind: watched.kind.kind.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        looks.extend(self.users.get(&name).into_iter().flatten().cloned());
    }

    /// Ends the waits of the policies of a watch that fails.
    fn interrupt(&self, sight: usize, matches: &Matches) -> Vec<Change> {
        let waits = matches.iter().filter(|(key, state)| {
            let mut policies = self.policies.iter();
            let name = key.split('/').next();
            let policy = policies.position(|policy| Some(policy.name.as_str()) == name);
            let rests = policy.is_some_and(|policy| self.rests_on(policy, sight));
            rests && (!state.open || state.clearing.is_some())
        });
        waits
            .map(|(key, state)| {
                let mut state = state.clone();
                state.clearing = None;
                Change {
                    key: key.clone(),
                    state: state.open.then_some(state),
                    events: Vec::new(),
                    nodes: Vec::new(),
                }
            })
            .collect()
    }

    /// Adds the looks that time causes.
    fn due(&mut self, matches: &Matches, now: Timestamp, looks: &mut BTreeSet<Looked>) {
        for (policy, of) in self.policies.iter().enumerate() {
            let prefix = format!("{}/", of.name);
            let of_policy = matches.range(prefix.clone()..);
            let of_policy = of_policy.take_while(|(key, _)| key.starts_with(&prefix));
            let waits = of_policy.filter(|(_, one)| !one.open || one.clearing.is_some());
            let keys = waits.filter_map(|(key, _)| key.strip_prefix(&prefix));
            looks.extend(keys.map(|key| (policy, key.to_owned())));
        }
        if self
            .looked_at
            .is_none_or(|at| now.duration_since(at) >= LOOK_EVERY)
        {
            self.looked_at = Some(now);
            let timed = self.rests.iter().filter(|(_, rests)| rests.on_time);
            looks.extend(timed.map(|(looked, _)| looked.clone()));
        }
    }

    /// Looks at an object by a policy. `None` if nothing changes, or nothing can be seen.
    fn look(
        &mut self,
        policy: usize,
        key: String,
        changed: bool,
        matches: &Matches,
        now: Timestamp,
    ) -> Option<Change> {
        let of = self.policies.get(policy)?;
        let sight = self.sights.get(*self.sight_of.get(policy)?)?;
        if !sight.sees() {
            return None;
        }
        let lookup = |name: &ObjectName| self.look_up(name);
        let text = sight.objects.get(&key);
        let judged = text.map(|text| judge(of, &key, text, now, &lookup));
        let state_key = format!("{}/{key}", of.name);
        let before = matches.get(&state_key);
        let (verdict, uid) = match &judged {
            Some(judged) => (judged.verdict.clone(), judged.uid.as_str()),
            None => (Verdict::Fine, ""),
        };
        let kind = of.watched.kind.to_string();
        let (after, mut says) = step(
            before,
            &Observed {
                verdict,
                uid,
                kind: kind.clone(),
                changed,
                open_after: of.open_after,
                clear_after: of.clear_after,
                now,
            },
        );
        if of.watched.kind.is_node() && judged.is_none() {
            // Whoever looks after nodes knows itself that the node is gone.
            says.retain(|say| !matches!(say, Say::End(node, _) if *node == key));
        }
        let about = |node, kind| About {
            check: &of.name,
            kind,
            key: &key,
            node,
            now,
        };
        let events = says.iter().map(|say| match say {
            Say::Fault(node) => of.event.fault(&about(node, &kind)),
            Say::End(node, why) => {
                // The kind is that of the fault: the policy may have another version now.
                let kind = before.map_or(&kind, |state| &state.kind);
                of.event.end(&about(node, kind), why)
            }
        });
        let events: Vec<HealthEvent> = events.collect();
        let error = judged.as_ref().and_then(Judged::undetermined);
        let error = error.map(|why| (of.name.clone(), why.to_owned()));
        self.errors.extend(error);
        self.rest((policy, key), judged);
        if after.as_ref() == before && events.is_empty() {
            return None;
        }
        let open = [before, after.as_ref()].into_iter().flatten();
        let nodes = open
            .filter(|state| state.open)
            .map(|state| state.node.clone());
        Some(Change {
            key: state_key,
            nodes: nodes.collect(),
            state: after,
            events,
        })
    }

    fn look_up(&self, name: &ObjectName) -> LookedUp {
        let watched = looked_up(&name.api_version, &name.kind);
        let sight = self.sights.iter().find(|sight| sight.watched == watched);
        let Some(sight) = sight.filter(|sight| sight.sees()) else {
            return LookedUp::Unseen(format!("{watched} cannot be seen"));
        };
        let key = if name.namespace.is_empty() {
            name.name.clone()
        } else {
            format!("{}/{}", name.namespace, name.name)
        };
        let text = sight.objects.get(&key);
        text.and_then(|text| serde_json::from_str(text).ok())
            .map_or(LookedUp::Absent, LookedUp::Found)
    }

    /// Notes what a look rests on, so that it is taken again when that changes.
    fn rest(&mut self, looked: Looked, judged: Option<Judged>) {
        let old = self.rests.remove(&looked).unwrap_or_default();
        for name in &old.looked_up {
            if let Some(users) = self.users.get_mut(name) {
                users.remove(&looked);
                if users.is_empty() {
                    self.users.remove(name);
                }
            }
        }
        let Some(judged) = judged.filter(|one| one.reads_time || !one.looked_up.is_empty()) else {
            return;
        };
        for name in &judged.looked_up {
            let users = self.users.entry(name.clone()).or_default();
            users.insert(looked.clone());
        }
        let rests = Rests {
            on_time: judged.reads_time,
            looked_up: judged.looked_up,
        };
        self.rests.insert(looked, rests);
    }
}

// === impl Sight ===

impl Sight {
    /// Returns whether the objects are known as they are now.
    fn sees(&self) -> bool {
        self.objects.is_complete() && self.blind.is_none()
    }

    /// Returns the time at which a watch that works again has delivered what it missed.
    fn catches_up(&self) -> Option<Timestamp> {
        match self.blind {
            Some(Blind::CatchesUp(since)) => Some(since + CATCH_UP),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
