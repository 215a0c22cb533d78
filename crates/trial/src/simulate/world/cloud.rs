//! The cloud of the simulated cluster, which announces maintenance of nodes, and the monitor that
//! reads its notices: the book of production (`notices`), over the store of the simulation.

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, RecommendedAction, keys};
use jiff::{SignedDuration, Timestamp};
use model::event::normalise;
use notices::{Book, Kind, NodeState, Notice, Phase, Reading, Report, Settings, State};

use super::super::happening::{Broken, CloudTurn, NODES};
use super::super::node::name;
use super::World;

const SOURCE: &str = "simulation";
/// Times of the monitor's configuration.
const SETTINGS: Settings = Settings {
    limit: SignedDuration::from_mins(10),
    delay: SignedDuration::from_mins(1),
    readiness: SignedDuration::from_mins(10),
    missing: SignedDuration::from_secs(10),
};

/// The cloud, and its monitor.
#[derive(Default)]
pub(in crate::simulate) struct Cloud {
    /// Maintenance of each node that the cloud tells of now.
    plans: BTreeMap<usize, Plan>,
    /// Number of maintenances ever announced.
    announced: usize,
    /// Book of the monitor. It is stored together with the reports.
    book: Book,
}

/// A maintenance, as the cloud tells it.
struct Plan {
    id: String,
    kind: Kind,
    phase: Phase,
    start: Timestamp,
}

// === impl World ===

impl World {
    /// Lets the cloud do something to a node.
    pub(in crate::simulate) fn cloud(&mut self, index: usize, turn: CloudTurn) {
        if !self.setup.maintenance {
            return;
        }
        let now = self.now;
        let plans = &mut self.cloud.plans;
        match turn {
            CloudTurn::Announces(minutes) => {
                self.cloud.announced += 1;
                let kinds = Kind::ALL.iter().cycle().skip(self.cloud.announced);
                plans.insert(
                    index,
                    Plan {
                        id: format!("maintenance-{}", self.cloud.announced),
                        kind: kinds.copied().next().unwrap_or(Kind::Reboot),
                        phase: Phase::Scheduled,
                        start: now + SignedDuration::from_mins(minutes),
                    },
                );
            }
            CloudTurn::Moves(minutes) => {
                if let Some(plan) = plans.get_mut(&index) {
                    plan.start = now + SignedDuration::from_mins(minutes);
                }
            }
            CloudTurn::Begins => {
                if let Some(plan) = plans.get_mut(&index) {
                    plan.phase = Phase::Ongoing;
                }
            }
            CloudTurn::CallsOff => drop(plans.remove(&index)),
            CloudTurn::Ends => {
                let ended = plans.remove(&index);
                if let Some(node) = self.nodes.get_mut(index).filter(|_| ended.is_some()) {
                    node.boot(now);
                }
            }
        }
    }

    /// Lets the monitor read what the cloud tells, and report.
    pub(in crate::simulate) fn look_at_cloud(&mut self) {
        if !self.setup.maintenance {
            return;
        }
        let now = self.now;
        let names: Vec<String> = (0..NODES).map(name).collect();
        let names = names.iter().map(String::as_str);
        let open: BTreeSet<&str> = names.filter(|node| self.has_announced(node)).collect();
        self.cloud.book.take_over(&open, now);
        let notices = self.cloud.plans.iter();
        let reading = Reading {
            notices: notices.map(|(index, plan)| plan.notice(*index)).collect(),
            complete: true,
            ..Reading::default()
        };
        self.cloud.book.read(SOURCE, &reading, now);
        let (nodes, fleet) = (&self.nodes, &self.fleet);
        let state = |of: &str| {
            let node = nodes.iter().find(|node| node.view.name == of)?;
            Some(NodeState {
                ready: true,
                boot_id: node.view.machine.boot_id.clone(),
                is_out: fleet.status(of).is_some_and(|one| one.state.is_out()),
            })
        };
        let reports = (self.cloud.book).step(state, &SETTINGS, usize::MAX, now);
        for report in reports {
            self.append_report(&report);
        }
    }

    fn append_report(&mut self, report: &Report) {
        let mut event = HealthEvent {
            agent: notices::AGENT.to_owned(),
            component_class: "CSP".to_owned(),
            check_name: keys::CHECK_CSP_MAINTENANCE.to_owned(),
            node_name: report.node.clone(),
            ..HealthEvent::default()
        };
        report.fill(&mut event, |_| RecommendedAction::None);
        // Every report is an event of its own.
        event.message += &format!(" ({})", self.store.events().len());
        normalise(&mut event, self.now);
        self.store.append(event, self.now);
    }

    /// Starts another monitor; the book is lost with its disk, or kept.
    pub(super) fn restart_monitor(&mut self, keeps_book: bool) {
        if !keeps_book {
            self.cloud.book = Book::default();
        }
    }

    /// Ends all maintenance, with a boot of each node: one that was called off after its begin leaves
    /// no other trace.
    pub(in crate::simulate) fn end_maintenance(&mut self) {
        self.cloud.plans.clear();
        let now = self.now;
        for node in self.nodes.iter_mut().filter(|_| self.setup.maintenance) {
            node.boot(now);
        }
    }

    /// Returns true while the monitor waits for a time, and no notice is left.
    pub(in crate::simulate) fn awaits_end_of_maintenance(&self) -> bool {
        let mut records = self.cloud.book.records().iter();
        let waits = records.any(|record| {
            let asks_a_person = record.state == State::Error;
            !record.state.is_last() && !asks_a_person
        });
        self.cloud.plans.is_empty() && (waits || self.cloud.book.takes_over())
    }

    /// Returns true if a fault of a maintenance is open on the node.
    fn has_announced(&self, node: &str) -> bool {
        let mut faults = self.fleet.book().faults(node).iter();
        faults.any(|fault| is_announced(&fault.event))
    }
}

// === impl Plan ===

impl Plan {
    fn notice(&self, index: usize) -> Notice {
        Notice {
            node: name(index),
            event: self.id.clone(),
            provider: "simulated".to_owned(),
            resource: ("machine".to_owned(), index.to_string()),
            kind: self.kind,
            phase: self.phase,
            word: self.phase.name().to_owned(),
            start: Some(self.start),
            end: None,
            emergency: false,
            updated: None,
        }
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.phase == Phase::Ongoing || self.start.duration_since(now) <= SETTINGS.limit
    }
}

fn is_announced(event: &HealthEvent) -> bool {
    event.check_name == keys::CHECK_CSP_MAINTENANCE
}

/// Checks that a node has a fatal fault if a maintenance of it is due.
pub(in crate::simulate) fn announced(world: &World) -> Result<(), Broken> {
    // A report with an earlier time than the last recovery is one from before it.
    if world.put_back {
        return Ok(());
    }
    for index in 0..NODES {
        let node = name(index);
        let mut faults = world.fleet.book().faults(&node).iter();
        let is_fatal = faults.any(|fault| is_announced(&fault.event) && fault.event.is_fatal);
        let plan = world.cloud.plans.get(&index);
        if plan.is_some_and(|plan| plan.is_due(world.now)) && !is_fatal {
            return Err(format!(
                "{node} has a maintenance that is due, and no fault says so"
            ));
        }
    }
    Ok(())
}

/// Checks that no fault of a maintenance is left once all maintenance is over.
pub(in crate::simulate) fn over(world: &World) -> Result<(), Broken> {
    for node in (0..NODES).map(name) {
        if world.has_announced(&node) {
            return Err(format!(
                "{node} has a fault of a maintenance, and all maintenance is over"
            ));
        }
    }
    Ok(())
}
