//! A simulation: the decisions of production ([`fleet`]) in a cluster that exists only here, and in
//! which all goes wrong that can.
//!
//! Faults come and go, requests are refused or lost or answered to nobody, news is late, people lay hands on
//! nodes, clocks are put back, and the controller crashes between any two effects. After each step the
//! invariants of [`judge`] have to hold. A run is made of episodes: at the end of each all goes well, and
//! everything has to settle; then all faults are over, and every node has to be given back as others have
//! made it. All follows from the seed. A story that breaks an invariant is told with as few steps as still
//! break it.

mod dice;
mod happening;
mod judge;
mod node;
mod repair;
mod world;

use std::collections::BTreeMap;

use jiff::SignedDuration;
use serde::Serialize;

use dice::Dice;
use happening::{Fate, Happening, NODES};
use judge::Broken;
use world::World;

/// Steps of one episode.
const EPISODE: u64 = 250;
/// Rounds in which everything has to settle where all goes well.
const ROUNDS: u32 = 2000;
/// Attempts to tell a story with fewer steps.
const ATTEMPTS: u32 = 2000;

/// The result of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The seed from which all follows.
    pub seed: u64,
    /// Number of steps.
    pub steps: u64,
    /// Number of sessions that began.
    pub sessions: u64,
    /// Number of crashes of the controller.
    pub crashes: u64,
    /// Number of effects that were asked for, by kind.
    pub effects: BTreeMap<&'static str, u64>,
    /// The first invariant that was broken; it ends the run.
    pub violation: Option<Violation>,
}

/// An invariant that was broken.
#[derive(Clone, Debug, Serialize)]
pub struct Violation {
    /// The seed of the episode.
    pub seed: u64,
    /// Its steps.
    pub steps: u64,
    /// The invariant that does not hold.
    pub what: String,
    /// The steps that lead there, as few as were found.
    pub story: Vec<String>,
}

/// The figures of an episode.
#[derive(Default)]
struct Figures {
    sessions: u64,
    crashes: u64,
    effects: BTreeMap<&'static str, u64>,
}

/// Runs so many steps, or until an invariant is broken.
pub fn run(seed: u64, steps: u64) -> Report {
    let mut report = Report {
        seed,
        ..Report::default()
    };
    while report.steps < steps {
        let length = EPISODE.min(steps - report.steps);
        let seed = seed.wrapping_add(report.steps / EPISODE);
        let mut dice = Dice::new(seed);
        let steps: Vec<Happening> = (0..length).map(|_| Happening::any(&mut dice)).collect();
        report.steps += length;
        let mut figures = Figures::default();
        let played = play(&steps, &mut figures);
        report.sessions += figures.sessions;
        report.crashes += figures.crashes;
        for (kind, count) in figures.effects {
            *report.effects.entry(kind).or_default() += count;
        }
        if let Err(what) = played {
            report.violation = Some(shortest(seed, steps, what));
            break;
        }
    }
    report
}

/// Plays an episode.
fn play(steps: &[Happening], figures: &mut Figures) -> Result<(), Broken> {
    let mut world = World::new()?;
    let played = steps
        .iter()
        .try_for_each(|step| take(&mut world, *step, figures))
        .and_then(|()| end(&mut world));
    figures.effects = std::mem::take(&mut world.effects);
    figures.sessions = world.sessions;
    played
}

fn take(world: &mut World, step: Happening, figures: &mut Figures) -> Result<(), Broken> {
    // No two things happen at the same time: names follow from times.
    world.tick();
    match step {
        Happening::Fault(symptom, fatal, late) => world.report(symptom, false, fatal, late),
        Happening::Recovery(symptom) => world.report(symptom, true, false, 0),
        Happening::Read(most) => world.read_events(most),
        Happening::Decide => world.decide()?,
        Happening::Arrives(which, fate) => drop(world.arrives(which, fate)?),
        Happening::Tells(node) => drop(world.tell(node)),
        Happening::Lists => world.list(),
        Happening::Saves => world.save()?,
        Happening::Crash(memory, done) => {
            figures.crashes += 1;
            world.crash(memory, done)?;
        }
        Happening::Hand(node, hand) => world.lay_hand(node, hand),
        Happening::Machine(node, machine) => world.machine(node, machine),
        Happening::Pause(paused) => world.pause(paused),
        Happening::ReadSwitches => world.read_switches(),
        Happening::Bound(node, namespace) => world.bind(node, namespace),
        Happening::Ends(pod) => world.end_pod(pod),
        Happening::Pods(node, unseen) => world.see_pods(node, unseen),
        Happening::Janitor(which, work) => world.work(which, work)?,
        Happening::Deleted(which) => world.delete_resource(which),
        Happening::Time(seconds) => world.pass(seconds),
    }
    Ok(())
}

/// From here on all goes well, and everything has to settle.
fn end(world: &mut World) -> Result<(), Broken> {
    for node in 0..NODES {
        world.see_pods(node, false);
    }
    world.pause(None);
    settle(world, true)?;
    judge::book(&world.fleet, &world.stored, &world.nodes)?;
    judge::settled(&world.fleet, &world.nodes)?;
    world.catch_up();
    // Recovery waits for no pause.
    world.pause(Some(false));
    let begin = world.now;
    for symptom in judge::recoveries(&world.fleet) {
        world.report(symptom, true, false, 0);
    }
    settle(world, false)?;
    judge::book(&world.fleet, &world.stored, &world.nodes)?;
    judge::given_back(&world.fleet, &world.nodes)?;
    let took = world.now.duration_since(begin);
    if took > judge::GIVEN_BACK_WITHIN {
        return Err(format!(
            "nodes are given back after {took:#}, and all was well"
        ));
    }
    Ok(())
}

/// Lets everything happen that is to, until nothing more does.
fn settle(world: &mut World, pods_end: bool) -> Result<(), Broken> {
    for _ in 0..ROUNDS {
        world.read_events(usize::MAX);
        for node in 0..NODES {
            while world.tell(node) {}
        }
        world.decide()?;
        let mut acted = false;
        while world.arrives(0, Fate::Done)? {
            acted = true;
        }
        if pods_end {
            acted |= world.end_pods();
        }
        acted |= world.finish_repairs()?;
        if acted || !world.is_quiet() {
            world.pass(1);
            continue;
        }
        match world.waits_until() {
            Some(at) => {
                let wait = at.duration_since(world.now) + SignedDuration::from_secs(1);
                world.pass(wait.as_secs());
            }
            None => return Ok(()),
        }
    }
    Err("it does not settle".to_owned())
}

/// Leaves steps out of a story for as long as it still breaks an invariant.
fn shortest(seed: u64, mut steps: Vec<Happening>, mut what: String) -> Violation {
    let broken = |steps: &[Happening]| play(steps, &mut Figures::default()).err();
    let length = u64::try_from(steps.len()).unwrap_or_default();
    let mut attempts = 0;
    let mut chunk = steps.len().div_ceil(2).max(1);
    loop {
        let before = steps.len();
        let mut start = 0;
        while start < steps.len() && attempts < ATTEMPTS {
            attempts += 1;
            let end = (start + chunk).min(steps.len());
            let mut fewer = steps.clone();
            fewer.drain(start..end);
            match broken(&fewer) {
                Some(why) => (steps, what) = (fewer, why),
                None => start = end,
            }
        }
        if chunk == 1 && steps.len() == before || attempts >= ATTEMPTS {
            break;
        }
        chunk = (chunk / 2).max(1);
    }
    Violation {
        seed,
        steps: length,
        what,
        story: steps.iter().map(Happening::to_string).collect(),
    }
}

#[cfg(test)]
mod tests;
