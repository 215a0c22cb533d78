//! Checks source files: their size, their `unsafe` code, and that pure crates neither do I/O nor
//! read a clock.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{
    Finding, relative,
    tokens::{Token, flatten_without_tests, parse, paths},
};

/// Largest number of lines of a Rust file.
const MAX_LINES: usize = 700;

/// Directories of our Rust sources.
const TREES: [&str; 6] = ["crates", "bench", "fakes", "testkit", "xtask", "fuzz"];

/// Crates, and parts of crates, that do no I/O and read no clock.
const PURE: [&str; 12] = [
    "crates/contract",
    "crates/diagnosis",
    "crates/model",
    "crates/policy",
    "crates/analysis",
    "crates/fleet",
    "crates/maintenance",
    "crates/labels",
    "crates/notices",
    "crates/preflight",
    "crates/trial",
    "crates/connector/src/transform",
];

/// The only files with unsafe code: the loaders of vendors' libraries and the files with their
/// functions in `crates/host`, and the fakes of these libraries.
const UNSAFE: [&str; 9] = [
    "crates/host/src/library.rs",
    "crates/host/src/cuda/functions.rs",
    "crates/host/src/dcgm/functions.rs",
    "crates/host/src/nccl/functions.rs",
    "crates/host/src/nvml/functions.rs",
    "fakes/src/cuda",
    "fakes/src/dcgm",
    "fakes/src/nccl",
    "fakes/src/nvml",
];

/// Paths of I/O or of a clock, as segments.
const IMPURE: [&[&str]; 9] = [
    &["std", "fs"],
    &["std", "net"],
    &["std", "process"],
    &["tokio"],
    &["kube"],
    &["rusqlite"],
    &["SystemTime", "now"],
    &["Instant", "now"],
    &["Timestamp", "now"],
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

/// Returns all our Rust files, in order, without build outputs.
pub(super) fn rust_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs: Vec<PathBuf> = TREES
        .iter()
        .map(|tree| root.join(tree))
        .filter(|dir| dir.is_dir())
        .collect();
    while let Some(dir) = dirs.pop() {
        let entries = fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))?;
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                if entry.file_name() != "target" {
                    dirs.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn check_file(file: &Path, source: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |line, message: String| {
        findings.push(Finding {
            file: file.to_owned(),
            line,
            message,
        });
    };
    let generated = file
        .components()
        .any(|part| part.as_os_str() == "generated");
    let lines = source.lines().count();
    if lines > MAX_LINES && !generated {
        find(
            0,
            format!("{lines} lines, at most {MAX_LINES}: one file holds one idea"),
        );
    }
    let stream = match parse(source) {
        Ok(stream) => stream,
        Err((line, error)) => {
            find(line, format!("no Rust: {error}"));
            return findings;
        }
    };
    let tokens = flatten_without_tests(stream);
    // The file of a module counts as part of its directory.
    if !UNSAFE
        .iter()
        .any(|place| file.with_extension("").starts_with(place) || file.starts_with(place))
    {
        for token in tokens.iter().filter(|token| token.text == "unsafe") {
            let places = UNSAFE.join(", ");
            find(token.line, format!("unsafe code outside {places}"));
        }
    }
    let is_test = file.components().any(|part| part.as_os_str() == "tests")
        || file.file_name().is_some_and(|name| name == "tests.rs");
    if PURE.iter().any(|room| file.starts_with(room)) && !generated && !is_test {
        for (line, path) in impure_paths(&tokens) {
            find(
                line,
                format!("{path}: a pure room does no I/O and reads no clock"),
            );
        }
    }
    findings
}

/// Returns the lines of impure paths, also of those inside the braces of a `use`.
fn impure_paths(tokens: &[Token]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, segments) in paths(tokens) {
        let hit = IMPURE.into_iter().find(|path| match path {
            // A crate is the first of several segments; a method may be anywhere.
            [name] => segments.first() == Some(name) && segments.len() > 1,
            ["std", ..] => segments.starts_with(path),
            _ => segments.windows(path.len()).any(|window| window == *path),
        });
        found.extend(hit.map(|path| (line, path.join("::"))));
    }
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(file: &str, source: &str) -> Vec<String> {
        let findings = check_file(Path::new(file), source);
        findings
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn a_pure_room_neither_does_io_nor_reads_a_clock() {
        let file = "crates/model/src/fault.rs";
        let impure = [
            ("use std::fs;", "std::fs"),
            ("use std::{\n    fmt,\n    fs::File,\n};", "std::fs"),
            (
                "use std::{collections::{BTreeMap}, net::IpAddr};",
                "std::net",
            ),
            ("fn f() { std::process::exit(1) }", "std::process"),
            ("fn f() { let now = SystemTime::now(); }", "SystemTime::now"),
            (
                "fn f() { let now = std::time::Instant::now(); }",
                "Instant::now",
            ),
            ("fn f() { jiff::Timestamp::now(); }", "Timestamp::now"),
            ("use tokio::sync::mpsc;", "tokio"),
            ("use kube::{Api, Client};", "kube"),
        ];
        for (source, path) in impure {
            let found = messages(file, source);
            assert!(
                found.len() == 1 && found[0].contains(path),
                "{source}: {found:?}"
            );
            assert_eq!(
                messages("crates/store/src/sqlite.rs", source),
                [""; 0],
                "{source}"
            );
        }
        let pure = [
            "use std::{fmt, time::Duration};",
            "/// As std::fs does.\nfn now(now: SystemTime) {}",
            "fn f() { fs::read(\"tokio::main\"); }",
            "struct Fs { kube: Kube, process: u32 }",
            "#[cfg(test)]\nmod tests { use std::fs; }",
        ];
        for source in pure {
            assert_eq!(messages(file, source), [""; 0], "{source}");
        }
        assert_eq!(
            messages("crates/model/src/fault/tests.rs", "use std::fs;"),
            [""; 0]
        );
    }

    #[test]
    fn a_finding_has_its_line() {
        let found = messages("crates/fleet/src/a.rs", "use std::{\n    fmt,\n    fs,\n};");
        assert!(
            found[0].starts_with("crates/fleet/src/a.rs:3: std::fs"),
            "{found:?}"
        );
    }

    #[test]
    fn unsafe_code_is_where_libraries_are_called_only() {
        let source = "fn f() { unsafe { g() } }";
        for file in [
            "crates/host/src/library.rs",
            "crates/host/src/nvml/functions.rs",
            "fakes/src/nvml.rs",
            "fakes/src/nvml/device.rs",
        ] {
            assert_eq!(messages(file, source), [""; 0], "{file}");
        }
        for file in [
            "crates/host/src/nvml.rs",
            "crates/agent/src/a.rs",
            "fakes/src/lib.rs",
        ] {
            assert_eq!(messages(file, source).len(), 1, "{file}");
        }
        assert_eq!(
            messages("crates/agent/src/a.rs", "#![forbid(unsafe_code)]"),
            [""; 0]
        );
    }

    #[test]
    fn long_files_are_found_unless_generated() {
        let long = "// line\n".repeat(MAX_LINES + 1);
        assert_eq!(messages("crates/agent/src/a.rs", &long).len(), 1);
        assert_eq!(
            messages("crates/contract/src/generated/a.rs", &long),
            [""; 0]
        );
        assert_eq!(
            messages("crates/agent/src/a.rs", &"// line\n".repeat(MAX_LINES)),
            [""; 0]
        );
    }
}
