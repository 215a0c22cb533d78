//! The command line as clap reads it. `settings` checks the arguments of the roles and fills in defaults.

mod act;
mod audit;
mod bench;
mod catalog;
mod collect;
mod common;
mod devices;
mod doctor;
mod environment;
mod gpu_reset;
mod inject;
mod janitor;
mod labels;
mod ledger;
mod network;
mod node;
mod nodes;
mod objects;
mod policy;
mod roles;
mod rules;
mod views;
mod webhook;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

pub(crate) use act::ActArgs;
pub(crate) use audit::AuditArgs;
pub(crate) use bench::{BenchArgs, BenchLog, Benchmark};
pub(crate) use catalog::{CatalogArgs, CatalogCommand, CatalogDiffArgs, CatalogKind};
pub(crate) use collect::{CollectArgs, InRootArgs};
pub use common::OutputArgs;
pub(crate) use common::{
    ClusterArgs, ConnectArgs, Format, LogArgs, REMOTE, RemoteArgs, ServerArgs,
};
pub(crate) use devices::{CheckArgs, CheckCommand, DeviceApiArgs, DevicesArgs};
pub(crate) use doctor::{DoctorArgs, DoctorRole};
pub(crate) use environment::{is_empty, without_empty};
pub(crate) use gpu_reset::GpuResetArgs;
pub(crate) use inject::{Inject, InjectArgs, TargetArgs, Via};
pub(crate) use janitor::JanitorProviderArgs;
pub(crate) use labels::LabelArgs;
pub(crate) use ledger::{
    EvidenceArgs, EvidenceFormat, LedgerArgs, LedgerCommand, MarkArg, MarkArgs, ReportArgs,
    ReportCommand,
};
pub(crate) use network::{DeliveryArgs, IngestArgs};
pub(crate) use node::{DeviceArgs, GpuArgs, NodeArgs};
pub(crate) use nodes::{
    ApproveArgs, DrainArgs, KubeArgs, NodesFate, PauseArgs, ReleaseArgs, UninstallArgs, VetoArgs,
};
pub(crate) use objects::{ObjectsArgs, ObjectsCommand};
pub(crate) use policy::{PolicyArgs, PolicyCommand};
pub(crate) use roles::{AgentArgs, ControllerArgs, ElectionArgs, ObjectArgs, ProcessArgs, RunArgs};
pub(crate) use rules::{RulesArgs, RulesCommand};
pub(crate) use views::{
    DecodeArgs, EventsArgs, ExplainArgs, IncidentsArgs, MaintenanceArgs, ReplayArgs, SimulateArgs,
    StoreArgs, StoreCommand, ViewArgs,
};
pub(crate) use webhook::{FailurePolicyArg, WebhookArgs};

/// Keeps GPU clusters healthy.
#[derive(Parser, Debug)]
#[command(
    name = "gpuwarden",
    version,
    about = "Detects GPU faults, takes bad nodes out of service, and returns them when they are healthy",
    after_help = "Try it:\n  gpuwarden run                 # watches this machine's kernel log\n  \
                  gpuwarden inject xid 79       # in another terminal\n  gpuwarden status\n  gpuwarden explain",
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Watch this machine; with a cluster also take nodes out of service and return them.
    #[command(
        after_help = "Examples:\n  gpuwarden run\n  gpuwarden run --kubeconfig ~/.kube/config \
                            --node-name gpu-7 --quarantine --dry-run\n  journalctl -kf | gpuwarden run --kernel-log -"
    )]
    Run(Box<RunArgs>),
    /// Watch this node and deliver its events to a controller; needs no access to the cluster.
    #[command(
        after_help = "Examples:\n  gpuwarden agent --controller https://gpuwarden.example:50051 \
                            --tls-ca ca.crt --tls-cert node.crt --tls-key node.key\n  gpuwarden \
                            agent --controller https://gpuwarden-controller.gpuwarden.svc:50051 \
                            --tls-ca /tls/ca.crt --token-file /var/run/secrets/gpuwarden/token"
    )]
    Agent(Box<AgentArgs>),
    /// Receive the events of agents, take bad nodes out of service, and return them.
    #[command(
        after_help = "Examples:\n  gpuwarden controller --kubeconfig ~/.kube/config --grpc-tls-cert \
                            tls.crt --grpc-tls-key tls.key --grpc-client-ca ca.crt --quarantine"
    )]
    Controller(Box<ControllerArgs>),
    /// Add preflight checks to pods with GPUs when they are created, and give the pods of a gang each
    /// other's addresses: an admission webhook of the cluster.
    #[command(
        after_help = "Examples:\n  gpuwarden webhook --config preflight.yaml\n  gpuwarden webhook \
                            --config preflight.yaml --kubeconfig ~/.kube/config --listen 127.0.0.1:8443 \
                            --register-url https://127.0.0.1:8443"
    )]
    Webhook(Box<WebhookArgs>),
    /// Reboot nodes for a janitor, gpuwarden's or `NVSentinel`'s, by gRPC.
    #[command(
        after_help = "Examples:\n  gpuwarden janitor-provider --listen 0.0.0.0:50051 --tls-cert tls.crt \
                            --tls-key tls.key --callers gpuwarden/gpuwarden-controller"
    )]
    JanitorProvider(Box<JanitorProviderArgs>),
    /// Find faults in kernel log text: one line per fault; exit 1 when a fatal one was found.
    #[command(
        after_help = "Examples:\n  dmesg | gpuwarden decode\n  gpuwarden decode /var/log/kern.log -o json"
    )]
    Decode(DecodeArgs),
    /// Show the meaning of a fault code, what gpuwarden does about it, and the source.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:\n  gpuwarden catalog\n  gpuwarden catalog xid 79\n  \
                      gpuwarden catalog nvlink5 149\n  gpuwarden catalog dcgm \
                      DCGM_FR_PENDING_ROW_REMAP\n  gpuwarden catalog diff site.toml"
    )]
    Catalog(CatalogArgs),
    /// Inject a fault, or its recovery, for a test.
    #[command(
        after_help = "Examples:\n  gpuwarden inject xid 79\n  gpuwarden inject xid 48 --pci 0000:3b:00 \
                            --via kmsg\n  gpuwarden inject recovery"
    )]
    Inject(InjectArgs),
    /// Show the state of the nodes; exit 1 when one is unhealthy.
    #[command(after_help = "Examples:\n  gpuwarden status\n  gpuwarden status -o json")]
    Status(ViewArgs),
    /// Show the GPUs of this machine and their state; exit 1 when one is unhealthy.
    #[command(after_help = "Examples:\n  gpuwarden devices\n  gpuwarden devices -w -o json")]
    Devices(DevicesArgs),
    /// Check something for a script, which reads the exit code.
    #[command(
        after_help = "Examples:\n  gpuwarden check node\n  gpuwarden check node --strict\n  \
                            NODE_NAME=gpu-7 gpuwarden check nccl-loopback"
    )]
    Check(CheckArgs),
    /// Collect data about this node before a repair: its history, the kernel log, the output of
    /// nvidia-smi, and NVIDIA's bug report. Exit 1 if nothing could be collected, or uploaded.
    #[command(
        after_help = "Examples:\n  gpuwarden collect --directory /var/tmp\n  gpuwarden collect --node-name gpu-7 \
                            --host-root /host --upload http://files.example/upload --full"
    )]
    Collect(CollectArgs),
    /// Show events, by default the newest 100.
    #[command(
        after_help = "Examples:\n  gpuwarden events --limit 20\n  gpuwarden events -f -o json"
    )]
    Events(EventsArgs),
    /// Show the story of a node: every log line, event, decision and API call, and what is awaited.
    #[command(after_help = "Examples:\n  gpuwarden explain\n  gpuwarden explain gpu-7 -o json")]
    Explain(ExplainArgs),
    /// Explain why a node is, or is not, quarantined: all conditions of the decision, in order.
    #[command(
        after_help = "Examples:\n  gpuwarden why-not gpu-7\n  gpuwarden why-not gpu-7 -o json"
    )]
    WhyNot(ExplainArgs),
    /// Show which open faults belong together, and which of them is the cause.
    #[command(
        after_help = "Examples:\n  gpuwarden incidents\n  gpuwarden incidents 34066fadb3a7\n  gpuwarden \
                            incidents -o json"
    )]
    Incidents(IncidentsArgs),
    /// Show the history of GPUs: places, faults, repairs, and which are known to be bad.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:\n  gpuwarden ledger\n  gpuwarden ledger 1654921000123\n  gpuwarden \
                            ledger gpu-7 -o json\n  gpuwarden ledger mark 1654921000123 bad --reason 'XID 79 \
                            after two resets'"
    )]
    Ledger(LedgerArgs),
    /// Show the announced maintenances of nodes, and what became of them.
    #[command(
        after_help = "Examples:\n  gpuwarden maintenance\n  gpuwarden maintenance gcp-gpu-7-1\n  gpuwarden \
                            maintenance -o json"
    )]
    Maintenance(MaintenanceArgs),
    /// Write a report for others.
    #[command(after_help = "Examples:\n  gpuwarden report evidence gpu-7 > gpu-7.html")]
    Report(ReportArgs),
    /// Pause new quarantines in a cluster for a time; nodes that are out of service still return.
    #[command(
        after_help = "Examples:\n  gpuwarden pause --for 2h --reason 'driver roll-out'\n  gpuwarden resume"
    )]
    Pause(PauseArgs),
    /// End a pause of new quarantines.
    #[command(after_help = "Examples:\n  gpuwarden resume")]
    Resume(KubeArgs),
    /// Inspect the file of the event store.
    #[command(
        after_help = "Examples:\n  gpuwarden store inspect\n  gpuwarden store inspect --data-dir \
                            /var/lib/gpuwarden -o json"
    )]
    Store(StoreArgs),
    /// Show what the drain of a node would do: the pods that leave, wait or stay, how and why, and
    /// the GPU-hours at stake. Changes nothing. Needs permission to get the node and to list pods.
    #[command(
        after_help = "Examples:\n  gpuwarden drain --plan gpu-7\n  gpuwarden drain --plan gpu-7 \
                            --drain-config drain.toml -o json"
    )]
    Drain(DrainArgs),
    /// Return a quarantined node by hand, whatever its faults; they are dismissed until they are
    /// reported again. Needs permission to get and patch the node.
    #[command(
        after_help = "Examples:\n  gpuwarden release gpu-7 --reason \"GPU 3 was swapped\"\n  \
                            gpuwarden release gpu-7 --reason test --no-wait"
    )]
    Release(ReleaseArgs),
    /// Hold back the next drain or remediation of a node for a time, without ending its session.
    /// Needs permission to get and patch the node.
    #[command(
        after_help = "Examples:\n  gpuwarden veto gpu-7 --for 4h --reason 'looking at the link'\n  \
                            gpuwarden veto gpu-7 --end"
    )]
    Veto(VetoArgs),
    /// Approve the drain or the remediation that waits for a person, because a route of the policy or
    /// an action of the remediation configuration says `approve = true`. Needs permission to get and
    /// patch the node. Of an incident all that waits on its nodes is approved; exit 2 if something
    /// could not be.
    #[command(
        after_help = "Examples:\n  gpuwarden approve gpu-7\n  gpuwarden approve gpu-7 --for 8h\n  gpuwarden \
                            approve 34066fadb3a7"
    )]
    Approve(ApproveArgs),
    /// Take everything that gpuwarden has written off a cluster, once it no longer runs there: marks
    /// on nodes and pods, and its own objects. Exit 1 if something could not be done. Files of a
    /// machine belong to its package, whose purge removes them.
    #[command(
        after_help = "Examples:\n  gpuwarden uninstall --plan\n  helm uninstall gpuwarden -n gpuwarden && \
                            gpuwarden uninstall --nodes return"
    )]
    Uninstall(UninstallArgs),
    /// Show what a policy would have done on past events, or how two policies differ; exit 1 when a
    /// node would have been taken out, or the policies differ.
    #[command(
        after_help = "Examples:\n  gpuwarden replay /logs/*.log\n  gpuwarden events --all -o json | \
                            gpuwarden replay - --policy policy.toml\n  gpuwarden replay node-7=kern.log \
                            --policy preset:nvsentinel --policy preset:gke"
    )]
    Replay(ReplayArgs),
    /// Search for a sequence of events that breaks an invariant: runs the production decisions on a
    /// simulated cluster, with random faults, lost requests, crashes and operators; exit 1 when one
    /// is found.
    #[command(
        after_help = "Examples:\n  gpuwarden simulate\n  gpuwarden simulate --steps 10000000\n  \
                            gpuwarden simulate --steps 250 --seed 7 -o json"
    )]
    Simulate(SimulateArgs),
    /// Check, test, compare and show policies.
    #[command(
        after_help = "Examples:\n  gpuwarden policy lint policy.toml\n  gpuwarden policy test policy.toml\n  \
                            gpuwarden policy diff preset:nvsentinel policy.toml\n  \
                            gpuwarden policy presets gke > policy.toml"
    )]
    Policy(PolicyArgs),
    /// Check, test, explain, compare and show the rules of the analysis.
    #[command(
        after_help = "Examples:\n  gpuwarden rules show\n  gpuwarden rules lint rules.toml\n  \
                            gpuwarden rules test rules.toml\n  gpuwarden rules explain \
                            RepeatedXIDErrorOnSameGPU gpu-7\n  gpuwarden rules diff built-in rules.toml"
    )]
    Rules(RulesArgs),
    /// Check and test policies over Kubernetes objects.
    #[command(after_help = "Examples:\n  gpuwarden objects lint policies.toml\n  \
                            gpuwarden objects test policies.toml")]
    Objects(ObjectsArgs),
    /// Find what is wrong with this installation, and how to fix it; exit 1 when something is. Takes
    /// the flags of `run`, checks what `run` would use and the gpuwarden that runs, and changes
    /// nothing.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:\n  gpuwarden doctor\n  gpuwarden doctor --config /etc/gpuwarden/gpuwarden.toml\n  \
                            gpuwarden doctor --kubeconfig ~/.kube/config --quarantine -o json\n  gpuwarden \
                            doctor agent --config /etc/gpuwarden/agent.toml"
    )]
    Doctor(Box<DoctorArgs>),
    /// Print completions for a shell.
    #[command(after_help = "Examples:\n  source <(gpuwarden completions bash)\n  \
                            gpuwarden completions bash > ~/.local/share/bash-completion/completions/gpuwarden\n  \
                            gpuwarden completions zsh > ~/.zfunc/_gpuwarden\n  \
                            gpuwarden completions fish > ~/.config/fish/completions/gpuwarden.fish")]
    Completions {
        /// Shell to print completions for.
        #[arg(value_enum, value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Reset GPUs of this machine, unless a process uses them, and check that they are healthy
    /// afterwards. The Job of a `GPUReset` runs this; exit 1 when a GPU is not reset or not healthy.
    #[command(
        after_help = "Examples:\n  gpuwarden gpu-reset --gpu GPU-d2e7c0ff-0000-4000-8000-000000000001\n  \
                            gpuwarden gpu-reset --gpu 0000:3b:00.0 --write-log false"
    )]
    GpuReset(GpuResetArgs),
    /// Query the GPU driver, as the child process of a gpuwarden that watches the GPUs.
    #[command(hide = true)]
    GpuProbe {
        /// Settings of the probe, as JSON.
        settings: String,
    },
    /// Call the GPU libraries, as the child process of a check.
    #[command(hide = true)]
    CheckWorker,
    /// Run a program below another root, as the child process of a collection.
    #[command(hide = true)]
    InRoot(InRootArgs),
    /// Print the reference of all commands and flags as Markdown, or that of the metrics as
    /// JSON.
    #[command(hide = true)]
    Reference {
        /// Print the descriptions of all metrics as JSON.
        #[arg(long)]
        metrics: bool,
    },
    /// Write a manual page for each command, for packages.
    #[command(hide = true)]
    ManPages {
        /// Existing directory for the pages.
        directory: PathBuf,
    },
    /// Measure on this machine the time to a cordon and the cost of an idle process, each figure
    /// beside a baseline of the same run.
    #[command(after_help = "Examples:\n  gpuwarden bench idle -o json\n  \
                            gpuwarden bench --kubeconfig test-cluster.yaml")]
    Bench(BenchArgs),
}

#[cfg(test)]
mod tests;
