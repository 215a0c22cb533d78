//! Checks the Markdown pages: links within the repository lead somewhere, and the paths of source
//! files that a page names exist.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{Finding, relative};

/// Pages that name files by room: `fleet/look.rs` is `crates/fleet/src/look.rs`. A path beside
/// another one may start in a directory of that one.
const BY_ROOM: [&str; 3] = ["ARCHITECTURE.md", "docs/simulation.md", "docs/where.md"];

/// The page whose rows are single lines, at most [`MAX_ROW`] characters long.
const ROWS: &str = "docs/where.md";
const MAX_ROW: usize = 300;

/// Directories at the root, with which a path begins that is checked in every page.
const TREES: [&str; 10] = [
    "bench", "crates", "deploy", "docs", "examples", "fakes", "fuzz", "proto", "testkit", "xtask",
];

/// Endings of the paths that are checked.
const ENDINGS: [&str; 8] = ["/", ".rs", ".tsv", ".toml", ".yaml", ".js", ".proto", ".md"];

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut pages = BTreeMap::new();
    read_pages(root, root, &mut pages)?;
    let mut findings = Vec::new();
    for (file, text) in &pages {
        let mut find = |line: usize, message: String| {
            findings.push(Finding {
                file: file.clone(),
                line,
                message,
            });
        };
        for (line, target) in links(text) {
            if let Err(error) = follow(root, file, &target, &pages) {
                find(line, error);
            }
        }
        let by_room = BY_ROOM.iter().any(|page| file == Path::new(page));
        for (line, error) in missing_paths(root, text, by_room) {
            find(line, error);
        }
        if file == Path::new(ROWS) {
            for (line, row) in (1..).zip(text.lines()) {
                let length = row.chars().count();
                if length > MAX_ROW {
                    find(line, format!("{length} characters, {MAX_ROW} at most"));
                }
            }
        }
    }
    Ok(findings)
}

/// Reads all pages below `dir` except build outputs and hidden directories.
fn read_pages(
    dir: &Path,
    root: &Path,
    pages: &mut BTreeMap<PathBuf, String>,
) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                read_pages(&path, root, pages)?;
            }
        } else if path.extension().is_some_and(|it| it == "md") {
            let text =
                fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            pages.insert(relative(&path, root), text);
        }
    }
    Ok(())
}

/// Returns the targets of the links in a page, with their lines, without those of code blocks and
/// those to other sites.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for rest in text.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            if !target.contains("://") && !target.starts_with("mailto:") {
                found.push((line, target.to_owned()));
            }
        }
    }
    found
}

/// Returns an error unless the target exists, with its heading if it names one.
fn follow(
    root: &Path,
    page: &Path,
    target: &str,
    pages: &BTreeMap<PathBuf, String>,
) -> Result<(), String> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let file = if path.is_empty() {
        page.to_owned()
    } else {
        normal(&page.parent().unwrap_or(Path::new("")).join(path))
    };
    if !root.join(&file).exists() && !pages.contains_key(&file) {
        return Err(format!("the link {target} leads to no file"));
    }
    if anchor.is_empty() {
        return Ok(());
    }
    let text = pages.get(&file).map_or("", String::as_str);
    if headings(text).iter().any(|heading| heading == anchor) {
        Ok(())
    } else {
        Err(format!("the link {target} leads to no heading"))
    }
}

/// Returns the path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                normal.pop();
            }
            std::path::Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// Returns the anchors of a page's headings, as GitHub makes them.
fn headings(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        let title = line.trim_start_matches('#');
        if in_code || title == line || !title.starts_with(' ') {
            continue;
        }
        let anchor: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|sign| sign.is_alphanumeric() || [' ', '-', '_'].contains(sign))
            .map(|sign| if sign == ' ' { '-' } else { sign })
            .collect();
        // The second heading of a name gets "-1".
        let same = found.iter().filter(|it| **it == anchor).count();
        found.push(match same {
            0 => anchor,
            count => format!("{anchor}-{count}"),
        });
    }
    found
}

/// Returns what is wrong with the paths of a page. Without `by_room`, only paths from the root are
/// checked. In the forms "`name`, `name` in `file.rs`" and "`name` (`file.rs`)" the file has to
/// contain the names.
fn missing_paths(root: &Path, text: &str, by_room: bool) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut near: Vec<PathBuf> = Vec::new();
    let mut in_code = false;
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim_start().starts_with("```") {
            in_code = !in_code;
            continue;
        }
        // A row of a table and a paragraph are each a place of their own.
        if text.is_empty() || text.starts_with('|') {
            near.clear();
        }
        let mut names: Vec<&str> = Vec::new();
        for (token, between) in tokens(text, in_code) {
            if !is_path(token) {
                if between != ", " {
                    names.clear();
                }
                if is_name(token) {
                    names.push(token);
                }
                continue;
            }
            let mut names = std::mem::take(&mut names);
            if ![" in ", " (", " (e2e "].contains(&between) {
                names.clear();
            }
            let first = token.split('/').next().unwrap_or_default();
            if !by_room && !TREES.contains(&first) {
                continue;
            }
            let e2e = by_room && text.contains("e2e");
            let Some(path) = resolve(root, token, by_room, e2e, &near) else {
                found.push((line, format!("{token} does not exist")));
                continue;
            };
            let source = if names.is_empty() {
                String::new()
            } else {
                fs::read_to_string(&path).unwrap_or_default()
            };
            for name in names {
                if !source.contains(name.rsplit("::").next().unwrap_or(name)) {
                    found.push((line, format!("{token} has no '{name}'")));
                }
            }
            near.splice(0..0, [path.with_extension("")]);
            let parents = path.ancestors().skip(1);
            let inside = parents.take_while(|dir| *dir != root && !dir.ends_with("crates"));
            near.splice(1..1, inside.map(Path::to_owned));
        }
    }
    found
}

/// Returns what stands in backticks on a line, each with the text before it; in a code block every
/// word.
fn tokens(line: &str, in_code: bool) -> Vec<(&str, &str)> {
    if in_code {
        return line
            .split([' ', ',', '(', ')', ':'])
            .map(|word| (word, ""))
            .collect();
    }
    let mut parts = line.split('`');
    let mut found = Vec::new();
    while let (Some(between), Some(token)) = (parts.next(), parts.next()) {
        found.push((token, between));
    }
    found
}

fn is_path(token: &str) -> bool {
    let signs = |sign: char| sign.is_ascii_alphanumeric() || "_./-".contains(sign);
    ENDINGS.iter().any(|ending| token.ends_with(ending))
        && !token.starts_with(['/', '.'])
        && token.chars().all(signs)
}

fn is_name(token: &str) -> bool {
    (token.chars()).all(|sign| sign.is_ascii_alphanumeric() || sign == '_' || sign == ':')
}

fn resolve(
    root: &Path,
    token: &str,
    by_room: bool,
    e2e: bool,
    near: &[PathBuf],
) -> Option<PathBuf> {
    let mut candidates = vec![root.join(token)];
    if by_room {
        let (room, rest) = token.split_once('/').unwrap_or(("", token));
        if !room.is_empty() {
            let room = root.join("crates").join(room);
            candidates.extend([room.join("src").join(rest), room.join(rest)]);
        }
        candidates.extend(near.iter().map(|dir| dir.join(token)));
        if e2e {
            candidates.push(root.join("crates/gpuwarden/tests/e2e").join(token));
        }
    }
    candidates.into_iter().find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_files_and_headings() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.toml"), "").unwrap();
        let a = "# One\n## `b` and c, d\n## One\n[u](https://x.org/y) [v](docs/b.md#why-not)\n\
                 ```\n[no](link)\n# no heading\n```\n";
        let pages = BTreeMap::from([
            (PathBuf::from("a.md"), a.to_owned()),
            (PathBuf::from("docs/b.md"), "# Why not?\n".to_owned()),
        ]);
        assert_eq!(links(a), [(4, "docs/b.md#why-not".to_owned())]);
        assert_eq!(headings(a), ["one", "b-and-c-d", "one-1"]);
        let follow =
            |page: &str, target: &str| follow(dir.path(), Path::new(page), target, &pages).is_ok();
        assert!(follow("a.md", "docs/b.md#why-not"));
        assert!(follow("a.md", "#one-1"));
        assert!(follow("docs/b.md", "../x.toml"));
        assert!(follow("docs/b.md", "../a.md#b-and-c-d"));
        assert!(!follow("docs/b.md", "a.md"));
        assert!(!follow("a.md", "docs/b.md#why"));
    }

    #[test]
    fn paths_exist_from_the_root_by_room_and_beside_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("crates/fleet/src/stage");
        fs::create_dir_all(&inner).unwrap();
        fs::write(
            dir.path().join("crates/fleet/src/look.rs"),
            "fn decide() {}",
        )
        .unwrap();
        fs::write(inner.join("drain.rs"), "").unwrap();
        let found = |text: &str| missing_paths(dir.path(), text, true);
        let good = [
            "| why | `Look::decide` in `fleet/look.rs`, `stage/drain.rs`, `drain.rs` |",
            "`fleet/look.rs` and\n`stage/` and `/dev/kmsg`, `*.rs`",
            "```text\n  fleet/look.rs (stage/drain.rs)\n```",
            "`crates/fleet/src/look.rs`",
        ];
        for text in good {
            assert_eq!(found(text), [], "{text}");
        }
        assert_eq!(found("a\n`fleet/gone.rs`").len(), 1);
        assert_eq!(found("`fleet/look.rs`\n\n`stage/drain.rs`").len(), 1);
        for text in [
            "`choose` in `fleet/look.rs`",
            "x `choose`, `decide` (`fleet/look.rs`)",
        ] {
            let missing = [(1, "fleet/look.rs has no 'choose'".to_owned())];
            assert_eq!(found(text), missing, "{text}");
        }
        let elsewhere = |text: &str| missing_paths(dir.path(), text, false).len();
        assert_eq!(elsewhere("`fleet/gone.rs` `look.rs`"), 0);
        assert_eq!(elsewhere("`crates/fleet/src/gone.rs`"), 1);
    }
}
