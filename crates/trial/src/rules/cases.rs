//! Tests of rules: events with their times, and the conclusions that have to follow or must not.

use analysis::Rule;
use contract::nearest::hint;
use diagnosis::catalog::Catalog;
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::position::Position;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::conclude::{Concluded, Conclusions};
use crate::cases::{BETWEEN, CaseResult, MOST, Mismatch, event_of};
use crate::standard;

/// Time of the begin of a test.
const BEGIN: Timestamp = Timestamp::UNIX_EPOCH;
/// Longest test: more than any window.
const LONGEST: SignedDuration = SignedDuration::from_hours(10 * 365 * 24);

/// Test of rules.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleCase {
    /// Name that describes what the test shows.
    pub name: String,
    /// Events in order, in their public form, or as `xid` with a code and the fields that differ
    /// from the catalogue's event. `at` is the time since the begin of the test, such as `10m`;
    /// without it, an event comes a minute after the one before.
    pub events: Vec<Value>,
    /// Time since the begin at which the test ends. Without it, the test ends with its last event.
    #[serde(default)]
    pub until: Option<String>,
    /// Expected results.
    pub expect: RuleExpect,
}

/// Expected results of a test.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleExpect {
    /// Conclusions that have to follow. Others may follow too.
    #[serde(default)]
    pub concludes: Vec<ExpectedConclusion>,
    /// Names of rules that must not conclude anything.
    #[serde(default)]
    pub never: Vec<String>,
}

/// Expected conclusion. Missing keys are not compared.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedConclusion {
    /// Name of the rule.
    pub rule: String,
    /// Group, as `rules explain` shows it: `node, GPU_UUID GPU-1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Time since the begin of the event that meets the condition, such as `10m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// True if the conclusion is open at the end of the test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<bool>,
}

/// Runs a test with rules.
pub fn run(case: &RuleCase, rules: &[Rule], catalog: &Catalog) -> CaseResult {
    let (differences, because, error) = match played(case, rules, catalog) {
        Ok((differences, found)) => (differences, found, None),
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
    case: &RuleCase,
    rules: &[Rule],
    catalog: &Catalog,
) -> Result<(Vec<Mismatch>, Vec<String>), String> {
    let RuleExpect { concludes, never } = &case.expect;
    if concludes.is_empty() && never.is_empty() {
        return Err("expect is empty: nothing would be tested".to_owned());
    }
    let known: Vec<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    let mut named = concludes.iter().map(|one| &one.rule).chain(never);
    if let Some(name) = named.find(|name| !known.contains(&name.as_str())) {
        let meant = hint(name, &known);
        let meant = meant.map_or_else(String::new, |meant| format!("; {meant}"));
        return Err(format!("there is no rule {name:?}{meant}"));
    }
    if case.events.len() > MOST {
        let events = case.events.len();
        return Err(format!("{events} events, at most {MOST} are taken"));
    }
    let mut conclusions = Conclusions::new(rules.to_vec(), &[]);
    let mut next = BEGIN;
    let mut now = BEGIN;
    for (index, value) in case.events.iter().enumerate() {
        let record = record_of(value, next, catalog);
        let record = record.map_err(|what| format!("event {}: {what}", index + 1))?;
        if record.created_at < now {
            return Err(format!(
                "event {}: it is earlier than the one before",
                index + 1
            ));
        }
        now = record.created_at;
        next = now + BETWEEN;
        conclusions.take(record);
    }
    if let Some(until) = &case.until {
        let end = BEGIN + duration("until", until)?;
        if end < now {
            return Err("until is earlier than the last event".to_owned());
        }
        conclusions.until(end);
    }
    let found = conclusions.concluded();
    let mut differences = Vec::new();
    for expected in concludes {
        let at = expected
            .at
            .as_deref()
            .map(|at| duration("at", at))
            .transpose()?;
        if !found.iter().any(|one| fits(expected, at, one)) {
            differences.push(mismatch(
                "concludes",
                json!(expected),
                &expected.rule,
                found,
            ));
        }
    }
    for name in never {
        if found.iter().any(|one| one.rule == *name) {
            differences.push(mismatch("never", json!(name), name, found));
        }
    }
    let because = found.iter().map(|one| text(&shown(one))).collect();
    Ok((differences, because))
}

/// Returns the record of an event of a test, which is at `next` unless it has a time of its own.
fn record_of(value: &Value, next: Timestamp, catalog: &Catalog) -> Result<EventRecord, String> {
    let mut value = value.clone();
    let keys = value.as_object_mut();
    let at = match keys.and_then(|keys| keys.remove("at")) {
        Some(Value::String(text)) => BEGIN + duration("at", &text)?,
        Some(other) => return Err(format!("at is {other}; write a duration such as 10m")),
        None => next,
    };
    let node = value["nodeName"]
        .as_str()
        .unwrap_or(standard::NODE)
        .to_owned();
    let event = event_of(&value, &node, at, catalog)?;
    Ok(EventRecord {
        seq: Position::START,
        id: event.id.clone(),
        created_at: at,
        event,
    })
}

fn duration(key: &str, text: &str) -> Result<SignedDuration, String> {
    let parsed = text.parse::<SignedDuration>().ok();
    let parsed = parsed.filter(|duration| !duration.is_negative() && *duration <= LONGEST);
    parsed.ok_or_else(|| format!("{key} is {text:?}; write a duration such as 10m or 26h"))
}

fn fits(expected: &ExpectedConclusion, at: Option<SignedDuration>, found: &Concluded) -> bool {
    found.rule == expected.rule
        && expected
            .group
            .as_ref()
            .is_none_or(|group| *group == found.group)
        && at.is_none_or(|at| found.since == BEGIN + at)
        && expected
            .open
            .is_none_or(|open| open == found.ended.is_none())
}

/// Returns a conclusion in the form in which it is expected.
fn shown(found: &Concluded) -> ExpectedConclusion {
    ExpectedConclusion {
        rule: found.rule.clone(),
        group: Some(found.group.clone()),
        at: Some(format!("{:#}", found.since.duration_since(BEGIN))),
        open: Some(found.ended.is_none()),
    }
}

fn text(one: &ExpectedConclusion) -> String {
    let group = one.group.as_deref().unwrap_or_default();
    let at = one.at.as_deref().unwrap_or_default();
    let state = if one.open == Some(true) {
        "open"
    } else {
        "ended"
    };
    format!(
        "{} concludes about {group} at {at}, {state} at the end",
        one.rule
    )
}

fn mismatch(what: &str, expected: Value, rule: &str, found: &[Concluded]) -> Mismatch {
    let of_rule = found.iter().filter(|one| one.rule == rule);
    Mismatch {
        what: what.to_owned(),
        expected,
        found: of_rule.map(|one| json!(shown(one))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Cases;

    fn outcomes(text: &str) -> Vec<CaseResult> {
        let cases: Cases<RuleCase> = toml::from_str(text).unwrap();
        let rules = analysis::built_in();
        let run = |case: &RuleCase| run(case, &rules, Catalog::builtin());
        cases.tests.iter().map(run).collect()
    }

    #[test]
    fn tests_pass_and_fail_as_they_should() {
        let good = r#"
            [[tests]]
            name = "31 comes back"
            events = [{ xid = 31 }, { xid = 31, at = "10m" }]
            expect.concludes = [{ rule = "RepeatedXID31OnSameGPU", at = "10m", open = true,
                                  group = "node, GPU_UUID GPU-00000000-0000-0000-0000-000000000000" }]
            expect.never = ["RepeatedXID31OnDifferentGPU"]
            [[tests]]
            name = "an hour is no burst, and a rule without a repair ends"
            events = [{ xid = 31 }]
            until = "48h"
            expect.concludes = [{ rule = "XIDErrorSoloNoBurst", at = "0s", open = false }]
            expect.never = ["RepeatedXID31OnSameGPU"]
            [[tests]]
            name = "three nodes of a rack"
            events = [
                { xid = 79, nodeName = "a", metadata = { "topology.kubernetes.io/rack" = "r1" } },
                { xid = 79, nodeName = "b", metadata = { "topology.kubernetes.io/rack" = "r1" } },
                { xid = 79, nodeName = "c", metadata = { "topology.kubernetes.io/rack" = "r1" } },
            ]
            expect.concludes = [{ rule = "RackFault", at = "2m" }]
        "#;
        let silent = silent_gpu();
        let good = &format!("{good}{silent}");
        for outcome in outcomes(good) {
            let passes = outcome.error.is_none() && outcome.differences.is_empty();
            assert!(passes, "{outcome:#?}");
        }
        let bad = r#"
            [[tests]]
            name = "a"
            events = [{ xid = 31 }, { xid = 31, at = "10m" }]
            expect.concludes = [{ rule = "RepeatedXID31OnSameGPU", at = "11m" }]
            expect.never = ["RepeatedXID31OnSameGPU", "RackFault"]
        "#;
        let outcome = &outcomes(bad)[0];
        let found: Vec<(&str, &Value)> = (outcome.differences.iter())
            .map(|one| (one.what.as_str(), &one.found[0]["at"]))
            .collect();
        assert_eq!(
            found,
            [("concludes", &json!("10m")), ("never", &json!("10m"))]
        );
        let told = "RepeatedXID31OnSameGPU concludes about node";
        assert!(outcome.because.iter().any(|one| one.starts_with(told)));
    }

    /// Returns a test with an NVLink domain of six nodes with three GPUs each, of which one is silent.
    fn silent_gpu() -> String {
        let gpu = |gpu: i32, keys: &str| {
            format!(
                "{{ {keys}, nodeName = \"n{}\", at = \"{gpu}s\", entitiesImpacted = [{{ entityType = \"GPU_UUID\", \
                 entityValue = \"GPU-{gpu}\" }}], metadata = {{ \"nvidia.com/gpu.clique\" = \"c\", \
                 \"gpuwarden.dev/reported-by\" = \"monitor\" }} }}",
                gpu / 3
            )
        };
        let named = "agent = \"gpu-health-monitor\", checkName = \"GpuInventory\", isHealthy = true, \
                     componentClass = \"GPU\", processingStrategy = \"STORE_ONLY\"";
        let xids = (0..17).map(|one| gpu(one, "xid = 45"));
        let events: Vec<String> = xids.chain([gpu(17, named)]).collect();
        format!(
            "[[tests]]\nname = \"a silent GPU\"\nevents = [{}]\nuntil = \"10m\"\n\
             expect.concludes = [{{ rule = \"SilentGPU\", at = \"16s\", open = true }}]\n",
            events.join(", ")
        )
    }

    #[test]
    fn what_cannot_be_run_is_said() {
        let never = "never = [\"RackFault\"]";
        for (events, expect, expected) in [
            ("{ xid = 31 }", "", "expect is empty"),
            (
                "{ xid = 31 }",
                "never = [\"RackFualt\"]",
                "did you mean 'RackFault'?",
            ),
            (
                "{ xid = 31, at = 5 }",
                never,
                "event 1: at is 5; write a duration",
            ),
            ("{ xid = 31, at = \"5\" }", never, "event 1: at is \"5\""),
            (
                "{ xid = 31, at = \"1h\" }, { xid = 31, at = \"1m\" }",
                never,
                "event 2: it is earlier",
            ),
            (
                "{ xid = 9999 }",
                never,
                "event 1: the catalogue has no XID 9999",
            ),
            ("5", never, "event 1: is not an object"),
        ] {
            let text =
                format!("[[tests]]\nname = \"a\"\nevents = [{events}]\nexpect = {{ {expect} }}\n");
            let error = outcomes(&text)[0].error.clone().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
}
