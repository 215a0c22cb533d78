//! The brake's part of a policy file: `[brake]`, and NVSentinel's `[circuitBreaker]`.

use contract::findings::Findings;
use contract::names;
use jiff::SignedDuration;
use serde::Deserialize;

use crate::{Amount, Brake, Budget, Limit, Window};

/// Default share of the GPU nodes in NVSentinel's chart, in percent.
const WINDOW_PERCENTAGE: i64 = 50;
/// Default period in NVSentinel's chart.
const WINDOW_DURATION: SignedDuration = SignedDuration::from_mins(5);

/// The table `[brake]`. It is our own format, so misspelt keys are errors: a limit must not be
/// replaced by a default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BrakeEntry {
    budgets: Vec<BudgetEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BudgetEntry {
    max: Option<AmountEntry>,
    keep: Option<AmountEntry>,
    per: Option<String>,
}

/// Either `5` or `"10%"`.
#[derive(Deserialize)]
#[serde(untagged)]
enum AmountEntry {
    Number(i64),
    Text(String),
}

#[derive(Deserialize)]
pub(super) struct CircuitBreakerEntry {
    percentage: Option<i64>,
    duration: Option<String>,
}

/// Returns the brake of a file. A file without any brake settings gets the default; a file with
/// some gets exactly those.
pub(super) fn brake(
    brake: Option<BrakeEntry>,
    circuit_breaker: Option<CircuitBreakerEntry>,
    findings: &mut Findings<'_>,
) -> Brake {
    if brake.is_none() && circuit_breaker.is_none() {
        return Brake::default();
    }
    let mut budgets = Vec::new();
    let entries = brake.into_iter().flat_map(|entry| entry.budgets);
    for (at, entry) in entries.enumerate() {
        let path = format!("brake.budgets[{at}]");
        if let Some(label) = &entry.per {
            let checked = names::label_key(label)
                .map_err(|error| format!("it names the label of a node: {error}"));
            findings.check(&format!("{path}.per"), checked);
        }
        if let Some(limit) = limit(&entry, &path, findings) {
            let per = entry.per;
            budgets.push(Budget { limit, per });
        }
    }
    let window = circuit_breaker.and_then(|entry| window(&entry, findings));
    Brake { budgets, window }
}

fn limit(entry: &BudgetEntry, path: &str, findings: &mut Findings<'_>) -> Option<Limit> {
    let read = match (&entry.max, &entry.keep) {
        // Zero is a valid budget: no node is taken out.
        (Some(max), None) => amount(max, 0).map(Limit::Max).ok_or(("max", 5, 10)),
        (None, Some(keep)) => amount(keep, 1).map(Limit::Keep).ok_or(("keep", 64, 90)),
        (Some(_), Some(_)) => {
            findings.at_key(
                &format!("{path}.keep"),
                "a budget has either max or keep; write two budgets for both",
            );
            return None;
        }
        (None, None) => {
            findings.at_key(
                path,
                "write max, the most nodes out of service, or keep, the fewest in service",
            );
            return None;
        }
    };
    let refuse = |(key, nodes, percent)| {
        let wanted = format!(
            "write a number of nodes, such as {nodes}, or a part of them, such as \"{percent}%\" \
             (1% to 100%)"
        );
        findings.refuse(&format!("{path}.{key}"), wanted);
    };
    read.map_err(refuse).ok()
}

/// Returns the amount, if it is at least as many nodes, or a valid percentage.
fn amount(entry: &AmountEntry, least: u32) -> Option<Amount> {
    match entry {
        AmountEntry::Number(number) => {
            let nodes = u32::try_from(*number).ok();
            nodes.filter(|nodes| *nodes >= least).map(Amount::Nodes)
        }
        AmountEntry::Text(text) => {
            let percent = text.trim().strip_suffix('%')?.trim_end().parse().ok();
            let percent = percent.filter(|percent| (1..=100).contains(percent));
            percent.map(Amount::Percent)
        }
    }
}

fn window(entry: &CircuitBreakerEntry, findings: &mut Findings<'_>) -> Option<Window> {
    let percentage = entry.percentage.unwrap_or(WINDOW_PERCENTAGE);
    let percentage =
        findings.whole_number("circuitBreaker.percentage", Some(percentage), 1..=100, "");
    let duration = match &entry.duration {
        Some(text) => findings.duration("circuitBreaker.duration", text, SignedDuration::MAX),
        None => Some(WINDOW_DURATION),
    };
    Some(Window {
        percentage: percentage?.try_into().ok()?,
        duration: duration?,
    })
}
