//! List of an image's contents in the form of `CycloneDX`: the crates of the program, the Debian
//! packages of the base, and NVIDIA's libraries.
//!
//! No time and no serial number is in it, so that equal images have equal lists.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::shell::{cargo, output};

/// Version of the format.
const SPECIFICATION: &str = "1.6";

/// Platform of the program.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Package of the program.
const PROGRAM: &str = "gpuwarden";

/// A part of an image that is not a crate.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Package URL, which scanners look up.
    pub(crate) purl: String,
}

/// Output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Crate>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Crate {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for a crate of this repository.
    source: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    dependencies: Vec<String>,
}

/// Writes the list of an image with a program and other parts.
pub(crate) fn write(
    file: &Path,
    image: &str,
    program: &Path,
    parts: &[Part],
) -> anyhow::Result<()> {
    let metadata = [
        "metadata",
        "--locked",
        "--format-version=1",
        "--filter-platform",
        PLATFORM,
    ];
    let metadata = serde_json::from_str(&output(cargo().args(metadata))?)
        .context("read the output of cargo metadata")?;
    // Metadata also has what other members of the workspace ask for.
    let tree = ["tree", "--locked", "--edges=normal", "--prefix=none"];
    let tree = output(
        cargo()
            .args(tree)
            .args(["--package", PROGRAM, "--target", PLATFORM]),
    )?;
    let sum = output(std::process::Command::new("sha256sum").arg(program))?;
    let sum = sum.split_whitespace().next().unwrap_or_default();
    let list = list(image, sum, &metadata, &built(&tree), parts)?;
    let text = serde_json::to_string_pretty(&list)? + "\n";
    fs::write(file, text).with_context(|| format!("write {}", file.display()))
}

/// Returns a package URL.
pub(crate) fn purl(kind: &str, name: &str, version: &str) -> String {
    let version = version.replace('+', "%2B").replace(':', "%3A");
    format!("pkg:{kind}/{name}@{version}")
}

/// Returns names and versions of the crates that `cargo tree` lists.
fn built(tree: &str) -> BTreeSet<(&str, &str)> {
    let lines = tree.lines().filter_map(|line| {
        let (name, rest) = line.split_once(" v")?;
        Some((name, rest.split_whitespace().next()?))
    });
    lines.collect()
}

fn list(
    image: &str,
    sum: &str,
    metadata: &Metadata,
    built: &BTreeSet<(&str, &str)>,
    parts: &[Part],
) -> anyhow::Result<Value> {
    let crates: BTreeMap<&str, &Crate> = (metadata.packages.iter())
        .filter(|one| built.contains(&(one.name.as_str(), one.version.as_str())))
        .map(|one| (one.id.as_str(), one))
        .collect();
    let program = (crates.values())
        .find(|one| one.name == PROGRAM)
        .with_context(|| format!("cargo tree names no {PROGRAM}"))?;
    let mut components: Vec<Value> = crates.values().map(|one| component(one, sum)).collect();
    let mut contents = vec![program.reference()];
    for Part {
        name,
        version,
        purl,
    } in parts
    {
        components.push(json!({
            "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
        }));
        contents.push(purl.clone());
    }
    let image_reference = format!("image:{image}");
    let mut dependencies = vec![json!({"ref": image_reference, "dependsOn": contents})];
    for node in &metadata.resolve.nodes {
        let Some(one) = crates.get(node.id.as_str()) else {
            continue;
        };
        let needs = node.dependencies.iter();
        let needs = needs.filter_map(|id| Some(crates.get(id.as_str())?.reference()));
        let needs: BTreeSet<String> = needs.collect();
        dependencies.push(json!({"ref": one.reference(), "dependsOn": needs}));
    }
    Ok(json!({
        "$schema": format!("http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json"),
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {"component": {
            "type": "container", "bom-ref": image_reference, "name": image,
            "version": program.version,
        }},
        "components": components,
        "dependencies": dependencies,
    }))
}

/// Returns the component of a crate; `sum` is the SHA-256 of the program.
fn component(one: &Crate, sum: &str) -> Value {
    let kind = if one.name == PROGRAM {
        "application"
    } else {
        "library"
    };
    let mut component = json!({
        "type": kind, "bom-ref": one.reference(), "name": one.name, "version": one.version,
    });
    // In the registry, the name of a crate of this repository may be anyone's.
    if one.source.is_some() {
        component["purl"] = one.reference().into();
    }
    if let Some(license) = &one.license {
        // Some crates have the older form, with a slash for OR.
        let license = license.replace(" / ", "/").replace('/', " OR ");
        component["licenses"] = json!([{"expression": license}]);
    }
    if one.name == PROGRAM {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    component
}

// === impl Crate ===

impl Crate {
    /// Returns the name of the crate within the list.
    fn reference(&self) -> String {
        match self.source {
            Some(_) => purl("cargo", &self.name, &self.version),
            None => format!("{}@{}", self.name, self.version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_crates_that_are_built_are_listed_with_what_they_need() {
        let metadata = serde_json::from_value(json!({
            "packages": [
                {"id": "p", "name": "gpuwarden", "version": "0.1.0", "license": "Apache-2.0"},
                {"id": "a", "name": "a", "version": "1.0.0+x", "license": "MIT/Apache-2.0",
                    "source": "registry"},
                {"id": "t", "name": "for-tests", "version": "2.0.0", "license": null},
            ],
            "resolve": {"nodes": [
                {"id": "p", "dependencies": ["a", "t"]},
                {"id": "a", "dependencies": []},
                {"id": "t", "dependencies": []},
            ]},
        }));
        let tree = "gpuwarden v0.1.0 (/src/crates/gpuwarden)\na v1.0.0+x (*)\na v1.0.0+x\n";
        let libc = Part {
            name: "libc6".to_owned(),
            version: "2.36".to_owned(),
            purl: "pkg:deb/debian/libc6@2.36".to_owned(),
        };
        let list = list("image", "abc", &metadata.unwrap(), &built(tree), &[libc]).unwrap();
        let names: Vec<_> = (list["components"].as_array().unwrap().iter())
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["a", "gpuwarden", "libc6"]);
        let (a, program) = (&list["components"][0], &list["components"][1]);
        assert_eq!(a["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(program["hashes"][0]["content"], "abc");
        let needs = &list["dependencies"];
        assert_eq!(
            needs[0]["dependsOn"],
            json!(["gpuwarden@0.1.0", "pkg:deb/debian/libc6@2.36"])
        );
        assert_eq!(needs[1]["dependsOn"], json!(["pkg:cargo/a@1.0.0%2Bx"]));
    }
}
