//! `cargo xtask package`: packages for machines without Kubernetes.
//!
//! nfpm builds `.deb` and `.rpm` from `deploy/packages/nfpm.yaml`, the one list of their files. The
//! `.tar.gz` has the files of the `.deb`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use testkit::components::Component;

use crate::{
    generate::workspace_root,
    shell::{cargo, output, run as run_command, target_dir},
};

/// Lines of `examples/gpuwarden.toml` that are enabled, or differ, in the package: its service does
/// not run as root, whose default places these are.
const PLACES: [(&str, &str); 3] = [
    (
        "# data-dir = \"/var/lib/gpuwarden\"",
        "data-dir = \"/var/lib/gpuwarden\"",
    ),
    (
        "# socket = \"/var/run/nvsentinel.sock\"",
        "# The package makes /var/run/nvsentinel.sock a link to it.\n\
         socket = \"/var/run/gpuwarden/nvsentinel.sock\"",
    ),
    (
        "# device-api = \"/var/run/device-api/device.sock\"",
        "device-api = \"/var/run/device-api/device.sock\"",
    ),
];

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask package
  cargo xtask package --executable target/debug/gpuwarden --output /tmp/packages")]
pub(crate) struct Args {
    /// Package this executable for this machine's architecture, instead of building one.
    #[arg(long, value_name = "FILE")]
    executable: Option<PathBuf>,
    /// Directory for the packages [default: target/package].
    #[arg(long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,
}

/// Builds the packages and prints their paths.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Some(nfpm) = Component::Nfpm.locate()? else {
        bail!("needs {}: {}", Component::Nfpm, Component::Nfpm.hint());
    };
    let executable = match &args.executable {
        Some(file) => file.clone(),
        None => build()?,
    };
    let directory = match &args.output {
        Some(directory) => directory.clone(),
        None => target_dir()?.join("package"),
    };
    fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
    // nfpm runs in the workspace's directory.
    let directory = directory.canonicalize()?;
    let stage = tempfile::tempdir()?;
    let made_at = made_at()?;
    let glibc = fill(stage.path(), &executable, &made_at)?;

    let package = |packager: &str| {
        let mut nfpm = Command::new(&nfpm);
        nfpm.current_dir(workspace_root())
            .args(["package", "--config", "deploy/packages/nfpm.yaml"])
            .args(["--packager", packager, "--target"])
            .arg(&directory)
            .env("STAGE", stage.path())
            .env("SOURCE_DATE_EPOCH", &made_at)
            .env("PACKAGE_ARCH", debian_arch()?)
            .env("PACKAGE_VERSION", env!("CARGO_PKG_VERSION"))
            .env("PACKAGE_GLIBC", &glibc);
        let text = output(&mut nfpm)?;
        let path = text
            .lines()
            .find_map(|line| line.split_once("created package: "));
        let (_, path) = path.with_context(|| format!("nfpm names no package: {text}"))?;
        Ok::<_, anyhow::Error>(PathBuf::from(path))
    };
    let deb = package("deb")?;
    let rpm = package("rpm")?;
    let archive = directory.join(format!(
        "gpuwarden-{}-linux-{}.tar.gz",
        env!("CARGO_PKG_VERSION"),
        env::consts::ARCH
    ));
    let data = fs::File::create(&archive)?;
    let mut ar = Command::new("ar");
    run_command(ar.arg("p").arg(&deb).arg("data.tar.gz").stdout(data))?;
    for path in [deb, rpm, archive] {
        let size = fs::metadata(&path)?.len();
        println!("{} ({} kB)", path.display(), size / 1000);
    }
    Ok(())
}

/// Builds the executable for a release.
fn build() -> anyhow::Result<PathBuf> {
    let mut build = cargo();
    run_command(build.args(["build", "--release", "--locked", "--package", "gpuwarden"]))?;
    Ok(target_dir()?.join("release/gpuwarden"))
}

/// Returns the time of the files in the packages, in seconds since 1970: the last commit's, so that a
/// commit has one package.
fn made_at() -> anyhow::Result<String> {
    if let Ok(seconds) = env::var("SOURCE_DATE_EPOCH") {
        return Ok(seconds);
    }
    let mut git = Command::new("git");
    let seconds = output(
        git.current_dir(workspace_root())
            .args(["log", "-1", "--format=%ct"]),
    )
    .context("outside of a git checkout, set SOURCE_DATE_EPOCH")?;
    Ok(seconds.trim().to_owned())
}

/// Fills the directory with the stripped executable and the generated files. Returns the version of
/// the C library that the executable needs.
fn fill(stage: &Path, executable: &Path, made_at: &str) -> anyhow::Result<String> {
    let program = stage.join("gpuwarden");
    let mut strip = Command::new("strip");
    strip.args(["--remove-section=.comment", "--remove-section=.note", "-o"]);
    output(strip.arg(&program).arg(executable))?;
    let symbols = output(Command::new("objdump").arg("-T").arg(&program))?;
    let glibc = needed_glibc(&symbols)
        .with_context(|| format!("{} needs no C library", executable.display()))?;

    for directory in ["man", "completions"] {
        fs::create_dir(stage.join(directory))?;
    }
    output(
        Command::new(&program)
            .arg("man-pages")
            .arg(stage.join("man")),
    )?;
    for page in fs::read_dir(stage.join("man"))? {
        compress(&page?.path())?;
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = output(Command::new(&program).args(["completions", shell]))?;
        fs::write(stage.join("completions").join(shell), script)?;
    }

    let root = workspace_root();
    let example = fs::read_to_string(root.join("examples/gpuwarden.toml"))?;
    fs::write(stage.join("gpuwarden.toml"), with_places(&example)?)?;

    let changes = stage.join("changelog");
    fs::copy(root.join("CHANGELOG.md"), &changes)?;
    compress(&changes)?;
    let date = output(Command::new("date").args(["-u", "-R", "-d", &format!("@{made_at}")]))?;
    let changes = stage.join("changelog.Debian");
    fs::write(&changes, debian_changelog(date.trim()))?;
    compress(&changes)?;
    Ok(glibc)
}

/// Compresses a file in place, without a time in the result.
fn compress(file: &Path) -> anyhow::Result<()> {
    output(Command::new("gzip").args(["-9", "-n"]).arg(file)).map(drop)
}

/// Returns the configuration of the package, made from the example.
fn with_places(example: &str) -> anyhow::Result<String> {
    let mut text = example.to_owned();
    for (line, replacement) in PLACES {
        let count = example.lines().filter(|found| *found == line).count();
        if count != 1 {
            bail!("examples/gpuwarden.toml has {count} lines {line:?}, and has to have one");
        }
        text = text.replace(line, replacement);
    }
    Ok(text)
}

/// Returns the newest version of the C library in the output of `objdump -T`.
fn needed_glibc(symbols: &str) -> Option<String> {
    let numbers = |version: &str| -> Option<Vec<u32>> {
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    symbols
        .split(|c: char| c.is_whitespace() || "()".contains(c))
        .filter_map(|word| word.strip_prefix("GLIBC_"))
        .filter_map(|version| Some((numbers(version)?, version)))
        .max()
        .map(|(_, version)| version.to_owned())
}

fn debian_changelog(date: &str) -> String {
    format!(
        "gpuwarden ({version}-1) unstable; urgency=medium\n\n  \
         * Package of gpuwarden {version}, whose changes are in changelog.gz.\n\n \
         -- The gpuwarden authors <packages@gpuwarden.dev>  {date}\n",
        version = env!("CARGO_PKG_VERSION"),
    )
}

fn debian_arch() -> anyhow::Result<&'static str> {
    match env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("no packages for the architecture {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_has_the_lines_that_the_package_changes() {
        let example = fs::read_to_string(workspace_root().join("examples/gpuwarden.toml")).unwrap();
        let text = with_places(&example).unwrap();
        assert!(text.contains("\nsocket = \"/var/run/gpuwarden/nvsentinel.sock\"\n"));
        assert!(text.contains("\nobserve = true\n"));
        let error = with_places("listen = 1\n").unwrap_err().to_string();
        assert!(error.contains("has 0 lines"), "{error}");
    }

    #[test]
    fn versions_of_the_c_library_compare_as_numbers() {
        let symbols = "0000 DF *UND* 0000 (GLIBC_2.4) read\n0000 DF *UND* 0000 (GLIBC_2.34) open\n\
                       0000 DF *UND* 0000 (GLIBC_PRIVATE) x\n0000 DF *UND* 0000 (GCC_3.0) y\n";
        assert_eq!(needed_glibc(symbols).unwrap(), "2.34");
        assert_eq!(needed_glibc("nothing"), None);
    }
}
