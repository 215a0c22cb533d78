//! Every command has examples, and clap accepts them.

use clap::{CommandFactory as _, Parser as _};

use super::Cli;

/// Returns gpuwarden's own commands in an example, split into words as a shell does. Commands
/// behind a pipe or a redirection are left out.
fn calls(example: &str) -> Vec<Vec<String>> {
    let mut calls = vec![Vec::new()];
    let mut word = String::new();
    let mut quote = None;
    for letter in example.chars().chain([' ']) {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => quote = Some(letter),
            (None, ' ' | '|' | '(' | ')' | '<' | '>') => {
                let finished = std::mem::take(&mut word);
                let call = calls.last_mut().unwrap();
                call.extend((!finished.is_empty()).then_some(finished));
                if letter != ' ' {
                    calls.push(Vec::new());
                }
            }
            _ => word.push(letter),
        }
    }
    calls.retain(|call| call.first().is_some_and(|word| word == "gpuwarden"));
    calls
}

fn check(command: &clap::Command, path: &[&str]) {
    if command.is_hide_set() {
        return;
    }
    let name = path.join(" ");
    let help = command
        .get_after_help()
        .map_or_else(String::new, ToString::to_string);
    let examples: Vec<&str> = match help.strip_prefix("Examples:\n") {
        Some(examples) => examples.lines().collect(),
        None => panic!("{name} --help has no examples"),
    };
    let mut own = 0;
    for call in examples.iter().flat_map(|example| calls(example)) {
        if let Err(error) = Cli::try_parse_from(&call) {
            panic!("example of {name}: {call:?}: {error}");
        }
        own += usize::from(call.iter().take(path.len()).eq(path));
    }
    assert!(own > 0, "no example of {name} calls it: {examples:?}");
    for inner in command.get_subcommands() {
        check(inner, &[path, &[inner.get_name()]].concat());
    }
}

#[test]
fn every_command_has_examples_and_takes_them() {
    let root = Cli::command();
    for command in root.get_subcommands() {
        check(command, &["gpuwarden", command.get_name()]);
    }
    assert_eq!(
        calls("journalctl -kf | gpuwarden pause --reason 'a | b' > \"x y\"")[..],
        [["gpuwarden", "pause", "--reason", "a | b"].map(str::to_owned)]
    );
}
