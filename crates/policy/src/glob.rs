//! Patterns of names, as the configuration has them: `NCCL_*`.

use serde::Deserialize;

/// A pattern: `*` stands for any text, `?` for one character, and all else for itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub struct Glob(Vec<char>);

// === impl Glob ===

impl From<String> for Glob {
    fn from(pattern: String) -> Self {
        Self(pattern.chars().collect())
    }
}

impl From<&str> for Glob {
    fn from(pattern: &str) -> Self {
        Self(pattern.chars().collect())
    }
}

impl Glob {
    /// Returns whether the pattern fits the whole of `name`. The time grows with the product of both
    /// lengths at most.
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut at, mut read) = (0, 0);
        // The last star, and how much of the name it has taken.
        let mut star: Option<(usize, usize)> = None;
        while read < name.len() {
            match self.0.get(at) {
                Some('*') => {
                    star = Some((at, read));
                    at += 1;
                }
                Some(wanted) if *wanted == '?' || Some(wanted) == name.get(read) => {
                    at += 1;
                    read += 1;
                }
                _ => {
                    let Some((place, taken)) = star else {
                        return false;
                    };
                    star = Some((place, taken + 1));
                    at = place + 1;
                    read = taken + 1;
                }
            }
        }
        self.0.iter().skip(at).all(|left| *left == '*')
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
