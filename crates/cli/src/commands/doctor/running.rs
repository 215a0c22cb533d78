//! The gpuwarden that runs: whether it answers, what it can see and store, its version, and
//! who may connect to its socket.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use console::api::{LeadershipView, Role, Status};
use contract::HealthEvents;
use runtime::sources::SourceState;

use super::{Finding, Installation, asker, causes, shell_word};
use crate::args::{ServerArgs, TargetArgs};
use crate::client::{Client, send};
use crate::settings::Endpoint;

/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Socket of a role that has no setting for it.
const SOCKET: &str = "gpuwarden.sock";

/// What is said of it, and whether it is the one that uses the data directory.
pub(super) async fn check(installation: &Installation, doctor: &str) -> (Vec<Finding>, bool) {
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
            let start = installation.command;
            let finding = Finding::problem(
                "server",
                format!("no gpuwarden answers at {shown}: {}", error.root_cause()),
                "nothing is watched while none runs",
                format!("gpuwarden {start}, or systemctl start gpuwarden"),
            );
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
        let fix = format!("{doctor} --data-dir {}", shell_word(&status.data_dir));
        return (vec![Finding::problem("server", what, why, fix)], false);
    }
    let mut findings = of_status(&status);
    // Who stands by takes nothing.
    if status.leadership.as_ref().is_none_or(|it| it.leads) {
        findings.push(of_socket(&status, server).await);
    }
    let socket = match &installation.node {
        Some(node) => node.socket.clone(),
        None => process.data_dir.join(SOCKET),
    };
    // Its own socket is the operator's only; a node's is for all monitors.
    if installation.node.is_some() {
        findings.extend(who_may_connect(&socket, installation.command));
    }
    (findings, true)
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
            format!("namei -l {}", status.socket),
        ),
    }
}

/// Whether monitors of any user get to the socket.
fn who_may_connect(socket: &Path, role: &str) -> Option<Finding> {
    let socket = std::path::absolute(socket).ok()?;
    let found = fs::metadata(&socket).ok()?;
    let above: Vec<(&Path, Metadata)> = socket
        .ancestors()
        .skip(1)
        .filter_map(|path| Some((path, fs::metadata(path).ok()?)))
        .collect();
    let shown = socket.display();
    // The first directory on the way that others may not pass (path_resolution(7)).
    let closed = above
        .iter()
        .rev()
        .find(|(_, metadata)| metadata.mode() & 0o001 == 0)
        .map(|(path, metadata)| (path.display().to_string(), metadata.uid()))
        // Connecting takes permission to write (unix(7)).
        .or_else(|| (found.mode() & 0o002 == 0).then(|| (shown.to_string(), found.uid())));
    Some(match closed {
        _ if !found.file_type().is_socket() => Finding::problem(
            "socket-access",
            format!("{shown} is no socket"),
            "monitors cannot report",
            format!("ls -l {shown}, and restart gpuwarden"),
        ),
        None => Finding::ok(
            "socket-access",
            format!("every user may connect to {shown}"),
        ),
        Some((place, uid)) if place == shown.to_string() => Finding::warning(
            "socket-access",
            format!(
                "only {}, or its group, may connect to {shown}: it has mode {:o}",
                owner(uid),
                found.mode() & 0o777
            ),
            "monitors and preflight checks that run as other users cannot report; that may be meant so",
            format!("gpuwarden {role} --socket-mode 666, where it is not"),
        ),
        Some((place, uid)) => Finding::warning(
            "socket-access",
            format!(
                "only {} may connect to {shown}: {place} is closed to others",
                owner(uid)
            ),
            "monitors and preflight checks that run as other users cannot report",
            format!(
                "sudo install -d -m 755 -o \"$USER\" /run/gpuwarden, and gpuwarden {role} --socket \
                 /run/gpuwarden/gpuwarden.sock"
            ),
        ),
    })
}

fn of_leadership(seen: &LeadershipView) -> Finding {
    if seen.leads {
        Finding::ok("leader", format!("it leads ({})", seen.lease))
    } else if seen.leader.is_empty() {
        Finding::problem(
            "leader",
            match &seen.error {
                Some(error) => format!("the Lease {} cannot be asked for: {error}", seen.lease),
                None => format!("nobody is known to hold the Lease {}", seen.lease),
            },
            "no controller acts",
            "gpuwarden status; the log of gpuwarden says what hinders it",
        )
    } else {
        Finding::ok(
            "leader",
            format!("{} leads, and this one stands by", seen.leader),
        )
    }
}

/// A session on our own node that another gpuwarden keeps: two run for one node name.
fn kept_by_another(status: &Status) -> Option<Finding> {
    // A controller watches no node.
    if status.role != Role::Run {
        return None;
    }
    let own = (status.fleet.nodes.iter()).find(|node| node.name == status.node_name)?;
    let session = own.session.as_ref()?;
    let another = session.another.as_ref()?;
    Some(Finding::warning(
        "session",
        format!(
            "session on our node by another gpuwarden, since {:.0}: {}",
            session.since, another.who
        ),
        "it is left alone: the node comes back when that gpuwarden gives it back, and what is \
         reported here counts from then on",
        format!(
            "stop one of the two; where that one is gone for good: {}",
            another.end
        ),
    ))
}

fn owner(uid: u32) -> String {
    match uid {
        0 => "root".to_owned(),
        uid => format!("uid {uid} and root"),
    }
}

fn of_status(status: &Status) -> Vec<Finding> {
    let mut findings = vec![if status.version == VERSION {
        Finding::ok(
            "server",
            format!("gpuwarden {VERSION} answers for {}", status.node_name),
        )
    } else {
        Finding::warning(
            "server",
            format!(
                "gpuwarden {} runs, this program is {VERSION}",
                status.version
            ),
            "commands may show less than there is, or what is no longer so",
            "systemctl restart gpuwarden, once both are of one version",
        )
    }];
    for source in &status.sources {
        let shown = format!(
            "{} is {}: {}",
            source.name,
            source.state.name(),
            source.detail
        );
        findings.push(match source.state {
            SourceState::Failing | SourceState::Stuck => Finding::problem(
                "source",
                shown,
                "what it does not see is not a fault to it, and not healthy either",
                "gpuwarden status; the log of gpuwarden says since when",
            ),
            _ if source.lost > 0 => Finding::warning(
                "source",
                format!("{} has lost {} records", source.name, source.lost),
                "faults may be among them",
                "log_buf_len=8M on the kernel's command line makes a larger kernel log",
            ),
            _ => Finding::ok("source", shown),
        });
    }
    findings.push(match (&status.store.error, &status.delivery) {
        (Some(error), _) => Finding::problem(
            "store",
            error.clone(),
            "events are refused until it takes them again; their senders keep them",
            inspect(&status.data_dir),
        ),
        (None, Some(delivery)) => match &delivery.failing {
            Some(failing) => Finding::problem(
                "delivery",
                format!(
                    "the controller at {} does not take events, {} wait: {failing}",
                    delivery.controller, status.store.events
                ),
                "faults of this node are not acted on until it does",
                "gpuwarden doctor controller, there",
            ),
            None => Finding::ok(
                "delivery",
                format!("the controller at {} takes events", delivery.controller),
            ),
        },
        (None, None) => Finding::ok(
            "store",
            format!("{} events are stored", status.store.events),
        ),
    });
    findings.extend(status.store.notes.iter().map(|note| {
        Finding::warning(
            "store-history",
            note.as_str(),
            "stories begin later; what nodes carry has come back from the nodes",
            format!("ls -l {}", shell_word(&status.data_dir)),
        )
    }));
    findings.extend(status.leadership.as_ref().map(of_leadership));
    findings.extend(kept_by_another(status));
    if let Some(error) = &status.policy.error {
        findings.push(Finding::problem(
            "policy-in-use",
            format!("{}: {error}", status.policy.source),
            "what its source says now does not hold; the last good one does, if there was one",
            look_at_policy(&status.policy.source),
        ));
    }
    if let Some(brake) = &status.fleet.brake
        && brake.held > 0
    {
        findings.push(Finding::warning(
            "held",
            format!("{} nodes with faults are held back by a limit", brake.held),
            "they stay in service until there is room, or the limit is raised",
            "gpuwarden status names the nodes that use the room; `max` under [[brake.budgets]] of the \
             policy is the limit",
        ));
    }
    // Reasons that stand above already, by the words that they share with it.
    let told = |reason: &str| {
        status.sources.iter().any(|it| reason.contains(&it.name))
            || reason.contains("does not take events")
            || status
                .policy
                .error
                .as_ref()
                .is_some_and(|it| reason.contains(it.as_str()))
            || status
                .store
                .error
                .as_ref()
                .is_some_and(|it| reason.contains(it.as_str()))
    };
    for reason in status.not_ready.iter().filter(|reason| !told(reason)) {
        findings.push(Finding::problem(
            "ready",
            format!("not ready: {reason}"),
            "it does not see or do all that it is there for",
            way_out(reason, status),
        ));
    }
    findings
}

fn inspect(data_dir: &str) -> String {
    let word = shell_word(data_dir);
    format!("df {word}; gpuwarden store inspect --data-dir {word}")
}

/// How to look at the policy of this source, as the status names it.
fn look_at_policy(source: &str) -> String {
    let map = source.strip_prefix("configmap:");
    match map.and_then(|map| map.split_once('/')) {
        Some((namespace, rest)) => {
            let name = rest.split('/').next().unwrap_or(rest);
            format!(
                "kubectl get configmap {} --namespace {} -o yaml",
                shell_word(name),
                shell_word(namespace)
            )
        }
        None => format!("gpuwarden policy lint {}", shell_word(source)),
    }
}

/// What to do about a reason, by the words that `/readyz` has for it.
fn way_out(reason: &str, status: &Status) -> String {
    if reason.starts_with("no connection to the cluster") {
        "kubectl get nodes with the same kubeconfig, from this machine".to_owned()
    } else if reason.starts_with("no policy") {
        look_at_policy(&status.policy.source)
    } else if reason.contains("store") && !reason.contains("before the start") {
        inspect(&status.data_dir)
    } else if reason.contains("before the start") {
        "wait: it is done when all of them are read".to_owned()
    } else {
        "systemctl restart gpuwarden, if it does not pass".to_owned()
    }
}

#[cfg(test)]
mod tests;
