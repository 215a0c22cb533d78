//! Checks of the gpuwarden that runs: whether it answers, why it is not ready, and what else its
//! status shows.

use console::api::{Role, StatusView};
use contract::{HealthEvents, keys};
use model::shell;

use super::{Finding, Installation, asker, causes};
use crate::args::{ServerArgs, TargetArgs};
use crate::client::{Client, send};
use crate::given::Given;
use crate::settings::Endpoint;

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the findings, and true if the gpuwarden that answers uses the same data directory.
pub(super) async fn check(installation: &Installation, given: &Given) -> (Vec<Finding>, bool) {
    let process = &installation.process;
    let server = match Endpoint::read(&process.data_dir) {
        Some(found) => found.server,
        None => format!("http://{}", process.listen),
    };
    let shown = server.clone();
    let server = ServerArgs {
        server: Some(server),
        ..ServerArgs::default()
    };
    let asked = match Client::new(&server) {
        Ok(client) => client.status().await,
        Err(error) => Err(error),
    };
    let status = match asked {
        Ok(status) => status,
        Err(error) => {
            let what = format!("no gpuwarden answers at {shown}: {}", error.root_cause());
            let start = given.command(installation.command);
            let fix = format!("{start}, or systemctl start gpuwarden");
            return (vec![Finding::problem("server", what).fix(fix)], false);
        }
    };
    let here = std::path::absolute(&process.data_dir).unwrap_or_default();
    let there = std::path::absolute(&status.process.data_dir).unwrap_or_default();
    if here != there {
        let there = &status.process.data_dir;
        let what = format!(
            "the gpuwarden that answers at {} uses another data directory: {there}",
            process.listen
        );
        let doctor = match installation.command {
            "run" => "doctor".to_owned(),
            role => format!("doctor {role}"),
        };
        let fix = given.command_with(&doctor, &[("data-dir", there)]);
        return (vec![Finding::problem("server", what).fix(fix)], false);
    }
    let mut findings = of_status(&status, given);
    // A standby accepts no events.
    if !stands_by(&status) {
        findings.push(socket(&status, server).await);
    }
    (findings, true)
}

fn of_status(status: &StatusView, given: &Given) -> Vec<Finding> {
    let process = &status.process;
    let mut findings = vec![if process.version == VERSION {
        let what = format!("gpuwarden {VERSION} answers for {}", process.node_name);
        Finding::ok("server", what)
    } else {
        let what = format!(
            "gpuwarden {} runs, this program is {VERSION}",
            process.version
        );
        Finding::warning("server", what)
    }];
    if status.ready {
        findings.push(Finding::ok(
            "ready",
            "it sees and does all that it is there for",
        ));
    }
    let look = format!("{}, and the log of gpuwarden", given.command("status"));
    findings.extend(status.not_ready.iter().map(|reason| {
        if stands_by(status) {
            return Finding::ok("ready", reason);
        }
        let mut sources = status.sources.iter();
        let source = sources.find(|one| reason.starts_with(&format!("source {} fails", one.name)));
        let advice = source.and_then(|source| source.advice.as_ref());
        Finding::problem("ready", reason).fix(advice.unwrap_or(&look))
    }));
    for source in &status.sources {
        if source.name == agent::gpu::NAME && source.state.sees() {
            findings.push(Finding::ok("gpus", source.detail.clone()));
        }
        if source.lost > 0 {
            let what = format!("{} has lost {} records", source.name, source.lost);
            findings.push(Finding::warning("source", what).fix(&look));
        }
    }
    let notes = status.store.notes.iter();
    findings.extend(notes.map(|note| Finding::warning("store-history", note).fix(&look)));
    // A policy that was never loaded is a reason not to be ready.
    let policy = status.policy.error.as_ref();
    if let Some(error) =
        policy.filter(|&error| !status.not_ready.iter().any(|it| it.contains(error)))
    {
        let what = format!("{}: {error}", status.policy.source);
        findings.push(Finding::problem("policy-in-use", what).fix(&look));
    }
    findings.extend(of_brake(status, given, &look));
    findings.extend(kept_by_another(status));
    findings
}

/// Returns the findings about switches and limits that hold quarantines back.
fn of_brake(status: &StatusView, given: &Given, look: &str) -> Vec<Finding> {
    let Some(brake) = &status.fleet.brake else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    if !brake.enabled {
        let what = "the brake is off (--circuit-breaker false)";
        findings.push(Finding::warning("circuit-breaker", what));
    } else if !brake.state.is_empty() && brake.state != keys::BREAKER_CLOSED {
        let what = format!("it is {}", brake.state);
        let mut notes = brake.notes.iter();
        let fix = notes.find_map(|note| note.strip_prefix("to go on: "));
        findings.push(Finding::problem("circuit-breaker", what).fix(fix.unwrap_or(look)));
    }
    if let Some(paused) = &brake.paused {
        let what = format!("new quarantines are {paused}");
        findings.push(Finding::warning("pause", what).fix(given.command("resume")));
    }
    if brake.held > 0 {
        let what = format!("{} nodes with faults are held back by a limit", brake.held);
        findings.push(Finding::warning("held", what).fix(look));
    }
    findings
}

/// Returns true if another controller leads.
fn stands_by(status: &StatusView) -> bool {
    let seen = status.leadership.as_ref();
    seen.is_some_and(|it| !it.leads && !it.leader.is_empty() && it.error.is_none())
}

async fn socket(status: &StatusView, server: ServerArgs) -> Finding {
    let target = TargetArgs {
        node_name: None,
        socket: Some(status.process.socket.clone().into()),
        server,
    };
    // A request without events is answered like any other, and stores nothing.
    let nothing = HealthEvents {
        version: 1,
        events: Vec::new(),
    };
    let socket = &status.process.socket;
    let sent = match send(&target, nothing).await {
        Ok(()) => Ok(format!("{socket} answers {}", asker())),
        Err(error) => Err(format!("{} (as {})", causes(error.as_ref()), asker())),
    };
    Finding::tried("socket", sent).fix(format!("namei -l {}", shell::word(socket)))
}

/// Finds a session on this node that another gpuwarden keeps: two run for one node name.
fn kept_by_another(status: &StatusView) -> Option<Finding> {
    // A controller watches no node.
    if status.process.role != Role::Run {
        return None;
    }
    let own = (status.fleet.nodes.iter()).find(|node| node.name == status.process.node_name)?;
    let session = own.session.as_ref()?;
    let another = session.another.as_ref()?;
    let what = format!(
        "session on our node by another gpuwarden, since {:.0}: {}",
        session.since, another.who
    );
    let fix = format!(
        "stop one of the two; if that one is gone for good: {}",
        another.end
    );
    Some(Finding::warning("session", what).fix(fix))
}

#[cfg(test)]
mod tests;
