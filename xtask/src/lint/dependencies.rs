//! Checks the licences, bans and sources of the dependency graph against `deny.toml`. `cargo
//! deny` checks more, above all advisories; this rule needs only cargo.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use serde::Deserialize;

use super::Finding;

/// The only permitted source of foreign crates.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

const LISTS: &str = "deny.toml";

/// Output of `cargo metadata` with all dependencies.
#[derive(Deserialize)]
pub(super) struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    /// `None` for a workspace member.
    source: Option<String>,
    license: Option<String>,
}

/// Checks all foreign packages. `lists` is the text of `deny.toml`.
pub(super) fn check(metadata: &Metadata, lists: &str) -> Vec<Finding> {
    let allowed = quoted(lists, "allow = [", "]");
    let banned: BTreeSet<&str> = lists
        .lines()
        .flat_map(|line| quoted(line, "{ crate = ", ","))
        .collect();
    let skipped = quoted(lists, "skip = [", "]\n");
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let Some(source) = &package.source else {
            continue;
        };
        let mut find = |what: String| {
            findings.push(Finding {
                file: PathBuf::from(LISTS),
                line: 0,
                message: format!("{} {}: {what}", package.name, package.version),
            });
        };
        let license = package.license.as_deref().unwrap_or_default();
        if !is_allowed(license, &allowed) {
            find(format!("its licence '{license}' is not one of the allowed"));
        }
        if banned.contains(package.name.as_str()) {
            find("it is banned".to_owned());
        }
        if source != REGISTRY {
            find(format!("it comes from {source}"));
        }
        if !skipped.contains(format!("{}@{}", package.name, package.version).as_str()) {
            let versions = versions.entry(&package.name).or_default();
            versions.insert(&package.version);
        }
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let versions: Vec<&str> = versions.iter().copied().collect();
        findings.push(Finding {
            file: PathBuf::from(LISTS),
            line: 0,
            message: format!(
                "{name} has versions {}: take one, or skip one with a reason",
                versions.join(" and ")
            ),
        });
    }
    findings
}

/// Returns the quoted strings between `begin` and the next `end`.
fn quoted<'a>(text: &'a str, begin: &str, end: &str) -> BTreeSet<&'a str> {
    let list = text
        .split_once(begin)
        .and_then(|(_, rest)| rest.split_once(end));
    let list = list.map_or("", |(list, _)| list);
    list.lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .flat_map(|line| line.split('"').skip(1).step_by(2))
        .collect()
}

/// Returns true if these licences satisfy the expression. `A/B`, in old manifests, is `A OR B`.
fn is_allowed(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let met = any(&mut words, allowed);
    met && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// Parses `A AND B OR C`: AND binds closer.
fn any(words: &mut Words<'_>, allowed: &BTreeSet<&str>) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Words<'_>, allowed: &BTreeSet<&str>) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

/// Parses a name, a name WITH an exception, or an expression in brackets.
fn one(words: &mut Words<'_>, allowed: &BTreeSet<&str>) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let met = any(words, allowed);
        return words.next_if_eq(&")").is_some() && met;
    }
    let mut name = words.next().unwrap_or_default().to_owned();
    if words.next_if_eq(&"WITH").is_some() {
        name = format!("{name} WITH {}", words.next().unwrap_or_default());
    }
    allowed.contains(name.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEXT: &str = "[licenses]\nallow = [\n \"MIT\",\n \"Zlib\", # \"GPL-3.0\"\n \
                        \"Apache-2.0 WITH LLVM-exception\",\n]\n[bans]\ndeny = [\n \
                        { crate = \"openssl-sys\", reason = \"x\" },\n]\n";

    #[test]
    fn an_expression_is_met_by_what_is_allowed() {
        let allowed = quoted(TEXT, "allow = [", "]");
        for met in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0 OR MIT",
            "GPL-3.0/MIT",
            "(MIT OR GPL-3.0) AND Zlib",
            "GPL-3.0 AND Zlib OR MIT",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
        ] {
            assert!(is_allowed(met, &allowed), "{met}");
        }
        for unmet in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT OR Zlib) AND GPL-3.0",
            "Apache-2.0",
            "MIT Zlib",
            "(MIT",
        ] {
            assert!(!is_allowed(unmet, &allowed), "{unmet}");
        }
    }

    #[test]
    fn a_second_version_needs_a_reason() {
        let package = |version: &str| json!({"name": "a", "version": version, "source": REGISTRY, "license": "MIT"});
        let metadata = json!({"packages": [package("1.0.0"), package("2.0.0")]});
        let metadata = serde_json::from_value(metadata).unwrap();
        let found = check(&metadata, TEXT);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].message.contains("1.0.0 and 2.0.0"), "{found:?}");
        let skip = "skip = [\n { crate = \"a@1.0.0\", reason = \"b asks for it\" },\n]\n";
        assert_eq!(check(&metadata, &format!("{TEXT}{skip}")), []);
    }

    #[test]
    fn what_is_not_allowed_is_named() {
        let package = |name: &str, source: Option<&str>, license: Option<&str>| json!({"name": name, "version": "1.0.0", "source": source, "license": license});
        let metadata = json!({"packages": [
            package("fine", Some(REGISTRY), Some("MIT")),
            package("ours", None, Some("Proprietary")),
            package("none", Some(REGISTRY), None),
            package("openssl-sys", Some(REGISTRY), Some("MIT")),
            package("elsewhere", Some("git+https://example.com/x"), Some("MIT")),
        ]});
        let metadata = serde_json::from_value(metadata).unwrap();
        let found = check(&metadata, TEXT);
        let named: Vec<_> = found
            .iter()
            .map(|finding| finding.message.split(' ').next().unwrap())
            .collect();
        assert_eq!(named, ["none", "openssl-sys", "elsewhere"]);
    }
}
