//! `gpuwarden bench`: what gpuwarden does in which time, on this machine.
//!
//! Each figure stands beside a baseline of the same run, measured in turns with it, so that
//! their ratio says something on a machine that is busy with other things too. Nothing here
//! passes or fails. `docs/benchmarks.md` has what we saw.

mod burst;
mod cordon;
mod decode;
mod file_system;
mod idle;
mod memory;
mod product;
mod statistics;
mod store;
mod storm;
mod usage;

use std::io::{self, IsTerminal as _, Write as _};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use serde::Serialize;

use crate::args::{BenchArgs, Benchmark};
use crate::{EXIT_FAILED, EXIT_OK, output};

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    /// Benchmark and figure, with a dot in between.
    name: String,
    /// The figure; `None` where the benchmark did not run, and `note` says why.
    value: Option<f64>,
    unit: &'static str,
    baseline: Option<Baseline>,
    /// `value` divided by the baseline's.
    ratio: Option<f64>,
    note: String,
}

/// What a figure is compared with, in the same unit.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Baseline {
    name: &'static str,
    value: f64,
}

pub(super) async fn execute(args: &BenchArgs) -> anyhow::Result<u8> {
    let mut rows = Vec::new();
    let mut code = EXIT_OK;
    for &benchmark in Benchmark::value_variants() {
        if args.name.is_some_and(|only| only != benchmark) {
            continue;
        }
        let name = name(benchmark);
        if let Some(missing) = missing(benchmark, args) {
            if args.name.is_some() {
                bail!("{name} {missing}");
            }
            rows.push(Row::absent(&name, format!("not run: {missing}")));
            continue;
        }
        progress(&format!("{name} ..."));
        match run(benchmark, args).await {
            Ok(figures) => rows.extend(figures),
            Err(error) if args.name.is_some() => return Err(error.context(name)),
            // What the others have found is not thrown away.
            Err(error) => {
                rows.push(Row::absent(&name, format!("failed: {error:#}")));
                code = EXIT_FAILED;
            }
        }
    }
    if !output::structured(args.output.output, &rows)? {
        output::table(&table(&rows))?;
        for row in rows.iter().filter(|row| !row.note.is_empty()) {
            output::line(&format!("\n{}: {}", row.name, output::plain(&row.note)))?;
        }
    }
    Ok(code)
}

async fn run(benchmark: Benchmark, args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    match benchmark {
        Benchmark::Decode => decode::run(),
        Benchmark::Storm => storm::run(args).await,
        Benchmark::Store => store::run(args.dir.as_deref()).await,
        Benchmark::Cordon => cordon::run(args).await,
        Benchmark::Burst => burst::run(args).await,
        Benchmark::Idle => idle::run(args).await,
        Benchmark::Fleet => idle::fleet(args).await,
        Benchmark::Memory => memory::run(args).await,
        Benchmark::Binary => binary(),
    }
}

/// What a benchmark lacks here.
fn missing(benchmark: Benchmark, args: &BenchArgs) -> Option<&'static str> {
    match benchmark {
        Benchmark::Cordon | Benchmark::Burst | Benchmark::Fleet | Benchmark::Memory
            if args.kubeconfig.is_none() =>
        {
            Some("needs a test cluster: name one with --kubeconfig FILE")
        }
        _ => None,
    }
}

fn name(benchmark: Benchmark) -> String {
    let value = benchmark.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Says on a terminal what is going on: some of it takes a minute.
fn progress(text: &str) {
    if io::stderr().is_terminal() {
        // It fails only where nobody reads.
        drop(writeln!(io::stderr().lock(), "{text}"));
    }
}

fn binary() -> anyhow::Result<Vec<Row>> {
    let path = std::env::current_exe().context("find this executable")?;
    let size = std::fs::metadata(&path)
        .with_context(|| format!("look at {}", path.display()))?
        .len();
    let note = if cfg!(debug_assertions) {
        "a debug build: build with --release to see what is shipped"
    } else {
        ""
    };
    Ok(vec![Row::new("binary.size", mib(size), "MiB").note(note)])
}

/// Bytes in MiB.
#[allow(clippy::cast_precision_loss)] // Far below 2^53.
fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

/// The rows as a table for people; the notes follow it.
fn table(rows: &[Row]) -> Vec<Vec<String>> {
    let head = ["NAME", "VALUE", "UNIT", "BASELINE", "RATIO"];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    table.extend(rows.iter().map(|row| {
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
    }));
    table
}

/// A figure with about three digits that count.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// No more digits than anybody needs.
fn rounded(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

// === impl Row ===

impl Row {
    fn new(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            value: Some(rounded(value)),
            unit,
            baseline: None,
            ratio: None,
            note: String::new(),
        }
    }

    /// The row of a benchmark that did not run.
    fn absent(name: &str, why: String) -> Self {
        Self {
            name: name.to_owned(),
            value: None,
            unit: "",
            baseline: None,
            ratio: None,
            note: why,
        }
    }

    fn beside(mut self, name: &'static str, value: f64) -> Self {
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

    fn note(mut self, note: impl Into<String>) -> Self {
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
        let row = Row::new("decode.other", 12.3456, "ns/line").beside("RegexSet", 24.6912);
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
        assert_eq!(Row::new("a.b", 1.0, "ms").beside("none", 0.0).ratio, None);
    }

    #[test]
    fn what_did_not_run_has_no_value() {
        let row = Row::absent("cordon", "not run: needs a test cluster".to_owned());
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
        let row = Row::new("store.single", 1234.5, "events/s").beside("file", 2469.0);
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
}
