//! Validation of Kubernetes names and values: of labels, annotations, taints and objects.
//!
//! Every configuration is checked against these rules when it is read. Otherwise the API server
//! would refuse a name much later: in the patch that takes a broken node out of service.

use crate::keys;

/// Longest value of a label or taint, longest name after the prefix of a key, and longest DNS
/// label (bytes).
pub const MAX_LABEL_BYTES: usize = 63;
/// Longest prefix of a key, and longest name of an object (bytes).
pub const MAX_SUBDOMAIN_BYTES: usize = 253;
/// Valid effects of a taint.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// Most characters of a name that are shown: more would fill a terminal without helping to find
/// it.
const SHOWN: usize = 100;

/// Explanation of the letters allowed in the name of a key and in a value.
const LETTERS: &str = "letters, digits, '-', '_' and '.' belong in it";
/// Explanation of the letters allowed in names of objects.
const SMALL_LETTERS: &str = "small letters, digits and '-' belong in it";

/// Reason why Kubernetes refuses a name or a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} {why}", shown(text))]
pub struct WrongName {
    /// Rejected name or value.
    pub text: String,
    /// Explanation of the rule that is broken.
    pub why: String,
}

/// Checks the key of a label, annotation or taint, or the name of an extended resource: a name
/// with or without a prefix, `example.com/gpu`.
pub fn label_key(key: &str) -> Result<(), WrongName> {
    let checked = match key.split_once('/') {
        None => letters(key, "the name"),
        Some((prefix, name)) => parts(prefix, "the prefix before '/'")
            .and_then(|()| letters(name, "the name behind '/'")),
    };
    checked.map_err(|why| wrong(key, format!("is no key that Kubernetes takes: {why}")))
}

/// Checks the value of a label or taint. May be empty.
pub fn label_value(value: &str) -> Result<(), WrongName> {
    if value.is_empty() {
        return Ok(());
    }
    letters(value, "it")
        .map_err(|why| wrong(value, format!("is no value that Kubernetes takes: {why}")))
}

/// Checks the prefix of a cordon's labels, such as `example.com/`. May be empty.
pub fn label_prefix(prefix: &str) -> Result<(), WrongName> {
    // Longest of the names that follow the prefix.
    let name = keys::UNCORDON_TIMESTAMP;
    label_key(&format!("{prefix}{name}"))
        .map_err(|error| wrong(prefix, format!("cannot stand before labels: {error}")))
}

/// Checks the effect of a taint.
pub fn taint_effect(effect: &str) -> Result<(), WrongName> {
    if EFFECTS.contains(&effect) {
        return Ok(());
    }
    let why = "is no effect of a taint; it is NoSchedule, PreferNoSchedule or NoExecute";
    Err(wrong(effect, why.to_owned()))
}

/// Checks the name of an object, or an API group: a DNS subdomain.
pub fn object_name(name: &str) -> Result<(), WrongName> {
    parts(name, "it").map_err(|why| wrong(name, format!("is no name of an object: {why}")))
}

/// Checks the name of a namespace, a Service, a container or a volume: a DNS label.
pub fn dns_label(name: &str) -> Result<(), WrongName> {
    part(name, "it", MAX_LABEL_BYTES).map_err(|why| wrong(name, format!("is no name: {why}")))
}

/// Returns a name in quotes, cut if it is long.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}

fn wrong(text: &str, why: String) -> WrongName {
    let text = text.to_owned();
    WrongName { text, why }
}

/// Checks a name that may have letters of either case.
fn letters(name: &str, which: &str) -> Result<(), String> {
    let inner = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    checked(name, which, MAX_LABEL_BYTES, inner, LETTERS)
}

/// Checks a DNS label of at most `most` bytes.
fn part(name: &str, which: &str, most: usize) -> Result<(), String> {
    let inner =
        |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    checked(name, which, most, inner, SMALL_LETTERS)
}

/// Checks a DNS subdomain. Kubernetes limits the length of the whole, not of its parts.
fn parts(name: &str, which: &str) -> Result<(), String> {
    if name.len() > MAX_SUBDOMAIN_BYTES {
        return Err(too_long(name, which, MAX_SUBDOMAIN_BYTES));
    }
    let which = if name.contains('.') {
        format!("each part between the dots of {which}")
    } else {
        which.to_owned()
    };
    name.split('.')
        .try_for_each(|one| part(one, &which, MAX_SUBDOMAIN_BYTES))
}

fn checked(
    name: &str,
    which: &str,
    most: usize,
    inner: impl Fn(char) -> bool,
    belongs: &str,
) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("{which} is empty"));
    }
    if name.len() > most {
        return Err(too_long(name, which, most));
    }
    if let Some(letter) = name.chars().find(|letter| !inner(*letter)) {
        return Err(format!("{which} has {letter:?}; {belongs}"));
    }
    if !name.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        || !name.ends_with(|letter: char| letter.is_ascii_alphanumeric())
    {
        return Err(format!("{which} begins and ends with a letter or digit"));
    }
    Ok(())
}

fn too_long(name: &str, which: &str, most: usize) -> String {
    let found = name.len();
    format!("{which} has {found} bytes, at most {most} are taken")
}

#[cfg(test)]
mod tests {
    use super::*;

    type Check = fn(&str) -> Result<(), WrongName>;

    #[test]
    fn names_are_judged_as_kubernetes_judges_them() {
        let n = |count: usize| "n".repeat(count);
        let (longest, long) = (n(63), n(64));
        let domain = format!("{longest}.{longest}.{longest}.{}", n(61));
        let keys: (Check, Vec<String>, Vec<(String, &str)>) = (
            label_key,
            vec![
                "gpu".into(),
                "Gpu_1.health-x".into(),
                "example.com/gpu".into(),
                "7/7".into(),
                format!("{domain}/{longest}"),
            ],
            vec![
                (String::new(), "the name is empty"),
                (
                    "example.com/gpu health".into(),
                    "behind '/' has ' '; letters",
                ),
                ("Example.com/gpu".into(), "has 'E'; small letters"),
                ("example..com/gpu".into(), "is empty"),
                ("example.com/".into(), "behind '/' is empty"),
                ("/gpu".into(), "the prefix before '/' is empty"),
                ("a/b/c".into(), "has '/'"),
                ("-gpu".into(), "begins and ends with"),
                ("example.com/gpu.".into(), "begins and ends with"),
                ("größe".into(), "has 'ö'"),
                (format!("example.com/{long}"), "has 64 bytes, at most 63"),
                (format!("{domain}n/gpu"), "has 254 bytes, at most 253"),
            ],
        );
        let values: (Check, Vec<String>, Vec<(String, &str)>) = (
            label_value,
            vec![
                String::new(),
                "True".into(),
                "a_b.c-d".into(),
                longest.clone(),
            ],
            vec![
                ("not ready!".into(), "has ' '"),
                ("-".into(), "begins and ends with"),
                (long.clone(), "has 64 bytes"),
                ("a/b".into(), "has '/'"),
            ],
        );
        let prefixes: (Check, Vec<String>, Vec<(String, &str)>) = (
            label_prefix,
            vec![String::new(), "example.com/".into(), "team-".into()],
            vec![
                ("bad prefix!/".into(), "has ' '"),
                ("/".into(), "is empty"),
                ("example.com".to_owned() + "/a/", "has '/'"),
                (format!("example.com/{}", n(46)), "has 64 bytes"),
            ],
        );
        let effects: (Check, Vec<String>, Vec<(String, &str)>) = (
            taint_effect,
            EFFECTS.map(str::to_owned).to_vec(),
            vec![
                (String::new(), "it is NoSchedule"),
                ("noschedule".into(), "it is NoSchedule"),
            ],
        );
        let objects: (Check, Vec<String>, Vec<(String, &str)>) = (
            object_name,
            vec![
                "a".into(),
                "my-registry.example".into(),
                domain.clone(),
                n(253),
            ],
            vec![
                ("A b".into(), "has 'A'"),
                ("a..b".into(), "is empty"),
                ("a_b".into(), "has '_'"),
                (format!("{domain}n"), "has 254 bytes"),
                (String::new(), "is empty"),
            ],
        );
        let labels: (Check, Vec<String>, Vec<(String, &str)>) = (
            dns_label,
            vec!["gpuwarden".into(), "7".into(), longest],
            vec![
                ("a.b".into(), "has '.'"),
                ("-a".into(), "begins and ends with"),
                (long, "has 64 bytes"),
            ],
        );
        for (check, good, bad) in [keys, values, prefixes, effects, objects, labels] {
            for text in good {
                assert_eq!(check(&text), Ok(()), "{text}");
            }
            for (text, says) in bad {
                let error = check(&text).unwrap_err();
                assert_eq!(error.text, text);
                let error = error.to_string();
                assert!(
                    error.starts_with(&shown(&text)) && error.len() < 400 && error.contains(says),
                    "{error}"
                );
            }
        }
    }
}
