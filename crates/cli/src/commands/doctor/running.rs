//! The gpuwarden that runs: whether it answers, why it is not ready, its version, what is to be
//! known of its history, and who may connect to its socket.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use console::api::{Role, Status};
use contract::HealthEvents;
use domain::shell;

use super::{Finding, Installation, asker, causes};
use crate::args::{ServerArgs, TargetArgs};
use crate::client::{Client, send};
use crate::given::Given;
use crate::settings::Endpoint;

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns what is said of it, and whether it is the one that uses the data directory.
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
        Ok(client) => client.get::<Status>("/api/v1/status").await,
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
    let there = std::path::absolute(&status.data_dir).unwrap_or_default();
    if here != there {
        let what = format!(
            "the gpuwarden that answers at {} uses another data directory: {}",
            process.listen, status.data_dir
        );
        let why = "two of them cannot listen there, and this is not the one that was asked about";
        let finding = Finding::problem("server", what, why)
            .fix(given.command_with(&installation.doctor(), &[("data-dir", &status.data_dir)]));
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

fn of_status(status: &Status, given: &Given) -> Vec<Finding> {
    let Status { version, .. } = status;
    let mut findings = vec![if version == VERSION {
        let what = format!("gpuwarden {VERSION} answers for {}", status.node_name);
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
    findings.extend(status.not_ready.iter().map(|reason| {
        if stands_by(status) {
            return Finding::ok("ready", reason);
        }
        let why = "it does not see or do all that it is there for";
        let fix = format!("{}, and the log of gpuwarden", given.command("status"));
        Finding::problem("ready", reason, why).fix(fix)
    }));
    let lost = status.sources.iter().filter(|source| source.lost > 0);
    findings.extend(lost.map(|source| {
        let what = format!("{} has lost {} records", source.name, source.lost);
        Finding::warning("source", what, "faults may be among them")
            .fix("log_buf_len=8M on the kernel's command line makes a larger kernel log")
    }));
    findings.extend(status.store.notes.iter().map(|note| {
        let why = "stories begin later; what nodes carry has come back from the nodes";
        Finding::warning("store-history", note, why)
            .fix(format!("ls -l {}", shell::word(&status.data_dir)))
    }));
    findings.extend(kept_by_another(status));
    // One that was never loaded is a reason not to be ready.
    let told = |error: &String| status.not_ready.iter().any(|it| it.contains(error));
    if let Some(error) = status.policy.error.as_ref().filter(|error| !told(error)) {
        let what = format!("{}: {error}", status.policy.source);
        let why = "what its source says now does not hold; the last good one does";
        findings.push(Finding::problem("policy-in-use", what, why));
    }
    let held = status.fleet.brake.as_ref().map_or(0, |brake| brake.held);
    if held > 0 {
        let what = format!("{held} nodes with faults are held back by a limit");
        let why = "they stay in service until there is room, or the limit is raised";
        let fix = format!(
            "{} names the nodes that use the room; `max` under [[brake.budgets]] of the policy is \
             the limit",
            given.command("status")
        );
        findings.push(Finding::warning("held", what, why).fix(fix));
    }
    findings
}

/// Returns whether another controller is known to lead.
fn stands_by(status: &Status) -> bool {
    let seen = status.leadership.as_ref();
    seen.is_some_and(|it| !it.leads && !it.leader.is_empty() && it.error.is_none())
}

async fn of_socket(status: &Status, server: ServerArgs) -> Finding {
    let target = TargetArgs {
        node_name: None,
        socket: Some(status.socket.clone().into()),
        server,
    };
    // No event at all: answered like any other request, and nothing is stored.
    let nothing = HealthEvents {
        version: 1,
        events: Vec::new(),
    };
    match send(&target, nothing).await {
        Ok(()) => Finding::ok("socket", format!("{} answers {}", status.socket, asker())),
        Err(error) => Finding::problem(
            "socket",
            format!("{} (asked by {})", causes(error.as_ref()), asker()),
            "monitors cannot report",
        )
        .fix(format!("namei -l {}", shell::word(&status.socket))),
    }
}

/// Says whether monitors of any user get to the socket.
fn who_may_connect(socket: &Path, role: &str, given: &Given) -> Option<Finding> {
    const WHY: &str =
        "monitors and preflight checks that run as other users cannot report; that may be meant so";
    let socket = std::path::absolute(socket).ok()?;
    let found = fs::metadata(&socket).ok()?;
    let shown = socket.display();
    if !found.file_type().is_socket() {
        let what = format!("{shown} is no socket");
        return Some(Finding::problem(
            "socket-access",
            what,
            "monitors cannot report",
        ));
    }
    // The first directory on the way that others may not pass (path_resolution(7)).
    let above: Vec<(&Path, Metadata)> = socket
        .ancestors()
        .skip(1)
        .filter_map(|path| Some((path, fs::metadata(path).ok()?)))
        .collect();
    let closed = above
        .iter()
        .rev()
        .find(|(_, metadata)| metadata.mode() & 0o001 == 0);
    Some(if let Some((place, metadata)) = closed {
        let who = owner(metadata.uid());
        let place = place.display();
        let what = format!("only {who} may connect to {shown}: {place} is closed to others");
        let own = [("socket", "/run/gpuwarden/gpuwarden.sock")];
        Finding::warning("socket-access", what, WHY).fix(format!(
            "sudo install -d -m 755 -o \"$USER\" /run/gpuwarden, and {}",
            given.command_with(role, &own)
        ))
    } else if found.mode() & 0o002 == 0 {
        // Connecting takes permission to write (unix(7)).
        let (who, mode) = (owner(found.uid()), found.mode() & 0o777);
        let what =
            format!("only {who}, or its group, may connect to {shown}: it has mode {mode:o}");
        let fix = given.command_with(role, &[("socket-mode", "666")]);
        Finding::warning("socket-access", what, WHY).fix(format!("{fix}, where it is not"))
    } else {
        let what = format!("every user may connect to {shown}");
        Finding::ok("socket-access", what)
    })
}

/// Finds a session on our own node that another gpuwarden keeps: two run for one node name.
fn kept_by_another(status: &Status) -> Option<Finding> {
    // A controller watches no node.
    if status.role != Role::Run {
        return None;
    }
    let own = (status.fleet.nodes.iter()).find(|node| node.name == status.node_name)?;
    let session = own.session.as_ref()?;
    let another = session.another.as_ref()?;
    Some(
        Finding::warning(
            "session",
            format!(
                "session on our node by another gpuwarden, since {:.0}: {}",
                session.since, another.who
            ),
            "it is left alone: the node comes back when that gpuwarden gives it back, and what is \
         reported here counts from then on",
        )
        .fix(format!(
            "stop one of the two; where that one is gone for good: {}",
            another.end
        )),
    )
}

fn owner(uid: u32) -> String {
    match uid {
        0 => "root".to_owned(),
        uid => format!("uid {uid} and root"),
    }
}

#[cfg(test)]
mod tests;
