//! Formats errors with their causes in one line.

use std::error::Error;

/// Returns an error with its causes. A cause whose text is in the line already is left out,
/// since kube's errors repeat theirs.
pub(crate) fn chain(error: &dyn Error) -> String {
    let text = error.to_string();
    // kube puts this before an error of the connection.
    let text = text.strip_prefix("ServiceError: ").unwrap_or(&text);
    let mut text = text.to_owned();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
