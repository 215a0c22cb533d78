//! Output of the vendor's programs about the GPUs.
//!
//! The programs run as child processes, since they may hang in the driver of a faulty machine. Of the
//! environment they get only the paths of programs and libraries: their output leaves the machine,
//! and must not contain secrets.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use host::program::{self, Bounds, Ended, STANDARD_PATH};
use tempfile::{Builder, TempDir};
use tokio::process::Command;

use super::{Collected, Collection, size};

/// Most bytes of the output of `nvidia-smi -q`: 16 GPUs take a few hundred kilobytes.
const MAX_SMI: u64 = 4 * 1024 * 1024;
/// Longest time for `nvidia-smi -q`; after that it hangs in the driver.
const SMI_TIME: Duration = Duration::from_secs(30);
/// Most bytes of a bug report, which is compressed; usual are some megabytes.
const MAX_REPORT: u64 = 48 * 1024 * 1024;
/// Most bytes at the end of a program's messages that an error quotes.
const QUOTED: u64 = 400;

/// A program of the machine, and the directory that it may write to.
struct Program {
    command: Command,
    scratch: TempDir,
    /// Path of `scratch` inside the program's root.
    seen: PathBuf,
}

pub(super) async fn nvidia_smi(collection: &Collection<'_>) -> anyhow::Result<Collected> {
    const FILE: &str = "nvidia-smi.txt";
    let bound = collection.bound(MAX_SMI)?;
    let mut program = Program::of("nvidia-smi", collection)?;
    let messages = program.messages()?;
    program.command.arg("-q").stderr(messages);
    program.command.stdout(collection.create(FILE)?);
    let ended = program.run(SMI_TIME, bound).await?;
    if size(&collection.directory.join(FILE)) == 0 {
        collection.remove(FILE)?;
        bail!(
            program
                .problem(ended, SMI_TIME)
                .unwrap_or_else(|| "it has no output".to_owned())
        );
    }
    program.collected(collection, FILE.to_owned(), ended, SMI_TIME, bound)
}

pub(super) async fn bug_report(collection: &Collection<'_>) -> anyhow::Result<Collected> {
    let bound = collection.bound(MAX_REPORT)?;
    let time = Duration::from_secs(collection.args.timeout);
    let mut program = Program::of("nvidia-bug-report.sh", collection)?;
    if !collection.args.full {
        program.command.arg("--safe-mode");
    }
    let messages = program.messages()?;
    program
        .command
        .arg("--output-file")
        .arg(program.seen.join("report.log"));
    program
        .command
        .stdout(messages.try_clone()?)
        .stderr(messages);
    let ended = program.run(time, bound).await?;
    // The script compresses its report if gzip is installed, and names it accordingly.
    let report = ["report.log.gz", "report.log"]
        .into_iter()
        .find_map(|name| {
            let path = program.scratch.path().join(name);
            (size(&path) > 0).then_some((path, name))
        });
    let Some((path, name)) = report else {
        bail!(
            program
                .problem(ended, time)
                .unwrap_or_else(|| "it has written no report".to_owned())
        );
    };
    let ending = name.trim_start_matches("report");
    let file = format!(
        "nvidia-bug-report-{}-{}{ending}",
        collection.node, collection.stamp
    );
    let mut from = File::open(path)?.take(bound);
    std::io::copy(&mut from, &mut collection.create(&file)?)?;
    program.collected(collection, file, ended, time, bound)
}

// === impl Program ===

impl Program {
    /// Finds a program and prepares its command.
    fn of(name: &str, collection: &Collection<'_>) -> anyhow::Result<Self> {
        let root = collection.args.host_root.as_deref();
        let root = root.map(std::path::absolute).transpose()?;
        let root = root.as_deref();
        let Some(found) = program::find(name, &collection.path, root) else {
            match root {
                Some(root) => bail!("there is no {name} below {}", root.display()),
                None => bail!(
                    "there is no {name}: in a container, --host-root names the machine's root"
                ),
            }
        };
        let place = match root {
            Some(root) => program::below(root, Path::new("/tmp")),
            None => collection.directory.clone(),
        };
        let scratch = Builder::new().prefix("gpuwarden-").tempdir_in(&place);
        let scratch = scratch.with_context(|| format!("cannot write to {}", place.display()))?;
        let seen = match root {
            Some(root) => Path::new("/").join(scratch.path().strip_prefix(root)?),
            None => std::path::absolute(scratch.path())?,
        };
        let mut command = match root {
            Some(root) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("in-root").arg(root).arg(found);
                command
            }
            None => Command::new(found),
        };
        command.env_clear().current_dir(scratch.path());
        command.env("LANG", "C").env("HOME", "/");
        if root.is_some() {
            command.env("PATH", STANDARD_PATH);
        } else {
            let libraries = std::env::var_os("LD_LIBRARY_PATH");
            command.env("PATH", &collection.path);
            command.envs(libraries.map(|libraries| ("LD_LIBRARY_PATH", libraries)));
        }
        Ok(Self {
            command,
            scratch,
            seen,
        })
    }

    /// Creates the file for the program's messages.
    fn messages(&self) -> std::io::Result<File> {
        File::create(self.scratch.path().join("messages"))
    }

    async fn run(&mut self, time: Duration, bound: u64) -> anyhow::Result<Ended> {
        let bounds = Bounds {
            time,
            file_bytes: bound,
        };
        let ended = program::run(&mut self.command, bounds).await;
        ended.context("it cannot be run")
    }

    /// Returns the error that the program ended with, if any, and the end of its messages.
    fn problem(&self, ended: Ended, time: Duration) -> Option<String> {
        let how = match ended {
            Ended::Exited(status) if status.success() => return None,
            Ended::Exited(status) => format!("it ended with {status}"),
            Ended::Killed => format!("it was killed after {} s", time.as_secs()),
        };
        Some(match self.last_words() {
            Ok(words) if !words.is_empty() => format!("{how}, with the output: {words}"),
            _ => how,
        })
    }

    fn last_words(&self) -> std::io::Result<String> {
        let path = self.scratch.path().join("messages");
        let mut file = File::open(&path)?;
        let from = fs::metadata(&path)?.len().saturating_sub(QUOTED);
        file.seek(SeekFrom::Start(from))?;
        let mut words = Vec::new();
        file.take(QUOTED).read_to_end(&mut words)?;
        Ok(String::from_utf8_lossy(&words).trim().to_owned())
    }

    /// Returns the file of the program's result, and its missing part.
    fn collected(
        &self,
        collection: &Collection<'_>,
        file: String,
        ended: Ended,
        time: Duration,
        bound: u64,
    ) -> anyhow::Result<Collected> {
        let path = collection.directory.join(&file);
        let cut = if size(&path) >= bound {
            // The program may have written more before it reached its limit.
            File::options().write(true).open(&path)?.set_len(bound)?;
            Some(format!("the first {bound} bytes"))
        } else {
            (ended == Ended::Killed).then(|| "written until it was killed".to_owned())
        };
        Ok(Collected {
            file,
            cut,
            problem: self.problem(ended, time),
        })
    }
}
