//! Tests of the stream between a socket and tonic: errors, the end, writes, and limits.

use std::io::IoSlice;
use std::path::PathBuf;
use std::pin::pin;

use futures::{FutureExt as _, StreamExt as _};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

struct Socket {
    _directory: TempDir,
    path: PathBuf,
}

fn listen() -> (Socket, UnixListener) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("test.sock");
    let listener = bind(&path, 0o600).unwrap();
    (
        Socket {
            _directory: directory,
            path,
        },
        listener,
    )
}

/// Returns the client's end and the server's end of one connection.
async fn connect() -> (UnixStream, AuthorityStream) {
    let (socket, listener) = listen();
    let mut incoming = pin!(incoming(listener));
    let client = UnixStream::connect(&socket.path).await.unwrap();
    let server = incoming.next().await.unwrap().unwrap();
    (client, server)
}

#[tokio::test]
async fn peer_is_who_connected() {
    let (_client, server) = connect().await;
    let peer = server.connect_info();
    assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
    assert_eq!(peer.gid, rustix::process::getegid().as_raw());
    assert_eq!(peer.pid, Some(rustix::process::getpid().as_raw_pid()));
}

#[tokio::test]
async fn the_end_comes_through_wherever_the_client_stops() {
    let whole = [
        &frames::PREFACE[..],
        &SETTINGS,
        &[0, 0, 1, 1, 0x4, 0, 0, 0, 1, 0x83],
    ]
    .concat();
    for length in [0, 10, 24, 28, 33, 40, whole.len()] {
        let (mut client, mut server) = connect().await;
        client.write_all(&whole[..length]).await.unwrap();
        drop(client);
        let mut read = Vec::new();
        server.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, whole[..length]);
    }
}

#[tokio::test]
async fn writes_pass_untouched() {
    let (mut client, mut server) = connect().await;
    server.write_all(b"one ").await.unwrap();
    assert!(server.is_write_vectored());
    let parts = [IoSlice::new(b"two "), IoSlice::new(b"three")];
    assert_eq!(server.write_vectored(&parts).await.unwrap(), 9);
    server.flush().await.unwrap();
    server.shutdown().await.unwrap();
    let mut read = String::new();
    client.read_to_string(&mut read).await.unwrap();
    assert_eq!(read, "one two three");
    // The client's side stays open after the server's shutdown.
    client.write_all(frames::PREFACE).await.unwrap();
    server.read_exact(&mut [0; 24]).await.unwrap();
}

#[tokio::test]
async fn connections_over_the_limit_wait() {
    let (socket, listener) = listen();
    let mut incoming = pin!(incoming_of(listener, 1, UnixPeer::new));
    let _first_client = UnixStream::connect(&socket.path).await.unwrap();
    let first = incoming.next().await.unwrap().unwrap();
    let _second_client = UnixStream::connect(&socket.path).await.unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert!(incoming.next().now_or_never().is_none());
    }
    drop(first);
    incoming.next().await.unwrap().unwrap();
}

#[tokio::test]
async fn a_user_with_too_many_connections_gets_no_more_and_keeps_no_other_out() {
    let (socket, listener) = listen();
    // The user of the test must not count as an operator.
    let user = |credentials| UnixPeer {
        is_operator: false,
        ..UnixPeer::new(credentials)
    };
    let mut incoming = pin!(incoming_of(listener, 64, user));
    let mut open = Vec::new();
    for _ in 0..8 {
        let client = UnixStream::connect(&socket.path).await.unwrap();
        open.push((client, incoming.next().await.unwrap().unwrap()));
    }
    let mut one_more = UnixStream::connect(&socket.path).await.unwrap();
    let mut read = [0];
    tokio::select! {
        _ = incoming.next() => panic!("it is not served"),
        read = one_more.read(&mut read) => assert_eq!(read.unwrap(), 0, "it is closed"),
    }
    open.pop();
    let _client = UnixStream::connect(&socket.path).await.unwrap();
    incoming.next().await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_begins_no_call_is_not_waited_for() {
    let call = [0, 0, 1, 1, 0x4, 0, 0, 0, 1, 0x83];
    for begins in [&[][..], &frames::PREFACE[..10], &frames::PREFACE[..]] {
        let (mut client, mut server) = connect().await;
        client.write_all(begins).await.unwrap();
        let mut read = Vec::new();
        let read = tokio::time::timeout(FIRST_CALL * 2, server.read_to_end(&mut read)).await;
        let error = read.expect("it ends").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
    // Between calls a client may pause.
    let (mut client, mut server) = connect().await;
    let whole = [&frames::PREFACE[..], &SETTINGS, &call].concat();
    client.write_all(&whole).await.unwrap();
    let mut read = Vec::new();
    let read = tokio::time::timeout(FIRST_CALL * 100, server.read_to_end(&mut read)).await;
    assert!(read.is_err(), "{read:?}");
}

/// In-memory log of a test.
#[derive(Clone, Default)]
struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_client_that_does_not_speak_grpc_is_told_in_the_log() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let (mut client, mut server) = connect().await;
    client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    server.read(&mut [0; 64]).await.unwrap_err();
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let line = "does not speak gRPC, its connection is closed: not an HTTP/2 client";
    assert_eq!(text.matches(line).count(), 1, "{text}");
    let pid = format!("pid={}", rustix::process::getpid().as_raw_pid());
    assert!(text.contains("uid=") && text.contains(&pid), "{text}");
}
