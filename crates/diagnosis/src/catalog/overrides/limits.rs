//! The thresholds in an override file, `[gpu-limits]`, and their checks.

use std::collections::BTreeMap;

use contract::findings::Findings;
use contract::nearest::nearest;
use toml::Spanned;

use super::LimitChange;
use crate::catalog::Changed;
use crate::limits::{Field, HYSTERESES, Hysteresis, KEYS, ThresholdKey};

/// The table as read from the file.
pub(super) type Table = BTreeMap<Spanned<String>, Spanned<toml::Value>>;

pub(super) fn read(table: Table, findings: &mut Findings<'_>) -> Vec<LimitChange> {
    let mut changes = Vec::new();
    // Offset in the file and value, by key.
    let mut read: BTreeMap<&str, (usize, Option<u32>)> = BTreeMap::new();
    for (name, value) in table {
        let at = name.span().start;
        let Some(key) = ThresholdKey::named(name.get_ref()) else {
            findings.at(at, &unknown(name.get_ref()));
            continue;
        };
        let (name, given) = (key.name, value.get_ref());
        let (value, remedy) = match &key.field {
            Field::Number(range, _) => {
                let number = given.as_integer().and_then(|it| u32::try_from(it).ok());
                let (least, most) = (range.start(), range.end());
                let remedy = format!("a whole number from {least} to {most}");
                (number.filter(|number| range.contains(number)), remedy)
            }
            Field::Switch(_) => (given.as_bool().map(u32::from), "true or false".to_owned()),
        };
        read.insert(name, (at, value));
        let Some(value) = value else {
            findings.at(
                at,
                &format!("gpu-limits: {name} is {given}; write {remedy}"),
            );
            continue;
        };
        changes.push(LimitChange {
            key: name,
            value,
            changed: Changed {
                by: findings.place(at),
                reason: String::new(),
            },
        });
    }
    for Hysteresis { begins, ends, .. } in HYSTERESES {
        let begin = read.get(begins);
        let Some((at, end)) = read.get(ends) else {
            // A threshold without a given end uses its begin as the end.
            let begin = changes.iter().find(|change| change.key == begins).cloned();
            changes.extend(begin.map(|change| LimitChange {
                key: ends,
                ..change
            }));
            continue;
        };
        let Some((_, begin)) = begin else {
            findings.at(
                *at,
                &format!("gpu-limits: {ends} stands beside {begins}: give both"),
            );
            continue;
        };
        if let (Some(begin), Some(end)) = (begin, end)
            && end > begin
        {
            let what = format!(
                "gpu-limits: {ends} is {end}, above {begins}, which is {begin}: what has begun \
                 would be over at once; write {begin} or less"
            );
            findings.at(*at, &what);
        }
    }
    changes
}

/// Returns the error message for an unknown key, with a suggestion.
fn unknown(name: &str) -> String {
    let names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    let hint = match nearest(name, names.iter().copied(), 1).first() {
        Some(meant) => format!("did you mean '{meant}'?"),
        None => format!("there is {}", names.join(", ")),
    };
    format!("gpu-limits: unknown key '{name}'; {hint}")
}
