//! Admission before the service: the caller is identified, and room is reserved for the
//! request, before its body is read. gRPC allocates memory for a message as soon as its length
//! is known, and a sender may delay the rest.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use futures::StreamExt as _;
use http_body_util::{BodyStream, StreamBody};
use runtime::logging::Seldom;
use runtime::shares::{Share, Shares};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::{Identify, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, MAX_REQUEST_BYTES};
use crate::Caller;

/// Length of the header of a gRPC message (bytes): a compression flag (one byte) and the
/// length.
const HEAD: usize = 5;

/// Service that only admits requests from known callers, while there is room for them. The
/// [`Caller`] is in the extensions of a request.
#[derive(Clone)]
pub struct Admission<S> {
    inner: S,
    identify: Identify,
    requests: Arc<Shares>,
    bytes: Arc<Shares>,
    /// Rate limit of log lines about requests that did not reach the service.
    turned_away: Arc<Seldom>,
}

/// Flag set by the service when a request reaches it; from then on the service reports the
/// outcome.
#[derive(Clone, Debug, Default)]
pub(super) struct Reached(Arc<AtomicBool>);

/// Counter of the bytes of one request as they arrive.
struct Meter {
    bytes: Arc<Shares>,
    user: Option<u32>,
    head: Vec<u8>,
    /// Bytes of the message that have not arrived yet.
    missing: usize,
    /// Room for the message, reserved once its length is known.
    room: Arc<OnceLock<Share>>,
}

// === impl Admission ===

impl<S> Admission<S> {
    pub(super) fn new(inner: S, identify: Identify) -> Self {
        Self {
            inner,
            identify,
            requests: Shares::new(MAX_IN_FLIGHT),
            bytes: Shares::new(MAX_IN_FLIGHT_BYTES),
            turned_away: Arc::default(),
        }
    }

    /// Returns the same admission for another service of the same server: both share their
    /// limits.
    pub(super) fn beside<T>(&self, inner: T) -> Admission<T> {
        Admission {
            inner,
            identify: self.identify,
            requests: Arc::clone(&self.requests),
            bytes: Arc::clone(&self.bytes),
            turned_away: Arc::clone(&self.turned_away),
        }
    }

    /// Returns the admitted request, and the shares that it occupies until it is answered.
    fn admit(
        &self,
        mut request: http::Request<Body>,
    ) -> Result<(http::Request<Body>, impl Send + 'static), Status> {
        let Some(caller) = (self.identify)(request.extensions()) else {
            return Err(Status::unauthenticated("the sender is not identified"));
        };
        let user = match &caller {
            Caller::Local(peer) => peer.sharing_user(),
            _ => None,
        };
        let turn = self.requests.take(user, 1);
        let turn = turn.ok_or_else(|| busy(MAX_IN_FLIGHT, "requests"))?;
        request.extensions_mut().insert(caller);
        let room = Arc::new(OnceLock::new());
        let mut meter = Meter {
            bytes: Arc::clone(&self.bytes),
            user,
            head: Vec::with_capacity(HEAD),
            missing: 0,
            room: Arc::clone(&room),
        };
        let request = request.map(|body| {
            let frames = BodyStream::new(body).map(move |frame| {
                let frame = frame?;
                frame.data_ref().map_or(Ok(()), |data| meter.see(data))?;
                Ok::<_, Status>(frame)
            });
            Body::new(StreamBody::new(frames))
        });
        Ok((request, (turn, room)))
    }
}

fn too_large(bytes: usize) -> Status {
    Status::out_of_range(format!(
        "a request of {bytes} bytes; at most {MAX_REQUEST_BYTES} are accepted: send its events in several \
         requests, and shorten one that is too large alone"
    ))
}

fn busy(limit: usize, of: &str) -> Status {
    Status::resource_exhausted(format!(
        "at most {limit} {of} are processed at once, and a share of them for each user of a machine; \
         retry later"
    ))
}

impl<S: NamedService> NamedService for Admission<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Admission<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let reached = Reached::default();
        request.extensions_mut().insert(reached.clone());
        match self.admit(request) {
            Ok((request, taken)) => {
                let sender = request.extensions().get::<Caller>().cloned();
                let turned_away = Arc::clone(&self.turned_away);
                let answer = self.inner.call(request);
                Box::pin(async move {
                    let Ok(mut answer) = answer.await;
                    drop(taken);
                    if !reached.is_set()
                        && let Some(status) = Status::from_header_map(answer.headers())
                    {
                        let status = blamed_on_the_sender(status);
                        if let Some(sender) = sender {
                            log_turned_away(&turned_away, &sender, &status);
                        }
                        answer = status.into_http();
                    }
                    Ok(answer)
                })
            }
            Err(status) => Box::pin(std::future::ready(Ok(status.into_http()))),
        }
    }
}

/// Corrects gRPC's own status for a malformed request, so that it blames the sender: gRPC
/// answers INTERNAL, which means a failure of the receiver, and that a retry may succeed.
fn blamed_on_the_sender(status: Status) -> Status {
    match status.code() {
        Code::Internal => Status::invalid_argument(status.message()),
        _ => status,
    }
}

/// Logs an answer given by gRPC itself, such as to a message that cannot be decoded, which
/// would otherwise be in no log.
fn log_turned_away(seldom: &Seldom, sender: &Caller, status: &Status) {
    if let Some(not_logged_before) = seldom.now() {
        tracing::warn!(
            %sender,
            not_logged_before,
            "a request was refused ({:?}): {}",
            status.code(),
            status.message()
        );
    }
}

// === impl Reached ===

impl Reached {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

// === impl Meter ===

impl Meter {
    fn see(&mut self, mut data: &[u8]) -> Result<(), Status> {
        if self.head.len() < HEAD {
            let (head, rest) = data.split_at(data.len().min(HEAD - self.head.len()));
            self.head.extend_from_slice(head);
            data = rest;
            if let Ok([_, length @ ..]) = <[u8; HEAD]>::try_from(self.head.as_slice()) {
                self.missing = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                if self.missing > MAX_REQUEST_BYTES {
                    return Err(too_large(self.missing));
                }
                let room = self.bytes.take(self.user, self.missing);
                let room = room.ok_or_else(|| busy(MAX_IN_FLIGHT_BYTES, "bytes of requests"))?;
                // Set once, since the head is completed only once.
                let _ = self.room.set(room);
            }
        }
        match self.missing.checked_sub(data.len()) {
            Some(missing) => self.missing = missing,
            None => return Err(Status::invalid_argument("a request is one message")),
        }
        Ok(())
    }
}
