//! `gpuwarden check`: a question with a yes or a no, for scripts.

use std::time::Duration;

use anyhow::Context as _;
use contract::device::ListGpusRequest;
use contract::device::gpu_service_client::GpuServiceClient;
use devices::gate::Fitness;
use serde::Serialize;

use crate::args::{Check, DeviceApiArgs};
use crate::client;
use crate::output::{self, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// A gpuwarden that does not answer by then is away: a job waits for the answer.
const TIMEOUT: Duration = Duration::from_secs(2);

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
    let Check::Node {
        strict,
        api,
        output,
    } = what;
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
    Ok(Fitness::of(&listed.into_inner().gpus))
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
