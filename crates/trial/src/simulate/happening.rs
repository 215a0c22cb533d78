//! Steps of a simulation: what can happen to the cluster and its controller.

use std::fmt;

use contract::RecommendedAction;
use jiff::SignedDuration;

use super::dice::Dice;

/// Description of a violated invariant.
pub(super) type Broken = String;

/// Label of the nodes that another operator drains.
pub(super) const SCHEDULER: (&str, &str) = ("nvidia.com/scheduler", "slurm");

/// Number of nodes in the cluster.
pub(super) const NODES: usize = 3;
/// Number of GPUs of a node.
pub(super) const GPUS: usize = 3;
/// Namespaces of the pods: one for each drain mode, and a system namespace.
pub(super) const NAMESPACES: [&str; 4] = ["now", "later", "jobs", "kube-system"];
/// Checks of the monitors.
pub(super) const CHECKS: [&str; 2] = ["GpuXidError", TAINTS];
/// Check whose faults concern a single device: it is tainted where that is configured.
pub(super) const TAINTS: &str = "GpuMemWatch";

/// Fault or its end, as a monitor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Symptom {
    pub(super) node: usize,
    pub(super) gpu: usize,
    pub(super) check: &'static str,
}

/// Fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Request is carried out and answered.
    Done,
    /// Request is carried out, but the response is lost.
    DoneUnanswered,
    /// Request is lost before it arrives.
    Lost,
    /// Request is refused by the API server.
    Refused,
}

/// State that a restarted controller has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Last saved state, and the events since.
    Saved,
    /// All events, but no saved state.
    Events,
    /// Nothing, since the store is lost.
    Nothing,
}

/// Change of a node by a person or another controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hand {
    Cordon,
    Uncordon,
    Untaint,
    /// Requests the release of the node.
    AskRelease,
    /// Vetoes drains for this many hours.
    Veto(usize),
    Taint(usize),
    TakeTaint(usize),
    Label(usize),
}

/// Change of a node by a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MachineChange {
    /// Node boots with a new boot id.
    Boots,
    /// Driver loader uncordons the node, as it does after a boot and during a remediation.
    Uncordons,
}

/// Turn of the cloud to a node of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CloudTurn {
    /// A maintenance in this many minutes is announced.
    Announces(i64),
    /// The announced maintenance is put off, or brought forward, to this many minutes from now.
    Moves(i64),
    /// The announced maintenance begins.
    Begins,
    /// The announced maintenance ends, with a boot.
    Ends,
    /// The announced maintenance is called off.
    CallsOff,
}

/// Step of a janitor on a custom resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Janitor starts, if the node's session still permits it.
    Begins,
    Succeeds,
    FailsForNow,
    FailsForGood,
    /// Result of the work is unknown.
    IsLost,
}

/// Source of the knowledge which GPU a pod holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// Annotation that the agent of the node writes at once.
    Annotated,
    /// Claim of the pod, where devices can be tainted; else an annotation.
    Claimed,
    /// Nobody says which GPU it is, until the agent writes the annotation.
    Unknown,
}

/// Traits of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Traits {
    /// GPU that it holds, and how that is known; `None`: it has no GPU.
    pub(super) gpu: Option<(usize, Known)>,
    /// Gang that it is in, where there are gangs.
    pub(super) gang: Option<usize>,
    /// Requested time for a checkpoint, where pods write one (minutes); 0: as long as it may.
    pub(super) checkpoint: Option<i64>,
}

/// Step of a simulation. Indices are taken modulo the number of candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happening {
    /// Monitor reports a fault that was accepted this many seconds ago.
    Fault(Symptom, bool, i64),
    /// Monitor reports the end of a fault.
    Recovery(Symptom),
    /// Controller reads up to this many events.
    Read(usize),
    Decide,
    /// Pending request arrives at the API server.
    Arrives(usize, Fate),
    /// Watch delivers the next change of a node.
    Tells(usize),
    /// Watch breaks and lists all nodes again.
    Lists,
    Saves,
    /// Controller crashes and restarts; pending requests may be carried out or not.
    Crash(Memory, u64),
    /// Person changes a node.
    Hand(usize, Hand),
    /// Person approves what is proposed for any node.
    Approves,
    /// Machine changes a node.
    Machine(usize, MachineChange),
    /// Person pauses new quarantines, with or without remediations, or ends the pause.
    Pause(Option<bool>),
    /// Controller reads the switches that people set, which it does not know right after a
    /// start.
    ReadSwitches,
    /// Pod with these traits is bound to a node of a namespace, if one accepts it.
    Bound(usize, usize, Traits),
    /// Pod ends by itself.
    Ends(usize),
    /// Pods of a node can no longer be listed, or can be listed again.
    Pods(usize, bool),
    /// Janitor works on the custom resource of a remediation.
    Janitor(usize, Work),
    /// Person deletes a custom resource.
    Deleted(usize),
    /// Person deletes a rule that taints a device.
    RuleDeleted(usize),
    /// Agent writes the GPUs of a pod on it.
    Named(usize),
    /// Pod has written the checkpoint that it was asked for.
    Written(usize),
    /// Clock advances, or is set back.
    Time(i64),
    /// Cloud turns to a node.
    Cloud(usize, CloudTurn),
    /// Monitor of maintenance reads what the cloud tells.
    Looks,
}

// === impl Happening ===

impl Happening {
    /// Returns the step that binds a random pod to a node.
    pub(super) fn bound(node: usize, dice: &mut Dice) -> Self {
        Self::Bound(node, dice.below(NAMESPACES.len()), Traits::any(dice))
    }

    /// Returns a random step of the cloud, or of the monitor that reads what it tells.
    pub(super) fn of_cloud(dice: &mut Dice) -> Self {
        let minutes = [0, 5, 20, 300];
        let minutes = minutes.get(dice.below(minutes.len())).copied();
        let minutes = minutes.unwrap_or_default();
        let turn = match dice.below(10) {
            0..2 => CloudTurn::Announces(minutes),
            2 => CloudTurn::Moves(minutes),
            3 => CloudTurn::Begins,
            4 => CloudTurn::Ends,
            5 => CloudTurn::CallsOff,
            _ => return Self::Looks,
        };
        Self::Cloud(dice.below(NODES), turn)
    }

    /// Returns a random step; ordinary ones are more likely.
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
            34..36 => Self::bound(dice.below(NODES), dice),
            36 => Self::Ends(dice.below(16)),
            37 if dice.once_in(2) => Self::Written(dice.below(4)),
            37 => Self::Pods(dice.below(NODES), dice.once_in(3)),
            38..41 => Self::Janitor(dice.below(4), Work::any(dice)),
            41 if dice.once_in(6) => Self::Deleted(dice.below(4)),
            41 => Self::Named(dice.below(4)),
            42..44 => Self::Machine(dice.below(NODES), MachineChange::any(dice)),
            44..47 => Self::ReadSwitches,
            47 => Self::Approves,
            48 if dice.once_in(6) => Self::RuleDeleted(dice.below(4)),
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
    /// Returns the recommended action of the fault: a reboot, a reset or none, depending on the
    /// GPU and the check.
    pub(super) fn action(self) -> i32 {
        match self.gpu {
            0 if self.check != TAINTS => RecommendedAction::RestartBm.into(),
            0 | 1 => RecommendedAction::ComponentReset.into(),
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

    /// Returns all possible symptoms.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let gpus = (0..NODES).flat_map(|node| (0..GPUS).map(move |gpu| (node, gpu)));
        gpus.flat_map(|(node, gpu)| CHECKS.map(|check| Self { node, gpu, check }))
    }
}

impl Traits {
    fn any(dice: &mut Dice) -> Self {
        let known = match dice.below(5) {
            0 => None,
            1 => Some(Known::Unknown),
            2 => Some(Known::Claimed),
            _ => Some(Known::Annotated),
        };
        Self {
            gpu: known.map(|known| (dice.below(GPUS), known)),
            gang: Some(dice.below(3)).filter(|gang| *gang < 2),
            checkpoint: dice.once_in(2).then(|| seconds(dice.below(4) * 4)),
        }
    }
}

impl fmt::Display for Traits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gpu {
            None => f.write_str("no GPU"),
            Some((gpu, Known::Annotated)) => write!(f, "GPU {gpu}"),
            Some((gpu, Known::Claimed)) => write!(f, "a claim of GPU {gpu}"),
            Some((gpu, Known::Unknown)) => write!(f, "GPU {gpu}, which is not written on it"),
        }?;
        if let Some(gang) = self.gang {
            write!(f, ", of gang {gang}")?;
        }
        match self.checkpoint {
            None => Ok(()),
            Some(minutes) => write!(f, ", which asks for {minutes} min to write a checkpoint"),
        }
    }
}

impl Fate {
    fn any(dice: &mut Dice) -> Self {
        match dice.below(10) {
            0 => Self::DoneUnanswered,
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

impl MachineChange {
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

/// Formats a step as a line of a violation's story.
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
            Self::Arrives(_, Fate::DoneUnanswered) => {
                write!(f, "a request is carried out, and its answer is lost")
            }
            Self::Arrives(_, Fate::Lost) => write!(f, "a request is lost"),
            Self::Arrives(_, Fate::Refused) => write!(f, "a request is refused"),
            Self::Tells(_) => write!(f, "the watch delivers a change"),
            Self::Lists => write!(f, "the watch lists all nodes again"),
            Self::Saves => write!(f, "the controller saves its state"),
            Self::Crash(memory, _) => {
                let memory = match memory {
                    Memory::Saved => "its saved state",
                    Memory::Events => "its events",
                    Memory::Nothing => "nothing",
                };
                write!(f, "the controller crashes, and restarts with {memory}")
            }
            Self::Hand(node, hand) => write!(f, "n{node}: {hand}"),
            Self::Approves => write!(f, "somebody approves whatever is proposed"),
            Self::Machine(node, MachineChange::Boots) => write!(f, "n{node}: it boots"),
            Self::Machine(node, MachineChange::Uncordons) => {
                write!(f, "n{node}: its driver loader uncordons it")
            }
            Self::Pause(Some(false)) => write!(f, "new quarantines are paused"),
            Self::Pause(Some(true)) => write!(f, "new quarantines and remediations are paused"),
            Self::Pause(None) => write!(f, "the pause ends"),
            Self::ReadSwitches => write!(f, "the controller reads the pause switch"),
            Self::Bound(node, namespace, traits) => {
                let namespace = NAMESPACES.get(*namespace).copied().unwrap_or_default();
                write!(
                    f,
                    "n{node}: a pod of namespace {namespace} is bound to it, with {traits}"
                )
            }
            Self::Ends(_) => write!(f, "a pod ends"),
            Self::Pods(node, true) => write!(f, "n{node}: its pods cannot be listed"),
            Self::Pods(node, false) => write!(f, "n{node}: its pods can be listed again"),
            Self::Janitor(_, work) => write!(f, "the janitor: {work}"),
            Self::Deleted(_) => write!(f, "somebody deletes a custom resource"),
            Self::RuleDeleted(_) => write!(f, "somebody deletes a rule that taints a device"),
            Self::Written(_) => write!(f, "a pod has written its checkpoint"),
            Self::Named(_) => write!(f, "the agent writes the GPU of a pod on it"),
            Self::Time(seconds) if *seconds < 0 => {
                write!(
                    f,
                    "the clock is put back by {:#}",
                    SignedDuration::from_secs(-seconds)
                )
            }
            Self::Time(seconds) => write!(f, "{:#} pass", SignedDuration::from_secs(*seconds)),
            Self::Cloud(node, turn) => write!(f, "n{node}: {turn}"),
            Self::Looks => write!(f, "the monitor of maintenance reads what the cloud tells"),
        }
    }
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, gpu, check } = self;
        write!(f, "n{node}, GPU {gpu}, {check}")
    }
}

impl fmt::Display for CloudTurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Announces(minutes) => write!(f, "maintenance in {minutes} min is announced"),
            Self::Moves(minutes) => write!(f, "its maintenance is moved to {minutes} min from now"),
            Self::Begins => write!(f, "its maintenance begins"),
            Self::Ends => write!(f, "its maintenance ends"),
            Self::CallsOff => write!(f, "its maintenance is called off"),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begins => "a remediation begins, or is cancelled",
            Self::Succeeds => "a remediation succeeds",
            Self::FailsForNow => "a remediation fails for now",
            Self::FailsForGood => "a remediation fails for good",
            Self::IsLost => "the result of a remediation is lost",
        })
    }
}

impl fmt::Display for Hand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cordon => write!(f, "somebody cordons it"),
            Self::Uncordon => write!(f, "somebody uncordons it"),
            Self::Untaint => write!(f, "somebody removes our taints from it"),
            Self::AskRelease => write!(f, "somebody asks for its release"),
            Self::Veto(hours) => write!(f, "somebody vetoes its drain for {hours} h"),
            Self::Taint(number) => write!(f, "somebody taints it (foreign-{number})"),
            Self::TakeTaint(number) => write!(f, "somebody removes their taint foreign-{number}"),
            Self::Label(number) => write!(f, "somebody labels it (foreign-{number})"),
        }
    }
}
