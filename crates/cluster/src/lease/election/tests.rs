use proptest::prelude::*;

use super::*;
use crate::tenure::WRITES_END;

const OTHER: &str = "other";
const ME: &str = "me";

fn record(version: u32, holder: &str) -> LeaseRecord {
    LeaseRecord {
        version: version.to_string(),
        holder: holder.to_owned(),
        duration: Some(LEASE_DURATION),
        transitions: 0,
    }
}

/// An election of one process, with times in milliseconds since its start.
struct Talk {
    election: Election,
    begin: Instant,
}

impl Talk {
    fn new() -> Self {
        let begin = Instant::now();
        Self {
            election: Election::new(ME.to_owned(), begin),
            begin,
        }
    }

    fn at(&self, ms: u64) -> Instant {
        self.begin + Duration::from_millis(ms)
    }

    /// Checks that the election sends `ask` at `ms`, and answers 10 ms later.
    fn asks(&mut self, ms: u64, ask: &Ask, answer: LeaseAnswer) {
        assert_eq!(
            self.election.next(self.at(ms)),
            NextStep::Ask(ask.clone()),
            "at {ms} ms"
        );
        let (asked_at, now) = (self.at(ms), self.at(ms + 10));
        self.election.answered(asked_at, answer, now);
    }

    fn waits(&mut self, ms: u64, until: u64) {
        let until = self.at(until);
        assert_eq!(self.election.next(self.at(ms)), NextStep::Wait(until));
    }

    /// Returns a leader whose last renewal was sent at 0.
    fn leading() -> Self {
        let mut talk = Self::new();
        talk.asks(0, &Ask::Read, LeaseAnswer::Found(Some(record(1, ""))));
        talk.asks(10, &Ask::Take(record(1, "")), written(2));
        talk.begin += Duration::from_millis(10);
        talk
    }

    fn deposed(&mut self, ms: u64, why: Deposed) {
        assert_eq!(self.election.next(self.at(ms)), NextStep::Deposed(why));
        assert_eq!(self.election.renewed_at(), None);
    }
}

fn written(version: u32) -> LeaseAnswer {
    LeaseAnswer::Written(record(version, ME))
}

fn found(version: u32, holder: &str) -> LeaseAnswer {
    LeaseAnswer::Found(Some(record(version, holder)))
}

#[test]
fn a_lease_that_is_not_there_is_made_and_renewed() {
    let mut talk = Talk::new();
    talk.asks(0, &Ask::Read, LeaseAnswer::Found(None));
    assert!(!talk.election.may_hold());
    talk.asks(10, &Ask::Create, written(1));
    assert_eq!(talk.election.renewed_at(), Some(talk.at(10)));
    talk.waits(20, 2_010);
    talk.asks(2_010, &Ask::Renew(record(1, ME)), written(2));
    talk.asks(4_010, &Ask::Renew(record(2, ME)), written(3));
    assert_eq!(talk.election.renewed_at(), Some(talk.at(4_010)));
}

#[test]
fn anothers_lease_is_taken_when_it_was_seen_unchanged_for_its_whole_time() {
    let mut talk = Talk::new();
    talk.asks(0, &Ask::Read, found(1, OTHER));
    talk.waits(10, 2_010);
    // A renewal restarts the holder's time when it is observed.
    talk.asks(2_010, &Ask::Read, found(2, OTHER));
    for ms in (4_020..17_000).step_by(2_010) {
        talk.asks(ms, &Ask::Read, found(2, OTHER));
    }
    talk.waits(16_900, 17_020);
    // Renewed in the last moment, so the takeover fails.
    talk.asks(17_020, &Ask::Take(record(2, OTHER)), LeaseAnswer::Changed);
    talk.asks(17_030, &Ask::Read, found(3, OTHER));
    assert_eq!(talk.election.renewed_at(), None);
    // An outage of the API server does not extend the time: only a change since then counts.
    talk.asks(19_040, &Ask::Read, LeaseAnswer::Unknown);
    talk.asks(40_000, &Ask::Read, found(3, OTHER));
    talk.asks(40_010, &Ask::Take(record(3, OTHER)), written(4));
    assert_eq!(talk.election.renewed_at(), Some(talk.at(40_010)));
}

#[test]
fn a_lease_that_says_how_long_it_lasts_is_left_alone_for_so_long() {
    let mut talk = Talk::new();
    let longer = LeaseRecord {
        duration: Some(Duration::from_secs(60)),
        ..record(1, OTHER)
    };
    talk.asks(0, &Ask::Read, LeaseAnswer::Found(Some(longer.clone())));
    talk.asks(60_009, &Ask::Read, LeaseAnswer::Found(Some(longer.clone())));
    talk.asks(60_019, &Ask::Take(longer), written(2));
}

#[test]
fn a_deleted_lease_is_made_anew_when_its_holder_has_noticed() {
    let mut talk = Talk::new();
    talk.asks(0, &Ask::Read, found(1, OTHER));
    talk.asks(2_010, &Ask::Read, LeaseAnswer::Found(None));
    talk.asks(4_020, &Ask::Read, LeaseAnswer::Found(None));
    talk.asks(15_000, &Ask::Read, LeaseAnswer::Found(None));
    talk.asks(15_010, &Ask::Create, LeaseAnswer::Changed);
    talk.asks(15_020, &Ask::Read, found(2, "third"));
    talk.waits(15_030, 17_030);
}

#[test]
fn who_does_not_know_whether_it_was_taken_asks() {
    let mut talk = Talk::new();
    talk.asks(0, &Ask::Read, found(1, ""));
    talk.asks(10, &Ask::Take(record(1, "")), LeaseAnswer::Unknown);
    assert_eq!(talk.election.renewed_at(), None);
    assert!(
        talk.election.may_hold(),
        "it is to be given back at the end"
    );
    talk.asks(2_010, &Ask::Read, found(2, ME));
    talk.asks(2_020, &Ask::Take(record(2, ME)), written(3));
    assert_eq!(talk.election.renewed_at(), Some(talk.at(2_020)));
}

#[test]
fn a_leader_lives_with_lost_answers_until_its_deadline() {
    let mut talk = Talk::leading();
    talk.asks(2_000, &Ask::Renew(record(2, ME)), LeaseAnswer::Unknown);
    // The renewal without an answer had been made.
    talk.asks(4_000, &Ask::Renew(record(2, ME)), LeaseAnswer::Changed);
    talk.asks(4_010, &Ask::Read, found(3, ME));
    talk.asks(4_020, &Ask::Renew(record(3, ME)), written(4));
    assert_eq!(talk.election.renewed_at(), Some(talk.at(4_020)));
    for ms in [6_020, 8_020, 10_020, 12_020] {
        talk.asks(ms, &Ask::Renew(record(4, ME)), LeaseAnswer::Unknown);
    }
    talk.deposed(14_020, Deposed::NotRenewed);
    // A later answer does not restore the lead.
    let (asked_at, now) = (talk.at(12_020), talk.at(14_030));
    talk.election.answered(asked_at, written(5), now);
    talk.deposed(14_040, Deposed::NotRenewed);
}

#[test]
fn a_leader_that_was_stopped_counts_from_when_it_asked() {
    let mut talk = Talk::leading();
    let (asked_at, now) = (talk.at(2_000), talk.at(20_000));
    talk.election.next(asked_at);
    talk.election.answered(asked_at, written(3), now);
    talk.deposed(20_000, Deposed::NotRenewed);
}

#[test]
fn a_leader_that_sees_another_or_none_leads_no_more() {
    let table = [
        (found(3, OTHER), Deposed::Taken(OTHER.to_owned())),
        (found(3, ""), Deposed::Cleared),
        (LeaseAnswer::Found(None), Deposed::Cleared),
    ];
    for (answer, why) in table {
        let mut talk = Talk::leading();
        talk.asks(2_000, &Ask::Renew(record(2, ME)), LeaseAnswer::Changed);
        talk.asks(2_010, &Ask::Read, answer);
        talk.deposed(2_020, why);
    }
}

// --- several candidates, one API server, and what may go wrong between them ---

/// Length of a run (milliseconds of true time).
const RUN: u64 = 180_000;
/// Time after which no faults are injected.
const CALM: u64 = 120_000;
/// Generator of pseudo-random numbers (splitmix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A request in flight: when the API server receives it, and when the answer arrives; `None` if
/// it is lost.
struct UnderWay {
    ask: Ask,
    asked_at: Instant,
    there: Option<u64>,
    back: Option<u64>,
    answer: Option<LeaseAnswer>,
    given_up: u64,
}

/// A process with a clock of its own.
struct Process {
    election: Election,
    name: String,
    /// Start of the local clock, and its speed in thousandths.
    clock: (Instant, u64),
    stopped_until: u64,
    cut_until: u64,
    request: Option<UnderWay>,
    /// Times until the process may begin writes, and until these may last (true time).
    acts_until: u64,
    writes_until: u64,
}

/// The Lease on the API server.
#[derive(Default)]
struct Server {
    version: u32,
    lease: Option<LeaseRecord>,
    /// Requests that arrive after their sender has given up: time, and sender.
    strays: Vec<(u64, Ask, String)>,
}

impl Server {
    fn answer(&mut self, ask: &Ask, who: &str) -> LeaseAnswer {
        let expected = match ask {
            Ask::Read => return LeaseAnswer::Found(self.lease.clone()),
            Ask::Create => None,
            Ask::Take(record) | Ask::Renew(record) => Some(&record.version),
        };
        if self.lease.as_ref().map(|lease| &lease.version) != expected {
            return LeaseAnswer::Changed;
        }
        self.version += 1;
        let lease = record(self.version, who);
        self.lease = Some(lease.clone());
        LeaseAnswer::Written(lease)
    }

    /// Handles the late requests that arrive by `now`.
    fn take_strays(&mut self, now: u64) {
        let (due, rest) = std::mem::take(&mut self.strays)
            .into_iter()
            .partition(|(there, ..)| *there <= now);
        self.strays = rest;
        for (_, ask, who) in due as Vec<(u64, Ask, String)> {
            self.answer(&ask, &who);
        }
    }
}

impl Process {
    fn new(index: u64, generation: u64, now: u64, chance: &mut Chance) -> Self {
        // Clocks start at any value, and their speeds differ by up to 2 %.
        let begin = Instant::now() + Duration::from_secs(chance.below(1_000_000));
        let rate = 980 + chance.below(41);
        let mut process = Self {
            election: Election::new(String::new(), begin),
            name: format!("p{index}-{generation}"),
            clock: (begin, rate),
            stopped_until: now,
            cut_until: 0,
            request: None,
            acts_until: 0,
            writes_until: 0,
        };
        process.election = Election::new(process.name.clone(), process.local(now));
        process
    }

    fn local(&self, now: u64) -> Instant {
        self.clock.0 + Duration::from_micros(now * self.clock.1)
    }

    /// Converts a local time to true time, rounded down.
    fn truly(&self, local: Instant) -> u64 {
        let micros = local.saturating_duration_since(self.clock.0).as_micros();
        u64::try_from(micros).unwrap() / self.clock.1
    }

    fn astray(&self, request: &UnderWay, now: u64, server: &mut Server) {
        if let Some(there) = request.there.filter(|there| *there > now) {
            let stray = (there, request.ask.clone(), self.name.clone());
            server.strays.push(stray);
        }
    }

    /// Runs the driver for one millisecond. Returns true if it ends.
    fn live(&mut self, now: u64, server: &mut Server, chance: &mut Chance) -> bool {
        if let Some(request) = &mut self.request
            && request.there == Some(now)
        {
            request.answer = Some(server.answer(&request.ask, &self.name));
        }
        if now < self.stopped_until {
            return false;
        }
        let local = self.local(now);
        if let Some(request) = &self.request {
            let answered = request.answer.is_some() && request.back.is_some_and(|at| at <= now);
            if !answered && now < request.given_up {
                return false;
            }
            let mut request = self.request.take().unwrap();
            self.astray(&request, now, server);
            let answer = request.answer.take().filter(|_| answered);
            let answer = answer.unwrap_or(LeaseAnswer::Unknown);
            self.election.answered(request.asked_at, answer, local);
        }
        // Limits of the tenure, in true time.
        if let Some(renewed_at) = self.election.renewed_at() {
            self.acts_until = self.truly(renewed_at + RENEW_DEADLINE);
            self.writes_until = self.truly(renewed_at + WRITES_END);
        }
        match self.election.next(local) {
            NextStep::Wait(_) => false,
            NextStep::Deposed(_) => true,
            NextStep::Ask(ask) => {
                let calm = now > CALM;
                // While the process is cut off, no request arrives. A late answer is often the
                // last one.
                let cut = now < self.cut_until;
                let delay = |chance: &mut Chance| match chance.below(20) {
                    _ if cut => None,
                    0 if !calm => Some(chance.below(20_000)),
                    1..=4 if !calm => Some(chance.below(3_500)),
                    5 if !calm => None,
                    _ => Some(chance.below(20)),
                };
                let there = delay(chance).map(|delay| now + 1 + delay);
                let back = there.zip(delay(chance)).map(|(there, delay)| there + delay);
                if !calm && chance.one_in(6) {
                    self.cut_until = now + 1 + chance.below(20_000);
                }
                self.request = Some(UnderWay {
                    ask,
                    asked_at: local,
                    there,
                    back,
                    answer: None,
                    given_up: now + 3_500,
                });
                false
            }
        }
    }
}

/// Runs three processes for three minutes: requests and answers are late or lost, processes are
/// stopped and killed, and one that ends in good order releases the Lease.
fn run(seed: u64) -> Result<(), TestCaseError> {
    let mut chance = Chance(seed);
    let mut server = Server::default();
    let mut processes: Vec<Process> = (0..3)
        .map(|index| Process::new(index, 0, 0, &mut chance))
        .collect();
    let (mut generation, mut led) = (0, 0);
    // The last leader, and when its writes end at the latest.
    let mut last: Option<(String, u64)> = None;
    for now in 0..RUN {
        server.take_strays(now);
        for (index, process) in processes.iter_mut().enumerate() {
            let calm = now > CALM;
            let ended = process.live(now, &mut server, &mut chance);
            if now < process.acts_until && !ended {
                match &mut last {
                    Some((name, until)) if *name == process.name => {
                        *until = process.writes_until;
                    }
                    other => {
                        if let Some((name, until)) = other {
                            prop_assert!(
                                *until <= now,
                                "{} leads at {now} ms, and writes of {name} may last until {until}",
                                process.name
                            );
                        }
                        *other = Some((process.name.clone(), process.writes_until));
                    }
                }
                if calm {
                    led += 1;
                }
            }
            let mut gone = ended;
            if !calm && now >= process.stopped_until && chance.one_in(20_000) {
                process.stopped_until = now + chance.below(30_000);
            }
            if !calm && chance.one_in(40_000) {
                gone = true; // SIGKILL.
            } else if !calm && now >= process.stopped_until && chance.one_in(40_000) {
                // SIGTERM: no write begins, those in flight are cut off, and the Lease is
                // released.
                if let Some((name, until)) = &mut last
                    && *name == process.name
                {
                    *until = now;
                }
                if let Some(lease) = &mut server.lease
                    && lease.holder == process.name
                {
                    server.version += 1;
                    *lease = record(server.version, "");
                }
                gone = true;
            }
            if gone {
                generation += 1;
                // A request in flight may still arrive.
                if let Some(request) = process.request.take() {
                    process.astray(&request, now, &mut server);
                }
                let number = u64::try_from(index).unwrap();
                let mut next = Process::new(number, generation, now, &mut chance);
                next.stopped_until = now + chance.below(3_000);
                *process = next;
            }
        }
    }
    // Without faults there is a leader after at most one Lease duration.
    let missed = (RUN - CALM).saturating_sub(led + 1);
    prop_assert!(missed < 36_000, "nobody led for {missed} ms");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn never_do_two_act_at_once(seed: u64) {
        run(seed)?;
    }
}
