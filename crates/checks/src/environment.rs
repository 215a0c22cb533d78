//! Settings of a check: environment variables, with their allowed values.
//!
//! The names are those of the preflight configuration; the ADR's names are accepted too, with
//! lower precedence. An empty variable counts as unset.

use std::collections::BTreeMap;
use std::time::Duration;

use preflight::inject::INHERITED_VARIABLE;

/// Environment variables of a process.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<String, String>);

/// Variable with an unusable value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadVariable {
    /// The value is not allowed.
    #[error("{variable} is {value:?}; it must be {allowed}")]
    Wrong {
        /// Name of the variable.
        variable: String,
        /// Value of the variable.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// The variable is required and not set.
    #[error("{variable} is not set; it must be {allowed}")]
    Missing {
        /// Name of the variable.
        variable: String,
        /// Description of the allowed values.
        allowed: String,
    },
}

// === impl BadVariable ===

impl BadVariable {
    /// Returns the name of the variable.
    pub fn variable(&self) -> &str {
        match self {
            Self::Wrong { variable, .. } | Self::Missing { variable, .. } => variable,
        }
    }
}

// === impl Environment ===

impl Environment {
    /// Returns the variables of this process. Invalid Unicode is replaced.
    pub fn of_process() -> Self {
        let all = std::env::vars_os();
        let all = all.map(|(name, value)| {
            let text = |of: std::ffi::OsString| of.to_string_lossy().into_owned();
            (text(name), text(value))
        });
        all.collect()
    }

    /// Returns name and value of the first of these variables that is set.
    pub fn first<'a>(&'a self, names: &[&'a str]) -> Option<(&'a str, &'a str)> {
        names.iter().find_map(|name| {
            let value = self.0.get(*name)?.trim();
            (!value.is_empty()).then_some((*name, value))
        })
    }

    /// Returns the variables whose names start with `begin`.
    pub(crate) fn beginning_with(&self, begin: &str) -> BTreeMap<String, String> {
        let named = self.0.iter().filter(|(name, _)| name.starts_with(begin));
        named
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }

    /// Returns the pod's own variables that the check has inherited.
    pub(crate) fn inherited(&self) -> BTreeMap<String, String> {
        let names = self.first(&[INHERITED_VARIABLE]);
        let names = names.into_iter().flat_map(|(_, names)| names.split(','));
        names
            .filter_map(|name| Some((name.to_owned(), self.0.get(name)?.clone())))
            .collect()
    }

    /// Returns the first of these variables that is set, parsed by `parse`. `allowed` describes
    /// the accepted values.
    pub fn parsed<T>(
        &self,
        names: &[&str],
        allowed: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, BadVariable> {
        let Some((variable, value)) = self.first(names) else {
            return Ok(None);
        };
        let parsed = parse(value).ok_or_else(|| BadVariable::Wrong {
            variable: variable.to_owned(),
            value: value.to_owned(),
            allowed: allowed.to_owned(),
        })?;
        Ok(Some(parsed))
    }

    /// Returns a variable that must be set.
    pub fn required(&self, names: &[&str], allowed: &str) -> Result<String, BadVariable> {
        let found = self.first(names).map(|(_, value)| value.to_owned());
        found.ok_or_else(|| BadVariable::Missing {
            variable: names.first().copied().unwrap_or_default().to_owned(),
            allowed: allowed.to_owned(),
        })
    }

    /// Returns a boolean; false if unset.
    pub fn yes(&self, name: &str) -> Result<bool, BadVariable> {
        let value = self.parsed(&[name], "true or false", |value| {
            match value.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" => Some(true),
                "false" | "0" | "no" => Some(false),
                _ => None,
            }
        })?;
        Ok(value.unwrap_or(false))
    }

    /// Returns a whole number within a range.
    pub fn whole(
        &self,
        name: &str,
        default: u64,
        (least, most): (u64, u64),
    ) -> Result<u64, BadVariable> {
        let allowed = format!("a whole number from {least} to {most}, such as {default}");
        let number = self.parsed(&[name], &allowed, |value| {
            let number: u64 = value.parse().ok()?;
            (least..=most).contains(&number).then_some(number)
        })?;
        Ok(number.unwrap_or(default))
    }

    /// Returns a bandwidth in gigabytes per second; `None` if unset.
    pub fn bandwidth(&self, names: &[&str]) -> Result<Option<f64>, BadVariable> {
        let allowed = "a number of gigabytes a second that is not below 0, such as 150";
        self.parsed(names, allowed, |value| {
            let number: f64 = value.parse().ok()?;
            (number.is_finite() && number >= 0.0).then_some(number)
        })
    }

    /// Returns a duration above zero; `None` if unset.
    pub fn time(&self, names: &[&str]) -> Result<Option<Duration>, BadVariable> {
        let allowed = "a time above 0, in seconds or with a unit, such as 300, 300s or 10m";
        self.parsed(names, allowed, time)
    }

    /// Returns message sizes in bytes, from the smallest to the largest.
    pub fn sizes(&self, name: &str, default: &[u64]) -> Result<Vec<u64>, BadVariable> {
        let allowed = format!(
            "sizes from 4 to {MAX_MESSAGE} bytes with commas between them, such as 512M or 4G,8G"
        );
        let sizes = self.parsed(&[name], &allowed, |value| {
            let mut sizes: Vec<u64> = value.split(',').map(size).collect::<Option<_>>()?;
            sizes.sort_unstable();
            sizes.dedup();
            Some(sizes)
        })?;
        Ok(sizes.unwrap_or_else(|| default.to_vec()))
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(all: T) -> Self {
        Self(all.into_iter().collect())
    }
}

/// Largest message (bytes): a GPU has to hold two of them, and none has more than twice that.
const MAX_MESSAGE: u64 = 128 << 30;

/// Longest duration that can be set (seconds): a week.
const MAX_SECONDS: u64 = 7 * 24 * 3600;

/// Parses a duration: seconds, or numbers with units as Go writes them.
fn time(text: &str) -> Option<Duration> {
    let mut seconds = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit());
        let digits = digits.unwrap_or(rest.len());
        let number: u64 = rest.get(..digits)?.parse().ok()?;
        let behind = rest.get(digits..)?;
        let unit = behind.chars().next();
        let times = match unit {
            None if digits == text.len() => 1,
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            _ => return None,
        };
        seconds = seconds.checked_add(number.checked_mul(times)?)?;
        rest = behind.get(unit.map_or(0, char::len_utf8)..)?;
    }
    (1..=MAX_SECONDS)
        .contains(&seconds)
        .then(|| Duration::from_secs(seconds))
}

/// Parses a size as nccl-tests does: bytes, or K, M and G of 1,024.
fn size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_uppercase();
    let text = text
        .strip_suffix("IB")
        .or_else(|| text.strip_suffix('B'))
        .unwrap_or(&text);
    let (number, times) = match text.char_indices().last()? {
        (at, 'K') => (text.get(..at)?, 1 << 10),
        (at, 'M') => (text.get(..at)?, 1 << 20),
        (at, 'G') => (text.get(..at)?, 1 << 30),
        _ => (text, 1),
    };
    let bytes = number.trim().parse::<u64>().ok()?.checked_mul(times)?;
    (4..=MAX_MESSAGE).contains(&bytes).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(all: &[(&str, &str)]) -> Environment {
        let all = all.iter();
        all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn times_and_sizes_are_read_as_go_and_nccl_tests_write_them() {
        for (text, seconds) in [("300", 300), ("600s", 600), ("10m", 600), ("1h30m", 5400)] {
            assert_eq!(time(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "0",
            "-1",
            "5x",
            "m",
            "1.5h",
            "300 s",
            "10m5",
            "99999999999999999999",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
        let sizes = [
            ("4G", 4 << 30),
            ("512M", 512 << 20),
            ("8K", 8 << 10),
            ("8", 8),
            ("1GiB", 1 << 30),
        ];
        for (text, bytes) in sizes {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "0",
            "4T",
            "G",
            "-4G",
            "1.5G",
            "2",
            "999999999G",
            "18446744073709551615G",
        ] {
            assert_eq!(size(text), None, "{text}");
        }
        let several = environment(&[("MESSAGE_SIZES", "8G, 4G,4G")]);
        assert_eq!(
            several.sizes("MESSAGE_SIZES", &[1]),
            Ok(vec![4 << 30, 8 << 30])
        );
    }

    #[test]
    fn a_bad_value_is_refused_by_variable_value_and_what_is_allowed() {
        let set = environment(&[
            ("BW", "fast"),
            ("NEGATIVE", "-1"),
            ("LEVEL", "9"),
            ("SKIP", "perhaps"),
            ("TIME", "soon"),
            ("SIZES", "4G,huge"),
            ("EMPTY", " "),
        ]);
        let refusals = [
            (
                set.bandwidth(&["BW"]).map(drop),
                "BW is \"fast\"; it must be a number of gigabytes",
            ),
            (
                set.bandwidth(&["NEGATIVE"]).map(drop),
                "NEGATIVE is \"-1\"; it must be",
            ),
            (
                set.whole("LEVEL", 2, (1, 4)).map(drop),
                "LEVEL is \"9\"; it must be a whole number from 1 to 4, such as 2",
            ),
            (
                set.yes("SKIP").map(drop),
                "SKIP is \"perhaps\"; it must be true or false",
            ),
            (
                set.time(&["TIME"]).map(drop),
                "TIME is \"soon\"; it must be a time above 0",
            ),
            (
                set.sizes("SIZES", &[]).map(drop),
                "SIZES is \"4G,huge\"; it must be sizes",
            ),
            (
                set.required(&["EMPTY", "OTHER"], "a name").map(drop),
                "EMPTY is not set; it must be a name",
            ),
        ];
        for (refused, text) in refusals {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.starts_with(text), "{refused}");
        }
    }

    #[test]
    fn what_is_not_set_has_its_default_and_the_first_name_wins() {
        let set = environment(&[("SECOND", "5"), ("FIRST", "7"), ("EMPTY", "")]);
        assert_eq!(set.bandwidth(&["FIRST", "SECOND"]), Ok(Some(7.0)));
        assert_eq!(set.bandwidth(&["EMPTY", "SECOND"]), Ok(Some(5.0)));
        assert_eq!(set.bandwidth(&["EMPTY"]), Ok(None));
        assert_eq!(set.yes("EMPTY"), Ok(false));
        assert_eq!(set.whole("EMPTY", 20, (1, 100)), Ok(20));
        assert_eq!(set.sizes("EMPTY", &[4, 8]), Ok(vec![4, 8]));
    }
}
