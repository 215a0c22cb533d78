//! The figures of a benchmark: computed from many measurements, and printed.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;

use crate::args::OutputArgs;
use crate::output::{self, say};

/// A measured value, which is a row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Benchmark and figure, with a dot in between.
    pub name: String,
    /// `None` if the benchmark did not run; `note` has the reason.
    pub value: Option<f64>,
    pub unit: &'static str,
    /// Value of the same run to compare with.
    pub baseline: Option<Baseline>,
    /// `value` divided by the baseline's value.
    pub ratio: Option<f64>,
    pub note: String,
}

/// Value to compare a figure with, in the same unit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Baseline {
    pub name: &'static str,
    pub value: f64,
}

/// Writes the rows in the format of `output`; as text, the notes follow the table.
pub fn show(rows: &[Figure], output: &OutputArgs) -> anyhow::Result<()> {
    if output::structured(output.output, &rows)? {
        return Ok(());
    }
    let heads = ["NAME", "VALUE", "UNIT", "BASELINE", "RATIO"];
    output::table(&heads, &table(rows))?;
    for row in rows.iter().filter(|row| !row.note.is_empty()) {
        say!("\n{}: {}", row.name, output::plain(&row.note))?;
    }
    Ok(())
}

/// Writes a progress line if standard error is a terminal: some benchmarks take a minute.
pub fn progress(text: &str) {
    if io::stderr().is_terminal() {
        // A closed standard error is no reason to fail.
        drop(writeln!(io::stderr().lock(), "{text}"));
    }
}

/// Returns the rows of the text table, without notes.
fn table(rows: &[Figure]) -> Vec<Vec<String>> {
    let cells = |row: &Figure| {
        let baseline = row.baseline.as_ref();
        vec![
            row.name.clone(),
            row.value.map_or_else(|| "-".to_owned(), number),
            row.unit.to_owned(),
            baseline.map_or_else(String::new, |one| {
                format!("{} ({})", number(one.value), one.name)
            }),
            row.ratio
                .map_or_else(String::new, |ratio| format!("{ratio:.2}")),
        ]
    };
    rows.iter().map(cells).collect()
}

/// Formats a value with about three significant digits.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// Rounds a value to three decimals.
fn rounded(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

/// Returns the median; for an even number of values, the mean of the middle two. 0 for no values.
pub fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), middle.checked_sub(1)) {
        (Some(upper), Some(below)) if sorted.len().is_multiple_of(2) => sorted
            .get(below)
            .map_or(*upper, |lower| f64::midpoint(*lower, *upper)),
        (Some(middle), _) => *middle,
        (None, _) => 0.0,
    }
}

/// Returns the smallest value that at least `percent` of the values do not exceed (nearest rank). 0
/// for no values.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let rank = (values.len() * percent).div_ceil(100);
    let index = rank.clamp(1, values.len().max(1)) - 1;
    sorted(values).get(index).copied().unwrap_or_default()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

// === impl Figure ===

impl Figure {
    /// Creates the row of a figure.
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            value: Some(rounded(value)),
            unit,
            baseline: None,
            ratio: None,
            note: String::new(),
        }
    }

    /// Creates the row of a benchmark that did not run.
    pub fn absent(name: &str, why: String) -> Self {
        Self {
            name: name.to_owned(),
            value: None,
            unit: "",
            baseline: None,
            ratio: None,
            note: why,
        }
    }

    /// Adds a baseline and the ratio to it.
    #[must_use]
    pub fn beside(mut self, name: &'static str, value: f64) -> Self {
        self.ratio = self
            .value
            .filter(|_| value > 0.0)
            .map(|ours| rounded(ours / value));
        self.baseline = Some(Baseline {
            name,
            value: rounded(value),
        });
        self
    }

    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_its_ratio() {
        let row = Figure::new("decode.other", 12.3456, "ns/line").beside("RegexSet", 24.6912);
        assert_eq!(
            serde_json::to_value(&row).unwrap(),
            json!({
                "name": "decode.other",
                "value": 12.346,
                "unit": "ns/line",
                "baseline": {"name": "RegexSet", "value": 24.691},
                "ratio": 0.5,
                "note": "",
            })
        );
        assert_eq!(
            Figure::new("a.b", 1.0, "ms").beside("none", 0.0).ratio,
            None
        );
    }

    #[test]
    fn what_did_not_run_has_no_value() {
        let row = Figure::absent("cordon", "not run: needs a test cluster".to_owned());
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(json["value"], json!(null));
        assert_eq!(json["baseline"], json!(null));
        assert_eq!(
            table(&[row]).last().unwrap(),
            &["cordon", "-", "", "", ""].map(str::to_owned)
        );
    }

    #[test]
    fn the_table_shows_value_and_baseline() {
        let row = Figure::new("store.single", 1234.5, "events/s").beside("file", 2469.0);
        assert_eq!(
            table(&[row]).last().unwrap(),
            &["store.single", "1234", "events/s", "2469 (file)", "0.50"].map(str::to_owned)
        );
    }

    #[test]
    fn numbers_have_about_three_digits() {
        for (value, text) in [
            (12_345.6, "12346"),
            (123.4, "123"),
            (12.34, "12.3"),
            (1.234, "1.23"),
            (0.1234, "0.123"),
            (0.0, "0.000"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn medians() {
        let table: [(&[f64], f64); 4] = [
            (&[], 0.0),
            (&[3.0], 3.0),
            (&[9.0, 1.0, 5.0], 5.0),
            (&[4.0, 1.0, 2.0, 100.0], 3.0),
        ];
        for (values, expected) in table {
            assert!((median(values) - expected).abs() < 1e-9, "{values:?}");
        }
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let table: [(&[f64], usize, f64); 8] = [
            (&hundred, 50, 50.0),
            (&hundred, 99, 99.0),
            (&hundred, 100, 100.0),
            (&hundred, 0, 1.0),
            (&[7.0], 50, 7.0),
            (&[7.0], 99, 7.0),
            (&[1.0, 2.0, 3.0], 50, 2.0),
            (&[], 99, 0.0),
        ];
        for (values, percent, expected) in table {
            let found = percentile(values, percent);
            assert!((found - expected).abs() < 1e-9, "{percent}: {found}");
        }
    }
}
