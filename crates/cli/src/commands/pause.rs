//! `gpuwarden pause` and `gpuwarden resume`: pause new quarantines in a cluster.
//!
//! The commands write a `ConfigMap`, which every gpuwarden of the cluster watches.

use anyhow::{Context as _, bail};
use cluster::{ApiError, ConfigMap, ConfigMapChange};
use contract::keys;
use fleet::brake::pause::Pause;
use jiff::Timestamp;

use super::{connect, file, length, person, reason};
use crate::EXIT_OK;
use crate::args::{KubeArgs, PauseArgs};
use crate::given::Given;
use crate::output::say;
use crate::settings::namespace;

/// Most attempts to write the `ConfigMap` while others change it.
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
        "{what} are {pause} (ConfigMap {place}).\nNodes that are out of service still return. \
         To end the pause: {}",
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
            say!("New quarantines are possible again; they were {pause}.")?;
        }
        _ => say!("Nothing is paused (ConfigMap {place}).")?,
    }
    Ok(EXIT_OK)
}

/// Writes the pause that `decide` returns for the current `ConfigMap`: `Some(None)` removes it, `None`
/// leaves the `ConfigMap` unchanged. Returns the namespace and name of the `ConfigMap`.
async fn write(
    kube: &KubeArgs,
    mut decide: impl FnMut(Option<&ConfigMap>) -> Option<Option<String>>,
) -> anyhow::Result<String> {
    let file = file(&kube.cluster)?;
    let namespace = namespace(kube.namespace.clone().or(file.namespace.clone()))?;
    let place = format!("{namespace}/{}", keys::CONFIG_MAP);
    let cluster = connect(&kube.cluster, file).await?;
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
    bail!("others keep changing the ConfigMap {place}; try again")
}

fn no_namespace(place: &str, namespace: &str) -> String {
    format!(
        "write the ConfigMap {place}: create the namespace with kubectl create namespace {namespace}, or \
         name gpuwarden's own with --namespace"
    )
}
