//! Score of a GPU or node: its faults and repairs, of which older ones count less. Nothing acts on
//! the score; it orders lists for people.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::history::FaultHistory;

/// Time in which a term loses half of its value.
pub const HALF_LIFE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// Weight of a fatal fault.
const FATAL: f64 = 1.0;
/// Weight of another fault.
const NOT_FATAL: f64 = 0.2;
/// Weight of a repair that succeeded.
const REPAIRED: f64 = 0.3;
/// Weight of a repair that failed.
const NOT_REPAIRED: f64 = 1.0;

/// Score with its terms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Score {
    /// Sum of the terms.
    pub value: f64,
    /// Terms, the latest first.
    pub terms: Vec<ScoreTerm>,
}

/// Term of a score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScoreTerm {
    /// Time of the fault's first report, or of the repair.
    pub at: Timestamp,
    /// Name of the fault or repair, for people.
    pub what: String,
    /// Value without decay.
    pub weight: f64,
    /// Value now.
    pub value: f64,
}

// === impl Score ===

impl Score {
    /// Returns the score of a history at a time.
    pub fn of(history: &FaultHistory, now: Timestamp) -> Self {
        let faults = history.faults.iter().map(|fault| {
            let weight = if fault.fatal { FATAL } else { NOT_FATAL };
            let name = format!("{} {}", fault.check, fault.code);
            (fault.first, name.trim_end().to_owned(), weight)
        });
        let repairs = history.repairs.iter().map(|repair| {
            let (weight, result) = if repair.succeeded {
                (REPAIRED, "")
            } else {
                (NOT_REPAIRED, " that failed")
            };
            (repair.at, format!("{}{result}", repair.kind.text()), weight)
        });
        let term = |(at, what, weight): (Timestamp, String, f64)| ScoreTerm {
            at,
            what,
            weight,
            value: weight * decay(now.duration_since(at)),
        };
        let mut terms: Vec<ScoreTerm> = faults.chain(repairs).map(term).collect();
        terms.sort_by(|one, other| (other.at, &other.what).cmp(&(one.at, &one.what)));
        Self {
            // An empty sum is -0.0.
            value: terms.iter().fold(0.0, |sum, term| sum + term.value),
            terms,
        }
    }
}

/// Returns the part of a value that is left after a time; all of it for a time in the future.
fn decay(age: SignedDuration) -> f64 {
    let half_lives = age.as_secs_f64().max(0.0) / HALF_LIFE.as_secs_f64();
    0.5_f64.powf(half_lives)
}
