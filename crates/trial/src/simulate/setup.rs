//! Features that are configured in the simulated cluster. The seed of an episode chooses them.

use std::fmt;
use std::sync::Arc;

use fleet::brake::NodeLabel;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use fleet::{Owns, Settings};
use jiff::SignedDuration;
use model::mode::Mode;
use model::node::NodeView;
use model::position::Position;
use policy::{DEFAULT_POLICY, Policy};

use super::dice::Dice;
use super::happening::Broken;
use super::happening::{CHECKS, SCHEDULER};
use super::resources::{ASKS, REMEDIATION, RESET_GPU, RESET_NODE};

/// Drain modes of the [`NAMESPACES`](super::happening::NAMESPACES).
const DRAIN: &str = r#"
deleteAfterTimeoutMinutes = 60
[[userNamespaces]]
name = "now"
mode = "Immediate"
[[userNamespaces]]
name = "later"
mode = "DeleteAfterTimeout"
[[userNamespaces]]
name = "jobs"
mode = "AllowCompletion"
"#;

/// Drain by another operator, of the nodes with the label [`SCHEDULER`].
const CUSTOM_DRAIN: &str = r#"
[customDrain]
enabled = true
templateMountPath = "/templates"
templateFileName = "drain"
namespace = "slinky"
apiGroup = "nvsentinel.nvidia.com"
version = "v1alpha1"
kind = "DrainRequest"
statusConditionType = "DrainComplete"
statusConditionStatus = "True"
timeout = "30m"
nodeSelector = "nvidia.com/scheduler in (slurm)"
"#;
const DRAIN_TEMPLATE: &str = r#"
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {namespace: "{{ .Namespace }}"}
spec: {nodeName: "{{ .HealthEvent.NodeName }}"}
"#;

/// Route of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Pods stay, and nothing is remediated.
    Stays,
    /// Pods leave as their namespaces ask, and nothing is remediated.
    Unrepaired,
    /// Pods are evicted at once.
    Forceful,
}

/// Proof that a node has to give after a remediation, before it returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Proof {
    /// Node returns without a proof.
    #[default]
    Nothing,
    /// Node has no new fault for a minute.
    Quiet,
    /// After a minute without a new fault, a Job succeeds.
    Job,
    /// As `Job`, but Jobs fail at the end of an episode.
    FailingJob,
}

/// Features of a simulated cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Setup {
    /// Route of the faults of each of the [`CHECKS`]; `None`: they get all stages.
    pub(super) routes: [Option<Route>; CHECKS.len()],
    /// True if only the pods of faulty GPUs leave where that suffices. GPUs are then reset one by
    /// one.
    pub(super) partial: bool,
    /// True if a faulty GPU is tainted, and its node stays in service.
    pub(super) device_taints: bool,
    /// True if another operator drains the nodes with the label [`SCHEDULER`].
    pub(super) custom_drain: bool,
    /// True if pods are in gangs, and ask for the time to write a checkpoint.
    pub(super) gangs: bool,
    /// Validation of nodes that were remediated.
    pub(super) validation: Proof,
    /// True if all routes that drain, and reboots, wait for a person's approval.
    pub(super) approvals: bool,
    /// True if the cloud announces maintenance.
    pub(super) maintenance: bool,
}

/// Configuration of a controller, as its files give it.
pub(super) struct Configuration {
    pub(super) policy: Arc<Policy>,
    pub(super) drain: Arc<DrainConfig>,
    pub(super) settings: Settings,
}

// === impl Setup ===

impl Setup {
    /// Returns the features that the seed of an episode chooses.
    pub(super) fn of(seed: u64) -> Self {
        // The steps of the episode are drawn from the seed itself.
        let mut dice = Dice::new(!seed);
        let routes = dice.once_in(2);
        Self {
            routes: CHECKS.map(|_| Route::any(&mut dice).filter(|_| routes)),
            partial: dice.once_in(2),
            device_taints: dice.once_in(2),
            custom_drain: dice.once_in(2),
            gangs: dice.once_in(2),
            validation: Proof::any(&mut dice),
            approvals: dice.once_in(2),
            maintenance: dice.once_in(2),
        }
    }

    /// Returns the setups that lack one of the features of this one.
    pub(super) fn simpler(&self) -> Vec<Self> {
        let mut simpler = vec![
            Self {
                partial: false,
                ..self.clone()
            },
            Self {
                device_taints: false,
                ..self.clone()
            },
            Self {
                custom_drain: false,
                ..self.clone()
            },
            Self {
                gangs: false,
                ..self.clone()
            },
            Self {
                validation: Proof::Nothing,
                ..self.clone()
            },
            Self {
                approvals: false,
                ..self.clone()
            },
            Self {
                maintenance: false,
                ..self.clone()
            },
        ];
        for (index, _) in CHECKS.iter().enumerate() {
            let mut without = self.clone();
            if let Some(route) = without.routes.get_mut(index) {
                *route = None;
            }
            simpler.push(without);
        }
        simpler.retain(|one| one != self);
        simpler
    }

    /// Returns the route of the faults of a check.
    pub(super) fn route(&self, check: &str) -> Option<Route> {
        let mut routes = CHECKS.iter().zip(self.routes);
        routes.find(|(of, _)| **of == check)?.1
    }

    /// Returns true if the faults of a check wait for an approval.
    pub(super) fn asks(&self, check: &str) -> bool {
        self.approvals && self.route(check).is_some_and(|route| route != Route::Stays)
    }

    /// Returns true if another operator drains a node.
    pub(super) fn drains_by_resource(&self, node: &NodeView) -> bool {
        let (label, value) = SCHEDULER;
        self.custom_drain && node.labels.get(label).is_some_and(|on| on == value)
    }

    /// Returns the configuration of the controller.
    pub(super) fn configuration(&self) -> Result<Configuration, Broken> {
        const SOURCE: &str = "the simulation";
        let policy = Policy::parse(&self.policy(), SOURCE).map_err(|why| why.to_string())?;
        let drain =
            DrainConfig::parse_with(&self.drain(), SOURCE, |_| Ok(DRAIN_TEMPLATE.to_owned()));
        let drain = drain.map_err(|why| why.to_string())?;
        let drain = Arc::new(drain);
        let no_file = |_: &str| Err("there are no files".to_owned());
        let remediation = RemediationConfig::parse(&self.remediation(), SOURCE, no_file);
        let remediation = remediation.map_err(|why| why.to_string())?;
        let settings = Settings {
            mode: Mode::Act,
            owns: Owns::All,
            cluster: true,
            store: "simulated".to_owned(),
            since: Position::START,
            // The brake's budgets have a simulator of their own.
            brake: false,
            gpu_label: NodeLabel::parse("nvidia.com/gpu.present=true")?,
            drain: Some(Arc::clone(&drain)),
            remediation: Some(Arc::new(remediation)),
            retention: SignedDuration::from_hours(24 * 30),
            returns_wait: true,
        };
        Ok(Configuration {
            policy: Arc::new(policy),
            drain,
            settings,
        })
    }

    /// Returns the text of the drain configuration.
    fn drain(&self) -> String {
        let custom = if self.custom_drain { CUSTOM_DRAIN } else { "" };
        format!("partialDrainEnabled = {}\n{DRAIN}{custom}", self.partial)
    }

    /// Returns the text of the remediation configuration.
    fn remediation(&self) -> String {
        let reset = if self.partial { RESET_GPU } else { RESET_NODE };
        let validation = self.validation.table();
        let mut actions = REMEDIATION.to_owned();
        if self.approvals {
            let name = format!("[remediationActions.{ASKS}]\n");
            actions = actions.replacen(&name, &format!("{name}approve = true\n"), 1);
        }
        format!("{reset}{actions}{validation}")
    }

    /// Returns the text of the policy: the built-in one, with routes and device taints.
    fn policy(&self) -> String {
        let mut text = DEFAULT_POLICY.to_owned();
        if self.device_taints {
            const NAME: &str = "name = \"default\"\n";
            text = text.replacen(NAME, &format!("{NAME}taint-devices = 1\n"), 1);
            text += "\n[device-taints]\n";
        }
        for (check, route) in CHECKS.iter().zip(self.routes) {
            let Some(route) = route else {
                continue;
            };
            let approve = if self.asks(check) {
                "approve = true\n"
            } else {
                ""
            };
            let stages = format!("{approve}{}", route.stages());
            text += &format!(
                "\n[[routes]]\nname = \"{check}\"\n{stages}\n[[routes.match.all]]\n\
                 kind = \"HealthEvent\"\nexpression = \"event.checkName == '{check}'\"\n"
            );
        }
        text
    }
}

/// Formats the features as a line of a violation's story.
impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut features = Vec::new();
        if self.partial {
            features.push("drains of single GPUs".to_owned());
        }
        if self.device_taints {
            features.push("device taints".to_owned());
        }
        if self.custom_drain {
            features.push("another operator that drains n0".to_owned());
        }
        if self.gangs {
            features.push("gangs and checkpoints".to_owned());
        }
        if self.approvals {
            features.push("approvals of routes and reboots".to_owned());
        }
        if self.maintenance {
            features.push("a cloud that announces maintenance".to_owned());
        }
        match self.validation {
            Proof::Nothing => {}
            Proof::Quiet => features.push("validation by quiet time".to_owned()),
            Proof::FailingJob => features.push("validation by a Job, which fails".to_owned()),
            Proof::Job => features.push("validation by a Job".to_owned()),
        }
        for (check, route) in CHECKS.iter().zip(self.routes) {
            let route = route.map(Route::stages);
            features.extend(route.map(|stages| format!("a route for {check} ({stages})")));
        }
        match features.as_slice() {
            [] => f.write_str("the cluster has no optional feature"),
            features => write!(f, "the cluster has {}", features.join(", ")),
        }
    }
}

// === impl Route ===

impl Route {
    fn any(dice: &mut Dice) -> Option<Self> {
        let routes = [
            None,
            Some(Self::Stays),
            Some(Self::Unrepaired),
            Some(Self::Forceful),
        ];
        routes.get(dice.below(routes.len())).copied().flatten()
    }

    /// Returns true if faults of this route are remediated.
    pub(super) fn remediates(route: Option<Self>) -> bool {
        matches!(route, None | Some(Self::Forceful))
    }

    /// Returns the keys of the route in the policy.
    fn stages(self) -> &'static str {
        match self {
            Self::Stays => "drain = false",
            Self::Unrepaired => "remediate = false",
            Self::Forceful => "drain = \"forceful\"",
        }
    }
}

// === impl Proof ===

impl Proof {
    fn any(dice: &mut Dice) -> Self {
        match dice.below(4) {
            0 => Self::Nothing,
            1 => Self::Quiet,
            2 => Self::FailingJob,
            _ => Self::Job,
        }
    }

    /// Returns the proof, unless none is asked for.
    pub(super) fn some(self) -> Option<Self> {
        (self != Self::Nothing).then_some(self)
    }

    /// Returns the table of the remediation configuration.
    fn table(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Quiet => "\n[validation]\nquietMinutes = 1\n",
            Self::Job | Self::FailingJob => {
                "\n[validation]\naction = \"VALIDATE\"\nquietMinutes = 1\n"
            }
        }
    }
}
