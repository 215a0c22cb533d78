//! Commands of a page: its `console` blocks are run, and print what the page shows.
//!
//! In a block a line with `$ ` is a command, and the lines up to the next one are its output. `...`
//! stands for any text, and for any lines where it has a line for itself.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use regex::Regex;
use testkit::{binary, wait_for};
use tokio::process::Command;

use crate::support::SOON;

/// Output that the page leaves out; the command has to succeed.
pub(crate) const ANYTHING: &str = "...\n";

/// A command, and the output that the page shows.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) command: String,
    pub(crate) shown: String,
}

/// The shell of a reader.
pub(crate) struct Shell {
    /// Working directory.
    pub(crate) dir: PathBuf,
    pub(crate) env: Vec<(&'static str, String)>,
    /// Commands `export` so far.
    exports: String,
}

/// Returns the steps of a page, or of a part.
pub(crate) fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for block in text.split("```console\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        let mut at = steps.len();
        for line in block.lines() {
            if let Some(command) = line.strip_prefix("$ ") {
                at = steps.len();
                steps.push(Step {
                    command: command.to_owned(),
                    shown: String::new(),
                });
            } else {
                let step = steps.get_mut(at);
                let step = step.unwrap_or_else(|| panic!("output before a command: {line}"));
                step.shown += &format!("{line}\n");
            }
        }
    }
    steps
}

/// Replaces what differs from run to run: times, ids, processes, sizes, ports, the version, and the
/// home directory; and the widths of columns, which follow from these.
fn without_variables(text: &str, home: &str) -> String {
    let replacements = [
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", "TIME"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
        (r"\b\d+(ms|s|m|h|d)\b", "AGE"),
        (r"\([0-9a-f]{24}\)", "(ID)"),
        (r"pid=\d+", "pid=PID"),
        (r"process \d+ of user \d+", "process PID of user UID"),
        (r"\d+ MiB", "SIZE"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"gpuwarden \d+\.\d+\.\d+", "gpuwarden VERSION"),
        (r"answers \w+\n", "answers USER\n"),
        (r" +\n", "\n"),
        (r"  +", "  "),
    ];
    let mut text = text.replace(home, "/home/me");
    for (pattern, name) in replacements {
        let pattern = Regex::new(pattern).unwrap();
        text = pattern.replace_all(&text, name).into_owned();
    }
    text
}

/// Returns whether output is what a page shows; both are [`without_variables`].
fn is_as_shown(output: &str, shown: &str) -> bool {
    let pattern: String = shown
        .split_inclusive('\n')
        .map(|line| match line {
            ANYTHING => "(?:.*\n)*".to_owned(),
            line => regex::escape(line).replace(r"\.\.\.", ".*"),
        })
        .collect();
    Regex::new(&format!("^{pattern}$"))
        .unwrap()
        .is_match(output)
}

// === impl Shell ===

impl Shell {
    /// Returns a shell with this home directory, where `gpuwarden` is the program under test.
    pub(crate) fn new(dir: PathBuf, home: &str) -> anyhow::Result<Self> {
        let program = binary()?;
        let programs = program.parent().unwrap().display().to_string();
        let path = std::env::var("PATH").unwrap_or_default();
        let env = vec![
            ("HOME", home.to_owned()),
            ("PATH", format!("{programs}:{path}")),
            ("GPUWARDEN_LISTEN", "127.0.0.1:0".to_owned()),
        ];
        Ok(Self {
            dir,
            env,
            exports: String::new(),
        })
    }

    /// Lets the shell find a program by its name.
    pub(crate) fn add_program(&mut self, program: &Path) {
        let (_, path) = &mut self.env[1];
        *path = format!("{}:{path}", program.parent().unwrap().display());
    }

    /// Returns a process of the shell that becomes a command, with one stream for all its output.
    pub(crate) fn command(&self, command: &str) -> Command {
        let mut shell = Command::new("bash");
        shell
            .args(["-c", &format!("exec 2>&1\n{}{command}", self.exports)])
            .current_dir(&self.dir)
            .env_remove("GPUWARDEN_KUBECONFIG")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        shell
    }

    /// Checks that output is what a page shows.
    pub(crate) fn compare(&self, output: &str, shown: &str) -> Result<(), String> {
        let (_, home) = &self.env[0];
        let [output, shown] = [output, shown].map(|text| without_variables(text, home));
        if is_as_shown(&output, &shown) {
            return Ok(());
        }
        Err(format!("the page shows\n{shown}\nand it printed\n{output}"))
    }

    /// Runs the commands in their order. Each is run until it prints what the page shows, because a
    /// reader is slower than a test.
    pub(crate) async fn follow(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        for Step { command, shown } in steps {
            if command.starts_with("export ") {
                self.exports += &format!("{command}\n");
                continue;
            }
            wait_for(&format!("the output of {command:?}"), SOON, || async {
                let output = self.command(command).output().await;
                let output = output.map_err(|error| error.to_string())?;
                let printed = String::from_utf8_lossy(&output.stdout);
                if shown == ANYTHING && !output.status.success() {
                    return Err(format!("{}: {printed}", output.status));
                }
                self.compare(&printed, shown)
            })
            .await?;
        }
        Ok(())
    }
}

#[test]
fn a_difference_is_found_and_what_varies_is_none() {
    let alike = |output: &str, shown: &str| {
        let [output, shown] = [output, shown].map(|text| without_variables(text, "/tmp/x"));
        is_as_shown(&output, &shown)
    };
    for (output, shown) in [
        ("a, up 3s\n", "a, up 12m\n"),
        ("WHY    SINCE\nx      3s\n", "WHY    SINCE\nx      12s\n"),
        ("in /tmp/x/data\n", "in /home/me/data\n"),
        ("1\n2\n3\n", "1\n...\n"),
        ("1\n", "...\n1\n"),
        ("to clear  all of it\n", "to clear  ...\n"),
    ] {
        assert!(alike(output, shown), "{output}{shown}");
    }
    for (output, shown) in [
        ("1 event\n", "2 events\n"),
        ("1\n2\n", "1\n"),
        ("1\n", "1\n2\n"),
        ("1\n2\n", "...\n3\n"),
        ("to clear  all\n", "to  ... it\n"),
    ] {
        assert!(!alike(output, shown), "{output}{shown}");
    }
}
