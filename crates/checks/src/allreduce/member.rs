//! A member of a gang, rank 0 among them: does what rank 0 says, and hears how it ended.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::collective::Collective;
use super::messages::{FromMember, FromRank0, Hello, Verdict};
use super::port;
use super::wire::{self, GangKey, Receiver, Sender, WireError};

/// Pause before rank 0 is called again.
const CALL_AGAIN: Duration = Duration::from_millis(300);
/// Time for one call, and for one at a port behind `master_port`.
const CALL: Duration = Duration::from_secs(5);
const CALL_BEHIND: Duration = Duration::from_secs(1);
/// Messages that wait: rank 0 says no more than two before it hears from us.
const WAITING: usize = 16;

/// A member that hears no verdict.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemberError {
    /// Rank 0 was not there in time.
    #[error("rank 0 ({pod} at {address}) is not reached: {why}")]
    Unreached {
        pod: String,
        address: SocketAddr,
        why: String,
    },
    /// Rank 0 has gone away.
    #[error("rank 0 ({0}) has gone away before the end")]
    Gone(String),
}

/// The ends of a connection to rank 0.
struct Line {
    sender: Sender,
    heard: mpsc::Receiver<FromRank0>,
}

/// Takes part until the verdict. Rank 0 has to be there by `formed`, and tests end by `until`.
pub(super) async fn take_part(
    collective: &mut impl Collective,
    hello: Hello,
    (pod, address): (&str, SocketAddr),
    key: &GangKey,
    formed: Instant,
    until: impl Fn() -> Instant,
) -> Result<Verdict, MemberError> {
    let mut turn = 0;
    loop {
        let mut line = connect(pod, address, &mut turn, key, formed, &hello).await?;
        match follow(collective, &mut line, &until).await {
            Some(verdict) => return Ok(verdict),
            None if Instant::now() + CALL_AGAIN > formed => {
                return Err(MemberError::Gone(pod.to_owned()));
            }
            // It may have been restarted, or not have wanted us yet.
            None => tokio::time::sleep(CALL_AGAIN).await,
        }
    }
}

/// Calls rank 0 until it answers, at each place in its turn.
async fn connect(
    pod: &str,
    address: SocketAddr,
    turn: &mut usize,
    key: &GangKey,
    formed: Instant,
    hello: &Hello,
) -> Result<Line, MemberError> {
    loop {
        let place = port::places(address).nth(*turn);
        *turn = if place.is_some() { *turn + 1 } else { 0 };
        let Some(place) = place else {
            tokio::time::sleep(CALL_AGAIN).await;
            continue;
        };
        let time = if place == address { CALL } else { CALL_BEHIND };
        let called = tokio::time::timeout(time, call(place, key, hello)).await;
        let why = match called {
            Ok(Ok((sender, receiver))) => {
                let (say, heard) = mpsc::channel(WAITING);
                tokio::spawn(hear(receiver, say));
                return Ok(Line { sender, heard });
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() + CALL_AGAIN > formed {
            return Err(MemberError::Unreached {
                pod: pod.to_owned(),
                address,
                why,
            });
        }
    }
}

async fn call(
    address: SocketAddr,
    key: &GangKey,
    hello: &Hello,
) -> Result<(Sender, Receiver), WireError> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, receiver) = wire::greet(stream, key, true).await?;
    sender.send(&FromMember::Hello(hello.clone())).await?;
    Ok((sender, receiver))
}

/// Hands on what rank 0 says, until it is gone.
async fn hear(mut receiver: Receiver, say: mpsc::Sender<FromRank0>) {
    loop {
        match receiver.receive().await {
            Ok(message) => {
                if say.send(message).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::debug!("rank 0 is not heard any more: {error}");
                return;
            }
        }
    }
}

/// Does what rank 0 says; returns the verdict, or `None` where it goes away before.
async fn follow(
    collective: &mut impl Collective,
    line: &mut Line,
    until: &impl Fn() -> Instant,
) -> Option<Verdict> {
    let mut interrupted = None;
    loop {
        let message = match interrupted.take() {
            Some(message) => message,
            None => line.heard.recv().await?,
        };
        let answer = match message {
            FromRank0::Verdict(verdict) => return Some(verdict),
            FromRank0::Over { .. } => {
                collective.over();
                continue;
            }
            FromRank0::WithoutTopology => {
                collective.without_topology();
                continue;
            }
            FromRank0::Lead { step } => tokio::select! {
                group = collective.lead(until()) => Ok(FromMember::Group { step, group }),
                other = line.heard.recv() => Err(other),
            },
            FromRank0::Test(test) => tokio::select! {
                result = collective.test(&test, until()) => {
                    Ok(FromMember::Result { step: test.step, result })
                }
                other = line.heard.recv() => Err(other),
            },
        };
        match answer {
            Ok(answer) => line.sender.send(&answer).await.ok()?,
            Err(other) => {
                collective.over();
                interrupted = Some(other?);
            }
        }
    }
}
