//! Checks that `docs/metrics.md` names every metric of the product. A family without a value is
//! missing in `/metrics`, so the page has to list it.

use std::{fs, path::Path};

use anyhow::Context as _;

use super::{Finding, relative};

const PAGE: &str = "docs/metrics.md";
/// Start of a struct of metrics, which ends at a brace in the first column. Inside it, [`NAMED`]
/// precedes a metric's name.
const STRUCT: &str = "runtime::metrics! {";
const NAMED: &str = " =";
/// Calls that create a metric, followed by its name.
const REGISTERS: [&str; 8] = [
    ".register(",
    ".counter(",
    ".legacy_counter(",
    ".gauge(",
    ".float_gauge(",
    ".histogram(",
    ".family(",
    ".bounded_family(",
];

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| format!("read {PAGE}"))?;
    let mut findings = Vec::new();
    for room in fs::read_dir(root.join("crates"))? {
        check_dir(&room?.path().join("src"), root, &page, &mut findings)?;
    }
    Ok(findings)
}

fn check_dir(
    dir: &Path,
    root: &Path,
    page: &str,
    findings: &mut Vec<Finding>,
) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            check_dir(&path, root, page, findings)?;
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path)?;
            findings.extend(
                missing(&text, page)
                    .into_iter()
                    .map(|(line, name)| Finding {
                        file: relative(&path, root),
                        line,
                        message: format!("the metric {name} is not in {PAGE}"),
                    }),
            );
        }
    }
    Ok(())
}

/// Returns the metrics that a source registers outside of its tests and that the page does not
/// name. With a prefix, the page must name the metric with it.
fn missing(source: &str, page: &str) -> Vec<(usize, String)> {
    let own = source.split("#[cfg(test)]").next().unwrap_or_default();
    let mut found = Vec::new();
    let (mut registers, mut in_struct) = (false, false);
    for (line, text) in own.lines().enumerate() {
        in_struct = text == STRUCT || in_struct && text != "}";
        let text = text.trim();
        let calls: &[&str] = if in_struct { &[NAMED] } else { &REGISTERS };
        let begins = (calls.iter()).find_map(|call| text.split_once(call).map(|(_, rest)| rest));
        let name = begins.or_else(|| registers.then_some(text));
        registers = begins == Some("");
        let name = name
            .and_then(|text| text.trim_start().strip_prefix('"'))
            .and_then(|text| text.split('"').next());
        if let Some(name) = name
            && ![format!("{name}`"), format!("{name}_total`")]
                .iter()
                .any(|it| page.contains(it))
        {
            found.push((line + 1, name.to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_registered_has_to_be_on_the_page() {
        let source = "m.counter(\n    \"a_b\",\n    \"help\");\nm.family(\"c\", \"d\");\n\
                      #[cfg(test)]\nm.gauge(\"t\", \"d\");\n";
        assert_eq!(missing(source, "| `x_a_b` | `c_total`"), []);
        let all = [(2, "a_b".to_owned()), (4, "c".to_owned())];
        assert_eq!(missing(source, "a_b c"), all);
        let source = "runtime::metrics! {\n    a: Counter = \"a_b\",\n    b: Histogram =\n\
                      \"c\"([1.0]),\n}\nlet x = \"d\";\n";
        assert_eq!(missing(source, "`x_a_b` `c`"), []);
        assert_eq!(missing(source, "").len(), 2);
    }
}
