//! Why a node is in service, or is not: everything that decides about it, in the order in
//! which it counts, with what each rule has looked at.
//!
//! Pure, and worked out only when somebody asks: the decisions themselves need none of it.

use contract::keys;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::assess::{Dismissal, DismissedBy, Ruling, Verdict, assess};
use crate::brake::Hold;
use crate::fault::Fault;
use crate::node::NodeView;
use crate::policy::{NodeVariable, Policy, Rule, RuleKind, event_variable};
use crate::session::ownership::{Ownership, dismissal};
use crate::session::{Phase, Session};

/// Faults whose rules are shown one by one; the gravest.
const FAULTS_SHOWN: usize = 20;

/// What decides about a node, as it is known right now.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Its name.
    pub node: &'a str,
    /// How far decisions are carried out.
    pub acting: Acting,
    /// The connection to the cluster; `None`: there is none.
    pub cluster: Option<Connection<'a>>,
    /// The node as decisions see it; `None`: the cluster does not have it.
    pub view: Option<&'a NodeView>,
    /// Its open faults.
    pub faults: &'a [Fault],
    /// The policy in force; `None`: none was read yet, and nothing is decided.
    pub policy: Option<&'a Policy>,
    /// Its session.
    pub session: &'a Session,
    /// It carries the session of another gpuwarden.
    pub anothers: bool,
    /// Why the brake holds it back; `None`: it does not.
    pub hold: Option<&'a Hold>,
    /// When what the circuit breaker held back was last dropped.
    pub dropped_at: Option<Timestamp>,
}

/// How far decisions are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acting {
    /// Nothing is decided.
    Observe,
    /// Decided, and not written.
    DryRun,
    /// Carried out.
    Act,
}

/// The connection to the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Connection<'a> {
    /// Address of the API server.
    pub server: &'a str,
    /// Whether nodes are being watched right now.
    pub connected: bool,
    /// What is wrong with it.
    pub error: Option<&'a str>,
}

/// The answer. Serialised names are part of the JSON API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WhyNot {
    /// Node name.
    pub node: String,
    /// In one sentence.
    pub answer: String,
    /// All that was looked at, in order.
    pub checks: Vec<Check>,
    /// Whether the cluster has the node; absent where there is no cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// Whether anything is known of the name: the cluster has it, or a fault of it is open.
    pub known: bool,
    /// Where nothing is known of it: the names nearest to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nearest: Vec<String>,
}

/// One thing that decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// What it is: `cluster`, `node`, `mode`, `session`, `faults`, `rules`, `brake`, `change`.
    pub name: String,
    /// Whether it stands in the way of a quarantine.
    pub result: CheckResult,
    /// What was found.
    pub text: String,
    /// More about it, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    /// What to do about it, where there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Whether something stands in the way of a quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckResult {
    /// It does not.
    Passes,
    /// It does.
    Stops,
}

/// Looks at everything that decides about a node.
pub fn why_not(situation: &Situation<'_>) -> WhyNot {
    let Situation {
        node,
        cluster,
        view,
        faults,
        session,
        ..
    } = *situation;
    let in_cluster = cluster.map(|_| view.is_some());
    let mut checks = vec![cluster_check(cluster), mode_check(situation.acting)];
    if cluster.is_some() {
        checks.insert(1, node_check(node, view.is_some()));
    }
    checks.extend(anothers_check(situation));
    checks.push(faults_check(node, faults));
    checks.extend(rule_checks(situation));
    checks.extend(brake_check(situation));
    checks.extend(change_check(session));
    WhyNot {
        node: node.to_owned(),
        answer: answer(situation, &checks),
        checks,
        in_cluster,
        known: in_cluster == Some(true) || !faults.is_empty(),
        nearest: Vec::new(),
    }
}

fn answer(situation: &Situation<'_>, checks: &[Check]) -> String {
    let node = situation.node;
    let quarantined = situation
        .view
        .is_some_and(|view| Ownership::read(view).is_some());
    if quarantined && !situation.anothers {
        return match situation.session.phase {
            Phase::Releasing => format!("{node} is being given back"),
            _ => format!("{node} is quarantined; `gpuwarden explain {node}` tells what for"),
        };
    }
    // Of several rules, one that asks for it is enough.
    let asked = checks
        .iter()
        .any(|check| check.name == RULES && check.result == CheckResult::Passes);
    let stops: Vec<&Check> = checks
        .iter()
        .filter(|check| check.result == CheckResult::Stops && !(asked && check.name == RULES))
        .collect();
    match stops.as_slice() {
        [] => format!(
            "{node} is being quarantined: {}",
            situation.session.awaits(situation.view.is_some())
        ),
        [first, rest @ ..] => {
            let more = match rest.len() {
                0 => String::new(),
                1 => " (and one more reason below)".to_owned(),
                count => format!(" (and {count} more reasons below)"),
            };
            format!("{node} is not quarantined: {}{more}", first.text)
        }
    }
}

/// Name of the checks of which one that passes is enough.
const RULES: &str = "rules";

fn cluster_check(cluster: Option<Connection<'_>>) -> Check {
    let Some(Connection {
        server,
        connected,
        error,
    }) = cluster
    else {
        return stops(
            "cluster",
            "no cluster is given: only this machine is watched",
        )
        .fix("gpuwarden run --kubeconfig FILE");
    };
    if connected {
        return passes("cluster", format!("{server}, its nodes are watched"));
    }
    let error = error.unwrap_or("its nodes are not known yet");
    stops("cluster", format!("{server} cannot be watched: {error}")).fix("gpuwarden doctor")
}

fn node_check(node: &str, known: bool) -> Check {
    if known {
        passes("node", "the cluster has it")
    } else {
        stops(
            "node",
            format!("the cluster has no node of the name {node}"),
        )
        .fix("kubectl get nodes; --node-name sets the name of this machine")
    }
}

fn mode_check(acting: Acting) -> Check {
    match acting {
        Acting::Act => passes("mode", "quarantine: decisions are carried out"),
        Acting::DryRun => stops("mode", "a dry run: decided and shown, not written")
            .fix("gpuwarden run --quarantine without --dry-run"),
        Acting::Observe => {
            stops("mode", "observing only: nothing is decided").fix("gpuwarden run --quarantine")
        }
    }
}

fn anothers_check(situation: &Situation<'_>) -> Option<Check> {
    situation.anothers.then(|| {
        stops(
            "session",
            "the node carries the session of another gpuwarden, and is left alone",
        )
    })
}

/// What holds back a quarantine that the rules ask for.
fn brake_check(situation: &Situation<'_>) -> Option<Check> {
    let hold = situation.hold?;
    Some(stops("brake", hold.to_string()).fix(hold.awaits()))
}

fn faults_check(node: &str, faults: &[Fault]) -> Check {
    match faults.len() {
        0 => stops("faults", "no fault of it is open").fix(&format!(
            "gpuwarden explain {node} tells what its events did"
        )),
        1 => passes("faults", "1 is open"),
        count => passes("faults", format!("{count} are open")),
    }
}

/// One check for each open fault, gravest first.
fn rule_checks(situation: &Situation<'_>) -> Vec<Check> {
    let Some(policy) = situation.policy else {
        return vec![
            stops(RULES, "no policy was read yet: nothing is decided before")
                .fix("gpuwarden status says why the policy cannot be read"),
        ];
    };
    let unknown = NodeView::unknown(situation.node);
    let node = situation.view.unwrap_or(&unknown);
    let mut faults: Vec<&Fault> = situation.faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let left = faults.len().saturating_sub(FAULTS_SHOWN);
    let variable = NodeVariable::new(&node.object);
    let mut checks = Vec::new();
    for fault in faults.into_iter().take(FAULTS_SHOWN) {
        let desired = assess(
            std::slice::from_ref(fault),
            policy,
            node,
            dismissal(node, situation.dropped_at),
        );
        for verdict in &desired.verdicts {
            checks.push(rule_check(verdict, fault, policy, node, &variable));
        }
    }
    if let Some(last) = checks.last_mut().filter(|_| left > 0) {
        last.details
            .push(format!("and {left} more open faults, which are less grave"));
    }
    checks
}

fn rule_check(
    verdict: &Verdict,
    fault: &Fault,
    policy: &Policy,
    node: &NodeView,
    variable: &NodeVariable,
) -> Check {
    let title = &verdict.fault;
    match &verdict.ruling {
        Ruling::HandedOver => stops(
            RULES,
            format!(
                "{title}: the node is handed over for repair (label {}=false)",
                keys::HANDED_OVER_LABEL
            ),
        )
        .fix("whoever repairs it takes the label off when the node is given back"),
        Ruling::Dismissed(Dismissal { up_to, by }) => stops(
            RULES,
            match by {
                DismissedBy::Released => {
                    format!("{title}: dismissed when the node was released by hand at {up_to:.0}")
                }
                DismissedBy::Dropped => format!(
                    "{title}: dropped when the circuit breaker was reset with cursor CREATE at \
                     {up_to:.0}"
                ),
            },
        )
        .fix("a newer report of the fault counts again"),
        Ruling::Skipped => stops(
            RULES,
            format!("{title}: its sender asks not to quarantine (skip)"),
        ),
        Ruling::Forced => passes(
            RULES,
            format!("{title}: its sender asks to quarantine (force)"),
        ),
        Ruling::Judged { wanted, .. } => {
            let mut check = if *wanted {
                passes(RULES, format!("{title}: a rule set asks for it"))
            } else {
                stops(RULES, format!("{title}: no rule set asks for it"))
            };
            check.details = rule_details(policy, fault, node, variable);
            check
        }
    }
}

/// What each rule of each rule set says, and what it has looked at.
fn rule_details(
    policy: &Policy,
    fault: &Fault,
    node: &NodeView,
    variable: &NodeVariable,
) -> Vec<String> {
    let rule_sets = policy.rule_sets_of(node);
    if rule_sets.is_empty() {
        return vec![format!("the policy ({}) has no rule sets", policy.source)];
    }
    let event = event_variable(&fault.event);
    let mut details = Vec::new();
    for rule_set in rule_sets {
        let answer = rule_set.answer(&event, variable);
        let asks = if rule_set.asks() {
            ""
        } else {
            ", and asks for nothing"
        };
        details.push(format!("'{}' {answer}{asks}", rule_set.name));
        let rules = rule_set.all.iter().map(|rule| ("all", rule));
        let rules = rules.chain(rule_set.any.iter().map(|rule| ("any", rule)));
        for (group, rule) in rules {
            details.extend(rule_lines(group, rule, &event, node, variable));
        }
    }
    details
}

fn rule_lines(
    group: &str,
    rule: &Rule,
    event: &Value,
    node: &NodeView,
    variable: &NodeVariable,
) -> Vec<String> {
    let said = match rule.holds(event, variable) {
        Ok(true) => "true".to_owned(),
        Ok(false) => "false".to_owned(),
        Err(why) => format!("cannot be evaluated: {why}"),
    };
    let mut lines = vec![format!("  {group}: {} -> {said}", rule.expression)];
    let looked_at = match rule.kind {
        RuleKind::HealthEvent | RuleKind::Override => event,
        RuleKind::Node => &node.object,
    };
    lines.extend(
        rule.seen(looked_at)
            .into_iter()
            .map(|seen| format!("    {seen}")),
    );
    lines
}

/// How far the change has come; `None`: none is under way.
fn change_check(session: &Session) -> Option<Check> {
    if session.failures == 0 {
        return None;
    }
    let count = session.failures;
    let attempts = if count == 1 { "attempt" } else { "attempts" };
    let next = session
        .not_before
        .map_or_else(String::new, |at| format!(", the next is made at {at:.0}"));
    Some(
        stops(
            "change",
            format!(
                "the API server has not taken the change: {count} {attempts} in a row failed{next}"
            ),
        )
        .fix("gpuwarden doctor"),
    )
}

fn passes(name: &str, text: impl Into<String>) -> Check {
    check(name, CheckResult::Passes, text)
}

fn stops(name: &str, text: impl Into<String>) -> Check {
    check(name, CheckResult::Stops, text)
}

fn check(name: &str, result: CheckResult, text: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        result,
        text: text.into(),
        details: Vec::new(),
        fix: None,
    }
}

// === impl Check ===

impl Check {
    fn fix(mut self, fix: &str) -> Self {
        self.fix = Some(fix.to_owned());
        self
    }
}

#[cfg(test)]
mod tests {
    use contract::{HealthEvent, keys};
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::event::{Record, normalise};
    use crate::fault::FaultBook;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn faults(fatal: bool) -> Vec<Fault> {
        let mut event = HealthEvent {
            agent: keys::SYSLOG_AGENT.into(),
            component_class: "GPU".into(),
            check_name: keys::CHECK_XID.into(),
            node_name: "n1".into(),
            is_fatal: fatal,
            error_code: vec!["79".into()],
            ..HealthEvent::default()
        };
        normalise(&mut event, at(100));
        let mut book = FaultBook::default();
        book.record(&Record {
            seq: 1,
            id: event.id.clone(),
            created_at: at(100),
            event,
        });
        book.faults("n1").to_vec()
    }

    fn node(metadata: Value) -> NodeView {
        let mut metadata = metadata;
        metadata["name"] = "n1".into();
        NodeView::from_object(json!({ "metadata": metadata })).unwrap()
    }

    struct World {
        acting: Acting,
        connected: Option<bool>,
        view: Option<NodeView>,
        faults: Vec<Fault>,
        session: Session,
        anothers: bool,
        hold: Option<Hold>,
    }

    fn world() -> World {
        World {
            acting: Acting::Act,
            connected: Some(true),
            view: Some(node(json!({}))),
            faults: faults(true),
            session: Session::idle(at(0)),
            anothers: false,
            hold: None,
        }
    }

    fn ask(world: &World) -> WhyNot {
        why_not(&Situation {
            node: "n1",
            acting: world.acting,
            cluster: world.connected.map(|connected| Connection {
                server: "https://api",
                connected,
                error: Some("refused"),
            }),
            view: world.view.as_ref(),
            faults: &world.faults,
            policy: Some(&Policy::builtin()),
            session: &world.session,
            anothers: world.anothers,
            hold: world.hold.as_ref(),
            dropped_at: None,
        })
    }

    #[test]
    fn the_first_thing_that_stands_in_the_way_is_the_answer() {
        type Edit = fn(&mut World);
        let failed = |world: &mut World| {
            world
                .session
                .failed(crate::session::Failure::Conflict, at(1));
        };
        let table: [(Edit, &str, usize); 13] = [
            (|_| (), "n1 is being quarantined", 0),
            (
                |world| world.hold = Some(Hold::Tripped),
                "the circuit breaker is tripped",
                1,
            ),
            (|world| world.connected = None, "no cluster is given", 1),
            (
                |world| world.connected = Some(false),
                "https://api cannot be watched: refused",
                1,
            ),
            (
                |world| world.view = None,
                "the cluster has no node of the name n1",
                1,
            ),
            (|world| world.acting = Acting::Observe, "observing only", 1),
            (|world| world.acting = Acting::DryRun, "a dry run", 1),
            (
                |world| world.anothers = true,
                "the session of another gpuwarden",
                1,
            ),
            (|world| world.faults.clear(), "no fault of it is open", 1),
            (
                |world| world.faults = faults(false),
                "no rule set asks for it",
                1,
            ),
            (
                |world| {
                    world.view = Some(node(
                        json!({"annotations": {keys::RELEASED_AT: "1970-01-01T00:01:40Z"}}),
                    ));
                },
                "dismissed when the node was released by hand at 1970-01-01T00:01:40Z",
                1,
            ),
            (failed, "has not taken the change: 1 attempt", 1),
            (
                |world| {
                    world.acting = Acting::Observe;
                    world.faults.clear();
                },
                "observing only: nothing is decided (and one more reason below)",
                2,
            ),
        ];
        for (edit, expected, stopped) in table {
            let mut world = world();
            edit(&mut world);
            let why = ask(&world);
            assert!(why.answer.contains(expected), "{expected}: {why:#?}");
            let stops = why
                .checks
                .iter()
                .filter(|check| check.result == CheckResult::Stops);
            assert_eq!(stops.count(), stopped, "{why:#?}");
        }
    }

    #[test]
    fn a_rule_shows_what_it_has_looked_at() {
        let mut world = world();
        world.view = Some(node(
            json!({"labels": {keys::MANAGED_LABEL: "false", "zone": "a"}}),
        ));
        let why = ask(&world);
        let details = &why.checks.last().unwrap().details;
        assert!(
            details[0].starts_with("'default' does not match: !(has("),
            "{details:#?}"
        );
        let label = format!(
            "    node.metadata.labels['{}'] = \"false\"",
            keys::MANAGED_LABEL
        );
        assert!(details.contains(&label), "{details:#?}");
        assert!(
            details.contains(&"  any: event.isFatal -> true".to_owned()),
            "{details:#?}"
        );
        assert!(
            details.contains(&"    event.isFatal = true".to_owned()),
            "{details:#?}"
        );
    }

    #[test]
    fn one_fault_that_is_wanted_is_enough() {
        let mut world = world();
        world.faults.extend(faults(false));
        let why = ask(&world);
        assert!(
            why.answer.starts_with("n1 is being quarantined"),
            "{why:#?}"
        );
    }
}
