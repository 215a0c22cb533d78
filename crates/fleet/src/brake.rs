//! The brake: how many nodes may be taken out of service.
//!
//! A broken monitor, a wrong rule or a bad driver condemns every node of a cluster within
//! seconds. The brake holds back **new** quarantines, and nothing else: what is out of
//! service is kept in line with its faults and given back whatever the brake says. What
//! counts against a limit is read from the nodes themselves, so a restart forgets nothing.
//!
//! Two kinds of limits: a [`Budget`] says how many nodes may be out at the same time, and
//! lets the next one go as soon as there is room. A [`Window`] is NVSentinel's circuit
//! breaker: too many nodes within a while trip it, and a person closes it again
//! ([`switch`]). [`plan`] applies both to the nodes that wait, the gravest first.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use contract::{keys, names};
use jiff::{SignedDuration, Timestamp};

use policy::assess::Desired;
use policy::{Amount, Brake, Budget, DEFAULT_PERCENT, Window};

pub mod pause;
pub mod switch;

/// In a cluster of more nodes than this, each must not act for itself (`run --quarantine` on
/// every node). Each watches all nodes, so what the API server sends grows with the square:
/// at 50 nodes about what one controller of 2,500 gets. And those that fail within the same
/// moment, behind one switch, do not see each other before they go: budgets do not hold them.
pub const MOST_ALONE: usize = 50;

/// Time for which a node counts as out of service after a patch to take it out whose answer was
/// lost, unless it is seen to be one or the other before. The API server ends a request
/// after 60 s (`--request-timeout`), and its watch tells of what was done soon after.
pub const DOUBT: SignedDuration = SignedDuration::from_secs(75);

/// Most nodes that are named of those that use the room of a limit; the rest is counted.
pub const NAMED: usize = 5;

/// The label that GPU nodes carry: `key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLabel {
    /// Key.
    pub key: String,
    /// Value.
    pub value: String,
}

/// A node of the cluster, as far as the brake is concerned.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Name.
    pub name: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Since when it is out of service, if it is.
    pub out: Option<Out>,
}

/// A node that is out of service, or may be before we look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Out {
    /// Since when, where that is known; else long ago.
    pub since: Option<Timestamp>,
    /// True if the node is out only because a sender asked for it (`force`), and not counted in the
    /// window.
    pub forced: bool,
}

/// A node that faults ask to take out of service, and that is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name.
    pub node: String,
    /// True if one of these faults is fatal.
    pub fatal: bool,
    /// The time at which the oldest of these faults was first observed.
    pub since: Timestamp,
    /// True if a sender asks for it (`force`): such a node is never held back.
    pub forced: bool,
    /// True if earlier attempts have failed: such a node comes behind all others, and does not use
    /// up the room for ever.
    pub failing: bool,
}

/// The cluster, its limits and the nodes that wait, from which a [`Plan`] is made.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The limits; `None`: switched off.
    pub brake: Option<&'a Brake>,
    /// The label of GPU nodes.
    pub gpu_label: &'a NodeLabel,
    /// The nodes of the cluster.
    pub members: Vec<Member<'a>>,
    /// The time at which each node that is back already was last taken out of service.
    pub recent: &'a BTreeMap<String, Timestamp>,
    /// The time at which a person last closed the circuit breaker: nodes taken out before do not
    /// count in the window.
    pub reset_at: Option<Timestamp>,
    /// The hold on all of them, if there is one.
    pub stop: Option<Hold>,
    /// The nodes that wait.
    pub candidates: Vec<Candidate>,
    /// Now.
    pub now: Timestamp,
}

/// The nodes that may go, and those that may not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Nodes to be taken out now, in this order.
    pub start: Vec<String>,
    /// Nodes that are held back, and by what.
    pub held: BTreeMap<String, Hold>,
    /// True if the circuit breaker trips: the window is full and a node waits.
    pub trip: bool,
    /// The use of each limit, the fullest first; of budgets that count apart only what is in use.
    pub limits: Vec<Use>,
    /// True if no node carries the GPU label, so that all nodes are counted.
    pub unlabelled: bool,
}

/// The use of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The limit, for people: `20% per rack`, `50% in 5m`.
    pub limit: String,
    /// Value of the label by which nodes are counted apart, if they are.
    pub domain: Option<String>,
    /// True if it counts the nodes that carry the GPU label, false if it counts the others. See
    /// [`plan`].
    pub gpu: bool,
    /// Nodes that count.
    pub used: usize,
    /// Nodes that may.
    pub allowed: usize,
    /// Of how many.
    pub of: usize,
    /// Names of nodes that count, at most [`NAMED`].
    pub by: Vec<String>,
}

/// A reason for which a node is held back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It is not known yet what people have set, for this reason.
    Unread(String),
    /// A person has paused new quarantines.
    Paused(pause::Pause),
    /// The circuit breaker is tripped.
    Tripped,
    /// A budget is used up.
    Budget {
        /// The budget.
        budget: Budget,
        /// Its use.
        room: Use,
    },
}

/// Nodes that are counted together: GPU nodes or others, and the value of a label.
type Group<'a> = (bool, Option<&'a str>);

/// A budget while it is being applied.
struct Count<'a> {
    budget: &'a Budget,
    groups: BTreeMap<Group<'a>, Room<'a>>,
}

/// The window of the circuit breaker while it is being applied.
struct WindowCount<'a> {
    window: &'a Window,
    /// GPU nodes that were taken out within it.
    nodes: BTreeSet<&'a str>,
    allowed: usize,
    of: usize,
}

/// The nodes of a group.
#[derive(Clone, Default)]
struct Room<'a> {
    used: usize,
    of: usize,
    /// The first of those that use it.
    by: Vec<&'a str>,
}

/// Returns some of several names, and how many more there are: `a, b and 3 more`.
pub fn some_of(names: &[String], count: usize) -> String {
    let shown = names.join(", ");
    match count.saturating_sub(names.len()) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Returns which of the waiting nodes may be taken out of service.
///
/// GPU nodes and other nodes are counted apart, under the same budgets: faults of other
/// nodes use up no room of the GPU nodes, and a percentage is one of the nodes that it is
/// about. Where no node carries the label, all count as GPU nodes. The window counts GPU
/// nodes only.
///
/// A node that was held back and is not wanted any more does not come here, and so is dropped.
pub fn plan(mut question: Question<'_>) -> Plan {
    let mut candidates = std::mem::take(&mut question.candidates);
    let members = &question.members;
    let unlabelled = !members
        .iter()
        .any(|member| question.gpu_label.is_on(member));
    let gpu = |member: &Member<'_>| unlabelled || question.gpu_label.is_on(member);
    let budgets = question.brake.iter().flat_map(|brake| &brake.budgets);
    let mut counts: Vec<Count<'_>> = budgets
        .map(|budget| Count::new(budget, members, gpu))
        .collect();
    let window = question.brake.and_then(|brake| brake.window.as_ref());
    let mut window = window.map(|window| WindowCount::new(window, &question, gpu));
    let by_name: BTreeMap<&str, &Member<'_>> =
        members.iter().map(|member| (member.name, member)).collect();

    candidates.sort_by(|a, b| {
        (a.failing.cmp(&b.failing))
            .then(b.fatal.cmp(&a.fatal))
            .then(a.since.cmp(&b.since))
            .then_with(|| a.node.cmp(&b.node))
    });
    let mut plan = Plan {
        unlabelled,
        ..Plan::default()
    };
    for candidate in candidates {
        let Some(member) = by_name.get(candidate.node.as_str()) else {
            continue;
        };
        let is_gpu = gpu(member);
        if !candidate.forced {
            let full = window.as_ref().is_some_and(WindowCount::is_full);
            plan.trip |= question.stop.is_none() && is_gpu && full;
            let hold = (question.stop.clone())
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
            count.take(member, is_gpu);
        }
        plan.start.push(candidate.node);
    }

    plan.limits = counts.iter().flat_map(Count::uses).collect();
    plan.limits.extend(window.as_ref().map(WindowCount::usage));
    plan.limits
        .sort_by(|a, b| b.utilization().total_cmp(&a.utilization()));
    plan
}

// === impl Candidate ===

impl Candidate {
    /// Returns the node `name`, which is in service, as one that waits; `None` where nothing asks
    /// to take it out. `failing`: earlier attempts have failed.
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

// === impl Count ===

impl<'a> Count<'a> {
    fn new(budget: &'a Budget, members: &[Member<'a>], gpu: impl Fn(&Member<'_>) -> bool) -> Self {
        let mut count = Self {
            budget,
            groups: BTreeMap::new(),
        };
        for member in members {
            let group = count.group(member, gpu(member));
            let room = count.groups.entry(group).or_default();
            room.of += 1;
            if member.out.is_some() {
                room.take(member.name);
            }
        }
        count
    }

    fn group(&self, member: &Member<'a>, gpu: bool) -> Group<'a> {
        let value = (self.budget.per.as_ref()).and_then(|label| member.labels.get(label));
        (gpu, value.map(String::as_str))
    }

    fn hold(&self, member: &Member<'a>, gpu: bool) -> Option<Hold> {
        let group = self.group(member, gpu);
        let room = self.groups.get(&group).cloned().unwrap_or_default();
        let room = self.usage(group, &room);
        (room.used >= room.allowed).then(|| Hold::Budget {
            budget: self.budget.clone(),
            room,
        })
    }

    fn take(&mut self, member: &Member<'a>, gpu: bool) {
        let group = self.group(member, gpu);
        self.groups.entry(group).or_default().take(member.name);
    }

    fn uses(&self) -> impl Iterator<Item = Use> {
        self.groups
            .iter()
            // All together is always shown.
            .filter(|((gpu, _), room)| room.used > 0 || self.budget.per.is_none() && *gpu)
            .map(|(group, room)| self.usage(*group, room))
    }

    fn usage(&self, (gpu, value): Group<'_>, room: &Room<'_>) -> Use {
        let domain = self.budget.per.as_ref();
        Use {
            limit: self.budget.to_string(),
            domain: domain.map(|_| value.unwrap_or_default().to_owned()),
            gpu,
            used: room.used,
            allowed: self.budget.max.of(room.of),
            of: room.of,
            by: room.by.iter().copied().map(str::to_owned).collect(),
        }
    }
}

// === impl WindowCount ===

impl<'a> WindowCount<'a> {
    fn new(window: &'a Window, question: &Question<'a>, gpu: impl Fn(&Member<'_>) -> bool) -> Self {
        let counts = |at: Timestamp| {
            // A time of the future (another's clock) is within.
            question.now.duration_since(at) < window.duration
                && question.reset_at.is_none_or(|reset_at| at > reset_at)
        };
        let members = question.members.iter().filter(|member| gpu(member));
        let (mut nodes, mut of) = (BTreeSet::new(), 0);
        for member in members {
            of += 1;
            let out = member.out.filter(|out| !out.forced);
            let before = question.recent.get(member.name).copied();
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

    fn usage(&self) -> Use {
        let nodes = self.nodes.iter().take(NAMED).copied();
        Use {
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
    fn take(&mut self, name: &'a str) {
        self.used += 1;
        if self.by.len() < NAMED {
            self.by.push(name);
        }
    }
}

// === impl NodeLabel ===

impl NodeLabel {
    /// Reads `key=value`; the error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text.trim().split_once('=');
        let (key, value) = parts
            .filter(|(_, value)| !value.is_empty())
            .ok_or("it is no label with its value, such as nvidia.com/gpu.present=true")?;
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

// === impl Use ===

impl Use {
    /// Returns how far it is used up: 1 is full, and more where nodes were taken out by others or
    /// by force.
    pub fn utilization(&self) -> f64 {
        if self.allowed == 0 {
            return 1.0;
        }
        // Numbers of nodes are far below what a double holds exactly.
        #[allow(clippy::cast_precision_loss)]
        let part = self.used as f64 / self.allowed as f64;
        part
    }
}

// === impl Hold ===

impl Hold {
    /// Returns whether it is the same hindrance, whatever the numbers are by now.
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

    /// Returns what it waits for, for people, and how a person makes that come.
    pub fn awaits(&self) -> String {
        match self {
            Self::Unread(_) => "to know whether new quarantines are paused or stopped".to_owned(),
            Self::Paused(_) => "the end of the pause: its time, or `gpuwarden resume`".to_owned(),
            Self::Tripped => format!(
                "a person to close the circuit breaker (ConfigMap {}): `gpuwarden status` says how",
                keys::BREAKER_CONFIG_MAP
            ),
            Self::Budget { room, .. } => {
                let raise = format!(
                    "a higher `max` under [[brake.budgets]] of the policy, which is \
                     {DEFAULT_PERCENT}% where it has none"
                );
                match room.by.first() {
                    Some(node) => format!(
                        "room: a node that is given back (`gpuwarden explain {node}` says what \
                         {node} waits for), or {raise}"
                    ),
                    None => format!("room: {raise}"),
                }
            }
        }
    }

    /// Returns its name, for programs.
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
                let Use {
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
                let share = match budget.max {
                    Amount::Nodes(_) => String::new(),
                    Amount::Percent(percent) => format!(" ({percent}%)"),
                };
                let names = match by.as_slice() {
                    [] => String::new(),
                    names => format!(" ({})", some_of(names, *used)),
                };
                write!(
                    f,
                    "{used} of {of} nodes{place} are out of service{names}, and {allowed}{share} may \
                     be at the same time"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests;
