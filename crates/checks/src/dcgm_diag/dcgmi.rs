//! Runs `dcgmi`, NVIDIA's client of the host engine, as a child process.

use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use host::program::ProcessGroup;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::result::Diagnosis;
use super::{KnownGpu, discovery};
use crate::worker::SeenGpu;

/// Most output that is read (bytes): level 4 of 16 GPUs writes several hundred thousand.
const MOST_OUTPUT: u64 = 16 << 20;
/// Time for `dcgmi` to stop its diagnosis at the host engine.
const STOP: Duration = Duration::from_secs(10);
/// Most bytes of a text of `dcgmi` that are passed on.
const MOST_TEXT: usize = 1000;

/// Messages of the host engine that mean that another client uses it (`DCGM_ST_*` of
/// `dcgm_structs.h`).
const BUSY: [(&str, &str); 3] = [
    ("already running", "DCGM_ST_DIAG_ALREADY_RUNNING"),
    ("resource is in use", "DCGM_ST_IN_USE"),
    ("resource in use", "DCGM_ST_IN_USE"),
];
/// Messages of `dcgmi` that mean that no host engine answers.
const UNREACHABLE: [&str; 3] = [
    "unable to establish a connection",
    "unable to connect",
    "connection to the host engine is not valid",
];

/// Command line and limits of `dcgmi`.
pub(super) struct Dcgmi {
    pub(super) program: PathBuf,
    pub(super) address: String,
    /// Deadline of the check.
    pub(super) until: Instant,
    /// Stops the check before its deadline.
    pub(super) stop: CancellationToken,
}

/// Reason why there is no diagnosis.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("the host engine is busy: {text}")]
    Busy { code: &'static str, text: String },
    #[error("the host engine at {address} does not answer: {text}")]
    Unreachable { address: String, text: String },
    #[error("the time is over while {doing}")]
    Late { doing: &'static str },
    #[error(
        "the host engine at {address} does not know {missing}, but {known} GPUs: it is that of another \
         node (its Service needs internalTrafficPolicy: Local), or of other GPUs of this one"
    )]
    OtherHost {
        address: String,
        missing: String,
        known: usize,
    },
    #[error("the check was stopped")]
    Stopped,
    #[error("{0}")]
    NoProgram(String),
    #[error("the diagnosis has no result: {0}")]
    Unclear(String),
}

/// Exit status and output of a run.
struct Ended {
    status: ExitStatus,
    out: String,
    errors: String,
}

// === impl Dcgmi ===

impl Dcgmi {
    /// Returns the host engine's numbers of GPUs.
    pub(super) async fn discover(&self, gpus: &[SeenGpu]) -> Result<Vec<KnownGpu>, Trouble> {
        let ended = match self.run("asking", &["discovery", "-l"]).await {
            Err(Trouble::Late { .. }) => return Err(self.unreachable("no answer in time")),
            ended => ended?,
        };
        let known = discovery::read(&ended.out);
        if known.is_empty() {
            return Err(self.trouble(&ended));
        }
        let find = |gpu: &SeenGpu| {
            let found = known.iter().find(|known| known.uuid == gpu.uuid).cloned();
            found.ok_or_else(|| Trouble::OtherHost {
                address: self.address.clone(),
                missing: gpu.uuid.clone(),
                known: known.len(),
            })
        };
        gpus.iter().map(find).collect()
    }

    /// Runs a diagnosis of GPUs.
    pub(super) async fn diagnose(
        &self,
        level: u64,
        gpus: &[KnownGpu],
    ) -> Result<Diagnosis, Trouble> {
        let level = level.to_string();
        let numbers: Vec<String> = gpus.iter().map(|gpu| gpu.number.to_string()).collect();
        let arguments = ["diag", "-r", &level, "-i", &numbers.join(","), "-j"];
        let ended = self.run("diagnosing", &arguments).await?;
        let diagnosis = Diagnosis::read(&ended.out).filter(|diagnosis| !diagnosis.tests.is_empty());
        // The exit status is ignored, since a failed test makes it an error.
        diagnosis.ok_or_else(|| self.trouble(&ended))
    }

    /// Returns the reason why there is no result, from the output.
    fn trouble(&self, ended: &Ended) -> Trouble {
        let text = format!("{} {}", ended.out.trim(), ended.errors.trim());
        let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let lower = text.to_ascii_lowercase();
        text.truncate(model::event::floor_char_boundary(&text, MOST_TEXT));
        if let Some((_, code)) = BUSY.iter().find(|(words, _)| lower.contains(words)) {
            return Trouble::Busy { code, text };
        }
        if UNREACHABLE.iter().any(|words| lower.contains(words)) {
            return self.unreachable(&text);
        }
        let status = ended.status;
        Trouble::Unclear(format!("dcgmi ended ({status}) and printed: {text}"))
    }

    fn unreachable(&self, text: &str) -> Trouble {
        Trouble::Unreachable {
            address: self.address.clone(),
            text: text.to_owned(),
        }
    }

    async fn run(&self, doing: &'static str, arguments: &[&str]) -> Result<Ended, Trouble> {
        let (command, rest) = arguments.split_first().unwrap_or((&"", &[]));
        let mut child = Command::new(&self.program)
            .args([command, "--host", &self.address])
            .args(rest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                let program = self.program.display();
                Trouble::NoProgram(format!(
                    "cannot run {program}: {error}; GPUWARDEN_DCGMI names another"
                ))
            })?;
        // Children of `dcgmi` end with it.
        let _group = ProcessGroup::of(&child);
        let out = child.stdout.take();
        let errors = child.stderr.take();
        let ended = async { tokio::join!(text(out), text(errors), child.wait()) };
        let cut = tokio::select! {
            (out, errors, status) = ended => {
                let status = status.map_err(|error| Trouble::Unclear(error.to_string()))?;
                return Ok(Ended { status, out, errors });
            }
            () = self.stop.cancelled() => Trouble::Stopped,
            () = tokio::time::sleep_until(self.until) => Trouble::Late { doing },
        };
        end(&mut child).await;
        Err(cut)
    }
}

/// Asks a child to end, so that it stops its diagnosis at the host engine, and waits for that.
async fn end(child: &mut Child) {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let Some(pid) = pid.and_then(Pid::from_raw) else {
        return;
    };
    if let Err(error) = kill_process(pid, Signal::TERM) {
        tracing::debug!(%error, "dcgmi has ended before");
    }
    if tokio::time::timeout(STOP, child.wait()).await.is_err() {
        tracing::warn!("dcgmi does not stop; its diagnosis may go on at the host engine");
    }
}

/// Reads the output of a child to its end; output beyond the limit is dropped.
async fn text(output: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut output) = output else {
        return String::new();
    };
    let mut bytes = Vec::new();
    let read = (&mut output)
        .take(MOST_OUTPUT)
        .read_to_end(&mut bytes)
        .await;
    let rest = tokio::io::copy(&mut output, &mut tokio::io::sink()).await;
    if let Some(error) = read.err().or(rest.err()) {
        let error: io::Error = error;
        tracing::debug!(%error, "the output of dcgmi cannot be read");
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

// === impl Trouble ===

impl Trouble {
    /// Returns true if another attempt may succeed.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Unreachable { .. })
    }
}
