//! The gpuwarden that runs: whether it answers, why it is not ready, what it says of itself
//! beside that, and who may connect to its socket.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use console::api::{Role, StatusView};
use contract::HealthEvents;
use model::shell;

use super::{Finding, Installation, asker, causes};
use crate::args::{ServerArgs, TargetArgs};
use crate::client::{Client, send};
use crate::given::Given;
use crate::settings::Endpoint;

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the findings, and whether the one that answers uses the data directory.
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
        Ok(client) => client.get::<StatusView>("/api/v1/status").await,
        Err(error) => Err(error),
    };
    let status = match asked {
        Ok(status) => status,
        Err(error) => {
            // Without it there is nobody at the socket either.
            let what = format!("no gpuwarden answers at {shown}: {}", error.root_cause());
            let start = given.command(installation.command);
            let finding = Finding::problem("server", what, "nothing is watched while none runs")
                .fix(format!("{start}, or systemctl start gpuwarden"));
            return (vec![finding], false);
        }
    };
    let here = std::path::absolute(&process.data_dir).unwrap_or_default();
    let there = std::path::absolute(&status.process.data_dir).unwrap_or_default();
    if here != there {
        let what = format!(
            "the gpuwarden that answers at {} uses another data directory: {}",
            process.listen, status.process.data_dir
        );
        let why = "two of them cannot listen there, and this is not the one that was asked about";
        let finding = Finding::problem("server", what, why).fix(given.command_with(
            &installation.doctor(),
            &[("data-dir", &status.process.data_dir)],
        ));
        return (vec![finding], false);
    }
    let mut findings = of_status(&status, given);
    // Who stands by takes nothing.
    if !stands_by(&status) {
        findings.push(of_socket(&status, server).await);
    }
    // A controller's own socket is the operator's only; a node's is for all monitors.
    if let Some(node) = &installation.node {
        findings.extend(who_may_connect(&node.socket, installation.command, given));
    }
    (findings, true)
}

fn of_status(status: &StatusView, given: &Given) -> Vec<Finding> {
    let version = &status.process.version;
    let mut findings = vec![if version == VERSION {
        let what = format!(
            "gpuwarden {VERSION} answers for {}",
            status.process.node_name
        );
        Finding::ok("server", what)
    } else {
        let what = format!("gpuwarden {version} runs, this program is {VERSION}");
        let why = "commands may show less than there is, or what is no longer so";
        Finding::warning("server", what, why).fix("systemctl restart gpuwarden")
    }];
    if status.ready {
        let what = "it sees and does all that it is there for";
        findings.push(Finding::ok("ready", what));
    }
    let fix = format!("{}, and the log of gpuwarden", given.command("status"));
    findings.extend(status.not_ready.iter().map(|reason| {
        if stands_by(status) {
            return Finding::ok("ready", reason);
        }
        let why = "it does not see or do all that it is there for";
        let mut sources = status.sources.iter();
        let source = sources.find(|one| reason.starts_with(&format!("source {} fails", one.name)));
        let advice = source.and_then(|source| source.advice.clone());
        Finding::problem("ready", reason, why).fix(advice.unwrap_or_else(|| fix.clone()))
    }));
    let gpus = status
        .sources
        .iter()
        .find(|source| source.name == agent::gpu::NAME);
    findings.extend(
        gpus.filter(|source| source.state.sees())
            .map(|source| Finding::ok("gpus", source.detail.clone())),
    );
    let notes = status.store.notes.iter().map(|note| {
        let why = "stories begin later; what nodes carry has come back from the nodes";
        ("store-history", note.clone(), why)
    });
    let lost = status.sources.iter().filter(|source| source.lost > 0);
    let lost = lost.map(|source| {
        let what = format!("{} has lost {} records", source.name, source.lost);
        ("source", what, "faults may be among them")
    });
    // A policy that was never loaded is a reason not to be ready.
    let told = |error: &&String| status.not_ready.iter().any(|it| it.contains(*error));
    let policy = status.policy.error.iter().filter(|error| !told(error));
    findings.extend(policy.map(|error| {
        let what = format!("{}: {error}", status.policy.source);
        Finding::problem("policy-in-use", what, "the last good one holds, not this")
    }));
    let brake = status.fleet.brake.iter().filter(|brake| brake.held > 0);
    let held = brake.map(|brake| {
        let what = format!("{} nodes with faults are held back by a limit", brake.held);
        ("held", what, "they stay in service until there is room")
    });
    let odd = notes.chain(lost).chain(held);
    findings
        .extend(odd.map(|(check, what, why)| Finding::warning(check, what, why).fix(fix.clone())));
    findings.extend(kept_by_another(status));
    findings
}

/// Returns whether another controller is known to lead.
fn stands_by(status: &StatusView) -> bool {
    let seen = status.leadership.as_ref();
    seen.is_some_and(|it| !it.leads && !it.leader.is_empty() && it.error.is_none())
}

async fn of_socket(status: &StatusView, server: ServerArgs) -> Finding {
    let target = TargetArgs {
        node_name: None,
        socket: Some(status.process.socket.clone().into()),
        server,
    };
    // No event at all: answered like any other request, and nothing is stored.
    let nothing = HealthEvents {
        version: 1,
        events: Vec::new(),
    };
    let sent = send(&target, nothing).await;
    let sent = sent.map_err(|error| format!("{} (asked by {})", causes(error.as_ref()), asker()));
    let well = format!("{} answers {}", status.process.socket, asker());
    Finding::tried("socket", well, sent, "monitors cannot report")
        .fix(format!("namei -l {}", shell::word(&status.process.socket)))
}

/// Looks whether monitors of any user get to the socket: every directory above it has to be
/// open to others (`path_resolution(7)`), and they may write to it (`unix(7)`).
fn who_may_connect(socket: &Path, role: &str, given: &Given) -> Option<Finding> {
    let socket = std::path::absolute(socket).ok()?;
    let mode = |path: &Path| Some(fs::metadata(path).ok()?.mode());
    let of_socket = mode(&socket)?;
    let shown = socket.display();
    let above = socket.ancestors().skip(1);
    let closed = above.filter(|path| mode(path).is_some_and(|mode| mode & 0o001 == 0));
    let (what, fix) = if let Some(place) = closed.last() {
        let place = place.display();
        let own = [("socket", "/run/gpuwarden/gpuwarden.sock")];
        let run = given.command_with(role, &own);
        (
            format!("not every user may connect to {shown}: {place} is closed to others"),
            format!("sudo install -d -m 755 -o \"$USER\" /run/gpuwarden, and {run}"),
        )
    } else if of_socket & 0o002 == 0 {
        let mode = of_socket & 0o777;
        (
            format!("not every user may connect to {shown}: it has mode {mode:o}"),
            given.command_with(role, &[("socket-mode", "666")]),
        )
    } else {
        let what = format!("every user may connect to {shown}");
        return Some(Finding::ok("socket-access", what));
    };
    let why = "monitors and preflight checks that run as other users cannot report; that may be \
               meant so";
    Some(Finding::warning("socket-access", what, why).fix(fix))
}

/// Finds a session on our own node that another gpuwarden keeps: two run for one node name.
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
    let why = "it is left alone: the node comes back when that gpuwarden gives it back, and what \
               is reported here counts from then on";
    let fix = format!(
        "stop one of the two; where that one is gone for good: {}",
        another.end
    );
    Some(Finding::warning("session", what, why).fix(fix))
}

#[cfg(test)]
mod tests;
