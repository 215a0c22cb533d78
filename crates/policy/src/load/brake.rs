//! The brake's part of a policy file: `[brake]`, and NVSentinel's `[circuitBreaker]`.

use contract::findings::Findings;
use contract::names;
use jiff::SignedDuration;
use serde::Deserialize;

use crate::{Amount, Brake, Budget, Window};

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
    max: MaxEntry,
    per: Option<String>,
}

/// Either `5` or `"10%"`.
#[derive(Deserialize)]
#[serde(untagged)]
enum MaxEntry {
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
    for (at, BudgetEntry { max, per }) in entries.enumerate() {
        let path = format!("brake.budgets[{at}]");
        if let Some(label) = &per {
            let checked = names::label_key(label)
                .map_err(|error| format!("it names the label of a node: {error}"));
            findings.check(&format!("{path}.per"), checked);
        }
        match amount(&max) {
            Some(max) => budgets.push(Budget { max, per }),
            None => findings.refuse(
                &format!("{path}.max"),
                "write a number of nodes, such as 5, or a part of them, such as \"10%\" (1% to 100%)",
            ),
        }
    }
    let window = circuit_breaker.and_then(|entry| window(&entry, findings));
    Brake { budgets, window }
}

fn amount(entry: &MaxEntry) -> Option<Amount> {
    match entry {
        // Zero is a valid budget: no node is taken out.
        MaxEntry::Number(number) => u32::try_from(*number).ok().map(Amount::Nodes),
        MaxEntry::Text(text) => {
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
