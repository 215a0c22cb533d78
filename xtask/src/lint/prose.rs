//! Checks the prose of comments: a comment names its subject, in the usual word order.
//!
//! The rule finds only what a program can decide with certainty. Quotations, text in backticks and
//! code blocks are not prose, and common idioms such as "the order in which" are permitted.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::Context as _;
use proc_macro2::{TokenStream, TokenTree};

use super::{Finding, relative, sources::rust_files, tokens::parse};

/// Openings without a subject.
const PRONOUNS: [&str; 8] = ["It", "They", "Those", "These", "Its", "Their", "He", "She"];

/// Words after "What" and "of which" that show that no noun follows: "What type" is a property.
const CLAUSE: [&str; 36] = [
    "a", "an", "and", "anybody", "are", "be", "becomes", "can", "carries", "comes", "do", "does",
    "happens", "has", "have", "he", "is", "it", "keeps", "makes", "may", "must", "nobody", "said",
    "says", "shows", "somebody", "takes", "tells", "that", "the", "they", "this", "was", "we",
    "were",
];

/// Words after "How" that leave the subject open.
const NO_SUBJECT: [&str; 9] = [
    "he", "it", "its", "that", "their", "these", "they", "this", "those",
];

/// Words after "One" and "The same" that show that no noun follows.
const NO_NOUN: [&str; 22] = [
    "again", "as", "at", "but", "by", "for", "from", "has", "if", "in", "is", "of", "on", "that",
    "to", "until", "when", "where", "which", "who", "whose", "with",
];

/// Words after "These" and "Those" that show that no noun follows.
const VERBS: [&str; 24] = [
    "and", "are", "as", "at", "can", "come", "do", "for", "from", "go", "have", "in", "may",
    "must", "need", "of", "on", "that", "to", "were", "which", "who", "will", "with",
];

/// Words by which "It is safe to" and the like go on.
const EXPLETIVE: [&str; 6] = ["for", "if", "like", "that", "to", "whether"];

/// Prepositions of an inverted clause.
const PREPOSITIONS: [&str; 8] = ["of", "by", "for", "to", "from", "at", "in", "with"];

/// Words that commonly precede "of which", as in "the first of which".
const QUANTITIES: [&str; 18] = [
    "all", "any", "both", "each", "either", "few", "first", "half", "last", "many", "most",
    "neither", "none", "one", "second", "some", "three", "two",
];

/// Words after "any more" and "no more" that show that no noun follows.
const CONTINUATIONS: [&str; 13] = [
    "after", "and", "are", "because", "before", "but", "if", "is", "now", "once", "since", "when",
    "where",
];

const REMEDIES: [&str; 6] = ["remedy", "remedies", "mend", "mends", "mended", "mending"];

/// Kind of a comment, by its prefix.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `///` or `//!`.
    Doc,
    /// `//`.
    Plain,
}

/// A word of a comment with its punctuation.
struct Word<'a> {
    line: usize,
    text: &'a str,
}

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in rust_files(root)? {
        let file = relative(&path, root);
        let is_generated = file
            .components()
            .any(|part| part.as_os_str() == "generated");
        if is_generated {
            continue;
        }
        let source =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let found = check_source(&source).into_iter();
        findings.extend(found.map(|(line, message)| Finding {
            file: file.clone(),
            line,
            message,
        }));
    }
    Ok(findings)
}

fn check_source(source: &str) -> Vec<(usize, String)> {
    // Invalid Rust is reported by another rule.
    let strings = parse(source).map(lines_in_literals).unwrap_or_default();
    let mut findings = Vec::new();
    let mut lines = source.lines().zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        let Some((prefix, text)) = comment(line).filter(|_| !strings.contains(&number)) else {
            continue;
        };
        let mut block = vec![(number, text)];
        let same = |(line, number): &(&str, usize)| {
            !strings.contains(number) && comment(line).is_some_and(|(next, _)| next == prefix)
        };
        while let Some((line, number)) = lines.next_if(same) {
            block.extend(comment(line).map(|(_, text)| (number, text)));
        }
        let kind = if prefix == "//" {
            Kind::Plain
        } else {
            Kind::Doc
        };
        check_block(kind, &block, &mut findings);
    }
    findings
}

/// Returns the prefix and the text of a line that is a comment.
fn comment(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    let prefix = ["///", "//!", "//"]
        .into_iter()
        .find(|prefix| line.starts_with(prefix))?;
    Some((prefix, line.get(prefix.len()..).unwrap_or_default()))
}

/// Returns the lines that begin inside a string.
fn lines_in_literals(stream: TokenStream) -> BTreeSet<usize> {
    let mut lines = BTreeSet::new();
    for token in stream {
        match token {
            TokenTree::Group(group) => lines.extend(lines_in_literals(group.stream())),
            TokenTree::Literal(literal) => {
                let span = literal.span();
                lines.extend(span.start().line + 1..=span.end().line);
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
    lines
}

/// Checks a comment, paragraph by paragraph.
fn check_block(kind: Kind, block: &[(usize, &str)], findings: &mut Vec<(usize, String)>) {
    let mut is_code = false;
    let mut is_first = true;
    let mut paragraph = Vec::new();
    for (line, text) in block {
        let is_fence = text.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_fence || is_code || text.trim().is_empty() {
            check_paragraph(kind, is_first, &paragraph, findings);
            is_first &= paragraph.is_empty();
            paragraph.clear();
        } else {
            paragraph.extend(words(text).map(|text| Word { line: *line, text }));
        }
    }
    check_paragraph(kind, is_first, &paragraph, findings);
}

/// Splits a line into words. A word of code or of a quotation becomes a delimiter, with the
/// punctuation after it.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut is_foreign = false;
    text.split_whitespace().map(move |word| {
        let was_foreign = is_foreign;
        is_foreign ^= word.matches(['`', '"']).count() % 2 == 1;
        match word.rfind(['`', '"']) {
            // The delimiter is ASCII, and the punctuation follows it.
            Some(end) if !is_foreign => word.get(end..).unwrap_or_default(),
            None if !was_foreign => word,
            _ => "`",
        }
    })
}

fn check_paragraph(
    kind: Kind,
    is_first: bool,
    words: &[Word<'_>],
    findings: &mut Vec<(usize, String)>,
) {
    if let Some(first) = words.first().filter(|_| is_first) {
        let opening = match kind {
            Kind::Doc => doc_opening(words),
            Kind::Plain => plain_opening(words),
        };
        findings.extend(opening.map(|message| (first.line, message)));
    }
    for (index, word) in words.iter().enumerate() {
        let bare = bare(word).to_lowercase();
        if REMEDIES.contains(&bare.as_str()) {
            let message = format!("{bare:?}: write remediate for a node, fix for code");
            findings.push((word.line, message));
        }
        if kind == Kind::Doc {
            let inversion = inversion(words, index);
            findings.extend(inversion.map(|message| (word.line, message)));
        }
    }
}

fn doc_opening(words: &[Word<'_>]) -> Option<String> {
    let (first, second) = (bare(words.first()?), bare_at(words, 1));
    let names_nothing = match first {
        "One" => NO_NOUN.contains(&second) && !["by", "of"].contains(&second),
        "Same" => true,
        "The" => second == "same" && lacks_noun(words, 2),
        "It" => !is_expletive(words),
        _ => PRONOUNS.contains(&first),
    };
    if names_nothing {
        return Some(format!(
            "{} opens the comment: name its subject, or open with a verb as in \"Returns\"",
            quoted(words)
        ));
    }
    if first == "Has" && ["the", "a", "an", "its", "it"].contains(&second) {
        return Some(
            "\"Has\" opens the comment: name the action, as in \"Starts\" or \"Sets\"".to_owned(),
        );
    }
    let is_riddle = match first {
        "That" | "Who" => true,
        "How" => NO_SUBJECT.contains(&second),
        "Of" | "When" | "Where" => !has_comma(words),
        "What" | "Which" => CLAUSE.contains(&second),
        "Whether" => !["to", "or"].contains(&second),
        _ => false,
    };
    is_riddle.then(|| {
        format!(
            "\"{first}\" opens the comment: open with a noun or a verb, as in \"Returns\" or \
             \"True if\""
        )
    })
}

fn plain_opening(words: &[Word<'_>]) -> Option<String> {
    let (first, second) = (bare(words.first()?), bare_at(words, 1));
    let names_nothing = match first {
        "It" => !is_expletive(words),
        "These" | "Those" => VERBS.contains(&second),
        "The" => second == "same" && lacks_noun(words, 2),
        "Of" => !has_comma(words),
        "They" | "Its" | "Their" | "Who" => true,
        _ => false,
    };
    names_nothing.then(|| format!("{} opens the comment: name its subject", quoted(words)))
}

/// Returns the finding for an inverted clause that begins at a word.
fn inversion(words: &[Word<'_>], index: usize) -> Option<String> {
    let before = index
        .checked_sub(1)
        .map_or("", |before| bare_at(words, before))
        .to_lowercase();
    let (first, second) = (bare(words.get(index)?), bare_at(words, index + 1));
    let third = bare_at(words, index + 2);
    if !ends_clause(words, index) && PREPOSITIONS.contains(&first) {
        let is_inverted = match second {
            "whom" | "whose" => true,
            "what" => ["at", "by", "for"].contains(&first) && CLAUSE.contains(&third),
            "which" if first == "of" => {
                CLAUSE.contains(&third) && !QUANTITIES.contains(&before.as_str())
            }
            _ => false,
        };
        if is_inverted {
            return Some(format!(
                "\"{first} {second}\": use a plain clause that names the noun"
            ));
        }
    }
    if second == "more" && ["any", "no"].contains(&first) && ends(words, index + 1) {
        return Some(format!("\"{first} more\": write \"no longer\""));
    }
    let is_state = first == "as" && second == "it" && ["is", "was"].contains(&third);
    (is_state && ends_clause(words, index + 2)).then(|| {
        format!("\"as it {third}\": name the state, as in \"unchanged\" or \"the last state\"")
    })
}

/// Returns true for "It is safe to retry", "It seems that" and the like.
fn is_expletive(words: &[Word<'_>]) -> bool {
    let clause = words.iter().skip(2).take(5).map(bare);
    clause.into_iter().any(|word| EXPLETIVE.contains(&word))
}

/// Returns true if the clause ends after a word, or goes on without a noun.
fn ends(words: &[Word<'_>], index: usize) -> bool {
    ends_clause(words, index) || CONTINUATIONS.contains(&bare_at(words, index + 1))
}

fn ends_clause(words: &[Word<'_>], index: usize) -> bool {
    let is_last = index + 1 >= words.len();
    is_last
        || words
            .get(index)
            .is_some_and(|word| word.text.ends_with([',', '.', ';', ':', ')']))
}

/// Returns true if no noun can follow the words before `index`.
fn lacks_noun(words: &[Word<'_>], index: usize) -> bool {
    ends_clause(words, index - 1) || NO_NOUN.contains(&bare_at(words, index))
}

/// Returns true if the first sentence has a comma.
fn has_comma(words: &[Word<'_>]) -> bool {
    let end = words.iter().position(|word| word.text.ends_with('.'));
    let sentence = words.get(..end.unwrap_or(words.len())).unwrap_or_default();
    sentence.iter().any(|word| word.text.ends_with([',', ':']))
}

fn quoted(words: &[Word<'_>]) -> String {
    match words {
        [first, second, ..] if bare(first) == "The" => format!("\"The {}\"", bare(second)),
        [first, ..] => format!("\"{}\"", bare(first)),
        [] => String::new(),
    }
}

/// Returns a word without its punctuation.
fn bare<'a>(word: &Word<'a>) -> &'a str {
    word.text
        .trim_matches(|letter: char| !letter.is_alphanumeric() && !['`', '"'].contains(&letter))
}

fn bare_at<'a>(words: &[Word<'a>], index: usize) -> &'a str {
    words.get(index).map_or("", bare)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<String> {
        let found = check_source(source).into_iter();
        found.map(|(_, message)| message).collect()
    }

    #[test]
    fn riddles_are_found_in_doc_comments() {
        for text in [
            "It, as it was last reported.",
            "Their names.",
            "These end first.",
            "One that is bound.",
            "The same for a process without a directory.",
            "The same, by its path.",
            "Same as above.",
            "What tells of no node yet.",
            "Whether it is on.",
            "How it is run.",
            "Which is in use.",
            "Where the page is.",
            "Of each GPU the process that holds it.",
            "Has the pods of a node told.",
            "Returns the labels of which it consists.",
            "Returns the process by whom the GPU is held.",
            "Returns the reason for what was done.",
            "Watches a node that is not ready any more.",
            "Returns the pods that exist no more.",
            "Restores the node as it was.",
        ] {
            let found = found(&format!("/// {text}\nstruct S;"));
            assert_eq!(found.len(), 1, "{text}: {found:?}");
        }
        // A phrase may continue on the next line.
        let source = "/// Returns the labels of\n/// which it consists.\nstruct S;";
        assert_eq!(check_source(source)[0].0, 1);
        assert_eq!(found("//! Who uses this.\n\nstruct S;").len(), 1);
    }

    #[test]
    fn good_prose_is_permitted_in_doc_comments() {
        for text in [
            "Returns the labels.",
            "One record of the kernel log.",
            "One of the three states.",
            "One by one, the pods are evicted.",
            "The same port for agents and monitors.",
            "How long the janitor waits for the session.",
            "How to reach the API server.",
            "What type of message was received.",
            "Which algorithm the suite uses.",
            "Whether to accept invalid certificates.",
            "It is possible that the node is gone.",
            "Returns the file in which the position is stored.",
            "Sets the interval at which the node is polled.",
            "Works regardless of which check is used.",
            "Restores the budget as it was before the call.",
            "When the inner service returns `Pending`, starts a timeout.",
            "Has no effect on a node without GPUs.",
            "True if the pod is gone.",
            "Returns the order in which nodes are decided.",
            "Time at which the fault was reported.",
            "Returns the faults for which a node is out of service.",
            "Returns the GPUs, some of which are absent.",
            "Returns no more than ten entries.",
            "Waits until there are no more requests.",
            "Fails without any more attempts.",
            "Returns the node as it is reported by the API server.",
            "Returns a summary of what changed.",
            "Calls `as it was` and `mend`.",
            "Refuses \"of which\", and \"no more\".",
            "Returns the command that it ends with.",
        ] {
            let found = found(&format!("/// {text}\nstruct S;"));
            assert_eq!(found, [""; 0], "{text}");
        }
        let later = "/// Returns it.\n///\n/// It is empty before the first report.\nstruct S;";
        assert_eq!(found(later), [""; 0]);
        let code = "/// Example:\n///\n/// ```text\n/// of which\n/// ```\nstruct S;";
        assert_eq!(found(code), [""; 0]);
    }

    #[test]
    fn plain_comments_name_their_subject() {
        for (text, count) in [
            ("It has said why.", 1),
            ("They end first.", 1),
            ("Who asks gets it.", 1),
            ("Those of DCGM are negative.", 1),
            ("The same as one record.", 1),
            ("Of a pod that is gone.", 1),
            ("These fields are optional.", 0),
            ("It is safe to retry.", 0),
            ("The same port as before.", 0),
            ("Of two equal events, the first counts.", 0),
            ("It seems like a bug.", 0),
            ("The pods of which it consists.", 0),
        ] {
            assert_eq!(
                found(&format!("fn f() {{\n    // {text}\n}}")).len(),
                count,
                "{text}"
            );
        }
    }

    #[test]
    fn a_node_is_remediated_and_code_is_fixed() {
        for text in [
            "/// Mends a node.",
            "// The remedy is a reset.",
            "//! Mending.",
        ] {
            let found = found(&format!("{text}\n"));
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].contains("remediate"), "{found:?}");
        }
        assert_eq!(found("// Recommended amendments.\n"), [""; 0]);
    }

    #[test]
    fn text_in_strings_is_no_comment() {
        assert_eq!(found("const A: &str = \"\n// It mends.\n\";"), [""; 0]);
        let source = "const A: &str = \"\n\n\";\n// It mends.\n";
        assert_eq!(check_source(source)[0].0, 4);
    }
}
