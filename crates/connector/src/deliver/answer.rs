//! Interpretation of answers other than OK.

use runtime::tcp_grpc;
use tonic::{Code, Status};

use crate::refusal;

/// Reason why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotTaken {
    /// Temporary problem, independent of the events.
    Again,
    /// Failure of the receiver, on an event of the request or on any.
    Failed,
    /// Refusal of some event; smaller requests show which one.
    Split,
    /// Refusal of these events, by index; all others are stored.
    Refused(Vec<usize>),
}

/// Returns why a request with `events` events was not accepted.
///
/// Only answers that name events, or such answers to a batch of one, refuse single events. Any
/// other answer of the controller or of a proxy before it may be temporary: a wrong token, a
/// missing permission. Treating those as refusals would discard events.
pub(crate) fn judge(status: &Status, events: usize) -> NotTaken {
    if tcp_grpc::is_refused(status) {
        return NotTaken::Again;
    }
    match status.code() {
        Code::InvalidArgument | Code::PermissionDenied
            if let Some(indices) = refusal::read_header(status.metadata(), events) =>
        {
            NotTaken::Refused(indices)
        }
        Code::InvalidArgument | Code::OutOfRange if events > 1 => NotTaken::Split,
        Code::InvalidArgument | Code::OutOfRange => NotTaken::Refused(vec![0]),
        // A controller whose store is full, closed or out of order answers RESOURCE_EXHAUSTED
        // or UNAVAILABLE. These codes remain for a failure of the controller, or of a proxy,
        // caused by this batch (CANCELLED: the task ended without an answer).
        Code::Internal | Code::Unknown | Code::DataLoss | Code::Cancelled => NotTaken::Failed,
        _ => NotTaken::Again,
    }
}

/// Returns a status with the causes that tonic hides.
pub(crate) fn describe(status: &Status) -> String {
    let mut text = format!("{}: {}", status.code(), status.message());
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;

    use super::*;

    #[test]
    fn what_an_answer_means() {
        let named = |code, text: &'static str| {
            let mut status = Status::new(code, "");
            let value = MetadataValue::from_static(text);
            status
                .metadata_mut()
                .insert("gpuwarden-refused-events", value);
            status
        };
        let plain = |code| Status::new(code, "");
        let table = [
            (
                named(Code::InvalidArgument, "1,3"),
                4,
                NotTaken::Refused(vec![1, 3]),
            ),
            (
                named(Code::PermissionDenied, "0"),
                4,
                NotTaken::Refused(vec![0]),
            ),
            // Indices out of range name no events.
            (named(Code::InvalidArgument, "4"), 4, NotTaken::Split),
            (named(Code::PermissionDenied, "x"), 1, NotTaken::Again),
            (named(Code::Unavailable, "1"), 4, NotTaken::Again),
            (plain(Code::InvalidArgument), 4, NotTaken::Split),
            (plain(Code::InvalidArgument), 1, NotTaken::Refused(vec![0])),
            (plain(Code::OutOfRange), 2, NotTaken::Split),
            (plain(Code::PermissionDenied), 1, NotTaken::Again),
            (plain(Code::Unauthenticated), 1, NotTaken::Again),
            (plain(Code::Unimplemented), 1, NotTaken::Again),
            (plain(Code::Unavailable), 1, NotTaken::Again),
            (plain(Code::ResourceExhausted), 1, NotTaken::Again),
            (plain(Code::DeadlineExceeded), 1, NotTaken::Again),
            (plain(Code::Internal), 4, NotTaken::Failed),
            (plain(Code::Unknown), 1, NotTaken::Failed),
            (plain(Code::Cancelled), 1, NotTaken::Failed),
        ];
        for (status, events, expected) in table {
            assert_eq!(judge(&status, events), expected, "{status:?}");
        }
    }
}
