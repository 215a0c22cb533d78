//! Rules of the analysis that a command names: a file or `ConfigMap`, beside the built-in ones, or
//! only those.

use std::path::Path;

use analysis::Rule;
use anyhow::{Context as _, bail};
use cluster::Cluster;
use contract::findings::MAX_FILE_BYTES;
use controller::text_place::TextPlace;
use runtime::text_file;

use crate::args::ConnectArgs;
use crate::settings::{connect_options, text_place};

/// Name of the built-in rules.
pub(crate) const BUILT_IN: &str = "built-in";
/// Prefix of the name of a `ConfigMap`.
const CONFIG_MAP: &str = "configmap:";

/// Reads rules from a file, or takes the built-in ones; for commands that ask no cluster.
pub(crate) fn load(source: &str) -> anyhow::Result<Vec<Rule>> {
    if source == BUILT_IN {
        return Ok(analysis::built_in());
    }
    if source.starts_with(CONFIG_MAP) {
        bail!("{source}: only `gpuwarden rules` reads a ConfigMap; write it into a file");
    }
    let text = text_file::read(Path::new(source), MAX_FILE_BYTES)
        .with_context(|| format!("cannot read the rules {source}"))?;
    Ok(analysis::parse(&text, source)?)
}

/// Reads rules from a file or a `ConfigMap`, or takes the built-in ones.
pub(crate) async fn load_from(source: &str, connect: &ConnectArgs) -> anyhow::Result<Vec<Rule>> {
    if !source.starts_with(CONFIG_MAP) {
        return load(source);
    }
    let TextPlace::ConfigMap {
        namespace,
        name,
        key,
    } = text_place("--rules", source)?
    else {
        return load(source);
    };
    let cluster = Cluster::connect(connect_options(connect.clone())).await;
    let cluster = cluster.context("which cluster? --kubeconfig FILE names one")?;
    let map = cluster.config_map(&namespace, &name).await?;
    let map = map.with_context(|| format!("{source}: the cluster has no such ConfigMap"))?;
    let text = map.data.get(&key);
    let text = text.with_context(|| format!("{source}: the ConfigMap has no key {key}"))?;
    Ok(analysis::parse(text, source)?)
}
