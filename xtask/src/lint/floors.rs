//! Crates import only crates of lower floors, and pure crates have no dependency that does I/O.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Finding, relative};

/// Package and floor of each crate.
const FLOORS: [(&str, u8); 29] = [
    ("gpuwarden-contract", 0),
    ("gpuwarden-diagnosis", 1),
    ("gpuwarden-model", 2),
    ("gpuwarden-policy", 3),
    ("gpuwarden-analysis", 4),
    ("gpuwarden-fleet", 4),
    ("gpuwarden-maintenance", 4),
    ("gpuwarden-labels", 4),
    ("gpuwarden-notices", 4),
    ("gpuwarden-objects", 4),
    ("gpuwarden-preflight", 4),
    ("gpuwarden-runtime", 4),
    ("gpuwarden-store", 4),
    ("gpuwarden-host", 4),
    ("gpuwarden-trial", 5),
    ("gpuwarden-cluster", 5),
    ("gpuwarden-connector", 5),
    ("gpuwarden-devices", 5),
    ("gpuwarden-checks", 5),
    ("gpuwarden-clouds", 5),
    ("gpuwarden-monitor", 6),
    ("gpuwarden-certificates", 6),
    ("gpuwarden-agent", 7),
    ("gpuwarden-controller", 7),
    ("gpuwarden-janitor", 7),
    ("gpuwarden-webhook", 7),
    ("gpuwarden-console", 7),
    ("gpuwarden-cli", 8),
    ("gpuwarden", 9),
];

/// Packages without a floor. Other crates use them in tests only, except for the fakes, which
/// the product uses to run without hardware.
const OUTSIDE: [&str; 4] = [
    "gpuwarden-bench",
    "gpuwarden-fakes",
    "gpuwarden-testkit",
    "xtask",
];

/// Permitted uses of such packages outside of tests: user and package.
const SHOWN: [(&str, &str); 2] = [
    ("gpuwarden", "gpuwarden-fakes"),
    ("gpuwarden-cli", "gpuwarden-fakes"),
];

/// Packages that pure crates may not depend on, not even through another crate of the workspace.
const IMPURE: [&str; 10] = [
    "axum",
    "hyper",
    "hyper-util",
    "k8s-openapi",
    "kube",
    "reqwest",
    "rusqlite",
    "rustix",
    "tokio",
    "tokio-stream",
];

/// Packages of the pure crates.
const PURE: [&str; 12] = [
    "gpuwarden-contract",
    "gpuwarden-diagnosis",
    "gpuwarden-model",
    "gpuwarden-policy",
    "gpuwarden-analysis",
    "gpuwarden-fleet",
    "gpuwarden-maintenance",
    "gpuwarden-labels",
    "gpuwarden-notices",
    "gpuwarden-objects",
    "gpuwarden-preflight",
    "gpuwarden-trial",
];

#[derive(Deserialize)]
pub(super) struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Kind of the dependency: `dev`, `build`, or `None` for a normal one.
    kind: Option<String>,
}

fn floor(package: &str) -> Option<u8> {
    FLOORS
        .iter()
        .find(|(name, _)| *name == package)
        .map(|(_, floor)| *floor)
}

pub(super) fn check(metadata: &Metadata, root: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let mut find = |message| {
            findings.push(Finding {
                file: relative(&package.manifest_path, root),
                line: 0,
                message,
            });
        };
        let name = package.name.as_str();
        if OUTSIDE.contains(&name) {
            continue;
        }
        let Some(own) = floor(name) else {
            find(format!(
                "{name} has no floor: give it one in xtask/src/lint/floors.rs"
            ));
            continue;
        };
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            let dev = dependency.kind.as_deref() == Some("dev");
            if dev && other == name {
                continue; // its own tests with more features
            }
            if OUTSIDE.contains(&other) && !dev && !SHOWN.contains(&(name, other)) {
                find(format!("{name} depends on {other}, which is for tests"));
            }
            if let Some(floor) = floor(other)
                && floor >= own
            {
                find(format!(
                    "{name} (floor {own}) depends on {other} (floor {floor}): a room imports only \
                     from lower floors"
                ));
            }
            if PURE.contains(&name) && !dev && IMPURE.contains(&other) {
                find(format!(
                    "{name} depends on {other}: it is a pure room, which does no I/O"
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the findings for one package with one dependency.
    fn found(package: &str, dependency: &str, kind: Option<&str>) -> Vec<String> {
        let metadata = json!({"packages": [{
            "name": package,
            "manifest_path": "/r/crates/x/Cargo.toml",
            "dependencies": [{"name": dependency, "kind": kind}],
        }]});
        let metadata: Metadata = serde_json::from_value(metadata).unwrap();
        let findings = check(&metadata, Path::new("/r"));
        assert!(
            findings
                .iter()
                .all(|f| f.file == Path::new("crates/x/Cargo.toml"))
        );
        findings
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn dependencies_go_down_only() {
        let cases = [
            ("gpuwarden-agent", "gpuwarden-host", None, ""),
            (
                "gpuwarden-agent",
                "gpuwarden-controller",
                None,
                "lower floors",
            ),
            (
                "gpuwarden-contract",
                "gpuwarden-fleet",
                None,
                "lower floors",
            ),
            (
                "gpuwarden-fleet",
                "gpuwarden-store",
                Some("dev"),
                "lower floors",
            ),
            ("gpuwarden-fleet", "gpuwarden-contract", None, ""),
            ("gpuwarden-fleet", "gpuwarden-diagnosis", None, ""),
            (
                "gpuwarden-diagnosis",
                "gpuwarden-fleet",
                None,
                "lower floors",
            ),
            ("gpuwarden-agent", "gpuwarden-testkit", Some("dev"), ""),
            ("gpuwarden-agent", "gpuwarden-testkit", None, "for tests"),
            ("gpuwarden-fleet", "gpuwarden-trial", None, "lower floors"),
            ("gpuwarden-trial", "gpuwarden-fleet", None, ""),
            ("gpuwarden-trial", "tokio", None, "no I/O"),
            ("gpuwarden-fleet", "tokio", None, "no I/O"),
            ("gpuwarden-fleet", "tokio", Some("dev"), ""),
            ("gpuwarden-store", "rusqlite", None, ""),
            ("gpuwarden-store", "gpuwarden-store", Some("dev"), ""),
            ("gpuwarden-attic", "serde", None, "no floor"),
            ("gpuwarden-cli", "gpuwarden-bench", None, "for tests"),
            ("gpuwarden-agent", "gpuwarden-fakes", None, "for tests"),
            ("gpuwarden-agent", "gpuwarden-fakes", Some("dev"), ""),
            ("gpuwarden", "gpuwarden-fakes", None, ""),
            ("gpuwarden-bench", "gpuwarden-cli", None, ""),
            ("xtask", "gpuwarden-testkit", None, ""),
        ];
        for (package, dependency, kind, expected) in cases {
            let found = found(package, dependency, kind);
            let matches = match expected {
                "" => found.is_empty(),
                _ => found.len() == 1 && found.iter().all(|message| message.contains(expected)),
            };
            assert!(matches, "{package} on {dependency} ({kind:?}): {found:?}");
        }
    }
}
