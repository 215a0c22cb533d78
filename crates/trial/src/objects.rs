//! Tests of policies over Kubernetes objects: how objects change, and the faults that have to be open
//! at the end.

use contract::nearest::hint;
use jiff::{SignedDuration, Timestamp};
use objects::{Change, Input, Kept, Kind, Matches, ObjectMonitor, ObjectPolicy};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cases::{CaseResult, MOST, Mismatch};

/// Time of the begin of a test. Times within objects count from here.
const BEGIN: Timestamp = Timestamp::UNIX_EPOCH;
/// Longest test: more than any `for` or `clearFor`.
const LONGEST: SignedDuration = SignedDuration::from_hours(14 * 24);
/// Pause between two looks of the monitor at the time.
const TICK: SignedDuration = SignedDuration::from_secs(1);

/// Test of policies.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectCase {
    /// Name that describes what the test shows.
    pub name: String,
    /// Changes of objects in order.
    pub changes: Vec<ObjectChange>,
    /// Time since the begin at which the test ends, such as `10m`. Without it, the test ends with
    /// its last change.
    #[serde(default)]
    pub until: Option<String>,
    /// Expected results.
    pub expect: ObjectExpect,
}

/// Change of an object.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectChange {
    /// Time since the begin of the test, such as `10m`; without it, that of the change before.
    #[serde(default)]
    pub at: Option<String>,
    /// Object that is new or has changed, as `kubectl get -o json` shows it.
    #[serde(default)]
    pub object: Option<Value>,
    /// Object that is deleted; its kind and name are enough.
    #[serde(default)]
    pub deleted: Option<Value>,
}

/// Expected results of a test.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectExpect {
    /// All faults that are open at the end.
    pub faults: Vec<OpenFault>,
}

/// Open fault, expected or actual.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OpenFault {
    /// Name of the policy.
    pub policy: String,
    /// Name of the node.
    pub node: String,
    /// Name of the object, with its namespace: `gpu-operator/driver-x2x`. Not compared if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

/// Policies that a test runs, and what they have found so far.
struct Run {
    monitor: ObjectMonitor,
    matches: Matches,
    now: Timestamp,
    /// Events and errors, for people.
    said: Vec<String>,
}

/// Runs a test with policies.
pub fn run(case: &ObjectCase, policies: &[ObjectPolicy]) -> CaseResult {
    let (differences, because, error) = match played(case, policies) {
        Ok((differences, said)) => (differences, said, None),
        Err(error) => (Vec::new(), Vec::new(), Some(error)),
    };
    CaseResult {
        name: case.name.clone(),
        differences,
        error,
        because,
    }
}

fn played(
    case: &ObjectCase,
    policies: &[ObjectPolicy],
) -> Result<(Vec<Mismatch>, Vec<String>), String> {
    let expected = &case.expect.faults;
    let known: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
    let mut named = expected.iter().map(|fault| &fault.policy);
    if let Some(name) = named.find(|name| !known.contains(&name.as_str())) {
        let meant = hint(name, &known);
        let meant = meant.map_or_else(String::new, |meant| format!("; {meant}"));
        return Err(format!(
            "there is no policy {name:?} that is enabled{meant}"
        ));
    }
    if case.changes.len() > MOST {
        let found = case.changes.len();
        return Err(format!("{found} changes, at most {MOST} are taken"));
    }
    let mut run = Run::new(policies);
    for (index, change) in case.changes.iter().enumerate() {
        let taken = run.change(change);
        taken.map_err(|what| format!("change {}: {what}", index + 1))?;
    }
    if let Some(until) = &case.until {
        run.advance("until", until)?;
    }
    let found = run.open();
    let mut rest = found.clone();
    let missing = expected.iter().any(|fault| {
        let at = rest.iter().position(|one| fits(fault, one));
        at.map(|at| rest.swap_remove(at)).is_none()
    });
    let mut differences = Vec::new();
    if missing || !rest.is_empty() {
        differences.push(Mismatch {
            what: "faults".to_owned(),
            expected: json!(expected),
            found: json!(found),
        });
    }
    Ok((differences, run.said))
}

fn fits(expected: &OpenFault, found: &OpenFault) -> bool {
    let of_object = expected.object.is_none() || expected.object == found.object;
    expected.policy == found.policy && expected.node == found.node && of_object
}

// === impl Run ===

impl Run {
    fn new(policies: &[ObjectPolicy]) -> Self {
        let mut run = Self {
            monitor: ObjectMonitor::new(policies.to_vec()),
            matches: Matches::new(),
            now: BEGIN,
            said: Vec::new(),
        };
        for sight in 0..run.monitor.watched().count() {
            run.handle(Input::Listed(sight));
        }
        run
    }

    fn change(&mut self, change: &ObjectChange) -> Result<(), String> {
        if let Some(at) = &change.at {
            self.advance("at", at)?;
        }
        match (&change.object, &change.deleted) {
            (Some(object), None) => self.each(object, Input::Applied),
            (None, Some(object)) => {
                self.each(object, |sight, kept| Input::Deleted(sight, kept.key))
            }
            _ => Err("it has neither object nor deleted, or both".to_owned()),
        }
    }

    /// Delivers a change of an object to each watch that selects it.
    fn each(&mut self, object: &Value, input: fn(usize, Kept) -> Input) -> Result<(), String> {
        let text = |path: &str| {
            object
                .pointer(path)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let kind = Kind::new(text("/apiVersion"), text("/kind"));
        let namespace = text("/metadata/namespace");
        let is_of_kind = |watched: &objects::Watched| watched.kind == kind;
        if !self
            .monitor
            .watched()
            .any(|(watched, _)| is_of_kind(watched))
        {
            return Err(format!("no policy looks at objects of {kind}"));
        }
        let watches = self.monitor.watched().enumerate();
        let inputs = watches.filter_map(|(sight, (watched, reducer))| {
            let of = watched.namespace.as_deref();
            let selects = is_of_kind(watched) && of.is_none_or(|of| of == namespace);
            selects.then(|| Some(input(sight, reducer.reduce(&object.to_string())?)))
        });
        let inputs: Option<Vec<Input>> = inputs.collect();
        for input in inputs.ok_or("the object has no metadata.name")? {
            self.handle(input);
        }
        Ok(())
    }

    /// Lets time pass until this time since the begin.
    fn advance(&mut self, key: &str, text: &str) -> Result<(), String> {
        let since = text.parse::<SignedDuration>().ok();
        let since = since.filter(|since| !since.is_negative() && *since <= LONGEST);
        let until = BEGIN
            + since
                .ok_or_else(|| format!("{key} is {text:?}; write a duration such as 10m or 26h"))?;
        if until < self.now {
            return Err(format!("{key} is earlier than the change before"));
        }
        while let Some(next) = self.monitor.next_time(&self.matches) {
            let next = next.max(self.now + TICK);
            if next > until {
                break;
            }
            self.now = next;
            self.handle(Input::Time);
        }
        self.now = until;
        Ok(())
    }

    fn handle(&mut self, input: Input) {
        let changes = self.monitor.handle(input, &self.matches, self.now);
        let since = self.now.duration_since(BEGIN);
        for (policy, why) in self.monitor.take_errors() {
            self.said
                .push(format!("at {since:#}: {policy} determines nothing: {why}"));
        }
        for Change {
            key, state, events, ..
        } in changes
        {
            let said = events.iter().map(|event| {
                let what = if event.is_healthy { "ends" } else { "is open" };
                format!("at {since:#}: {key} {what} on {}", event.node_name)
            });
            self.said.extend(said);
            match state {
                Some(state) => self.matches.insert(key, state),
                None => self.matches.remove(&key),
            };
        }
    }

    fn open(&self) -> Vec<OpenFault> {
        let open = self.matches.iter().filter(|(_, state)| state.open);
        let faults = open.filter_map(|(key, state)| {
            let (policy, object) = key.split_once('/')?;
            Some(OpenFault {
                policy: policy.to_owned(),
                node: state.node.clone(),
                object: Some(object.to_owned()),
            })
        });
        faults.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(policies: &str, case: &str) -> CaseResult {
        let policies = objects::parse(policies, "p").unwrap().policies;
        run(&toml::from_str(case).unwrap(), &policies)
    }

    const NOT_READY: &str = r#"
name = "five minutes without a gap"
until = "6m"
changes = [{ at = "1m", object = { apiVersion = "v1", kind = "Node", metadata.name = "n1", status.conditions = [{ type = "Ready", status = "False" }] } }]
expect.faults = [{ policy = "node-not-ready", node = "n1" }]
"#;

    #[test]
    fn a_test_says_what_it_expects_and_what_it_found() {
        let preset = objects::presets::find("node-not-ready").unwrap().text;
        let passed = result(preset, NOT_READY);
        assert_eq!((passed.error, passed.differences.len()), (None, 0));
        for (from, to) in [
            ("until = \"6m\"", "until = \"5m59s\""),
            ("node = \"n1\"", "node = \"n2\""),
            ("[{ policy = \"node-not-ready\", node = \"n1\" }]", "[]"),
            ("node = \"n1\"", "node = \"n1\", object = \"n2\""),
        ] {
            let failed = result(preset, &NOT_READY.replace(from, to));
            assert_eq!((failed.error, failed.differences.len()), (None, 1), "{to}");
        }
        let failed = result(
            preset,
            &NOT_READY.replace("= [{ policy = \"node-not-ready\", node = \"n1\" }]", "= []"),
        );
        assert_eq!(failed.because, ["at 6m: node-not-ready/n1 is open on n1"]);
    }

    #[test]
    fn a_test_that_tests_nothing_is_an_error() {
        let preset = objects::presets::find("node-not-ready").unwrap().text;
        for (from, to, part) in [
            (
                "policy = \"node-not-ready\"",
                "policy = \"node-not-raedy\"",
                "did you mean",
            ),
            (
                "kind = \"Node\"",
                "kind = \"Pod\"",
                "no policy looks at objects of v1/Pod",
            ),
            (
                "metadata.name = \"n1\"",
                "metadata.nome = \"n1\"",
                "no metadata.name",
            ),
            ("at = \"1m\"", "at = \"1 parsec\"", "write a duration"),
            (
                "until = \"6m\"",
                "until = \"6s\"",
                "earlier than the change before",
            ),
            (
                "object = {",
                "deleted = {}, object = {",
                "neither object nor deleted",
            ),
        ] {
            let found = result(preset, &NOT_READY.replace(from, to));
            let error = found.error.unwrap_or_default();
            assert!(error.contains(part), "{to}: {error}");
        }
    }

    #[test]
    fn a_deleted_object_and_an_error_are_explained() {
        let policies = "[[policies]]\nname = \"failed\"\nenabled = true\n[policies.resource]\nversion = \"v1\"\n\
                        kind = \"Pod\"\nnamespace = \"a\"\n[policies.predicate]\n\
                        expression = 'resource.status.phase == \"Failed\"'\n[policies.nodeAssociation]\n\
                        expression = 'resource.spec.nodeName'\n[policies.healthEvent]\ncomponentClass = \"Software\"\n";
        let pod = |namespace: &str, rest: &str| {
            format!(
                "{{ apiVersion = \"v1\", kind = \"Pod\", metadata = {{ name = \"p\", namespace = \"{namespace}\" }}{rest} }}"
            )
        };
        let failed = ", spec.nodeName = \"n1\", status.phase = \"Failed\"";
        let case = format!(
            "name = \"n\"\nchanges = [{{ object = {} }}, {{ object = {} }}, {{ at = \"10s\", deleted = {} }}, {{ object = {} }}]\n\
             expect.faults = [{{ policy = \"failed\", node = \"n1\" }}]\n",
            pod("a", failed),
            pod("b", failed),
            pod("a", ""),
            pod("a", ", status.reason = \"r\""),
        );
        let found = result(policies, &case);
        assert_eq!(found.error, None);
        assert_eq!(
            found.because,
            [
                "at 0s: failed/a/p is open on n1",
                "at 10s: failed/a/p ends on n1",
                "at 10s: failed determines nothing: it has no status",
            ]
        );
    }
}
