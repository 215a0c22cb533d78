//! The reference of commands and flags, as Markdown, generated from the clap definitions.
//! `cargo xtask generate` writes it to `docs/cli.md`.

use clap::CommandFactory as _;

use crate::args::Cli;

/// Returns the reference of all commands.
pub(crate) fn markdown() -> String {
    let mut text = String::from(
        "# Command reference\n\nGenerated from the program by `cargo xtask generate`. Do not edit.\n\n\
         Exit codes: 0 healthy, 1 unhealthy or a difference was found, 2 wrong usage or configuration, or no answer,\n3 a controller that has lost the lead.\n",
    );
    let mut root = Cli::command();
    root.build();
    for command in root.get_subcommands() {
        section(&mut text, command, "gpuwarden");
    }
    text
}

fn section(text: &mut String, command: &clap::Command, parent: &str) {
    if command.is_hide_set() {
        return;
    }
    let name = format!("{parent} {}", command.get_name());
    let about = command
        .get_about()
        .map(ToString::to_string)
        .unwrap_or_default();
    text.push_str(&format!("\n## `{name}`\n\n{about}\n"));
    let mut rows = String::new();
    for argument in command.get_arguments() {
        if ["help", "version"].contains(&argument.get_id().as_str()) {
            continue;
        }
        rows.push_str(&row(argument));
    }
    if !rows.is_empty() {
        text.push_str("\n| argument | environment | what it is |\n|---|---|---|\n");
        text.push_str(&rows);
    }
    if let Some(after) = command.get_after_help() {
        text.push_str(&format!("\n```text\n{after}\n```\n"));
    }
    for inner in command
        .get_subcommands()
        .filter(|inner| inner.get_name() != "help")
    {
        section(text, inner, &name);
    }
}

/// Returns the row of an argument in the table of its command.
fn row(argument: &clap::Arg) -> String {
    let value = argument
        .get_value_names()
        .filter(|_| argument.get_action().takes_values())
        .map(|names| {
            names
                .iter()
                .map(|name| format!("<{name}>"))
                .collect::<Vec<_>>()
                .join(" ")
        })
        .unwrap_or_default();
    let flag = match (argument.get_short(), argument.get_long()) {
        (Some(short), Some(long)) => format!("-{short}, --{long} {value}"),
        (None, Some(long)) => format!("--{long} {value}"),
        (Some(short), None) => format!("-{short} {value}"),
        (None, None) => value,
    };
    let env = argument
        .get_env()
        .map(|env| format!("`{}`", env.to_string_lossy()));
    let mut help = argument
        .get_help()
        .map(ToString::to_string)
        .unwrap_or_default()
        .replace('|', "\\|");
    let defaults: Vec<_> = argument
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy())
        .collect();
    if !defaults.is_empty() && argument.get_action().takes_values() {
        help.push_str(&format!(" [default: {}]", defaults.join(", ")));
    }
    format!(
        "| `{}` | {} | {help} |\n",
        flag.trim().replace('|', "\\|"),
        env.unwrap_or_default()
    )
}
