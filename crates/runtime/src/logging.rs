//! Logs on standard error: text for a terminal, JSON lines for a collector.
//!
//! Logging never blocks or fails the process: a line that cannot be written is only counted.

use std::io::Write as _;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use crate::line_queue::LineQueue;
use crate::metrics::{Description, Kind, Metrics};

/// Longest time that the end of the process waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Queue to standard error, set when logging has started.
static STANDARD_ERROR: OnceLock<Arc<LineQueue>> = OnceLock::new();

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Writes one line of text per message.
    #[default]
    Text,
    /// Writes one JSON object per message.
    Json,
}

/// Log filter that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("log filter {filter:?} is not valid; examples: info, debug, warn,gpuwarden_agent=debug")]
pub struct FilterError {
    filter: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

/// Problem that is logged when it appears and when it changes, not on every occurrence.
#[derive(Debug, Default)]
pub struct Trouble {
    /// Problem that was logged last; `None` if there is none.
    last: Option<String>,
}

/// Starts logging for the process, panics included. A second call changes nothing.
pub fn start(filter: &str, format: LogFormat, colour: bool) -> Result<(), FilterError> {
    let filter = EnvFilter::try_new(filter).map_err(|source| FilterError {
        filter: filter.to_owned(),
        source,
    })?;
    let queue = STANDARD_ERROR.get_or_init(|| LineQueue::start("log", std::io::stderr()));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Arc::clone(queue))
        // Internal errors would be printed to standard error, which panics if that fails.
        .log_internal_errors(false);
    // Fails only if logging has been started before.
    match format {
        LogFormat::Text => drop(builder.with_ansi(colour).try_init()),
        LogFormat::Json => drop(builder.json().flatten_event(true).try_init()),
    }
    // The hook of std writes to standard error while the panicking task waits.
    std::panic::set_hook(Box::new(log_panic));
    Ok(())
}

/// Registers the metrics of the process's log.
pub fn register(metrics: &Metrics) {
    if let Some(queue) = STANDARD_ERROR.get() {
        metrics.add(&lost_lines(), queue.lost());
    }
}

/// Returns the description of the metric that [`register`] adds.
pub(crate) fn lost_lines() -> Description {
    let help = "Log lines that could not be written, or not fast enough";
    Description::new(Kind::Counter, "gpuwarden_log_lines_lost", &[], help)
}

/// Writes a final message to standard error, behind the log, and waits a moment until all lines
/// are written.
pub fn end(last_word: Option<&str>) {
    let Some(queue) = STANDARD_ERROR.get() else {
        if let Some(text) = last_word {
            // Fails only if nobody reads.
            drop(writeln!(std::io::stderr().lock(), "{text}"));
        }
        return;
    };
    if let Some(text) = last_word {
        // Cannot fail: the queue accepts the line or counts it as lost.
        drop(writeln!(&**queue, "{text}"));
    }
    queue.flush(LAST_LINES);
}

/// Writes text for a person to standard output, on its own thread: the reader may be gone or
/// slow.
pub fn tell(text: String) {
    let thread = std::thread::Builder::new().name("tell".to_owned());
    drop(thread.spawn(move || {
        let mut out = std::io::stdout().lock();
        drop(writeln!(out, "{text}").and_then(|()| out.flush()));
    }));
}

fn log_panic(info: &PanicHookInfo<'_>) {
    let backtrace = std::backtrace::Backtrace::capture();
    let text = info.to_string().replace('\n', " ");
    if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
        tracing::error!("{text}\n{backtrace}");
    } else {
        tracing::error!("{text}");
    }
}

/// Rate limit for one log line, so that a peer that can cause the line cannot fill the log.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Logged>);

/// Time of the last line that was logged, and the number suppressed since.
#[derive(Debug, Default)]
struct Logged {
    last: Option<Instant>,
    suppressed: u64,
}

impl Seldom {
    /// Shortest interval between two lines.
    pub const EVERY: Duration = Duration::from_secs(10);

    /// Creates the limit of a line that was not logged yet.
    pub const fn new() -> Self {
        let (last, suppressed) = (None, 0);
        Self(Mutex::new(Logged { last, suppressed }))
    }

    /// Returns the number of lines suppressed since the last one, if the line may be logged
    /// now.
    pub fn now(&self) -> Option<u64> {
        self.counting(1)
    }

    /// Returns the same for a line that stands for `count` occurrences.
    pub fn counting(&self, count: u64) -> Option<u64> {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if logged.last.is_some_and(|last| now - last < Self::EVERY) {
            logged.suppressed += count;
            return None;
        }
        logged.last = Some(now);
        Some(std::mem::take(&mut logged.suppressed))
    }
}

/// Returns text from outside made safe for a terminal: control characters and characters that
/// set the direction of text are replaced, so that they can neither move the cursor nor reorder
/// text.
pub fn plain(text: &str) -> String {
    let steers = |c: char| c.is_control() || sets_direction(c);
    text.chars()
        .map(|c| if steers(c) { '\u{fffd}' } else { c })
        .collect()
}

/// Returns true if a character has Unicode's property `Bidi_Control`.
fn sets_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns an error and its causes in one line, for a log or a person.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
// === impl Trouble ===

impl Trouble {
    /// Logs the problem of a failed attempt as a warning, unless it was logged last. A
    /// successful attempt ends the problem.
    pub fn note(&mut self, result: Result<(), String>) {
        let trouble = result.err();
        if let Some(trouble) = trouble.as_ref().filter(|_| trouble != self.last) {
            tracing::warn!("{trouble}");
        }
        self.last = trouble;
    }

    /// Returns the problem that was logged last; `None` if it has ended.
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }
}
