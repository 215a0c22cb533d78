//! gRPC over TCP with TLS: the connections of a server, and the channel of a client.
//!
//! Both take what certificates they have at that moment ([`crate::tls`]), so rotated ones
//! count from the next connection on. Without TLS only loopback is for use.

mod places;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::{BoxFuture, Service, http::Uri};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};

use crate::logging::Seldom;
use crate::tls::{CertificateNames, ClientTls, ServerTls};
use places::{Place, Places};

/// Connections open at the same time; more wait in the listener's backlog. One for each
/// node of the largest cluster that the rest is made for, and some. Where the process may have fewer
/// descriptors it is fewer.
pub const MAX_CONNECTIONS: usize = 20_480;
/// Connections whose handshake is done and that the server has not taken yet.
const QUEUE: usize = 64;
/// A handshake takes no longer.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A connection that is not made by then is given up.
const CONNECT: Duration = Duration::from_secs(5);
/// Time between two questions of a client whether the other end is there, also when there is
/// nothing to say; and time for the answer. A connection that died without a word (a
/// machine without power, a forgotten NAT entry) is noticed before an event needs it.
const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(5));

/// The other end of a connection, as far as the connection tells.
///
/// A request carries it in its extensions: `request.extensions().get::<TcpPeer>()`.
#[derive(Clone, Debug)]
pub struct TcpPeer {
    /// The address.
    pub address: SocketAddr,
    /// The names in the certificate that was shown and verified; `None`: none was.
    pub certificate: Option<Arc<CertificateNames>>,
}

/// An accepted connection.
pub struct Connection {
    io: Box<dyn Io>,
    peer: TcpPeer,
    /// Counts the connection until it is dropped.
    _place: Place,
}

/// A stream with or without TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A client's connection. Its errors tell one that was never taken from one that broke.
struct Outgoing {
    io: Box<dyn Io>,
    /// True once the other end has sent anything. By TLS 1.3 it looks at our certificate when we
    /// are ready to send, so its refusal is all that we hear then.
    heard: bool,
}

/// The reason why an address is of no use for a channel.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The text is no address.
    #[error("{url:?} is no address such as https://controller.example:50051")]
    Malformed {
        /// The text.
        url: String,
    },
    /// The way is open to others: events would travel without TLS.
    #[error(
        "{url:?} goes over the network without TLS: use https (http is for this machine itself only)"
    )]
    Open {
        /// The text.
        url: String,
    },
}

/// Returns the connections of a listener, for tonic's `serve_with_incoming`. `tls` is `None` for
/// connections in the open.
///
/// Handshakes run beside each other: one that hangs holds up no other. A failed one is
/// logged now and then, and is no item: that would end tonic's server.
pub fn incoming(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
) -> impl Stream<Item = io::Result<Connection>> {
    incoming_up_to(listener, tls, MAX_CONNECTIONS)
}

/// Returns the connections as [`incoming`] does, at most so many at the same time.
pub fn incoming_up_to(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    most: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Places::new(places::within_limit(most));
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(accept_all(listener, tls, places, sender));
    ReceiverStream::new(receiver)
}

/// Accepts until nobody takes the connections any more.
async fn accept_all(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    places: Arc<Places>,
    sender: mpsc::Sender<io::Result<Connection>>,
) {
    let seldom = Arc::new(Seldom::default());
    let failed = Seldom::default();
    loop {
        let accepted = async {
            places.wait_for_one().await;
            listener.accept().await
        };
        let accepted = tokio::select! {
            () = sender.closed() => return,
            accepted = accepted => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(not_logged_before) = failed.now() {
                    tracing::warn!(err = %error, not_logged_before, "cannot accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let mut place = match places.take(address.ip()) {
            Ok(place) => place,
            Err(refused) => {
                say_failed(&seldom, address, refused);
                continue;
            }
        };
        let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.config()));
        let (sender, seldom) = (sender.clone(), Arc::clone(&seldom));
        tokio::spawn(async move {
            let shaken = tokio::select! {
                () = sender.closed() => return,
                shaken = tokio::time::timeout(HANDSHAKE, shake_hands(stream, tls)) => shaken,
            };
            let (io, certificate) = match shaken {
                Ok(Ok(done)) => done,
                Ok(Err(error)) => return say_failed(&seldom, address, &error.to_string()),
                Err(_) => return say_failed(&seldom, address, "it took too long"),
            };
            place.is_secured();
            let peer = TcpPeer {
                address,
                certificate,
            };
            let connection = Connection {
                io,
                peer,
                _place: place,
            };
            // Fails only when the server has ended.
            drop(sender.send(Ok(connection)).await);
        });
    }
}

async fn shake_hands(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
) -> io::Result<(Box<dyn Io>, Option<Arc<CertificateNames>>)> {
    stream.set_nodelay(true)?;
    let Some(tls) = tls else {
        return Ok((Box::new(stream), None));
    };
    let stream = tls.accept(stream).await?;
    let shown = stream.get_ref().1.peer_certificates();
    let names = shown
        .and_then(<[_]>::first)
        .map(|certificate| Arc::new(CertificateNames::read(certificate)));
    Ok((Box::new(stream), names))
}

fn say_failed(seldom: &Seldom, address: SocketAddr, why: &str) {
    if let Some(before) = seldom.now() {
        tracing::warn!(
            peer = %address.ip(),
            err = why,
            not_logged_before = before,
            "a connection was not secured"
        );
    }
}

/// Returns a channel to `url` that connects when it is used, and again when it has to.
pub fn channel(url: &str, tls: Option<Arc<ClientTls>>) -> Result<Channel, AddressError> {
    let malformed = || AddressError::Malformed {
        url: url.to_owned(),
    };
    let uri: Uri = url.parse().map_err(|_| malformed())?;
    let host = uri.host().ok_or_else(malformed)?.to_owned();
    let path = uri.path();
    let (port, secured) = match uri.scheme_str() {
        Some("https") => (uri.port_u16().unwrap_or(443), true),
        Some("http") => (uri.port_u16().unwrap_or(80), false),
        _ => return Err(malformed()),
    };
    if !(path.is_empty() || path == "/") || uri.query().is_some() {
        return Err(malformed());
    }
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned();
    let loopback = address == "localhost"
        || address
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    if !secured && !loopback {
        return Err(AddressError::Open {
            url: url.to_owned(),
        });
    }
    let tls = match (secured, tls) {
        (false, _) => None,
        (true, Some(tls)) => {
            let name = ServerName::try_from(address.clone()).map_err(|_| malformed())?;
            Some((tls, name))
        }
        (true, None) => return Err(malformed()),
    };
    Ok(lazy(uri, Connect { address, port, tls }))
}

/// Returns a channel without TLS to any machine: for a receiver that has none, where an operator
/// has said so. `host` is a name, or an IP address without brackets.
pub fn open_channel(host: &str, port: u16) -> Result<Channel, AddressError> {
    let shown = if host.contains(':') {
        format!("http://[{host}]:{port}")
    } else {
        format!("http://{host}:{port}")
    };
    let uri: Uri = shown
        .parse()
        .map_err(|_| AddressError::Malformed { url: shown })?;
    let connect = Connect {
        address: host.to_owned(),
        port,
        tls: None,
    };
    Ok(lazy(uri, connect))
}

/// Returns whether a request failed because the other end did not take the connection (it does not
/// trust our certificate, or has nobody to answer), so that what was sent was never looked at.
pub fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let found = error.downcast_ref::<io::Error>();
        if found.is_some_and(|found| found.kind() == io::ErrorKind::ConnectionRefused) {
            return true;
        }
        next = error.source();
    }
    false
}

fn lazy(uri: Uri, connect: Connect) -> Channel {
    Endpoint::from(uri)
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(connect)
}

/// Makes the connections of a channel.
struct Connect {
    address: String,
    port: u16,
    tls: Option<(Arc<ClientTls>, ServerName<'static>)>,
}

impl Service<Uri> for Connect {
    type Response = TokioIo<Outgoing>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (address, port, tls) = (self.address.clone(), self.port, self.tls.clone());
        Box::pin(async move {
            let stream = TcpStream::connect((address.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let io: Box<dyn Io> = match tls {
                None => Box::new(stream),
                Some((tls, name)) => {
                    let connector = TlsConnector::from(tls.config());
                    Box::new(connector.connect(name, stream).await?)
                }
            };
            Ok(TokioIo::new(Outgoing { io, heard: false }))
        })
    }
}

// === impl Connection ===

impl Connected for Connection {
    type ConnectInfo = TcpPeer;

    fn connect_info(&self) -> TcpPeer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

// === impl Outgoing ===

impl Outgoing {
    fn failed(&self, error: io::Error) -> io::Error {
        if self.heard {
            return error;
        }
        // HTTP/2 passes on an error's kind and its text, and nothing else.
        let text = format!("the other end did not take the connection: {error}");
        io::Error::new(io::ErrorKind::ConnectionRefused, text)
    }
}

impl AsyncRead for Outgoing {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.remaining();
        let mut read = ready!(Pin::new(&mut self.io).poll_read(cx, buf));
        self.heard |= buf.remaining() < before;
        if read.is_ok() && !self.heard && before > 0 {
            read = Err(io::ErrorKind::UnexpectedEof.into());
        }
        Poll::Ready(read.map_err(|error| self.failed(error)))
    }
}

impl AsyncWrite for Outgoing {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        written.map_err(|error| self.failed(error))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        flushed.map_err(|error| self.failed(error))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
