//! The parts that `run` and `controller` share: quarantine, retention, the connector's socket and
//! the page, over one store.

use std::sync::Arc;

use analysis::ledger::Ledger;
use anyhow::Context as _;
use cli::{ActSettings, AnalysisRules, ProcessSettings, ReportSettings};
use cluster::{Cluster, UnhealthyGpu};
use console::api::{Role, UnhealthyGpuView};
use console::{Console, ControllerPart, LeadershipSource, UnhealthyGpuSource};
use controller::analysis::{Analysis, AnalysisConfig, RulesFollower, RulesTextReceiver};
use controller::api_requests;
use controller::conditions::{self, Board, Reporter};
use controller::ledger::LedgerKeeper;
use controller::maintenance::{MachineNotices, MaintenanceMonitor, MaintenanceRequests};
use controller::quarantine::{Owns, Quarantine, QuarantineConfig};
use controller::retention::Retention;
use devices::DeviceApi;
use fleet::view::FleetView;
use janitor::{Janitor, JanitorParts, Providers, Validator, ValidatorParts};
use maintenance::validation_request::ValidationConfiguration;
use model::condition::{MessageLimits, Options};
use model::mode::Mode;
use model::position::Position;
use notices::Record;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::EventStore;
use tokio::sync::watch;

use crate::parts::{self, CLOCK, Front, Intake, Policy};
use crate::tasks::Tasks;

/// Parts of `run` and `controller` that act on the events of a store.
pub(crate) struct Acting<'a> {
    pub(crate) settings: &'a ActSettings,
    pub(crate) process: &'a ProcessSettings,
    pub(crate) policy: Policy,
    pub(crate) cluster: Option<Arc<Cluster>>,
    pub(crate) owns: Owns,
    /// State of the election; `None` without `--leader-elect`.
    pub(crate) leadership: Option<LeadershipSource>,
    /// Name of the node or, in `controller`, of the host.
    pub(crate) name: &'a str,
    pub(crate) store: Arc<dyn EventStore>,
    pub(crate) metrics: Metrics,
    pub(crate) sources: Sources,
    pub(crate) intake: Intake,
    /// Notices of the metadata services, which agents or this process bring.
    pub(crate) machines: MachineNotices,
    /// Device API of this machine; `None` if this process does not watch its GPUs.
    pub(crate) devices: Option<DeviceApi>,
}

// === impl Acting ===

impl Acting<'_> {
    /// Starts all tasks. Returns the current state of the nodes.
    pub(crate) fn start(
        self,
        front: Front,
        tasks: &mut Tasks,
    ) -> anyhow::Result<watch::Receiver<Arc<FleetView>>> {
        let mode = self.settings.mode;
        let role = match self.owns {
            Owns::Node(_) => Role::Run,
            Owns::All => Role::Controller,
        };
        let socket = &front.endpoint.socket;
        let view = parts::process_view(self.name, role, mode, self.process, socket);
        if let Some(cluster) = &self.cluster {
            api_requests::register(cluster, &self.metrics);
        }
        let reporting = reports(
            self.settings.reports,
            self.intake.limits,
            self.cluster.as_ref(),
            &self.metrics,
        );
        let (board, reporter) = reporting.unzip();
        let unhealthy_gpus = unhealthy_gpus(self.cluster.clone());
        self.start_janitor(tasks)?;
        let (rules, analysed) = self.start_analysis(tasks)?.unzip();
        let config = QuarantineConfig {
            store: Arc::clone(&self.store),
            cluster: self.cluster.clone(),
            policy: self.policy.current.clone(),
            rules: rules.clone(),
            mode,
            owns: self.owns.clone(),
            sources: self.sources.clone(),
            brake: self.settings.circuit_breaker,
            drain: self.settings.drain.clone().map(Arc::new),
            analysed: analysed.filter(|_| self.settings.remediation.is_some()),
            remediation: self.settings.remediation.clone().map(Arc::new),
            gpu_label: self.settings.gpu_node_label.clone(),
            namespace: self.settings.namespace.clone(),
            board,
            events: self.settings.reports.events.is_some(),
            retention: self.settings.retention,
            clock: CLOCK,
        };
        let (quarantine, handles) = Quarantine::new(config, &self.metrics);
        let retention = Retention {
            store: Arc::clone(&self.store),
            fleet: handles.view.clone(),
            age: self.settings.retention,
            max_bytes: self.settings.store_size,
            clock: CLOCK,
        };
        let fleet = handles.view.clone();
        let maintenances = self.start_maintenance(fleet.clone(), tasks)?;
        let ledger = self.start_ledger(tasks);
        let mut damage = self.store.damage();
        let metrics = self.metrics.clone();
        let questions = handles.questions;
        let console = Console {
            process: view,
            sources: self.sources,
            places: front.places.troubles(),
            leadership: self.leadership,
            controller: Some(ControllerPart {
                fleet: handles.view,
                policy: self.policy.view,
                why_not: Arc::new(move |node| {
                    let questions = questions.clone();
                    Box::pin(async move { questions.why_not(node).await })
                }),
                unhealthy_gpus,
                rules,
                ledger,
                maintenances,
                store: self.store,
                forwarding: self.intake.forwarding,
            }),
            agent: None,
            devices: self.devices,
            metrics: self.metrics,
            clock: CLOCK,
        };
        let (page, serving) = front.serve(self.intake.connector, tasks.no_more());
        tasks.input("the sockets", serving);
        let done = tasks.done();
        let page = console::serve(page, console, done.clone());
        tasks.worker("the page", async move { drop(page.await) });
        tasks.writer("the quarantine", quarantine.run(done.clone()));
        tasks.worker("the journal", handles.journal.run());
        tasks.worker("the statuses of events", handles.statuses.run());
        if let Some(reporter) = reporter {
            tasks.writer("the reporter of conditions", reporter.run(done.clone()));
        }
        // A damaged store ends the process: its next start creates a new one.
        let until = done.clone();
        tasks.worker("the event store", async move {
            let met = async { drop(damage.wait_for(Option::is_some).await) };
            until.run_until_cancelled(met).await;
        });
        let kept = async move { retention.run(&metrics, done).await };
        tasks.worker("retention", kept);
        Ok(fleet)
    }

    /// Starts the analysis, unless it is switched off. Returns receivers of the text of its rules, and
    /// of the position up to which it has read the events.
    fn start_analysis(
        &self,
        tasks: &mut Tasks,
    ) -> anyhow::Result<Option<(RulesTextReceiver, watch::Receiver<Position>)>> {
        let place = match &self.settings.rules {
            AnalysisRules::Off => return Ok(None),
            AnalysisRules::BuiltIn => None,
            AnalysisRules::Place(place) => Some(place.clone()),
        };
        let follower = RulesFollower::load(place, self.settings.retention, &self.metrics)?;
        let (analysed, receiver) = watch::channel(Position::START);
        let config = AnalysisConfig {
            store: Arc::clone(&self.store),
            connector: self.intake.connector.clone(),
            rules: follower.rules(),
            nodes: self.cluster.as_deref().map(Cluster::known_nodes),
            clock: CLOCK,
            analysed,
        };
        let text = follower.text();
        let following = follower.run(self.cluster.clone(), tasks.done());
        tasks.worker("the rules of the analysis", following);
        let analysis = Analysis::new(config, &self.metrics);
        tasks.worker("the analysis", analysis.run(tasks.done()));
        Ok(Some((text, receiver)))
    }

    /// Starts the ledger of GPUs, and with `controller` the keeper of its marks in the cluster.
    fn start_ledger(&self, tasks: &mut Tasks) -> watch::Receiver<Ledger> {
        let (connector, mode) = (self.intake.connector.clone(), self.settings.mode);
        let mut keeper =
            LedgerKeeper::new(Arc::clone(&self.store), connector, CLOCK, &self.metrics);
        let keeps_marks = self.owns == Owns::All && mode != Mode::Observe;
        if let Some(cluster) = self.cluster.clone().filter(|_| keeps_marks) {
            let namespace = self.settings.namespace.clone();
            let marks = keeper.keep_marks(cluster, namespace, mode.writes());
            tasks.writer("the marks of GPUs", marks.run(tasks.done()));
        }
        let ledger = keeper.ledger();
        tasks.worker("the ledger of GPUs", keeper.run(tasks.done()));
        ledger
    }

    /// Starts the monitor of announced maintenance, if `--maintenance` is given. Returns a receiver of all
    /// maintenances.
    fn start_maintenance(
        &self,
        fleet: watch::Receiver<Arc<FleetView>>,
        tasks: &mut Tasks,
    ) -> anyhow::Result<Option<watch::Receiver<Arc<[Record]>>>> {
        let (Some(config), Some(cluster)) = (&self.settings.maintenance, &self.cluster) else {
            controller::maintenance::show_none(&self.metrics);
            return Ok(None);
        };
        let writes = self.settings.mode.writes();
        let connector = self.intake.connector.clone();
        if config.requests && writes {
            let connector = connector.clone();
            let requests =
                MaintenanceRequests::new(Arc::clone(cluster), connector, &self.sources, CLOCK);
            tasks.writer("the requests of maintenance", requests.run(tasks.done()));
        }
        let (sources, metrics) = (&self.sources, &self.metrics);
        let frame = parts::central_frame(self.name, self.process, connector, sources, metrics);
        let (config, cluster) = ((**config).clone(), Arc::clone(cluster));
        let machines = self.machines.clone();
        let monitor = MaintenanceMonitor::new(config, cluster, writes, machines, fleet, frame)?;
        let records = monitor.records();
        tasks.monitor("the monitor of maintenance", |end| monitor.run(end));
        Ok(Some(records))
    }

    /// Starts the janitor, if `--janitor-config` is given.
    fn start_janitor(&self, tasks: &mut Tasks) -> anyhow::Result<()> {
        let (Some(settings), Some(cluster)) = (&self.settings.janitor, &self.cluster) else {
            return Ok(());
        };
        let namespace = &self.settings.namespace;
        let providers = Providers::open(&settings.config, cluster, namespace)
            .context("a provider of --janitor-config")?;
        let own_node = match &self.owns {
            Owns::Node(name) => Some(name.clone()),
            Owns::All => None,
        };
        // Unique to this process, also across restarts after a kill.
        let process = format!(
            "{}-{}-{}",
            self.name,
            std::process::id(),
            CLOCK().as_nanosecond()
        );
        let mut config = settings.config.clone();
        if let Some(resets) = &mut config.resets {
            resets.namespace.clone_from(namespace);
        }
        let board = maintenance::janitor::Board::new(config, settings.ttl, process);
        let parts = JanitorParts {
            cluster: Arc::clone(cluster),
            board: board.for_node(own_node),
            providers,
            clock: CLOCK,
        };
        let janitor = Janitor::new(parts, &self.metrics);
        tasks.writer("the janitor", janitor.run(tasks.done()));
        if let Some(config) = settings.validation.clone() {
            self.start_validator(config, cluster, tasks)?;
        }
        Ok(())
    }

    /// Starts the validator of `ValidationRequest`s.
    fn start_validator(
        &self,
        config: ValidationConfiguration,
        cluster: &Arc<Cluster>,
        tasks: &mut Tasks,
    ) -> anyhow::Result<()> {
        if let Owns::Node(_) = &self.owns {
            anyhow::bail!(
                "--validation-config is for `gpuwarden controller`: a request may name any node"
            );
        }
        if config.has_new_node_rules {
            tracing::warn!(
                "newNodeValidation of --validation-config is ignored: new nodes are admitted by \
                 [validation] of --remediate-config"
            );
        }
        let parts = ValidatorParts {
            cluster: Arc::clone(cluster),
            config,
            namespace: self.settings.namespace.clone(),
            clock: CLOCK,
        };
        let validator = Validator::new(parts, &self.metrics);
        tasks.writer("the validation of nodes", validator.run(tasks.done()));
        Ok(())
    }
}

/// Creates the reporter of node conditions and Events, if either is enabled.
fn reports(
    settings: ReportSettings,
    limits: MessageLimits,
    cluster: Option<&Arc<Cluster>>,
    metrics: &Metrics,
) -> Option<(Board, Reporter)> {
    let summary = settings.summary;
    let config = conditions::ConditionsConfig {
        cluster: Arc::clone(cluster?),
        conditions: settings.conditions.then_some(Options { limits, summary }),
        events: settings.events,
        clock: CLOCK,
    };
    let asked_for = config.conditions.is_some() || config.events.is_some();
    asked_for.then(|| conditions::new(config, metrics))
}

/// Returns a source of the GPUs that the kubelet of a node reports as unhealthy in its pods.
fn unhealthy_gpus(cluster: Option<Arc<Cluster>>) -> UnhealthyGpuSource {
    let view = |gpu: UnhealthyGpu| UnhealthyGpuView {
        pod: gpu.pod,
        resource: gpu.resource,
        device: gpu.device,
    };
    Arc::new(move |node| {
        let cluster = cluster.clone();
        Box::pin(async move {
            let Some(cluster) = cluster else {
                return Vec::new();
            };
            match cluster.unhealthy_gpus_of_node(&node).await {
                Ok(gpus) => gpus.into_iter().map(view).collect(),
                Err(error) => {
                    tracing::debug!(node, err = %chain(&error), "pods cannot be read");
                    Vec::new()
                }
            }
        })
    })
}
