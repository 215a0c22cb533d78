//! Explanation why a node is in service or not: everything that decides about it, in order of
//! precedence, with the values that each rule has read.
//!
//! A pure function that runs only on request; the decisions do not depend on it.

mod check;
mod rules;

use contract::keys;
use contract::nearest::nearest;
use fleet::session::{ObservedNode, Phase, foreign_session, returns};
use fleet::{Fleet, Situation};
use jiff::Timestamp;
use model::actors;
use model::fault::not_fully_seen;
use model::mode::Mode;
use model::ownership::Ownership;
use serde::{Deserialize, Serialize};

pub use check::{Check, CheckResult};
use check::{RULES, check, passes, stops};
use rules::rule_checks;

/// Most similar names that are offered for an unknown node.
const NAMES_OFFERED: usize = 3;

/// Source of a node's faults.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Name, such as `kernel-log`.
    pub name: &'a str,
    /// True if the source works.
    pub sees: bool,
    /// State in one word.
    pub state: &'a str,
    /// Input that it reads, or its error.
    pub detail: &'a str,
}

/// Connection to the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Connection<'a> {
    /// Address of the API server.
    pub server: &'a str,
    /// True while nodes are watched.
    pub connected: bool,
    /// True once the nodes of the cluster were listed.
    pub listed: bool,
    /// Error of the connection, if there is one.
    pub error: Option<&'a str>,
}

/// Explanation why a node is quarantined or not. Serialized names are part of the JSON API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WhyNot {
    /// Name of the node.
    pub node: String,
    /// Answer in one sentence.
    pub answer: String,
    /// All checks, in order of precedence.
    pub checks: Vec<Check>,
    /// True if the cluster has the node; absent if there is no cluster or it could not be read
    /// yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// True if the node may exist: the cluster has it or could not be read yet, it has an open
    /// fault, or this process runs on it.
    pub known: bool,
    /// Most similar names, if the node is unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nearest: Vec<String>,
}

/// Explains why `node` is quarantined or not. `cluster` and `sources` describe what the caller
/// knows beyond the fleet.
pub fn why_not(
    fleet: &Fleet,
    node: &str,
    cluster: Option<Connection<'_>>,
    sources: &[Source<'_>],
    now: Timestamp,
) -> WhyNot {
    let situation = fleet.situation(node, now);
    // Sources on other machines are not known here.
    let sources = if situation.is_own { sources } else { &[] };
    let mut why = explain(&situation, cluster, sources);
    if !why.known {
        let nearest = nearest(node, fleet.names(), NAMES_OFFERED);
        why.nearest = nearest.into_iter().map(str::to_owned).collect();
    }
    why
}

/// Runs all checks of a node.
fn explain(
    situation: &Situation<'_>,
    cluster: Option<Connection<'_>>,
    sources: &[Source<'_>],
) -> WhyNot {
    let (node, observed) = (situation.node, situation.observed);
    let listed = cluster.filter(|cluster| cluster.listed || observed.is_some());
    let in_cluster = listed.map(|_| observed.is_some());
    let mut checks = Vec::new();
    checks.extend(sources_check(sources));
    checks.push(cluster_check(cluster));
    if cluster.is_some() {
        checks.push(node_check(node, in_cluster, observed));
    }
    checks.push(mode_check(situation.acting));
    checks.extend(foreign_check(situation));
    checks.extend(others_check(observed));
    let (rules, notices) = rule_checks(situation);
    checks.push(faults_check(situation, sources, notices));
    checks.extend(rules);
    checks.extend(brake_check(situation));
    checks.extend(change_check(situation));
    WhyNot {
        node: node.to_owned(),
        answer: answer(situation, cluster, &checks),
        checks,
        in_cluster,
        known: in_cluster.unwrap_or(cluster.is_some())
            || !situation.faults.is_empty()
            || situation.is_own,
        nearest: Vec::new(),
    }
}

/// Returns the answer for a node that is out of service by our own session.
fn out_of_service(situation: &Situation<'_>) -> String {
    let (node, session) = (situation.node, &situation.session);
    if session.phase == Phase::Returning {
        return match session.waits_until() {
            Some(at) => format!("{node} is {}", returns::text(session.returns.len(), at)),
            None => format!("{node} is being given back"),
        };
    }
    let awaits = &situation.awaits;
    let is = match situation.acting {
        Mode::DryRun => "counts as quarantined in this dry run",
        Mode::Observe | Mode::Act => "is quarantined",
    };
    format!("{node} {is}, and awaits {awaits}; `gpuwarden explain {node}` shows why")
}

fn answer(situation: &Situation<'_>, cluster: Option<Connection<'_>>, checks: &[Check]) -> String {
    let node = situation.node;
    let own = situation.observed.and_then(|node| node.own.as_deref());
    if let (Some(own), true) = (own, situation.foreign) {
        let (who, since) = (
            foreign_session::owner(own, node),
            foreign_session::since(own),
        );
        return format!("{node} is quarantined by another gpuwarden{since}: {who}");
    }
    if own.is_some() {
        return out_of_service(situation);
    }
    // A single rule that asks for a quarantine is enough.
    let asked = checks
        .iter()
        .any(|check| check.name == RULES && check.result == CheckResult::Passes);
    let stops: Vec<&Check> = checks
        .iter()
        .filter(|check| match check.result {
            CheckResult::Passes => false,
            CheckResult::Stops => !(asked && check.name == RULES),
            // A source that does not work may miss the fault that would cause a quarantine.
            CheckResult::Unknown => !asked && check.name == SOURCES,
        })
        .collect();
    let unread = cluster.is_some_and(|cluster| !cluster.listed);
    if unread && situation.observed.is_none() {
        let cluster = checks.iter().find(|check| check.name == CLUSTER);
        let why = cluster.map_or("", |check| &check.text);
        return format!("whether {node} is quarantined is not known: {why}");
    }
    match stops.as_slice() {
        [] => format!(
            "{node} is being quarantined: {}",
            situation.session.awaits(situation.observed.is_some())
        ),
        [first, rest @ ..] => {
            // Several faults may have the same reason.
            let others = rest.iter().filter(|check| check.text != first.text);
            let more = match others.count() {
                0 => String::new(),
                1 => " (and one more reason below)".to_owned(),
                count => format!(" (and {count} more reasons below)"),
            };
            format!("{node} is not quarantined: {}{more}", first.text)
        }
    }
}

/// Name of the check of the connection to the cluster.
const CLUSTER: &str = "cluster";
/// Name of the check of the fault sources.
const SOURCES: &str = "sources";

/// Returns the check of the node's fault sources; `None` if they are not known here.
fn sources_check(sources: &[Source<'_>]) -> Option<Check> {
    let listed = |sees| {
        let states = sources.iter().filter(move |source| source.sees == sees);
        let states = states.map(|one| format!("{} is {}: {}", one.name, one.state, one.detail));
        states.collect::<Vec<_>>().join("; ")
    };
    if sources.is_empty() {
        return None;
    }
    if sources.iter().all(|source| source.sees) {
        return Some(passes(SOURCES, listed(true)));
    }
    Some(check(SOURCES, CheckResult::Unknown, listed(false)).fix("gpuwarden doctor"))
}

fn cluster_check(cluster: Option<Connection<'_>>) -> Check {
    let Some(Connection {
        server,
        connected,
        error,
        ..
    }) = cluster
    else {
        return stops(CLUSTER, "no cluster is given: only this machine is watched")
            .fix("gpuwarden run --kubeconfig FILE");
    };
    if connected {
        return passes(CLUSTER, format!("{server}, its nodes are watched"));
    }
    let error = error.unwrap_or("its nodes are not known yet");
    stops(CLUSTER, format!("{server} cannot be watched: {error}")).fix("gpuwarden doctor")
}

/// Returns the check that the cluster has the node.
fn node_check(node: &str, in_cluster: Option<bool>, observed: Option<&ObservedNode>) -> Check {
    match in_cluster {
        Some(true) => {
            let cordoned = observed.filter(|node| node.view.unschedulable);
            let text = match cordoned.map(|node| (&node.view, node.own.as_deref())) {
                Some((view, None)) if view.annotations.contains_key(keys::UNTAINTED_MANUALLY) => {
                    "the cluster has it; a person removed a quarantine taint, which ended the \
                     session and left its cordon: it stays so"
                }
                Some((_, None)) => {
                    "the cluster has it, cordoned, and not by gpuwarden: it stays so"
                }
                Some((view, Some(own))) if own.keeps_cordon(view) => {
                    "the cluster has it; it was cordoned before us: it stays so"
                }
                _ => "the cluster has it",
            };
            let manager =
                observed.and_then(|node| Ownership::cordoned_by(&node.view, node.own.as_deref()));
            let check = passes("node", text);
            Check {
                details: manager
                    .map(|name| format!("cordoned by {name}"))
                    .into_iter()
                    .collect(),
                ..check
            }
        }
        Some(false) => stops(
            "node",
            format!("the cluster has no node of the name {node}"),
        )
        .fix("kubectl get nodes; --node-name sets the name of this machine"),
        None => check(
            "node",
            CheckResult::Unknown,
            "whether the cluster has it is not known: its nodes could not be read yet",
        ),
    }
}

fn mode_check(acting: Mode) -> Check {
    match acting {
        Mode::Act => passes("mode", "quarantine: decisions are carried out"),
        Mode::DryRun => stops("mode", "a dry run: decided and shown, not written")
            .fix("gpuwarden run --quarantine without --dry-run"),
        Mode::Observe => {
            stops("mode", "observing only: nothing is decided").fix("gpuwarden run --quarantine")
        }
    }
}

fn foreign_check(situation: &Situation<'_>) -> Option<Check> {
    if !situation.foreign {
        return None;
    }
    let text = "the node carries the session of another gpuwarden";
    let Some((view, own)) =
        (situation.observed).and_then(|node| Some((&node.view, node.own.as_deref()?)))
    else {
        return Some(stops("session", text));
    };
    let (who, since) = (
        foreign_session::owner(own, situation.node),
        foreign_session::since(own),
    );
    let text = format!("{text}, {who}{since}: it is left alone, and counts as out of service");
    let on_our_node = situation
        .on_our_node
        .then_some(foreign_session::ON_OUR_NODE);
    let uncordoned = (own.cordoned && !view.unschedulable)
        .then_some("somebody has uncordoned the node; only its own gpuwarden reacts to that");
    let details = on_our_node.into_iter().chain(uncordoned);
    let check = Check {
        details: details.map(str::to_owned).collect(),
        ..stops("session", text)
    };
    Some(check.fix(&format!(
        "it ends when that gpuwarden gives the node back; where that is gone for good: {}",
        foreign_session::end_command(own, view)
    )))
}

/// Returns the check of the brake, if it delays a quarantine that rules ask for.
fn brake_check(situation: &Situation<'_>) -> Option<Check> {
    let hold = situation.hold?;
    Some(stops("brake", hold.to_string()).fix(&hold.awaits()))
}

fn faults_check(situation: &Situation<'_>, sources: &[Source<'_>], notices: usize) -> Check {
    let check = match situation.faults.len() - notices {
        0 => {
            let text = if sources.iter().all(|source| source.sees) {
                "no fault of it is open"
            } else {
                "no fault of it is known"
            };
            let node = situation.node;
            stops("faults", text).fix(&format!(
                "gpuwarden explain {node} shows what its events did"
            ))
        }
        1 => passes("faults", "1 is open"),
        count => passes("faults", format!("{count} are open")),
    };
    let missed = situation.missed;
    let missed = (missed > 0).then(|| not_fully_seen(missed));
    let notices = match notices {
        0 => None,
        1 => Some("and a notice, which needs no remediation".to_owned()),
        count => Some(format!("and {count} notices, which need no remediation")),
    };
    let notes = situation.session.times.notes();
    Check {
        details: notes.chain(missed).chain(notices).collect(),
        ..check
    }
}

/// Returns the check of other programs, if any is at work on the node. They prevent no quarantine.
fn others_check(observed: Option<&ObservedNode>) -> Option<Check> {
    let mut actors = actors::at_work(&observed?.view).into_iter();
    let first = actors.next()?;
    let others = actors.flat_map(|actor| [actor.to_string(), actor.advice.to_owned()]);
    let check = Check {
        details: others.collect(),
        ..passes("others", first.to_string())
    };
    Some(check.fix(first.advice))
}

/// Returns the check of a change that failed; `None` if none did.
fn change_check(situation: &Situation<'_>) -> Option<Check> {
    let session = &situation.session;
    if session.failures == 0 {
        return None;
    }
    let count = session.failures;
    let attempts = if count == 1 { "attempt" } else { "attempts" };
    let next = session
        .not_before
        .map_or_else(String::new, |at| format!(", the next is made at {at:.0}"));
    let what = if situation.store_unanswered {
        "the event store does not answer whose the session is"
    } else {
        "the API server has not accepted the change"
    };
    let text = format!("{what}: {count} {attempts} in a row failed{next}");
    Some(stops("change", text).fix("gpuwarden doctor"))
}

#[cfg(test)]
mod tests;
