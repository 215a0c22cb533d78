//! `docs/requirements.md` and `docs/known-faults.md`: every row of their tables has a
//! state, and what is built names tests that exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use super::{
    Finding,
    tokens::{functions, parse, test_functions},
};

/// A page whose tables have rows with a state and the tests that show it.
struct Page {
    file: &'static str,
    /// The columns of its tables. The first is the id, the last two are state and tests.
    columns: &'static [&'static str],
    /// The first is the one that tests have to show.
    states: &'static [&'static str],
}

const REQUIREMENTS: Page = Page {
    file: "docs/requirements.md",
    columns: &["id", "requirement", "state", "shown by"],
    states: &["done", "later", "declined"],
};

const KNOWN_FAULTS: Page = Page {
    file: "docs/known-faults.md",
    columns: &["id", "fault there", "state", "shown by"],
    states: &["mended", "open", "later", "declined"],
};

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut tests = Tests {
        root,
        known: BTreeMap::new(),
    };
    let mut findings = Vec::new();
    for page in [REQUIREMENTS, KNOWN_FAULTS] {
        match fs::read_to_string(root.join(page.file)) {
            Ok(text) => {
                let mut exists = |file: &str, name: &str| tests.find(file, name);
                findings.extend(check_text(&page, &text, &mut exists));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                findings.push(page.finding(0, "does not exist"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(findings)
}

impl Page {
    fn finding(&self, line: usize, message: impl Into<String>) -> Finding {
        Finding {
            file: PathBuf::from(self.file),
            line,
            message: message.into(),
        }
    }
}

/// Checks all rows; `exists` says what is wrong with a test, if anything.
fn check_text(
    page: &Page,
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
            if header != page.columns {
                let columns = page.columns.join(" | ");
                findings.push(page.finding(number, format!("a table's columns are {columns}")));
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
        let (count, expected) = (cells.len(), page.columns.len());
        let [id, .., state, shown_by] = cells.as_slice() else {
            findings.push(page.finding(number, format!("{count} cells, expected {expected}")));
            continue;
        };
        if count != expected {
            findings.push(page.finding(number, format!("{count} cells, expected {expected}")));
            continue;
        }
        if !ids.insert((*id).to_owned()) {
            findings.push(page.finding(number, format!("{id} is there twice")));
        }
        // A state may be followed by its reason.
        let state = state.split([' ', ',', ':', ';']).next().unwrap_or_default();
        if !page.states.contains(&state) {
            let states = page.states.join(", ");
            findings.push(page.finding(
                number,
                format!("{id}: no state '{state}'; there are {states}"),
            ));
        }
        let named = named_tests(shown_by);
        if page.states.first() == Some(&state) && named.is_empty() {
            findings.push(page.finding(
                number,
                format!("{id} is {state} and names no `file.rs::test`"),
            ));
        }
        for (file, name) in named {
            if let Err(error) = exists(file, name) {
                findings.push(page.finding(number, format!("{id}: {error}")));
            }
        }
    }
    if rows == 0 {
        findings.push(page.finding(0, "has no row in it"));
    }
    findings
}

/// Returns the cells of a table's line; none for any other line. `\|` is no border.
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

/// Returns what stands in backticks as `path::test_name`, as file and name. Modules between them
/// are allowed: `path::module::test_name`.
fn named_tests(cell: &str) -> Vec<(&str, &str)> {
    let in_backticks = cell.split('`').skip(1).step_by(2);
    in_backticks
        .filter_map(|code| {
            let (file, rest) = code.split_once("::")?;
            Some((file, rest.rsplit("::").next().unwrap_or(rest)))
        })
        .collect()
}

/// The directory of the tests that every store has to pass. A macro beside it makes tests of those
/// that it lists, one a line.
const CONFORMANCE: &str = "crates/store/src/conformance";

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

    /// Returns the findings for rows below a right header, with two tests that exist.
    fn found(rows: &str) -> Vec<String> {
        let text = format!(
            "# Title\n\n| id | Requirement | state | shown by |\n|---|:--|---|---|\n{rows}\n"
        );
        let mut exists = |file: &str, name: &str| match (file, name) {
            ("a.rs", "one" | "two") => Ok(()),
            _ => Err(format!("no test '{name}' in {file}")),
        };
        check_text(&REQUIREMENTS, &text, &mut exists)
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
            ("", "no row"),
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
        let found = check_text(&REQUIREMENTS, "| a | b |\n|---|---|\n", &mut |_, _| Ok(()));
        assert!(
            found[0]
                .to_string()
                .contains("columns are id | requirement"),
            "{found:?}"
        );
    }

    #[test]
    fn a_fault_that_is_mended_names_its_test() {
        let table = |row: &str| {
            let text =
                format!("| id | fault there | state | shown by |\n|---|---|---|---|\n{row}\n");
            check_text(&KNOWN_FAULTS, &text, &mut |_, _| Ok(())).len()
        };
        assert_eq!(table("| F1 | x | mended | `a.rs::one` |"), 0);
        assert_eq!(table("| F1 | x | open: no time | |"), 0);
        assert_eq!(table("| F1 | x | mended | |"), 1);
        assert_eq!(table("| F1 | x | y | mended | `a.rs::one` |"), 1);
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
