//! Types that the layers of the client (`request.rs`) share.

use std::time::Duration;

use http::{Request, Response};
use kube::client::Body;
use tower::util::BoxCloneService;

/// Longest time from the call to the end of the answer, without the wait for a turn.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest text that is kept of an answer without a `Status`, and of a warning (characters).
pub(crate) const MESSAGE_CHARS: usize = 300;

/// The service of a layer. An answer other than success is [`kube::Error::Api`].
pub(crate) type Http = BoxCloneService<Request<Body>, Response<Body>, kube::Error>;

/// Extension of a request: its longest time, if less than [`REQUEST_TIMEOUT`].
#[derive(Clone, Copy)]
pub(crate) struct Limit(pub(crate) Duration);

/// Error of a request without an answer, after this time.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {} s", .0.as_secs())]
pub(crate) struct NoAnswer(pub(crate) Duration);
