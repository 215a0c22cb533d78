//! The types of the layers of the client (`request.rs`), and of what they say to each other.

use std::time::Duration;

use http::{Request, Response};
use kube::client::Body;
use tower::util::BoxCloneService;

/// Longest time from the call to the whole answer, the wait for its turn not counted.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest text of an answer that is kept (characters): of one without a `Status`, and of a warning.
pub(crate) const MESSAGE_CHARS: usize = 300;

/// The service of a layer. An answer other than success is [`kube::Error::Api`].
pub(crate) type Http = BoxCloneService<Request<Body>, Response<Body>, kube::Error>;

/// The longest time of a request, where that is less than [`REQUEST_TIMEOUT`]: an extension.
#[derive(Clone, Copy)]
pub(crate) struct Limit(pub(crate) Duration);

/// There was no answer for so long.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {} s", .0.as_secs())]
pub(crate) struct NoAnswer(pub(crate) Duration);
