//! Keeps a child process that talks to the GPUs' driver or to DCGM ([`host::gpu_probe`]), and hands on what it
//! says. A child that hangs, crashes or says nonsense is ended, which is told as blindness with what
//! it was doing, and another is tried.

mod stuck;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use host::gpu_probe::{PROTOCOL, ProbeSettings, Said};
use host::program::Group;
use runtime::backoff::Backoff;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::Seen;
use stuck::Stuck;

pub(super) use stuck::MOST as MOST_STUCK;

/// The longest time that a call of the driver may take. Drivers are slow when the machine is busy:
/// calls of 45 seconds have been seen.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Longest line of a child: sixteen GPUs with all their links and partitions take a tenth of it.
const MAX_LINE_BYTES: u64 = 4 << 20;
/// Longest wait for a child that was killed. One that is still there waits within the kernel.
const KILLED: Duration = Duration::from_secs(5);
/// First and longest pause before another child is tried.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The name of the time in which a child has said nothing yet, as when it hangs in opening the library.
const START: &str = "the start of the probe";
/// Most of an unreadable line that is shown (characters).
const MAX_SHOWN: usize = 80;

/// The settings of the child processes.
#[derive(Clone, Debug)]
pub struct ProbeConfig {
    /// The program: gpuwarden itself.
    pub program: PathBuf,
    /// Its arguments, which make it the child.
    pub arguments: Vec<OsString>,
    /// Pause between two looks of the child, in which it may say nothing.
    pub interval: Duration,
    /// Longest silence of a child while it calls the driver: [`DEADLINE`].
    pub deadline: Duration,
}

/// The call of the driver that a child is in, and the GPU that it is about; `None`: it is between
/// two looks.
#[derive(Debug)]
struct Doing(Option<(String, Option<u32>)>);

/// The reason why a child is not listened to any more.
enum End {
    /// Nobody wants to hear of it.
    Unwanted,
    /// It said nothing for so long.
    Silent(Duration),
    /// It closed its output.
    Closed,
    /// It said that it cannot go on.
    Said(String),
    /// It said something that it must not say.
    Garbled(String),
}

// === impl ProbeConfig ===

impl ProbeConfig {
    /// Returns how this very program is run as the child that these settings are for.
    pub fn of(settings: &ProbeSettings, deadline: Duration) -> serde_json::Result<Self> {
        let argument = serde_json::to_string(settings)?;
        Ok(Self {
            // Also where the file was replaced since this process began.
            program: PathBuf::from("/proc/self/exe"),
            arguments: [OsString::from("gpu-probe"), argument.into()].into(),
            interval: Duration::from_millis(settings.interval_ms),
            deadline,
        })
    }
}

/// Runs one child after the other, until nobody wants to hear what they see.
pub async fn watch(config: ProbeConfig, seen: mpsc::Sender<Seen>) {
    let mut stuck = Stuck::default();
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    while !seen.is_closed() {
        let (reason, is_said) = if stuck.has_room() {
            run(&config, &seen, &mut stuck, &mut backoff).await
        } else {
            let reason = "no other probe is started while these cannot be ended";
            (reason.to_owned(), false)
        };
        let stuck = stuck.count();
        // The monitor says it where it matters, and once.
        tracing::debug!(reason, stuck, "the GPUs' driver cannot be asked");
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

/// Runs one child to its end; returns why it ended, and whether it said so itself.
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
    // Dropped with the others where nobody waits any more; what a library has started in it ends, too.
    let group = Group::of(&child);
    let mut doing = Doing(Some((START.to_owned(), None)));
    let end = match child.stdout.take() {
        Some(output) => hear(config, output, seen, &mut doing, backoff).await,
        None => End::Closed,
    };
    if matches!(end, End::Closed) {
        // It has ended, or is about to: how is worth knowing.
        let _ = timeout(KILLED, child.wait()).await;
    }
    let status = finish(child, group, stuck).await;
    let is_said = matches!(end, End::Said(_));
    let reason = match end {
        End::Unwanted => "not wanted any more".to_owned(),
        End::Said(why) | End::Garbled(why) => why,
        End::Silent(length) => {
            let seconds = length.as_secs_f64();
            let left = if status.is_none() {
                "; the probe cannot be ended"
            } else {
                ""
            };
            format!("no answer for {seconds} s {doing}{left}")
        }
        End::Closed => match status {
            Some(status) => format!("the probe ended ({status}) {doing}"),
            None => format!("the probe fell silent and cannot be ended {doing}"),
        },
    };
    (reason, is_said)
}

fn spawn(config: &ProbeConfig) -> io::Result<Child> {
    Command::new(&config.program)
        .args(&config.arguments)
        // It ends when this closes, which it does when the agent ends in whatever way.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Hands on what a child says, until it ends, says nothing for too long, or is not wanted any more.
async fn hear(
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
            () = seen.closed() => return End::Unwanted,
        };
        match read {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return End::Closed,
            Ok(Err(error)) => return End::Garbled(format!("the probe cannot be heard: {error}")),
            Err(_) => return End::Silent(silence),
        }
        let Ok(said) = serde_json::from_slice(&line) else {
            return End::Garbled(format!("the probe said {:?}", shown(&line)));
        };
        let is_event = matches!(said, Said::Event(_));
        if !is_event {
            doing.0 = None;
        }
        match understand(said, doing, backoff) {
            Ok(None) => {}
            Ok(Some(seeing)) => {
                if seen.send(seeing).await.is_err() {
                    return End::Unwanted;
                }
            }
            Err(end) => return end,
        }
        // Another thread of the child tells events, also while a call hangs.
        if !is_event {
            silence = match doing.0 {
                Some(_) => config.deadline,
                None => config.deadline + config.interval,
            };
            due = Instant::now() + silence;
        }
    }
}

/// Reads one line; `false` at the end.
async fn read_line(output: &mut BufReader<ChildStdout>, line: &mut Vec<u8>) -> io::Result<bool> {
    let read = output.take(MAX_LINE_BYTES).read_until(b'\n', line).await?;
    if read > 0 && line.last() != Some(&b'\n') && read as u64 == MAX_LINE_BYTES {
        let error = format!("a line is longer than {MAX_LINE_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(read > 0)
}

/// Returns what a line tells of the GPUs, if anything; fails where the child is of no use any more.
fn understand(said: Said, doing: &mut Doing, backoff: &mut Backoff) -> Result<Option<Seen>, End> {
    match said {
        Said::Hello { protocol, library } if protocol == PROTOCOL => {
            Ok(Some(Seen::Library(library)))
        }
        Said::Hello { protocol, .. } => Err(End::Garbled(format!(
            "the probe speaks version {protocol}, this gpuwarden {PROTOCOL}: restart gpuwarden"
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
        Said::Cannot(why) => Err(End::Said(why)),
    }
}

/// Returns the beginning of a line, to be shown.
fn shown(line: &[u8]) -> String {
    let line = String::from_utf8_lossy(line.trim_ascii_end());
    line.chars().take(MAX_SHOWN).collect()
}

/// Ends a child; returns how it ended, and keeps it where it does not.
async fn finish(mut child: Child, group: Group, stuck: &mut Stuck) -> Option<ExitStatus> {
    // Its output is closed, its input closes now: it may end by itself.
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
            None => write!(f, "between two looks"),
            Some((call, None)) => write!(f, "from {call}"),
            Some((call, Some(gpu))) => write!(f, "from {call} of GPU {gpu}"),
        }
    }
}

#[cfg(test)]
mod tests;
