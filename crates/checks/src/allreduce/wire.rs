//! Messages between rank 0 and the other members of a gang, over TCP: JSON, with a length
//! before and a seal after each message.
//!
//! A seal is an HMAC with the gang's secret over the nonces that both sides chose for this
//! connection, the direction, the index of the message and its text. So no other process can
//! take part, and no message of another connection can be replayed. If the gang has no secret
//! its id is used instead, which only keeps out processes that connect by mistake. Nothing is
//! encrypted: no message holds a secret except the id of a group, and NCCL admits no rank
//! without that id.

use std::io;
use std::time::Duration;

use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Length of a nonce that a side chooses for a connection (bytes).
const NONCE: usize = 16;
/// Length of a seal (bytes).
const SEAL: usize = 32;
/// Largest message (bytes): one that names all members of the largest gang has a quarter of it.
const MOST: u32 = 4 << 20;
/// Time limit for the first bytes of a connection, so that a stranger cannot hold it.
const GREETING: Duration = Duration::from_secs(10);

/// Key of a gang.
#[derive(Clone)]
pub(super) struct GangKey(hmac::Key);

/// Sending half of a connection.
pub(super) struct Sender {
    stream: OwnedWriteHalf,
    seals: Seals,
}

/// Receiving half of a connection.
pub(super) struct Receiver {
    stream: OwnedReadHalf,
    seals: Seals,
}

/// Seals of one direction.
struct Seals {
    key: hmac::Key,
    /// Nonces of both sides, and the direction.
    context: Vec<u8>,
    /// Index of the next message.
    next: u64,
}

/// Reason why a connection is unusable.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The other side is gone, or does not answer.
    #[error("the connection is broken: {0}")]
    Broken(#[from] io::Error),
    /// A message is not from a member of this gang.
    #[error("the other side does not have the gang's secret")]
    Seal,
    /// A message cannot be parsed.
    #[error("the other side does not speak as this version does: {0}")]
    Garbled(String),
}

// === impl GangKey ===

impl GangKey {
    pub(super) fn new(secret: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }
}

/// Exchanges nonces on a new connection. `called` is true on the side that connected.
pub(super) async fn greet(
    mut stream: TcpStream,
    key: &GangKey,
    called: bool,
) -> Result<(Sender, Receiver), WireError> {
    stream.set_nodelay(true)?;
    let mut ours = [0; NONCE];
    let filled = SystemRandom::new().fill(&mut ours);
    filled.map_err(|_| io::Error::other("no random numbers"))?;
    let mut theirs = [0; NONCE];
    let greeted = async {
        stream.write_all(&ours).await?;
        stream.read_exact(&mut theirs).await
    };
    match tokio::time::timeout(GREETING, greeted).await {
        Ok(greeted) => greeted?,
        Err(_) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    };
    let (caller, callee) = if called {
        (ours, theirs)
    } else {
        (theirs, ours)
    };
    let seals = |direction: u8| Seals {
        key: key.0.clone(),
        context: [&caller[..], &callee[..], &[direction]].concat(),
        next: 0,
    };
    let (receiving, sending) = stream.into_split();
    // The caller's messages have direction 1.
    let sender = Sender {
        stream: sending,
        seals: seals(u8::from(called)),
    };
    let receiver = Receiver {
        stream: receiving,
        seals: seals(u8::from(!called)),
    };
    Ok((sender, receiver))
}

// === impl Sender ===

impl Sender {
    pub(super) async fn send(&mut self, message: &impl Serialize) -> Result<(), WireError> {
        let text =
            serde_json::to_vec(message).map_err(|error| WireError::Garbled(error.to_string()))?;
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        if length > MOST {
            return Err(WireError::Garbled(format!("a message has {length} bytes")));
        }
        let seal = self.seals.seal(&text);
        let whole = [&length.to_be_bytes()[..], &text, seal.as_ref()].concat();
        Ok(self.stream.write_all(&whole).await?)
    }
}

// === impl Receiver ===

impl Receiver {
    /// Returns the next message. A future that is dropped loses the bytes read so far.
    pub(super) async fn receive<T: DeserializeOwned>(&mut self) -> Result<T, WireError> {
        self.receive_within(MOST).await
    }

    /// Returns the next message, of at most `most` bytes.
    pub(super) async fn receive_within<T: DeserializeOwned>(
        &mut self,
        most: u32,
    ) -> Result<T, WireError> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).await?;
        let length = u32::from_be_bytes(length);
        if length > most {
            return Err(WireError::Garbled(format!("a message has {length} bytes")));
        }
        // Memory grows with the bytes received, so that a stranger cannot reserve it by a
        // length alone.
        let mut text = Vec::new();
        let stream = (&mut self.stream).take(u64::from(length));
        tokio::pin!(stream);
        stream.read_to_end(&mut text).await?;
        let mut seal = [0; SEAL];
        self.stream.read_exact(&mut seal).await?;
        self.seals.check(&text, &seal)?;
        serde_json::from_slice(&text).map_err(|error| WireError::Garbled(error.to_string()))
    }
}

// === impl Seals ===

impl Seals {
    fn seal(&mut self, text: &[u8]) -> hmac::Tag {
        let sealed = self.sealed(text);
        self.next += 1;
        hmac::sign(&self.key, &sealed)
    }

    fn check(&mut self, text: &[u8], seal: &[u8]) -> Result<(), WireError> {
        let sealed = self.sealed(text);
        self.next += 1;
        hmac::verify(&self.key, &sealed, seal).map_err(|_| WireError::Seal)
    }

    fn sealed(&self, text: &[u8]) -> Vec<u8> {
        [&self.context[..], &self.next.to_be_bytes(), text].concat()
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn connected(
        ours: &GangKey,
        theirs: &GangKey,
    ) -> ((Sender, Receiver), (Sender, Receiver)) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let (ours, theirs) =
            tokio::join!(greet(stream, ours, true), greet(accepted, theirs, false));
        (ours.unwrap(), theirs.unwrap())
    }

    #[tokio::test]
    async fn members_hear_each_other_and_strangers_are_not_heard() {
        let key = GangKey::new(b"secret");
        let ((mut sender, mut back), (mut answer, mut receiver)) = connected(&key, &key).await;
        for number in 0..3 {
            sender.send(&number).await.unwrap();
            assert_eq!(receiver.receive::<u32>().await.unwrap(), number);
            answer.send(&"yes").await.unwrap();
            assert_eq!(back.receive::<String>().await.unwrap(), "yes");
        }
        let ((mut sender, _), (_, mut receiver)) = connected(&GangKey::new(b"other"), &key).await;
        sender.send(&1).await.unwrap();
        assert!(matches!(
            receiver.receive::<u32>().await,
            Err(WireError::Seal)
        ));
    }

    #[tokio::test]
    async fn a_message_counts_once_in_its_place_and_on_its_connection() {
        let key = GangKey::new(b"secret");
        let ((mut first, _), _) = connected(&key, &key).await;
        let ((mut second, _), (_, mut receiver)) = connected(&key, &key).await;
        let text = b"1".to_vec();
        let of_another = first.seals.seal(&text);
        let whole = |seal: &hmac::Tag| [&1_u32.to_be_bytes()[..], b"1", seal.as_ref()].concat();
        second.stream.write_all(&whole(&of_another)).await.unwrap();
        assert!(matches!(
            receiver.receive::<u32>().await,
            Err(WireError::Seal)
        ));

        let ((mut sender, _), (_, mut receiver)) = connected(&key, &key).await;
        let seal = sender.seals.seal(&text);
        sender.stream.write_all(&whole(&seal)).await.unwrap();
        assert_eq!(receiver.receive::<u32>().await.unwrap(), 1);
        sender.stream.write_all(&whole(&seal)).await.unwrap();
        assert!(matches!(
            receiver.receive::<u32>().await,
            Err(WireError::Seal)
        ));
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_or_none_is_refused() {
        let key = GangKey::new(b"secret");
        let ((mut sender, _), (_, mut receiver)) = connected(&key, &key).await;
        sender
            .stream
            .write_all(&u32::MAX.to_be_bytes())
            .await
            .unwrap();
        assert!(matches!(
            receiver.receive::<u32>().await,
            Err(WireError::Garbled(_))
        ));
        for (most, is_taken) in [(5, true), (4, false)] {
            let ((mut sender, _), (_, mut receiver)) = connected(&key, &key).await;
            sender.send(&"abc").await.unwrap();
            let received = receiver.receive_within::<String>(most).await;
            assert_eq!(received.is_ok(), is_taken, "{received:?}");
        }
        let ((mut sender, _), (_, mut receiver)) = connected(&key, &key).await;
        sender.send(&"no number").await.unwrap();
        assert!(matches!(
            receiver.receive::<u32>().await,
            Err(WireError::Garbled(_))
        ));
    }
}
