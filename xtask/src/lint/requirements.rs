//! `docs/requirements.md`: every requirement has a state, and one that is done names
//! tests that exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use super::{
    Finding,
    tokens::{parse, test_functions},
};

const FILE: &str = "docs/requirements.md";

/// The columns of its tables.
const COLUMNS: [&str; 4] = ["id", "requirement", "state", "shown by"];

/// The states of a requirement.
const STATES: [&str; 3] = ["done", "later", "declined"];

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let text = match fs::read_to_string(root.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(vec![finding(0, "does not exist")]);
        }
        Err(error) => return Err(error.into()),
    };
    let mut tests = Tests {
        root,
        known: BTreeMap::new(),
    };
    Ok(check_text(&text, &mut |file, name| tests.find(file, name)))
}

fn finding(line: usize, message: impl Into<String>) -> Finding {
    Finding {
        file: PathBuf::from(FILE),
        line,
        message: message.into(),
    }
}

/// Checks all rows; `exists` says what is wrong with a test, if anything.
fn check_text(
    text: &str,
    exists: &mut dyn FnMut(&str, &str) -> Result<(), String>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut ids = BTreeSet::new();
    let (mut in_table, mut rows) = (false, 0);
    for (number, line) in (1..).zip(text.lines()) {
        let cells = cells(line);
        if cells.is_empty() {
            in_table = false;
            continue;
        }
        if !in_table {
            in_table = true;
            let header: Vec<String> = cells.iter().map(|cell| cell.to_lowercase()).collect();
            if header != COLUMNS {
                let columns = COLUMNS.join(" | ");
                findings.push(finding(number, format!("a table's columns are {columns}")));
            }
            continue;
        }
        if cells
            .iter()
            .all(|cell| cell.chars().all(|sign| sign == '-' || sign == ':'))
        {
            continue;
        }
        rows += 1;
        let [id, _, state, shown_by] = cells.as_slice() else {
            let count = cells.len();
            findings.push(finding(
                number,
                format!("{count} cells, expected {}", COLUMNS.len()),
            ));
            continue;
        };
        if !ids.insert((*id).to_owned()) {
            findings.push(finding(number, format!("{id} is there twice")));
        }
        // A state may be followed by its reason.
        let state = state.split([' ', ',', ':', ';']).next().unwrap_or_default();
        if !STATES.contains(&state) {
            let states = STATES.join(", ");
            findings.push(finding(
                number,
                format!("{id}: no state '{state}'; there are {states}"),
            ));
        }
        let named = named_tests(shown_by);
        if state == "done" && named.is_empty() {
            findings.push(finding(
                number,
                format!("{id} is done and names no `file.rs::test`"),
            ));
        }
        for (file, name) in named {
            if let Err(error) = exists(file, name) {
                findings.push(finding(number, format!("{id}: {error}")));
            }
        }
    }
    if rows == 0 {
        findings.push(finding(0, "has no requirement in it"));
    }
    findings
}

/// The cells of a table's line; none for any other line. `\|` is no border.
fn cells(line: &str) -> Vec<&str> {
    let line = line.trim();
    let Some(inner) = line
        .strip_prefix('|')
        .and_then(|line| line.strip_suffix('|'))
    else {
        return Vec::new();
    };
    let mut cells = Vec::new();
    let (mut start, mut escaped) = (0, false);
    for (at, sign) in inner.char_indices() {
        if sign == '|' && !escaped {
            cells.push(inner.get(start..at).unwrap_or_default().trim());
            start = at + 1;
        }
        escaped = sign == '\\' && !escaped;
    }
    cells.push(inner.get(start..).unwrap_or_default().trim());
    cells
}

/// What stands in backticks as `path::test_name`, as file and name. Modules between
/// them are allowed: `path::module::test_name`.
fn named_tests(cell: &str) -> Vec<(&str, &str)> {
    let in_backticks = cell.split('`').skip(1).step_by(2);
    in_backticks
        .filter_map(|code| {
            let (file, rest) = code.split_once("::")?;
            Some((file, rest.rsplit("::").next().unwrap_or(rest)))
        })
        .collect()
}

/// The tests of each file that was asked for.
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
            Ok(test_functions(stream))
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

    /// The findings for rows below a right header, with two tests that exist.
    fn found(rows: &str) -> Vec<String> {
        let text = format!(
            "# Title\n\n| id | Requirement | state | shown by |\n|---|:--|---|---|\n{rows}\n"
        );
        let mut exists = |file: &str, name: &str| match (file, name) {
            ("a.rs", "one" | "two") => Ok(()),
            _ => Err(format!("no test '{name}' in {file}")),
        };
        check_text(&text, &mut exists)
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn a_row_has_a_state_and_tests_that_exist() {
        let cases = [
            ("| R1 | x | done | `a.rs::one`, `a.rs::module::two` |", ""),
            ("| R1 | `a \\| b` | later, step 2 | |", ""),
            ("| R1 | x | declined: too dear | none |", ""),
            ("| R1 | x | done | |", "R1 is done and names no"),
            ("| R1 | x | done | see `a.rs` |", "R1 is done and names no"),
            (
                "| R1 | x | done | `a.rs::three` |",
                "no test 'three' in a.rs",
            ),
            ("| R1 | x | soon | |", "no state 'soon'"),
            ("| R1 | x | done |", "3 cells, expected 4"),
            (
                "| R1 | x | later | |\n| R1 | y | later | |",
                "R1 is there twice",
            ),
            ("", "no requirement"),
        ];
        for (rows, expected) in cases {
            let found = found(rows);
            let matches = match expected {
                "" => found.is_empty(),
                _ => found.len() == 1 && found[0].contains(expected),
            };
            assert!(matches, "{rows}: {found:?}");
        }
    }

    #[test]
    fn a_finding_has_its_line_and_other_tables_are_refused() {
        assert!(found("| R1 | x | soon | |")[0].starts_with("docs/requirements.md:5: "));
        let found = check_text("| a | b |\n|---|---|\n", &mut |_, _| Ok(()));
        assert!(
            found[0]
                .to_string()
                .contains("columns are id | requirement"),
            "{found:?}"
        );
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
