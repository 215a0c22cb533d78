//! `gpuwarden devices`: the GPUs of this machine, by its Device API.

use contract::device::gpu_service_client::GpuServiceClient;
use contract::device::{
    ConditionStatus, Gpu, GpuPhase, ListGpusRequest, WatchEventType, WatchGpusRequest,
};
use contract::json;
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{DevicesArgs, Format};
use crate::client;
use crate::output::{self, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// A `DeviceView` is a GPU for JSON and YAML.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceView {
    name: String,
    index: i32,
    product: String,
    architecture: String,
    memory_bytes: u64,
    pci: String,
    mig_devices: Vec<String>,
    phase: &'static str,
    conditions: Vec<ConditionView>,
    resource_version: String,
}

/// A `ConditionView` is a condition of a GPU for JSON and YAML.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ConditionView {
    r#type: String,
    status: &'static str,
    reason: String,
    message: String,
    last_transition_time: Option<Timestamp>,
    source: String,
}

/// A `ChangeView` is a change of a GPU for JSON and YAML.
#[derive(Serialize)]
struct ChangeView {
    change: &'static str,
    gpu: Option<DeviceView>,
}

pub(super) async fn execute(args: &DevicesArgs) -> anyhow::Result<u8> {
    let mut api = GpuServiceClient::new(client::device_api(&args.api).await?);
    let listed = api.list_gpus(ListGpusRequest {}).await?.into_inner();
    let mut gpus = listed.gpus;
    gpus.sort_by_key(|gpu| gpu.spec.as_ref().map(|spec| spec.index));
    let format = args.output.output;
    let is_text = matches!(format, Format::Text | Format::Wide);
    if is_text {
        table(&gpus, format == Format::Wide)?;
    } else if args.watch {
        for gpu in &gpus {
            write_change("added", Some(gpu), format)?;
        }
    } else {
        let views: Vec<DeviceView> = gpus.iter().map(DeviceView::of).collect();
        output::structured(format, &views)?;
    }
    if !args.watch {
        let bad = gpus.iter().any(|gpu| phase(gpu) == GpuPhase::NotReady);
        return Ok(if bad { EXIT_UNHEALTHY } else { EXIT_OK });
    }
    let resource_version = listed.resource_version;
    let request = WatchGpusRequest { resource_version };
    let mut changes = api.watch_gpus(request).await?.into_inner();
    while let Some(event) = changes.message().await? {
        let change = match event.r#type() {
            WatchEventType::Added => "added",
            WatchEventType::Modified => "changed",
            WatchEventType::Deleted => "gone",
            WatchEventType::Resync => "resync",
            WatchEventType::Bookmark | WatchEventType::Unspecified => continue,
        };
        write_change(change, event.gpu.as_ref(), format)?;
    }
    anyhow::bail!("gpuwarden has ended the stream")
}

fn table(gpus: &[Gpu], wide: bool) -> anyhow::Result<()> {
    if gpus.is_empty() {
        output::line("No GPUs are known on this machine.")?;
        return Ok(());
    }
    let mut heads = vec!["INDEX", "GPU", "PRODUCT", "PCI", "STATE", "SINCE", "WHY"];
    if wide {
        heads.extend(["ARCHITECTURE", "MEMORY", "MIG"]);
    }
    let now = Timestamp::now();
    let rows = gpus.iter().map(|gpu| {
        let view = DeviceView::of(gpu);
        let mut row = vec![
            view.index.to_string(),
            output::plain(&view.name),
            output::plain(&view.product),
            output::plain(&view.pci),
            view.phase.to_owned(),
            view.since(now),
            output::plain(&view.why()),
        ];
        if wide {
            row.push(output::plain(&view.architecture));
            row.push(format!("{} MiB", view.memory_bytes / (1024 * 1024)));
            row.push(view.mig_devices.len().to_string());
        }
        row
    });
    output::table(&heads, &rows.collect::<Vec<_>>())?;
    Ok(())
}

/// Writes one change of an unending list: one line, or one document.
fn write_change(change: &'static str, gpu: Option<&Gpu>, format: Format) -> anyhow::Result<()> {
    let gpu = gpu.map(DeviceView::of);
    match (format, gpu) {
        (Format::Json, gpu) => {
            let view = ChangeView { change, gpu };
            output::line(&serde_json::to_string(&view)?)?;
        }
        (Format::Yaml, gpu) => {
            output::line("---")?;
            output::structured(format, &ChangeView { change, gpu })?;
        }
        (Format::Text | Format::Wide, Some(view)) => {
            let name = output::plain(&view.name);
            let why = output::plain(&view.why());
            say!("{change:8} {} {name} {} {why}", view.index, view.phase)?;
        }
        (Format::Text | Format::Wide, None) => {
            output::line("Changes were missed; all GPUs follow as they are now.")?;
        }
    }
    Ok(())
}

fn phase(gpu: &Gpu) -> GpuPhase {
    gpu.status
        .as_ref()
        .map_or(GpuPhase::Unspecified, contract::device::GpuStatus::phase)
}

// === impl DeviceView ===

impl DeviceView {
    fn of(gpu: &Gpu) -> Self {
        let spec = gpu.spec.clone().unwrap_or_default();
        let conditions = gpu.status.iter().flat_map(|status| &status.conditions);
        let conditions = conditions.map(|one| ConditionView {
            r#type: one.r#type.clone(),
            status: match one.status() {
                ConditionStatus::True => "True",
                ConditionStatus::False => "False",
                ConditionStatus::Unknown | ConditionStatus::Unspecified => "Unknown",
            },
            reason: one.reason.clone(),
            message: one.message.clone(),
            last_transition_time: one.last_transition_time.and_then(json::timestamp),
            source: one.source.clone(),
        });
        Self {
            name: gpu.name.clone(),
            index: spec.index,
            product: spec.product_name,
            architecture: spec.architecture,
            memory_bytes: spec.memory_bytes,
            pci: spec.pci_bus_id,
            mig_devices: spec.mig_devices.into_iter().map(|mig| mig.uuid).collect(),
            phase: match phase(gpu) {
                GpuPhase::Pending => "Pending",
                GpuPhase::Ready => "Ready",
                GpuPhase::NotReady => "NotReady",
                GpuPhase::Unknown | GpuPhase::Unspecified => "Unknown",
            },
            conditions: conditions.collect(),
            resource_version: gpu.resource_version.clone(),
        }
    }

    fn ready(&self) -> Option<&ConditionView> {
        self.conditions
            .iter()
            .find(|one| one.r#type == devices::board::READY)
    }

    /// Returns how long it has been so.
    fn since(&self, now: Timestamp) -> String {
        let since = self.ready().and_then(|ready| ready.last_transition_time);
        since.map_or_else(String::new, |since| output::span(now.duration_since(since)))
    }

    /// Returns what is wrong with it, each condition with its reason and its message.
    fn why(&self) -> String {
        let wrong = self
            .conditions
            .iter()
            .filter(|one| one.status != "True" && one.r#type != devices::board::READY);
        let wrong: Vec<String> = wrong
            .map(|one| {
                let said = format!("{} {}: {}", one.r#type, one.reason, one.message);
                said.trim_end_matches(": ").to_owned()
            })
            .collect();
        wrong.join("; ")
    }
}
