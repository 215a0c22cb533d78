//! The client commands, one file each.

mod approve;
pub(crate) mod bench;
mod catalog;
mod check;
mod collect;
mod completions;
mod decode;
mod devices;
mod doctor;
mod drain;
mod events;
mod explain;
mod garbled;
mod gpu_reset;
mod incidents;
mod inject;
mod journal_json;
mod ledger;
mod maintenance;
mod man_pages;
mod no_text;
mod objects;
mod pause;
mod policy;
mod progress;
mod release;
mod replay;
mod report;
mod rules;
mod simulate;
mod status;
pub(crate) mod store;
mod test_files;
mod uninstall;
mod veto;
mod why_not;

pub use catalog::load as load_catalog;

use anyhow::{Context as _, bail};
use cluster::Cluster;
use jiff::SignedDuration;
use model::node::{NodeChange, NodeView};

use crate::args::{ClusterArgs, Command, ConnectArgs};
use crate::given::Given;
use crate::settings::{ClientSettings, SettingsError, connect_options};
use crate::{EXIT_FAILED, EXIT_OK, output};

/// Most attempts to write an annotation on a node that changes meanwhile.
const ATTEMPTS: u32 = 5;

/// Runs a client command. Returns its exit code.
pub(crate) async fn execute(command: Command, given: &Given) -> anyhow::Result<u8> {
    match command {
        // The binary runs these itself.
        Command::Run(_)
        | Command::Agent(_)
        | Command::Controller(_)
        | Command::CheckWorker
        | Command::Webhook(_)
        | Command::JanitorProvider(_)
        | Command::GpuProbe { .. } => Ok(EXIT_FAILED),
        Command::Decode(args) => decode::execute(&args).await,
        Command::Catalog(args) => catalog::execute(&args),
        Command::GpuReset(args) => gpu_reset::execute(args).await,
        Command::Inject(args) => inject::execute(args.what).await,
        Command::Status(args) => status::execute(&args).await,
        Command::Devices(args) => devices::execute(&args).await,
        Command::Check(args) => check::execute(args.what).await,
        Command::Collect(args) => collect::execute(&args).await,
        Command::InRoot(args) => collect::in_root(&args),
        Command::Events(args) => events::execute(&args).await,
        Command::Explain(args) => explain::execute(&args).await,
        Command::Doctor(args) => doctor::execute(*args, given).await,
        Command::Completions { shell } => completions::execute(shell),
        Command::Policy(args) => policy::execute(&args.what),
        Command::Rules(args) => rules::execute(&args.what).await,
        Command::Objects(args) => objects::execute(&args.what),
        Command::Replay(args) => replay::execute(&args),
        Command::Simulate(args) => simulate::execute(&args),
        Command::WhyNot(args) => why_not::execute(&args, given).await,
        Command::Incidents(args) => incidents::execute(&args).await,
        Command::Ledger(args) => ledger::execute(&args).await,
        Command::Maintenance(args) => maintenance::execute(&args).await,
        Command::Report(args) => report::execute(&args.what).await,
        Command::Pause(args) => pause::pause(args, given).await,
        Command::Resume(args) => pause::resume(args).await,
        Command::Store(args) => store::execute(&args),
        Command::Drain(args) => drain::execute(&args).await,
        Command::Release(args) => release::execute(&args).await,
        Command::Veto(args) => veto::execute(&args).await,
        Command::Approve(args) => approve::execute(&args).await,
        Command::Uninstall(args) => uninstall::execute(&args).await,
        Command::Reference { .. } => {
            output::line(crate::reference::markdown().trim_end())?;
            Ok(EXIT_OK)
        }
        Command::ManPages { directory } => man_pages::execute(&directory),
        Command::Bench(args) => bench::execute(&args).await,
    }
}

/// Reads the keys of the configuration file, if one is named.
fn file(args: &ClusterArgs) -> Result<ClientSettings, SettingsError> {
    ClientSettings::read(args.config.as_deref())
}

/// Connects to the cluster that the flags name, else to that of the configuration file.
async fn connect(args: &ClusterArgs, file: ClientSettings) -> anyhow::Result<Cluster> {
    let args = &args.connect;
    let options = connect_options(ConnectArgs {
        kubeconfig: args.kubeconfig.clone().or(file.kubeconfig),
        context: args.context.clone().or(file.context),
    });
    let connected = Cluster::connect(options).await;
    connected.context("which cluster? --kubeconfig FILE names one")
}

async fn node(cluster: &Cluster, name: &str) -> anyhow::Result<NodeView> {
    let node = cluster.node(name).await?;
    node.with_context(|| format!("the cluster has no node {name:?}"))
}

/// Writes an annotation on a node, or removes it for the value `None`. `decide` returns the value,
/// or `None` to leave the node unchanged. Returns the node before the change.
async fn annotate(
    cluster: &Cluster,
    name: &str,
    key: &str,
    decide: impl Fn(&NodeView) -> anyhow::Result<Option<Option<String>>>,
) -> anyhow::Result<NodeView> {
    let mut attempt = 1;
    loop {
        let node = node(cluster, name).await?;
        let Some(value) = decide(&node)? else {
            return Ok(node);
        };
        let change = NodeChange {
            annotations: [(key.to_owned(), value)].into(),
            ..NodeChange::default()
        };
        match cluster.apply(&node, &change).await {
            Ok(_) => return Ok(node),
            // The node has changed since it was read.
            Err(error) if error.is_retryable() && attempt < ATTEMPTS => attempt += 1,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot write on node {name}"));
            }
        }
    }
}

/// Parses the value of `--for`.
fn length(text: &str) -> anyhow::Result<SignedDuration> {
    let duration = text.parse::<SignedDuration>().ok();
    let duration = duration.filter(SignedDuration::is_positive);
    duration.with_context(|| format!("--for {text:?} is not a duration such as 2h or 30m"))
}

/// Checks the value of `--reason`, which may have `most` bytes.
fn reason(text: &str, most: usize) -> anyhow::Result<String> {
    let reason = text.trim();
    if reason.is_empty() {
        bail!("--reason is empty: give the reason, for everybody who reads the story");
    }
    if reason.len() > most {
        bail!("--reason has more than {most} bytes: shorten it");
    }
    Ok(reason.to_owned())
}

/// Returns the name of the person who runs this command, if this machine knows it.
fn person() -> String {
    person_of(|name| std::env::var(name).ok())
}

fn person_of(variable: impl Fn(&str) -> Option<String>) -> String {
    ["SUDO_USER", "USER", "LOGNAME"]
        .into_iter()
        .filter_map(variable)
        .find(|name| !name.is_empty())
        .unwrap_or_else(|| format!("uid {}", host::identity::effective_uid()))
}

#[cfg(test)]
mod tests;
