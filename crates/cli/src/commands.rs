//! The client commands, one file each.

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
mod inject;
mod journal_json;
mod no_text;
mod pause;
mod policy;
mod progress;
mod release;
mod replay;
mod simulate;
mod status;
mod store;
mod veto;
mod why_not;

pub use catalog::load as load_catalog;

use std::path::PathBuf;

use anyhow::Context as _;
use cluster::Cluster;

use crate::args::Command;
use crate::given::Given;
use crate::settings::{ClientSettings, connect_options};
use crate::{EXIT_FAILED, EXIT_OK, output};

/// Carries out a command that was given with these flags. Returns its exit code.
pub(crate) async fn execute(command: Command, given: &Given) -> anyhow::Result<u8> {
    match command {
        // These are the binary's; they never come here.
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
        Command::Replay(args) => replay::execute(&args),
        Command::Simulate(args) => simulate::execute(&args),
        Command::WhyNot(args) => why_not::execute(&args, given).await,
        Command::Pause(args) => pause::pause(args, given).await,
        Command::Resume(args) => pause::resume(args).await,
        Command::Store(args) => store::execute(&args),
        Command::Drain(args) => drain::execute(&args).await,
        Command::Release(args) => release::execute(&args).await,
        Command::Veto(args) => veto::execute(&args).await,
        Command::Reference => {
            output::line(crate::reference::markdown().trim_end())?;
            Ok(EXIT_OK)
        }
        Command::Bench(args) => bench::execute(&args).await,
    }
}

/// Connects to the cluster that the flags name, else the configuration file.
async fn connect(
    kubeconfig: Option<PathBuf>,
    context: Option<String>,
    file: ClientSettings,
) -> anyhow::Result<Cluster> {
    let options = connect_options(kubeconfig.or(file.kubeconfig), context.or(file.context));
    let connected = Cluster::connect(options).await;
    connected.context("which cluster? --kubeconfig FILE names one")
}

/// Returns the name of the person who asks, as far as this machine knows.
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
mod tests {
    use super::*;

    #[test]
    fn who_asks_has_a_name_also_without_one() {
        let of = |set: &'static str| person_of(move |name| (name == set).then(|| "ann".to_owned()));
        for set in ["SUDO_USER", "USER", "LOGNAME"] {
            assert_eq!(of(set), "ann");
        }
        assert!(of("OTHER").starts_with("uid "), "{}", of("OTHER"));
    }
}
