//! Logs on standard error: text for a terminal, JSON lines for a collector.

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
