//! Shell quoting for commands that are printed for people to paste.

/// Returns the text as one shell word, quoted only if necessary.
pub fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    // In zsh, a leading `=` expands to the path of a program.
    if !text.is_empty() && !text.starts_with('=') && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_a_shell_are_quoted_where_they_need_it() {
        for (text, expected) in [
            ("a-b/c.d:e", "a-b/c.d:e"),
            ("k=v", "k=v"),
            ("=ls", "'=ls'"),
            ("a b", "'a b'"),
            ("it's", "'it'\\''s'"),
            ("$(x)", "'$(x)'"),
            ("", "''"),
        ] {
            assert_eq!(word(text), expected);
        }
    }
}
