//! Runs files of tests: of a policy, or of rules.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use trial::cases::{CaseResult, Cases};

use crate::args::Format;
use crate::exit_code;
use crate::output::{self, Colour, say};

/// Extension of the file of tests beside a policy or rules.
const BESIDE_FIRST: &str = "test.yaml";
/// All extensions of files of tests.
const BESIDE: [&str; 3] = [BESIDE_FIRST, "test.yml", "test.toml"];

/// Result of a test, and its file.
#[derive(Serialize)]
struct Ran {
    file: String,
    #[serde(flatten)]
    outcome: CaseResult,
}

/// Runs the tests of files, or of the file beside `source`. Returns the exit code.
pub(super) fn execute<C: DeserializeOwned>(
    source: &str,
    tests: &[PathBuf],
    run: impl Fn(&C) -> CaseResult,
    format: Format,
) -> anyhow::Result<u8> {
    let files = if tests.is_empty() {
        vec![beside(source)?]
    } else {
        tests.to_vec()
    };
    let mut ran = Vec::new();
    for file in &files {
        for case in read::<C>(file)?.tests {
            ran.push(Ran {
                file: file.display().to_string(),
                outcome: run(&case),
            });
        }
    }
    if ran.is_empty() {
        let files = files.iter().map(|file| file.display().to_string());
        bail!(
            "{}: there are no tests in it",
            files.collect::<Vec<_>>().join(", ")
        );
    }
    let failed = ran.iter().filter(|one| !one.passed()).count();
    if !output::structured(format, &ran)? {
        for one in &ran {
            one.write()?;
        }
        say!("\n{} passed, {failed} failed", ran.len() - failed)?;
    }
    Ok(exit_code(failed == 0))
}

/// Returns the file of tests beside a file: `policy.test.yaml` for `policy.toml`.
fn beside(source: &str) -> anyhow::Result<PathBuf> {
    let tested = Path::new(source);
    let candidates = BESIDE.map(|ending| tested.with_extension(ending));
    match candidates.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => bail!(
            "there are no tests beside {source}: {} does not exist; name a file of tests",
            tested.with_extension(BESIDE_FIRST).display()
        ),
    }
}

fn read<C: DeserializeOwned>(path: &Path) -> anyhow::Result<Cases<C>> {
    let shown = path.display();
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read the tests {shown}"))?;
    let is_toml = path.extension().is_some_and(|ending| ending == "toml");
    let read = if is_toml {
        toml::from_str(&text).map_err(anyhow::Error::from)
    } else {
        serde_saphyr::from_str(&text).map_err(anyhow::Error::from)
    };
    read.with_context(|| format!("{shown} is not a file of tests"))
}

// === impl Ran ===

impl Ran {
    fn passed(&self) -> bool {
        self.outcome.error.is_none() && self.outcome.differences.is_empty()
    }

    fn write(&self) -> anyhow::Result<()> {
        let Self { file, outcome } = self;
        let word = if self.passed() {
            output::colour("ok  ", Colour::Green)
        } else {
            output::colour("FAIL", Colour::Red)
        };
        say!("{word}  {file}: {}", output::plain(&outcome.name))?;
        if let Some(error) = &outcome.error {
            say!("        {}", output::plain(error))?;
        }
        for one in &outcome.differences {
            say!("        {}", one.what)?;
            let minus = output::colour(&format!("- {}", one.expected), Colour::Red);
            let plus = output::colour(&format!("+ {}", one.found), Colour::Green);
            say!("        {minus}  expected")?;
            say!("        {plus}  found")?;
        }
        if !outcome.differences.is_empty() {
            for reason in &outcome.because {
                say!("        because {}", output::plain(reason))?;
            }
        }
        Ok(())
    }
}
