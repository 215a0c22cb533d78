//! Rank 0's part beside its own as a member: gathers the gang, has it tested, finds who is to blame, and
//! tells each member what came out.

mod gathering;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use preflight::rendezvous::Topology;
use preflight::roster::Member;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::messages::{FromMember, FromRank0, Hello, Kind, Test, Verdict};
use super::search::{self, Answers, Found, Step};
use super::wire::{GangKey, Sender};
use crate::expected::Threshold;
use crate::worker::{Benchmark, Failure, Measured};
use gathering::Heard;
use verdicts::Names;

/// Iterations and warm-ups of a test of the search, which asks for less than a measurement.
const SEARCH: (u32, u32) = (5, 1);
/// Time for the last test of who is to blame, where a gang hangs.
const CONFIRM: Duration = Duration::from_secs(15);
/// Shortest time for a test of the search where the gang hangs: its processes have to start and to meet.
const SHORTEST: Duration = Duration::from_secs(10);
/// The part of the time that a test of all gets, as one of so many; there are two where the first was with
/// topology files.
const FIRST_PART: u32 = 3;
/// Time for the others to fail after the first: theirs may say more.
const ECHO: Duration = Duration::from_secs(1);
/// Time for members to hear the verdict.
const HEAR: Duration = Duration::from_secs(5);

/// What is to be found out.
pub(super) struct Plan {
    /// The end of the time in which members may come.
    pub(super) formed: Instant,
    /// The time for the tests, from when all are there.
    pub(super) timeout: Duration,
    pub(super) benchmark: Benchmark,
    pub(super) threshold: Threshold,
}

/// A member that is there.
struct Joined {
    connection: u64,
    hello: Hello,
    sender: Sender,
}

/// Rank 0, with the members by their ranks.
struct Coordinator {
    members: Vec<Option<Joined>>,
    names: Names,
    heard: mpsc::Receiver<Heard>,
    step: u64,
    /// Those who have gone away since all were there.
    gone: BTreeSet<usize>,
}

/// Members whose own variables may be the reason, with the names of those.
type Odd = BTreeMap<usize, String>;

/// What came out of a test.
struct Judged {
    /// The least bandwidth, where there is one: of all-reduces, or where there is one device of copies in it.
    gb_s: Option<f64>,
    failure: Option<Failure>,
    passes: bool,
}

/// Runs until all members have heard the verdict.
pub(super) async fn run(listener: TcpListener, roster: Vec<Member>, key: GangKey, plan: Plan) {
    let heard = gathering::listen(listener, &roster, key);
    let mut coordinator = Coordinator {
        members: roster.iter().map(|_| None).collect(),
        names: Names::of(&roster),
        heard,
        step: 0,
        gone: BTreeSet::new(),
    };
    let verdicts = if coordinator.gather(plan.formed).await {
        coordinator.examine(&plan).await
    } else {
        coordinator.names.missing(&coordinator.missing())
    };
    coordinator.tell(verdicts).await;
}

// === impl Coordinator ===

impl Coordinator {
    /// Waits until all members are there; returns whether they are.
    async fn gather(&mut self, formed: Instant) -> bool {
        while !self.missing().is_empty() {
            match tokio::time::timeout_at(formed, self.heard.recv()).await {
                Ok(Some(heard)) => drop(self.note(heard)),
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

    /// Notes who comes and goes; returns what a member says.
    fn note(&mut self, heard: Heard) -> Option<(usize, FromMember)> {
        match heard {
            Heard::Joined(rank, joined) => {
                self.names.note(rank, &joined.hello);
                if let Some(place) = self.members.get_mut(rank) {
                    *place = Some(*joined);
                }
                None
            }
            Heard::Gone(rank, connection) => {
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
            Heard::Said(rank, said) => Some((rank, *said)),
        }
    }

    /// Tests each who is found to blame once more, with somebody who is not: on a busy machine a group may
    /// be late for no fault of its own.
    async fn confirms(&mut self, found: &Found, plan: &Plan, end: Instant) -> bool {
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
                tracing::info!(group, "passes after all: who is to blame is not clear");
                return false;
            }
        }
        true
    }

    /// Tests all together, and searches for who is to blame where they fail.
    async fn examine(&mut self, plan: &Plan) -> Vec<Verdict> {
        self.gone.clear();
        let end = Instant::now() + plan.timeout;
        let topologies = match self.topologies() {
            Ok(files) => files,
            Err(why) => return self.names.untested(&why),
        };
        let (mut whole, mut text) = self.whole(plan).await;
        if !whole.passes && !topologies.is_empty() && self.gone.is_empty() {
            // A file may be wrong of a machine: what it brings about blames nobody.
            let files = topologies.into_iter().collect::<Vec<_>>().join(", ");
            tracing::warn!("the gang fails with the topology file {files}: {text}");
            for member in 0..self.members.len() {
                self.say(member, &FromRank0::WithoutTopology).await;
            }
            let before = text;
            (whole, text) = self.whole(plan).await;
            text = format!("{text}; this without the topology file {files}, with which {before}");
        }
        if whole.passes {
            return self.names.all(Kind::Passed, &text, &whole);
        }
        tracing::warn!("the gang fails: {text}");
        if self.members.len() < 2
            && let Some(Failure::Wrong { .. } | Failure::Cuda { .. }) = whole.failure
        {
            // What a GPU does wrong by itself needs no other member to compare it with.
            return self.names.all(Kind::Culprit, &text, &whole);
        }
        let hangs = matches!(whole.failure, Some(Failure::Late { .. }));
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
        let text = format!("{text}; who is to blame was not found in time");
        self.names.all(Kind::Unclear, &text, &whole)
    }

    /// Returns the culprits that NCCL may have failed by their own variables, with the names of those: nobody
    /// who is not to blame has the same ones.
    fn odd(&self, culprits: &BTreeSet<usize>, whole: &Judged) -> Odd {
        // No variable makes a GPU reckon wrong.
        if let Some(Failure::Wrong { .. } | Failure::Cuda { .. } | Failure::Nvml(_)) = whole.failure
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

    /// Tests all together; returns what came out, and the same in words.
    async fn whole(&mut self, plan: &Plan) -> (Judged, String) {
        let all: Vec<usize> = (0..self.members.len()).collect();
        let until = Instant::now() + plan.timeout / FIRST_PART;
        let measured = self.test(&all, &plan.benchmark, until).await;
        let whole = self.judge(&all, measured, plan);
        let text = verdicts::told(&whole, self.ranks(&all), plan);
        (whole, text)
    }

    /// Returns the topology files that members have. The error says why nothing may be tested.
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

    /// Searches for who is to blame; `None` where the time is over, or a member goes away. `hangs` says
    /// that all together do not end, so that a group which does not either fails.
    async fn search(&mut self, plan: &Plan, hangs: bool, end: Instant) -> Option<Found> {
        let members = self.members.len();
        let benchmark = Benchmark {
            iterations: plan.benchmark.iterations.min(SEARCH.0),
            warmups: plan.benchmark.warmups.min(SEARCH.1),
            ..plan.benchmark.clone()
        };
        let mut answers = Answers::default();
        answers.note((0..members).collect(), false);
        // One culprit takes about so many tests, and each may take until its end.
        let tests = 2 * members.max(2).ilog2() + 4;
        loop {
            let group = match search::next(members, &answers) {
                Step::Done(found) => return Some(found),
                Step::Test(group) => group,
            };
            let ranks: Vec<usize> = group.iter().copied().collect();
            let mut passes = false;
            // What is slow once may have been held up by something else.
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
                if !hangs && matches!(judged.failure, Some(Failure::Late { .. })) {
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
    ) -> Result<Vec<Measured>, Failure> {
        self.step += 1;
        let measured = self.measure(group, benchmark, until).await;
        for member in group {
            let step = self.step;
            self.say(*member, &FromRank0::Over { step }).await;
        }
        measured
    }

    async fn measure(
        &mut self,
        group: &[usize],
        benchmark: &Benchmark,
        until: Instant,
    ) -> Result<Vec<Measured>, Failure> {
        let begin = Instant::now();
        let step = self.step;
        let first = group.first().copied().unwrap_or_default();
        if self.ranks(group) < 2 {
            // One device forms no group.
            self.order(group, "", benchmark).await;
            return self.results(group, begin, until).await;
        }
        self.say(first, &FromRank0::Lead { step }).await;
        let name = loop {
            let said = self.hear(group, until).await;
            match said {
                Some((_, FromMember::Group { step, group })) if step == self.step => break group?,
                Some(_) => {}
                None => return Err(self.silent(&[first], begin)),
            }
        };
        self.order(group, &name, benchmark).await;
        self.results(group, begin, until).await
    }

    /// Returns what the members of a group have measured.
    async fn results(
        &mut self,
        group: &[usize],
        begin: Instant,
        mut until: Instant,
    ) -> Result<Vec<Measured>, Failure> {
        let mut results = BTreeMap::new();
        while results.len() < group.len() {
            match self.hear(group, until).await {
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

    /// Tells the members of a group to begin.
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
            self.say(*rank, &FromRank0::Test(test.clone())).await;
            test.first += hello.map(|hello| hello.devices).unwrap_or_default();
        }
    }

    /// Returns the number of devices of members.
    fn ranks(&self, group: &[usize]) -> u32 {
        let joined = group
            .iter()
            .filter_map(|rank| self.members.get(*rank)?.as_ref());
        joined.map(|joined| joined.hello.devices).sum()
    }

    /// Returns the next thing that a member says; `None` where the time is over, or one of the group goes
    /// away.
    async fn hear(&mut self, group: &[usize], until: Instant) -> Option<(usize, FromMember)> {
        loop {
            let heard = tokio::time::timeout_at(until, self.heard.recv())
                .await
                .ok()??;
            if let Some(said) = self.note(heard) {
                return Some(said);
            }
            if group.iter().any(|rank| self.gone.contains(rank)) {
                return None;
            }
        }
    }

    /// Returns that members do not answer.
    fn silent(&self, members: &[usize], since: Instant) -> Failure {
        Failure::Late {
            seconds: since.elapsed().as_secs(),
            doing: format!("from {}", self.names.list(members)),
        }
    }

    fn judge(
        &self,
        group: &[usize],
        measured: Result<Vec<Measured>, Failure>,
        plan: &Plan,
    ) -> Judged {
        match measured {
            Ok(measured) => {
                let ranks = self.ranks(group);
                let all = measured.iter().map(|one| match ranks {
                    // One device has nobody to reduce with, and copies.
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

    /// Says something to a member. Where it does not arrive the member goes away, which is heard.
    async fn say(&mut self, rank: usize, message: &FromRank0) {
        if let Some(joined) = self.members.get_mut(rank).and_then(Option::as_mut)
            && let Err(error) = joined.sender.send(message).await
        {
            tracing::debug!(rank, "a member does not hear: {error}");
        }
    }

    /// Tells all what came out, and waits until they have heard it.
    async fn tell(&mut self, verdicts: Vec<Verdict>) {
        for (rank, verdict) in verdicts.into_iter().enumerate() {
            self.say(rank, &FromRank0::Verdict(verdict)).await;
        }
        let end = Instant::now() + HEAR;
        while self.members.iter().any(Option::is_some) {
            match tokio::time::timeout_at(end, self.heard.recv()).await {
                Ok(Some(heard)) => drop(self.note(heard)),
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
