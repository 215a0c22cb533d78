//! Reported skips of tests whose component is missing.

use std::{
    env, fmt,
    fs::OpenOptions,
    io::Write as _,
    panic::Location,
    path::{Path, PathBuf},
    thread,
};

use crate::components::Component;

/// Environment variable with the name of the file that collects skips, one line each. `cargo
/// xtask test` prints a summary.
pub const SKIP_FILE: &str = "GPUWARDEN_SKIP_FILE";

/// Returns the path of the component, or `None` if this machine has none; the skip is then
/// already reported, and the calling test must return.
///
/// # Panics
///
/// As [`skip`] does if the component is missing, and for an invalid setting.
#[track_caller]
pub fn require(component: Component) -> Option<PathBuf> {
    match component.locate() {
        Ok(Some(path)) => Some(path),
        Ok(None) => {
            skip(format_args!("{component}: {}", component.hint()));
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}

/// Reports that the calling test is about to return because this machine lacks a component:
/// `needs` names the component and how to install it. No test may return early without it, which
/// `cargo xtask lint` checks.
///
/// A skip is printed past the capture of test output and appended to [`SKIP_FILE`].
///
/// # Panics
///
/// With `CI=true`, where a missing component fails the test.
#[track_caller]
pub fn skip(needs: impl fmt::Display) {
    let skip = format!("{} needs {needs}", test_name(Location::caller()));
    assert!(!env::var("CI").is_ok_and(|ci| ci == "true"), "{skip}");
    // Not `eprintln!`: libtest hides the output of a passing test.
    let _ = writeln!(std::io::stderr(), "skipped: {skip}");
    if let Some(file) = env::var_os(SKIP_FILE) {
        note(&skip, Path::new(&file));
    }
}

/// Appends a line to the file. Lines of concurrent tests stay whole.
fn note(skip: &str, file: &Path) {
    // A single write of a single line, whatever is in the text.
    let line = skip.replace('\n', " ") + "\n";
    let noted = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    assert!(
        noted.is_ok(),
        "cannot note a skip in {}: {noted:?}",
        file.display()
    );
}

/// Returns the name of the test, which libtest gives to its thread unless it runs tests on the
/// main thread.
fn test_name(caller: &Location<'_>) -> String {
    match thread::current().name() {
        Some(name) if name != "main" && !name.starts_with("tokio") => name.to_owned(),
        _ => format!("{}:{}", caller.file(), caller.line()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_one_line_that_names_test_and_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        note("a needs chromium: run\nsetup", file.path());
        note("b needs go", file.path());
        let noted = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(noted, "a needs chromium: run setup\nb needs go\n");

        let test = test_name(Location::caller());
        let expected = if thread::current().name() == Some("main") {
            "skip.rs"
        } else {
            "a_skip_"
        };
        assert!(test.contains(expected), "{test}");
    }
}
