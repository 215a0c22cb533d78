//! Errors in one line, for a log or a person.

use std::error::Error;

/// Returns an error with its causes. Those that are said already are left out: kube's errors repeat
/// theirs.
pub(crate) fn chain(error: &dyn Error) -> String {
    let text = error.to_string();
    // kube's name for an error of the connection, which says so itself.
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
