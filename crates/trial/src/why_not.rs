//! Why a node is in service, or is not: everything that decides about it, in the order in
//! which it counts, with what each rule has looked at.
//!
//! Pure, and worked out only when somebody asks: the decisions themselves need none of it.

mod check;
mod rules;

use contract::nearest::nearest;
use fleet::session::{Observed, Phase, foreign_session, returns};
use fleet::{Fleet, Situation};
use jiff::Timestamp;
use model::fault::not_fully_seen;
use model::mode::Mode;
use serde::{Deserialize, Serialize};

pub use check::{Check, CheckResult};
use check::{RULES, check, passes, stops};
use rules::rule_checks;

/// Names offered where nothing is known of the one that was asked about.
const NAMES_OFFERED: usize = 3;

/// A source of the faults of a node.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its name, for example `kernel-log`.
    pub name: &'a str,
    /// True if the source sees.
    pub sees: bool,
    /// Its state, in a word.
    pub state: &'a str,
    /// The thing that it reads, or its trouble.
    pub detail: &'a str,
}

/// The connection to the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Connection<'a> {
    /// Address of the API server.
    pub server: &'a str,
    /// True while nodes are being watched.
    pub connected: bool,
    /// True once the cluster's nodes were read: before that, what it has is not known.
    pub listed: bool,
    /// The trouble with it, if there is one.
    pub error: Option<&'a str>,
}

/// The answer to the question why a node is quarantined, or not. Serialised names are part of the JSON API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WhyNot {
    /// Node name.
    pub node: String,
    /// The answer in one sentence.
    pub answer: String,
    /// All checks, in order.
    pub checks: Vec<Check>,
    /// True if the cluster has the node; absent where there is no cluster, or it could not be read
    /// yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// True if the name may be a node's: the cluster has it or could not be read yet, a fault of it
    /// is open, or this process runs on it.
    pub known: bool,
    /// The names nearest to it, where nothing is known of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nearest: Vec<String>,
}

/// Returns whether `node` is quarantined or not, and why. `cluster` and `sources` are what the
/// caller knows beside the fleet.
pub fn why_not(
    fleet: &Fleet,
    node: &str,
    cluster: Option<Connection<'_>>,
    sources: &[Source<'_>],
    now: Timestamp,
) -> WhyNot {
    let situation = fleet.situation(node, now);
    // Those of another machine are not known here.
    let sources = if situation.is_own { sources } else { &[] };
    let mut why = explain(&situation, cluster, sources);
    if !why.known {
        let nearest = nearest(node, fleet.names(), NAMES_OFFERED);
        why.nearest = nearest.into_iter().map(str::to_owned).collect();
    }
    why
}

/// Looks at everything that decides about a node.
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
    checks.extend(anothers_check(situation));
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

/// Returns the answer about a node that is out of service by our own session.
fn out_of_service(situation: &Situation<'_>) -> String {
    let (node, session) = (situation.node, &situation.session);
    if session.phase == Phase::Releasing {
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
    format!("{node} {is}, and awaits {awaits}; `gpuwarden explain {node}` tells what for")
}

fn answer(situation: &Situation<'_>, cluster: Option<Connection<'_>>, checks: &[Check]) -> String {
    let node = situation.node;
    let own = situation.observed.and_then(|node| node.own.as_deref());
    if let (Some(own), true) = (own, situation.anothers) {
        let (who, since) = (foreign_session::who(own, node), foreign_session::since(own));
        return format!("{node} is quarantined by another gpuwarden{since}: {who}");
    }
    if own.is_some() {
        return out_of_service(situation);
    }
    // Of several rules, one that asks for it is enough.
    let asked = checks
        .iter()
        .any(|check| check.name == RULES && check.result == CheckResult::Passes);
    let stops: Vec<&Check> = checks
        .iter()
        .filter(|check| match check.result {
            CheckResult::Passes => false,
            CheckResult::Stops => !(asked && check.name == RULES),
            // Who does not see may miss the fault that would ask for it.
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
            // One reason may hold for several faults.
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

/// Name of the check whether the cluster is watched.
const CLUSTER: &str = "cluster";
/// Name of the check whether faults are seen.
const SOURCES: &str = "sources";

/// Returns the check of what sees the faults of the node; `None` where that is not known here.
fn sources_check(sources: &[Source<'_>]) -> Option<Check> {
    let told = |sees| {
        let told = sources.iter().filter(move |source| source.sees == sees);
        let told = told.map(|one| format!("{} is {}: {}", one.name, one.state, one.detail));
        told.collect::<Vec<_>>().join("; ")
    };
    if sources.is_empty() {
        return None;
    }
    if sources.iter().all(|source| source.sees) {
        return Some(passes(SOURCES, told(true)));
    }
    Some(check(SOURCES, CheckResult::Unknown, told(false)).fix("gpuwarden doctor"))
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

/// Returns the check of whether the cluster has the node.
fn node_check(node: &str, in_cluster: Option<bool>, observed: Option<&Observed>) -> Check {
    match in_cluster {
        Some(true) => {
            let cordoned = observed.filter(|node| node.view.unschedulable);
            let text = match cordoned.map(|node| (&node.view, node.own.as_deref())) {
                Some((_, None)) => {
                    "the cluster has it, cordoned, and not by gpuwarden: it stays so"
                }
                Some((view, Some(own))) if own.keeps_cordon(view) => {
                    "the cluster has it; it was cordoned before us: it stays so"
                }
                _ => "the cluster has it",
            };
            passes("node", text)
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

fn anothers_check(situation: &Situation<'_>) -> Option<Check> {
    if !situation.anothers {
        return None;
    }
    let text = "the node carries the session of another gpuwarden";
    let Some((view, own)) =
        (situation.observed).and_then(|node| Some((&node.view, node.own.as_deref()?)))
    else {
        return Some(stops("session", text));
    };
    let (who, since) = (
        foreign_session::who(own, situation.node),
        foreign_session::since(own),
    );
    let text = format!("{text}, {who}{since}: it is left alone, and counts as out of service");
    let on_our_node = situation
        .on_our_node
        .then_some(foreign_session::ON_OUR_NODE);
    let uncordoned = (own.cordoned && !view.unschedulable)
        .then_some("somebody has uncordoned the node; only who made the session takes that in");
    let details = on_our_node.into_iter().chain(uncordoned);
    let check = Check {
        details: details.map(str::to_owned).collect(),
        ..stops("session", text)
    };
    Some(check.fix(&format!(
        "it ends when that gpuwarden gives the node back; where that is gone for good: {}",
        foreign_session::end_by_hand(own, view)
    )))
}

/// Returns what holds back a quarantine that the rules ask for.
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
                "gpuwarden explain {node} tells what its events did"
            ))
        }
        1 => passes("faults", "1 is open"),
        count => passes("faults", format!("{count} are open")),
    };
    let missed = situation.missed;
    let missed = (missed > 0).then(|| not_fully_seen(missed));
    let notices =
        (notices > 0).then(|| format!("and {notices} notices, for which no repair is awaited"));
    let notes = situation.session.times.notes();
    Check {
        details: notes.chain(missed).chain(notices).collect(),
        ..check
    }
}

/// Returns how far the change has come; `None`: none is under way.
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
        "the API server has not taken the change"
    };
    let text = format!("{what}: {count} {attempts} in a row failed{next}");
    Some(stops("change", text).fix("gpuwarden doctor"))
}

#[cfg(test)]
mod tests;
