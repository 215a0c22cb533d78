//! The brake's part of a policy file: `[brake]`, and NVSentinel's `[circuitBreaker]`.

use contract::names;
use jiff::SignedDuration;
use serde::Deserialize;
use toml::Spanned;

use crate::{Amount, Brake, Budget, Window};

/// Default share of the GPU nodes in NVSentinel's chart, in percent.
const WINDOW_PERCENTAGE: i64 = 50;
/// Default period in NVSentinel's chart.
const WINDOW_DURATION: &str = "5m";

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
    max: Spanned<MaxEntry>,
    per: Option<Spanned<String>>,
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
    circuit_breaker: Option<Spanned<CircuitBreakerEntry>>,
    mut find: impl FnMut(usize, String),
) -> Brake {
    if brake.is_none() && circuit_breaker.is_none() {
        return Brake::default();
    }
    let mut budgets = Vec::new();
    for entry in brake.into_iter().flat_map(|entry| entry.budgets) {
        let start = entry.max.span().start;
        let per = entry.per.map(|label| {
            if let Err(error) = names::label_key(label.get_ref()) {
                let what = format!("brake: 'per' names the label of a node: {error}");
                find(label.span().start, what);
            }
            label.into_inner()
        });
        match amount(&entry.max.into_inner()) {
            Ok(max) => budgets.push(Budget { max, per }),
            Err(what) => find(start, format!("brake: max {what}")),
        }
    }
    let window = circuit_breaker.and_then(|entry| {
        let start = entry.span().start;
        window(&entry.into_inner())
            .map_err(|what| find(start, format!("circuitBreaker: {what}")))
            .ok()
    });
    Brake { budgets, window }
}

fn amount(entry: &MaxEntry) -> Result<Amount, String> {
    let wrong = |what: &str| {
        format!(
            "{what} is neither a number of nodes, such as 5, nor a part of them, such as \"10%\" (1% to 100%)"
        )
    };
    match entry {
        // Zero is a valid budget: no node is taken out.
        MaxEntry::Number(number) => u32::try_from(*number)
            .map(Amount::Nodes)
            .map_err(|_| wrong(&number.to_string())),
        MaxEntry::Text(text) => text
            .trim()
            .strip_suffix('%')
            .and_then(|number| number.trim_end().parse().ok())
            .filter(|percent| (1..=100).contains(percent))
            .map(Amount::Percent)
            .ok_or_else(|| wrong(&format!("'{text}'"))),
    }
}

fn window(entry: &CircuitBreakerEntry) -> Result<Window, String> {
    let percentage = entry.percentage.unwrap_or(WINDOW_PERCENTAGE);
    let percentage = u8::try_from(percentage)
        .ok()
        .filter(|percentage| (1..=100).contains(percentage))
        .ok_or_else(|| format!("percentage {percentage} is not within 1 to 100"))?;
    let duration = entry.duration.as_deref().unwrap_or(WINDOW_DURATION);
    let duration = duration
        .parse::<SignedDuration>()
        .ok()
        .filter(SignedDuration::is_positive)
        .ok_or_else(|| format!("duration '{duration}' is not a duration such as 5m or 1h30m"))?;
    Ok(Window {
        percentage,
        duration,
    })
}
