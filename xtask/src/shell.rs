//! Execution of other programs.

use std::{
    env,
    ffi::OsStr,
    path::PathBuf,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, bail};

/// Returns the command of the cargo that runs this program.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::generate::workspace_root());
    // Variables that `cargo run` sets for this program must not affect the child cargo.
    command
        .env_remove("CARGO_MANIFEST_DIR")
        .env_remove("CARGO_PKG_NAME");
    command
}

/// Returns the target directory of cargo.
pub(crate) fn target_dir() -> anyhow::Result<PathBuf> {
    let metadata = output(cargo().args(["metadata", "--no-deps", "--format-version=1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let dir = metadata
        .get("target_directory")
        .and_then(serde_json::Value::as_str);
    Ok(dir
        .context("cargo metadata names no target directory")?
        .into())
}

/// Runs the command with its output shown. Fails if the command fails.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("run {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Runs the command and returns its standard output. If the command fails, the error quotes its
/// standard error.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = show(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {shown}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = said.trim().lines().collect();
        let tail = lines
            .get(lines.len().saturating_sub(15)..)
            .unwrap_or_default();
        bail!("{shown}: {}\n{}", output.status, tail.join("\n"));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs one step and prints its duration.
pub(crate) fn step(name: &str, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    println!("==> {name}");
    let start = Instant::now();
    work().with_context(|| name.to_owned())?;
    println!("==> {name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}
