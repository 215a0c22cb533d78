//! Checks that a test that returns early reports it with `testkit::skip`, which counts the skip,
//! and fails under CI. A test that only prints and returns counts as passed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{
    Finding, relative,
    sources::rust_files,
    tokens::{functions, parse},
};

/// Functions that report the skip before they return `None`. Functions of the same file that
/// call one of them, or [`REPORT_METHODS`], count as well.
const REPORT: [&str; 2] = ["skip", "require"];

/// Methods of the test kit, and of tests that share them, that report the skip, by type and name.
const REPORT_METHODS: [[&str; 2]; 8] = [
    ["ControlPlane", "shared"],
    ["ControlPlane", "private"],
    ["KernelLog", "lock"],
    ["Helm", "of"],
    ["Release", "cluster"],
    ["Release", "start"],
    ["Story", "new"],
    ["Machine", "new"],
];

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in rust_files(root)? {
        let source =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        findings.extend(check_file(&relative(&path, root), &source));
    }
    Ok(findings)
}

fn check_file(file: &Path, source: &str) -> Vec<Finding> {
    // Invalid Rust is reported by another rule.
    let Ok(stream) = parse(source) else {
        return Vec::new();
    };
    let functions = functions(stream);
    let mut reporting: BTreeSet<String> = REPORT.map(str::to_owned).into();
    loop {
        let more: Vec<String> = functions
            .iter()
            .filter(|function| !reporting.contains(&function.name))
            .filter(|function| reports(&words(function.body.clone()), &reporting))
            .map(|function| function.name.clone())
            .collect();
        if more.is_empty() {
            break;
        }
        reporting.extend(more);
    }
    let mut lines = Vec::new();
    for function in functions.into_iter().filter(|function| function.is_test) {
        silent_returns(function.body, false, &reporting, &mut lines);
    }
    let finding = |line| Finding {
        file: PathBuf::from(file),
        line,
        message: "a test that returns early says so: return testkit::skip(\"what is missing\")"
            .to_owned(),
    };
    lines.into_iter().map(finding).collect()
}

/// Returns the words of the tokens, including those in groups, with a placeholder for each other
/// token.
fn words(stream: TokenStream) -> Vec<String> {
    let mut words = Vec::new();
    for token in stream {
        match token {
            TokenTree::Group(group) => {
                words.push("(".to_owned());
                words.extend(self::words(group.stream()));
                words.push(")".to_owned());
            }
            TokenTree::Literal(_) => words.push("literal".to_owned()),
            other => words.push(other.to_string()),
        }
    }
    words
}

/// Returns true if a reporting function is called. A method of a value, as of an iterator, does
/// not count.
fn reports(words: &[String], reporting: &BTreeSet<String>) -> bool {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut calls = (0..words.len()).filter(|at| words.get(at + 1) == Some(&"("));
    calls.any(|at| {
        let before = |back: usize| at.checked_sub(back).map_or("", |at| words[at]);
        let of_type = [before(3), words[at]];
        (before(1) != "." && reporting.contains(words[at]))
            || (before(1) == ":" && REPORT_METHODS.contains(&of_type))
    })
}

/// Adds the lines of returns without a value and without a report before.
///
/// `reported`: true if the statement with this block has reported, as in `let Some(x) =
/// require(..) else { return }`.
fn silent_returns(
    stream: TokenStream,
    reported: bool,
    reporting: &BTreeSet<String>,
    lines: &mut Vec<usize>,
) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    // Start of the current statement, and of the one before.
    let (mut begin, mut before) = (0, 0);
    for (index, token) in tokens.iter().enumerate() {
        let next = tokens.get(index + 1).map(ToString::to_string);
        match token {
            TokenTree::Group(group) => {
                let head = words(tokens[begin..index].iter().cloned().collect());
                let is_block = group.delimiter() == Delimiter::Brace;
                silent_returns(
                    group.stream(),
                    is_block && reports(&head, reporting),
                    reporting,
                    lines,
                );
                if is_block && !matches!(next.as_deref(), Some("else" | "." | "?")) {
                    (before, begin) = (begin, index + 1);
                }
            }
            TokenTree::Punct(sign) if sign.as_char() == ';' => {
                (before, begin) = (begin, index + 1);
            }
            TokenTree::Ident(word) if word == "return" && !reported => {
                let value = tokens[index + 1..]
                    .iter()
                    .take_while(|token| !matches!(token.to_string().as_str(), ";" | ","));
                let just_said = words(tokens[before..begin].iter().cloned().collect());
                if !reports(&just_said, &REPORT.map(str::to_owned).into())
                    && matches!(
                        words(value.cloned().collect()).join("").as_str(),
                        "" | "Ok(())"
                    )
                {
                    lines.push(word.span().start().line);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(source: &str) -> Vec<usize> {
        let findings = check_file(Path::new("crates/x/tests/x.rs"), source);
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_test_that_prints_and_returns_is_found() {
        let silent = [
            "#[test]\nfn t() {\nif no() { eprintln!(\"skipped\"); return; } }",
            "#[tokio::test]\nasync fn t() -> R {\nlet Some(x) = find() else { return Ok(()); }; Ok(()) }",
            "fn find() -> Option<u8> { None }\n#[test] fn t() {\nlet Some(x) = find() else { return }; }",
            "#[test] fn t() { let a = b.skip(1);\n\nmatch find() { None => return, Some(x) => x() } }",
            "#[test] fn t() { if require(X).is_none() { return; }\n\nif other() { return; } }",
            "#[cfg(test)] mod tests { proptest! { #[test] fn t(x in 0..3) {\n\nif x == 1 { return; } } } }",
        ];
        for source in silent {
            assert_eq!(lines(source), [3], "{source}");
        }
    }

    #[test]
    fn a_test_that_reports_its_skip_is_not() {
        let reported = [
            "#[test] fn t() { if no() { return testkit::skip(\"a disk\"); } }",
            "#[tokio::test] async fn t() -> R { if no() { skip(\"root\"); return Ok(()); } Ok(()) }",
            "#[test] fn t() { let Some(x) = testkit::require(Component::Go) else { return; }; }",
            "#[test] fn t() { if require(A).is_none() || require(B).is_none() { return; } }",
            "#[tokio::test] async fn t() -> R {
                 let Some(x) = ControlPlane::shared(V).await? else { return Ok(()); }; Ok(()) }",
            "impl Disk { fn new() -> Option<Self> { skip(\"root\"); None } }
             impl Scene { fn of() -> Option<Self> { Disk::new()? } }
             #[test] fn t() { let Some(x) = Scene::of() else { return; }; }",
            "#[test] fn t() { let Ok(x) = f() else { return skip(format_args!(\"{x}\")) }; }",
            "#[test] fn t() { let f = |x| { if x { return 3; } 4 }; }",
            "fn helper() { if x() { return; } }",
        ];
        for source in reported {
            assert_eq!(lines(source), [0; 0], "{source}");
        }
    }
}
