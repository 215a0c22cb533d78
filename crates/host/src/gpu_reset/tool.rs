//! Runs `nvidia-smi`, the driver's tool, to reset GPUs.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use std::{env, io, thread};

use diagnosis::gpu::pci_address;

use super::{POLL_INTERVAL, ResetError, ResetSettings};

const NAME: &str = "nvidia-smi";
/// Directories of the tool below a driver root; the last is that of GKE.
const BELOW_ROOT: [&str; 3] = ["usr/bin", "bin", "usr/local/bin"];
/// Directories of libraries below a driver root.
const LIBRARIES: [&str; 4] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
];
/// Most bytes of each output stream that are kept.
const MAX_OUTPUT: u64 = 64 * 1024;
/// Most characters of the output that appear in an error.
const MAX_SHOWN: usize = 300;
/// Text that follows the PCI bus id of a GPU that was reset.
const RESET: &str = "was successfully reset";

/// Outcome of a run of the tool.
#[derive(Debug)]
pub(super) struct ToolOutcome {
    /// PCI addresses of the GPUs that the tool reports as reset.
    reset: BTreeSet<String>,
    /// Reason why the tool failed; `None` on success.
    failure: Option<String>,
}

/// Returns the path of the tool.
pub(super) fn find(settings: &ResetSettings) -> Result<PathBuf, ResetError> {
    let mut candidates: Vec<PathBuf> = settings.tool.clone().into_iter().collect();
    if candidates.is_empty() {
        let root = settings.places.driver_root.as_deref();
        let below = |root: &Path| BELOW_ROOT.map(|place| root.join(place).join(NAME));
        candidates.extend(root.map(below).into_iter().flatten());
        let path = env::var_os("PATH").unwrap_or_default();
        candidates.extend(env::split_paths(&path).map(|place| place.join(NAME)));
    }
    let found = candidates.iter().find(|place| place.is_file());
    found.cloned().ok_or_else(|| {
        let tried: Vec<String> = candidates
            .iter()
            .map(|it| it.display().to_string())
            .collect();
        ResetError::NoTool(tried.join(", "))
    })
}

/// Resets the GPUs `uuids`, and no others.
pub(super) fn run(tool: &Path, uuids: &[&str], settings: &ResetSettings) -> ToolOutcome {
    let mut command = Command::new(tool);
    command.args(["--gpu-reset", "-i", &uuids.join(",")]);
    if let Some(root) = settings
        .places
        .driver_root
        .as_deref()
        .filter(|root| tool.starts_with(root))
    {
        command.env("LD_LIBRARY_PATH", libraries(root));
    }
    let spawned = (command.stdin(Stdio::null()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let ended = spawned.and_then(|child| wait(child, settings));
    match ended {
        Ok((status, text)) => ToolOutcome::read(status, &text),
        Err(error) => ToolOutcome {
            reset: BTreeSet::new(),
            failure: Some(format!("{}: {error}", tool.display())),
        },
    }
}

fn libraries(root: &Path) -> OsString {
    let places = LIBRARIES.map(|place| root.join(place));
    // A path with a colon cannot be listed. The tool may still find its libraries without the
    // variable.
    env::join_paths(places).unwrap_or_default()
}

/// Waits for the tool. Returns why it failed, if it did, and its output.
fn wait(mut child: Child, settings: &ResetSettings) -> io::Result<(Option<String>, String)> {
    let until = Instant::now() + settings.tool_time;
    let outputs = [
        child.stdout.take().map(reader),
        child.stderr.take().map(reader),
    ];
    let ended = loop {
        if let Some(status) = child.try_wait()? {
            break (!status.success()).then(|| format!("{NAME} ended with {status}"));
        }
        if Instant::now() >= until {
            // The reset may have happened all the same; the GPUs are checked in any case.
            child.kill()?;
            child.wait()?;
            let seconds = settings.tool_time.as_secs();
            break Some(format!("{NAME} did not end within {seconds} s"));
        }
        thread::sleep(POLL_INTERVAL);
    };
    let text = outputs
        .into_iter()
        .flatten()
        .map(|one| one.join().unwrap_or_default());
    Ok((ended, text.collect()))
}

/// Reads output on a thread of its own, since a full pipe would block the tool.
fn reader(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        // After a read error, the output so far is used.
        drop(from.by_ref().take(MAX_OUTPUT).read_to_end(&mut text));
        drop(io::copy(&mut from, &mut io::sink()));
        String::from_utf8_lossy(&text).into_owned()
    })
}

// === impl ToolOutcome ===

impl ToolOutcome {
    fn read(status: Option<String>, text: &str) -> Self {
        let lines = text.lines().filter(|line| line.contains(RESET));
        let words = lines.flat_map(str::split_ascii_whitespace);
        let reset = words.filter(|word| word.contains(':')).map(pci_address);
        let failure = status.map(|status| {
            let words: Vec<&str> = text.split_whitespace().collect();
            let words: String = words.join(" ").chars().take(MAX_SHOWN).collect();
            format!("{status}: {words}")
        });
        Self {
            reset: reset.collect(),
            failure,
        }
    }

    /// Returns an error if the GPU was not reset. A successful run has reset all.
    pub(super) fn of(&self, pci: &str) -> Result<(), String> {
        match &self.failure {
            Some(why) if !self.reset.contains(pci) => Err(why.clone()),
            _ => Ok(()),
        }
    }
}
