//! The thresholds in an override file, `[gpu-limits]`, and their checks.

use std::collections::BTreeMap;

use contract::findings::Findings;

use super::LimitChange;
use crate::catalog::Changed;
use crate::limits::{Field, HYSTERESES, Hysteresis, KEYS, ThresholdKey};

/// The table as read from the file.
pub(super) type Table = BTreeMap<String, toml::Value>;

pub(super) fn read(table: Table, findings: &mut Findings<'_>) -> Vec<LimitChange> {
    let mut changes = Vec::new();
    let mut read: BTreeMap<&str, Option<u32>> = BTreeMap::new();
    for (name, given) in table {
        let path = path(&name);
        let Some(key) = ThresholdKey::named(&name) else {
            findings.unknown_key(&path, &KEYS.each_ref().map(|key| key.name));
            continue;
        };
        let (value, form) = match &key.field {
            Field::Number(range, _) => {
                let number = given.as_integer().and_then(|it| u32::try_from(it).ok());
                let (least, most) = (range.start(), range.end());
                let form = format!("a whole number from {least} to {most}");
                (number.filter(|number| range.contains(number)), form)
            }
            Field::Switch(_) => (given.as_bool().map(u32::from), "true or false".to_owned()),
        };
        read.insert(key.name, value);
        let Some(value) = value else {
            findings.refuse(&path, format_args!("write {form}"));
            continue;
        };
        changes.push(LimitChange {
            key: key.name,
            value,
            changed: Changed {
                by: findings.place_of(&path),
                reason: String::new(),
            },
        });
    }
    for Hysteresis { begins, ends, .. } in HYSTERESES {
        let begin = read.get(begins);
        let Some(end) = read.get(ends) else {
            // A threshold without a given end uses its begin as the end.
            let begin = changes.iter().find(|change| change.key == begins).cloned();
            changes.extend(begin.map(|change| LimitChange {
                key: ends,
                ..change
            }));
            continue;
        };
        let Some(begin) = begin else {
            let what = format_args!("it stands beside {begins}: give both");
            findings.at_key(&path(ends), what);
            continue;
        };
        if let (Some(begin), Some(end)) = (begin, end)
            && end > begin
        {
            let wanted = format_args!(
                "that is above {begins}, which is {begin}: what has begun would be over at once; \
                 write {begin} or less"
            );
            findings.refuse(&path(ends), wanted);
        }
    }
    changes
}

/// Returns the path of a threshold in the file.
fn path(name: &str) -> String {
    format!("gpu-limits.{name}")
}
