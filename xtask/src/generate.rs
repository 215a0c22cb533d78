//! `cargo xtask generate`: generated files that are checked in.
//!
//! The protobuf types are checked in so that a build needs neither `protoc` nor a code generator
//! in its dependency graph.

mod chart;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use prost::Message as _;

use crate::metrics;

/// Attribute that reads `null` as an empty list or map.
const NULL_AS_DEFAULT: &str = "deserialize_with = \"crate::json::null_as_default\"";

/// Writes every generated file or, with `check`, fails if one is stale.
pub(crate) fn run(check: bool) -> anyhow::Result<()> {
    let root = workspace_root();
    let mut stale = Vec::new();
    // Lazy, because the program that prints the reference is built from the types written
    // before.
    let reference = std::iter::once_with(|| command_reference(&root));
    let from_metrics = std::iter::once_with(|| metrics::files(&root));
    let from_metrics = from_metrics.flat_map(|files| match files {
        Ok(files) => files.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    });
    let mut protobuf = protobuf(&root)?;
    protobuf.extend(chart::files(&root)?);
    let protobuf = protobuf.into_iter().map(Ok);
    for file in protobuf.chain(reference).chain(from_metrics) {
        let (path, content) = file?;
        let current = std::fs::read(&path).unwrap_or_default();
        if current == content {
            continue;
        }
        if check {
            stale.push(
                path.strip_prefix(&root)
                    .unwrap_or(&path)
                    .display()
                    .to_string(),
            );
        } else {
            std::fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        }
    }
    if !stale.is_empty() {
        bail!(
            "stale generated files: {}; run 'cargo xtask generate'",
            stale.join(", ")
        );
    }
    Ok(())
}

/// Returns the directory that holds the workspace's `Cargo.toml`.
pub(crate) fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map_or_else(PathBuf::new, Path::to_path_buf)
}

/// Protobuf files with their packages.
const PROTOS: [(&str, &str); 9] = [
    ("health_event.proto", "datamodels"),
    ("device.proto", "gpuwarden.device.v1alpha1"),
    ("nvsentinel_device.proto", "nvidia.nvsentinel.v1alpha1"),
    ("nvhcd.proto", "nvhcd"),
    ("podresources.proto", "v1"),
    ("node.proto", "gpuwarden.node.v1alpha1"),
    ("preflight.proto", "gpuwarden.v1"),
    (
        "janitor_provider.proto",
        "nvidia.nvsentinel.janitor.v1alpha1",
    ),
    ("google_rpc.proto", "google.rpc"),
];

/// Returns the Rust types of all protobuf files, one file per package, and the descriptors for
/// gRPC reflection.
fn protobuf(root: &Path) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let generated = root.join("crates/contract/src/generated");
    let compiled = protox::Compiler::new([root.join("proto")])?
        .include_imports(true)
        .open_files(PROTOS.map(|(proto, _)| proto))
        .context("compile proto/")?
        .include_source_info(false)
        .encode_file_descriptor_set();
    let mut files = vec![(generated.join("descriptors.bin"), compiled)];
    for (proto, package) in PROTOS {
        let rust = rust_types(root, proto, package)?;
        files.push((generated.join(format!("{package}.rs")), rust));
    }
    Ok(files)
}

fn rust_types(root: &Path, proto: &str, package: &str) -> anyhow::Result<Vec<u8>> {
    let descriptors = protox::compile([proto], [root.join("proto")])
        .with_context(|| format!("compile proto/{proto}"))?;
    // protox and prost-build may use different versions of prost-types, so the data is passed as
    // bytes.
    let descriptors =
        prost_types::FileDescriptorSet::decode(descriptors.encode_to_vec().as_slice())?;
    let out = tempdir()?;
    let mut builder = tonic_prost_build::configure()
        .out_dir(&out)
        // Ordered maps make the encoding of an event deterministic: its id is a hash of the
        // encoding.
        .btree_map(".")
        .build_transport(false);
    // The public JSON form of an event, see `crates/contract/src/json.rs`.
    for message in ["HealthEvent", "Entity", "BehaviourOverrides"] {
        builder = builder
            .type_attribute(message, "#[derive(serde::Serialize, serde::Deserialize)]")
            .type_attribute(message, "#[serde(rename_all = \"camelCase\", default)]");
    }
    for (field, serde) in [
        ("recommendedAction", "with = \"crate::json::action\""),
        ("processingStrategy", "with = \"crate::json::strategy\""),
        ("generatedTimestamp", "with = \"crate::json::time\""),
        ("errorCode", NULL_AS_DEFAULT),
        ("entitiesImpacted", NULL_AS_DEFAULT),
        ("metadata", NULL_AS_DEFAULT),
    ] {
        let attribute = format!("#[serde({serde})]");
        builder = builder.field_attribute(format!("HealthEvent.{field}"), attribute);
    }
    builder
        .compile_fds(descriptors)
        .context("generate Rust from the protobuf descriptors")?;
    let generated = std::fs::read_to_string(out.join(format!("{package}.rs")))?;
    std::fs::remove_dir_all(&out)?;
    let header =
        format!("// Generated from proto/{proto} by 'cargo xtask generate'. Do not edit.\n");
    Ok(format!("{header}{generated}").into_bytes())
}

/// Returns the command reference, as printed by the program, and its path.
fn command_reference(root: &Path) -> anyhow::Result<(PathBuf, Vec<u8>)> {
    let output = std::process::Command::new(env!("CARGO"))
        .args([
            "run",
            "--quiet",
            "--package",
            "gpuwarden",
            "--",
            "reference",
        ])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("run 'gpuwarden reference'")?;
    if !output.status.success() {
        bail!("'gpuwarden reference' failed: {}", output.status);
    }
    let reference = String::from_utf8(output.stdout).context("read the command reference")?;
    Ok((
        root.join("docs/cli.md"),
        with_overview(&reference).into_bytes(),
    ))
}

/// Returns the command reference with a table of all commands before the first one.
fn with_overview(reference: &str) -> String {
    let mut table = String::from("\n| command | what it does |\n|---|---|\n");
    let mut sections = reference.split("\n## `");
    let head = sections.next().unwrap_or_default();
    for section in sections {
        let (name, text) = section.split_once('`').unwrap_or((section, ""));
        let about = text.trim_start().lines().next().unwrap_or_default();
        // The first sentence; the section has the rest.
        let about = about.split(". ").next().unwrap_or_default();
        let short = name.strip_prefix("gpuwarden ").unwrap_or(name);
        let anchor = name.replace(' ', "-");
        let about = about.trim_end_matches('.').replace('|', "\\|");
        table.push_str(&format!("| [`{short}`](#{anchor}) | {about} |\n"));
    }
    let rest = reference.get(head.len()..).unwrap_or_default();
    format!("{head}{table}{rest}")
}

fn tempdir() -> anyhow::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("gpuwarden-generate-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_begins_with_a_table_of_its_commands() {
        let reference = "# Reference\n\nExit codes.\n\n## `gpuwarden run`\n\nWatch this. More.\n\n\
                         ## `gpuwarden policy lint`\n\nCheck a | b\n";
        let table = "| command | what it does |\n|---|---|\n\
                     | [`run`](#gpuwarden-run) | Watch this |\n\
                     | [`policy lint`](#gpuwarden-policy-lint) | Check a \\| b |\n";
        let expected = reference.replacen(
            "## `gpuwarden run`",
            &format!("{table}\n## `gpuwarden run`"),
            1,
        );
        assert_eq!(with_overview(reference), expected);
    }
}
