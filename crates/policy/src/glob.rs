//! Wildcard patterns for names in configurations, such as `NCCL_*`.

use serde::Deserialize;
use wildmatch::WildMatch;

/// A pattern: `*` matches any text and `?` any single character.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "String")]
pub struct Glob(WildMatch);

// === impl Glob ===

impl Eq for Glob {}

impl From<String> for Glob {
    fn from(pattern: String) -> Self {
        Self(WildMatch::new(&pattern))
    }
}

impl From<&str> for Glob {
    fn from(pattern: &str) -> Self {
        Self(WildMatch::new(pattern))
    }
}

impl Glob {
    /// Returns whether the pattern matches the whole of `name`. The time is at most proportional to
    /// the product of both lengths.
    pub fn matches(&self, name: &str) -> bool {
        self.0.matches(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text_and_a_question_mark_one_character() {
        for (pattern, name, fits) in [
            ("NCCL_*", "NCCL_DEBUG", true),
            ("NCCL_*", "NCCL_", true),
            ("NCCL_*", "MY_NCCL_DEBUG", false),
            ("LD_LIBRARY_PATH", "LD_LIBRARY_PATH", true),
            ("LD_LIBRARY_PATH", "LD_LIBRARY_PATH2", false),
            ("*topo*", "nccl-topo-file", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-d", false),
            ("eth?", "eth0", true),
            ("eth?", "eth", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(Glob::from(pattern).matches(name), fits, "{pattern} {name}");
        }
    }
}
