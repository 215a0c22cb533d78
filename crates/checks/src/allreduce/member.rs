//! Member of a gang, also on rank 0: executes rank 0's orders, and receives the verdict.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::collective::Collective;
use super::messages::{FromMember, FromRank0, Hello, MemberVerdict};
use super::port;
use super::wire::{self, GangKey, Receiver, Sender, WireError};

/// Pause between attempts to connect to rank 0.
const CALL_AGAIN: Duration = Duration::from_millis(300);
/// Time limit for a connection attempt, and for one to a port after `master_port`.
const CALL: Duration = Duration::from_secs(5);
const CALL_BEHIND: Duration = Duration::from_secs(1);
/// Most queued messages: rank 0 sends at most two before it gets an answer.
const WAITING: usize = 16;

/// Reason why a member got no verdict.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemberError {
    /// Rank 0 was not reached in time.
    #[error("rank 0 ({pod} at {address}) cannot be reached: {why}")]
    Unreached {
        pod: String,
        address: SocketAddr,
        why: String,
    },
    /// Rank 0 disconnected before the verdict.
    #[error("rank 0 ({0}) disconnected before the end")]
    Gone(String),
}

/// Connection to rank 0.
struct Line {
    sender: Sender,
    messages: mpsc::Receiver<FromRank0>,
}

/// Takes part until the verdict. Rank 0 has to be there by `formed`, and tests end by `until`.
pub(super) async fn take_part(
    collective: &mut impl Collective,
    hello: Hello,
    (pod, address): (&str, SocketAddr),
    key: &GangKey,
    formed: Instant,
    until: impl Fn() -> Instant,
) -> Result<MemberVerdict, MemberError> {
    let mut turn = 0;
    loop {
        let mut line = connect(pod, address, &mut turn, key, formed, &hello).await?;
        match follow(collective, &mut line, &until).await {
            Some(verdict) => return Ok(verdict),
            None if Instant::now() + CALL_AGAIN > formed => {
                return Err(MemberError::Gone(pod.to_owned()));
            }
            // Rank 0 may have restarted, or may not have accepted this member yet.
            None => tokio::time::sleep(CALL_AGAIN).await,
        }
    }
}

/// Connects to rank 0, trying each of its possible addresses in turn until one answers.
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
                let (passed_on, messages) = mpsc::channel(WAITING);
                tokio::spawn(pass_on(receiver, passed_on));
                return Ok(Line { sender, messages });
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

/// Passes on rank 0's messages until the connection ends.
async fn pass_on(mut receiver: Receiver, passed_on: mpsc::Sender<FromRank0>) {
    loop {
        match receiver.receive().await {
            Ok(message) => {
                if passed_on.send(message).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::debug!("the connection to rank 0 has ended: {error}");
                return;
            }
        }
    }
}

/// Executes rank 0's orders. Returns the verdict, or `None` if rank 0 disconnects before.
async fn follow(
    collective: &mut impl Collective,
    line: &mut Line,
    until: &impl Fn() -> Instant,
) -> Option<MemberVerdict> {
    let mut interrupted = None;
    loop {
        let message = match interrupted.take() {
            Some(message) => message,
            None => line.messages.recv().await?,
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
                other = line.messages.recv() => Err(other),
            },
            FromRank0::Test(test) => tokio::select! {
                result = collective.test(&test, until()) => {
                    Ok(FromMember::Result { step: test.step, result })
                }
                other = line.messages.recv() => Err(other),
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
