//! What can happen to a cluster and its controller.

use std::fmt;

use contract::RecommendedAction;
use jiff::SignedDuration;

use super::dice::Dice;

/// Nodes of the cluster, and GPUs of each.
pub(super) const NODES: usize = 3;
const GPUS: usize = 3;
/// Namespaces of the pods: one for each mode of drain, and one of the system.
pub(super) const NAMESPACES: [&str; 4] = ["now", "later", "jobs", "kube-system"];
const CHECKS: [&str; 2] = ["GpuXidError", "GpuMemWatch"];

/// A fault or its end, as a monitor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Symptom {
    pub(super) node: usize,
    pub(super) gpu: usize,
    pub(super) check: &'static str,
}

/// What becomes of a request on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is done, and the answer comes.
    Done,
    /// It is done, and no answer comes.
    DoneUnheard,
    /// It is not done, and no answer comes.
    Lost,
    /// It is refused.
    Refused,
}

/// What a controller that starts anew has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// What it saved last, and the events since.
    Saved,
    /// The events.
    Events,
    /// Nothing: its store is lost.
    Nothing,
}

/// Something that a person, or another controller, does to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hand {
    Cordon,
    Uncordon,
    /// Takes our taints away.
    Untaint,
    /// Asks for the node's release.
    AskRelease,
    /// Vetoes drains for so many hours.
    Veto(usize),
    Taint(usize),
    TakeTaint(usize),
    Label(usize),
}

/// Something that a machine does to a node by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Machine {
    /// The node boots.
    Boots,
    /// What loads its driver uncordons it, as it does after a boot and during a repair.
    Uncordons,
}

/// A step of a janitor with a custom resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// It begins, if the node's session still permits it.
    Begins,
    Succeeds,
    FailsForNow,
    FailsForGood,
    /// Nobody knows how it went.
    IsLost,
}

/// One step of a simulation. Numbers name one of what there is, whatever there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happening {
    /// A monitor reports a fault, which was accepted so many seconds ago.
    Fault(Symptom, bool, i64),
    /// A monitor reports that it is over.
    Recovery(Symptom),
    /// The controller reads so many events.
    Read(usize),
    /// The controller decides.
    Decide,
    /// One of the requests that are under way arrives.
    Arrives(usize, Fate),
    /// The watch tells of one of the changes that it has not told yet.
    Tells(usize),
    /// The watch breaks off, and lists all nodes anew.
    Lists,
    /// The controller saves what it keeps.
    Saves,
    /// The controller ends without notice and starts anew; what was under way may be done or not.
    Crash(Memory, u64),
    /// A hand is laid on a node.
    Hand(usize, Hand),
    /// A machine does something to a node.
    Machine(usize, Machine),
    /// A person stops new quarantines, and repairs with them or not; or lets them go on.
    Pause(Option<bool>),
    /// The controller reads what people have switched: after a start it is not known at once.
    ReadSwitches,
    /// A pod is bound to a node, if one can be.
    Bound(usize, usize),
    /// A pod ends.
    Ends(usize),
    /// The pods of a node cannot be seen for a while, or can be again.
    Pods(usize, bool),
    /// A janitor works on the custom resource of a repair.
    Janitor(usize, Work),
    /// Somebody deletes one.
    Deleted(usize),
    /// Time passes, or the clock is put back.
    Time(i64),
}

// === impl Happening ===

impl Happening {
    /// Returns one of them, the usual ones more often.
    pub(super) fn any(dice: &mut Dice) -> Self {
        match dice.below(50) {
            0..4 => {
                let late = if dice.once_in(4) { dice.below(100) } else { 0 };
                Self::Fault(Symptom::any(dice), dice.once_in(2), seconds(late))
            }
            4..6 => Self::Recovery(Symptom::any(dice)),
            6..10 => Self::Read(1 + dice.below(3)),
            10..17 => Self::Decide,
            17..24 => Self::Arrives(dice.below(8), Fate::any(dice)),
            24..28 => Self::Tells(dice.below(NODES)),
            28 => Self::Lists,
            29 => Self::Saves,
            30 => {
                let memory = [
                    Memory::Saved,
                    Memory::Saved,
                    Memory::Events,
                    Memory::Nothing,
                ];
                let memory = memory.get(dice.below(memory.len())).copied();
                Self::Crash(memory.unwrap_or(Memory::Saved), dice.any())
            }
            31..33 => Self::Hand(dice.below(NODES), Hand::any(dice)),
            33 => Self::Pause(dice.once_in(3).then(|| dice.once_in(2))),
            34..36 => Self::Bound(dice.below(NODES), dice.below(NAMESPACES.len())),
            36 => Self::Ends(dice.below(16)),
            37 => Self::Pods(dice.below(NODES), dice.once_in(3)),
            38..41 => Self::Janitor(dice.below(4), Work::any(dice)),
            41 if dice.once_in(6) => Self::Deleted(dice.below(4)),
            42..44 => Self::Machine(dice.below(NODES), Machine::any(dice)),
            44..48 => Self::ReadSwitches,
            48 if dice.once_in(8) => Self::Time(-seconds(dice.below(7200))),
            _ => {
                let most = [3, 60, 900, 20_000];
                let most = most.get(dice.below(most.len())).copied();
                Self::Time(1 + seconds(dice.below(most.unwrap_or(3))))
            }
        }
    }
}

fn seconds(number: usize) -> i64 {
    i64::try_from(number).unwrap_or_default()
}

impl Symptom {
    /// Returns the action that its fault recommends: a reboot, a reset, or none, by the GPU.
    pub(super) fn action(self) -> i32 {
        match self.gpu {
            0 => RecommendedAction::RestartBm.into(),
            1 => RecommendedAction::ComponentReset.into(),
            _ => RecommendedAction::None.into(),
        }
    }

    fn any(dice: &mut Dice) -> Self {
        let check = CHECKS.get(dice.below(CHECKS.len())).copied();
        Self {
            node: dice.below(NODES),
            gpu: dice.below(GPUS),
            check: check.unwrap_or_default(),
        }
    }

    /// Returns all that there are.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let gpus = (0..NODES).flat_map(|node| (0..GPUS).map(move |gpu| (node, gpu)));
        gpus.flat_map(|(node, gpu)| CHECKS.map(|check| Self { node, gpu, check }))
    }
}

impl Fate {
    fn any(dice: &mut Dice) -> Self {
        match dice.below(10) {
            0 => Self::DoneUnheard,
            1 => Self::Lost,
            2 => Self::Refused,
            _ => Self::Done,
        }
    }
}

impl Work {
    fn any(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0 => Self::FailsForNow,
            1 => Self::FailsForGood,
            2 => Self::IsLost,
            3..5 => Self::Succeeds,
            _ => Self::Begins,
        }
    }
}

impl Machine {
    fn any(dice: &mut Dice) -> Self {
        if dice.once_in(3) {
            Self::Boots
        } else {
            Self::Uncordons
        }
    }
}

impl Hand {
    fn any(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0 => Self::Cordon,
            1 => Self::Uncordon,
            2 => Self::Untaint,
            3 => Self::AskRelease,
            4 => Self::Taint(dice.below(2)),
            5 => Self::TakeTaint(dice.below(2)),
            6 => Self::Veto(dice.below(3)),
            _ => Self::Label(dice.below(2)),
        }
    }
}

/// The line of a story.
impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(symptom, fatal, late) => {
                let fatal = if *fatal { "fatal " } else { "" };
                write!(f, "{symptom}: a {fatal}fault is reported")?;
                match late {
                    0 => Ok(()),
                    late => write!(f, ", accepted {late} s ago"),
                }
            }
            Self::Recovery(symptom) => write!(f, "{symptom}: the fault is over"),
            Self::Read(count) => write!(f, "the controller reads up to {count} events"),
            Self::Decide => write!(f, "the controller decides"),
            Self::Arrives(_, Fate::Done) => write!(f, "a request is carried out and answered"),
            Self::Arrives(_, Fate::DoneUnheard) => {
                write!(f, "a request is carried out, and its answer is lost")
            }
            Self::Arrives(_, Fate::Lost) => write!(f, "a request is lost"),
            Self::Arrives(_, Fate::Refused) => write!(f, "a request is refused"),
            Self::Tells(_) => write!(f, "the watch tells of a change"),
            Self::Lists => write!(f, "the watch lists all nodes anew"),
            Self::Saves => write!(f, "the controller saves what it keeps"),
            Self::Crash(memory, _) => {
                let memory = match memory {
                    Memory::Saved => "what it saved",
                    Memory::Events => "its events",
                    Memory::Nothing => "nothing",
                };
                write!(f, "the controller crashes, and starts anew with {memory}")
            }
            Self::Hand(node, hand) => write!(f, "n{node}: {hand}"),
            Self::Machine(node, Machine::Boots) => write!(f, "n{node}: it boots"),
            Self::Machine(node, Machine::Uncordons) => {
                write!(f, "n{node}: what loads its driver uncordons it")
            }
            Self::Pause(Some(false)) => write!(f, "new quarantines are paused"),
            Self::Pause(Some(true)) => write!(f, "new quarantines and repairs are paused"),
            Self::Pause(None) => write!(f, "the pause ends"),
            Self::ReadSwitches => write!(f, "the controller reads whether repairs are paused"),
            Self::Bound(node, namespace) => {
                let namespace = NAMESPACES.get(*namespace).copied().unwrap_or_default();
                write!(f, "n{node}: a pod of namespace {namespace} is bound to it")
            }
            Self::Ends(_) => write!(f, "a pod ends"),
            Self::Pods(node, true) => write!(f, "n{node}: its pods cannot be seen"),
            Self::Pods(node, false) => write!(f, "n{node}: its pods can be seen again"),
            Self::Janitor(_, work) => write!(f, "the janitor: {work}"),
            Self::Deleted(_) => write!(f, "somebody deletes a custom resource"),
            Self::Time(seconds) if *seconds < 0 => {
                write!(
                    f,
                    "the clock is put back by {:#}",
                    SignedDuration::from_secs(-seconds)
                )
            }
            Self::Time(seconds) => write!(f, "{:#} pass", SignedDuration::from_secs(*seconds)),
        }
    }
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, gpu, check } = self;
        write!(f, "n{node}, GPU {gpu}, {check}")
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begins => "a repair begins, or is cancelled",
            Self::Succeeds => "a repair succeeds",
            Self::FailsForNow => "a repair fails for now",
            Self::FailsForGood => "a repair fails for good",
            Self::IsLost => "nobody knows how a repair went",
        })
    }
}

impl fmt::Display for Hand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cordon => write!(f, "somebody cordons it"),
            Self::Uncordon => write!(f, "somebody uncordons it"),
            Self::Untaint => write!(f, "somebody takes our taints from it"),
            Self::AskRelease => write!(f, "somebody asks for its release"),
            Self::Veto(hours) => write!(f, "somebody vetoes its drain for {hours} h"),
            Self::Taint(number) => write!(f, "somebody taints it (foreign-{number})"),
            Self::TakeTaint(number) => write!(f, "somebody takes their taint foreign-{number}"),
            Self::Label(number) => write!(f, "somebody labels it (foreign-{number})"),
        }
    }
}
