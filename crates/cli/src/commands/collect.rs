//! `gpuwarden collect`: collects data about a node before a repair, in a directory and on a server.
//!
//! A source that fails does not affect the others, and each has limits of time and size. The cheap
//! sources come first, and each file is uploaded at once, so that some data of a node that
//! disappears meanwhile is kept.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, bail};
use jiff::{Timestamp, tz::TimeZone};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{CollectArgs, Format, InRootArgs};
use crate::exit_code;
use crate::output::{self, say};
use crate::settings::node_name;

use upload::Uploader;

mod history;
mod kernel_log;
mod programs;
mod upload;

/// Most bytes of all files together: they are on the disk or in the memory of a faulty machine, and a
/// server keeps those of many machines.
const MAX_TOTAL: u64 = 64 * 1024 * 1024;
/// Most characters of the text of a problem, which may quote any output of a program.
const MAX_PROBLEM: usize = 1_024;

/// File with the results of all sources.
const SUMMARY: &str = "summary.json";

/// All sources, in their order.
const SOURCES: [&str; 5] = [
    "explain",
    "events",
    "kernel-log",
    "nvidia-smi",
    "nvidia-bug-report",
];

/// A collection under way.
struct Collection<'a> {
    args: &'a CollectArgs,
    node: String,
    /// Time for the names of directories and files.
    stamp: String,
    directory: PathBuf,
    /// Search path for programs, from `PATH`.
    path: OsString,
    uploader: Option<Uploader>,
    /// Bytes left for further files.
    room: u64,
}

/// File of a source.
struct Collected {
    file: String,
    /// Missing part of the file, and the reason.
    cut: Option<String>,
    /// Error that the source had although it has a file.
    problem: Option<String>,
}

/// The result of one source.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SourceView {
    source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    bytes: u64,
    seconds: f64,
    /// Missing part of the file, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    cut: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    uploaded: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload_problem: Option<String>,
}

/// Result of the command, which is also the file [`SUMMARY`].
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SummaryView {
    version: &'static str,
    node: String,
    at: Timestamp,
    directory: PathBuf,
    full: bool,
    sources: Vec<SourceView>,
}

pub(super) async fn execute(args: &CollectArgs) -> anyhow::Result<u8> {
    let mut collection = Collection::begin(args)?;
    let mut terminated = signal(SignalKind::terminate())?;
    let summary = tokio::select! {
        summary = collection.collect() => summary?,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminated.recv() => bail!("ended by a signal before all was collected"),
    };
    let format = args.output.output;
    if !output::structured(format, &summary)? {
        summary.write(format)?;
    }
    Ok(summary.exit_code(args.upload.is_some()))
}

/// Runs a program of the machine in this process, for a collection in a container.
pub(super) fn in_root(args: &InRootArgs) -> anyhow::Result<u8> {
    let failed = host::program::become_below(&args.root, &args.program, &args.arguments);
    Err(failed).with_context(|| {
        let (program, root) = (args.program.display(), args.root.display());
        format!("cannot run {program} below {root}")
    })
}

// === impl Collection ===

impl<'a> Collection<'a> {
    /// Creates the directory. Only its owner may read the files, which show everything that runs on the
    /// machine.
    fn begin(args: &'a CollectArgs) -> anyhow::Result<Self> {
        let node = node_name(args.node_name.clone())?;
        let uploader = args.upload.as_deref().map(Uploader::new).transpose()?;
        let now = Timestamp::now().to_zoned(TimeZone::UTC);
        let stamp = now.strftime("%Y%m%d-%H%M%S").to_string();
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let directory = args.directory.join(format!("{node}-{stamp}"));
        fs::create_dir_all(&args.directory)
            .and_then(|()| builder.create(&directory))
            .with_context(|| format!("cannot create the directory {}", directory.display()))?;
        Ok(Self {
            args,
            node,
            stamp,
            directory,
            path: std::env::var_os("PATH").unwrap_or_default(),
            uploader,
            room: MAX_TOTAL,
        })
    }

    /// Collects one source after the other.
    async fn collect(&mut self) -> anyhow::Result<SummaryView> {
        let mut sources = Vec::new();
        for source in SOURCES {
            let begun = Instant::now();
            let found = match source {
                "explain" => history::explain(self).await,
                "events" => history::events(self).await,
                "kernel-log" => kernel_log::collect(self).await,
                "nvidia-smi" => programs::nvidia_smi(self).await,
                _ => programs::bug_report(self).await,
            };
            sources.push(self.finish(source, begun, found).await);
        }
        let summary = SummaryView {
            version: env!("CARGO_PKG_VERSION"),
            node: self.node.clone(),
            at: Timestamp::now(),
            directory: self.directory.clone(),
            full: self.args.full,
            sources,
        };
        self.write(SUMMARY, &serde_json::to_vec_pretty(&summary)?)
            .with_context(|| format!("cannot write {SUMMARY}"))?;
        if let Err(problem) = self.upload(SUMMARY).await {
            output::warning(&format!("{SUMMARY} is not uploaded: {problem}"));
        }
        Ok(summary)
    }

    /// Uploads the file of a source, and returns the source's result.
    async fn finish(
        &mut self,
        source: &'static str,
        begun: Instant,
        found: anyhow::Result<Collected>,
    ) -> SourceView {
        let mut view = SourceView {
            source,
            file: None,
            bytes: 0,
            seconds: (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0,
            cut: None,
            problem: None,
            uploaded: false,
            upload_problem: None,
        };
        match found {
            Ok(found) => {
                view.bytes = size(&self.directory.join(&found.file));
                self.room = self.room.saturating_sub(view.bytes);
                match self.upload(&found.file).await {
                    Ok(uploaded) => view.uploaded = uploaded,
                    Err(problem) => view.upload_problem = Some(short(&format!("{problem:#}"))),
                }
                view.file = Some(found.file);
                view.cut = found.cut;
                view.problem = found.problem.map(|problem| short(&problem));
            }
            Err(error) => view.problem = Some(short(&format!("{error:#}"))),
        }
        view
    }

    /// Uploads a file. Returns false if there is no server for uploads.
    async fn upload(&self, file: &str) -> anyhow::Result<bool> {
        let Some(uploader) = &self.uploader else {
            return Ok(false);
        };
        let content = fs::read(self.directory.join(file))?;
        let place = format!("{}/{}/{file}", self.node, self.stamp);
        uploader.put(&place, content).await?;
        Ok(true)
    }

    /// Returns the most bytes of a file, which has a bound of its own.
    fn bound(&self, own: u64) -> anyhow::Result<u64> {
        if self.room == 0 {
            bail!("the other files have used up the {MAX_TOTAL} bytes for all files");
        }
        Ok(own.min(self.room))
    }

    /// Creates a file for its owner only.
    fn create(&self, name: &str) -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        options.open(self.directory.join(name))
    }

    fn write(&self, name: &str, content: &[u8]) -> std::io::Result<()> {
        self.create(name)?.write_all(content)
    }

    fn remove(&self, name: &str) -> std::io::Result<()> {
        fs::remove_file(self.directory.join(name))
    }
}

// === impl Collected ===

impl Collected {
    fn whole(file: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            cut: None,
            problem: None,
        }
    }
}

// === impl SummaryView ===

impl SummaryView {
    /// Returns the exit code: unhealthy if no file was collected or, with uploads, uploaded.
    fn exit_code(&self, uploads: bool) -> u8 {
        let kept = |one: &SourceView| one.file.is_some() && (one.uploaded || !uploads);
        exit_code(self.sources.iter().any(kept))
    }

    fn write(&self, format: Format) -> anyhow::Result<()> {
        for one in &self.sources {
            let bytes = one.bytes;
            let file = match &one.file {
                Some(file) => format!("{file}, {bytes} bytes"),
                None => "nothing".to_owned(),
            };
            say!("{:<18} {file} in {:.1} s", one.source, one.seconds)?;
            let notes = [
                ("cut", &one.cut),
                ("problem", &one.problem),
                ("not uploaded", &one.upload_problem),
            ];
            for (what, text) in notes {
                if let Some(text) = text {
                    say!("{:<18} {what}: {}", "", output::plain(text))?;
                }
            }
        }
        if format == Format::Wide {
            say!("{:<18} {}", "at", output::time(self.at))?;
        }
        say!("in {}", self.directory.display())?;
        Ok(())
    }
}

/// Returns the size of a file; 0 if it does not exist.
fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |found| found.len())
}

/// Returns the beginning of a text, at most [`MAX_PROBLEM`] characters.
fn short(text: &str) -> String {
    text.trim().chars().take(MAX_PROBLEM).collect()
}

#[cfg(test)]
mod tests;
