//! The brake: limits on how many nodes may be taken out of service.
//!
//! A broken monitor, a wrong rule or a bad driver can condemn every node of a cluster within
//! seconds. The brake holds back **new** quarantines and nothing else: nodes that are out of
//! service are kept in line with their faults, and given back, whatever the brake says. It
//! counts what the nodes themselves say, so a restart forgets nothing.
//!
//! There are two kinds of limits. A [`Budget`] limits how many nodes may be out at the same
//! time, and lets the next one go as soon as there is room. A [`Window`] is NVSentinel's circuit
//! breaker: too many nodes within a while trip it, and a person closes it again ([`switch`]).
//! [`plan`] applies both to the waiting nodes, gravest first.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use contract::{keys, names};
use jiff::{SignedDuration, Timestamp};

use policy::assess::Desired;
use policy::{Amount, Brake, Budget, DEFAULT_PERCENT, Limit, Window};

pub mod pause;
pub mod switch;

/// Largest cluster whose nodes may each act for themselves (`run --quarantine` on every node).
/// Each gpuwarden watches all nodes, so the API server's traffic grows with the square: at 50
/// nodes it is about that of one controller of 2,500. And nodes that fail at the same moment,
/// behind one switch, do not observe each other before they go out: budgets do not hold them.
pub const MOST_ALONE: usize = 50;

/// Time that a node counts as out of service after the answer to a quarantine patch was lost,
/// unless the node is observed before. The API server ends a request after 60 s
/// (`--request-timeout`), and its watch delivers the result soon after.
pub const DOUBT: SignedDuration = SignedDuration::from_secs(75);

/// Most nodes named that use the room of a limit; the rest is counted.
pub const NAMED: usize = 5;

/// Label of GPU nodes: `key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLabel {
    /// Key of the label.
    pub key: String,
    /// Value of the label.
    pub value: String,
}

/// A node of the cluster, as the brake counts it.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// Labels of the node.
    pub labels: &'a BTreeMap<String, String>,
    /// Set if the node is out of service.
    pub out: Option<OutOfService>,
    /// True if the node is cordoned, by whomever.
    pub cordoned: bool,
}

/// A node that is out of service, or may be before the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfService {
    /// Time since which the node is out; `None` if unknown, which counts as long ago.
    pub since: Option<Timestamp>,
    /// True if the node is out only because a sender asked for it (`force`); it is not counted
    /// in the window.
    pub forced: bool,
}

/// A node in service whose faults ask for a quarantine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the node.
    pub node: String,
    /// True if one of these faults is fatal.
    pub fatal: bool,
    /// Time when the oldest of these faults was first observed.
    pub since: Timestamp,
    /// True if a sender asks for it (`force`): such a node is never held back.
    pub forced: bool,
    /// True if earlier attempts have failed: such a node comes after all others, so that it does
    /// not use up the room for ever.
    pub failing: bool,
}

/// Input of [`plan`]: the cluster, its limits and the waiting nodes.
#[derive(Clone, Debug)]
pub struct PlanInput<'a> {
    /// The limits; `None` if the brake is off.
    pub brake: Option<&'a Brake>,
    /// Label of GPU nodes.
    pub gpu_label: &'a NodeLabel,
    /// Nodes of the cluster.
    pub members: Vec<Member<'a>>,
    /// Time when each returned node was last taken out of service.
    pub recent: &'a BTreeMap<String, Timestamp>,
    /// Time when a person last closed the circuit breaker: nodes taken out before do not count
    /// in the window.
    pub reset_at: Option<Timestamp>,
    /// Hold on all waiting nodes, if any.
    pub stop: Option<Hold>,
    /// Nodes that wait to be taken out.
    pub candidates: Vec<Candidate>,
    /// Current time of the decision.
    pub now: Timestamp,
}

/// Waiting nodes that may go, and those that are held back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BrakePlan {
    /// Nodes to take out now, in order.
    pub start: Vec<String>,
    /// Nodes that are held back, with the reason.
    pub held: BTreeMap<String, Hold>,
    /// True if the circuit breaker trips: the window is full and a node waits.
    pub trip: bool,
    /// Use of each limit, the fullest first; of budgets with groups only the groups in use.
    pub limits: Vec<LimitUse>,
    /// True if no node carries the GPU label, so that all nodes are counted.
    pub unlabelled: bool,
}

/// Use of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUse {
    /// The limit, for people: `20% per rack`, `50% in 5m`.
    pub limit: String,
    /// Value of the label that groups the nodes, if the budget has one.
    pub domain: Option<String>,
    /// True if the limit counts the nodes with the GPU label, false if it counts the others; see
    /// [`plan`].
    pub gpu: bool,
    /// Number of nodes counted.
    pub used: usize,
    /// Largest number that is allowed.
    pub allowed: usize,
    /// Number of nodes in the group.
    pub of: usize,
    /// Names of counted nodes, at most [`NAMED`].
    pub by: Vec<String>,
}

/// Reason why a node is held back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The pause or the circuit breaker cannot be read, for this reason.
    Unread(String),
    /// A person has paused new quarantines.
    Paused(pause::Pause),
    /// The circuit breaker is tripped.
    Tripped,
    /// A budget is used up.
    Budget {
        /// Budget that is used up.
        budget: Budget,
        /// Use of the budget.
        room: LimitUse,
    },
}

/// Key of nodes that are counted together: GPU nodes or others, and the value of a label.
type Group<'a> = (bool, Option<&'a str>);

/// A budget while it is being applied.
struct BudgetCount<'a> {
    budget: &'a Budget,
    groups: BTreeMap<Group<'a>, Room<'a>>,
}

/// The window of the circuit breaker while it is being applied.
struct WindowCount<'a> {
    window: &'a Window,
    /// GPU nodes that were taken out within the window.
    nodes: BTreeSet<&'a str>,
    allowed: usize,
    of: usize,
}

/// Room of a group of nodes.
#[derive(Clone, Default)]
struct Room<'a> {
    used: usize,
    of: usize,
    /// Names of the first nodes that use it.
    by: Vec<&'a str>,
}

/// Joins some names, with the number of the others: `a, b and 3 more`.
pub fn some_of(names: &[String], count: usize) -> String {
    let shown = names.join(", ");
    match count.saturating_sub(names.len()) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Decides which of the waiting nodes may be taken out of service.
///
/// GPU nodes and other nodes are counted separately, under the same budgets: faults of other
/// nodes use up no room of the GPU nodes, and a percentage refers to the nodes of its kind. If
/// no node carries the label, all count as GPU nodes. The window counts GPU nodes only.
///
/// A held node whose faults no longer ask for a quarantine is not among the candidates, and so
/// is dropped.
pub fn plan(mut input: PlanInput<'_>) -> BrakePlan {
    let mut candidates = std::mem::take(&mut input.candidates);
    let members = &input.members;
    let unlabelled = !members.iter().any(|member| input.gpu_label.is_on(member));
    let gpu = |member: &Member<'_>| unlabelled || input.gpu_label.is_on(member);
    let budgets = input.brake.iter().flat_map(|brake| &brake.budgets);
    let mut counts: Vec<BudgetCount<'_>> = budgets
        .map(|budget| BudgetCount::new(budget, members, gpu))
        .collect();
    let window = input.brake.and_then(|brake| brake.window.as_ref());
    let mut window = window.map(|window| WindowCount::new(window, &input, gpu));
    let by_name: BTreeMap<&str, &Member<'_>> =
        members.iter().map(|member| (member.name, member)).collect();

    candidates.sort_by(|a, b| {
        (a.failing.cmp(&b.failing))
            .then(b.fatal.cmp(&a.fatal))
            .then(a.since.cmp(&b.since))
            .then_with(|| a.node.cmp(&b.node))
    });
    let mut plan = BrakePlan {
        unlabelled,
        ..BrakePlan::default()
    };
    for candidate in candidates {
        let Some(member) = by_name.get(candidate.node.as_str()) else {
            continue;
        };
        let is_gpu = gpu(member);
        if !candidate.forced {
            let full = window.as_ref().is_some_and(WindowCount::is_full);
            plan.trip |= input.stop.is_none() && is_gpu && full;
            let hold = (input.stop.clone())
                .or_else(|| plan.trip.then_some(Hold::Tripped))
                .or_else(|| counts.iter().find_map(|count| count.hold(member, is_gpu)));
            if let Some(hold) = hold {
                plan.held.insert(candidate.node, hold);
                continue;
            }
            if let Some(window) = window.as_mut().filter(|_| is_gpu) {
                window.nodes.insert(member.name);
            }
        }
        for count in &mut counts {
            count.add(member, is_gpu);
        }
        plan.start.push(candidate.node);
    }

    plan.limits = counts.iter().flat_map(BudgetCount::uses).collect();
    plan.limits.extend(window.as_ref().map(WindowCount::usage));
    plan.limits
        .sort_by(|a, b| b.utilization().total_cmp(&a.utilization()));
    plan
}

// === impl Candidate ===

impl Candidate {
    /// Returns the candidate for the node `name`, which is in service; `None` if nothing asks to
    /// take it out. `failing` is true if earlier attempts have failed.
    pub fn of(name: &str, desired: &Desired, failing: bool) -> Option<Self> {
        if !desired.wanted() {
            return None;
        }
        let events = &desired.events;
        Some(Self {
            node: name.to_owned(),
            fatal: events.iter().any(|counted| counted.event.is_fatal),
            since: (events.iter().map(|counted| counted.first_seen))
                .min()
                .unwrap_or(Timestamp::UNIX_EPOCH),
            forced: desired.forced_by.is_some(),
            failing,
        })
    }
}

// === impl BudgetCount ===

impl<'a> BudgetCount<'a> {
    fn new(budget: &'a Budget, members: &[Member<'a>], gpu: impl Fn(&Member<'_>) -> bool) -> Self {
        let mut count = Self {
            budget,
            groups: BTreeMap::new(),
        };
        for member in members {
            let Some(group) = count.group(member, gpu(member)) else {
                continue;
            };
            let is_out = count.is_out(member);
            let room = count.groups.entry(group).or_default();
            room.of += 1;
            if is_out {
                room.add(member.name);
            }
        }
        count
    }

    /// Returns the group in which the budget counts the node; `None` if the budget leaves it out.
    fn group(&self, member: &Member<'a>, gpu: bool) -> Option<Group<'a>> {
        let value = (self.budget.per.as_ref()).and_then(|label| member.labels.get(label));
        let counts = match self.budget.limit {
            Limit::Max(_) => true,
            // A number of nodes to keep is that of the GPU nodes of a rack: fewer others, or those
            // of no rack, would never go.
            Limit::Keep(_) => {
                let in_group = value.is_some_and(|value| !value.is_empty());
                gpu && (in_group || self.budget.per.is_none())
            }
        };
        counts.then_some((gpu, value.map(String::as_str)))
    }

    /// Returns whether the node uses up room of the budget. A cordoned node runs no new work, so it
    /// is none of those that are kept in service.
    fn is_out(&self, member: &Member<'_>) -> bool {
        let keeps = matches!(self.budget.limit, Limit::Keep(_));
        member.out.is_some() || keeps && member.cordoned
    }

    fn hold(&self, member: &Member<'a>, gpu: bool) -> Option<Hold> {
        let group = self.group(member, gpu).filter(|_| !self.is_out(member))?;
        let room = self.groups.get(&group).cloned().unwrap_or_default();
        let room = self.usage(group, &room);
        (room.used >= room.allowed).then(|| Hold::Budget {
            budget: self.budget.clone(),
            room,
        })
    }

    fn add(&mut self, member: &Member<'a>, gpu: bool) {
        if let Some(group) = self.group(member, gpu).filter(|_| !self.is_out(member)) {
            self.groups.entry(group).or_default().add(member.name);
        }
    }

    fn uses(&self) -> impl Iterator<Item = LimitUse> {
        self.groups
            .iter()
            // The group of all GPU nodes is always shown.
            .filter(|((gpu, _), room)| room.used > 0 || self.budget.per.is_none() && *gpu)
            .map(|(group, room)| self.usage(*group, room))
    }

    fn usage(&self, (gpu, value): Group<'_>, room: &Room<'_>) -> LimitUse {
        let domain = self.budget.per.as_ref();
        LimitUse {
            limit: self.budget.to_string(),
            domain: domain.map(|_| value.unwrap_or_default().to_owned()),
            gpu,
            used: room.used,
            allowed: self.budget.limit.allowed(room.of),
            of: room.of,
            by: room.by.iter().copied().map(str::to_owned).collect(),
        }
    }
}

// === impl WindowCount ===

impl<'a> WindowCount<'a> {
    fn new(window: &'a Window, input: &PlanInput<'a>, gpu: impl Fn(&Member<'_>) -> bool) -> Self {
        let counts = |at: Timestamp| {
            // A time in the future, from another clock, counts as within the window.
            input.now.duration_since(at) < window.duration
                && input.reset_at.is_none_or(|reset_at| at > reset_at)
        };
        let members = input.members.iter().filter(|member| gpu(member));
        let (mut nodes, mut of) = (BTreeSet::new(), 0);
        for member in members {
            of += 1;
            let out = member.out.filter(|out| !out.forced);
            let before = input.recent.get(member.name).copied();
            let mut times = [out.and_then(|out| out.since), before]
                .into_iter()
                .flatten();
            if times.any(counts) {
                nodes.insert(member.name);
            }
        }
        Self {
            window,
            nodes,
            allowed: Amount::Percent(window.percentage).of(of),
            of,
        }
    }

    fn is_full(&self) -> bool {
        self.nodes.len() >= self.allowed
    }

    fn usage(&self) -> LimitUse {
        let nodes = self.nodes.iter().take(NAMED).copied();
        LimitUse {
            limit: self.window.to_string(),
            domain: None,
            gpu: true,
            used: self.nodes.len(),
            allowed: self.allowed,
            of: self.of,
            by: nodes.map(str::to_owned).collect(),
        }
    }
}

// === impl Room ===

impl<'a> Room<'a> {
    fn add(&mut self, name: &'a str) {
        self.used += 1;
        if self.by.len() < NAMED {
            self.by.push(name);
        }
    }
}

// === impl NodeLabel ===

impl NodeLabel {
    /// Parses `key=value`; the error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text.trim().split_once('=');
        let (key, value) = parts
            .filter(|(_, value)| !value.is_empty())
            .ok_or("it is not a label with its value, such as nvidia.com/gpu.present=true")?;
        let checked = names::label_key(key).and_then(|()| names::label_value(value));
        checked.map_err(|error| error.to_string())?;
        let (key, value) = (key.to_owned(), value.to_owned());
        Ok(Self { key, value })
    }

    fn is_on(&self, member: &Member<'_>) -> bool {
        member.labels.get(&self.key) == Some(&self.value)
    }
}

impl fmt::Display for NodeLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

// === impl LimitUse ===

impl LimitUse {
    /// Returns the used share: 1 is full, and more where nodes were taken out by others or by
    /// force.
    pub fn utilization(&self) -> f64 {
        if self.allowed == 0 {
            return 1.0;
        }
        // Node counts are far below the precision of a double.
        #[allow(clippy::cast_precision_loss)]
        let part = self.used as f64 / self.allowed as f64;
        part
    }
}

// === impl Hold ===

impl Hold {
    /// Returns whether `other` has the same cause, whatever its numbers are.
    pub fn same_cause(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unread(_), Self::Unread(_)) | (Self::Tripped, Self::Tripped) => true,
            (Self::Paused(a), Self::Paused(b)) => a == b,
            (
                Self::Budget { budget: a, room },
                Self::Budget {
                    budget: b,
                    room: other,
                },
            ) => a == b && room.domain == other.domain,
            _ => false,
        }
    }

    /// Returns what ends the hold, for people, and how a person can do it.
    pub fn awaits(&self) -> String {
        match self {
            Self::Unread(_) => "to know whether new quarantines are paused or stopped".to_owned(),
            Self::Paused(_) => "the end of the pause: its time, or `gpuwarden resume`".to_owned(),
            Self::Tripped => format!(
                "a person to close the circuit breaker (ConfigMap {}): `gpuwarden status` says how",
                keys::BREAKER_CONFIG_MAP
            ),
            Self::Budget { budget, room } => {
                let change = match budget.limit {
                    Limit::Max(_) => format!(
                        "a higher `max` under [[brake.budgets]] of the policy, which is \
                         {DEFAULT_PERCENT}% where it has none"
                    ),
                    Limit::Keep(_) => {
                        "a lower `keep` under [[brake.budgets]] of the policy".to_owned()
                    }
                };
                // Where no node may be out, one that is given back makes no room.
                match room.by.first().filter(|_| room.allowed > 0) {
                    Some(node) => format!(
                        "room: a node that is given back (`gpuwarden explain {node}` says what \
                         {node} waits for), or {change}"
                    ),
                    None => format!("room: {change}"),
                }
            }
        }
    }

    /// Returns the name for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unread(_) => "unread",
            Self::Paused(_) => "paused",
            Self::Tripped => "tripped",
            Self::Budget { .. } => "budget",
        }
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(why) => write!(
                f,
                "it is not known yet whether new quarantines are paused or stopped: {why}"
            ),
            Self::Paused(pause) => write!(f, "new quarantines are {pause}"),
            Self::Tripped => f.write_str("the circuit breaker is tripped"),
            Self::Budget { budget, room } => {
                let LimitUse {
                    used,
                    allowed,
                    of,
                    by,
                    ..
                } = room;
                let place = match (&budget.per, room.domain.as_deref()) {
                    (None, _) | (_, None) => String::new(),
                    (Some(label), Some("")) => format!(" without the label {label}"),
                    (Some(label), Some(value)) => format!(" with {label}={value}"),
                };
                let (Limit::Max(amount) | Limit::Keep(amount)) = budget.limit;
                let share = match amount {
                    Amount::Nodes(_) => String::new(),
                    Amount::Percent(percent) => format!(" ({percent}%)"),
                };
                let names = |before: &str| match by.as_slice() {
                    [] => String::new(),
                    names => format!(" ({before}{})", some_of(names, *used)),
                };
                let kept = amount.of(*of);
                match budget.limit {
                    Limit::Max(_) => write!(
                        f,
                        "{used} of {of} nodes{place} are out of service{}, and {allowed}{share} may \
                         be at the same time",
                        names("")
                    ),
                    Limit::Keep(_) if kept > *of => write!(
                        f,
                        "{kept} nodes{place} must stay in service, and there are only {of}"
                    ),
                    Limit::Keep(_) => write!(
                        f,
                        "{kept}{share} of {of} nodes{place} must stay in service{}",
                        names("out: ")
                    ),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
