//! Errors in one line, for a log or a person.

use std::error::Error;

/// An error with its causes. Those that are said already are left out: kube's errors repeat
/// theirs.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
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
