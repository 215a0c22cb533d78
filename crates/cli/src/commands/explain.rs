//! `gpuwarden explain`: the story of a node.

use console::api::Explain;

use super::events::query;
use super::status::device_lines;
use crate::args::{ExplainArgs, Format};
use crate::client::Client;
use crate::exit_code;
use crate::output::{self, Colour, say};

/// Column of an entry's text, after its time and its kind.
const TEXT: usize = 36;

pub(super) async fn execute(args: &ExplainArgs) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let node = node(&client, args).await?;
    let story: Explain = client
        .get(&format!("/api/v1/nodes/{}/explain", query(&node)))
        .await?;
    let format = args.output.output;
    if !output::structured(format, &story)? {
        text(&story, format == Format::Wide)?;
    }
    let faulty = story
        .status
        .is_some_and(|status| status.faults.iter().any(|fault| fault.fatal));
    Ok(exit_code(!faulty))
}

/// Returns the node of the arguments, else that of the running gpuwarden.
pub(super) async fn node(client: &Client, args: &ExplainArgs) -> anyhow::Result<String> {
    match &args.node {
        Some(node) => Ok(node.clone()),
        None => Ok(client.status().await?.process.node_name),
    }
}

fn text(story: &Explain, wide: bool) -> anyhow::Result<()> {
    let state = story
        .status
        .as_ref()
        .map_or("no open fault", |status| status.state.name());
    say!("{}: {state}", output::plain(&story.node))?;
    for note in story.status.iter().flat_map(|status| &status.notes) {
        say!("note      {}", output::plain(note))?;
    }
    let session = story.status.as_ref().and_then(|one| one.session.as_ref());
    if let Some(drain) = session.and_then(|session| session.drain.as_ref()) {
        say!("drain     {}", output::plain(&drain.to_string()))?;
    }
    let devices = story.status.iter().flat_map(|status| &status.devices);
    for line in devices.flat_map(device_lines) {
        say!("device    {}", output::plain(&line))?;
    }
    for gpu in &story.unhealthy_gpus {
        let (pod, resource) = (output::plain(&gpu.pod), output::plain(&gpu.resource));
        let device = output::plain(&gpu.device);
        say!("pod       {pod}: the kubelet reports its {resource} {device} as unhealthy")?;
    }
    if story.entries.is_empty() {
        let known = match story.in_cluster {
            Some(true) => "The cluster has this node; no event names it.",
            Some(false) => "This machine's own name; no event names it.",
            None => "No event names this node.",
        };
        say!("\n{known}")?;
    } else {
        output::line("")?;
    }
    for entry in &story.entries {
        let kind = serde_json::to_value(entry.kind)?;
        say!(
            "{}  {}  {}",
            output::time(entry.at),
            output::colour(
                &format!("{:<9}", kind.as_str().unwrap_or_default()),
                Colour::Grey
            ),
            output::indented(&entry.text, TEXT)
        )?;
        if wide && !entry.detail.is_null() {
            say!("{:TEXT$}{}", "", output::plain(&entry.detail.to_string()))?;
        }
    }
    say!("\nawaited   {}", output::plain(&story.awaits))?;
    for gpu in story.gpus.iter().filter(|gpu| gpu.phase != "Ready") {
        let (phase, why) = (output::plain(&gpu.phase), output::plain(&gpu.why()));
        say!("GPU {:<5} {phase}: {why}", gpu.index)?;
    }
    for (index, way) in story.how_to_clear.iter().enumerate() {
        let head = if index == 0 { "to clear " } else { "      or " };
        say!("{head} {}", output::plain(way))?;
    }
    Ok(())
}
