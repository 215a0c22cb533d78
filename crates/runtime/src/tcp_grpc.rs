//! gRPC over TCP with TLS: the connections of a server, and the channel of a client.
//!
//! Both use the certificates on disk at the time of the connection ([`crate::tls`]), so rotated
//! ones apply from the next connection on. Without TLS only loopback is allowed.

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
use places::{ConnectionPlace, ConnectionPlaces};

/// Most open connections; more wait in the listener's backlog. Enough for each node of the
/// largest supported cluster, with a margin. Lower if the process may not have that many
/// descriptors.
pub const MAX_CONNECTIONS: usize = 20_480;
/// Most connections that have finished the handshake and wait for the server.
const QUEUE: usize = 64;
/// Time limit for a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit for establishing a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval between a client's keep-alive pings, also without traffic, and time limit for the
/// response. A connection that died silently (a machine without power, a forgotten NAT entry)
/// is noticed before an event needs it.
const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(5));

/// Peer of a connection, as far as the connection identifies it.
///
/// Available in the extensions of a request: `request.extensions().get::<TcpPeer>()`.
#[derive(Clone, Debug)]
pub struct TcpPeer {
    /// IP address and port of the peer.
    pub address: SocketAddr,
    /// Names in the peer's verified certificate; `None` if it showed none.
    pub certificate: Option<Arc<CertificateNames>>,
}

/// Connection that was accepted.
pub struct Connection {
    io: Box<dyn Io>,
    peer: TcpPeer,
    /// Occupies a place until the connection is dropped.
    _place: ConnectionPlace,
}

/// Stream with or without TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Connection of a client. Its errors distinguish a connection that was never accepted from one
/// that broke later.
struct Outgoing {
    io: Box<dyn Io>,
    /// True once the other end has sent anything. In TLS 1.3 the server verifies the client's
    /// certificate only after the client is ready to send, so a refusal is then its first
    /// message.
    has_received: bool,
}

/// Reason why an address cannot be used for a channel.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The text is not a valid address.
    #[error("{url:?} is not an address such as https://controller.example:50051")]
    Malformed {
        /// Address that was rejected.
        url: String,
    },
    /// The address is on the network, and events would travel without TLS.
    #[error(
        "{url:?} goes over the network without TLS: use https (http is for this machine itself only)"
    )]
    Open {
        /// Address that was rejected.
        url: String,
    },
}

/// Returns the connections of a listener, for tonic's `serve_with_incoming`. `tls` is `None`
/// for plain-text connections.
///
/// Handshakes run concurrently, so that one that hangs delays no other. A failed handshake is
/// logged at a limited rate and yields no item, since an error would end tonic's server.
pub fn incoming(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
) -> impl Stream<Item = io::Result<Connection>> {
    incoming_up_to(listener, tls, MAX_CONNECTIONS)
}

/// Returns the connections like [`incoming`], with at most `most` open at a time.
pub fn incoming_up_to(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    most: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = ConnectionPlaces::new(places::within_limit(most));
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(accept_all(listener, tls, places, sender));
    ReceiverStream::new(receiver)
}

/// Accepts connections until the receiver is gone.
async fn accept_all(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    places: Arc<ConnectionPlaces>,
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
            // Fails only after the server has ended.
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

/// Returns a channel to `url` that connects on first use, and reconnects as needed.
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

/// Returns a channel without TLS to any machine, for a receiver that has no TLS; only for use
/// with an operator's consent. `host` is a name, or an IP address without brackets.
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

/// Returns true if a request failed because the other end did not accept the connection (it
/// does not trust the client's certificate, or nothing serves there), so that the request was
/// certainly not processed.
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

/// Connector of a channel.
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
            Ok(TokioIo::new(Outgoing {
                io,
                has_received: false,
            }))
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
        if self.has_received {
            return error;
        }
        // HTTP/2 passes on only the kind and the text of an error.
        let text = format!("the other end did not accept the connection: {error}");
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
        self.has_received |= buf.remaining() < before;
        if read.is_ok() && !self.has_received && before > 0 {
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
