//! Limits how many requests to the API server are under way at once: found out, not configured.
//!
//! No rate is set: a thousand nodes that fail at once are to be cordoned as fast as the API
//! server takes it, and it takes ten times more on one cluster than on the next. As TCP
//! does with packets, each answer in time raises the limit a little, and a sign of overload
//! halves it: 429, 5xx, or an answer that took longer than [`SLOW`]. The API server's own
//! fairness stays the judge between us and its other clients.
//!
//! Requests that take nodes out and give them back go first; those that only tell of it wait.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use kube::client::Body;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tower::{Layer, ServiceExt as _, service_fn};

use crate::error::{is_held, retry_after};
use crate::layer::{Http, NoAnswer};

/// The limit at the start. Near it a small API server is busy, and requests of a larger one
/// do not yet wait for each other.
const START: f64 = 32.0;
/// The lowest limit: with one request at a time there is nothing left to reduce.
const LEAST: f64 = 1.0;
/// The highest limit: the streams that the API server lets a client have on one connection of HTTP/2
/// (`--http2-max-streams-per-connection`); more only wait, unseen, in front of it.
const MOST: f64 = 100.0;
/// An answer that takes so long is slow. A patch takes milliseconds; one that takes so long has waited in a queue of the API
/// server, and more requests only make that queue longer.
const SLOW: Duration = Duration::from_secs(1);
/// The longest pause that an answer can ask of all requests.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A request that only tells takes the API server as long as a cordon: it waits for those
/// that act, but no longer than this, so that neither a patch that hangs nor thousands of
/// cordons silence us. A thousand nodes are cordoned in less.
const TELL_WAITS_FOR_ACTS: Duration = Duration::from_secs(10);
/// Most requests that tell, and have waited so long, under way beside those that act.
const TELLS_BESIDE_ACTS: usize = 2;

/// The purpose of a request, by which turns are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// It takes a node out of service or gives it back, or such a change waits for it, as
    /// for the review of a reporter's token: goes first.
    Act,
    /// It tells of that: waits for all that act, but no longer than
    /// [`TELL_WAITS_FOR_ACTS`].
    Tell,
}

/// The limit on requests. Those that wait are bounded by who asks: no more than one for each
/// purpose and node.
pub(crate) struct Pace {
    traffic: Mutex<Traffic>,
}

/// Lets each request wait for its turn, and learns from its answer.
pub(crate) struct PaceLayer {
    pub(crate) pace: Arc<Pace>,
    pub(crate) urgency: Urgency,
}

/// Leave to make one request. Dropped without a word (the caller was cancelled), it says
/// nothing about the server.
pub(crate) struct Turn {
    pace: Arc<Pace>,
    urgency: Urgency,
    began: Instant,
    /// False where it was never handed over.
    held: bool,
}

/// The requests that are under way and those that wait, and the limit.
struct Traffic {
    limit: f64,
    acts_under_way: usize,
    tells_under_way: usize,
    /// Requests that began before do not lower the limit again.
    lowered_at: Instant,
    /// The time before which nothing begins, as the API server asked for.
    paused_until: Option<Instant>,
    acts: VecDeque<Waiter>,
    tells: VecDeque<Waiter>,
}

/// A caller that waits for its turn.
struct Waiter {
    since: Instant,
    turn: oneshot::Sender<Turn>,
}

// === impl Pace ===

impl Pace {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            traffic: Mutex::new(Traffic {
                limit: START,
                acts_under_way: 0,
                tells_under_way: 0,
                lowered_at: Instant::now(),
                paused_until: None,
                acts: VecDeque::new(),
                tells: VecDeque::new(),
            }),
        })
    }

    /// Waits until a request may begin.
    pub(crate) async fn turn(self: &Arc<Self>, urgency: Urgency) -> Turn {
        let mut receiver = {
            let mut traffic = self.lock();
            if traffic.waiting(urgency).is_empty() && traffic.has_room(urgency) {
                *traffic.under_way(urgency) += 1;
                return Turn::new(self, urgency);
            }
            let (turn, receiver) = oneshot::channel();
            let since = Instant::now();
            traffic.waiting(urgency).push_back(Waiter { since, turn });
            receiver
        };
        if urgency == Urgency::Tell {
            match tokio::time::timeout(TELL_WAITS_FOR_ACTS, &mut receiver).await {
                Ok(Ok(turn)) => return turn,
                // It may go beside those that act now, of which none may end for long.
                Ok(Err(_)) | Err(_) => self.hand_on(),
            }
        }
        if let Ok(turn) = receiver.await {
            return turn;
        }
        // Not reached: who waits is in the queue until its turn is sent.
        let mut turn = Turn::new(self, urgency);
        turn.held = false;
        turn
    }

    /// Returns how many requests may be under way now.
    pub(crate) fn limit(&self) -> usize {
        self.lock().whole_limit()
    }

    /// Hands free places to those who wait.
    fn hand_on(self: &Arc<Self>) {
        loop {
            let (waiting, turn) = {
                let mut traffic = self.lock();
                let Some((urgency, waiting)) = traffic.next() else {
                    return;
                };
                *traffic.under_way(urgency) += 1;
                (waiting, Turn::new(self, urgency))
            };
            if let Err(mut unused) = waiting.turn.send(turn) {
                // Who waited is gone.
                unused.held = false;
                *self.lock().under_way(unused.urgency) -= 1;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Traffic ===

impl Traffic {
    fn has_room(&self, urgency: Urgency) -> bool {
        let paused = self
            .paused_until
            .is_some_and(|until| until > Instant::now());
        let may_begin = match urgency {
            Urgency::Act => true,
            Urgency::Tell => self.may_tell(),
        };
        !paused && may_begin && self.all_under_way() < self.whole_limit()
    }

    /// Returns true if a request may begin that only tells.
    fn may_tell(&self) -> bool {
        if self.acts_under_way + self.acts.len() == 0 {
            return true;
        }
        let first = self.tells.front();
        self.tells_under_way < TELLS_BESIDE_ACTS
            && first.is_some_and(|waiting| waiting.since.elapsed() >= TELL_WAITS_FOR_ACTS)
    }

    /// Takes who may begin out of the queue.
    fn next(&mut self) -> Option<(Urgency, Waiter)> {
        for urgency in [Urgency::Act, Urgency::Tell] {
            if self.has_room(urgency)
                && let Some(waiting) = self.waiting(urgency).pop_front()
            {
                return Some((urgency, waiting));
            }
        }
        None
    }

    fn waiting(&mut self, urgency: Urgency) -> &mut VecDeque<Waiter> {
        match urgency {
            Urgency::Act => &mut self.acts,
            Urgency::Tell => &mut self.tells,
        }
    }

    fn under_way(&mut self, urgency: Urgency) -> &mut usize {
        match urgency {
            Urgency::Act => &mut self.acts_under_way,
            Urgency::Tell => &mut self.tells_under_way,
        }
    }

    fn all_under_way(&self) -> usize {
        self.acts_under_way + self.tells_under_way
    }

    /// Returns the limit without its fraction.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Between 1 and 100.
    fn whole_limit(&self) -> usize {
        self.limit as usize
    }
}

// === impl PaceLayer ===

impl Layer<Http> for PaceLayer {
    type Service = Http;

    fn layer(&self, below: Http) -> Http {
        let (pace, urgency) = (Arc::clone(&self.pace), self.urgency);
        Http::new(service_fn(move |request: Request<Body>| {
            let (below, pace) = (below.clone(), Arc::clone(&pace));
            async move {
                let turn = pace.turn(urgency).await;
                let result = below.oneshot(request).await;
                turn.ended(&result);
                result
            }
        }))
    }
}

// === impl Turn ===

impl Turn {
    fn new(pace: &Arc<Pace>, urgency: Urgency) -> Self {
        Self {
            pace: Arc::clone(pace),
            urgency,
            began: Instant::now(),
            held: true,
        }
    }

    /// Takes in what became of the request.
    fn ended(self, result: &Result<Response<Body>, kube::Error>) {
        match result {
            Err(kube::Error::Api(status))
                if matches!(status.code, 429 | 500..) && !is_held(status) =>
            {
                self.overloaded(retry_after(status));
            }
            Ok(_) | Err(kube::Error::Api(_)) => self.answered(),
            Err(kube::Error::Service(error)) if error.is::<NoAnswer>() => self.overloaded(None),
            // No connection: that says nothing about how much the server can take.
            Err(_) => {}
        }
    }

    /// Notes that the request was answered, and not for want of capacity.
    fn answered(self) {
        if self.began.elapsed() > SLOW {
            return self.overloaded(None);
        }
        let mut traffic = self.pace.lock();
        // A limit that is not reached says nothing about what the server can take.
        if traffic.all_under_way() >= traffic.whole_limit() {
            traffic.limit = (traffic.limit + 1.0 / traffic.limit).min(MOST);
        }
    }

    /// Notes that the API server has too much to do, or did not answer in time. `retry_after` is
    /// its own wish.
    fn overloaded(self, retry_after: Option<Duration>) {
        let mut traffic = self.pace.lock();
        if self.began < traffic.lowered_at {
            return; // Of the same overload as the last time.
        }
        let now = Instant::now();
        traffic.lowered_at = now;
        if traffic.limit > LEAST {
            traffic.limit = (traffic.limit / 2.0).max(LEAST);
            return;
        }
        // Nothing is left to reduce but to pause. Before that, only the request that was
        // refused waits, which is up to its caller.
        if let Some(wait) = retry_after {
            let until = now + wait.min(LONGEST_PAUSE);
            traffic.paused_until = Some(until);
            let pace = Arc::clone(&self.pace);
            tokio::spawn(async move {
                tokio::time::sleep_until(until).await;
                pace.hand_on();
            });
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.held {
            *self.pace.lock().under_way(self.urgency) -= 1;
            self.pace.hand_on();
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use model::node::{NodeChange, NodeView};

    use super::*;
    use crate::{Event, fake};

    async fn turns(pace: &Arc<Pace>, count: usize) -> Vec<Turn> {
        let mut turns = Vec::new();
        for _ in 0..count {
            turns.push(pace.turn(Urgency::Act).await);
        }
        turns
    }

    /// Returns true if a turn can be had at once.
    async fn open(pace: &Arc<Pace>, urgency: Urgency) -> bool {
        let now = tokio::time::timeout(Duration::ZERO, pace.turn(urgency));
        now.await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_the_limit_is_under_way() {
        let pace = Pace::new();
        let mut held = turns(&pace, 32).await;
        assert!(!open(&pace, Urgency::Act).await);
        drop(held.pop());
        assert!(open(&pace, Urgency::Act).await);
        // Who gave up waiting holds nothing.
        assert_eq!(pace.lock().all_under_way(), 31);
        assert!(open(&pace, Urgency::Act).await);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_in_time_raise_the_limit_where_it_is_reached() {
        let pace = Pace::new();
        for _ in 0..100 {
            pace.turn(Urgency::Act).await.answered();
        }
        assert_eq!(pace.limit(), 32, "one at a time does not reach it");
        let mut burst = tokio::task::JoinSet::new();
        for _ in 0..10_000 {
            let pace = Arc::clone(&pace);
            burst.spawn(async move {
                let turn = pace.turn(Urgency::Act).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
                assert!(pace.lock().all_under_way() <= 100);
                turn.answered();
            });
        }
        burst.join_all().await;
        assert_eq!(pace.limit(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn an_overload_halves_the_limit_once() {
        let pace = Pace::new();
        let held = turns(&pace, 32).await;
        tokio::time::advance(Duration::from_millis(5)).await;
        for turn in held {
            turn.overloaded(Some(Duration::from_secs(1)));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(pace.limit(), 16);
        let turn = pace.turn(Urgency::Act).await;
        tokio::time::advance(SLOW + Duration::from_millis(1)).await;
        turn.answered();
        assert_eq!(pace.limit(), 8, "slow answers are a sign of overload too");
    }

    #[tokio::test(start_paused = true)]
    async fn when_nothing_is_left_to_reduce_all_wait_as_the_server_asks() {
        let pace = Pace::new();
        while pace.limit() > 1 {
            pace.turn(Urgency::Act)
                .await
                .overloaded(Some(Duration::from_secs(1)));
        }
        assert!(open(&pace, Urgency::Act).await);
        let began = Instant::now();
        pace.turn(Urgency::Act)
            .await
            .overloaded(Some(Duration::from_secs(7)));
        let again = pace.turn(Urgency::Act).await;
        assert_eq!(began.elapsed().as_secs(), 7);
        again.overloaded(Some(Duration::from_secs(9_999)));
        let began = Instant::now();
        drop(pace.turn(Urgency::Tell).await);
        assert_eq!(began.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn what_acts_goes_before_what_tells() {
        let pace = Pace::new();
        let mut held = turns(&pace, 32).await;
        let (order, mut seen) = tokio::sync::mpsc::unbounded_channel();
        for urgency in [Urgency::Tell, Urgency::Act, Urgency::Tell, Urgency::Act] {
            let (pace, order) = (Arc::clone(&pace), order.clone());
            tokio::spawn(async move {
                let turn = pace.turn(urgency).await;
                order.send(urgency).unwrap();
                // Held until the test ends, so that each free place shows who is next.
                std::mem::forget(turn);
            });
            tokio::task::yield_now().await;
        }
        for expected in [Urgency::Act, Urgency::Act, Urgency::Tell, Urgency::Tell] {
            drop(held.pop());
            assert_eq!(seen.recv().await, Some(expected));
        }
        // There is room, but who tells waits for those that act.
        drop(held.pop());
        assert!(!open(&pace, Urgency::Tell).await);
        assert!(open(&pace, Urgency::Act).await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_tells_waits_ten_seconds_for_requests_that_hang_and_two_go_beside_them() {
        let pace = Pace::new();
        let _hangs = pace.turn(Urgency::Act).await;
        let began = Instant::now();
        let (first, second) = tokio::join!(pace.turn(Urgency::Tell), pace.turn(Urgency::Tell));
        assert_eq!(began.elapsed(), TELL_WAITS_FOR_ACTS);
        let third = pace.turn(Urgency::Tell);
        let third = tokio::time::timeout(2 * TELL_WAITS_FOR_ACTS, third).await;
        assert!(third.is_err(), "no more than two");
        drop(second);
        let began = Instant::now();
        drop(pace.turn(Urgency::Tell).await);
        assert_eq!(
            began.elapsed(),
            TELL_WAITS_FOR_ACTS,
            "each waits for itself"
        );
        drop(first);
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_acts_all_may_tell() {
        let pace = Pace::new();
        let mut held = Vec::new();
        for _ in 0..32 {
            held.push(pace.turn(Urgency::Tell).await);
        }
        assert!(!open(&pace, Urgency::Tell).await);
        drop(held.pop());
        assert!(open(&pace, Urgency::Tell).await);
        let act = pace.turn(Urgency::Act).await;
        drop(held.split_off(10));
        assert!(!open(&pace, Urgency::Tell).await);
        drop(act);
        assert!(open(&pace, Urgency::Tell).await);
    }

    #[tokio::test]
    async fn conditions_and_events_tell_and_a_token_and_the_patch_of_a_node_act() {
        let (cluster, mut requests) = fake::serve(Vec::new()).await;
        let pace = cluster.pace.as_ref().unwrap();
        let _act = pace.turn(Urgency::Act).await;
        let view = NodeView::from_object(fake::node("n1", 1)).unwrap();
        let now = Timestamp::UNIX_EPOCH;
        let event = Event {
            name: "e".into(),
            node: "n1".into(),
            pod: None,
            kind: "Warning".into(),
            reason: "r".into(),
            message: "m".into(),
            agent: "a".into(),
            count: 2,
            first_seen: now,
            last_seen: now,
        };
        let change = NodeChange {
            unschedulable: Some(true),
            ..NodeChange::default()
        };
        // Those that tell are asked for first, and would be seen first.
        let all = async {
            tokio::join!(
                async { drop(cluster.set_conditions(&view, &[], now).await) },
                async { drop(cluster.create_event(&event).await) },
                async { drop(cluster.repeat_event(&event).await) },
                async { drop(cluster.review_token("t", "us").await) },
                async { drop(cluster.apply(&view, &change).await) },
            )
        };
        let seen = async {
            let mut seen = [String::new(), String::new()];
            for one in &mut seen {
                *one = requests.recv().await.unwrap()[1].clone();
            }
            seen.sort();
            seen
        };
        let seen = tokio::select! {
            _ = all => panic!("answers"),
            seen = seen => seen,
        };
        let review = "/apis/authentication.k8s.io/v1/tokenreviews";
        assert_eq!(seen, ["/api/v1/nodes/n1", review]);
        assert_eq!(cluster.requests().sent, 2);
        assert_eq!(pace.lock().tells.len(), 3);
    }
}
