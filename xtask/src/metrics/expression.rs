//! The metrics and labels that a `PromQL` expression uses. Its syntax is checked by `promtool`;
//! this only has to tell metrics from functions, keywords and labels.

use std::collections::{BTreeMap, BTreeSet};

use super::{Group, Kind};

/// Labels that Prometheus adds to every series, and the chart's scrape configuration.
const SCRAPE_LABELS: [&str; 7] = [
    "instance",
    "job",
    "namespace",
    "pod",
    "service",
    "container",
    "endpoint",
];
/// Keywords that are followed by a list of labels.
const LABEL_LISTS: [&str; 6] = [
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
];
/// Other keywords.
const KEYWORDS: [&str; 6] = ["and", "or", "unless", "bool", "offset", "start"];

/// Metrics and labels that an expression uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Uses {
    /// Each selected metric, with the labels of its selector.
    pub(super) selectors: BTreeSet<(String, Vec<String>)>,
    /// Labels by which results are grouped or matched.
    pub(super) grouped_by: BTreeSet<String>,
}

/// Series of all metrics, with their labels.
pub(super) struct Registry(BTreeMap<String, BTreeSet<String>>);

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text,
    Sign(char),
}

// === impl Uses ===

impl Uses {
    /// Returns the uses of an expression.
    pub(super) fn of(expression: &str) -> Result<Self, String> {
        let tokens = tokens(expression)?;
        let mut uses = Self::default();
        let mut at = 0;
        let sign = |at: usize| match tokens.get(at) {
            Some(Token::Sign(sign)) => Some(*sign),
            _ => None,
        };
        while let Some(token) = tokens.get(at) {
            at += 1;
            let Token::Word(word) = token else { continue };
            if LABEL_LISTS.contains(&word.as_str()) {
                if sign(at) == Some('(') {
                    let (labels, end) = labels(&tokens, at + 1, ')')?;
                    uses.grouped_by.extend(labels);
                    at = end;
                }
            } else if sign(at) == Some('{') {
                let (labels, end) = labels(&tokens, at + 1, '}')?;
                uses.selectors.insert((word.clone(), labels));
                at = end;
            } else if sign(at) != Some('(')
                && !KEYWORDS.contains(&word.as_str())
                && !is_aggregation(&tokens, at)
            {
                uses.selectors.insert((word.clone(), vec![]));
            }
        }
        Ok(uses)
    }
}

/// Returns true if the word before `at` is an aggregation such as `sum by (node) (...)`.
fn is_aggregation(tokens: &[Token], at: usize) -> bool {
    matches!(tokens.get(at), Some(Token::Word(word)) if word == "by" || word == "without")
}

/// Returns the names of labels up to `end`, and the place behind it. A name is a word behind
/// the opening bracket or a comma.
fn labels(tokens: &[Token], from: usize, end: char) -> Result<(Vec<String>, usize), String> {
    let mut names = Vec::new();
    let mut is_name = true;
    for (at, token) in tokens.iter().enumerate().skip(from) {
        match token {
            Token::Sign(sign) if *sign == end => return Ok((names, at + 1)),
            Token::Sign(',') => is_name = true,
            Token::Word(word) if is_name => {
                names.push(word.clone());
                is_name = false;
            }
            _ => {}
        }
    }
    Err(format!("a list of labels has no {end:?}"))
}

fn tokens(expression: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = expression.chars().peekable();
    while let Some(one) = rest.next() {
        match one {
            '#' => while rest.next().is_some_and(|it| it != '\n') {},
            '"' | '\'' => {
                let mut escaped = false;
                loop {
                    let Some(next) = rest.next() else {
                        return Err("a text does not end".to_owned());
                    };
                    if next == one && !escaped {
                        break;
                    }
                    escaped = next == '\\' && !escaped;
                }
                tokens.push(Token::Text);
            }
            // Grafana's variables.
            '$' => {
                while rest
                    .next_if(|it| it.is_alphanumeric() || *it == '_')
                    .is_some()
                {}
            }
            // Ranges such as [5m] and numbers such as 30m name nothing.
            '[' => while rest.next().is_some_and(|it| it != ']') {},
            '0'..='9' => {
                while rest
                    .next_if(|it| it.is_alphanumeric() || *it == '.')
                    .is_some()
                {}
            }
            _ if one.is_alphabetic() || one == '_' => {
                let mut word = String::from(one);
                let is_part = |it: &char| it.is_alphanumeric() || matches!(it, '_' | ':');
                while let Some(next) = rest.next_if(is_part) {
                    word.push(next);
                }
                tokens.push(Token::Word(word));
            }
            _ if one.is_whitespace() => {}
            _ => tokens.push(Token::Sign(one)),
        }
    }
    Ok(tokens)
}

// === impl Registry ===

impl Registry {
    /// Creates the series of all metrics, and of Prometheus' own `up`.
    pub(super) fn new(groups: &[Group]) -> Self {
        let mut series = BTreeMap::from([("up".to_owned(), BTreeSet::new())]);
        for metric in super::all(groups) {
            let name = metric.written();
            let labels: BTreeSet<String> = metric.labels.iter().cloned().collect();
            if metric.kind == Kind::Histogram {
                let mut with_bound = labels.clone();
                with_bound.insert("le".to_owned());
                series.insert(format!("{name}_bucket"), with_bound);
                series.insert(format!("{name}_sum"), labels.clone());
                series.insert(format!("{name}_count"), labels);
            } else {
                series.insert(name, labels);
            }
        }
        Self(series)
    }

    /// Returns what an expression uses and no metric has, for people.
    pub(super) fn unknown<'a>(&'a self, uses: &'a Uses) -> impl Iterator<Item = String> + 'a {
        let is_scraped = |label: &str| SCRAPE_LABELS.contains(&label);
        let selectors = uses.selectors.iter().flat_map(move |(metric, labels)| {
            let Some(known) = self.0.get(metric) else {
                return vec![format!("there is no metric {metric}")];
            };
            let unknown = labels
                .iter()
                .filter(|it| !known.contains(*it) && !is_scraped(it));
            unknown
                .map(|it| format!("{metric} has no label {it}"))
                .collect()
        });
        let metrics = uses
            .selectors
            .iter()
            .filter_map(|(metric, _)| self.0.get(metric));
        let known: BTreeSet<&String> = metrics.flatten().collect();
        let grouped = uses.grouped_by.iter();
        let grouped = grouped.filter(move |it| !known.contains(it) && !is_scraped(it));
        let grouped = grouped.map(|it| format!("none of its metrics has a label {it}"));
        selectors.chain(grouped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_told_from_functions_keywords_and_labels() {
        for (expression, metrics, grouped_by) in [
            (
                "up{job=~\".*x}.*\", instance=\"a\"} == 0",
                vec![("up", vec!["job", "instance"])],
                vec![],
            ),
            (
                "sum by (node, gpu) (rate(a_total[5m])) / on (node) group_left (x) b offset 30m",
                vec![("a_total", vec![]), ("b", vec![])],
                vec!["node", "gpu", "x"],
            ),
            (
                "histogram_quantile(0.99, sum(rate(c_bucket[5m])) by (le)) > 2 * 3600",
                vec![("c_bucket", vec![])],
                vec!["le"],
            ),
            (
                "label_replace(absent(d), \"metric\", \"e\", \"\", \"\") # f\nand on () g",
                vec![("d", vec![]), ("g", vec![])],
                vec![],
            ),
        ] {
            let uses = Uses::of(expression).unwrap();
            let own = |labels: Vec<&str>| labels.into_iter().map(str::to_owned).collect();
            let metrics = metrics
                .into_iter()
                .map(|(name, labels)| (name.to_owned(), own(labels)));
            let expected = Uses {
                selectors: metrics.collect(),
                grouped_by: grouped_by.into_iter().map(str::to_owned).collect(),
            };
            assert_eq!(uses, expected, "{expression}");
        }
        assert!(Uses::of("a{b=\"c\"").is_err());
        assert!(Uses::of("a{b=\"c}").is_err());
    }
}
