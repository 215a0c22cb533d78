//! Logs on standard error: text for a terminal, JSON lines for a collector.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

/// How log lines look.
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

/// Starts logging for the process. A second call changes nothing.
pub fn start(filter: &str, format: LogFormat, colour: bool) -> Result<(), FilterError> {
    let filter = EnvFilter::try_new(filter).map_err(|source| FilterError {
        filter: filter.to_owned(),
        source,
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // It fails only where logging has been started already.
    match format {
        LogFormat::Text => drop(builder.with_ansi(colour).try_init()),
        LogFormat::Json => drop(builder.json().flatten_event(true).try_init()),
    }
    Ok(())
}

/// Lets a line through now and then: who may cause it must not thereby fill the log.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// Lines are let through this far apart.
    pub const EVERY: Duration = Duration::from_secs(10);

    /// Whether the line may be logged now: `Some` says how many were not since the last.
    pub fn now(&self) -> Option<u64> {
        self.counting(1)
    }

    /// The same of a line that stands for `count` of what is counted.
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

/// An error with its causes, in one line, for a log or a person.
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
