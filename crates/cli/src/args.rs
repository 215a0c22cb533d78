//! The arguments, as text. What they mean together is decided in `settings`.

mod doctor;
mod environment;
mod roles;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use doctor::{DoctorArgs, DoctorRole};
pub(crate) use environment::{is_empty, without_empty};
pub(crate) use roles::{
    ActArgs, AgentArgs, ControllerArgs, DeliveryArgs, ElectionArgs, IngestArgs, NodeArgs,
    ProcessArgs, RunArgs,
};

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
    /// What to do.
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
    /// Find faults in kernel log text: one line per fault; exit 1 when a fatal one was found.
    #[command(
        after_help = "Examples:\n  dmesg | gpuwarden decode\n  gpuwarden decode /var/log/kern.log -o json"
    )]
    Decode(DecodeArgs),
    /// Say what a fault code means, what gpuwarden does about it, and where that comes from.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:\n  gpuwarden catalog\n  gpuwarden catalog xid 79\n  \
                      gpuwarden catalog nvlink5 149\n  gpuwarden catalog diff site.toml"
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
    /// Give a quarantined node back by hand, whatever its faults; they are dismissed until
    /// they are reported again. Needs permission to get and patch the node.
    #[command(
        after_help = "Examples:\n  gpuwarden release gpu-7 --reason \"GPU 3 was swapped\"\n  \
                            gpuwarden release gpu-7 --reason test --no-wait"
    )]
    Release(ReleaseArgs),
    /// Say what a policy would have done on events of the past, or how two differ; exit 1 when
    /// a node would have been taken out, or they differ.
    #[command(
        after_help = "Examples:\n  gpuwarden replay /logs/*.log\n  gpuwarden events --all -o json | \
                            gpuwarden replay - --policy policy.toml\n  gpuwarden replay node-7=kern.log \
                            --policy preset:nvsentinel --policy preset:gke"
    )]
    Replay(ReplayArgs),
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
    /// Print the reference of all commands and flags as Markdown.
    #[command(hide = true)]
    Reference,
    /// Measure gpuwarden on this machine, each figure beside a baseline of the same run.
    #[command(after_help = "Examples:\n  gpuwarden bench\n  gpuwarden bench decode -o json")]
    Bench(BenchArgs),
}

/// Where a running gpuwarden is.
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
    /// Data directory of the running gpuwarden, to find its address and socket.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
    pub data_dir: Option<PathBuf>,
}

/// How results are written.
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
    /// How to write the result.
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
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `catalog`.
#[derive(Args, Debug)]
pub struct CatalogArgs {
    /// Something else to do.
    #[command(subcommand)]
    pub command: Option<CatalogCommand>,
    /// Kind of row. Without it, all are listed.
    #[arg(value_enum, value_name = "KIND")]
    pub kind: Option<CatalogKind>,
    /// The code, or the name of a NIC pattern. Without it, all rows of the kind are listed.
    #[arg(value_name = "CODE")]
    pub code: Option<String>,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What else `catalog` does.
#[derive(Subcommand, Debug)]
pub enum CatalogCommand {
    /// Show what files of changes (TOML) make different from the built-in rows.
    #[command(
        after_help = "Examples:\n  gpuwarden catalog diff site.toml\n  gpuwarden catalog diff \
                            vendor.toml site.toml -o json"
    )]
    Diff(CatalogDiffArgs),
}

/// Arguments of `catalog diff`.
#[derive(Args, Debug)]
pub struct CatalogDiffArgs {
    /// Files of changes; the last has the last word.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The kinds of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CatalogKind {
    /// XID codes of GPUs.
    Xid,
    /// `SXid` codes of `NVSwitch`es.
    Sxid,
    /// The words in XID 144 to 150 lines.
    Nvlink5,
    /// Lines of NIC drivers.
    Nic,
}

impl CatalogKind {
    /// Its word on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Xid => "xid",
            Self::Sxid => "sxid",
            Self::Nvlink5 => "nvlink5",
            Self::Nic => "nic",
        }
    }
}

/// Arguments of `inject`.
#[derive(Args, Debug)]
pub struct InjectArgs {
    /// What to make.
    #[command(subcommand)]
    pub what: Inject,
}

/// What can be injected.
#[derive(Subcommand, Debug)]
pub enum Inject {
    /// An XID, as the NVIDIA driver would print it.
    #[command(
        after_help = "Examples:\n  gpuwarden inject xid 79\n  gpuwarden inject xid 48 --pci 0000:3b:00 \
                            --via kmsg"
    )]
    Xid {
        /// The code.
        code: u32,
        /// PCI address of the GPU.
        #[arg(long, default_value = "0000:b3:00", value_name = "ADDRESS")]
        pci: String,
        /// Through the running kernel's log (needs root; every program that reads it sees
        /// it), or as an event on gpuwarden's socket.
        #[arg(long, value_enum, default_value_t = Via::Socket)]
        via: Via,
        /// Where to send it.
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Healthy events that close open faults of a node.
    #[command(
        after_help = "Examples:\n  gpuwarden inject recovery\n  gpuwarden inject recovery --code 79 \
                            --pci 0000:b3:00"
    )]
    Recovery {
        /// Only faults of the GPU at this PCI address.
        #[arg(long, value_name = "ADDRESS")]
        pci: Option<String>,
        /// Only faults with this code.
        #[arg(long, value_name = "CODE")]
        code: Option<String>,
        /// Where to send it.
        #[command(flatten)]
        target: TargetArgs,
    },
}

/// The way a fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Via {
    /// A line in the kernel log.
    Kmsg,
    /// An event on the socket.
    Socket,
}

/// Where an injected event goes.
#[derive(Args, Debug, Clone)]
pub struct TargetArgs {
    /// Node that has the fault [default: the node of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The connector's Unix socket [default: that of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Where the running gpuwarden is.
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct ViewArgs {
    /// Where the running gpuwarden is.
    #[command(flatten)]
    pub server: ServerArgs,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `events`.
#[derive(Args, Debug)]
pub struct EventsArgs {
    /// Go on with new events as they come.
    #[arg(short, long)]
    pub follow: bool,
    /// How many of the newest events to show first.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// All events that are stored, the oldest first, as `replay` takes them: however many they
    /// are, they are passed on as they come.
    #[arg(long, conflicts_with_all = ["limit", "follow"])]
    pub all: bool,
    /// Only events of this node.
    #[arg(long = "node", value_name = "NAME")]
    pub node: Option<String>,
    /// Where the running gpuwarden is.
    #[command(flatten)]
    pub server: ServerArgs,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `explain` and `why-not`.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// The node [default: the node of the running gpuwarden].
    #[arg(value_name = "NODE")]
    pub node: Option<String>,
    /// Where the running gpuwarden is.
    #[command(flatten)]
    pub server: ServerArgs,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `store`.
#[derive(Args, Debug)]
pub struct StoreArgs {
    /// What to do.
    #[command(subcommand)]
    pub what: StoreCommand,
}

/// What `store` can do.
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
        /// How to write it.
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// Arguments of `release`.
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Why; it goes into the node's story.
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
    /// How long to wait (seconds).
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3_600),
          conflicts_with = "no_wait")]
    pub timeout: u64,
}

/// Which cluster, and where in it gpuwarden keeps its own objects.
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
    /// For how long; it ends by itself.
    #[arg(long = "for", default_value = "1h", value_name = "DURATION")]
    pub duration: String,
    /// Why, for everybody who looks.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Who asks for it [default: $USER].
    #[arg(long, env = "USER", value_name = "NAME")]
    pub by: Option<String>,
    /// Which cluster.
    #[command(flatten)]
    pub kube: KubeArgs,
}

/// Arguments of `policy`.
#[derive(Args, Debug)]
pub struct PolicyArgs {
    /// What to do.
    #[command(subcommand)]
    pub what: PolicyCommand,
}

/// What `policy` does.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// Check a policy: what is wrong with it (exit 2), and what is odd (exit 1): values that no
    /// event has, rules that never match, no brake, no way to opt out.
    #[command(after_help = "Examples:\n  gpuwarden policy lint policy.toml\n  \
                            gpuwarden policy lint preset:nvsentinel -o json")]
    Lint {
        /// Policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        /// How to write it.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Run the tests of a policy: events in, what is wanted for their node out; exit 1 when one
    /// fails.
    #[command(after_help = "Examples:\n  gpuwarden policy test policy.toml\n  \
                            gpuwarden policy test policy.toml more-tests.yaml")]
    Test {
        /// Policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        /// Files of tests, YAML or TOML [default: beside the policy: policy.test.yaml,
        /// policy.test.toml for policy.toml].
        #[arg(value_name = "TESTS")]
        tests: Vec<PathBuf>,
        /// How to write it.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Say what changes from one policy to another: on the events of all known monitors and of
    /// the catalogue, and with files as `replay` takes them on these too; exit 1 when they differ.
    #[command(
        after_help = "Examples:\n  gpuwarden policy diff preset:default policy.toml\n  \
                            gpuwarden policy diff old.toml new.toml /logs/*.log\n  gpuwarden policy diff old.toml \
                      new.toml --nodes nodes.json"
    )]
    Diff {
        /// The one policy.
        #[arg(value_name = "FILE|preset:NAME")]
        a: String,
        /// The other.
        #[arg(value_name = "FILE|preset:NAME")]
        b: String,
        /// Kernel logs or exported events, see `replay`.
        #[arg(value_name = "[NODE=]FILE")]
        files: Vec<String>,
        /// The nodes that exist, with their labels: `kubectl get nodes -o json`. Without it
        /// rules about nodes are not compared, and of the brake only limits in numbers of nodes
        /// hold on files.
        #[arg(long, value_name = "FILE")]
        nodes: Option<PathBuf>,
        /// How to write it.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show a policy with all that holds, and what of it is a default.
    #[command(
        after_help = "Examples:\n  gpuwarden policy show\n  gpuwarden policy show policy.toml -o json"
    )]
    Show {
        /// Policy [default: the built-in one].
        #[arg(env = "GPUWARDEN_POLICY", value_name = "FILE|preset:NAME")]
        policy: Option<String>,
        /// How to write it.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the policies that are built in, each with its source; with a name, print that one.
    #[command(
        after_help = "Examples:\n  gpuwarden policy presets\n  gpuwarden policy presets eks > policy.toml"
    )]
    Presets {
        /// Name.
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// How to write the list.
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Kernel logs in the forms that `decode` takes, or events as `events -o json` writes
    /// them; - for standard input. A kernel log is of the node NODE, else of the one that the
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
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Only this benchmark; without it, all that can run here.
    #[arg(value_enum, value_name = "NAME")]
    pub name: Option<Benchmark>,
    /// Kubeconfig of a test cluster, for the benchmarks that cordon a node: they make a node
    /// object of their own, and delete it.
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// Where the benchmarks that write to disk do it, in a directory of their own that is
    /// removed [default: the system's temporary directory].
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// What `run` reads its faults from in `cordon` and `idle`.
    #[arg(long, value_enum, default_value_t = BenchLog::File)]
    pub via: BenchLog,
    /// Rounds of `cordon`.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    /// How many nodes fail at once in `burst`, one burst after the other.
    #[arg(long, default_value = "150,375,750", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub nodes: Vec<u16>,
    /// How many nodes the cluster has in `fleet`, one cluster after the other.
    #[arg(long, default_value = "1000,5000", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=20_000))]
    pub fleet: Vec<u16>,
    /// For how long `idle` and `fleet` watch each process (seconds).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Benchmark {
    /// Time to look at a line of kernel log.
    Decode,
    /// Hundreds of thousands of lines of a few faults.
    Storm,
    /// Durable events a second, into the store and into an agent's outbox.
    Store,
    /// From a line of kernel log to a cordoned node.
    Cordon,
    /// Many nodes that fail at once: until all are cordoned, and until all are given back.
    Burst,
    /// What a process that has nothing to do needs.
    Idle,
    /// What a controller needs that has nothing to do in a cluster of many nodes.
    Fleet,
    /// Size of the executable.
    Binary,
}

/// The kernel log of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchLog {
    /// A file of its own.
    File,
    /// The running kernel's log (needs root; every program that reads it sees the faults).
    Kmsg,
}

#[cfg(test)]
mod tests;
