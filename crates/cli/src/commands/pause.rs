//! `gpuwarden pause` and `gpuwarden resume`: stop new quarantines of a cluster for a while.
//!
//! They write the cluster, not a process: every gpuwarden of the cluster sees it at once.

use anyhow::{Context as _, bail};
use cluster::{ApiError, ConfigMap, ConfigMapChange};
use contract::keys;
use fleet::brake::pause::Pause;
use jiff::Timestamp;

use super::{connect, length, person, reason};
use crate::EXIT_OK;
use crate::args::{KubeArgs, PauseArgs};
use crate::given::Given;
use crate::output::say;
use crate::settings::namespace;

/// Somebody else may be writing: so often it is looked at again.
const ATTEMPTS: usize = 5;

pub(super) async fn pause(args: PauseArgs, given: &Given) -> anyhow::Result<u8> {
    let duration = length(&args.duration)?;
    let since = Timestamp::now();
    let pause = Pause {
        reason: reason(&args.reason, usize::MAX)?,
        by: args.by.unwrap_or_else(person),
        since,
        until: Some(since.checked_add(duration).context("--for is too long")?),
        repairs: args.repairs,
    };
    let text = serde_json::to_string(&pause)?;
    let place = write(&args.kube, |_| Some(Some(text.clone()))).await?;
    let what = if pause.repairs {
        "New quarantines, drains and repairs"
    } else {
        "New quarantines"
    };
    say!(
        "{what} are {pause} (ConfigMap {place}).\nWhat is out of service is given back \
         all the same. To end it: {}",
        given.command("resume")
    )?;
    Ok(EXIT_OK)
}

pub(super) async fn resume(args: KubeArgs) -> anyhow::Result<u8> {
    let mut was = None;
    let place = write(&args, |map| {
        was = map.and_then(|map| map.data.get(keys::PAUSE).cloned());
        was.is_some().then_some(None)
    })
    .await?;
    match was.as_deref().and_then(Pause::read) {
        Some(pause) if pause.holds(Timestamp::now()) => {
            say!("New quarantines go on; they were {pause}.")?;
        }
        _ => say!("Nothing is paused (ConfigMap {place}).")?,
    }
    Ok(EXIT_OK)
}

/// Writes what `decide` says of the `ConfigMap`: `None` nothing, `Some(None)` no pause.
/// Returns its place.
async fn write(
    kube: &KubeArgs,
    mut decide: impl FnMut(Option<&ConfigMap>) -> Option<Option<String>>,
) -> anyhow::Result<String> {
    let file = kube.cluster.file()?;
    let namespace = namespace(kube.namespace.clone().or(file.namespace.clone()))?;
    let place = format!("{namespace}/{}", keys::CONFIG_MAP);
    let cluster = connect(&kube.cluster.connect, file).await?;
    for _ in 0..ATTEMPTS {
        let seen = cluster
            .config_map(&namespace, keys::CONFIG_MAP)
            .await
            .with_context(|| format!("read the ConfigMap {place}"))?;
        let Some(pause) = decide(seen.as_ref()) else {
            return Ok(place);
        };
        let change = ConfigMapChange {
            data: [(keys::PAUSE.to_owned(), pause)].into(),
            ..ConfigMapChange::default()
        };
        let written = cluster
            .change_config_map(&namespace, keys::CONFIG_MAP, seen.as_ref(), &change)
            .await;
        match written {
            Ok(_) => return Ok(place),
            Err(ApiError::Conflict { .. }) => {}
            Err(error @ ApiError::NotFound { .. }) => {
                return Err(anyhow::Error::new(error).context(no_namespace(&place, &namespace)));
            }
            Err(error) => {
                return Err(
                    anyhow::Error::new(error).context(format!("write the ConfigMap {place}"))
                );
            }
        }
    }
    bail!("the ConfigMap {place} is being changed by others all the time; try again")
}

fn no_namespace(place: &str, namespace: &str) -> String {
    format!(
        "write the ConfigMap {place}: kubectl create namespace {namespace} makes the namespace, or \
         --namespace names the one in which gpuwarden runs"
    )
}
