//! The door of rank 0: who calls, whether it is a member, and what it says.
//!
//! Whoever reaches the port can call. Those who have not said who they are have little time and few places: a new
//! caller takes the place of the oldest, and no stranger that of an address of the roster. So members come in
//! however many strangers call.

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

/// Time for a caller to say who it is. A member does so as soon as it is connected, and calls again.
const HELLO: Duration = Duration::from_secs(2);
/// Longest of what a caller says of itself, in bytes: its names and its pod's own variables have a tenth of it.
/// Whoever calls gets so much memory.
const MOST_HELLO: u32 = 256 << 10;
/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Callers from other addresses than those of the roster that may be about to say who they are.
const STRANGERS: usize = 64;
/// Callers more than members that may be about to say so from addresses of the roster: other processes have the
/// address of a pod on the host's network, too.
const MORE: usize = 64;
/// What members said and nobody has read yet; a member says one thing at a time.
const WAITING: usize = 1024;

/// What is heard.
pub(super) enum Heard {
    /// A member has come.
    Joined(usize, Box<Joined>),
    /// A member says something.
    Said(usize, Box<FromMember>),
    /// The connection of a member is over.
    Gone(usize, u64),
}

/// The parts that all connections share.
struct Door {
    key: GangKey,
    pods: Vec<String>,
    say: mpsc::Sender<Heard>,
    /// The connections of members, by rank.
    members: Mutex<Vec<Option<AbortHandle>>>,
    refused: Seldom,
}

/// The callers of one kind that have not said who they are, the oldest first.
struct Callers {
    waiting: VecDeque<AbortHandle>,
    most: usize,
}

/// Listens for members; ends when nobody hears.
pub(super) fn listen(
    listener: TcpListener,
    roster: &[Member],
    key: GangKey,
) -> mpsc::Receiver<Heard> {
    listen_within(HELLO, listener, roster, key)
}

/// The same with this time for a caller to say who it is.
fn listen_within(
    hello: Duration,
    listener: TcpListener,
    roster: &[Member],
    key: GangKey,
) -> mpsc::Receiver<Heard> {
    let (say, heard) = mpsc::channel(WAITING);
    let addresses: Vec<IpAddr> = roster.iter().map(|member| member.address).collect();
    let door = Arc::new(Door {
        key,
        pods: roster.iter().map(|member| member.pod.clone()).collect(),
        say,
        members: Mutex::new(roster.iter().map(|_| None).collect()),
        refused: Seldom::default(),
    });
    let mut known = Callers::new(roster.len() + MORE);
    let mut strangers = Callers::new(STRANGERS);
    tokio::spawn(async move {
        for connection in 0.. {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = door.say.closed() => return,
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
    heard
}

// === impl Callers ===

impl Callers {
    fn new(most: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            most,
        }
    }

    /// Takes a caller; where there is no place left the oldest has to go.
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
    /// Hears who calls, and lets it in if it is a member.
    async fn meet(self: Arc<Self>, within: Duration, connection: u64, stream: TcpStream) {
        let met = tokio::time::timeout(within, self.hello(stream)).await;
        let (rank, hello, sender, receiver) = match met {
            Ok(Ok(member)) => member,
            Ok(Err(WireError::Broken(error))) => {
                return tracing::debug!("a caller is gone: {error}");
            }
            Ok(Err(error)) => {
                if let Some(unsaid) = self.refused.now() {
                    tracing::warn!(unsaid, "somebody is not let into the gang: {error}");
                }
                return;
            }
            Err(_) => return tracing::debug!("a caller does not say who it is"),
        };
        let joined = Box::new(Joined {
            connection,
            hello,
            sender,
        });
        // A task of its own: this one gives way to later callers.
        let part = Arc::clone(&self).serve(rank, joined, receiver);
        let part = tokio::spawn(part).abort_handle();
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        // It has called again, and is not heard by its old connection any more.
        if let Some(place) = members.get_mut(rank)
            && let Some(before) = place.replace(part)
        {
            before.abort();
        }
    }

    /// Returns what a member has said of itself, with its rank.
    async fn hello(
        &self,
        stream: TcpStream,
    ) -> Result<(usize, Hello, Sender, Receiver), WireError> {
        let (sender, mut receiver) = wire::greet(stream, &self.key, false).await?;
        let FromMember::Hello(hello) = receiver.receive_within(MOST_HELLO).await? else {
            return Err(WireError::Garbled("it does not say who it is".to_owned()));
        };
        let rank = place(&hello, &self.pods)?;
        Ok((rank, hello, sender, receiver))
    }

    /// Hands on what a member says, until it is gone. Where nobody hears, all is over.
    async fn serve(self: Arc<Self>, rank: usize, joined: Box<Joined>, mut receiver: Receiver) {
        let connection = joined.connection;
        let over = async {
            self.say.send(Heard::Joined(rank, joined)).await.ok()?;
            pass_on(rank, &mut receiver, &self.say).await;
            self.say.send(Heard::Gone(rank, connection)).await.ok()
        };
        over.await.unwrap_or_default();
    }
}

/// Hands on what a member says, until it is gone.
async fn pass_on(rank: usize, receiver: &mut Receiver, say: &mpsc::Sender<Heard>) {
    loop {
        let said = tokio::select! {
            said = receiver.receive() => said,
            () = say.closed() => return,
        };
        let Ok(said) = said else {
            return;
        };
        if say.send(Heard::Said(rank, Box::new(said))).await.is_err() {
            return;
        }
    }
}

/// Returns the rank of a member that is one.
fn place(hello: &Hello, pods: &[String]) -> Result<usize, WireError> {
    let wrong = |why: String| Err(WireError::Garbled(why));
    if hello.protocol != PROTOCOL {
        let told = hello.protocol;
        return wrong(format!(
            "{} speaks version {told} of the protocol, and this is {PROTOCOL}; run one image in all pods",
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
