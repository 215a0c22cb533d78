//! Checks modules: siblings import each other in one direction only, and every file is a module.
//!
//! A reader of one module of a cycle has to read all of them. A module and its submodules are
//! one idea in several files, so parent and child may import each other. The children of one
//! parent, each with its submodules, may not.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{
    Finding, relative,
    sources::rust_files,
    tokens::{flatten_without_tests, modules, parse, paths},
};

/// Path of a module in its crate, from the outermost in; empty for the crate itself.
type Module = Vec<String>;

/// Imports between the children of one module: importer, imported, and the place of the import.
type Arrows = BTreeMap<String, BTreeMap<String, (PathBuf, usize)>>;

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut sources = BTreeMap::new();
    for path in rust_files(root)? {
        let source =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        sources.insert(relative(&path, root), source);
    }
    findings.extend(orphans(&sources));
    let mut crates: BTreeMap<PathBuf, BTreeMap<Module, (&Path, &str)>> = BTreeMap::new();
    for (path, source) in &sources {
        if let Some((of, module)) = module(path) {
            let files = crates.entry(of).or_default();
            files.insert(module, (path.as_path(), source.as_str()));
        }
    }
    for files in crates.values() {
        findings.extend(circles(files));
    }
    Ok(findings)
}

/// Returns the files that are not declared as a module, and therefore not compiled.
fn orphans(sources: &BTreeMap<PathBuf, String>) -> Vec<Finding> {
    let is_target = |path: &Path| {
        let directory = path.parent().and_then(Path::file_name);
        let directory = directory.and_then(|name| name.to_str()).unwrap_or_default();
        match directory {
            "src" => ["lib", "main"]
                .iter()
                .any(|name| path.ends_with(format!("{name}.rs"))),
            // The bodies and seeds of fuzz targets are modules of other crates' tests.
            "bodies" | "fuzz" | "fuzz_targets" | "generated" => true,
            "tests" => path.parent().and_then(Path::parent).is_some_and(|above| {
                sources.contains_key(&above.join("src/lib.rs"))
                    || sources.contains_key(&above.join("src/main.rs"))
            }),
            _ => false,
        }
    };
    let named = |path: &Path| {
        let owners = path.ancestors().skip(1).flat_map(|directory| {
            ["lib.rs", "main.rs"]
                .map(|name| directory.join(name))
                .into_iter()
                .chain([directory.with_extension("rs")])
        });
        // The closest module file also declares the submodules.
        let mut owners = owners.filter_map(|owner| sources.get(&owner));
        let stem = path.file_stem().unwrap_or_default();
        owners.next().is_some_and(|source| {
            let named = parse(source).map(modules).unwrap_or_default();
            named.iter().any(|name| stem == name.as_str())
        })
    };
    let orphans = sources
        .keys()
        .filter(|path| !is_target(path) && !named(path));
    orphans
        .map(|path| Finding {
            file: path.clone(),
            line: 0,
            message: "no module names this file: it is not compiled".to_owned(),
        })
        .collect()
}

/// Returns the crate and the module path of a file; `None` for a file with tests only.
fn module(path: &Path) -> Option<(PathBuf, Module)> {
    let names: Vec<&str> = path.iter().filter_map(|name| name.to_str()).collect();
    let src = names.iter().position(|name| *name == "src")?;
    let (of, inside) = names.split_at(src);
    let (file, above) = inside.get(1..)?.split_last()?;
    let mut module: Module = above.iter().map(|name| (*name).to_owned()).collect();
    match file.strip_suffix(".rs")? {
        "lib" | "main" => {}
        name => module.push(name.to_owned()),
    }
    (!module.iter().any(|name| name == "tests")).then(|| (of.iter().collect(), module))
}

/// Finds the shortest import cycle through each module of a crate, each cycle once.
fn circles(files: &BTreeMap<Module, (&Path, &str)>) -> Vec<Finding> {
    let mut arrows: BTreeMap<Module, Arrows> = BTreeMap::new();
    for (module, (path, source)) in files {
        // Invalid Rust is reported by another rule.
        let tokens = parse(source).map(flatten_without_tests).unwrap_or_default();
        for (line, segments) in paths(&tokens) {
            let Some(target) = target(module, &segments, files) else {
                continue;
            };
            let shared = module.iter().zip(&target).take_while(|(a, b)| a == b);
            let shared = shared.count();
            if let (Some(from), Some(to)) = (module.get(shared), target.get(shared)) {
                let above = module.iter().take(shared).cloned().collect();
                let arrows: &mut Arrows = arrows.entry(above).or_default();
                let arrows = arrows.entry(from.clone()).or_default();
                arrows
                    .entry(to.clone())
                    .or_insert_with(|| (path.to_path_buf(), line));
            }
        }
    }
    arrows.values().flat_map(circles_of).collect()
}

/// Returns the module that a path leads into; `None` if the path is not in this crate.
fn target(
    from: &Module,
    segments: &[&str],
    files: &BTreeMap<Module, (&Path, &str)>,
) -> Option<Module> {
    let (mut at, mut rest) = match segments.split_first()? {
        (&"crate", rest) => (Module::new(), rest),
        (&"super", _) => (from.clone(), segments),
        _ => return None,
    };
    while let Some((&"super", after)) = rest.split_first() {
        at.pop();
        rest = after;
    }
    for name in rest {
        at.push((*name).to_owned());
        if !files.contains_key(&at) {
            at.pop();
            break;
        }
    }
    Some(at)
}

fn circles_of(arrows: &Arrows) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let mut findings = Vec::new();
    for (from, to) in arrows {
        for (next, (path, line)) in to {
            let Some(mut circle) = way(arrows, next, from) else {
                continue;
            };
            let written = format!("{from} -> {}", circle.join(" -> "));
            circle.sort_unstable();
            if seen.insert(circle) {
                findings.push(Finding {
                    file: path.clone(),
                    line: *line,
                    message: format!(
                        "modules beside each other import in a circle: {written}; move what both \
                         need to where both can see it"
                    ),
                });
            }
        }
    }
    findings
}

/// Returns the shortest path along the imports, including both ends.
fn way<'a>(arrows: &'a Arrows, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut ways = vec![vec![from]];
    let mut seen = BTreeSet::from([from]);
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = *way.last()?;
            if last == to {
                return Some(way);
            }
            for next in arrows.get(last).into_iter().flat_map(BTreeMap::keys) {
                if seen.insert(next) {
                    let mut way = way.clone();
                    way.push(next);
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: BTreeMap<Module, (&Path, &str)> = files
            .iter()
            .filter_map(|(path, source)| {
                let (_, module) = module(Path::new(path))?;
                Some((module, (Path::new(*path), *source)))
            })
            .collect();
        let findings = circles(&files).into_iter();
        findings.map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn modules_beside_each_other_import_one_way() {
        let found = found(&[
            ("crates/a/src/lib.rs", "mod brake; mod node; mod session;"),
            ("crates/a/src/brake.rs", "use crate::session::Session;"),
            ("crates/a/src/node.rs", "use super::brake::Brake;"),
            (
                "crates/a/src/session/change.rs",
                "use std::fmt;\nuse crate::{node::{NodeView}, Shared};",
            ),
            ("crates/a/src/session.rs", "mod change;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        let begin = "crates/a/src/brake.rs:1: modules beside each other import in a circle: \
                     brake -> session -> node -> brake;";
        assert!(found[0].starts_with(begin), "{found:?}");
    }

    #[test]
    fn parents_children_and_tests_see_each_other() {
        let found = found(&[
            (
                "crates/a/src/lib.rs",
                "mod a; mod b; use a::A; pub use b::B;",
            ),
            ("crates/a/src/a.rs", "mod c; use super::b::B; use crate::A;"),
            ("crates/a/src/a/c.rs", "use super::super::b; use super::A;"),
            (
                "crates/a/src/b.rs",
                "#[cfg(test)] mod tests { use crate::a::A; }",
            ),
            ("crates/a/src/b/tests.rs", "use crate::a::A;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_file_that_no_module_names_is_found() {
        let sources = [
            (
                "crates/a/src/lib.rs",
                "mod a; #[cfg(test)] mod tests { mod wide; }",
            ),
            ("crates/a/src/a.rs", "#[cfg(test)] mod tests;"),
            ("crates/a/src/a/tests.rs", "mod narrow;"),
            ("crates/a/src/a/tests/narrow.rs", ""),
            ("crates/a/src/a/gone.rs", ""),
            ("crates/a/src/tests/wide.rs", ""),
            ("crates/a/tests/e2e.rs", "#[path = \"e2e/x.rs\"] mod x;"),
            ("crates/a/tests/e2e/x.rs", ""),
            ("crates/a/tests/e2e/y.rs", "mod x;"),
        ];
        let sources = sources.map(|(path, source)| (PathBuf::from(path), source.to_owned()));
        let found = orphans(&sources.into_iter().collect());
        let files: Vec<_> = found
            .iter()
            .map(|one| one.file.display().to_string())
            .collect();
        assert_eq!(files, ["crates/a/src/a/gone.rs", "crates/a/tests/e2e/y.rs"]);
    }
}
