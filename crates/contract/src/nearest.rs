//! Suggestions for a mistyped name.

use strsim::levenshtein;

/// Most edits between the typed name and a suggestion.
const EDITS: usize = 3;

/// Returns the candidates nearest to `word`, nearest first, at most `limit`: those within three
/// edits, fewer for short words, where three edits turn any word into any other.
pub fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
    limit: usize,
) -> Vec<&'a str> {
    let (length, word) = (word.chars().count(), word.to_lowercase());
    let most = EDITS.min(length / 2);
    let mut found: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter(|known| known.chars().count().abs_diff(length) <= most)
        .map(|known| (levenshtein(&known.to_lowercase(), &word), known))
        .filter(|(distance, _)| *distance <= most)
        .collect();
    found.sort_unstable();
    found.dedup();
    found
        .into_iter()
        .take(limit)
        .map(|(_, known)| known)
        .collect()
}

/// Returns the question whether the nearest of these names was meant; `None` if none is near.
pub fn hint(word: &str, names: &[&str]) -> Option<String> {
    let nearest = nearest(word, names.iter().copied(), 1);
    nearest
        .first()
        .map(|meant| format!("did you mean '{meant}'?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_meant_is_found_and_nothing_else() {
        let nodes = ["gpu-node-7", "gpu-node-71", "gpu-node-17", "cpu-1"];
        for (word, limit, expected) in [
            ("gpu-node-07", 2, &["gpu-node-17", "gpu-node-7"][..]),
            ("gpu-nodes-7", 1, &["gpu-node-7"]),
            ("GPU-NODE-7", 1, &["gpu-node-7"]),
            ("mars", 5, &[]),
            ("c", 5, &[]),
            ("", 5, &[]),
        ] {
            assert_eq!(nearest(word, nodes, limit), expected, "{word}");
        }
    }
}
