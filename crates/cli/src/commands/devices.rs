//! `gpuwarden devices`: the GPUs of this machine, from its Device API.

use console::api::GpuView;
use contract::device::gpu_service_client::GpuServiceClient;
use contract::device::{Gpu, ListGpusRequest, WatchEventType, WatchGpusRequest};
use fleet::brake::some_of;
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{DevicesArgs, Format};
use crate::output::{self, say};
use crate::{client, exit_code};

/// Most bad GPUs that the line of `status` names.
const GPUS_SHOWN: usize = 4;

/// Change of a GPU, for JSON and YAML.
#[derive(Serialize)]
struct ChangeView {
    change: &'static str,
    gpu: Option<GpuView>,
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
        let views: Vec<GpuView> = gpus.iter().map(GpuView::of).collect();
        output::structured(format, &views)?;
    }
    if !args.watch {
        let bad = gpus.iter().any(|gpu| GpuView::of(gpu).is_bad());
        return Ok(exit_code(!bad));
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
        let view = GpuView::of(gpu);
        let since = view.since();
        let mut row = vec![
            view.index.to_string(),
            output::plain(&view.name),
            output::plain(&view.product),
            output::plain(&view.pci),
            output::plain(&view.phase),
            since.map_or_else(String::new, |since| output::span(now.duration_since(since))),
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

/// Writes one change: one line, or one document.
fn write_change(change: &'static str, gpu: Option<&Gpu>, format: Format) -> anyhow::Result<()> {
    let gpu = gpu.map(GpuView::of);
    let view = ChangeView { change, gpu };
    if output::document(format, &view)? {
        return Ok(());
    }
    let Some(view) = view.gpu else {
        output::line("Changes were missed; the current state of all GPUs follows.")?;
        return Ok(());
    };
    let (name, why) = (output::plain(&view.name), output::plain(&view.why()));
    say!("{change:8} {} {name} {} {why}", view.index, view.phase)?;
    Ok(())
}

/// Returns the number of GPUs of this machine, and those in a bad state; `None` without GPUs.
pub(super) fn summary(gpus: &[GpuView]) -> Option<String> {
    let named = |gpu: &GpuView| format!("GPU {}: {}", gpu.index, output::plain(&gpu.why()));
    let bad: Vec<String> = gpus.iter().filter(|gpu| gpu.is_bad()).map(named).collect();
    let shown = &bad[..bad.len().min(GPUS_SHOWN)];
    let ready = gpus.iter().filter(|gpu| gpu.phase == "Ready").count();
    let bad = match some_of(shown, bad.len()) {
        none if none.is_empty() => String::new(),
        bad => output::colour(&format!("; {bad}"), output::Colour::Red),
    };
    (!gpus.is_empty()).then(|| format!("GPUs        {ready} of {} ready{bad}", gpus.len()))
}
