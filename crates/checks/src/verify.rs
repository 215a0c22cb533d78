//! `gpuwarden check verify`: tests whether another vendor's check follows the contract, by
//! running it as the webhook's container would: with the injected variables, and a connector
//! played by this program.
//!
//! The check is run once with remediation enabled (`EXECUTE_REMEDIATION`), and once with it
//! disabled (`STORE_ONLY`).

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use contract::{HealthEvent, ProcessingStrategy, RecommendedAction};
use host::program::ProcessGroup;
use runtime::logging::plain;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

use crate::exit;
use crate::witness::Witness;

/// Name of the node given to the check.
const NODE: &str = "verify-node";
/// Strategies to run the check with. The additional variables of a gang's check are not set,
/// since the check is run alone.
const STRATEGIES: [&str; 2] = ["EXECUTE_REMEDIATION", "STORE_ONLY"];
/// Most bytes of each output of a check that are passed on: more is useless to a person, and
/// fills a log.
const MOST_OUTPUT: usize = 1 << 20;
/// Longest wait for the end of the outputs once the check and its children are killed. A
/// process that has left their group may hold them open.
const OUTPUT_END: Duration = Duration::from_secs(2);

/// Settings of a verification.
#[derive(Clone, Debug)]
pub struct VerifySettings {
    /// Program of the check.
    pub program: OsString,
    /// Arguments of the check.
    pub arguments: Vec<OsString>,
    /// Time limit of a run; a longer run has failed.
    pub timeout: Duration,
}

/// Reason why a verification could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The connector's socket cannot be created.
    #[error("a connector cannot be played")]
    Connector(#[source] io::Error),
    /// The check cannot be started.
    #[error("{} cannot be run", program.display())]
    Program {
        /// Path or name of the program.
        program: OsString,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Rule of the contract, and whether a run followed it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    text: &'static str,
    /// Description of the violation; `None` if the rule was followed.
    broken: Option<String>,
}

/// Single run of the check.
struct Run {
    strategy: &'static str,
    /// Exit status; `None` if the run exceeded its time limit.
    status: Option<ExitStatus>,
    events: Vec<HealthEvent>,
}

/// Runs a check, and writes a line for each rule of the contract. Returns the exit code: 0 if
/// all rules are followed, otherwise 1.
pub async fn verify(
    settings: &VerifySettings,
    out: &mut (dyn Write + Send),
) -> Result<u8, VerifyError> {
    let mut kept = true;
    for strategy in STRATEGIES {
        let run = run(settings, strategy).await?;
        for rule in rules(&run) {
            kept &= rule.broken.is_none();
            let line = match rule.broken {
                None => format!("ok      {strategy}: {}", rule.text),
                Some(broken) => format!("broken  {strategy}: {}: {broken}", rule.text),
            };
            // Fails only if nobody reads the output.
            drop(writeln!(out, "{}", plain(&line)));
        }
    }
    let word = if kept { "keeps" } else { "breaks" };
    let program = settings.program.display();
    drop(writeln!(
        out,
        "{program} {word} the contract of preflight checks"
    ));
    Ok(if kept { exit::PASSED } else { exit::FAILED })
}

async fn run(settings: &VerifySettings, strategy: &'static str) -> Result<Run, VerifyError> {
    let directory = tempfile::tempdir().map_err(VerifyError::Connector)?;
    // A container that mounts the directory may run as any user, as checks do.
    let anybody = Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), anybody).map_err(VerifyError::Connector)?;
    let witness = Witness::listen(directory.path()).map_err(VerifyError::Connector)?;
    let mut child = command(settings, strategy, witness.socket())
        .spawn()
        .map_err(|source| VerifyError::Program {
            program: settings.program.clone(),
            source,
        })?;
    // All children of the check end with it, as in a container.
    let group = ProcessGroup::of(&child);
    let outputs = [
        tokio::spawn(pass_on(child.stdout.take(), io::stdout())),
        tokio::spawn(pass_on(child.stderr.take(), io::stderr())),
    ];
    let ended = tokio::time::timeout(settings.timeout, child.wait()).await;
    drop(group);
    for mut output in outputs {
        if tokio::time::timeout(OUTPUT_END, &mut output).await.is_err() {
            output.abort();
        }
    }
    let status = match ended {
        Ok(Ok(status)) => Some(status),
        Ok(Err(source)) => {
            return Err(VerifyError::Program {
                program: settings.program.clone(),
                source,
            });
        }
        Err(_) => None,
    };
    Ok(Run {
        strategy,
        status,
        events: witness.events(),
    })
}

fn command(settings: &VerifySettings, strategy: &str, socket: &Path) -> Command {
    let mut command = Command::new(&settings.program);
    command
        .args(&settings.arguments)
        .env("NODE_NAME", NODE)
        .env(
            "PLATFORM_CONNECTOR_SOCKET",
            format!("unix://{}", socket.display()),
        )
        .env("PROCESSING_STRATEGY", strategy)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    command
}

/// Passes on the output of a check, up to a limit; the rest is read and dropped.
async fn pass_on(output: Option<impl AsyncRead + Unpin>, mut to: impl Write) {
    let Some(mut output) = output else {
        return;
    };
    let mut buffer = vec![0; 8192];
    let mut left = MOST_OUTPUT;
    let mut is_cut = false;
    while let Ok(read @ 1..) = output.read(&mut buffer).await {
        let passed = buffer.get(..read.min(left)).unwrap_or_default();
        // Fails only if nobody reads the output.
        drop(to.write_all(passed).and_then(|()| to.flush()));
        if read > left && !is_cut {
            is_cut = true;
            let notice = format!("\n(more than {MOST_OUTPUT} bytes: the rest is left out)\n");
            drop(to.write_all(notice.as_bytes()));
        }
        left -= passed.len();
    }
}

/// Returns the rules that a run has to follow.
fn rules(run: &Run) -> Vec<Rule> {
    let mut rules = vec![ends(run)];
    let Some(code) = run.status.and_then(|status| status.code()) else {
        return rules;
    };
    if code == i32::from(exit::MISCONFIGURED) {
        return rules;
    }
    rules.push(Rule {
        text: "sends at least one event to PLATFORM_CONNECTOR_SOCKET",
        broken: run.events.is_empty().then(|| "it sent none".to_owned()),
    });
    rules.push(each(run, "each event has its required fields", |event| {
        let problem = model::event::validate(event).err();
        problem.map(|problem| problem.to_string())
    }));
    rules.push(each(run, "each event is about NODE_NAME", |event| {
        let other = event.node_name != NODE;
        other.then(|| format!("one is about {:?}", event.node_name))
    }));
    rules.push(carries_strategy(run));
    rules.push(each(
        run,
        "an event of a fault has a code and an action",
        |event| {
            if event.is_healthy || !event.is_fatal {
                return None;
            }
            let no_action = event.recommended_action == RecommendedAction::None as i32;
            if event.error_code.is_empty() {
                Some("a fatal one has no errorCode".to_owned())
            } else {
                no_action.then(|| "a fatal one has recommendedAction NONE".to_owned())
            }
        },
    ));
    rules.push(each(
        run,
        "a healthy event is not fatal and has no code",
        |event| {
            let odd = event.is_healthy && (event.is_fatal || !event.error_code.is_empty());
            odd.then(|| "one is healthy and names a fault".to_owned())
        },
    ));
    rules.extend(agrees(run, code));
    rules
}

/// Checks that the events carry the strategy given to the check.
fn carries_strategy(run: &Run) -> Rule {
    each(run, "each event carries PROCESSING_STRATEGY", |event| {
        let wanted = ProcessingStrategy::from_str_name(run.strategy);
        let carried = ProcessingStrategy::try_from(event.processing_strategy).ok();
        // An event without a strategy has the usual one.
        let carried = carried.map(|carried| match carried {
            ProcessingStrategy::Unspecified => ProcessingStrategy::ExecuteRemediation,
            carried => carried,
        });
        let name = contract::strategy_name(event.processing_strategy);
        (carried != wanted).then(|| format!("one carries {name}"))
    })
}

/// Checks that a run ends with an allowed exit code.
fn ends(run: &Run) -> Rule {
    let codes: &[i32] = if run.strategy == "STORE_ONLY" {
        &[0]
    } else {
        &[0, 1, 2]
    };
    let broken = match run.status {
        None => Some("it did not end in time".to_owned()),
        Some(status) => match status.code() {
            Some(code) if codes.contains(&code) => None,
            _ => Some(format!("it ended with {status}")),
        },
    };
    Rule {
        text: match codes {
            [_] => "exits 0 whatever it finds",
            _ => "exits 0 (passed), 1 (failed) or 2 (wrong settings)",
        },
        broken,
    }
}

/// Checks that exit code and events agree.
fn agrees(run: &Run, code: i32) -> Option<Rule> {
    if run.strategy == "STORE_ONLY" {
        return None;
    }
    let healthy = run.events.iter().any(|event| event.is_healthy);
    let fatal = run.events.iter().any(|event| event.is_fatal);
    let unhealthy = run.events.iter().any(|event| !event.is_healthy);
    Some(if code == 0 {
        let broken = if fatal {
            Some("it passed and sent a fatal one".to_owned())
        } else {
            // A check that could not test may report that, and let the pod start.
            (!healthy && !unhealthy).then(|| "it sent none".to_owned())
        };
        Rule {
            text: "a pass sends a healthy event, or one that is not fatal",
            broken,
        }
    } else {
        Rule {
            text: "a failure sends an event that is not healthy",
            broken: (!unhealthy).then(|| "all are healthy".to_owned()),
        }
    })
}

/// Checks each event of a run.
fn each(run: &Run, text: &'static str, problem: impl Fn(&HealthEvent) -> Option<String>) -> Rule {
    Rule {
        text,
        broken: run.events.iter().find_map(problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_check_that_writes_without_end_is_cut() {
        for (bytes, is_cut) in [(MOST_OUTPUT, false), (3 * MOST_OUTPUT, true)] {
            let written = u64::try_from(bytes).unwrap();
            let mut to = Vec::new();
            pass_on(Some(tokio::io::repeat(b'x').take(written)), &mut to).await;
            let text = String::from_utf8(to).unwrap();
            let passed = text.matches('x').count();
            assert_eq!(passed, bytes.min(MOST_OUTPUT));
            assert_eq!(text.ends_with("the rest is left out)\n"), is_cut);
        }
    }
}
