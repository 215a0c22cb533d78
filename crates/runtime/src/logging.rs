//! Logs on standard error: text for a terminal, JSON lines for a collector.
//!
//! A log that cannot be written, or not now, changes nothing but a counter.

mod queue;

use std::io::Write as _;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use crate::metrics::Metrics;
use queue::Queue;

/// Time for which the end of the process waits for its last lines to be written.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The way to standard error, once logging has started.
static STANDARD_ERROR: OnceLock<Arc<Queue>> = OnceLock::new();

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// One line of text each.
    #[default]
    Text,
    /// One JSON object each.
    Json,
}

/// A log filter that does not parse.
#[derive(Debug, thiserror::Error)]
#[error(
    "log filter {filter:?} is not understood; examples: info, debug, warn,gpuwarden_agent=debug"
)]
pub struct FilterError {
    filter: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

/// A `Trouble` is logged when it comes and when it becomes another, not each time that it is met.
#[derive(Debug, Default)]
pub struct Trouble {
    /// The one that was logged last; `None` where there is none.
    last: Option<String>,
}

/// Starts logging for the process, panics included. A second call changes nothing.
pub fn start(filter: &str, format: LogFormat, colour: bool) -> Result<(), FilterError> {
    let filter = EnvFilter::try_new(filter).map_err(|source| FilterError {
        filter: filter.to_owned(),
        source,
    })?;
    let queue = STANDARD_ERROR.get_or_init(|| Queue::start(std::io::stderr()));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Arc::clone(queue))
        // It would tell of them on standard error, and panic where that fails.
        .log_internal_errors(false);
    // It fails only where logging has been started already.
    match format {
        LogFormat::Text => drop(builder.with_ansi(colour).try_init()),
        LogFormat::Json => drop(builder.json().flatten_event(true).try_init()),
    }
    // What std does by itself waits for standard error, with the task that panics.
    std::panic::set_hook(Box::new(log_panic));
    Ok(())
}

/// Registers what there is to count of the log of this process.
pub fn register(metrics: &Metrics) {
    if let Some(queue) = STANDARD_ERROR.get() {
        metrics.register(
            "gpuwarden_log_lines_lost",
            "Log lines that could not be written, or not as fast as they came",
            queue.lost(),
        );
    }
}

/// Writes the last word of the process to standard error, behind its log, and waits for a
/// moment until all of it is written.
pub fn end(last_word: Option<&str>) {
    let Some(queue) = STANDARD_ERROR.get() else {
        if let Some(text) = last_word {
            // It fails only where nobody reads.
            drop(writeln!(std::io::stderr().lock(), "{text}"));
        }
        return;
    };
    if let Some(text) = last_word {
        // The queue takes it, or counts it.
        drop(writeln!(&**queue, "{text}"));
    }
    queue.flush(LAST_LINES);
}

/// Writes text for a person to standard output, on a thread of its own: who reads it may be
/// gone, or slow.
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

/// A limit on one log line: it is let through now and then, for who may cause it must not
/// thereby fill the log.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Said>);

/// The last time that the line was let through, and the count since.
#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// Lines are let through this far apart.
    pub const EVERY: Duration = Duration::from_secs(10);

    /// Returns the limit of a line that was not logged yet.
    pub const fn new() -> Self {
        let (last, unsaid) = (None, 0);
        Self(Mutex::new(Said { last, unsaid }))
    }

    /// Returns whether the line may be logged now: `Some` says how many were not since the last.
    pub fn now(&self) -> Option<u64> {
        self.counting(1)
    }

    /// Returns the same of a line that stands for `count` of what is counted.
    pub fn counting(&self, count: u64) -> Option<u64> {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.last.is_some_and(|last| now - last < Self::EVERY) {
            said.unsaid += count;
            return None;
        }
        said.last = Some(now);
        Some(std::mem::take(&mut said.unsaid))
    }
}

/// Returns text that came from outside, for a terminal: control characters cannot move its cursor,
/// and what sets the direction of text cannot show it in another order.
pub fn plain(text: &str) -> String {
    let steers = |c: char| c.is_control() || sets_direction(c);
    text.chars()
        .map(|c| if steers(c) { '\u{fffd}' } else { c })
        .collect()
}

/// Returns whether a character is of Unicode's `Bidi_Control`.
fn sets_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns an error with its causes, in one line, for a log or a person.
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
    /// Logs the trouble of an attempt as a warning, unless that was logged last. An attempt that
    /// went well ends the trouble.
    pub fn note(&mut self, result: Result<(), String>) {
        let trouble = result.err();
        if let Some(trouble) = trouble.as_ref().filter(|_| trouble != self.last) {
            tracing::warn!("{trouble}");
        }
        self.last = trouble;
    }

    /// Returns the trouble that was logged last; `None` where there is none any more.
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }
}
