//! Bodies of requests, read into a budget of bytes shared by all of them.
//!
//! A body occupies the bytes that have arrived, so a slow one costs next to nothing. When the
//! budget is used up, the largest body of the address that occupies most gives way, so that no
//! address takes the room of one that has less. A body that is complete and waits for its
//! answer can give way too: its bytes stop counting, and its holder is asked to drop it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::Peer;

/// Most bytes of an oversized body that are read and dropped, so that the sender is still there
/// to read the refusal: a sender that is cut off reads nothing.
const MAX_DROPPED: usize = 32 * 1024 * 1024;

/// Budget of bytes for bodies.
#[derive(Debug)]
pub struct Bodies {
    total: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    next: u64,
    bodies: BTreeMap<u64, Part>,
}

/// Part of the budget that one body occupies.
#[derive(Debug)]
struct Part {
    peer: Peer,
    bytes: usize,
    give_way: CancellationToken,
}

/// Body that was read; occupies its part of the budget until dropped.
#[derive(Debug)]
pub struct ReadBody {
    bytes: Vec<u8>,
    place: Place,
}

/// Entry of a body in the budget, until dropped.
#[derive(Debug)]
struct Place {
    of: Arc<Bodies>,
    number: u64,
    peer: Peer,
    give_way: CancellationToken,
}

/// Reason why a body was not read. Converts into a response with a status and a text.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The body is larger than the limit.
    #[error("the request has more than {0} bytes")]
    TooLong(usize),
    /// The body did not arrive in time.
    #[error("the request did not arrive within {} s", .0.as_secs())]
    TooSlow(Duration),
    /// The budget is used up, and the sender of this body occupies most of it.
    #[error("too many requests are being read; retry later")]
    Crowded,
    /// The sender disconnected, or does not speak HTTP.
    #[error("the request was cut off")]
    Broken(#[source] axum::Error),
}

// === impl Bodies ===

impl Bodies {
    /// Creates a budget of `total` bytes.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            taken: Mutex::default(),
        })
    }

    /// Reads the body of a request by `peer`, of at most `most` bytes, within a time limit.
    pub async fn read(
        self: &Arc<Self>,
        peer: Peer,
        body: Body,
        most: usize,
        within: Duration,
    ) -> Result<ReadBody, BodyError> {
        let place = self.place(peer);
        let give_way = place.give_way.clone();
        let reading = tokio::time::timeout(within, self.collect(place, body, most));
        tokio::select! {
            () = give_way.cancelled() => Err(BodyError::Crowded),
            read = reading => read.unwrap_or(Err(BodyError::TooSlow(within))),
        }
    }

    async fn collect(&self, place: Place, body: Body, most: usize) -> Result<ReadBody, BodyError> {
        let mut chunks = body.into_data_stream();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(BodyError::Broken)?;
            if bytes.len() + chunk.len() > most {
                drop((place, bytes));
                let mut dropped = 0;
                while let Some(Ok(chunk)) = chunks.next().await {
                    dropped += chunk.len();
                    if dropped > MAX_DROPPED {
                        break;
                    }
                }
                return Err(BodyError::TooLong(most));
            }
            self.take(place.number, chunk.len())?;
            bytes.extend_from_slice(&chunk);
        }
        Ok(ReadBody { bytes, place })
    }

    fn place(self: &Arc<Self>, peer: Peer) -> Place {
        let give_way = CancellationToken::new();
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let number = taken.next;
        taken.next += 1;
        let part = Part {
            peer,
            bytes: 0,
            give_way: give_way.clone(),
        };
        taken.bodies.insert(number, part);
        drop(taken);
        Place {
            of: Arc::clone(self),
            number,
            peer,
            give_way,
        }
    }

    /// Reserves more bytes for a body.
    fn take(&self, number: u64, bytes: usize) -> Result<(), BodyError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        // A body that had to give way has no part.
        let peer = taken.bodies.get(&number).map(|part| part.peer);
        let peer = peer.ok_or(BodyError::Crowded)?;
        while taken.all + bytes > self.total {
            taken.shed_for(peer, bytes)?;
        }
        taken.all += bytes;
        if let Some(part) = taken.bodies.get_mut(&number) {
            part.bytes += bytes;
        }
        Ok(())
    }
}

// === impl Taken ===

impl Taken {
    /// Makes the largest body of the address with the most bytes give way, if that address has
    /// more than `peer` would have.
    fn shed_for(&mut self, peer: Peer, bytes: usize) -> Result<(), BodyError> {
        let mut by_peer: HashMap<Peer, usize> = HashMap::new();
        for part in self.bodies.values() {
            *by_peer.entry(part.peer).or_default() += part.bytes;
        }
        let own = by_peer.get(&peer).copied().unwrap_or_default();
        let most = by_peer.into_iter().max_by_key(|(_, bytes)| *bytes);
        let (most, _) = most
            .filter(|(_, theirs)| *theirs > own + bytes)
            .ok_or(BodyError::Crowded)?;
        let theirs = self.bodies.iter().filter(|(_, part)| part.peer == most);
        let largest = theirs.max_by_key(|(_, part)| part.bytes);
        let largest = largest.map(|(number, _)| *number);
        let part = largest.and_then(|number| self.bodies.remove(&number));
        let part = part.ok_or(BodyError::Crowded)?;
        self.all -= part.bytes;
        part.give_way.cancel();
        Ok(())
    }
}

// === impl ReadBody ===

impl ReadBody {
    /// Returns the peer that sent the body.
    pub fn peer(&self) -> Peer {
        self.place.peer
    }

    /// Returns a future that completes when the body has to give way: the holder should then
    /// drop it and answer [`BodyError::Crowded`].
    pub fn gives_way(&self) -> impl Future<Output = ()> + use<> {
        self.place.give_way.clone().cancelled_owned()
    }
}

impl Deref for ReadBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

// === impl Place ===

impl Drop for Place {
    fn drop(&mut self) {
        let of = &self.of;
        let mut taken = of.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = taken.bodies.remove(&self.number) {
            taken.all -= part.bytes;
        }
    }
}

// === impl BodyError ===

impl IntoResponse for BodyError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Crowded => StatusCode::SERVICE_UNAVAILABLE,
            Self::Broken(_) => StatusCode::BAD_REQUEST,
        };
        (status, format!("{self}\n")).into_response()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use futures::{FutureExt, stream};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn peer(number: u8) -> Peer {
        Peer::of([10, 0, 0, number].into())
    }

    /// Returns a body that arrives completely.
    fn whole(bytes: usize) -> Body {
        Body::from(vec![b'x'; bytes])
    }

    /// Returns a body that stops after some bytes and never ends.
    fn stuck(bytes: usize) -> Body {
        let chunk = Ok::<_, axum::Error>(Bytes::from(vec![b'x'; bytes]));
        Body::from_stream(stream::iter([chunk]).chain(stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_trickles_takes_only_what_has_come_and_ends_in_time() {
        let bodies = Bodies::new(100);
        let trickling: Vec<_> = (0..50)
            .map(|_| bodies.read(peer(1), stuck(1), 100, LONG))
            .collect();
        let mut trickling = Box::pin(futures::future::join_all(trickling));
        assert!(trickling.as_mut().now_or_never().is_none());
        let read = bodies.read(peer(2), whole(50), 100, LONG).await;
        assert_eq!(read.expect("there is room").len(), 50);
        for end in trickling.await {
            assert!(matches!(end, Err(BodyError::TooSlow(_))), "{end:?}");
        }
        assert_eq!(bodies.taken.lock().unwrap().all, 0);
        assert!(bodies.taken.lock().unwrap().bodies.is_empty());
    }

    #[tokio::test]
    async fn who_has_most_gives_way_and_who_asks_for_most_gets_none() {
        let bodies = Bodies::new(100);
        let mut greedy = Vec::new();
        for bytes in [20, 40, 40] {
            let mut one = Box::pin(bodies.read(peer(1), stuck(bytes), 100, LONG));
            assert!(one.as_mut().now_or_never().is_none());
            greedy.push(one);
        }
        let more = bodies.read(peer(1), whole(1), 100, LONG).await;
        assert!(matches!(more, Err(BodyError::Crowded)), "{more:?}");
        let read = bodies.read(peer(2), whole(30), 100, LONG).await;
        assert!(read.is_ok(), "{read:?}");
        let ended = greedy.into_iter().filter_map(FutureExt::now_or_never);
        let ended: Vec<_> = ended.collect();
        assert!(matches!(ended[..], [Err(BodyError::Crowded)]), "{ended:?}");
        // Dropped futures occupy no part of the budget.
        drop(read);
        assert_eq!(bodies.taken.lock().unwrap().all, 0);
    }

    #[tokio::test]
    async fn one_that_is_read_gives_way_as_well() {
        let bodies = Bodies::new(100);
        let larger = bodies.read(peer(1), whole(60), 100, LONG).await.unwrap();
        let smaller = bodies.read(peer(1), whole(40), 100, LONG).await.unwrap();
        assert!(larger.gives_way().now_or_never().is_none());
        let read = bodies.read(peer(2), whole(30), 100, LONG).await;
        assert!(read.is_ok(), "{read:?}");
        assert!(larger.gives_way().now_or_never().is_some());
        assert!(smaller.gives_way().now_or_never().is_none());
        drop((larger, smaller, read));
        assert_eq!(bodies.taken.lock().unwrap().all, 0);
    }

    #[tokio::test]
    async fn the_addresses_of_one_network_have_no_more_room_than_one() {
        let bodies = Bodies::new(100);
        let of = |address: &str| Peer::of(address.parse().unwrap());
        let mut held = Vec::new();
        for host in 1..=4 {
            let peer = of(&format!("2001:db8::{host}"));
            let mut one = Box::pin(bodies.read(peer, stuck(25), 100, LONG));
            assert!(one.as_mut().now_or_never().is_none());
            held.push(one);
        }
        let more = bodies.read(of("2001:db8::5"), whole(25), 100, LONG).await;
        assert!(matches!(more, Err(BodyError::Crowded)), "{more:?}");
        let read = bodies
            .read(of("2001:db8:0:1::1"), whole(50), 100, LONG)
            .await;
        assert!(read.is_ok(), "{read:?}");
    }

    #[tokio::test]
    async fn one_that_is_too_long_is_read_to_its_end_and_refused() {
        let bodies = Bodies::new(100);
        for (bytes, is_refused) in [(60, false), (61, true), (10_000, true)] {
            let read = bodies.read(peer(1), whole(bytes), 60, LONG).await;
            let refused = matches!(read, Err(BodyError::TooLong(60)));
            assert_eq!(refused, is_refused, "{bytes}: {read:?}");
        }
    }
}
