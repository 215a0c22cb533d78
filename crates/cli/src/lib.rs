//! The command line: arguments, the client commands, and how results are written.
//!
//! `run`, `agent` and `controller` are only read here ([`RunSettings`] and its like); the
//! binary wires them up. All other commands
//! are carried out here, as clients of a running gpuwarden or on their own.

#![allow(missing_docs)] // Nothing outside of this workspace uses the crate; `gpuwarden --help` documents the flags.

mod args;
mod client;
mod commands;
mod given;
mod output;
mod policy_source;
mod reference;
mod settings;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};
use given::Given;
use host::gpu_probe::ProbeSettings;
use runtime::logging;
use settings::resolve;

pub use args::{Cli, Command};
pub use commands::load_catalog;
pub use settings::{
    ActSettings, AgentSettings, ControllerSettings, DeliverySettings, DeviceNetwork,
    DeviceSettings, Endpoint, FakeGpus, GpuSettings, IngestSettings, JanitorProviderSettings,
    JanitorSettings, Mode, NodeSettings, ProcessSettings, Reached, ReportSettings, RunSettings,
    SettingsError, Transport, WebhookSettings,
};

/// Parts of `gpuwarden bench` that the `gpuwarden-bench` crate shares.
pub mod bench {
    pub use crate::args::OutputArgs;
    pub use crate::commands::bench::{
        Baseline, Figure, Usage, cluster_client, median, percentile, processor_time, progress,
        show, watch,
    };
}

/// All is well.
pub const EXIT_OK: u8 = 0;
/// The command worked, and what it looked at is unhealthy.
pub const EXIT_UNHEALTHY: u8 = 1;
/// The command did not work: usage, configuration, or nothing to talk to.
pub const EXIT_FAILED: u8 = 2;

/// A controller led and does not any more: it is to be started again, to stand by.
pub const EXIT_DEPOSED: u8 = 3;

/// `Parsed` is the result of reading the arguments.
pub enum Parsed {
    /// Run the product.
    Run(Box<RunSettings>),
    /// Run a node's side.
    Agent(Box<AgentSettings>),
    /// Run a cluster's side.
    Controller(Box<ControllerSettings>),
    /// Put preflight checks into pods.
    Webhook(Box<WebhookSettings>),
    /// Act on nodes for a janitor.
    JanitorProvider(Box<JanitorProviderSettings>),
    /// Ask the driver of the GPUs for the gpuwarden that started this process.
    GpuProbe(ProbeSettings),
    /// Call the libraries of the GPUs for the check that started this process.
    CheckWorker,
    /// Carry out a client command.
    Client(Box<Client>),
    /// Nothing more: help was shown, or the arguments are wrong. The exit code.
    Done(ExitCode),
}

/// A `Client` is a client command, with the flags that it was given.
pub struct Client {
    command: Command,
    given: Given,
}

/// Reads the process's arguments and environment. Writes help and errors itself.
pub fn parse() -> Parsed {
    let (cli, given) = match read_arguments() {
        Ok(read) => read,
        Err(error) => {
            let code = if error.use_stderr() {
                EXIT_FAILED
            } else {
                EXIT_OK
            };
            // It fails only where nobody reads.
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
        command => return Parsed::Client(Box::new(Client { command, given })),
    };
    role.unwrap_or_else(|error| {
        output::error(&error.into());
        Parsed::Done(ExitCode::from(EXIT_FAILED))
    })
}

/// Reads the arguments of the process; its empty environment variables count as not set.
fn read_arguments() -> Result<(Cli, Given), clap::Error> {
    let mut command = args::without_empty(Cli::command(), args::is_empty);
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    let given = Given::read(&command, &matches);
    let cli =
        Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?;
    Ok((cli, given))
}

/// Carries out a client command.
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

/// Ends the log of `run` and its like, with the error that they ended with; gives the exit
/// code.
pub fn report(ended: anyhow::Result<ExitCode>) -> ExitCode {
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
