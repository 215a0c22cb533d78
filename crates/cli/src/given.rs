//! Commands of ours that are printed for people to paste, with the flags that the command
//! which prints them was given. Without these they would find another gpuwarden, or none.
//!
//! Which flags a command takes is asked of its own definition, so there is no list to keep.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory as _};

use crate::args::Cli;

/// The flag that says how a result is written, and nothing of where it comes from.
const OUTPUT: &str = "output";
/// Our name, as a command begins.
const PROGRAM: &str = "gpuwarden ";

/// What stood on the command line. The environment is that of a pasted command too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// The words of the command: `doctor`, `agent`.
    command: Vec<String>,
    flags: Vec<Flag>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Flag {
    /// Long name, without its dashes.
    name: String,
    /// As a shell reads it, with its value.
    text: String,
}

// === impl Given ===

impl Given {
    /// Reads what `matches` have found for `command`, which has been built for them.
    pub(crate) fn read(command: &Command, matches: &ArgMatches) -> Self {
        let (mut command, mut matches) = (command, matches);
        let mut words = Vec::new();
        while let Some((name, inner)) = matches.subcommand()
            && let Some(found) = command.find_subcommand(name)
        {
            words.push(name.to_owned());
            (command, matches) = (found, inner);
        }
        let mut flags = Vec::new();
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let Some(name) = arg.get_long().filter(|name| *name != OUTPUT) else {
                continue;
            };
            if matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let alone = arg
                .get_num_args()
                .is_some_and(|count| count.min_values() == 0);
            for value in matches.get_raw(id).into_iter().flatten() {
                let text = match value.to_str() {
                    Some("true") if alone => format!("--{name}"),
                    Some(value) if alone => format!("--{name}={}", shell_word(value)),
                    Some(value) => format!("--{name} {}", shell_word(value)),
                    None => continue, // No text, and no command to paste.
                };
                let name = name.to_owned();
                flags.push(Flag { name, text });
            }
        }
        Self {
            command: words,
            flags,
        }
    }

    /// A text with these flags in each command of ours that takes them, unless it has them.
    pub(crate) fn complete(&self, text: &str) -> String {
        let root = Cli::command();
        let mut done = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(PROGRAM) {
            let (before, after) = rest.split_at(at + PROGRAM.len());
            done.push_str(before);
            rest = after;
            let is_word = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
            let begins = before.trim_end_matches(PROGRAM).chars().next_back();
            if begins.is_some_and(is_word) {
                continue;
            }
            let (words, command, behind) = command_of(&root, rest);
            let own = behind.split(PROGRAM).next().unwrap_or_default();
            done.push_str(rest.strip_suffix(behind).unwrap_or_default());
            if self.is_about(&words) {
                for flag in self.flags.iter().filter(|flag| takes(command, &flag.name)) {
                    if !has(own, &flag.name) {
                        done.push(' ');
                        done.push_str(&flag.text);
                    }
                }
            }
            rest = behind;
        }
        done + rest
    }

    /// Whether a command is about what ours was about: the flags of an agent are not those of
    /// its controller.
    fn is_about(&self, words: &[&str]) -> bool {
        let own: Vec<&str> = self.command.iter().map(String::as_str).collect();
        !words.is_empty()
            && match (role(&own), role(words)) {
                (Some(own), Some(other)) => own == other,
                _ => true,
            }
    }
}

/// The role that a command starts or examines.
fn role<'a>(words: &[&'a str]) -> Option<&'a str> {
    match *words {
        ["doctor"] => Some("run"),
        ["doctor", role] | [role @ ("run" | "agent" | "controller")] => Some(role),
        _ => None,
    }
}

/// The words at the front of a text that are a command, the command, and what follows.
fn command_of<'a, 'b>(root: &'a Command, text: &'b str) -> (Vec<&'b str>, &'a Command, &'b str) {
    let (mut command, mut behind) = (root, text);
    let mut words = Vec::new();
    loop {
        let blank = if words.is_empty() { "" } else { " " };
        let next = behind.strip_prefix(blank).unwrap_or_default();
        let end = next.find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let (word, rest) = next.split_at(end.unwrap_or(next.len()));
        match command.find_subcommand(word) {
            Some(found) => (command, behind) = (found, rest),
            None => return (words, command, behind),
        }
        words.push(word);
    }
}

fn takes(command: &Command, name: &str) -> bool {
    command
        .get_arguments()
        .any(|arg| arg.get_long() == Some(name))
}

/// Whether a command has the flag already.
fn has(text: &str, name: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-');
    text.split("--")
        .any(|part| part.strip_prefix(name).is_some_and(ends))
}

/// A word for a shell, as it is where it needs no quotes.
pub(crate) fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(line: &[&str]) -> Given {
        let mut command = Cli::command();
        let matches = command.try_get_matches_from_mut(line).unwrap();
        Given::read(&command, &matches)
    }

    #[test]
    fn printed_commands_get_the_flags_that_they_take() {
        let why_not = [
            "gpuwarden",
            "why-not",
            "n1",
            "--data-dir",
            "/a b",
            "--config",
            "c.toml",
            "-o",
            "json",
        ];
        let server = ["gpuwarden", "why-not", "--server", "http://h:1"];
        let doctor = [
            "gpuwarden",
            "doctor",
            "--data-dir=/d",
            "--socket",
            "/s",
            "--quarantine",
            "--dry-run",
            "false",
            "--namespace",
            "gw",
            "--kubeconfig",
            "k",
            "--catalog",
            "x",
            "--catalog",
            "y",
        ];
        let agent = ["gpuwarden", "doctor", "agent", "--config", "a.toml"];
        for (line, text, expected) in [
            (
                &why_not[..],
                "`gpuwarden explain n1` tells, and gpuwarden doctor",
                "`gpuwarden explain --config c.toml --data-dir '/a b' n1` tells, and gpuwarden \
                 doctor --config c.toml --data-dir '/a b'",
            ),
            (
                &why_not,
                "gpuwarden run --quarantine without --dry-run",
                "gpuwarden run --config c.toml --data-dir '/a b' --quarantine without --dry-run",
            ),
            (
                &why_not,
                "gpuwarden resume",
                "gpuwarden resume --config c.toml",
            ),
            (
                &server,
                "gpuwarden status says; gpuwarden doctor",
                "gpuwarden status --server http://h:1 says; gpuwarden doctor",
            ),
            (
                &doctor,
                "gpuwarden run, or systemctl start gpuwarden",
                "gpuwarden run --socket /s --catalog x --catalog y --data-dir /d --kubeconfig k \
                 --quarantine --dry-run=false --namespace gw, or systemctl start gpuwarden",
            ),
            (
                &doctor,
                "gpuwarden resume --namespace other",
                "gpuwarden resume --kubeconfig k --namespace other",
            ),
            (
                &doctor,
                "df /d; gpuwarden store inspect --data-dir /d",
                "df /d; gpuwarden store inspect --data-dir /d",
            ),
            (
                &doctor,
                "gpuwarden policy lint FILE",
                "gpuwarden policy lint FILE",
            ),
            // What only looks like one.
            (
                &doctor,
                "the audience gpuwarden there; /run/gpuwarden status; a gpuwarden runs",
                "the audience gpuwarden there; /run/gpuwarden status; a gpuwarden runs",
            ),
            // Its own file is not its controller's.
            (
                &agent,
                "gpuwarden doctor controller, there; gpuwarden agent",
                "gpuwarden doctor controller, there; gpuwarden agent --config a.toml",
            ),
            (&["gpuwarden", "doctor"], "gpuwarden run", "gpuwarden run"),
        ] {
            assert_eq!(given(line).complete(text), expected, "{line:?}");
        }
    }

    #[test]
    fn what_is_printed_is_read_as_it_was_given() {
        let line = [
            "gpuwarden",
            "doctor",
            "controller",
            "--data-dir",
            "/it's",
            "--grpc-insecure",
            "--quarantine=true",
            "--leader-elect",
            "false",
            "--grpc-listen",
            "127.0.0.1:1",
        ];
        let given = given(&line);
        let printed = given.complete("gpuwarden doctor controller");
        let words = printed.replace("'/it'\\''s'", "/it's");
        let again: Vec<&str> = words.split(' ').collect();
        assert_eq!(super::tests::given(&again), given, "{printed}");
    }

    #[test]
    fn words_for_a_shell_are_quoted_where_they_need_it() {
        for (word, expected) in [
            ("a-b/c.d:e", "a-b/c.d:e"),
            ("a b", "'a b'"),
            ("it's", "'it'\\''s'"),
            ("$(x)", "'$(x)'"),
            ("", "''"),
        ] {
            assert_eq!(shell_word(word), expected);
        }
    }
}
