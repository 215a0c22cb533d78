//! Failures in gRPC: a status code, with an `ErrorInfo` in its details that holds the class.

use std::collections::BTreeMap;

use contract::google_rpc::{ErrorInfo, RetryInfo, Status as Details};
use jiff::SignedDuration;
use maintenance::janitor::{Class, ProviderFailure};
use prost::Message as _;
use prost_types::Any;
use runtime::tcp_grpc;
use tonic::{Code, Status};

/// Domain of our `ErrorInfo`s.
const DOMAIN: &str = "csp.nvsentinel.nvidia.com";
/// Metadata entry with the version of the metadata's format.
const CONTRACT_VERSION: (&str, &str) = ("contract_version", "1");
/// Metadata key of the class.
const FAILURE_CLASS: &str = "failure_class";
const ERROR_INFO: &str = "type.googleapis.com/google.rpc.ErrorInfo";
const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";
/// Reason of a failure that may have had an effect. On the wire its class is permanent, because
/// any other class would make NVSentinel's janitor retry.
const AMBIGUOUS: &str = "AMBIGUOUS_RESULT";
/// Reason in the answer that an operation is unknown, which is not a failure.
pub(crate) const OPERATION_UNKNOWN: &str = "OPERATION_UNKNOWN";

/// Parsed details of an error.
#[derive(Debug, Default)]
pub(crate) struct ErrorDetails {
    /// Reason in the `ErrorInfo` of our domain, if there is one.
    pub(crate) reason: Option<String>,
    class: Option<Class>,
    retry_after: Option<SignedDuration>,
}

/// Encodes a failure. `about` is added to the metadata.
pub(crate) fn status(failure: &ProviderFailure, about: &[(&str, &str)]) -> Status {
    let (class, reason) = match failure.class {
        Class::Ambiguous => (Class::Permanent, AMBIGUOUS),
        class => (class, failure.reason.as_str()),
    };
    let code = match (failure.class, reason) {
        (Class::Transient, "RATE_LIMITED") => Code::ResourceExhausted,
        (Class::Transient, "RESOURCE_BUSY") => Code::Aborted,
        (Class::Transient, _) => Code::Unavailable,
        (Class::Permanent, "INVALID_REQUEST") => Code::InvalidArgument,
        (Class::Permanent, "PERMISSION_DENIED") => Code::PermissionDenied,
        (Class::Permanent, "RESOURCE_NOT_FOUND") => Code::NotFound,
        (Class::Permanent, "UNSUPPORTED_OPERATION") => Code::Unimplemented,
        (Class::Permanent, _) => Code::FailedPrecondition,
        (Class::Ambiguous, _) => Code::Unknown,
    };
    let class = (FAILURE_CLASS, class.name());
    let metadata = [CONTRACT_VERSION, class].into_iter();
    let metadata = metadata.chain(about.iter().copied());
    let info = info(reason, metadata);
    let retry = failure.retry_after.map(|wait| RetryInfo {
        retry_delay: Some(prost_types::Duration {
            seconds: wait.as_secs(),
            nanos: wait.subsec_nanos(),
        }),
    });
    let details = [info].into_iter().chain(retry.map(|retry| Any {
        type_url: RETRY_INFO.to_owned(),
        value: retry.encode_to_vec(),
    }));
    with_details(code, &failure.message, details.collect())
}

/// Encodes the answer that an operation is unknown: it was never signalled.
pub(crate) fn operation_unknown(operation: &str) -> Status {
    let message = format!("the operation {operation} is not known");
    let info = info(OPERATION_UNKNOWN, [CONTRACT_VERSION].into_iter());
    with_details(Code::NotFound, &message, vec![info])
}

fn info<'a>(reason: &str, metadata: impl Iterator<Item = (&'a str, &'a str)>) -> Any {
    let metadata: BTreeMap<String, String> = metadata
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let info = ErrorInfo {
        reason: reason.to_owned(),
        domain: DOMAIN.to_owned(),
        metadata,
    };
    Any {
        type_url: ERROR_INFO.to_owned(),
        value: info.encode_to_vec(),
    }
}

fn with_details(code: Code, message: &str, details: Vec<Any>) -> Status {
    let all = Details {
        code: code as i32,
        message: message.to_owned(),
        details,
    };
    Status::with_details(code, message, all.encode_to_vec().into())
}

/// Parses the details of an error, ignoring unknown and malformed ones.
pub(crate) fn parse_details(status: &Status) -> ErrorDetails {
    let mut parsed = ErrorDetails::default();
    let details = Details::decode(status.details()).unwrap_or_default();
    for detail in details.details {
        if detail.type_url == RETRY_INFO {
            let retry = RetryInfo::decode(detail.value.as_slice()).unwrap_or_default();
            let wait = retry.retry_delay.filter(|wait| wait.seconds >= 0);
            parsed.retry_after = wait.map(|wait| SignedDuration::new(wait.seconds, wait.nanos));
        }
        if detail.type_url != ERROR_INFO {
            continue;
        }
        let info = ErrorInfo::decode(detail.value.as_slice()).unwrap_or_default();
        let (version, wanted) = CONTRACT_VERSION;
        if info.domain != DOMAIN || info.metadata.get(version).is_none_or(|it| it != wanted) {
            continue;
        }
        let class = info.metadata.get(FAILURE_CLASS);
        parsed.class = match info.reason.as_str() {
            AMBIGUOUS => Some(Class::Ambiguous),
            _ => class.and_then(|word| Class::of_name(word)),
        };
        parsed.reason = Some(info.reason);
    }
    parsed
}

/// Decodes a failure of a signal. The class comes from the details, or else from a status code
/// that allows only one conclusion. Otherwise the failure is ambiguous: the signal may have had
/// an effect.
pub(crate) fn failure(status: &Status) -> ProviderFailure {
    let parsed = parse_details(status);
    let refused = std::error::Error::source(status).is_some_and(tcp_grpc::is_refused);
    let by_code = match status.code() {
        // The request did not reach the server.
        Code::Unavailable if refused => Class::Transient,
        Code::ResourceExhausted | Code::Unauthenticated => Class::Transient,
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented => Class::Permanent,
        _ => Class::Ambiguous,
    };
    let message = match (status.message(), std::error::Error::source(status)) {
        ("", Some(cause)) => runtime::logging::chain(cause),
        (message, _) => message.to_owned(),
    };
    let reason = parsed
        .reason
        .unwrap_or_else(|| format!("{:?}", status.code()));
    ProviderFailure {
        class: parsed.class.unwrap_or(by_code),
        reason,
        message,
        retry_after: parsed.retry_after,
    }
}

// === impl ErrorDetails ===

impl ErrorDetails {
    /// Returns true if the details contain a class.
    pub(crate) fn has_class(&self) -> bool {
        self.class.is_some()
    }
}
