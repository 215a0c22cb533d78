//! The door of rank 0: who calls, whether it is a member, and what it says.

use std::sync::Arc;
use std::time::Duration;

use preflight::roster::Member;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};

use super::super::messages::{FromMember, Hello, PROTOCOL};
use super::super::wire::{self, GangKey, Receiver, WireError};
use super::Joined;

/// Time for a caller to say who it is.
const HELLO: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections beside those of members, which strangers may hold until they have to say who they are.
const STRANGERS: usize = 64;
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

/// Listens for members; ends when nobody hears.
pub(super) fn listen(
    listener: TcpListener,
    roster: &[Member],
    key: GangKey,
) -> mpsc::Receiver<Heard> {
    let (say, heard) = mpsc::channel(WAITING);
    let pods: Arc<[String]> = roster.iter().map(|member| member.pod.clone()).collect();
    let room = Arc::new(Semaphore::new(roster.len() + STRANGERS));
    tokio::spawn(async move {
        for connection in 0.. {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = say.closed() => return,
            };
            let Ok((stream, _)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let (key, pods, say) = (key.clone(), Arc::clone(&pods), say.clone());
            tokio::spawn(async move {
                if let Err(error) = serve(connection, stream, &key, &pods, &say).await {
                    tracing::debug!("a connection is over: {error}");
                }
                drop(permit);
            });
        }
    });
    heard
}

async fn serve(
    connection: u64,
    stream: TcpStream,
    key: &GangKey,
    pods: &[String],
    say: &mpsc::Sender<Heard>,
) -> Result<(), WireError> {
    let (sender, mut receiver) = wire::greet(stream, key, false).await?;
    let hello = tokio::time::timeout(HELLO, receiver.receive()).await;
    let hello = match hello {
        Ok(Ok(FromMember::Hello(hello))) => hello,
        Ok(Ok(_)) => return Err(WireError::Garbled("it does not say who it is".to_owned())),
        Ok(Err(error)) => {
            tracing::warn!("somebody is not let into the gang: {error}");
            return Err(error);
        }
        Err(_) => return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    };
    let rank = place(&hello, pods)?;
    let joined = Joined {
        connection,
        hello,
        sender,
    };
    let over = async {
        say.send(Heard::Joined(rank, Box::new(joined))).await.ok()?;
        pass_on(rank, &mut receiver, say).await;
        say.send(Heard::Gone(rank, connection)).await.ok()
    };
    // Where nobody hears, all is over.
    over.await.unwrap_or_default();
    Ok(())
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
    let wrong = |why: String| {
        tracing::warn!("somebody is not let into the gang: {why}");
        Err(WireError::Garbled(why))
    };
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
