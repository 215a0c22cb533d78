//! Checks `docs/requirements.tsv` and `docs/known-faults.tsv`: every row has an id of its own and a
//! state, a row that is built names tests that exist, and any other row says why.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{
    Finding,
    tokens::{functions, parse, test_functions},
};

/// A table of tab-separated values: id, text, state, and tests or the reason of the state.
struct Table {
    file: &'static str,
    columns: [&'static str; 4],
    /// State of a row whose last cell lists the tests that show it.
    built: &'static str,
    /// States of rows whose last cell is a reason.
    not_built: &'static [&'static str],
}

const REQUIREMENTS: Table = Table {
    file: "docs/requirements.tsv",
    columns: ["id", "requirement", "state", "tests or why"],
    built: "done",
    not_built: &["later", "declined"],
};

const KNOWN_FAULTS: Table = Table {
    file: "docs/known-faults.tsv",
    columns: ["id", "fault", "state", "tests or why"],
    built: "fixed",
    not_built: &["open", "later", "declined"],
};

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut tests = Tests {
        root,
        known: BTreeMap::new(),
    };
    let mut exists = |file: &str, name: &str| tests.find(file, name);
    let mut findings = Vec::new();
    for table in [REQUIREMENTS, KNOWN_FAULTS] {
        let text = fs::read_to_string(root.join(table.file))
            .with_context(|| format!("read {}", table.file))?;
        findings.extend(check_text(&table, &text, &mut exists));
    }
    Ok(findings)
}

/// Checks all rows. `exists` returns an error for a test that is not in its file.
fn check_text(
    table: &Table,
    text: &str,
    exists: &mut dyn FnMut(&str, &str) -> Result<(), String>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut finding = |line: usize, message: String| {
        findings.push(Finding {
            file: PathBuf::from(table.file),
            line,
            message,
        });
    };
    let mut lines = (1..).zip(text.lines());
    if lines.next().map(|(_, header)| header) != Some(&table.columns.join("\t")) {
        let columns = table.columns.join(", ");
        finding(1, format!("the first line has the columns {columns}"));
    }
    let mut ids = BTreeSet::new();
    for (line, row) in lines {
        let cells: Vec<&str> = row.split('\t').collect();
        let [id, text, state, last] = cells.as_slice() else {
            finding(line, format!("{} cells, expected 4", cells.len()));
            continue;
        };
        if id.is_empty() || text.is_empty() {
            finding(line, "the id or the text is empty".to_owned());
        }
        if !ids.insert(*id) {
            finding(line, format!("{id} is there twice"));
        }
        if table.not_built.contains(state) {
            if last.is_empty() {
                finding(line, format!("{id} is {state} and has no reason"));
            }
        } else if *state != table.built {
            let (built, others) = (table.built, table.not_built.join(", "));
            let states = format!("the states are {built}, {others}");
            finding(line, format!("{id} has the state '{state}'; {states}"));
        } else if last.is_empty() {
            finding(line, format!("{id} is {state} and names no test"));
        } else {
            for test in last.split(' ') {
                // Modules may stand between file and test: `path::module::test`.
                let checked = match test.split_once("::") {
                    Some((file, rest)) => exists(file, rest.rsplit("::").next().unwrap_or(rest)),
                    None => Err(format!("'{test}' is not of the form file.rs::test")),
                };
                if let Err(error) = checked {
                    finding(line, format!("{id}: {error}"));
                }
            }
        }
    }
    if text.lines().count() < 2 {
        finding(0, "has no row".to_owned());
    }
    findings
}

/// Directory of the tests that every store has to pass. The macro in the file of the same name lists
/// the functions that become tests, one a line.
const CONFORMANCE: &str = "crates/store/src/conformance";

/// Tests by file, read on first use.
struct Tests<'a> {
    root: &'a Path,
    known: BTreeMap<String, Result<Vec<String>, String>>,
}

impl Tests<'_> {
    fn find(&mut self, file: &str, name: &str) -> Result<(), String> {
        let tests = self.known.entry(file.to_owned()).or_insert_with(|| {
            let source = fs::read_to_string(self.root.join(file))
                .map_err(|error| format!("cannot read {file}: {error}"))?;
            let stream =
                parse(&source).map_err(|(line, error)| format!("{file}:{line}: {error}"))?;
            if !file.starts_with(CONFORMANCE) {
                return Ok(test_functions(stream));
            }
            let list = self.root.join(CONFORMANCE).with_extension("rs");
            let list = fs::read_to_string(&list)
                .map_err(|error| format!("cannot read {}: {error}", list.display()))?;
            let listed = |name: &String| list.lines().any(|line| line.trim() == name.as_str());
            let names = functions(stream).into_iter().map(|function| function.name);
            Ok(names.filter(listed).collect())
        });
        match tests {
            Ok(tests) if tests.iter().any(|test| test == name) => Ok(()),
            Ok(_) => Err(format!("no test '{name}' in {file}")),
            Err(error) => Err(error.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the findings for rows below a correct header, with two tests that exist.
    fn found(table: &Table, rows: &str) -> Vec<String> {
        let text = format!("{}\n{rows}\n", table.columns.join("\t"));
        let mut exists = |file: &str, name: &str| match (file, name) {
            ("a.rs", "one" | "two") => Ok(()),
            _ => Err(format!("no test '{name}' in {file}")),
        };
        check_text(table, text.trim_end_matches('\n'), &mut exists)
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn a_row_has_a_state_and_tests_that_exist_or_a_reason() {
        let cases = [
            ("R1\tx\tdone\ta.rs::one a.rs::module::two", ""),
            ("R1\ta | b\tlater\tdatabases", ""),
            ("R1\tx\tdeclined\ttoo expensive", ""),
            ("R1\tx\tdone\t", "R1 is done and names no test"),
            ("R1\tx\tdone\ta.rs", "'a.rs' is not of the form"),
            ("R1\tx\tdone\ta.rs::three", "no test 'three' in a.rs"),
            ("R1\tx\tlater\t", "R1 is later and has no reason"),
            ("R1\tx\tsoon\ty", "R1 has the state 'soon'"),
            ("R1\tx\tdone", "3 cells, expected 4"),
            ("\tx\tlater\ty", "is empty"),
            ("R1\tx\tlater\ty\nR1\ty\tlater\ty", "R1 is there twice"),
            ("", "no row"),
        ];
        for (rows, expected) in cases {
            let found = found(&REQUIREMENTS, rows);
            let matches = match expected {
                "" => found.is_empty(),
                _ => found.len() == 1 && found[0].contains(expected),
            };
            assert!(matches, "{rows}: {found:?}");
        }
    }

    #[test]
    fn a_finding_has_its_line_and_other_columns_are_refused() {
        let rows = found(&REQUIREMENTS, "R1\tx\tsoon\ty");
        assert!(rows[0].starts_with("docs/requirements.tsv:2: "), "{rows:?}");
        let found = check_text(&REQUIREMENTS, "a\tb\nR1\tx\tlater\ty", &mut |_, _| Ok(()));
        assert!(
            found[0].to_string().contains("id, requirement"),
            "{found:?}"
        );
    }

    #[test]
    fn the_states_of_known_faults_are_their_own() {
        assert_eq!(found(&KNOWN_FAULTS, "F1\tx\tfixed\ta.rs::one").len(), 0);
        assert_eq!(found(&KNOWN_FAULTS, "F1\tx\topen\tno time").len(), 0);
        assert_eq!(found(&KNOWN_FAULTS, "F1\tx\tdone\ta.rs::one").len(), 1);
    }

    #[test]
    fn tests_are_looked_up_in_their_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.rs"), "fn no() {}\n#[test]\nfn yes() {}").unwrap();
        let mut tests = Tests {
            root: dir.path(),
            known: BTreeMap::new(),
        };
        assert_eq!(tests.find("a.rs", "yes"), Ok(()));
        assert_eq!(
            tests.find("a.rs", "no"),
            Err("no test 'no' in a.rs".to_owned())
        );
        assert!(
            tests
                .find("b.rs", "yes")
                .unwrap_err()
                .starts_with("cannot read b.rs")
        );
    }
}
