//! Tokens of Rust sources, so that a word in a comment or a string is not mistaken for code.

use std::str::FromStr as _;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Parses a source file. An error has the line of the invalid Rust.
pub(super) fn parse(source: &str) -> Result<TokenStream, (usize, String)> {
    TokenStream::from_str(source).map_err(|error| (error.span().start().line, error.to_string()))
}

/// A word or a punctuation mark, with its line. Groups are flattened; their delimiters stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) text: String,
    pub(super) line: usize,
}

/// Flattens the tokens, without attributes and without test-only items.
pub(super) fn flatten_without_tests(stream: TokenStream) -> Vec<Token> {
    let mut flat = Vec::new();
    flatten(stream, &mut flat);
    flat
}

fn flatten(stream: TokenStream, flat: &mut Vec<Token>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut rest = tokens.as_slice();
    // True from a test attribute to the end of its item.
    let mut skipping = false;
    while let Some((token, after)) = rest.split_first() {
        if let Some((attribute, after)) = attribute(rest) {
            skipping |= is_cfg_test(attribute);
            rest = after;
            continue;
        }
        rest = after;
        if skipping {
            skipping = !ends_item(token);
            continue;
        }
        let line = token.span().start().line;
        let mut push = |text: String, line| flat.push(Token { text, line });
        match token {
            TokenTree::Group(group) => {
                let (open, close) = delimiters(group);
                push(open.to_owned(), line);
                flatten(group.stream(), flat);
                let line = group.span_close().start().line;
                flat.push(Token {
                    text: close.to_owned(),
                    line,
                });
            }
            TokenTree::Literal(_) => push("literal".to_owned(), line),
            other => push(other.to_string(), line),
        }
    }
}

fn delimiters(group: &Group) -> (&'static str, &'static str) {
    match group.delimiter() {
        Delimiter::Parenthesis => ("(", ")"),
        Delimiter::Brace => ("{", "}"),
        Delimiter::Bracket => ("[", "]"),
        Delimiter::None => ("", ""),
    }
}

/// Returns the content of `#[...]` or `#![...]` if the tokens start with one, and the tokens
/// after it.
fn attribute(tokens: &[TokenTree]) -> Option<(&Group, &[TokenTree])> {
    let is = |token: &TokenTree, sign| matches!(token, TokenTree::Punct(p) if p.as_char() == sign);
    let (group, after) = match tokens {
        [hash, TokenTree::Group(group), after @ ..] if is(hash, '#') => (group, after),
        [hash, bang, TokenTree::Group(group), after @ ..] if is(hash, '#') && is(bang, '!') => {
            (group, after)
        }
        _ => return None,
    };
    (group.delimiter() == Delimiter::Bracket).then_some((group, after))
}

fn is_cfg_test(attribute: &Group) -> bool {
    let text = attribute.stream().to_string().replace(' ', "");
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// Returns true if an item, a field or a statement ends with this token.
fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(sign) => sign.as_char() == ';',
        _ => false,
    }
}

/// Returns the paths among the tokens, with line and segments. A `use` with braces yields each
/// of its paths. A single word is a path as well.
pub(super) fn paths(tokens: &[Token]) -> Vec<(usize, Vec<&str>)> {
    let mut walk = Walk {
        tokens,
        next: 0,
        found: Vec::new(),
    };
    while walk.next < tokens.len() {
        walk.path(&[]);
    }
    walk.found
}

/// Parser of paths and of `use` trees.
struct Walk<'a> {
    tokens: &'a [Token],
    next: usize,
    found: Vec<(usize, Vec<&'a str>)>,
}

impl<'a> Walk<'a> {
    fn text(&self, ahead: usize) -> &'a str {
        self.tokens
            .get(self.next + ahead)
            .map_or("", |token| token.text.as_str())
    }

    /// Parses one path from here, with `prefix` before it, or skips one token.
    fn path(&mut self, prefix: &[&'a str]) {
        let mut segments = prefix.to_vec();
        let line = self.tokens.get(self.next).map_or(0, |token| token.line);
        while is_word(self.text(0)) {
            segments.push(self.text(0));
            let more = self.text(1) == ":" && self.text(2) == ":";
            self.next += 1;
            if !more {
                self.found.push((line, segments));
                return;
            }
            self.next += 2;
            if self.text(0) == "{" {
                self.tree(&segments);
                return;
            }
        }
        // The path is followed by a turbofish or a star, or there is no path at all.
        self.found.push((line, segments));
        self.next += 1;
    }

    /// Parses `{a, b::c, d::{e}}`.
    fn tree(&mut self, prefix: &[&'a str]) {
        self.next += 1;
        while self.next < self.tokens.len() && self.text(0) != "}" {
            self.path(prefix);
        }
        self.next += 1;
    }
}

fn is_word(text: &str) -> bool {
    text.starts_with(|first: char| first.is_alphabetic() || first == '_') && text != "literal"
}

/// Returns the names of all modules that are files, `mod name;`, including those of tests.
pub(super) fn modules(stream: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut found = Vec::new();
    for window in tokens.windows(3) {
        if let [
            TokenTree::Ident(word),
            TokenTree::Ident(name),
            TokenTree::Punct(end),
        ] = window
            && word == "mod"
            && end.as_char() == ';'
        {
            found.push(name.to_string());
        }
    }
    for token in tokens {
        if let TokenTree::Group(group) = token {
            found.extend(modules(group.stream()));
        }
    }
    found
}

/// A function with its body.
pub(super) struct Function {
    pub(super) name: String,
    /// True if an attribute of the function contains the word `test`.
    pub(super) is_test: bool,
    /// Empty if the function has no body.
    pub(super) body: TokenStream,
}

/// Returns all functions, also those inside modules, functions and macros.
pub(super) fn functions(stream: TokenStream) -> Vec<Function> {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut rest = tokens.as_slice();
    let mut found = Vec::new();
    let mut is_test = false;
    while let Some((token, after)) = rest.split_first() {
        if let Some((attribute, after)) = attribute(rest) {
            is_test |= has_test(attribute.stream());
            rest = after;
            continue;
        }
        match (token, after.first()) {
            (TokenTree::Ident(word), Some(TokenTree::Ident(name))) if word == "fn" => {
                let body = match after.iter().find(|token| ends_item(token)) {
                    Some(TokenTree::Group(group)) => group.stream(),
                    _ => TokenStream::new(),
                };
                found.push(Function {
                    name: name.to_string(),
                    is_test,
                    body,
                });
            }
            (TokenTree::Group(group), _) => found.extend(functions(group.stream())),
            _ => {}
        }
        if ends_item(token) {
            is_test = false;
        }
        rest = after;
    }
    found
}

/// Returns the names of all test functions.
pub(super) fn test_functions(stream: TokenStream) -> Vec<String> {
    let tests = functions(stream).into_iter().filter(|f| f.is_test);
    tests.map(|function| function.name).collect()
}

/// Returns true for `#[test]` and `#[tokio::test(...)]`, and not for `#[cfg(test)]`.
fn has_test(attribute: TokenStream) -> bool {
    attribute
        .into_iter()
        .any(|token| matches!(token, TokenTree::Ident(word) if word == "test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> String {
        let tokens = flatten_without_tests(parse(source).unwrap());
        tokens
            .into_iter()
            .map(|token| token.text)
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn comments_strings_attributes_and_tests_are_left_out() {
        let source = r#"
            //! std::fs in the prose of a module
            #![allow(unused, reason = "std::fs")]
            /// std::fs in a doc comment
            fn f() { "std::fs"; } // std::fs
            #[cfg(test)]
            use std::fs;
            #[cfg(test)]
            #[allow(dead_code)]
            mod tests { use std::fs; }
            fn g() {}
        "#;
        assert_eq!(words(source), "fn f ( ) { literal ; } fn g ( ) { }");
    }

    #[test]
    fn lines_are_those_of_the_file() {
        let tokens = flatten_without_tests(parse("a\n\nb").unwrap());
        assert_eq!(
            tokens.last(),
            Some(&Token {
                text: "b".to_owned(),
                line: 3
            })
        );
    }

    #[test]
    fn test_functions_are_found_in_modules_and_macros() {
        let source = "
            fn helper() {}
            #[cfg(test)] mod tests {
                fn inner() {}
                #[test] fn plain() {}
                #[tokio::test(start_paused = true)] async fn on_tokio() {}
                proptest! { #[test] fn property(x in 0..3) {} }
            }
        ";
        assert_eq!(
            test_functions(parse(source).unwrap()),
            ["plain", "on_tokio", "property"]
        );
    }

    #[test]
    fn what_is_no_rust_is_an_error_with_its_line() {
        assert_eq!(parse("fn f() {\n)").unwrap_err().0, 2);
    }
}
