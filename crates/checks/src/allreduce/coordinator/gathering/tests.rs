//! Tests of admission on the loopback device, with members and with strangers without the
//! gang's secret.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use super::*;

/// Addresses of the members, and of strangers.
const MEMBERS: [&str; 2] = ["127.0.0.21", "127.0.0.22"];
const STRANGER: &str = "127.0.0.99";
/// Strangers that connect at once.
const MANY: usize = 300;
/// Time limit for operations that should be immediate.
const SOON: Duration = Duration::from_secs(30);

struct Gang {
    incoming: mpsc::Receiver<Incoming>,
    address: SocketAddr,
    key: GangKey,
}

impl Gang {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.20:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let roster: Vec<Member> = MEMBERS
            .iter()
            .enumerate()
            .map(|(rank, address)| Member {
                pod: format!("pod-{rank}"),
                address: address.parse().unwrap(),
                checks: None,
            })
            .collect();
        let key = GangKey::new(b"secret");
        Self {
            // No time limit expires during a test.
            incoming: listen_within(10 * SOON, listener, &roster, key.clone()),
            address,
            key,
        }
    }

    async fn call(&self, from: &str) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(from.parse().unwrap(), 0))?;
        socket.connect(self.address).await
    }

    /// Connects as a member does; returns the connection, which ends when dropped.
    async fn join(&self, rank: usize, from: &str) -> (Sender, Receiver) {
        let stream = self.call(from).await.unwrap();
        let (mut sender, receiver) = wire::greet(stream, &self.key, true).await.unwrap();
        let hello = Hello {
            protocol: PROTOCOL,
            rank,
            pod: format!("pod-{rank}"),
            node: format!("node-{rank}"),
            devices: 1,
            endpoint: None,
            topology: None,
            inherited: BTreeMap::new(),
        };
        sender.send(&FromMember::Hello(hello)).await.unwrap();
        (sender, receiver)
    }

    async fn hear(&mut self) -> Incoming {
        let incoming = tokio::time::timeout(SOON, self.incoming.recv()).await;
        incoming
            .expect("a member connects or sends in time")
            .unwrap()
    }

    /// Returns the next member that connects, with its rank.
    async fn joined(&mut self) -> (usize, Box<Joined>) {
        match self.hear().await {
            Incoming::Joined(rank, joined) => (rank, joined),
            Incoming::Message(..) | Incoming::Gone(..) => panic!("something else arrives"),
        }
    }
}

/// Connects as a stranger that sends a nonce and nothing else. The answer is read.
async fn silent(gang: &Gang, from: &str) -> TcpStream {
    let mut stream = gang.call(from).await.unwrap();
    // Fails if the place of the stranger was taken.
    drop(stream.write_all(&[7; 16]).await);
    drop(stream.read_exact(&mut [0; 16]).await);
    stream
}

/// Returns true if the other side still holds a connection.
fn is_held(stream: &TcpStream) -> bool {
    let read = stream.try_read(&mut [0; 16]);
    matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

#[tokio::test]
async fn members_come_in_however_many_strangers_call() {
    // The second time from an address of the roster, as of other processes on a host's network.
    for from in [STRANGER, MEMBERS[0]] {
        let mut gang = Gang::new().await;
        let mut strangers = Vec::new();
        for _ in 0..MANY {
            strangers.push(silent(&gang, from).await);
        }
        let _first = gang.join(0, MEMBERS[0]).await;
        assert_eq!(gang.joined().await.0, 0);
        // A member with another address than in the roster, as behind a gateway, is admitted,
        // too.
        let _second = gang.join(1, STRANGER).await;
        assert_eq!(gang.joined().await.0, 1);
        drop(strangers);
    }
}

#[tokio::test]
async fn the_oldest_stranger_gives_way_and_a_member_to_no_stranger() {
    let gang = Gang::new().await;
    let slow = silent(&gang, MEMBERS[1]).await;
    let first = silent(&gang, STRANGER).await;
    let mut more = Vec::new();
    while is_held(&first) {
        assert!(more.len() < STRANGERS + 8, "the first is still there");
        more.push(silent(&gang, STRANGER).await);
        assert!(is_held(&slow), "a stranger has its place");
        tokio::task::yield_now().await;
    }
    assert!(more.len() >= STRANGERS, "it went before there were many");
}

#[tokio::test]
async fn a_member_that_calls_again_is_heard_by_its_new_connection_only() {
    let mut gang = Gang::new().await;
    let says = |step| FromMember::Group {
        step,
        group: Ok(String::new()),
    };
    let (mut old, _ears) = gang.join(0, MEMBERS[0]).await;
    let (_, first) = gang.joined().await;
    let (mut new, _ears) = gang.join(0, MEMBERS[0]).await;
    let (_, second) = gang.joined().await;
    assert_ne!(first.connection, second.connection);
    // Fails if the old connection is closed already.
    drop(old.send(&says(1)).await);
    new.send(&says(2)).await.unwrap();
    match gang.hear().await {
        Incoming::Message(0, message) => assert_eq!(*message, says(2)),
        _ => panic!("something else arrives"),
    }
}

#[tokio::test]
async fn who_has_another_secret_is_not_let_in() {
    let mut gang = Gang::new().await;
    let right = std::mem::replace(&mut gang.key, GangKey::new(b"other"));
    let _stranger = gang.join(0, MEMBERS[0]).await;
    gang.key = right;
    let _member = gang.join(1, MEMBERS[1]).await;
    assert_eq!(gang.joined().await.0, 1);
}
