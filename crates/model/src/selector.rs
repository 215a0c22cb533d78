//! Label selectors in the text form of Kubernetes: `app in (a, b), tier=web, !canary`.
//! `kube_core::Selector` is no alternative: it has no parser, no `>` and `<`, and no
//! validation.

use std::collections::BTreeMap;
use std::str::FromStr;

use contract::names::{self, WrongName};
use serde::{Deserialize, Deserializer};

/// Longest selector, in bytes: more than a person would write.
pub const MAX_SELECTOR_BYTES: usize = 16 * 1024;

/// A label selector. It matches if all its requirements do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

/// A label selector in the object form of Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SelectorObject {
    /// Required values, by label key.
    #[serde(deserialize_with = "nullable")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements in addition to the values.
    #[serde(deserialize_with = "nullable")]
    pub match_expressions: Vec<MatchExpression>,
}

/// A requirement of a [`SelectorObject`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatchExpression {
    /// Key of the label.
    pub key: String,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: String,
    /// Values for `In` and `NotIn`.
    #[serde(default, deserialize_with = "nullable")]
    pub values: Vec<String>,
}

/// A requirement on the label with this key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

/// Condition on the value of a label.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    /// The label exists, with any value.
    There,
    /// The label does not exist.
    Absent,
    /// The label exists and has one of these values.
    In(Vec<String>),
    /// The label does not exist, or has none of these values.
    NotIn(Vec<String>),
    /// The label's value is a number greater than this.
    Above(i64),
    /// The label's value is a number less than this.
    Below(i64),
}

/// Error of a selector that does not parse, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectorError(String);

// === impl LabelSelector ===

impl LabelSelector {
    /// Returns whether an object with these labels is selected.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|one| one.matches(labels))
    }

    /// Creates a selector of objects with all these labels. Fails if there are none.
    pub fn of_labels(labels: &BTreeMap<String, String>) -> Result<Self, SelectorError> {
        Self::try_from(&SelectorObject {
            match_labels: labels.clone(),
            match_expressions: Vec::new(),
        })
    }
}

impl TryFrom<&SelectorObject> for LabelSelector {
    type Error = SelectorError;

    /// Converts a selector with at least one requirement.
    fn try_from(object: &SelectorObject) -> Result<Self, SelectorError> {
        let checked = object.check_names();
        checked.map_err(|error| SelectorError(error.to_string()))?;
        let labels = object.match_labels.iter().map(|(key, value)| {
            let (key, test) = (key.clone(), Test::In(vec![value.clone()]));
            Ok(Requirement { key, test })
        });
        let expressions = object.match_expressions.iter().map(|one| {
            let (key, values) = (one.key.clone(), one.values.clone());
            let test = match one.operator.as_str() {
                "In" | "NotIn" if values.is_empty() => {
                    let what = format!("the operator {} needs values", one.operator);
                    return Err(SelectorError(what));
                }
                "In" => Test::In(values),
                "NotIn" => Test::NotIn(values),
                "Exists" => Test::There,
                "DoesNotExist" => Test::Absent,
                other => {
                    return Err(SelectorError(format!(
                        "the operator is {other:?}; In, NotIn, Exists and DoesNotExist are known"
                    )));
                }
            };
            Ok(Requirement { key, test })
        });
        let requirements: Vec<Requirement> = labels.chain(expressions).collect::<Result<_, _>>()?;
        if requirements.is_empty() {
            return Err(SelectorError("it is empty".to_owned()));
        }
        Ok(Self(requirements))
    }
}

impl FromStr for LabelSelector {
    type Err = SelectorError;

    /// Parses a selector with at least one requirement.
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text.len() > MAX_SELECTOR_BYTES {
            let found = text.len();
            return Err(SelectorError(format!(
                "it has {found} bytes, at most {MAX_SELECTOR_BYTES} are taken"
            )));
        }
        let mut requirements = Vec::new();
        // A comma within parentheses separates values.
        let mut within = false;
        for part in text.split(|letter| {
            within = within && letter != ')' || letter == '(';
            letter == ',' && !within
        }) {
            requirements.push(requirement(part.trim())?);
        }
        Ok(Self(requirements))
    }
}

/// Reads a list or a map that may be null, as in Kubernetes.
fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

// === impl SelectorObject ===

impl SelectorObject {
    /// Checks that all keys and values can be those of labels.
    fn check_names(&self) -> Result<(), WrongName> {
        let expressions = &self.match_expressions;
        let keys = self.match_labels.keys();
        let mut keys = keys.chain(expressions.iter().map(|one| &one.key));
        let values = self.match_labels.values();
        let mut values = values.chain(expressions.iter().flat_map(|one| &one.values));
        keys.try_for_each(|key| names::label_key(key))?;
        values.try_for_each(|value| names::label_value(value))
    }
}

// === impl Requirement ===

impl Requirement {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match &self.test {
            Test::There => value.is_some(),
            Test::Absent => value.is_none(),
            Test::In(values) => value.is_some_and(|value| values.contains(value)),
            Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            Test::Above(limit) => number().is_some_and(|number| number > *limit),
            Test::Below(limit) => number().is_some_and(|number| number < *limit),
        }
    }
}

fn requirement(text: &str) -> Result<Requirement, SelectorError> {
    let wrong = |what: &str| SelectorError(format!("{text:?}: {what}"));
    if text.is_empty() {
        return Err(SelectorError(
            "a requirement is empty; write one such as app=web".to_owned(),
        ));
    }
    let (name, test) = if let Some(name) = text.strip_prefix('!') {
        (name, Test::Absent)
    } else if let Some((left, values)) = text.split_once('(') {
        let values = values
            .strip_suffix(')')
            .ok_or_else(|| wrong("a parenthesis is not closed"))?;
        let values: Vec<String> = values.split(',').map(|one| one.trim().to_owned()).collect();
        let (name, word) = left
            .trim()
            .rsplit_once(char::is_whitespace)
            .ok_or_else(|| wrong("KEY in (A, B) belongs here"))?;
        match word {
            "in" => (name, Test::In(values)),
            "notin" => (name, Test::NotIn(values)),
            _ => return Err(wrong("expected in or notin before the parenthesis")),
        }
    } else if let Some((name, value)) = text.split_once("!=") {
        (name, Test::NotIn(vec![value.trim().to_owned()]))
    } else if let Some((name, value)) = text.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        (name, Test::In(vec![value.trim().to_owned()]))
    } else if let Some((name, limit)) = text.split_once(['>', '<']) {
        let limit = limit.trim().parse();
        let limit = limit.map_err(|_| wrong("expected a whole number after > or <"))?;
        let above = text.contains('>');
        (
            name,
            if above {
                Test::Above(limit)
            } else {
                Test::Below(limit)
            },
        )
    } else {
        (text, Test::There)
    };
    let key = name.trim();
    names::label_key(key).map_err(|error| wrong(&error.to_string()))?;
    if let Test::In(values) | Test::NotIn(values) = &test {
        let checked = values
            .iter()
            .try_for_each(|value| names::label_value(value));
        checked.map_err(|error| wrong(&error.to_string()))?;
    }
    let key = key.to_owned();
    Ok(Requirement { key, test })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_selected_as_kubernetes_does() {
        let labels = [("app", "web"), ("tier", "3"), ("example.com/gpu", "")];
        let labels: BTreeMap<String, String> = labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        for (text, matches) in [
            ("app", true),
            ("!app", false),
            ("!other", true),
            ("app=web", true),
            ("app == web", true),
            ("app=db", false),
            ("app!=db", true),
            ("app!=web", false),
            ("other!=web", true),
            ("app in (db, web)", true),
            ("app in (db,cache)", false),
            ("other in (web)", false),
            ("app notin (db)", true),
            ("app notin(web)", false),
            ("other notin (web)", true),
            ("example.com/gpu=", true),
            ("tier>2", true),
            ("tier>3", false),
            ("tier<4", true),
            ("app<4", false),
            ("app in (db,web),tier=3,!other", true),
            ("app in (db,web),tier=3,other", false),
        ] {
            let selector: LabelSelector = text.parse().unwrap();
            assert_eq!(selector.matches(&labels), matches, "{text}");
        }
    }

    #[test]
    fn the_object_form_selects_like_the_text() {
        let expression = |key: &str, operator: &str, values: &[&str]| MatchExpression {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: values.iter().map(|one| (*one).to_owned()).collect(),
        };
        let object = SelectorObject {
            match_labels: [("tier".to_owned(), "3".to_owned())].into(),
            match_expressions: vec![
                expression("app", "In", &["db", "web"]),
                expression("zone", "NotIn", &["a"]),
                expression("gpu", "Exists", &[]),
                expression("canary", "DoesNotExist", &[]),
            ],
        };
        let text = "tier=3,app in (db,web),zone notin (a),gpu,!canary";
        assert_eq!(LabelSelector::try_from(&object), text.parse());
        for (one, says) in [
            (expression("app", "Like", &["a"]), "the operator is"),
            (expression("app", "In", &[]), "needs values"),
            (expression("app", "In", &["we,b"]), "no value"),
            (expression("-app", "Exists", &[]), "no key"),
        ] {
            let object = SelectorObject {
                match_expressions: vec![one],
                ..SelectorObject::default()
            };
            let error = LabelSelector::try_from(&object).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let empty = LabelSelector::try_from(&SelectorObject::default());
        assert!(empty.is_err());
    }

    #[test]
    fn what_is_no_selector_is_refused_and_says_why() {
        for (text, says) in [
            ("", "empty"),
            ("app=web,", "empty"),
            ("app in (web", "not closed"),
            ("app of (web)", "in or notin"),
            ("in (web)", "belongs here"),
            ("-app", "no key"),
            ("Example.com/app", "no key"),
            ("app=we b", "no value"),
            ("app in (a,-)", "no value"),
            ("tier>high", "whole number"),
            (&"a".repeat(MAX_SELECTOR_BYTES + 1), "bytes"),
        ] {
            let error = text.parse::<LabelSelector>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
