//! Adds the flags of this command line to the gpuwarden commands that are printed for people to
//! paste. Without these flags, a pasted command would find another gpuwarden, or none.
//!
//! The clap definition of a command says which flags it takes.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory as _};
use model::shell;

use crate::args::{Cli, REMOTE};

/// Flag of the output format, which printed commands do not get.
const OUTPUT: &str = "output";
/// Beginning of a gpuwarden command.
const PROGRAM: &str = "gpuwarden ";

/// Flags of the command line. A pasted command has the same environment, so variables are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    flags: Vec<Flag>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Flag {
    /// Long name, without its dashes.
    name: String,
    /// Flag with its value, quoted for a shell.
    text: String,
    /// True if the command asks a controller by this flag. Of the same flags of other commands, none
    /// says that a command of this machine is to ask elsewhere.
    remote: bool,
}

// === impl Given ===

impl Given {
    /// Collects the flags in `matches`, which `command` was built for.
    pub(crate) fn read(command: &Command, matches: &ArgMatches) -> Self {
        let (mut command, mut matches) = (command, matches);
        while let Some((name, inner)) = matches.subcommand()
            && let Some(found) = command.find_subcommand(name)
        {
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
            let remote = crate::is_plugin() || arg.get_help_heading() == Some(REMOTE);
            let alone = arg
                .get_num_args()
                .is_some_and(|count| count.min_values() == 0);
            for value in matches.get_raw(id).into_iter().flatten() {
                let text = match value.to_str() {
                    Some("true") if alone => format!("--{name}"),
                    Some(value) if alone => format!("--{name}={}", shell::word(value)),
                    Some(value) => format!("--{name} {}", shell::word(value)),
                    None => continue, // No UTF-8: cannot be printed.
                };
                let name = name.to_owned();
                flags.push(Flag { name, text, remote });
            }
        }
        Self { flags }
    }

    /// Returns a gpuwarden command, such as `store inspect`, with the flags that it takes.
    pub(crate) fn command(&self, words: &str) -> String {
        self.command_with(words, &[])
    }

    /// Returns a gpuwarden command with the flags that it takes. Flags in `own` replace those of the
    /// command line.
    pub(crate) fn command_with(&self, words: &str, own: &[(&str, &str)]) -> String {
        let root = Cli::command();
        let found = words
            .split(' ')
            .try_fold(&root, |command, word| command.find_subcommand(word));
        let takes = |flag: &Flag| {
            let mut args = found.into_iter().flat_map(Command::get_arguments);
            let arg = args.find(|arg| arg.get_long() == Some(&flag.name));
            arg.is_some_and(|arg| flag.remote || arg.get_help_heading() != Some(REMOTE))
        };
        let given = self
            .flags
            .iter()
            .filter(|flag| takes(flag) && own.iter().all(|(name, _)| *name != flag.name.as_str()));
        let mut command = format!("{} {words}", crate::program());
        for flag in given {
            command.push_str(&format!(" {}", flag.text));
        }
        for (name, value) in own {
            command.push_str(&format!(" --{name} {}", shell::word(value)));
        }
        command
    }

    /// Adds the flags to each gpuwarden command of one word in a text from another process, which
    /// does not know the flags.
    pub(crate) fn complete(&self, text: &str) -> String {
        let mut parts = text.split(PROGRAM);
        let mut done = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let end = part.find(|c: char| !c.is_ascii_lowercase() && c != '-');
            let (word, behind) = part.split_at(end.unwrap_or(part.len()));
            done.push_str(&self.command(word));
            done.push_str(behind);
        }
        done
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
        let doctor = given(&[
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
        ]);
        let none: &[(&str, &str)] = &[];
        for (words, own, expected) in [
            (
                "run",
                none,
                "gpuwarden run --socket /s --catalog x --catalog y --data-dir /d --kubeconfig k \
                 --quarantine --dry-run=false --namespace gw",
            ),
            (
                "resume",
                &[("namespace", "other")],
                "gpuwarden resume --kubeconfig k --namespace other",
            ),
            (
                "store inspect",
                &[("data-dir", "/a b")],
                "gpuwarden store inspect --data-dir '/a b'",
            ),
            ("explain", none, "gpuwarden explain --data-dir /d"),
        ] {
            assert_eq!(doctor.command_with(words, own), expected);
        }
        assert_eq!(
            given(&["gpuwarden", "doctor"]).command("run"),
            "gpuwarden run"
        );
    }

    #[test]
    fn commands_in_the_text_of_another_process_get_them_too() {
        let why_not = given(&[
            "gpuwarden",
            "why-not",
            "n1",
            "--data-dir",
            "/a b",
            "--config",
            "c.toml",
            "-o",
            "json",
        ]);
        let server = given(&["gpuwarden", "why-not", "--server", "http://h:1"]);
        let remote = given(&["gpuwarden", "why-not", "n1", "--context", "c", "-n", "gw"]);
        for (given, text, expected) in [
            (
                &why_not,
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
                &server,
                "gpuwarden status says; gpuwarden doctor; that gpuwarden gives it back",
                "gpuwarden status --server http://h:1 says; gpuwarden doctor; that gpuwarden gives \
                 it back",
            ),
            (
                &remote,
                "gpuwarden status, or gpuwarden release n1",
                "gpuwarden status --context c --namespace gw, or gpuwarden release --context c n1",
            ),
        ] {
            assert_eq!(given.complete(text), expected);
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
        let printed = given.command("doctor controller");
        let words = printed.replace("'/it'\\''s'", "/it's");
        let again: Vec<&str> = words.split(' ').collect();
        assert_eq!(super::tests::given(&again), given, "{printed}");
    }
}
