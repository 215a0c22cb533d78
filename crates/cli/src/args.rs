//! The arguments, as text; `settings` puts them together and checks them.

mod bench;
mod catalog;
mod collect;
mod devices;
mod doctor;
mod environment;
mod gpu_reset;
mod inject;
mod janitor;
mod policy;
mod roles;
mod webhook;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use bench::{BenchArgs, BenchLog, Benchmark};
pub(crate) use catalog::{CatalogArgs, CatalogCommand, CatalogDiffArgs, CatalogKind};
pub(crate) use collect::{CollectArgs, InRootArgs};
pub(crate) use devices::{Check, CheckArgs, DeviceApiArgs, DevicesArgs};
pub(crate) use doctor::{DoctorArgs, DoctorRole};
pub(crate) use environment::{is_empty, without_empty};
pub(crate) use gpu_reset::GpuResetArgs;
pub(crate) use inject::{Inject, InjectArgs, TargetArgs, Via};
pub(crate) use janitor::JanitorProviderArgs;
pub(crate) use policy::{PolicyArgs, PolicyCommand};
pub(crate) use roles::{
    ActArgs, AgentArgs, ControllerArgs, DeliveryArgs, DeviceArgs, ElectionArgs, GpuArgs,
    IngestArgs, NodeArgs, ProcessArgs, RunArgs,
};
pub(crate) use webhook::{FailurePolicyArg, WebhookArgs};

/// Keeps GPU clusters healthy.
#[derive(Parser, Debug)]
#[command(
    name = "gpuwarden",
    version,
    about = "Detects GPU faults, takes bad nodes out of service, and gives them back when they are well",
    after_help = "Try it:\n  gpuwarden run                 # watches this machine's kernel log\n  \
                  gpuwarden inject xid 79       # in another terminal\n  gpuwarden status\n  gpuwarden explain",
    disable_help_subcommand = true
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Watch this machine; with a cluster also take nodes out of service and give them back.
    #[command(
        after_help = "Examples:\n  gpuwarden run\n  gpuwarden run --kubeconfig ~/.kube/config \
                            --node-name gpu-7 --quarantine --dry-run\n  journalctl -kf | gpuwarden run --kernel-log -"
    )]
    Run(Box<RunArgs>),
    /// Watch this node and bring its events to a controller; needs no access to the cluster.
    #[command(
        after_help = "Examples:\n  gpuwarden agent --controller https://gpuwarden.example:50051 \
                            --tls-ca ca.crt --tls-cert node.crt --tls-key node.key\n  gpuwarden \
                            agent --controller https://gpuwarden-controller.gpuwarden.svc:50051 \
                            --tls-ca /tls/ca.crt --token-file /var/run/secrets/gpuwarden/token"
    )]
    Agent(Box<AgentArgs>),
    /// Take the events of agents, take bad nodes out of service, and give them back.
    #[command(
        after_help = "Examples:\n  gpuwarden controller --kubeconfig ~/.kube/config --grpc-tls-cert \
                            tls.crt --grpc-tls-key tls.key --grpc-client-ca ca.crt --quarantine"
    )]
    Controller(Box<ControllerArgs>),
    /// Put preflight checks into pods with GPUs as they are created, and tell the pods of a gang of
    /// each other: a cluster's admission webhook.
    #[command(
        after_help = "Examples:\n  gpuwarden webhook --config preflight.yaml\n  gpuwarden webhook \
                            --config preflight.yaml --kubeconfig ~/.kube/config --listen 127.0.0.1:8443 \
                            --register-url https://127.0.0.1:8443"
    )]
    Webhook(Box<WebhookArgs>),
    /// Reboot nodes for a janitor, gpuwarden's or `NVSentinel`'s, which asks over gRPC.
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
    /// Say what a fault code means, what gpuwarden does about it, and where that comes from.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:\n  gpuwarden catalog\n  gpuwarden catalog xid 79\n  \
                      gpuwarden catalog nvlink5 149\n  gpuwarden catalog dcgm \
                      DCGM_FR_PENDING_ROW_REMAP\n  gpuwarden catalog diff site.toml"
    )]
    Catalog(CatalogArgs),
    /// Make a fault, or its recovery, to see what happens.
    #[command(
        after_help = "Examples:\n  gpuwarden inject xid 79\n  gpuwarden inject xid 48 --pci 0000:3b:00 \
                            --via kmsg\n  gpuwarden inject recovery"
    )]
    Inject(InjectArgs),
    /// Show the state of the nodes; exit 1 when one is unhealthy.
    #[command(after_help = "Examples:\n  gpuwarden status\n  gpuwarden status -o json")]
    Status(ViewArgs),
    /// Show the GPUs of this machine and how they do; exit 1 when one is not well.
    #[command(after_help = "Examples:\n  gpuwarden devices\n  gpuwarden devices -w -o json")]
    Devices(DevicesArgs),
    /// Check something, and say by the exit code how it is.
    #[command(
        after_help = "Examples:\n  gpuwarden check node\n  gpuwarden check node --strict\n  \
                            NODE_NAME=gpu-7 gpuwarden check nccl-loopback"
    )]
    Check(CheckArgs),
    /// Collect what is to be known of this node before a repair: its history, the kernel log, what
    /// nvidia-smi says, and NVIDIA's bug report. Exit 1 where nothing could be collected, or uploaded.
    #[command(
        after_help = "Examples:\n  gpuwarden collect --directory /var/tmp\n  gpuwarden collect --node-name gpu-7 \
                            --host-root /host --upload http://files.example/upload --full"
    )]
    Collect(CollectArgs),
    /// Show events, the newest 100 unless told otherwise.
    #[command(
        after_help = "Examples:\n  gpuwarden events --limit 20\n  gpuwarden events -f -o json"
    )]
    Events(EventsArgs),
    /// Tell the story of a node: every line, event, decision and API call, and what is awaited.
    #[command(after_help = "Examples:\n  gpuwarden explain\n  gpuwarden explain gpu-7 -o json")]
    Explain(ExplainArgs),
    /// Say why a node is, or is not, quarantined: all that decides about it, in order.
    #[command(
        after_help = "Examples:\n  gpuwarden why-not gpu-7\n  gpuwarden why-not gpu-7 -o json"
    )]
    WhyNot(ExplainArgs),
    /// Stop new quarantines of a cluster for a while; what is out of service is given back
    /// all the same.
    #[command(
        after_help = "Examples:\n  gpuwarden pause --for 2h --reason 'driver roll-out'\n  gpuwarden resume"
    )]
    Pause(PauseArgs),
    /// End a pause.
    #[command(after_help = "Examples:\n  gpuwarden resume")]
    Resume(KubeArgs),
    /// Look into the event store's file.
    #[command(
        after_help = "Examples:\n  gpuwarden store inspect\n  gpuwarden store inspect --data-dir \
                            /var/lib/gpuwarden -o json"
    )]
    Store(StoreArgs),
    /// Say what the drain of a node would do: which pods leave, how, who waits, who stays and why, and
    /// the GPU-hours at stake. Changes nothing. Needs permission to get the node and to list pods.
    #[command(
        after_help = "Examples:\n  gpuwarden drain --plan gpu-7\n  gpuwarden drain --plan gpu-7 \
                            --drain-config drain.toml -o json"
    )]
    Drain(DrainArgs),
    /// Give a quarantined node back by hand, whatever its faults; they are dismissed until
    /// they are reported again. Needs permission to get and patch the node.
    #[command(
        after_help = "Examples:\n  gpuwarden release gpu-7 --reason \"GPU 3 was swapped\"\n  \
                            gpuwarden release gpu-7 --reason test --no-wait"
    )]
    Release(ReleaseArgs),
    /// Hold back the next drain or repair of a node for a while, without ending its session. Needs
    /// permission to get and patch the node.
    #[command(
        after_help = "Examples:\n  gpuwarden veto gpu-7 --for 4h --reason 'looking at the link'\n  \
                            gpuwarden veto gpu-7 --end"
    )]
    Veto(VetoArgs),
    /// Say what a policy would have done on events of the past, or how two differ; exit 1 when
    /// a node would have been taken out, or they differ.
    #[command(
        after_help = "Examples:\n  gpuwarden replay /logs/*.log\n  gpuwarden events --all -o json | \
                            gpuwarden replay - --policy policy.toml\n  gpuwarden replay node-7=kern.log \
                            --policy preset:nvsentinel --policy preset:gke"
    )]
    Replay(ReplayArgs),
    /// Look for a story that breaks an invariant: the decisions of production on a cluster that exists only
    /// here, with random faults, lost requests, crashes and people; exit 1 when there is one.
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
    /// Say what is wrong with this installation, and how to mend it; exit 1 when something is.
    /// Takes what `run` takes, looks at what `run` would use and at the gpuwarden that runs, and
    /// changes nothing.
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
        /// Shell.
        #[arg(value_enum, value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Reset GPUs of this machine, unless somebody holds them, and look whether they are well then. What
    /// the Job of a `GPUReset` runs; exit 1 when one is not reset or not well.
    #[command(
        after_help = "Examples:\n  gpuwarden gpu-reset --gpu GPU-d2e7c0ff-0000-4000-8000-000000000001\n  \
                            gpuwarden gpu-reset --gpu 0000:3b:00.0 --write-log false"
    )]
    GpuReset(GpuResetArgs),
    /// Ask the driver of the GPUs, as the child process of a gpuwarden that watches them.
    #[command(hide = true)]
    GpuProbe {
        /// The settings of the probe, as JSON.
        settings: String,
    },
    /// Call the libraries of the GPUs, as the child process of a check.
    #[command(hide = true)]
    CheckWorker,
    /// Become a program below another root, as the child process of a collection.
    #[command(hide = true)]
    InRoot(InRootArgs),
    /// Print the reference of all commands and flags as Markdown.
    #[command(hide = true)]
    Reference,
    /// Measure gpuwarden on this machine, each figure beside a baseline of the same run.
    #[command(after_help = "Examples:\n  gpuwarden bench idle -o json\n  \
                            gpuwarden bench --kubeconfig test-cluster.yaml")]
    Bench(BenchArgs),
}

/// The address of a running gpuwarden.
#[derive(Args, Debug, Default, Clone)]
pub struct ServerArgs {
    /// Configuration file of the running gpuwarden; of its keys `server`, `data-dir`, `socket`
    /// and `listen` count here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of a running gpuwarden [default: the one that uses the data directory, else
    /// where its configuration listens, else `http://127.0.0.1:2112`].
    #[arg(long, env = "GPUWARDEN_SERVER", value_name = "URL")]
    pub server: Option<String>,
    /// Data directory of the running gpuwarden, to find its address and socket; no other
    /// gpuwarden is shown then.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
    pub data_dir: Option<PathBuf>,
}

/// A format of results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For people, with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The output flag.
#[derive(Args, Debug, Default, Clone, Copy)]
pub struct OutputArgs {
    /// The output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Arguments of `decode`.
#[derive(Args, Debug)]
pub struct DecodeArgs {
    /// File with kernel log text, or - for standard input.
    #[arg(default_value = "-", value_name = "FILE|-")]
    pub file: String,
    /// File of changes to the catalogue (TOML); may be given several times.
    #[arg(long, value_name = "FILE")]
    pub catalog: Vec<PathBuf>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct ViewArgs {
    /// The running gpuwarden.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `events`.
#[derive(Args, Debug)]
pub struct EventsArgs {
    /// Go on with new events as they come.
    #[arg(short, long)]
    pub follow: bool,
    /// The number of the newest events to show first.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// All events that are stored, the oldest first, as `replay` takes them: however many they
    /// are, they are passed on as they come.
    #[arg(long, conflicts_with_all = ["limit", "follow"])]
    pub all: bool,
    /// Only events of this node.
    #[arg(long = "node", value_name = "NAME")]
    pub node: Option<String>,
    /// The running gpuwarden.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `explain` and `why-not`.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// The node [default: the node of the running gpuwarden].
    #[arg(value_name = "NODE")]
    pub node: Option<String>,
    /// The running gpuwarden.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `store`.
#[derive(Args, Debug)]
pub struct StoreArgs {
    /// The command.
    #[command(subcommand)]
    pub what: StoreCommand,
}

/// The commands of `store`.
#[derive(Subcommand, Debug)]
pub enum StoreCommand {
    /// Show what the file holds, how far its readers are, and whether it is sound. It may
    /// be in use.
    #[command(
        after_help = "Examples:\n  gpuwarden store inspect\n  gpuwarden store inspect --data-dir \
                            /var/lib/gpuwarden -o json"
    )]
    Inspect {
        /// Configuration file of gpuwarden; of its keys `data-dir` counts here.
        #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// The data directory [default: where `run` keeps it].
        #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
        data_dir: Option<PathBuf>,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// Arguments of `drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// Only say what would be done. Nodes are drained by a gpuwarden that runs with --drain.
    #[arg(long, required = true)]
    pub plan: bool,
    /// The node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Configuration file of gpuwarden; of its keys `kubeconfig`, `context` and `drain-config` count
    /// here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: where kubectl looks].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// The file that says how pods leave [default: each is waited for until it has ended].
    #[arg(long, env = "GPUWARDEN_DRAIN_CONFIG", value_name = "FILE")]
    pub drain_config: Option<PathBuf>,
    /// The policy whose routes say for which events there is a drain: a file, or `preset:NAME` [default: there is
    /// one for all].
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `release`.
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// The reason, which goes into the node's story.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Configuration file of gpuwarden; of its keys `kubeconfig` and `context` count here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: where kubectl looks].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// Ask for it, and do not wait until it is done.
    #[arg(long)]
    pub no_wait: bool,
    /// The longest time to wait (seconds).
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3_600),
          conflicts_with = "no_wait")]
    pub timeout: u64,
}

/// Arguments of `veto`.
#[derive(Args, Debug)]
pub struct VetoArgs {
    /// The node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Take the veto back.
    #[arg(long, conflicts_with = "reason")]
    pub end: bool,
    /// The length of the veto, which then ends by itself; at most 168h.
    #[arg(long = "for", default_value = "4h", value_name = "DURATION")]
    pub duration: String,
    /// The reason, which goes into the node's story.
    #[arg(long, value_name = "TEXT", required_unless_present = "end")]
    pub reason: Option<String>,
    /// Configuration file of gpuwarden; of its keys `kubeconfig` and `context` count here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: where kubectl looks].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
}

/// The cluster, and the place in it where gpuwarden keeps its own objects.
#[derive(Args, Debug, Default, Clone)]
pub struct KubeArgs {
    /// Configuration file of gpuwarden; of its keys `kubeconfig`, `context` and `namespace` count
    /// here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: $KUBECONFIG, else ~/.kube/config; in a pod its own
    /// service account].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of gpuwarden [default: the pod's own, else gpuwarden].
    #[arg(short, long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
}

/// Arguments of `pause`.
#[derive(Args, Debug)]
pub struct PauseArgs {
    /// The length of the pause, which then ends by itself.
    #[arg(long = "for", default_value = "1h", value_name = "DURATION")]
    pub duration: String,
    /// Hold back drains and repairs, too, of every node: nothing more of them begins, and no further pod is
    /// evicted. What was asked of a janitor goes on.
    #[arg(long)]
    pub repairs: bool,
    /// The reason, shown to everybody who looks.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// The name of the person who asks for it [default: $USER].
    #[arg(long, env = "USER", value_name = "NAME")]
    pub by: Option<String>,
    /// The cluster.
    #[command(flatten)]
    pub kube: KubeArgs,
}

/// Arguments of `simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// Number of steps: of everything that can happen, one at a time.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// The seed from which all follows [default: another one each time].
    #[arg(long)]
    pub seed: Option<u64>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Kernel logs in the forms that `decode` takes, or events as `events -o json` writes
    /// them, or `NVSentinel`'s logs and store; - for standard input. A kernel log is of the node NODE, else of the one that the
    /// file is named after (up to the first dot).
    #[arg(required = true, value_name = "[NODE=]FILE|-")]
    pub files: Vec<String>,
    /// Policy; given twice, the two are compared [default: the built-in one].
    #[arg(long = "policy", value_name = "FILE|preset:NAME")]
    pub policies: Vec<String>,
    /// File of changes to the catalogue (TOML); may be given several times.
    #[arg(long, value_name = "FILE")]
    pub catalog: Vec<PathBuf>,
    /// The nodes that exist, with their labels: `kubectl get nodes -o json`. Without it every
    /// node that an event names exists, and nothing else is known of it; of the brake, only
    /// limits in numbers of nodes hold then (`max = 5`), as nobody knows of how many nodes 20 %
    /// is to be taken, or what labels they carry.
    #[arg(long, value_name = "FILE")]
    pub nodes: Option<PathBuf>,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

#[cfg(test)]
mod tests;
