//! gpuwarden's history of the node, from the API of the running process.

use super::{Collected, Collection};
use crate::client::Client;
use crate::commands::events::query;

/// Most bytes of each of the two files: the story of a node with a long history.
const MAX_BYTES: u64 = 8 * 1024 * 1024;
/// Most events, from the newest.
const EVENTS: u32 = 1_000;

/// Fetches the story of the node: log lines, events, decisions and API calls.
pub(super) async fn explain(collection: &Collection<'_>) -> anyhow::Result<Collected> {
    let path = format!("/api/v1/nodes/{}/explain", query(&collection.node));
    fetch(collection, &path, "explain.json").await
}

/// Fetches the newest events of the node.
pub(super) async fn events(collection: &Collection<'_>) -> anyhow::Result<Collected> {
    let node = query(&collection.node);
    let path = format!("/api/v1/events?limit={EVENTS}&node={node}");
    fetch(collection, &path, "events.json").await
}

async fn fetch(collection: &Collection<'_>, path: &str, file: &str) -> anyhow::Result<Collected> {
    let bound = collection.bound(MAX_BYTES)?;
    let client = Client::new(&collection.args.server)?;
    let answer = client.get_bytes(path).await?;
    let most = usize::try_from(bound).unwrap_or(usize::MAX);
    let kept = answer.get(..most).unwrap_or(&answer);
    collection.write(file, kept)?;
    let mut collected = Collected::whole(file);
    if kept.len() < answer.len() {
        let all = answer.len();
        collected.cut = Some(format!("the first {most} of {all} bytes"));
    }
    Ok(collected)
}
