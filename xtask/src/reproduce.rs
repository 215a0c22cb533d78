//! `cargo xtask reproduce`: builds the program twice, in two directories, and compares the bytes.
//!
//! [`build`] is also the build of the published program: its flags replace every directory of the
//! machine by a fixed name, in Rust's panic locations and debug information and in those of the
//! bundled C code (`SQLite`, jemalloc, ring).

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::{
    generate::workspace_root,
    shell::{cargo, output},
};

/// Names of the source and target directories in the program, as in the build stage of
/// `Containerfile`.
const SOURCE: &str = "/src";
const TARGET: &str = "/src/target";
/// Name of cargo's home in the program, as in the `rust` images.
const CARGO_HOME: &str = "/usr/local/cargo";

/// Number of bytes that are shown of each file around the first difference.
const SHOWN: usize = 160;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask reproduce
  cargo xtask reproduce --profile dev --package gpuwarden-fakes")]
pub(crate) struct Args {
    /// Cargo profile, such as release or dev.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Package whose programs and shared libraries are compared.
    #[arg(long, default_value = "gpuwarden")]
    package: String,
    /// Directory for the two copies and their builds (several GB), which are removed afterwards
    /// [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
}

/// Builds the package in two copies of the repository. Fails if one file differs.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let work = match &args.work {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    }
    .context("make a directory for the copies")?;
    // The lengths of the paths differ too: a path that is replaced by one of equal length would
    // hide an offset.
    let copies = [("one", "target"), ("the-second-copy", "other-target")];
    for (name, _) in copies {
        copy_repository(&work.path().join(name))?;
    }
    let mut built = Vec::new();
    for (name, target) in copies {
        let root = work.path().join(name);
        let target = work.path().join(target);
        println!("building {} in {}", args.package, root.display());
        let files = build(&root, &target, &args.profile, &args.package)?;
        let kept = work.path().join(format!("built-{name}"));
        fs::create_dir(&kept)?;
        let mut names = Vec::new();
        for file in files {
            let name = file.file_name().context("a file without a name")?;
            fs::copy(&file, kept.join(name)).with_context(|| format!("copy {}", file.display()))?;
            names.push(name.to_owned());
        }
        // The other build would need as much room again.
        fs::remove_dir_all(&target)?;
        built.push((kept, names));
    }
    let [(one, names), (other, _)] = built.as_slice() else {
        bail!("two builds are compared");
    };
    if names.is_empty() {
        bail!("{} has no program and no shared library", args.package);
    }
    let home = cargo_home()?;
    for name in names {
        compare(&one.join(name), &other.join(name))?;
        // Equal in both builds, so the comparison does not find them.
        for directory in [home.as_path(), &standard_library()?.0, work.path()] {
            names_no_directory(&one.join(name), directory)?;
        }
    }
    Ok(())
}

/// Builds the programs and shared libraries of a package in the repository at `root`. Returns
/// their paths. No path of this machine is in them.
pub(crate) fn build(
    root: &Path,
    target: &Path,
    profile: &str,
    package: &str,
) -> anyhow::Result<Vec<PathBuf>> {
    // The last prefix that matches counts: the target directory may be below the source.
    let mut prefixes = vec![
        (cargo_home()?, CARGO_HOME.to_owned()),
        (root.to_owned(), SOURCE.to_owned()),
        (target.to_owned(), TARGET.to_owned()),
    ];
    let flags = |flag, prefixes: &[(PathBuf, String)]| -> Vec<OsString> {
        let prefixes = prefixes.iter();
        prefixes.map(|(from, to)| mapping(flag, from, to)).collect()
    };
    let c_flags = flags("-ffile-prefix-map=", &prefixes);
    prefixes.push(standard_library()?);
    let rust_flags = flags("--remap-path-prefix=", &prefixes);
    let mut command = cargo();
    command.current_dir(root);
    command.args([
        "build",
        "--locked",
        "--message-format=json-render-diagnostics",
    ]);
    command.args(["--profile", profile, "--package", package]);
    command.arg("--target-dir").arg(target);
    // Encoded flags take precedence over those of the user's environment and configuration.
    command.env(
        "CARGO_ENCODED_RUSTFLAGS",
        rust_flags.join("\u{1f}".as_ref()),
    );
    command.env("CFLAGS", c_flags.join(" ".as_ref()));
    command.env("CARGO_INCREMENTAL", "0");
    let messages = output(&mut command)?;
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages
        .flat_map(|message| artifacts(&message, package))
        .collect())
}

/// Returns the directory of cargo's registry.
fn cargo_home() -> anyhow::Result<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    home.context("no cargo home: set HOME or CARGO_HOME")
}

/// Returns a flag that replaces a prefix of paths.
fn mapping(flag: &str, from: &Path, to: &str) -> OsString {
    let mut text = OsString::from(flag);
    text.push(from);
    text.push("=");
    text.push(to);
    text
}

/// Returns the directory of the standard library's sources and their name in programs.
///
/// The name is the one that the distributed standard library has in its own paths. With the
/// component rust-src, the compiler writes the directory instead.
fn standard_library() -> anyhow::Result<(PathBuf, String)> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let root = workspace_root();
    let ask = |args: &[&str]| output(Command::new(&rustc).args(args).current_dir(&root));
    let sysroot = ask(&["--print", "sysroot"])?;
    let version = ask(&["--version", "--verbose"])?;
    let commit = version
        .lines()
        .find_map(|line| line.strip_prefix("commit-hash: "))
        .context("rustc --version names no commit")?;
    let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
    Ok((sources, format!("/rustc/{commit}")))
}

/// Returns the programs and shared libraries of `package` that a message of cargo names.
fn artifacts(message: &Value, package: &str) -> Vec<PathBuf> {
    let of_package = message["reason"] == "compiler-artifact"
        && message["package_id"].as_str().is_some_and(|id| {
            id.contains(&format!("/{package}#")) || id.contains(&format!("#{package}@"))
        });
    let files = message["filenames"].as_array().filter(|_| of_package);
    let files = files.into_iter().flatten().filter_map(Value::as_str);
    let executable = message["executable"].as_str();
    let files = files.filter(|file| {
        let library = Path::new(file).extension().is_some_and(|end| end == "so");
        library || Some(*file) == executable
    });
    files.map(PathBuf::from).collect()
}

/// Copies the files of the repository that git knows or does not ignore.
fn copy_repository(to: &Path) -> anyhow::Result<()> {
    let root = workspace_root();
    let mut git = Command::new("git");
    git.current_dir(&root);
    let list = output(git.args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    for file in list.split_terminator('\0') {
        let (from, to) = (root.join(file), to.join(file));
        // Deleted files stay listed until the deletion is staged.
        if !from.exists() {
            continue;
        }
        let parent = to.parent().context("a file without a directory")?;
        fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
        fs::copy(&from, &to).with_context(|| format!("copy {}", from.display()))?;
    }
    Ok(())
}

/// Fails if the files differ; the error shows their texts around the first difference.
fn compare(one: &Path, other: &Path) -> anyhow::Result<()> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    let (left, right) = (read(one)?, read(other)?);
    let name = one.file_name().unwrap_or_default().display();
    let first = left.iter().zip(&right).position(|(a, b)| a != b);
    if first.is_none() && left.len() == right.len() {
        let sum = output(Command::new("sha256sum").arg("--binary").arg(one))?;
        let sum = sum.split_whitespace().next().unwrap_or_default();
        println!("{name}: the same {} bytes twice, SHA-256 {sum}", left.len());
        return Ok(());
    }
    let at = first.unwrap_or(left.len().min(right.len()));
    bail!(
        "{name} differs between two builds: {} and {} bytes, first at byte {at}\n  {}\n  {}",
        left.len(),
        right.len(),
        shown(&left, at),
        shown(&right, at)
    )
}

/// Fails if the file has the path of a directory in it.
fn names_no_directory(file: &Path, directory: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let path = directory.as_os_str().as_encoded_bytes();
    match bytes.windows(path.len()).position(|window| window == path) {
        None => Ok(()),
        Some(at) => bail!(
            "{} has a path of this machine at byte {at}:\n  {}",
            file.display(),
            shown(&bytes, at)
        ),
    }
}

/// Returns the bytes around a position as text.
fn shown(bytes: &[u8], at: usize) -> String {
    let start = at.saturating_sub(SHOWN / 2);
    let end = bytes.len().min(start + SHOWN);
    let around = bytes.get(start..end).unwrap_or_default();
    around.escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_shown_with_its_surroundings() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let one = file("one", "built in /work/one");
        compare(&one, &file("same", "built in /work/one")).unwrap();
        for other in ["built in /work/two", "built in /work/one/more"] {
            let error = compare(&one, &file("other", other))
                .unwrap_err()
                .to_string();
            assert!(error.contains(other), "{error}");
        }
        names_no_directory(&one, Path::new("/work/two")).unwrap();
        let error = names_no_directory(&one, Path::new("/work/one")).unwrap_err();
        assert!(error.to_string().contains("built in /work/one"), "{error}");
    }

    #[test]
    fn only_programs_and_libraries_of_the_package_count() {
        let message = |id: &str, files: &[&str], executable: Option<&str>| {
            serde_json::json!({
                "reason": "compiler-artifact", "package_id": id, "filenames": files,
                "executable": executable,
            })
        };
        let id = "path+file:///a/crates/gpuwarden#0.1.0";
        let program = message(id, &["/t/gpuwarden"], Some("/t/gpuwarden"));
        assert_eq!(
            artifacts(&program, "gpuwarden"),
            [Path::new("/t/gpuwarden")]
        );
        let id = "path+file:///a/fakes#gpuwarden-fakes@0.1.0";
        let library = message(id, &["/t/libf.so", "/t/libf.rlib"], None);
        assert_eq!(
            artifacts(&library, "gpuwarden-fakes"),
            [Path::new("/t/libf.so")]
        );
        assert!(artifacts(&library, "gpuwarden").is_empty());
    }
}
