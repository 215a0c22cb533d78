//! `cargo xtask lint`: rules of this repository that the compiler does not know.
//!
//! ARCHITECTURE.md gives the reasons. Each rule is a module that returns [`Finding`]s. All
//! findings are printed, and one is enough to fail.

mod containerfile;
mod dependencies;
mod floors;
mod modules;
mod pages;
mod prose;
mod requirements;
mod skips;
mod sources;
mod tokens;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use crate::{
    generate::workspace_root,
    shell::{cargo, output},
};

/// Platform whose dependencies are checked.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// Path relative to the repository.
    file: PathBuf,
    /// Line number; 0 for the whole file.
    line: usize,
    message: String,
}

/// Checks all rules and prints the findings. Fails if there are any.
pub(crate) fn run() -> anyhow::Result<()> {
    let root = workspace_root();
    let metadata = ["metadata", "--no-deps", "--format-version=1"];
    let metadata = serde_json::from_str(&output(cargo().args(metadata))?)
        .context("read the output of cargo metadata")?;
    let mut findings = floors::check(&metadata, &root);
    // For other platforms, cargo would have to fetch more sources first.
    let all = [
        "metadata",
        "--locked",
        "--format-version=1",
        "--filter-platform",
        PLATFORM,
    ];
    let all = serde_json::from_str(&output(cargo().args(all))?)
        .context("read the output of cargo metadata")?;
    let lists = fs::read_to_string(root.join("deny.toml")).context("read deny.toml")?;
    findings.extend(dependencies::check(&all, &lists));
    findings.extend(sources::check(&root)?);
    findings.extend(modules::check(&root)?);
    findings.extend(prose::check(&root)?);
    findings.extend(requirements::check(&root)?);
    findings.extend(pages::check(&root)?);
    findings.extend(skips::check(&root)?);
    findings.extend(containerfile::check(&root)?);
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        1 => bail!("1 finding"),
        count => bail!("{count} findings"),
    }
}

/// Returns the path relative to the root of the repository.
fn relative(path: &Path, root: &Path) -> PathBuf {
    path.strip_prefix(root).unwrap_or(path).to_owned()
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.message)
    }
}
