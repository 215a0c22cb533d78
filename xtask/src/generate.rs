//! `cargo xtask generate`: files that are made from others and checked in.
//!
//! The protobuf types are checked in so that a build needs neither `protoc` nor a
//! code generator in its dependency graph.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use prost::Message as _;

/// Reads `null` as an empty list or map.
const NULL_AS_DEFAULT: &str = "deserialize_with = \"crate::json::null_as_default\"";

/// Writes every generated file, or with `check` fails when one is stale.
pub(crate) fn run(check: bool) -> anyhow::Result<()> {
    let root = workspace_root();
    let mut stale = Vec::new();
    for (path, content) in [protobuf(&root)?, command_reference(&root)?] {
        let current = std::fs::read_to_string(&path).unwrap_or_default();
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

fn protobuf(root: &Path) -> anyhow::Result<(PathBuf, String)> {
    let proto = root.join("proto");
    let descriptors = protox::compile(["health_event.proto"], [&proto])
        .context("compile proto/health_event.proto")?;
    // protox and prost-build may differ in their prost-types version: pass bytes between them.
    let descriptors =
        prost_types::FileDescriptorSet::decode(descriptors.encode_to_vec().as_slice())?;
    let out = tempdir()?;
    let mut builder = tonic_prost_build::configure()
        .out_dir(&out)
        // Ordered maps make the encoding of an event deterministic: its id is a hash of it.
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
    let generated = std::fs::read_to_string(out.join("datamodels.rs"))?;
    std::fs::remove_dir_all(&out)?;
    let header =
        "// Generated from proto/health_event.proto by 'cargo xtask generate'. Do not edit.\n";
    Ok((
        root.join("crates/contract/src/generated/datamodels.rs"),
        format!("{header}{generated}"),
    ))
}

/// Returns the command reference, as the program itself prints it, and its path.
fn command_reference(root: &Path) -> anyhow::Result<(PathBuf, String)> {
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
    Ok((root.join("docs/cli.md"), String::from_utf8(output.stdout)?))
}

fn tempdir() -> anyhow::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("gpuwarden-generate-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}
