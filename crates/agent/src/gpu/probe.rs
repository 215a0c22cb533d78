//! Runs a child process that calls the GPU driver or DCGM ([`host::gpu_probe`]), and forwards
//! its messages. A child that hangs, crashes or sends invalid messages is killed, which is
//! reported with the call that was in progress, and another child is started.

mod stuck;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use host::gpu_probe::{PROTOCOL, ProbeSettings, Said};
use host::program::ProcessGroup;
use runtime::backoff::Backoff;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::Seen;
use stuck::Stuck;

pub(super) use stuck::MOST as MOST_STUCK;

/// Timeout of one call of the driver. Drivers are slow when the machine is busy: calls of 45
/// seconds have been observed.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Longest line of a child: sixteen GPUs with all their links and partitions take a tenth of
/// it.
const MAX_LINE_BYTES: u64 = 4 << 20;
/// Longest wait for a killed child. A child that still exists then is blocked within the
/// kernel.
const KILLED: Duration = Duration::from_secs(5);
/// First and longest pause before another child is started.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Description of the time before a child's first message, as when it hangs while it opens the
/// library.
const START: &str = "the start of the probe";
/// Most characters of an invalid line that are shown.
const MAX_SHOWN: usize = 80;

#[derive(Clone, Debug)]
pub struct ProbeConfig {
    /// Path of the program: gpuwarden itself.
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Interval between two polls of the child, during which it sends nothing.
    pub interval: Duration,
    /// Timeout of a child while it calls the driver: [`DEADLINE`].
    pub deadline: Duration,
}

/// Library call that a child has announced, with the GPU's index; `None` between two polls.
#[derive(Debug)]
struct Doing(Option<(String, Option<u32>)>);

/// Reason to stop reading from a child.
enum End {
    /// The receiver of the messages is gone.
    ReceiverGone,
    /// The child sent nothing for this long.
    Silent(Duration),
    /// The child closed its output.
    Closed,
    /// The child reported that it cannot continue.
    Reported(String),
    /// The child sent an invalid message.
    Garbled(String),
}

// === impl ProbeConfig ===

impl ProbeConfig {
    /// Returns the configuration to run this program as the child with these settings.
    pub fn of(settings: &ProbeSettings, deadline: Duration) -> serde_json::Result<Self> {
        let argument = serde_json::to_string(settings)?;
        Ok(Self {
            // Valid even if the file was replaced since this process started.
            program: PathBuf::from("/proc/self/exe"),
            arguments: [OsString::from("gpu-probe"), argument.into()].into(),
            interval: Duration::from_millis(settings.interval_ms),
            deadline,
        })
    }
}

/// Runs one child after the other, until the receiver of their messages is gone.
pub async fn watch(config: ProbeConfig, seen: mpsc::Sender<Seen>) {
    let mut stuck = Stuck::default();
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    while !seen.is_closed() {
        let (reason, is_said) = if stuck.has_room() {
            run(&config, &seen, &mut stuck, &mut backoff).await
        } else {
            let reason = "no other probe is started while these cannot be killed";
            (reason.to_owned(), false)
        };
        let stuck = stuck.count();
        // Only a debug line: the monitor logs the reason once, if it matters.
        tracing::debug!(reason, stuck, "cannot query the GPUs");
        let blind = Seen::Blind {
            reason,
            is_said,
            stuck,
        };
        if seen.send(blind).await.is_err() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            () = seen.closed() => {}
        }
    }
}

/// Runs one child to its end. Returns the reason, and true if the child reported the reason
/// itself.
async fn run(
    config: &ProbeConfig,
    seen: &mpsc::Sender<Seen>,
    stuck: &mut Stuck,
    backoff: &mut Backoff,
) -> (String, bool) {
    let mut child = match spawn(config) {
        Ok(child) => child,
        Err(error) => {
            let reason = format!("cannot start {}: {error}", config.program.display());
            return (reason, false);
        }
    };
    // Dropped on cancellation too, which also ends processes that a library has started in the
    // child.
    let group = ProcessGroup::of(&child);
    let mut doing = Doing(Some((START.to_owned(), None)));
    let end = match child.stdout.take() {
        Some(output) => forward(config, output, seen, &mut doing, backoff).await,
        None => End::Closed,
    };
    if matches!(end, End::Closed) {
        // The child has ended, or is about to: its exit status is worth a short wait.
        let _ = timeout(KILLED, child.wait()).await;
    }
    let status = finish(child, group, stuck).await;
    let is_said = matches!(end, End::Reported(_));
    let reason = match end {
        End::ReceiverGone => "not needed".to_owned(),
        End::Reported(why) | End::Garbled(why) => why,
        End::Silent(length) => {
            let seconds = length.as_secs_f64();
            let left = if status.is_none() {
                "; the probe cannot be killed"
            } else {
                ""
            };
            format!("no answer for {seconds} s {doing}{left}")
        }
        End::Closed => match status {
            Some(status) => format!("the probe ended ({status}) {doing}"),
            None => format!("the probe closed its output and cannot be killed {doing}"),
        },
    };
    (reason, is_said)
}

fn spawn(config: &ProbeConfig) -> io::Result<Child> {
    Command::new(&config.program)
        .args(&config.arguments)
        // The child ends when this closes, in whatever way the agent ends.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Forwards a child's messages until it ends, times out, or the receiver is gone.
async fn forward(
    config: &ProbeConfig,
    output: ChildStdout,
    seen: &mpsc::Sender<Seen>,
    doing: &mut Doing,
    backoff: &mut Backoff,
) -> End {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    let mut silence = config.deadline + config.interval;
    let mut due = Instant::now() + silence;
    loop {
        line.clear();
        let read = tokio::select! {
            read = timeout_at(due, read_line(&mut output, &mut line)) => read,
            () = seen.closed() => return End::ReceiverGone,
        };
        match read {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return End::Closed,
            Ok(Err(error)) => return End::Garbled(format!("cannot read from the probe: {error}")),
            Err(_) => return End::Silent(silence),
        }
        let Ok(message) = serde_json::from_slice(&line) else {
            return End::Garbled(format!("the probe sent {:?}", shown(&line)));
        };
        let is_event = matches!(message, Said::Event(_));
        if !is_event {
            doing.0 = None;
        }
        match convert(message, doing, backoff) {
            Ok(None) => {}
            Ok(Some(message)) => {
                if seen.send(message).await.is_err() {
                    return End::ReceiverGone;
                }
            }
            Err(end) => return end,
        }
        // An event proves nothing: another thread of the child sends events, even while a call
        // hangs.
        if !is_event {
            silence = match doing.0 {
                Some(_) => config.deadline,
                None => config.deadline + config.interval,
            };
            due = Instant::now() + silence;
        }
    }
}

/// Reads one line; returns false at the end.
async fn read_line(output: &mut BufReader<ChildStdout>, line: &mut Vec<u8>) -> io::Result<bool> {
    let read = output.take(MAX_LINE_BYTES).read_until(b'\n', line).await?;
    if read > 0 && line.last() != Some(&b'\n') && read as u64 == MAX_LINE_BYTES {
        let error = format!("a line is longer than {MAX_LINE_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(read > 0)
}

/// Converts a message of the child, if it is about the GPUs; fails if the child is of no
/// further use.
fn convert(message: Said, doing: &mut Doing, backoff: &mut Backoff) -> Result<Option<Seen>, End> {
    match message {
        Said::Hello { protocol, library } if protocol == PROTOCOL => {
            Ok(Some(Seen::Library(library)))
        }
        Said::Hello { protocol, .. } => Err(End::Garbled(format!(
            "the probe has protocol version {protocol}, this gpuwarden {PROTOCOL}: restart gpuwarden"
        ))),
        Said::Doing { call, gpu } => {
            doing.0 = Some((call.into_owned(), gpu));
            Ok(None)
        }
        Said::Inventory(inventory) => Ok(Some(Seen::Inventory(inventory))),
        Said::Readings(readings) => {
            backoff.reset();
            Ok(Some(Seen::Readings(readings)))
        }
        Said::Event(event) => Ok(Some(Seen::Event(event))),
        Said::Dcgm(look) => {
            backoff.reset();
            Ok(Some(Seen::Dcgm(look)))
        }
        Said::Cannot(why) => Err(End::Reported(why)),
    }
}

/// Returns the start of a line, for an error.
fn shown(line: &[u8]) -> String {
    let line = String::from_utf8_lossy(line.trim_ascii_end());
    line.chars().take(MAX_SHOWN).collect()
}

/// Ends a child and returns its exit status; keeps the child if it cannot be killed.
async fn finish(mut child: Child, group: ProcessGroup, stuck: &mut Stuck) -> Option<ExitStatus> {
    // The output is closed, and the input closes now, so the child may end by itself.
    drop(child.stdin.take());
    drop(group);
    if let Ok(Ok(status)) = timeout(KILLED, child.wait()).await {
        return Some(status);
    }
    stuck.keep(child);
    None
}

// === impl Doing ===

impl std::fmt::Display for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            None => write!(f, "between two polls"),
            Some((call, None)) => write!(f, "from {call}"),
            Some((call, Some(gpu))) => write!(f, "from {call} of GPU {gpu}"),
        }
    }
}

#[cfg(test)]
mod tests;
