//! Programs of `tests/witness`, in Python: the vendors' own clients, which read our fakes, and moto.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// Longest wait for a program: on a machine with twenty times its load, the start of moto takes more than a minute.
const WAIT: Duration = Duration::from_mins(5);

/// A program that has answered. It ends when dropped.
pub(crate) struct Witness {
    /// Answer.
    pub(crate) said: Value,
    _stdin: ChildStdin,
    _child: Child,
}

// === impl Witness ===

impl Witness {
    /// Starts a program with these environment variables only, and reads its answer to `asked`.
    pub(crate) async fn start(
        python: &Path,
        program: &str,
        variables: &[(&str, &str)],
        asked: &Value,
    ) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/witness");
        let mut child = Command::new(python)
            .arg(directory.join(program))
            .env_clear()
            .env("PYTHONWARNINGS", "ignore")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let line = format!("{asked}\n");
        stdin.write_all(line.as_bytes()).await.unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let read = tokio::time::timeout(WAIT, stdout.read_line(&mut line)).await;
        read.unwrap_or_else(|_| panic!("{program} says nothing within {WAIT:?}"))
            .unwrap();
        let said = serde_json::from_str(&line);
        Self {
            // The error of the program is in the output of the test.
            said: said.unwrap_or_else(|_| panic!("{program} failed")),
            _stdin: stdin,
            _child: child,
        }
    }
}
