//! File of the classes of devices that are counted: NVSentinel's for its labeler, in TOML.

use std::collections::{BTreeMap, BTreeSet};

use contract::findings::{FileError, Findings, Format};
use contract::{keys, names};
use policy::InventoryExpression;
use serde::Deserialize;

/// Classes of NVSentinel's chart.
const BUILT_IN: &str = include_str!("classes.toml");
/// Most classes of a file. Each is evaluated at each change of a node.
const MAX_CLASSES: usize = 16;
/// Labels that classes may not write, since they have another meaning.
const OTHERS: [&str; 4] = [
    keys::DCGM_VERSION,
    keys::DRIVER_INSTALLED,
    keys::KATA_ENABLED,
    keys::HANDED_OVER_LABEL,
];

/// A class of devices.
#[derive(Clone, Debug)]
pub struct Class {
    /// Name of the class, for metrics.
    pub name: String,
    /// Label for the number of devices that a node has.
    pub current: String,
    /// Label for the number of devices that a node should have.
    pub expected: String,
    /// Labels whose values are equal on nodes that should have the same number.
    pub grouping: Vec<String>,
    /// Numbers of nodes with certain labels. The first that matches counts.
    pub overrides: Vec<Override>,
    /// Expression for the number of devices.
    pub expression: InventoryExpression,
    /// Driver of the slices that the expression sees; `None` for all drivers.
    pub driver: Option<String>,
}

/// Number of devices of nodes with certain labels.
#[derive(Clone, Debug)]
pub struct Override {
    /// Labels that a node must have.
    pub labels: BTreeMap<String, String>,
    /// Number of devices that such a node should have.
    pub count: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    enabled: Option<bool>,
    #[serde(default)]
    classes: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    name: String,
    enabled: Option<bool>,
    #[serde(default)]
    labels: LabelPair,
    #[serde(default)]
    grouping_labels: Vec<String>,
    #[serde(default)]
    expected_count_overrides: Vec<OverrideEntry>,
    #[serde(default)]
    current_expression: String,
    resource_slice_driver: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct LabelPair {
    current: String,
    expected: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct OverrideEntry {
    #[serde(default)]
    match_labels: BTreeMap<String, String>,
    count: Option<i64>,
}

/// Returns the classes of NVSentinel's chart.
pub fn built_in() -> Result<Vec<Class>, FileError> {
    parse(BUILT_IN, "the built-in classes")
}

/// Reads a file. Returns the enabled classes; none if the file is disabled as a whole. `source`
/// names the file in findings.
pub fn parse(text: &str, source: &str) -> Result<Vec<Class>, FileError> {
    let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
    if file.classes.len() > MAX_CLASSES {
        let found = file.classes.len();
        let what = format!("there are {found}, at most {MAX_CLASSES} are taken");
        findings.at_key("classes", what);
    }
    let (mut classes, mut taken) = (Vec::new(), BTreeSet::new());
    let entries = file.classes.into_iter().take(MAX_CLASSES).enumerate();
    for (index, entry) in entries {
        let path = format!("classes[{index}]");
        if !entry.name.is_empty() && !taken.insert(entry.name.clone()) {
            findings.refuse(&format!("{path}.name"), "another class has this name");
        }
        let is_enabled = entry.enabled;
        if is_enabled.is_none() {
            findings.refuse(&format!("{path}.enabled"), "write true or false");
        }
        let class = entry.class(&path, &mut findings);
        classes.extend(class.filter(|_| is_enabled == Some(true)));
    }
    findings.result(())?;
    Ok(if file.enabled == Some(false) {
        Vec::new()
    } else {
        classes
    })
}

// === impl Entry ===

impl Entry {
    fn class(self, path: &str, findings: &mut Findings<'_>) -> Option<Class> {
        let key = |name: &str| format!("{path}.{name}");
        if self.name.is_empty() {
            findings.refuse(&key("name"), "write a name, which metrics show");
        }
        let pair = [
            ("labels.current", &self.labels.current),
            ("labels.expected", &self.labels.expected),
        ];
        for (name, label) in pair {
            if OTHERS.contains(&label.as_str()) {
                findings.refuse(&key(name), "this label has another meaning");
            } else {
                findings.check(&key(name), names::label_key(label));
            }
        }
        if self.labels.current == self.labels.expected && !self.labels.current.is_empty() {
            findings.refuse(&key("labels.expected"), "the two labels must differ");
        }
        for (index, label) in self.grouping_labels.iter().enumerate() {
            let place = key(&format!("groupingLabels[{index}]"));
            findings.check(&place, names::label_key(label));
        }
        let overrides = self.expected_count_overrides.into_iter().enumerate();
        let overrides = overrides
            .filter_map(|(index, entry)| {
                entry.checked(&key(&format!("expectedCountOverrides[{index}]")), findings)
            })
            .collect();
        let compiled = InventoryExpression::compile(self.current_expression.trim());
        let expression = findings.check(&key("currentExpression"), compiled)?;
        if self.resource_slice_driver.is_some() && !expression.reads_slices {
            let what = "currentExpression does not read resourceSlices";
            findings.refuse(&key("resourceSliceDriver"), what);
        }
        Some(Class {
            name: self.name,
            current: self.labels.current,
            expected: self.labels.expected,
            grouping: self.grouping_labels,
            overrides,
            expression,
            driver: self.resource_slice_driver,
        })
    }
}

// === impl OverrideEntry ===

impl OverrideEntry {
    fn checked(self, path: &str, findings: &mut Findings<'_>) -> Option<Override> {
        for (label, value) in &self.match_labels {
            let checked = names::label_key(label).and_then(|()| names::label_value(value));
            findings.check(&format!("{path}.matchLabels"), checked);
        }
        let (most, place) = (i64::from(u32::MAX), format!("{path}.count"));
        if self.count.is_none() {
            findings.refuse(&place, "write the number of devices");
        }
        let count = findings.whole_number(&place, self.count, 0..=most, "")?;
        Some(Override {
            labels: self.match_labels,
            count: u32::try_from(count).ok()?,
        })
    }
}

// === impl Class ===

impl Class {
    /// Returns the group of a node with these labels, as NVSentinel's metrics name it. The nodes
    /// of a group should have the same number of devices.
    pub(crate) fn group(&self, labels: &BTreeMap<String, String>) -> String {
        if self.grouping.is_empty() {
            return "default".to_owned();
        }
        let value = |label: &String| labels.get(label).map_or("", String::as_str);
        let parts = self.grouping.iter();
        let parts: Vec<String> = parts
            .map(|label| format!("{label}={}", value(label)))
            .collect();
        parts.join("|")
    }

    /// Returns the number that the file gives to a node with these labels.
    pub(crate) fn override_of(&self, labels: &BTreeMap<String, String>) -> Option<u32> {
        let matches = |one: &&Override| {
            let mut wanted = one.labels.iter();
            wanted.all(|(label, value)| labels.get(label).is_some_and(|has| has == value))
        };
        self.overrides.iter().find(matches).map(|one| one.count)
    }
}

#[cfg(test)]
mod tests;
