//! Tests of a policy: events, and the expected results for their node.

use contract::nearest::nearest;
use contract::{HealthEvent, json as forms};
use diagnosis::catalog::Catalog;
use jiff::{SignedDuration, Timestamp};
use model::event::{EventRecord, normalise, validate};
use model::node::NodeView;
use model::position::Position;
use policy::assess::CountedEvent;
use policy::{Policy, RouteDrain, RuleKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::replay::Replay;
use crate::standard;

/// Most tests in a file, and most events in a test.
pub(crate) const MOST: usize = 10_000;
/// Time between two events of a test.
pub(crate) const BETWEEN: SignedDuration = SignedDuration::from_secs(60);

/// File with tests, by default of a policy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cases<C = Case> {
    /// Tests of the file, in order.
    pub tests: Vec<C>,
}

/// Test of a policy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Name that describes what the test shows.
    pub name: String,
    /// Node in the form of `kubectl get node -o json`, with `metadata`, `spec` and `status`;
    /// missing parts are empty.
    #[serde(default)]
    pub node: Option<Value>,
    /// Events in order, in their public form, or as `xid` with a code and the fields that
    /// differ from the catalogue's event.
    pub events: Vec<Value>,
    /// Expected results after the events.
    pub expect: Expect,
}

/// Results of a test, expected or actual. Missing keys are not compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Expect {
    /// True if the node is cordoned at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// Requested taints at the end, as `key=value:effect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taints: Option<Vec<String>>,
    /// Names of the rule sets that ask for this at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule_sets: Option<Vec<String>>,
    /// Drain mode at the end, from routes and from the events themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<RouteDrain>,
    /// True if an event leads to a remediation at the end, according to the routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remediate: Option<bool>,
    /// True if the route of an event waits for a person's approval at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approve: Option<bool>,
    /// Decisions in order: `quarantine`, `update`, `release`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decisions: Option<Vec<String>>,
}

/// Result of a test. Serialized names are part of the output of `policy test` and `rules test`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CaseResult {
    /// Name of the test.
    pub name: String,
    /// Differences from the expectation; empty if the test passes.
    pub differences: Vec<Mismatch>,
    /// Reason why the test could not run, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Rulings about the faults that are open at the end, all conclusions of rules, or all events of
    /// object policies.
    pub because: Vec<String>,
}

/// Difference from the expectation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mismatch {
    /// Key of the expectation that differs.
    pub what: String,
    /// Value that the test expects.
    pub expected: Value,
    /// Value after the events.
    pub found: Value,
}

/// Runs a test with a policy.
pub fn run(case: &Case, policy: &Policy, catalog: &Catalog) -> CaseResult {
    let (differences, because, error) = match played(case, policy, catalog) {
        Ok((found, because)) => (mismatches(&case.expect, &found), because, None),
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
    case: &Case,
    policy: &Policy,
    catalog: &Catalog,
) -> Result<(Expect, Vec<String>), String> {
    if case.expect == Expect::default() {
        return Err("expect is empty: nothing would be tested".to_owned());
    }
    if case.events.len() > MOST {
        return Err(format!(
            "{} events, at most {MOST} are taken",
            case.events.len()
        ));
    }
    let node = node_of(case.node.as_ref())?;
    let name = node.name.clone();
    let mut replay = Replay::new(policy.clone(), Some(vec![node]));
    let mut decisions = Vec::new();
    let mut at = Timestamp::UNIX_EPOCH;
    for (index, value) in case.events.iter().enumerate() {
        let event = event_of(value, &name, at, catalog);
        let event = event.map_err(|what| format!("event {}: {what}", index + 1))?;
        let record = EventRecord {
            seq: Position::START,
            id: event.id.clone(),
            created_at: at,
            event,
        };
        decisions.extend(replay.take(&record));
        at += BETWEEN;
    }
    decisions.extend(replay.finish());
    let desired = replay.desired(&name);
    let because = desired.rulings.iter().map(ToString::to_string).collect();
    let decisions = decisions.iter().map(|one| one.decision.name().to_owned());
    let found = Expect {
        cordon: Some(desired.cordon),
        taints: Some(desired.taints.iter().map(ToString::to_string).collect()),
        drain: Some(match desired.drains() {
            None => RouteDrain::No,
            Some(false) => RouteDrain::Graceful,
            Some(true) => RouteDrain::Forceful,
        }),
        remediate: Some(desired.remediates()),
        approve: Some(desired.events.iter().any(CountedEvent::asks_approval)),
        rule_sets: Some(desired.rule_sets),
        decisions: Some(decisions.collect()),
    };
    Ok((found, because))
}

fn node_of(given: Option<&Value>) -> Result<NodeView, String> {
    let mut object = NodeView::unknown(standard::NODE).object();
    if let Some(given) = given {
        let Some(parts) = given.as_object() else {
            return Err("node is not an object".to_owned());
        };
        for (part, value) in parts {
            if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&part.as_str()) {
                return Err(format!(
                    "node has no {part:?}; it has metadata, spec and status"
                ));
            }
            merge(&mut object[part.as_str()], value);
        }
    }
    NodeView::from_object(object).ok_or_else(|| "node.metadata.name is not a text".to_owned())
}

/// Returns the event of a test on a node.
pub(crate) fn event_of(
    value: &Value,
    node: &str,
    at: Timestamp,
    catalog: &Catalog,
) -> Result<HealthEvent, String> {
    let Some(given) = value.as_object() else {
        return Err("is not an object".to_owned());
    };
    let mut form = forms::to_value(&HealthEvent::default());
    let mut given = given.clone();
    if let Some(code) = given.remove("xid") {
        let code = code.to_string().trim_matches('"').to_owned();
        let name = format!("XID {code}");
        let standard = standard::events(catalog)
            .into_iter()
            .find(|one| one.name == name);
        let standard = standard.ok_or_else(|| format!("the catalogue has no {name}"))?;
        form = forms::to_value(&standard.event);
    }
    let known = RuleKind::HealthEvent.fields();
    if let Some(unknown) = given.keys().find(|key| !known.contains(&key.as_str())) {
        let meant = nearest(unknown, known.iter().copied(), 1);
        let hint = meant
            .first()
            .map_or_else(String::new, |meant| format!("; did you mean {meant}?"));
        return Err(format!("an event has no field {unknown:?}{hint}"));
    }
    form["nodeName"] = json!(node);
    form["generatedTimestamp"] = json!(at.to_string());
    for (field, value) in given {
        form[field.as_str()] = value;
    }
    let mut event = forms::from_value(form).map_err(|error| error.to_string())?;
    validate(&event).map_err(|error| error.to_string())?;
    if event.node_name != node {
        return Err(format!(
            "nodeName is {:?}, the node is {node:?}",
            event.node_name
        ));
    }
    normalise(&mut event, at);
    Ok(event)
}

fn merge(into: &mut Value, from: &Value) {
    match (into.as_object_mut(), from) {
        (Some(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.as_str()).or_insert(Value::Null), value);
            }
        }
        _ => *into = from.clone(),
    }
}

fn mismatches(expected: &Expect, found: &Expect) -> Vec<Mismatch> {
    let (expected, found) = (json!(expected), json!(found));
    let keys = expected.as_object().into_iter().flatten();
    keys.filter(|(key, value)| found.get(key.as_str()) != Some(*value))
        .map(|(key, value)| Mismatch {
            what: key.clone(),
            expected: value.clone(),
            found: found.get(key).cloned().unwrap_or_default(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(text: &str) -> Vec<CaseResult> {
        let cases: Cases = toml::from_str(text).unwrap();
        let policy = Policy::builtin();
        cases
            .tests
            .iter()
            .map(|case| run(case, &policy, Catalog::builtin()))
            .collect()
    }

    #[test]
    fn tests_pass_and_fail_as_they_should() {
        let good = r#"
            [[tests]]
            name = "79 takes a node out until it recovers"
            events = [{ xid = 79 }, { xid = 79, isHealthy = true, isFatal = false }]
            expect = { cordon = false, taints = [], ruleSets = [], decisions = ["quarantine", "release"] }
            [[tests]]
            name = "13 does not"
            events = [{ xid = "13" }]
            expect = { cordon = false, decisions = [] }
            [[tests]]
            name = "opted out"
            node.metadata.labels."k8saas.nvidia.com/ManagedByNVSentinel" = "false"
            events = [{ agent = "a", componentClass = "GPU", checkName = "c", isFatal = true }]
            expect = { cordon = false }
        "#;
        for outcome in outcomes(good) {
            assert!(
                outcome.error.is_none() && outcome.differences.is_empty(),
                "{outcome:#?}"
            );
        }
        let bad = "[[tests]]\nname = \"a\"\nevents = [{ xid = 79 }]\nexpect = { cordon = false, ruleSets = [\"x\"] }\n";
        let outcome = &outcomes(bad)[0];
        let found: Vec<String> = outcome
            .differences
            .iter()
            .map(|one| format!("{}: {} not {}", one.what, one.found, one.expected))
            .collect();
        assert_eq!(
            found,
            [
                "cordon: true not false",
                r#"ruleSets: ["default"] not ["x"]"#
            ]
        );
        assert!(outcome.because[0].contains("rule set 'default' matches"));
    }

    #[test]
    fn a_test_can_expect_the_stages_of_a_node() {
        let route = "[[routes]]\nname = \"pets\"\ndrain = false\nmatch.all = [{kind = \"Node\", \
                     expression = \"'pet' in node.metadata.labels\"}]\n";
        let asks = route
            .replace("pet", "job")
            .replace("drain = false", "approve = true");
        let policy = format!("{}{route}{asks}", policy::DEFAULT_POLICY);
        let policy = Policy::parse(&policy, "p").unwrap();
        let run = |node: &str, expect: &str| {
            let text = format!(
                "[[tests]]\nname = \"a\"\nevents = [{{ xid = 79 }}]\n{node}\nexpect = {expect}\n"
            );
            let cases: Cases = toml::from_str(&text).unwrap();
            run(&cases.tests[0], &policy, Catalog::builtin())
        };
        let pet = "node.metadata.labels.pet = \"\"";
        for (node, expect) in [
            (pet, "{ cordon = true, drain = false, remediate = false }"),
            (
                "",
                "{ cordon = true, drain = \"graceful\", remediate = true, approve = false }",
            ),
            (
                "node.metadata.labels.job = \"\"",
                "{ drain = \"graceful\", remediate = true, approve = true }",
            ),
        ] {
            let outcome = run(node, expect);
            assert!(
                outcome.error.is_none() && outcome.differences.is_empty(),
                "{outcome:#?}"
            );
        }
        let outcome = run(pet, "{ drain = \"forceful\" }");
        assert_eq!(outcome.differences[0].found, json!(false));
        assert!(outcome.because[0].ends_with("; policy route 'pets': pods stay, no repair"));
    }

    #[test]
    fn what_cannot_be_run_is_said() {
        for (events, expect, expected) in [
            (
                "{ xid = 9999 }",
                "{ cordon = true }",
                "event 1: the catalogue has no XID 9999",
            ),
            (
                "{ xid = 79, isFatl = true }",
                "{ cordon = true }",
                "did you mean isFatal?",
            ),
            (
                "{ checkName = \"c\" }",
                "{ cordon = true }",
                "agent: is empty",
            ),
            ("{ xid = 79 }", "{}", "expect is empty"),
            (
                "{ xid = 79, nodeName = \"n\" }",
                "{ cordon = true }",
                "nodeName is \"n\"",
            ),
        ] {
            let text = format!("[[tests]]\nname = \"a\"\nevents = [{events}]\nexpect = {expect}\n");
            let error = outcomes(&text)[0].error.clone().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
}
