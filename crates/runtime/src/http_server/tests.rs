use std::net::SocketAddr;

use axum::routing::get;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use testkit::{Authority, Purpose};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;
use tokio_rustls::TlsConnector;

use super::*;
use crate::tls::{CertificateFiles, ClientCertificates, ClientTls};

const ENOUGH: Duration = Duration::from_secs(20);

async fn start(limits: Limits) -> (SocketAddr, CancellationToken) {
    start_with(Router::new().route("/", get(async || "hello")), limits).await
}

async fn start_with(routes: Router, limits: Limits) -> (SocketAddr, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cancel = CancellationToken::new();
    tokio::spawn(serve_within(limits, listener, None, routes, cancel.clone()));
    (address, cancel)
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A connection that is cut off may end in a reset.
    drop(
        tokio::time::timeout(ENOUGH, stream.read_to_end(&mut text))
            .await
            .expect("it ends"),
    );
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn who_does_not_finish_his_head_is_cut_off() {
    let limits = Limits {
        header_timeout: Duration::from_millis(200),
        ..Limits::default()
    };
    let (address, cancel) = start(limits).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
    assert!(!read_all(&mut stream).await.contains("hello"));
    cancel.cancel();
}

#[tokio::test]
async fn beyond_the_limit_there_is_one_answer_and_the_oldest_gives_way() {
    let limits = Limits {
        connections: 1,
        reserve: 2,
        ..Limits::default()
    };
    let (address, cancel) = start(limits).await;
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    // Half a head, so that the connection is not idle.
    let half = b"GET / HTTP/1.1\r\nHo";
    let mut kept = TcpStream::connect(address).await.unwrap();
    kept.write_all(half).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(half).await.unwrap();
        silent.push(stream);
    }
    let mut probe = TcpStream::connect(address).await.unwrap();
    probe.write_all(request).await.unwrap();
    let answer = read_all(&mut probe).await;
    assert!(answer.ends_with("hello"), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
    for oldest in &mut silent[..2] {
        assert_eq!(read_all(oldest).await, "");
    }
    // A connection within the limit gets its answer, and then makes room.
    kept.write_all(b"st: localhost\r\n\r\n").await.unwrap();
    assert!(read_all(&mut kept).await.ends_with("hello"));
    cancel.cancel();
}

/// Connects from one of this machine's loopback addresses.
async fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((from, 0))).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn who_has_most_connections_gives_way_to_who_has_fewer() {
    let limits = Limits {
        connections: 8,
        reserve: 4,
        header_timeout: 2 * ENOUGH,
        ..Limits::default()
    };
    let routes = Router::new().route(
        "/",
        get(async |axum::Extension(Peer(peer))| format!("hello {peer}")),
    );
    let (address, cancel) = start_with(routes, limits).await;
    let half = b"GET / HTTP/1.1\r\nHo";
    let mut kept = connect_from([127, 0, 0, 2], address).await;
    kept.write_all(half).await.unwrap();
    // Far more connections than are kept, from one address; none of them ends.
    let mut crowd = Vec::new();
    for _ in 0..64 {
        let mut stream = connect_from([127, 0, 0, 3], address).await;
        stream.write_all(half).await.unwrap();
        crowd.push(stream);
    }
    // A further connection of the other address is kept as well: it gets more than one answer.
    let mut second = connect_from([127, 0, 0, 2], address).await;
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for _ in 0..2 {
        second.write_all(request).await.unwrap();
        let mut answer = vec![0; 512];
        let read = tokio::time::timeout(ENOUGH, second.read(&mut answer)).await;
        let answer = String::from_utf8_lossy(&answer[..read.unwrap().unwrap()]).into_owned();
        assert!(answer.ends_with("hello 127.0.0.2"), "{answer}");
    }
    // The first connection of that address is still there too.
    kept.write_all(b"st: localhost\r\n\r\n").await.unwrap();
    let answer = read_all(&mut kept).await;
    assert!(answer.ends_with("hello 127.0.0.2"), "{answer}");
    cancel.cancel();
}

#[tokio::test]
async fn the_idle_are_let_go_where_room_is_wanted() {
    let limits = Limits {
        connections: 1,
        header_timeout: 2 * ENOUGH,
        ..Limits::default()
    };
    let (address, cancel) = start(limits).await;
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(request).await.unwrap();
    let mut head = [0; 8];
    idle.read_exact(&mut head).await.unwrap();
    let mut next = TcpStream::connect(address).await.unwrap();
    next.write_all(request).await.unwrap();
    assert!(read_all(&mut next).await.ends_with("hello"));
    assert!(read_all(&mut idle).await.ends_with("hello"));
    cancel.cancel();
}

#[tokio::test]
async fn who_takes_nothing_is_cut_off() {
    let held = Arc::new(Semaphore::new(1));
    let holds = Arc::clone(&held);
    let routes = Router::new().route(
        "/",
        get(async move || {
            let place = holds.acquire_owned().await.unwrap();
            let endless = futures::stream::unfold(place, async |place| {
                let chunk = bytes::Bytes::from(vec![b'x'; 1024 * 1024]);
                Some((Ok::<_, std::convert::Infallible>(chunk), place))
            });
            axum::body::Body::from_stream(endless)
        }),
    );
    let limits = Limits {
        write_timeout: Duration::from_millis(200),
        ..Limits::default()
    };
    let (address, cancel) = start_with(routes, limits).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut head = [0; 8];
    stream.read_exact(&mut head).await.unwrap();
    // The answer, and everything it holds, is dropped while the client is still connected.
    let let_go = tokio::time::timeout(ENOUGH, held.acquire()).await;
    assert!(let_go.is_ok());
    cancel.cancel();
}

#[tokio::test]
async fn too_long_a_head_is_refused() {
    let (address, cancel) = start(Limits::default()).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET / HTTP/1.1\r\nHost: {}\r\n\r\n",
        "x".repeat(2 * MAX_HEAD_BYTES)
    );
    // The server may close the connection before it has read everything.
    drop(stream.write_all(head.as_bytes()).await);
    assert!(!read_all(&mut stream).await.contains("hello"));
    cancel.cancel();
}

#[tokio::test]
async fn within_tls_it_answers_and_who_does_not_shake_hands_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("test").unwrap();
    let pair = authority.sign(Purpose::Server, "webhook", &["localhost"]);
    pair.unwrap().write(dir.path(), "server").unwrap();
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, authority.pem()).unwrap();
    let own = CertificateFiles {
        certificate: dir.path().join("server.crt"),
        key: dir.path().join("server.key"),
    };
    let tls = ServerTls::load(own, ClientCertificates::None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cancel = CancellationToken::new();
    let limits = Limits {
        header_timeout: Duration::from_millis(500),
        ..Limits::default()
    };
    let routes = Router::new().route("/", get(async || "hello"));
    let tls = Some(Arc::new(tls));
    tokio::spawn(serve_within(limits, listener, tls, routes, cancel.clone()));

    let mut silent = TcpStream::connect(address).await.unwrap();
    let mut client = ClientConfig::clone(&ClientTls::load(ca, None).unwrap().config());
    client.alpn_protocols = vec![b"h2".to_vec(), ALPN.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    let shaken = TlsConnector::from(Arc::new(client)).connect(name, stream);
    let mut stream = shaken.await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(ALPN));
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("hello"), "{answer}");
    assert_eq!(read_all(&mut silent).await, "");
    cancel.cancel();
}

/// Clients that use up all descriptors do not thereby fill the log.
#[tokio::test]
async fn a_listener_that_fails_all_the_time_is_logged_now_and_then() {
    let log = testkit::Log::begin();
    // Every accept fails on a socket that does not listen.
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    );
    let listener = std::net::TcpListener::from(socket.unwrap());
    listener.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(listener).unwrap();
    let serving = serve(listener, None, Router::new(), CancellationToken::new());
    tokio::time::timeout(8 * ACCEPT_RETRY, serving)
        .await
        .unwrap_err();
    let lines = log.lines_with("cannot accept a connection");
    assert_eq!(lines.len(), 1, "{lines:?}");
}
