//! Admission of members by rank 0: accepts connections, identifies members, and passes on their
//! messages.
//!
//! Any process that reaches the port can connect. Unidentified callers have little time and few
//! places: a new caller takes the place of the oldest, and a stranger never that of an address
//! of the roster. So members are admitted however many strangers connect.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use preflight::roster::Member;
use runtime::logging::Seldom;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::super::messages::{FromMember, Hello, PROTOCOL};
use super::super::wire::{self, GangKey, Receiver, Sender, WireError};
use super::Joined;

/// Time limit for a caller to identify itself. A member does so right after connecting, and
/// connects again otherwise.
const HELLO: Duration = Duration::from_secs(2);
/// Largest first message (bytes): names and the pod's own variables take a tenth of it. Every
/// caller can make rank 0 use this much memory.
const MOST_HELLO: u32 = 256 << 10;
/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most unidentified callers from addresses outside the roster.
const STRANGERS: usize = 64;
/// Most unidentified callers from addresses of the roster, beyond the number of members: other
/// processes share the address of a pod on the host's network.
const MORE: usize = 64;
/// Most queued messages of members; a member sends one at a time.
const WAITING: usize = 1024;

/// Event of a connection.
pub(super) enum Incoming {
    /// A member has connected.
    Joined(usize, Box<Joined>),
    /// A member has sent a message.
    Message(usize, Box<FromMember>),
    /// The connection of a member has ended.
    Gone(usize, u64),
}

/// State shared by all connections.
struct Door {
    key: GangKey,
    pods: Vec<String>,
    events: mpsc::Sender<Incoming>,
    /// Connections of members, by rank.
    members: Mutex<Vec<Option<AbortHandle>>>,
    refused: Seldom,
}

/// Unidentified callers of one kind, oldest first.
struct Callers {
    waiting: VecDeque<AbortHandle>,
    most: usize,
}

/// Listens for members until the receiver is dropped.
pub(super) fn listen(
    listener: TcpListener,
    roster: &[Member],
    key: GangKey,
) -> mpsc::Receiver<Incoming> {
    listen_within(HELLO, listener, roster, key)
}

/// Like [`listen`], with this time for a caller to identify itself.
fn listen_within(
    hello: Duration,
    listener: TcpListener,
    roster: &[Member],
    key: GangKey,
) -> mpsc::Receiver<Incoming> {
    let (events, incoming) = mpsc::channel(WAITING);
    let addresses: Vec<IpAddr> = roster.iter().map(|member| member.address).collect();
    let door = Arc::new(Door {
        key,
        pods: roster.iter().map(|member| member.pod.clone()).collect(),
        events,
        members: Mutex::new(roster.iter().map(|_| None).collect()),
        refused: Seldom::default(),
    });
    let mut known = Callers::new(roster.len() + MORE);
    let mut strangers = Callers::new(STRANGERS);
    tokio::spawn(async move {
        for connection in 0.. {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = door.events.closed() => return,
            };
            let Ok((stream, from)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let from = from.ip().to_canonical();
            let callers = if addresses
                .iter()
                .any(|address| address.to_canonical() == from)
            {
                &mut known
            } else {
                &mut strangers
            };
            let meeting = Arc::clone(&door).meet(hello, connection, stream);
            callers.take(tokio::spawn(meeting).abort_handle());
        }
    });
    incoming
}

// === impl Callers ===

impl Callers {
    fn new(most: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            most,
        }
    }

    /// Adds a caller; if there is no place left, the oldest is disconnected.
    fn take(&mut self, caller: AbortHandle) {
        self.waiting.retain(|caller| !caller.is_finished());
        if self.waiting.len() >= self.most
            && let Some(oldest) = self.waiting.pop_front()
        {
            oldest.abort();
        }
        self.waiting.push_back(caller);
    }
}

// === impl Door ===

impl Door {
    /// Identifies a caller, and admits it if it is a member.
    async fn meet(self: Arc<Self>, within: Duration, connection: u64, stream: TcpStream) {
        let met = tokio::time::timeout(within, self.hello(stream)).await;
        let (rank, hello, sender, receiver) = match met {
            Ok(Ok(member)) => member,
            Ok(Err(WireError::Broken(error))) => {
                return tracing::debug!("a caller is gone: {error}");
            }
            Ok(Err(error)) => {
                if let Some(not_logged_before) = self.refused.now() {
                    tracing::warn!(
                        not_logged_before,
                        "a caller is not admitted to the gang: {error}"
                    );
                }
                return;
            }
            Err(_) => return tracing::debug!("a caller does not identify itself in time"),
        };
        let joined = Box::new(Joined {
            connection,
            hello,
            sender,
        });
        // In a task of its own, since this one gives way to later callers.
        let part = Arc::clone(&self).serve(rank, joined, receiver);
        let part = tokio::spawn(part).abort_handle();
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        // The member has connected again, so its old connection is dropped.
        if let Some(place) = members.get_mut(rank)
            && let Some(before) = place.replace(part)
        {
            before.abort();
        }
    }

    /// Returns the first message of a member, with its rank.
    async fn hello(
        &self,
        stream: TcpStream,
    ) -> Result<(usize, Hello, Sender, Receiver), WireError> {
        let (sender, mut receiver) = wire::greet(stream, &self.key, false).await?;
        let FromMember::Hello(hello) = receiver.receive_within(MOST_HELLO).await? else {
            return Err(WireError::Garbled(
                "the first message is no introduction".to_owned(),
            ));
        };
        let rank = place(&hello, &self.pods)?;
        Ok((rank, hello, sender, receiver))
    }

    /// Passes on a member's messages until the connection or the receiver ends.
    async fn serve(self: Arc<Self>, rank: usize, joined: Box<Joined>, mut receiver: Receiver) {
        let connection = joined.connection;
        let over = async {
            self.events
                .send(Incoming::Joined(rank, joined))
                .await
                .ok()?;
            pass_on(rank, &mut receiver, &self.events).await;
            self.events
                .send(Incoming::Gone(rank, connection))
                .await
                .ok()
        };
        over.await.unwrap_or_default();
    }
}

/// Passes on a member's messages until the connection ends.
async fn pass_on(rank: usize, receiver: &mut Receiver, events: &mpsc::Sender<Incoming>) {
    loop {
        let message = tokio::select! {
            message = receiver.receive() => message,
            () = events.closed() => return,
        };
        let Ok(message) = message else {
            return;
        };
        if events
            .send(Incoming::Message(rank, Box::new(message)))
            .await
            .is_err()
        {
            return;
        }
    }
}

/// Returns the rank of a valid member.
fn place(hello: &Hello, pods: &[String]) -> Result<usize, WireError> {
    let wrong = |why: String| Err(WireError::Garbled(why));
    if hello.protocol != PROTOCOL {
        let version = hello.protocol;
        return wrong(format!(
            "{} speaks version {version} of the protocol, and this is {PROTOCOL}; run one image in all pods",
            hello.pod
        ));
    }
    if pods.get(hello.rank) != Some(&hello.pod) {
        return wrong(format!("{} is not rank {} here", hello.pod, hello.rank));
    }
    Ok(hello.rank)
}

#[cfg(test)]
mod tests;
