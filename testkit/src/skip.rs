//! Skipping a test whose component is missing, so that it is seen.

use std::{
    env, fmt,
    fs::OpenOptions,
    io::Write as _,
    panic::Location,
    path::{Path, PathBuf},
    thread,
};

use crate::components::Component;

/// The environment variable that names the file in which skips are noted, one line
/// each; `cargo xtask test` sums them up.
pub const SKIP_FILE: &str = "GPUWARDEN_SKIP_FILE";

/// Returns the path of the component; `None` says that the calling test is to return, because this
/// machine has none: the skip has been reported.
///
/// # Panics
///
/// As [`skip`], where the component is missing, and on a setting that cannot be meant.
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

/// Reports that the calling test is about to return, because this machine lacks what it
/// needs: `needs` names that, and what to do about it. No test returns early without it;
/// `cargo xtask lint` looks for that.
///
/// A skip is printed past the capture of test output and noted in [`SKIP_FILE`].
///
/// # Panics
///
/// With `CI=true`, where nothing is skipped: what is missing fails the test.
#[track_caller]
pub fn skip(needs: impl fmt::Display) {
    let skip = format!("{} needs {needs}", test_name(Location::caller()));
    assert!(!env::var("CI").is_ok_and(|ci| ci == "true"), "{skip}");
    // Not eprintln!: libtest keeps the output of a test that passes to itself.
    let _ = writeln!(std::io::stderr(), "skipped: {skip}");
    if let Some(file) = env::var_os(SKIP_FILE) {
        note(&skip, Path::new(&file));
    }
}

/// Adds a line to the file; lines of tests that run side by side stay whole.
fn note(skip: &str, file: &Path) {
    // One write, and one line of it, whatever the output of a program that failed said.
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

/// Returns the name of the test: libtest names the thread after it, unless it runs tests on the
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
