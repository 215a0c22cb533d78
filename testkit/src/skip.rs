//! Skipping a test whose component is missing, so that it is seen.

use std::{
    env,
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

/// Where the component is; `None` says that the calling test is to return, because
/// this machine has none.
///
/// A skip is printed past the capture of test output and noted in [`SKIP_FILE`].
/// With `CI=true` nothing is skipped: a missing component fails the test.
///
/// # Panics
///
/// With `CI=true` where the component is missing, and on a setting that cannot be
/// meant: both are failures of the calling test.
#[track_caller]
pub fn require(component: Component) -> Option<PathBuf> {
    match component.locate() {
        Ok(Some(path)) => Some(path),
        Ok(None) => {
            let test = test_name(Location::caller());
            let missing = Missing { test, component };
            assert!(!env::var("CI").is_ok_and(|ci| ci == "true"), "{missing}");
            // Not eprintln!: libtest keeps the output of a test that passes to itself.
            let _ = writeln!(std::io::stderr(), "skipped: {missing}");
            if let Some(file) = env::var_os(SKIP_FILE) {
                missing.note(Path::new(&file));
            }
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}

struct Missing {
    test: String,
    component: Component,
}

/// libtest names the thread after the test, unless it runs tests on the main thread.
fn test_name(caller: &Location<'_>) -> String {
    match thread::current().name() {
        Some(name) if name != "main" && !name.starts_with("tokio") => name.to_owned(),
        _ => format!("{}:{}", caller.file(), caller.line()),
    }
}

// === impl Missing ===

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} needs {}: {}",
            self.test,
            self.component,
            self.component.hint()
        )
    }
}

impl Missing {
    fn note(&self, file: &Path) {
        let noted = OpenOptions::new()
            .append(true)
            .create(true)
            .open(file)
            .and_then(|mut file| file.write_all(format!("{self}\n").as_bytes()));
        assert!(
            noted.is_ok(),
            "cannot note a skip in {}: {noted:?}",
            file.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_names_test_component_and_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let test = test_name(Location::caller());
        Missing {
            test,
            component: Component::Chromium,
        }
        .note(file.path());
        let noted = std::fs::read_to_string(file.path()).unwrap();
        let expected = if thread::current().name() == Some("main") {
            "skip.rs"
        } else {
            "a_skip_"
        };
        assert!(noted.contains(expected), "{noted}");
        assert!(
            noted.ends_with("needs chromium: run 'cargo xtask setup'\n"),
            "{noted}"
        );
    }
}
