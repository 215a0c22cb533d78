//! `gpuwarden check`: checks for scripts, which read the exit code.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context as _;
use checks::Launcher;
use checks::environment::Environment;
use checks::verify::VerifySettings;
use contract::device::ListGpusRequest;
use contract::device::gpu_service_client::GpuServiceClient;
use devices::gate::Fitness;
use runtime::logging::{self, LogFormat};
use serde::Serialize;

use crate::args::{CheckCommand, DeviceApiArgs, OutputArgs};
use crate::output::{self, say};
use crate::{client, exit_code};

/// Longest wait for gpuwarden, since a job waits for the result.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Default log filter of a check.
const LOG: &str = "info";

/// Result of `check node` for JSON and YAML.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView {
    fit: bool,
    gpus: usize,
    bad: Vec<String>,
    unknown: Vec<String>,
    /// Reason for an unknown state.
    blind: Option<String>,
}

pub(super) async fn execute(what: CheckCommand) -> anyhow::Result<u8> {
    match what {
        CheckCommand::Node {
            strict,
            api,
            output,
        } => node(strict, api, output).await,
        CheckCommand::DcgmDiag => preflight(checks::CheckName::DcgmDiag).await,
        CheckCommand::NcclAllreduce => preflight(checks::CheckName::NcclAllreduce).await,
        CheckCommand::Verify { timeout, command } => verify(timeout, command).await,
        CheckCommand::NcclLoopback => preflight(checks::CheckName::NcclLoopback).await,
    }
}

/// Runs a check of the GPUs of this container, which logs to standard error.
async fn preflight(check: checks::CheckName) -> anyhow::Result<u8> {
    let environment = Environment::of_process();
    let filter = environment.first(&["GPUWARDEN_LOG"]);
    logging::start(
        filter.map_or(LOG, |(_, filter)| filter),
        LogFormat::Text,
        false,
    )?;
    let launcher = Launcher::own();
    let code = checks::run(check, &environment, &launcher, &mut std::io::stdout()).await;
    logging::end(None);
    Ok(code)
}

/// Runs a third-party check.
async fn verify(timeout: u64, mut command: Vec<OsString>) -> anyhow::Result<u8> {
    let settings = VerifySettings {
        arguments: command.split_off(1),
        program: command.remove(0),
        timeout: Duration::from_secs(timeout),
    };
    Ok(checks::verify::verify(&settings, &mut std::io::stdout()).await?)
}

async fn node(strict: bool, api: DeviceApiArgs, output: OutputArgs) -> anyhow::Result<u8> {
    let asked = tokio::time::timeout(TIMEOUT, fitness(&api)).await;
    let asked = asked.unwrap_or_else(|_| Err(anyhow::anyhow!("gpuwarden does not answer")));
    let (fitness, blind) = match asked {
        Ok(fitness) => {
            let blind = blind(&fitness);
            (fitness, blind)
        }
        Err(error) => (Fitness::default(), Some(format!("{error:#}"))),
    };
    if let Some(blind) = &blind {
        output::warning(blind);
    }
    let fit = fitness.bad.is_empty() && !(strict && blind.is_some());
    let view = NodeView {
        fit,
        gpus: fitness.gpus,
        bad: fitness.bad,
        unknown: fitness.unknown,
        blind,
    };
    if !output::structured(output.output, &view)? {
        text(&view)?;
    }
    Ok(exit_code(fit))
}

async fn fitness(api: &DeviceApiArgs) -> anyhow::Result<Fitness> {
    let mut api = GpuServiceClient::new(client::device_api(api).await?);
    let listed = api.list_gpus(ListGpusRequest {}).await;
    let listed = listed.context("gpuwarden does not list its GPUs")?;
    Ok(Fitness::of(&listed.into_inner()))
}

/// Returns the reason why the state of a GPU is unknown, if there is one.
fn blind(fitness: &Fitness) -> Option<String> {
    if fitness.gpus == 0 {
        return Some("gpuwarden knows no GPUs on this machine".to_owned());
    }
    let unknown = fitness.unknown.join("; ");
    (!unknown.is_empty()).then(|| format!("the state of GPUs is unknown: {unknown}"))
}

fn text(view: &NodeView) -> anyhow::Result<()> {
    let word = if view.fit { "fit" } else { "unfit" };
    say!(
        "{word}: {} GPUs, {} bad, {} unknown",
        view.gpus,
        view.bad.len(),
        view.unknown.len()
    )?;
    for bad in &view.bad {
        say!("  {}", output::plain(bad))?;
    }
    Ok(())
}
