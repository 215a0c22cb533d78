//! Coordination of the gang by rank 0, beside its part as a member: gathers the members, orders
//! tests, finds the culprits, and sends each member a verdict.

mod gathering;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use preflight::rendezvous::Topology;
use preflight::roster::Member;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::messages::{FromMember, FromRank0, Hello, MemberVerdict, Test, VerdictKind};
use super::search::{self, Conclusion, SearchStep, TestAnswers};
use super::wire::{GangKey, Sender};
use crate::expected::Threshold;
use crate::worker::{Benchmark, Measured, WorkerFailure};
use gathering::Incoming;
use verdicts::Names;

/// Iterations and warm-ups of a test during the search, which needs fewer than a measurement.
const SEARCH: (u32, u32) = (5, 1);
/// Time limit of the final test of the culprits, if the gang hangs.
const CONFIRM: Duration = Duration::from_secs(15);
/// Shortest time limit of a test during the search if the gang hangs: its processes have to
/// start and to connect.
const SHORTEST: Duration = Duration::from_secs(10);
/// Divisor of the total time for a test of the whole gang; there are two such tests if the
/// first one used topology files.
const FIRST_PART: u32 = 3;
/// Time to wait for further failures after the first one, which may be more specific.
const ECHO: Duration = Duration::from_secs(1);
/// Time for members to receive the verdict.
const RECEIVE: Duration = Duration::from_secs(5);

/// Parameters of the examination.
pub(super) struct ExaminationPlan {
    /// Deadline for members to connect.
    pub(super) formed: Instant,
    /// Time for the tests, once all members are connected.
    pub(super) timeout: Duration,
    pub(super) benchmark: Benchmark,
    pub(super) threshold: Threshold,
}

/// Connected member of the gang.
struct Joined {
    connection: u64,
    hello: Hello,
    sender: Sender,
}

/// State of rank 0, with the members by rank.
struct Coordinator {
    members: Vec<Option<Joined>>,
    names: Names,
    incoming: mpsc::Receiver<Incoming>,
    step: u64,
    /// Members that have disconnected since all were connected.
    gone: BTreeSet<usize>,
}

/// Members whose own variables may be the cause, with the names of these variables.
type Odd = BTreeMap<usize, String>;

/// Result of a test.
struct Judged {
    /// Least bandwidth, if measured: of all-reduces, or of copies for a single device.
    gb_s: Option<f64>,
    failure: Option<WorkerFailure>,
    passes: bool,
}

/// Runs until all members have received the verdict.
pub(super) async fn run(
    listener: TcpListener,
    roster: Vec<Member>,
    key: GangKey,
    plan: ExaminationPlan,
) {
    let incoming = gathering::listen(listener, &roster, key);
    let mut coordinator = Coordinator {
        members: roster.iter().map(|_| None).collect(),
        names: Names::of(&roster),
        incoming,
        step: 0,
        gone: BTreeSet::new(),
    };
    let verdicts = if coordinator.gather(plan.formed).await {
        coordinator.examine(&plan).await
    } else {
        coordinator.names.missing(&coordinator.missing())
    };
    coordinator.announce(verdicts).await;
}

// === impl Coordinator ===

impl Coordinator {
    /// Waits until all members are connected. Returns false if some are missing.
    async fn gather(&mut self, formed: Instant) -> bool {
        while !self.missing().is_empty() {
            match tokio::time::timeout_at(formed, self.incoming.recv()).await {
                Ok(Some(incoming)) => drop(self.note(incoming)),
                _ => return false,
            }
        }
        true
    }

    fn missing(&self) -> Vec<usize> {
        let members = self.members.iter().enumerate();
        members
            .filter(|(_, member)| member.is_none())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Records connections and disconnections; returns a member's message.
    fn note(&mut self, incoming: Incoming) -> Option<(usize, FromMember)> {
        match incoming {
            Incoming::Joined(rank, joined) => {
                self.names.note(rank, &joined.hello);
                if let Some(place) = self.members.get_mut(rank) {
                    *place = Some(*joined);
                }
                None
            }
            Incoming::Gone(rank, connection) => {
                let place = self.members.get_mut(rank)?;
                if place
                    .as_ref()
                    .is_some_and(|joined| joined.connection == connection)
                {
                    *place = None;
                    self.gone.insert(rank);
                }
                None
            }
            Incoming::Message(rank, message) => Some((rank, *message)),
        }
    }

    /// Tests each culprit once more, together with a member that is none: on a busy machine a
    /// group may exceed its time without being at fault.
    async fn confirms(&mut self, found: &Conclusion, plan: &ExaminationPlan, end: Instant) -> bool {
        let of_pair = |member: &usize| {
            let mut pairs = found.pairs.iter();
            pairs.any(|(one, other)| one == member || other == member)
        };
        let mut others = (0..self.members.len()).filter(|it| !found.culprits.contains(it));
        let Some(well) = others.find(|member| !of_pair(member)) else {
            return true;
        };
        for culprit in found.culprits.clone() {
            if end.saturating_duration_since(Instant::now()) < SHORTEST {
                return false;
            }
            let until = (Instant::now() + CONFIRM).min(end);
            let group: Vec<usize> = [well, culprit]
                .into_iter()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
            let measured = self.test(&group, &plan.benchmark, until).await;
            if self.judge(&group, measured, plan).passes {
                let group = self.names.list(&group);
                tracing::info!(group, "passes after all: the member at fault is not clear");
                return false;
            }
        }
        true
    }

    /// Tests the whole gang, and searches for the culprits if it fails.
    async fn examine(&mut self, plan: &ExaminationPlan) -> Vec<MemberVerdict> {
        self.gone.clear();
        let end = Instant::now() + plan.timeout;
        let topologies = match self.topologies() {
            Ok(files) => files,
            Err(why) => return self.names.untested(&why),
        };
        let (mut whole, mut text) = self.whole(plan).await;
        if !whole.passes && !topologies.is_empty() && self.gone.is_empty() {
            // A file may be wrong for a machine; failures caused by it blame no member.
            let files = topologies.into_iter().collect::<Vec<_>>().join(", ");
            tracing::warn!("the gang fails with the topology file {files}: {text}");
            for member in 0..self.members.len() {
                self.send(member, &FromRank0::WithoutTopology).await;
            }
            let before = text;
            (whole, text) = self.whole(plan).await;
            text = format!("{text}; this without the topology file {files}, with which {before}");
        }
        if whole.passes {
            return self.names.all(VerdictKind::Passed, &text, &whole);
        }
        tracing::warn!("the gang fails: {text}");
        if self.members.len() < 2
            && let Some(WorkerFailure::Wrong { .. } | WorkerFailure::Cuda { .. }) = whole.failure
        {
            // An error of the GPU itself needs no comparison with another member.
            return self.names.all(VerdictKind::Culprit, &text, &whole);
        }
        let hangs = matches!(whole.failure, Some(WorkerFailure::Late { .. }));
        let found = self.search(plan, hangs, end).await;
        if !self.gone.is_empty() {
            let gone: Vec<usize> = self.gone.iter().copied().collect();
            return self.names.missing(&gone);
        }
        if let Some(found) = found
            && (!hangs || self.confirms(&found, plan, end).await)
        {
            let odd = self.odd(&found.culprits, &whole);
            return self.names.found(&found, &odd, &text, &whole);
        }
        let text = format!("{text}; the member at fault was not found in time");
        self.names.all(VerdictKind::Unclear, &text, &whole)
    }

    /// Returns the culprits whose failures may be caused by their own variables, with the names
    /// of these: no member that passes has the same ones.
    fn odd(&self, culprits: &BTreeSet<usize>, whole: &Judged) -> Odd {
        // No variable makes a GPU compute wrong numbers.
        if let Some(
            WorkerFailure::Wrong { .. } | WorkerFailure::Cuda { .. } | WorkerFailure::Nvml(_),
        ) = whole.failure
        {
            return Odd::new();
        }
        let of = |member: usize| Some(&self.members.get(member)?.as_ref()?.hello.inherited);
        let others = (0..self.members.len()).filter(|member| !culprits.contains(member));
        let others: BTreeSet<_> = others.filter_map(of).collect();
        let Some(other) = others.first() else {
            return Odd::new();
        };
        let culprits = culprits.iter().filter_map(|member| {
            let own = of(*member).filter(|own| !others.contains(own))?;
            let names = own.keys().chain(other.keys());
            let names = names.filter(|name| own.get(*name) != other.get(*name));
            let names: BTreeSet<&str> = names.map(String::as_str).collect();
            Some((*member, names.into_iter().collect::<Vec<_>>().join(", ")))
        });
        culprits.collect()
    }

    /// Tests the whole gang; returns the result, and its description.
    async fn whole(&mut self, plan: &ExaminationPlan) -> (Judged, String) {
        let all: Vec<usize> = (0..self.members.len()).collect();
        let until = Instant::now() + plan.timeout / FIRST_PART;
        let measured = self.test(&all, &plan.benchmark, until).await;
        let whole = self.judge(&all, measured, plan);
        let text = verdicts::describe(&whole, self.ranks(&all), plan);
        (whole, text)
    }

    /// Returns the members' topology files. The error is the reason why the gang may not be
    /// tested.
    fn topologies(&self) -> Result<BTreeSet<String>, String> {
        let mut files = BTreeSet::new();
        for hello in self.members.iter().flatten().map(|joined| &joined.hello) {
            match &hello.topology {
                Some(Topology::File { name, .. }) => drop(files.insert(name.clone())),
                Some(Topology::Missing(why)) => return Err(format!("{}: {why}", hello.node)),
                None => {}
            }
        }
        Ok(files)
    }

    /// Searches for the culprits. Returns `None` if the time is over, or a member disconnects.
    /// `hangs` is true if the test of the whole gang did not end, so that a group that does not
    /// end counts as failed.
    async fn search(
        &mut self,
        plan: &ExaminationPlan,
        hangs: bool,
        end: Instant,
    ) -> Option<Conclusion> {
        let members = self.members.len();
        let benchmark = Benchmark {
            iterations: plan.benchmark.iterations.min(SEARCH.0),
            warmups: plan.benchmark.warmups.min(SEARCH.1),
            ..plan.benchmark.clone()
        };
        let mut answers = TestAnswers::default();
        answers.note((0..members).collect(), false);
        // One culprit takes about this many tests, and each may take up its time limit.
        let tests = 2 * members.max(2).ilog2() + 4;
        loop {
            let group = match search::next(members, &answers) {
                SearchStep::Done(found) => return Some(found),
                SearchStep::Test(group) => group,
            };
            let ranks: Vec<usize> = group.iter().copied().collect();
            let mut passes = false;
            // A single slow result may have been caused by something else.
            for _ in 0..2 {
                let left = end.saturating_duration_since(Instant::now());
                if left < SHORTEST || !self.gone.is_empty() {
                    return None;
                }
                let time = if hangs {
                    (left / tests).max(SHORTEST)
                } else {
                    left
                };
                let measured = self.test(&ranks, &benchmark, Instant::now() + time).await;
                let judged = self.judge(&ranks, measured, plan);
                let group = self.names.list(&ranks);
                tracing::info!(group, passes = judged.passes, "tested");
                if !hangs && matches!(judged.failure, Some(WorkerFailure::Late { .. })) {
                    return None;
                }
                passes = judged.passes;
                if passes || judged.failure.is_some() {
                    break;
                }
            }
            answers.note(group, passes);
        }
    }

    /// Has members test together.
    async fn test(
        &mut self,
        group: &[usize],
        benchmark: &Benchmark,
        until: Instant,
    ) -> Result<Vec<Measured>, WorkerFailure> {
        self.step += 1;
        let measured = self.measure(group, benchmark, until).await;
        for member in group {
            let step = self.step;
            self.send(*member, &FromRank0::Over { step }).await;
        }
        measured
    }

    async fn measure(
        &mut self,
        group: &[usize],
        benchmark: &Benchmark,
        until: Instant,
    ) -> Result<Vec<Measured>, WorkerFailure> {
        let begin = Instant::now();
        let step = self.step;
        let first = group.first().copied().unwrap_or_default();
        if self.ranks(group) < 2 {
            // One device forms no group.
            self.order(group, "", benchmark).await;
            return self.results(group, begin, until).await;
        }
        self.send(first, &FromRank0::Lead { step }).await;
        let name = loop {
            let message = self.next_message(group, until).await;
            match message {
                Some((_, FromMember::Group { step, group })) if step == self.step => break group?,
                Some(_) => {}
                None => return Err(self.silent(&[first], begin)),
            }
        };
        self.order(group, &name, benchmark).await;
        self.results(group, begin, until).await
    }

    /// Returns the measurements of a group's members.
    async fn results(
        &mut self,
        group: &[usize],
        begin: Instant,
        mut until: Instant,
    ) -> Result<Vec<Measured>, WorkerFailure> {
        let mut results = BTreeMap::new();
        while results.len() < group.len() {
            match self.next_message(group, until).await {
                Some((rank, FromMember::Result { step, result })) if step == self.step => {
                    if result.is_err() {
                        until = until.min(Instant::now() + ECHO);
                    }
                    results.insert(rank, result);
                }
                Some(_) => {}
                None => break,
            }
        }
        let unheard = group.iter().filter(|rank| !results.contains_key(rank));
        let unheard: Vec<usize> = unheard.copied().collect();
        let worst = verdicts::worst(results.into_values().collect())?;
        if unheard.is_empty() {
            Ok(worst)
        } else {
            Err(self.silent(&unheard, begin))
        }
    }

    /// Orders the members of a group to start.
    async fn order(&mut self, group: &[usize], name: &str, benchmark: &Benchmark) {
        let joined = |rank: &usize| self.members.get(*rank).and_then(Option::as_ref);
        let hellos = group
            .iter()
            .map(|rank| joined(rank).map(|joined| joined.hello.clone()));
        let hellos: Vec<Option<Hello>> = hellos.collect();
        let endpoints = hellos
            .iter()
            .map(|hello| hello.as_ref().and_then(|hello| hello.endpoint));
        let endpoints: Vec<_> = endpoints.collect();
        let mut test = Test {
            step: self.step,
            group: name.to_owned(),
            ranks: self.ranks(group),
            first: 0,
            place: 0,
            endpoints,
            benchmark: benchmark.clone(),
        };
        for ((place, rank), hello) in group.iter().enumerate().zip(hellos) {
            test.place = place;
            self.send(*rank, &FromRank0::Test(test.clone())).await;
            test.first += hello.map(|hello| hello.devices).unwrap_or_default();
        }
    }

    /// Returns the number of the members' devices.
    fn ranks(&self, group: &[usize]) -> u32 {
        let joined = group
            .iter()
            .filter_map(|rank| self.members.get(*rank)?.as_ref());
        joined.map(|joined| joined.hello.devices).sum()
    }

    /// Returns the next message of a member. Returns `None` if the time is over, or a member of
    /// the group disconnects.
    async fn next_message(
        &mut self,
        group: &[usize],
        until: Instant,
    ) -> Option<(usize, FromMember)> {
        loop {
            let incoming = tokio::time::timeout_at(until, self.incoming.recv())
                .await
                .ok()??;
            if let Some(message) = self.note(incoming) {
                return Some(message);
            }
            if group.iter().any(|rank| self.gone.contains(rank)) {
                return None;
            }
        }
    }

    /// Returns the failure of members that do not answer.
    fn silent(&self, members: &[usize], since: Instant) -> WorkerFailure {
        WorkerFailure::Late {
            seconds: since.elapsed().as_secs(),
            doing: format!("from {}", self.names.list(members)),
        }
    }

    fn judge(
        &self,
        group: &[usize],
        measured: Result<Vec<Measured>, WorkerFailure>,
        plan: &ExaminationPlan,
    ) -> Judged {
        match measured {
            Ok(measured) => {
                let ranks = self.ranks(group);
                let all = measured.iter().map(|one| match ranks {
                    // One device has no peer to reduce with, and copies.
                    0 | 1 => one.copy_bandwidth(),
                    _ => one.bus_bandwidth(ranks),
                });
                let gb_s = all.min_by(f64::total_cmp);
                let passes = ranks < 2 || gb_s.is_some_and(|gb_s| plan.threshold.passes(gb_s));
                Judged {
                    gb_s,
                    failure: None,
                    passes,
                }
            }
            Err(failure) => Judged {
                gb_s: None,
                failure: Some(failure),
                passes: false,
            },
        }
    }

    /// Sends a message to a member. If that fails, the member is disconnected, which is noticed
    /// when receiving.
    async fn send(&mut self, rank: usize, message: &FromRank0) {
        if let Some(joined) = self.members.get_mut(rank).and_then(Option::as_mut)
            && let Err(error) = joined.sender.send(message).await
        {
            tracing::debug!(rank, "a message to a member fails: {error}");
        }
    }

    /// Sends all members their verdicts, and waits until they have received them.
    async fn announce(&mut self, verdicts: Vec<MemberVerdict>) {
        for (rank, verdict) in verdicts.into_iter().enumerate() {
            self.send(rank, &FromRank0::Verdict(verdict)).await;
        }
        let end = Instant::now() + RECEIVE;
        while self.members.iter().any(Option::is_some) {
            match tokio::time::timeout_at(end, self.incoming.recv()).await {
                Ok(Some(incoming)) => drop(self.note(incoming)),
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
