//! Simulation: the decisions of production ([`fleet`]) in a simulated cluster with
//! every kind of failure.
//!
//! Faults come and go, requests are refused or lost, responses and watch events arrive late or
//! never, people and machines change nodes, clocks are set back, and the controller crashes
//! between any two effects. The invariants of [`judge`] must hold after each step. A run
//! consists of episodes. At the end of an episode failures stop, and everything must settle;
//! then all faults end, and every node must be returned in the state that others want. A run is
//! determined by its seed, which also chooses the features of each episode's cluster ([`setup`]). A
//! violation is reported with as few steps as still cause it.

mod dice;
mod hands;
mod happening;
mod node;
mod resources;
mod rules;
mod setup;
mod store;
mod world;

use std::collections::BTreeMap;

use jiff::SignedDuration;
use serde::Serialize;

use dice::Dice;
use happening::Broken;
use happening::{Fate, Happening, NODES};
use setup::Setup;
use world::World;
use world::{cloud, judge};

/// Number of steps of an episode.
const EPISODE: u64 = 250;
/// Number of pods that are bound to each node at the beginning of an episode.
const PODS: usize = 4;
/// Most rounds until everything must have settled once nothing fails.
const ROUNDS: u32 = 2000;
/// Most attempts to shorten a violation.
const ATTEMPTS: u32 = 2000;

/// Result of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SimulationReport {
    /// Seed of the run, which determines it.
    pub seed: u64,
    /// Number of steps taken.
    pub steps: u64,
    /// Number of sessions started.
    pub sessions: u64,
    /// Number of crashes of the controller.
    pub crashes: u64,
    /// Number of effects, by kind.
    pub effects: BTreeMap<&'static str, u64>,
    /// First violated invariant; it ends the run.
    pub violation: Option<Violation>,
}

/// Violation of an invariant.
#[derive(Clone, Debug, Serialize)]
pub struct Violation {
    /// Seed of the episode.
    pub seed: u64,
    /// Number of steps of the episode.
    pub steps: u64,
    /// Description of the invariant and its violation.
    pub what: String,
    /// Steps that lead to the violation, as few as were found.
    pub story: Vec<String>,
}

/// Counters of an episode.
#[derive(Default)]
struct Figures {
    sessions: u64,
    crashes: u64,
    effects: BTreeMap<&'static str, u64>,
}

/// Runs `steps` steps, or until an invariant is violated.
pub fn run(seed: u64, steps: u64) -> SimulationReport {
    let mut report = SimulationReport {
        seed,
        ..SimulationReport::default()
    };
    while report.steps < steps {
        let length = EPISODE.min(steps - report.steps);
        let seed = seed.wrapping_add(report.steps / EPISODE);
        let mut dice = Dice::new(seed);
        let setup = Setup::of(seed);
        // Steps of the cloud come between the others, which the seed determines without them.
        let mut of_cloud = Dice::new(seed.rotate_left(32));
        let steps: Vec<Happening> = (0..length)
            .flat_map(|step| {
                let step = match usize::try_from(step) {
                    // Nodes have pods from the beginning.
                    Ok(step) if step < NODES * PODS => Happening::bound(step % NODES, &mut dice),
                    _ => Happening::any(&mut dice),
                };
                let has_turn = setup.maintenance && of_cloud.once_in(6);
                let turn = has_turn.then(|| Happening::of_cloud(&mut of_cloud));
                [Some(step), turn].into_iter().flatten()
            })
            .collect();
        report.steps += length;
        let mut figures = Figures::default();
        let played = play(&setup, &steps, &mut figures);
        report.sessions += figures.sessions;
        report.crashes += figures.crashes;
        for (kind, count) in figures.effects {
            *report.effects.entry(kind).or_default() += count;
        }
        if let Err(what) = played {
            report.violation = Some(shortest(seed, setup, steps, what));
            break;
        }
    }
    report
}

fn play(setup: &Setup, steps: &[Happening], figures: &mut Figures) -> Result<(), Broken> {
    let mut world = World::new(setup)?;
    let played = steps
        .iter()
        .try_for_each(|step| apply(&mut world, *step, figures))
        .and_then(|()| end(&mut world));
    figures.effects = std::mem::take(&mut world.effects);
    figures.sessions = world.sessions;
    played
}

fn apply(world: &mut World, step: Happening, figures: &mut Figures) -> Result<(), Broken> {
    // Every step has its own time, since names are derived from times.
    world.tick();
    match step {
        Happening::Fault(symptom, fatal, late) => world.report(symptom, false, fatal, late),
        Happening::Recovery(symptom) => world.report(symptom, true, false, 0),
        Happening::Read(most) => world.read_events(most),
        Happening::Decide => world.decide()?,
        Happening::Arrives(which, fate) => drop(world.arrives(which, fate)?),
        Happening::Tells(node) => drop(world.deliver(node)),
        Happening::Lists => world.list(),
        Happening::Saves => world.save()?,
        Happening::Crash(memory, done) => {
            figures.crashes += 1;
            world.crash(memory, done)?;
        }
        Happening::Hand(node, hand) => world.change_by_hand(node, hand),
        Happening::Approves => world.approve(),
        Happening::Machine(node, machine) => world.change_by_machine(node, machine),
        Happening::Pause(paused) => world.pause(paused),
        Happening::ReadSwitches => world.read_switches(),
        Happening::Bound(node, namespace, traits) => world.bind(node, namespace, traits),
        Happening::Ends(pod) => world.end_pod(pod),
        Happening::Pods(node, unseen) => world.hide_pods(node, unseen),
        Happening::Janitor(which, work) => world.work(which, work)?,
        Happening::Deleted(which) => world.delete_resource(which),
        Happening::RuleDeleted(which) => world.rules.delete(which),
        Happening::Named(which) => drop(world.name_gpu(which)),
        Happening::Written(which) => world.write_checkpoint(which),
        Happening::Time(seconds) => world.pass(seconds),
        Happening::Cloud(node, turn) => world.cloud(node, turn),
        Happening::Looks => world.look_at_cloud(),
    }
    Ok(())
}

/// Ends an episode: nothing fails from here on, and everything must settle.
fn end(world: &mut World) -> Result<(), Broken> {
    for node in 0..NODES {
        world.hide_pods(node, false);
    }
    world.pause(None);
    settle(world, true)?;
    judge::book(&world.fleet, world.store.events(), &world.nodes)?;
    judge::settled(world)?;
    cloud::announced(world)?;
    world.catch_up();
    // A pause does not delay recovery.
    world.pause(Some(false));
    let begin = world.now;
    world.end_maintenance();
    for symptom in judge::recoveries(&world.fleet) {
        world.report(symptom, true, false, 0);
    }
    settle(world, false)?;
    judge::book(&world.fleet, world.store.events(), &world.nodes)?;
    judge::given_back(world)?;
    cloud::over(world)?;
    let took = world.now.duration_since(begin);
    if took > judge::GIVEN_BACK_WITHIN {
        return Err(format!(
            "nodes are given back after {took:#}, and all was well"
        ));
    }
    Ok(())
}

/// Runs the cluster until nothing changes.
fn settle(world: &mut World, pods_end: bool) -> Result<(), Broken> {
    for _ in 0..ROUNDS {
        world.look_at_cloud();
        world.read_events(usize::MAX);
        for node in 0..NODES {
            while world.deliver(node) {}
        }
        world.decide()?;
        let mut acted = false;
        while world.arrives(0, Fate::Done)? {
            acted = true;
        }
        if pods_end {
            acted |= world.end_pods();
        }
        acted |= world.finish_remediations()?;
        if acted || !world.is_quiet() {
            world.pass(1);
            continue;
        }
        match world.waits_until() {
            _ if world.awaits_end_of_maintenance() => world.pass(10),
            Some(at) => {
                let wait = at.duration_since(world.now) + SignedDuration::from_secs(1);
                world.pass(wait.as_secs());
            }
            None => return Ok(()),
        }
    }
    Err("it does not settle".to_owned())
}

/// Removes steps from a violation, and features from its cluster, as long as an invariant is still
/// violated.
fn shortest(seed: u64, mut setup: Setup, mut steps: Vec<Happening>, mut what: String) -> Violation {
    let broken = |setup: &Setup, steps: &[Happening]| {
        let mut figures = Figures::default();
        play(setup, steps, &mut figures).err()
    };
    let length = u64::try_from(steps.len()).unwrap_or_default();
    while let Some((simpler, why)) = (setup.simpler().into_iter())
        .find_map(|simpler| broken(&simpler, &steps).map(|why| (simpler, why)))
    {
        (setup, what) = (simpler, why);
    }
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
            match broken(&setup, &fewer) {
                Some(why) => (steps, what) = (fewer, why),
                None => start = end,
            }
        }
        if chunk == 1 && steps.len() == before || attempts >= ATTEMPTS {
            break;
        }
        chunk = (chunk / 2).max(1);
    }
    let story = steps.iter().map(Happening::to_string);
    Violation {
        seed,
        steps: length,
        what,
        story: std::iter::once(setup.to_string()).chain(story).collect(),
    }
}

#[cfg(test)]
mod tests;
