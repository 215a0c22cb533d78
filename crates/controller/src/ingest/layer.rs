//! Layer that adds the caller to a request, or refuses an unknown one before the body is read,
//! so that it costs little.

use std::convert::Infallible;
use std::task::{Context, Poll};

use connector::Caller;
use runtime::tcp_grpc::TcpPeer;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use super::identity::Identify;

/// A service that gets requests with their [`Caller`].
#[derive(Clone)]
pub(super) struct Identified<S> {
    inner: S,
    identify: Identify,
}

// === impl Identified ===

impl<S> Identified<S> {
    pub(super) fn new(inner: S, identify: Identify) -> Self {
        Self { inner, identify }
    }
}

impl<S: NamedService> NamedService for Identified<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Identified<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // Only the service that was polled may be called; the clone takes its place.
        let mut inner = self.inner.clone();
        std::mem::swap(&mut inner, &mut self.inner);
        let identify = self.identify.clone();
        Box::pin(async move {
            let peer = request.extensions().get::<TcpPeer>().cloned();
            let header = request.headers().get(http::header::AUTHORIZATION).cloned();
            match identify.caller(peer.as_ref(), header.as_ref()).await {
                Ok(caller) => {
                    request.extensions_mut().insert::<Caller>(caller);
                    inner.call(request).await
                }
                Err(status) => Ok(status.into_http()),
            }
        })
    }
}
