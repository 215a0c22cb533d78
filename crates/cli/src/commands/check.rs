//! `gpuwarden check`: a question with a yes or a no, for scripts.

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

use crate::args::{Check, DeviceApiArgs, OutputArgs};
use crate::client;
use crate::output::{self, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// A gpuwarden that does not answer by then is away: a job waits for the answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The log of a check where nothing else is set.
const LOG: &str = "info";

/// A `NodeView` is the answer for JSON and YAML.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView {
    fit: bool,
    gpus: usize,
    bad: Vec<String>,
    unknown: Vec<String>,
    /// The reason why it is not known.
    blind: Option<String>,
}

pub(super) async fn execute(what: Check) -> anyhow::Result<u8> {
    match what {
        Check::Node {
            strict,
            api,
            output,
        } => node(strict, api, output).await,
        Check::DcgmDiag => preflight(checks::Check::DcgmDiag).await,
        Check::NcclAllreduce => preflight(checks::Check::NcclAllreduce).await,
        Check::Verify { timeout, command } => verify(timeout, command).await,
        Check::NcclLoopback => preflight(checks::Check::NcclLoopback).await,
    }
}

/// Runs a check of the GPUs of this container. The log of what it does goes to standard error.
async fn preflight(check: checks::Check) -> anyhow::Result<u8> {
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

/// Runs a check of somebody else.
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
    Ok(if fit { EXIT_OK } else { EXIT_UNHEALTHY })
}

async fn fitness(api: &DeviceApiArgs) -> anyhow::Result<Fitness> {
    let mut api = GpuServiceClient::new(client::device_api(api).await?);
    let listed = api.list_gpus(ListGpusRequest {}).await;
    let listed = listed.context("gpuwarden does not say which GPUs there are")?;
    Ok(Fitness::of(&listed.into_inner()))
}

/// Returns why it is not known how all GPUs do.
fn blind(fitness: &Fitness) -> Option<String> {
    if fitness.gpus == 0 {
        return Some("gpuwarden knows no GPUs on this machine".to_owned());
    }
    let unknown = fitness.unknown.join("; ");
    (!unknown.is_empty()).then(|| format!("it is not known how GPUs do: {unknown}"))
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
