//! Checks `Containerfile` without building it, because not every machine can: its paths,
//! workspace members, Rust version and program must exist in the repository.

use std::{fs, path::Path};

use anyhow::Context as _;

use super::Finding;

const FILE: &str = "Containerfile";

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let text = fs::read_to_string(root.join(FILE)).context("read the Containerfile")?;
    let manifest = fs::read_to_string(root.join("Cargo.toml")).context("read Cargo.toml")?;
    Ok(check_text(&text, &manifest, |path| {
        root.join(path).exists()
    }))
}

fn check_text(text: &str, manifest: &str, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |line: usize, message: String| {
        let file = FILE.into();
        findings.push(Finding {
            file,
            line,
            message,
        });
    };
    let (mut copied, mut program) = (Vec::new(), None);
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["COPY", from, source, _] if from.starts_with("--from=") => {
                let name = source.rsplit_once("/target/release/").map(|(_, name)| name);
                if name != program {
                    find(number, format!("{source} is not what is built"));
                }
            }
            ["COPY", sources @ .., _] => {
                for source in sources {
                    copied.push(*source);
                    if !exists(source) {
                        find(number, format!("{source} does not exist"));
                    }
                }
            }
            ["FROM", image, ..] if image.contains("/rust:") => {
                let version = image
                    .rsplit_once(':')
                    .and_then(|(_, tag)| tag.split('-').next());
                let wanted = format!("rust-version = \"{}\"", version.unwrap_or_default());
                if !manifest.lines().any(|line| line == wanted) {
                    find(
                        number,
                        format!("{image} is not the rust-version of Cargo.toml"),
                    );
                }
            }
            ["RUN", "cargo", "build", .., "--package", name] => {
                program = Some(*name);
                if !exists(&format!("crates/{name}/Cargo.toml")) {
                    find(number, format!("there is no crate {name}"));
                }
            }
            _ => {}
        }
    }
    if program.is_none() {
        find(0, "nothing is built".to_owned());
    }
    let members = manifest
        .lines()
        .find_map(|line| line.strip_prefix("members = ["));
    let members = members.unwrap_or_default().split('"').skip(1).step_by(2);
    for member in members.map(|member| member.trim_end_matches("/*")) {
        if !copied.contains(&member) {
            find(0, format!("the workspace's {member} is not copied"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "members = [\"crates/*\", \"xtask\"]\nrust-version = \"1.90\"\n";
    const WELL: &str = "FROM docker.io/library/rust:1.90-bookworm AS build\nCOPY crates crates\n\
                        COPY xtask xtask\nRUN cargo build --release --package gpuwarden\nFROM base\n\
                        COPY --from=build /src/target/release/gpuwarden /usr/local/bin/gpuwarden\n";

    fn found(text: &str) -> Vec<String> {
        let there = ["crates", "xtask", "crates/gpuwarden/Cargo.toml"];
        let findings = check_text(text, MANIFEST, |path| there.contains(&path));
        findings
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn what_an_image_is_made_of_exists() {
        assert_eq!(found(WELL), [""; 0]);
        for (from, to, message) in [
            ("xtask xtask", "xtasks xtask", "xtasks does not exist"),
            (
                "COPY xtask xtask\n",
                "",
                "the workspace's xtask is not copied",
            ),
            ("rust:1.90", "rust:1.80", "is not the rust-version"),
            (
                "--package gpuwarden",
                "--package warden",
                "there is no crate warden",
            ),
            (
                "release/gpuwarden /usr",
                "release/other /usr",
                "is not what is built",
            ),
            ("RUN cargo build", "RUN cargo check", "nothing is built"),
        ] {
            let told = found(&WELL.replace(from, to));
            assert!(told.iter().any(|told| told.contains(message)), "{told:?}");
        }
    }
}
