//! The command line: arguments and settings, the client commands, and their output.
//!
//! For the roles (`run`, `agent`, `controller` and others) this crate only reads the settings; the
//! binary runs them. All other commands run here, as clients of a running gpuwarden or alone.

// Only this workspace uses the crate, and names of fields say enough.
#![allow(missing_docs)]

mod args;
mod client;
mod commands;
mod given;
mod output;
mod policy_source;
mod reference;
mod rules_source;
mod settings;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use args::{Cli, Command};
use clap::{CommandFactory as _, FromArgMatches as _};
use given::Given;
use host::gpu_probe::ProbeSettings;
use runtime::logging;
use settings::resolve;

pub use commands::load_catalog;
pub use settings::{
    ActSettings, AgentSettings, AnalysisRules, AuditSettings, ControllerSettings, DeliverySettings,
    DeviceNetwork, DeviceSettings, Endpoint, FakeGpus, GpuSettings, IngestSettings,
    JanitorProviderSettings, JanitorSettings, LabelSettings, Mode, NodeSettings, ProcessSettings,
    Reached, ReportSettings, RunSettings, ServerCertificate, SettingsError, Transport,
    WebhookSettings,
};

/// Parts of `gpuwarden bench` that the `gpuwarden-bench` crate shares.
pub mod bench {
    pub use crate::args::OutputArgs;
    pub use crate::commands::bench::{
        Figure, TICKS, Usage, cluster_client, median, percentile, progress, show, ticks, watch,
    };
}

/// Name of this program where it is a plugin of kubectl.
const PLUGIN: &str = "kubectl-gpuwarden";
/// Exit code: healthy, or done.
const EXIT_OK: u8 = 0;
/// Exit code: the command worked, and something is unhealthy, or differs.
const EXIT_UNHEALTHY: u8 = 1;
/// Exit code: wrong usage or configuration, or no answer.
const EXIT_FAILED: u8 = 2;

/// Returns the exit code of a command that has found something healthy, or not.
fn exit_code(healthy: bool) -> u8 {
    if healthy { EXIT_OK } else { EXIT_UNHEALTHY }
}

/// Exit code: a controller has lost the lead, and has to be restarted to stand by.
pub const EXIT_DEPOSED: u8 = 3;

/// Command of this process, with its settings.
pub enum Parsed {
    Run(Box<RunSettings>),
    Agent(Box<AgentSettings>),
    Controller(Box<ControllerSettings>),
    Webhook(Box<WebhookSettings>),
    JanitorProvider(Box<JanitorProviderSettings>),
    /// Child process of a gpuwarden that watches GPUs.
    GpuProbe(ProbeSettings),
    /// Child process of a check.
    CheckWorker,
    /// Print the descriptions of all metrics.
    MetricReference,
    Client(Box<Client>),
    /// Help was printed, or the arguments are invalid; the process ends with this code.
    Done(ExitCode),
}

pub struct Client {
    command: Command,
    given: Given,
}

/// Parses the arguments and environment of the process. Prints help and errors itself.
pub fn parse() -> Parsed {
    let (cli, given) = match read_arguments() {
        Ok(read) => read,
        Err(error) => {
            let code = if error.use_stderr() {
                EXIT_FAILED
            } else {
                EXIT_OK
            };
            // A closed standard error is no reason to fail.
            drop(error.print());
            return Parsed::Done(ExitCode::from(code));
        }
    };
    let role = match cli.command {
        Command::Run(args) => resolve(*args).map(|it| Parsed::Run(Box::new(it))),
        Command::Agent(args) => resolve(*args).map(|it| Parsed::Agent(Box::new(it))),
        Command::Controller(args) => resolve(*args).map(|it| Parsed::Controller(Box::new(it))),
        Command::Webhook(args) => {
            WebhookSettings::resolve(*args).map(|it| Parsed::Webhook(Box::new(it)))
        }
        Command::JanitorProvider(args) => {
            JanitorProviderSettings::resolve(*args).map(|it| Parsed::JanitorProvider(Box::new(it)))
        }
        Command::GpuProbe { settings } => serde_json::from_str(&settings)
            .map(Parsed::GpuProbe)
            .map_err(|error| SettingsError::value("gpu-probe", settings, error.to_string())),
        Command::CheckWorker => Ok(Parsed::CheckWorker),
        Command::Reference { metrics: true } => Ok(Parsed::MetricReference),
        command => return Parsed::Client(Box::new(Client { command, given })),
    };
    role.unwrap_or_else(|error| {
        output::error(&error.into());
        Parsed::Done(ExitCode::from(EXIT_FAILED))
    })
}

/// Returns true if kubectl runs this program, as its plugin `kubectl gpuwarden`.
fn is_plugin() -> bool {
    let program = std::env::args_os().next().unwrap_or_default();
    Path::new(&program).file_name() == Some(OsStr::new(PLUGIN))
}

/// Returns how a person runs this program.
fn program() -> &'static str {
    if is_plugin() {
        "kubectl gpuwarden"
    } else {
        "gpuwarden"
    }
}

/// Parses the arguments of the process. Empty environment variables count as not set.
fn read_arguments() -> Result<(Cli, Given), clap::Error> {
    let mut command = args::without_empty(Cli::command(), args::is_empty).bin_name(program());
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    let given = Given::read(&command, &matches);
    let cli =
        Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?;
    Ok((cli, given))
}

/// Runs a client command.
pub async fn execute(client: Client) -> ExitCode {
    let code = match commands::execute(client.command, &client.given).await {
        Ok(code) => code,
        Err(error) if output::is_broken_pipe(&error) => EXIT_OK,
        Err(error) => {
            output::error(&error);
            EXIT_FAILED
        }
    };
    ExitCode::from(code)
}

/// Ends the log of a role, with its last error if it has one. Returns the exit code.
pub fn report(ended: anyhow::Result<ExitCode>) -> ExitCode {
    runtime::audit::end();
    match ended {
        Ok(code) => {
            logging::end(None);
            code
        }
        Err(error) => {
            logging::end(Some(&output::error_text(&error)));
            ExitCode::from(EXIT_FAILED)
        }
    }
}
