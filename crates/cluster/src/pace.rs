//! Limits the requests to the API server that are in flight at once. The limit is measured, not
//! configured.
//!
//! There is no fixed rate: a thousand nodes that fail at once are to be cordoned as fast as the
//! API server allows, and one cluster allows ten times more than the next. As in TCP, each
//! answer in time raises the limit a little, and a sign of overload halves it: 429, 5xx, or an
//! answer that takes longer than [`SLOW`]. The API server's own fairness still decides between
//! this client and others.
//!
//! Requests that take nodes out of service or return them go first; requests that only report
//! wait.

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

/// Limit at the start. A small API server is busy near this limit, and requests to a larger one
/// do not wait for each other yet.
const START: f64 = 32.0;
/// Lowest limit: one request at a time.
const LEAST: f64 = 1.0;
/// Highest limit: the streams that the API server allows on one connection of HTTP/2
/// (`--http2-max-streams-per-connection`). More requests would only wait for a stream, unseen.
const MOST: f64 = 100.0;
/// Time after which an answer counts as slow. A patch takes milliseconds, so a slow one has
/// waited in a queue of the API server, and more requests only make that queue longer.
const SLOW: Duration = Duration::from_secs(1);
/// Longest pause that an answer can impose on all requests.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Longest time that a report waits for requests that act. A report costs the API server as much
/// as a cordon, so it waits, but neither a patch that hangs nor thousands of cordons may silence
/// reports. A thousand nodes are cordoned in less.
const REPORT_WAITS_FOR_ACTS: Duration = Duration::from_secs(10);
/// Most reports in flight beside requests that act, once they have waited for
/// [`REPORT_WAITS_FOR_ACTS`].
const REPORTS_BESIDE_ACTS: usize = 2;

/// Purpose of a request, which decides its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A request that takes a node out of service or returns it, or that such a change waits
    /// for, such as the review of a reporter's token. Goes first.
    Act,
    /// A request that reports what was done or found. Waits for all requests that act, but at
    /// most 10 s.
    Report,
}

/// Limit on the requests in flight, and the queues of those that wait. The callers bound the
/// queues: each has at most one request per purpose and node.
pub(crate) struct Pace {
    traffic: Mutex<Traffic>,
}

/// Layer that delays each request until its turn and adjusts the limit by its answer.
pub(crate) struct PaceLayer {
    pub(crate) pace: Arc<Pace>,
    pub(crate) urgency: Urgency,
}

/// Permission to make one request. If it is dropped without an answer (the caller was
/// cancelled), the limit stays.
pub(crate) struct Turn {
    pace: Arc<Pace>,
    urgency: Urgency,
    began: Instant,
    /// False if the turn was not handed to a caller.
    held: bool,
}

/// Requests in flight, queues, and the limit.
struct Traffic {
    limit: f64,
    acts_under_way: usize,
    reports_under_way: usize,
    /// Time when the limit was last lowered. Requests that began earlier do not lower it again.
    lowered_at: Instant,
    /// Time before which no request may begin, as the API server asked.
    paused_until: Option<Instant>,
    acts: VecDeque<Waiter>,
    reports: VecDeque<Waiter>,
}

/// A caller in a queue.
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
                reports_under_way: 0,
                lowered_at: Instant::now(),
                paused_until: None,
                acts: VecDeque::new(),
                reports: VecDeque::new(),
            }),
        })
    }

    /// Waits for the turn of a request.
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
        if urgency == Urgency::Report {
            match tokio::time::timeout(REPORT_WAITS_FOR_ACTS, &mut receiver).await {
                Ok(Ok(turn)) => return turn,
                // From now on this report may run beside requests that act, even if none of
                // these ends.
                Ok(Err(_)) | Err(_) => self.hand_on(),
            }
        }
        if let Ok(turn) = receiver.await {
            return turn;
        }
        // Not reached: a waiter stays in the queue until its turn is sent.
        let mut turn = Turn::new(self, urgency);
        turn.held = false;
        turn
    }

    /// Returns the number of requests that may be in flight now.
    pub(crate) fn limit(&self) -> usize {
        self.lock().whole_limit()
    }

    /// Gives free turns to the callers that wait.
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
                // The caller no longer waits.
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
            Urgency::Report => self.may_report(),
        };
        !paused && may_begin && self.all_under_way() < self.whole_limit()
    }

    /// Returns true if a report may begin.
    fn may_report(&self) -> bool {
        if self.acts_under_way + self.acts.len() == 0 {
            return true;
        }
        let first = self.reports.front();
        self.reports_under_way < REPORTS_BESIDE_ACTS
            && first.is_some_and(|waiting| waiting.since.elapsed() >= REPORT_WAITS_FOR_ACTS)
    }

    /// Removes the next caller that may begin from its queue.
    fn next(&mut self) -> Option<(Urgency, Waiter)> {
        for urgency in [Urgency::Act, Urgency::Report] {
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
            Urgency::Report => &mut self.reports,
        }
    }

    fn under_way(&mut self, urgency: Urgency) -> &mut usize {
        match urgency {
            Urgency::Act => &mut self.acts_under_way,
            Urgency::Report => &mut self.reports_under_way,
        }
    }

    fn all_under_way(&self) -> usize {
        self.acts_under_way + self.reports_under_way
    }

    /// Returns the limit rounded down.
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

    /// Adjusts the limit by the result of the request.
    fn ended(self, result: &Result<Response<Body>, kube::Error>) {
        match result {
            Err(kube::Error::Api(status))
                if matches!(status.code, 429 | 500..) && !is_held(status) =>
            {
                self.overloaded(retry_after(status));
            }
            Ok(_) | Err(kube::Error::Api(_)) => self.answered(),
            Err(kube::Error::Service(error)) if error.is::<NoAnswer>() => self.overloaded(None),
            // Without a connection the result says nothing about the capacity of the server.
            Err(_) => {}
        }
    }

    /// Raises the limit after an answer in time.
    fn answered(self) {
        if self.began.elapsed() > SLOW {
            return self.overloaded(None);
        }
        let mut traffic = self.pace.lock();
        // A limit that is not reached says nothing about the capacity of the server.
        if traffic.all_under_way() >= traffic.whole_limit() {
            traffic.limit = (traffic.limit + 1.0 / traffic.limit).min(MOST);
        }
    }

    /// Lowers the limit after an overload, or a missing answer. `retry_after` is the pause that
    /// the API server asked for.
    fn overloaded(self, retry_after: Option<Duration>) {
        let mut traffic = self.pace.lock();
        if self.began < traffic.lowered_at {
            return; // The limit was lowered for this overload already.
        }
        let now = Instant::now();
        traffic.lowered_at = now;
        if traffic.limit > LEAST {
            traffic.limit = (traffic.limit / 2.0).max(LEAST);
            return;
        }
        // The limit cannot go lower, so all requests pause. Above the lowest limit only the
        // caller of the refused request waits.
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

    /// Returns true if a turn is available at once.
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
        // A caller that gave up waiting holds no turn.
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
        drop(pace.turn(Urgency::Report).await);
        assert_eq!(began.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn what_acts_goes_before_what_tells() {
        let pace = Pace::new();
        let mut held = turns(&pace, 32).await;
        let (order, mut seen) = tokio::sync::mpsc::unbounded_channel();
        for urgency in [Urgency::Report, Urgency::Act, Urgency::Report, Urgency::Act] {
            let (pace, order) = (Arc::clone(&pace), order.clone());
            tokio::spawn(async move {
                let turn = pace.turn(urgency).await;
                order.send(urgency).unwrap();
                // Held until the test ends, so that each free turn shows which request is next.
                std::mem::forget(turn);
            });
            tokio::task::yield_now().await;
        }
        for expected in [Urgency::Act, Urgency::Act, Urgency::Report, Urgency::Report] {
            drop(held.pop());
            assert_eq!(seen.recv().await, Some(expected));
        }
        // There is room, but a report waits for requests that act.
        drop(held.pop());
        assert!(!open(&pace, Urgency::Report).await);
        assert!(open(&pace, Urgency::Act).await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_tells_waits_ten_seconds_for_requests_that_hang_and_two_go_beside_them() {
        let pace = Pace::new();
        let _hangs = pace.turn(Urgency::Act).await;
        let began = Instant::now();
        let (first, second) = tokio::join!(pace.turn(Urgency::Report), pace.turn(Urgency::Report));
        assert_eq!(began.elapsed(), REPORT_WAITS_FOR_ACTS);
        let third = pace.turn(Urgency::Report);
        let third = tokio::time::timeout(2 * REPORT_WAITS_FOR_ACTS, third).await;
        assert!(third.is_err(), "no more than two");
        drop(second);
        let began = Instant::now();
        drop(pace.turn(Urgency::Report).await);
        assert_eq!(
            began.elapsed(),
            REPORT_WAITS_FOR_ACTS,
            "each waits for itself"
        );
        drop(first);
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_acts_all_may_tell() {
        let pace = Pace::new();
        let mut held = Vec::new();
        for _ in 0..32 {
            held.push(pace.turn(Urgency::Report).await);
        }
        assert!(!open(&pace, Urgency::Report).await);
        drop(held.pop());
        assert!(open(&pace, Urgency::Report).await);
        let act = pace.turn(Urgency::Act).await;
        drop(held.split_off(10));
        assert!(!open(&pace, Urgency::Report).await);
        drop(act);
        assert!(open(&pace, Urgency::Report).await);
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
        // The reports are requested first, and would be sent first.
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
        assert_eq!(pace.lock().reports.len(), 3);
    }
}
