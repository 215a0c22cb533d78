//! Warnings about valid rules: codes, checks and monitors that do not exist, actions that contradict
//! the catalogue, and conditions that are never met.

use std::collections::BTreeSet;

use analysis::{
    AGENT, APPLICATION_CODES, Condition, ConditionKind, EventView, GroupKey, Matches, Rule,
};
use contract::nearest::hint;
use contract::{HealthEvent, RecommendedAction, keys};
use diagnosis::catalog::Catalog;
use jiff::SignedDuration;
use model::reporter::OWN_AGENT;
use policy::ComparisonKind;
use serde::Serialize;

use crate::lint::unknown_name;
use crate::standard::{self, Standard};

/// Warning about a rule. Serialized names are part of the output of `rules lint`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleWarning {
    /// Name of the rule.
    pub rule: String,
    /// Finding of the check, for people.
    pub what: String,
    /// Advice on what to change, for people.
    pub hint: String,
}

/// Collector of the warnings about one rule.
struct Warnings<'a> {
    rule: &'a Rule,
    found: Vec<RuleWarning>,
}

/// Returns the warnings about rules. Events are stored for the time `retention`.
pub fn lint(rules: &[Rule], retention: SignedDuration, catalog: &Catalog) -> Vec<RuleWarning> {
    let events = standard::events(catalog);
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    let mut all = Vec::new();
    for rule in rules {
        let mut warnings = Warnings {
            rule,
            found: Vec::new(),
        };
        warnings.of_names(&names);
        warnings.of_codes(catalog);
        if warnings.found.is_empty() {
            warnings.of_events(&events);
        }
        warnings.of_action();
        warnings.of_window(retention);
        warnings.of_threshold();
        for warning in warnings.found {
            if !all.contains(&warning) {
                all.push(warning);
            }
        }
    }
    all
}

// === impl Warnings ===

impl Warnings<'_> {
    fn warn(&mut self, what: impl Into<String>, hint: impl Into<String>) {
        self.found.push(RuleWarning {
            rule: self.rule.name.clone(),
            what: what.into(),
            hint: hint.into(),
        });
    }

    /// Warns of monitors and checks that send no event, or none that counts.
    fn of_names(&mut self, rules: &BTreeSet<&str>) {
        let of_analyzer = "it matches conclusions of the analysis, which are no input of rules";
        for matches in all_matches(self.rule) {
            for agent in &matches.agents {
                if agent == AGENT {
                    self.warn(of_analyzer, "match the events that the conclusion rests on");
                } else if agent != OWN_AGENT
                    && let Some((what, hint)) =
                        unknown_name("agent", ComparisonKind::Equality, agent)
                {
                    self.warn(what, hint);
                }
            }
            for check in &matches.checks {
                if rules.contains(check.as_str()) {
                    let what = format!("{of_analyzer}: {check}");
                    self.warn(what, "match the events that the conclusion rests on");
                }
            }
        }
        let recover = self.rule.recover.iter();
        let checks = all_matches(self.rule)
            .flat_map(|it| &it.checks)
            .chain(recover);
        for check in checks {
            let unknown = unknown_name("checkName", ComparisonKind::Equality, check);
            if let Some((what, hint)) = unknown {
                self.warn(what, hint);
            }
        }
    }

    /// Warns of codes that the catalogue does not have.
    fn of_codes(&mut self, catalog: &Catalog) {
        for matches in all_matches(self.rule) {
            let Some(known) = known_codes(matches, catalog) else {
                continue;
            };
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            let of_dcgm =
                |code: &str| matches.checks.is_empty() && catalog.dcgm_named(code).is_some();
            for code in matches.codes.iter().chain(&matches.other_than) {
                if !of_dcgm(code) && !known.contains(&code.as_str()) {
                    let near = hint(code, &known);
                    let advice = || "`gpuwarden catalog` lists the codes".to_owned();
                    self.warn(
                        format!("the catalogue has no code '{code}'"),
                        near.unwrap_or_else(advice),
                    );
                }
            }
        }
    }

    /// Warns if no event of a known monitor is part of the rule, or of one of its steps. Rules with
    /// an expression, and checks of other monitors, cannot be tried.
    fn of_events(&mut self, events: &[Standard]) {
        let checks: BTreeSet<&str> = (events.iter())
            .map(|one| one.event.check_name.as_str())
            .collect();
        let can_be_tried = |matches: &Matches| {
            let of_log = |check: &String| check.starts_with("SysLogs");
            let has_codes = !matches.codes.is_empty();
            matches.expression.is_none()
                && (matches.checks.iter()).all(|check| checks.contains(check.as_str()))
                // Events of other monitors are there without their codes.
                && !(has_codes && (matches.checks.is_empty() || !matches.checks.iter().all(of_log)))
        };
        let healthy = |event: &HealthEvent| HealthEvent {
            is_healthy: true,
            is_fatal: false,
            ..event.clone()
        };
        let steps_of =
            |event: &HealthEvent| self.rule.steps_of(&EventView::new(event), &mut Vec::new());
        let tried = events.iter().map(|one| &one.event);
        let met = tried.fold(0, |bits, event| {
            bits | steps_of(event) | steps_of(&healthy(event))
        });
        let missed = (0_u32..).zip(all_matches(self.rule));
        let missed =
            missed.filter(|(step, matches)| met & (1 << step) == 0 && can_be_tried(matches));
        let missed: Vec<u32> = missed.map(|(step, _)| step + 1).collect();
        let count = events.len();
        for step in missed {
            let it = if self.rule.steps.is_empty() {
                "it".to_owned()
            } else {
                format!("report {step} of its steps")
            };
            self.warn(
                format!("{it} matches none of the {count} events that known monitors send"),
                "check that its monitors, checks, codes and fatal_events belong together",
            );
        }
    }

    /// Warns of a repair that does not help against errors of applications.
    fn of_action(&mut self) {
        let is_repair = matches!(
            self.rule.action,
            RecommendedAction::ComponentReset
                | RecommendedAction::RestartVm
                | RecommendedAction::RestartBm
                | RecommendedAction::ReplaceVm
        );
        let of_xids = all_matches(self.rule).filter(|it| {
            it.checks.is_empty() || it.checks.iter().any(|one| one == keys::CHECK_XID)
        });
        for code in of_xids.flat_map(|matches| &matches.codes) {
            if is_repair && APPLICATION_CODES.contains(&code.as_str()) {
                let action = self.rule.action.as_str_name();
                self.warn(
                    format!("it asks for {action} because of XID {code}, which applications cause"),
                    format!(
                        "`gpuwarden catalog xid {code}` tells what the code means; RUN_DCGMEUD finds out \
                         whether the GPU is bad"
                    ),
                );
            }
        }
    }

    /// Warns of a window that is longer than events are stored.
    fn of_window(&mut self, retention: SignedDuration) {
        let condition = &self.rule.condition;
        let (looks_back, windows) = match condition.kind {
            ConditionKind::Trend { .. } => {
                (condition.window + condition.window, "its two windows are")
            }
            _ => (condition.window, "its window is"),
        };
        if looks_back > retention {
            self.warn(
                format!("{windows} {looks_back:#} long, and events are stored for {retention:#}"),
                "after a change of the rules only stored events count; --retention of `run` and \
                 `controller` stores them for longer",
            );
        }
    }

    /// Returns true if each group of the rule has one value of a key.
    fn has_one(&self, key: &GroupKey) -> bool {
        let of_node = *key == GroupKey::Node && self.rule.is_of_one_node();
        self.rule.group_by.contains(key) || of_node
    }

    /// Warns of a threshold that cannot be reached.
    fn of_threshold(&mut self) {
        let Condition {
            kind,
            threshold,
            window,
            ..
        } = &self.rule.condition;
        if *threshold < 2 {
            return;
        }
        if let Some(key) = self.rule.member.as_ref().filter(|key| self.has_one(key)) {
            self.warn(
                format!("it compares each '{key}' with its siblings, and a group has one"),
                "group by something wider, such as rack",
            );
        }
        let between = i32::try_from(threshold - 1).unwrap_or(i32::MAX);
        for key in self
            .rule
            .distinct
            .iter()
            .filter(|_| self.rule.distinct.len() == 1)
        {
            if self.has_one(key) {
                self.warn(
                    format!("distinct counts '{key}', of which a group has one: {threshold} are never reached"),
                    "group by something wider, such as rack, or count another key",
                );
            }
        }
        if let ConditionKind::Burst(gaps) = kind {
            let codes = &self.rule.matches.codes;
            let is_sticky =
                !codes.is_empty() && codes.iter().all(|code| gaps.sticky.contains(code));
            let gap = if is_sticky {
                gaps.gap.max(gaps.sticky_gap)
            } else {
                gaps.gap
            };
            if gap
                .checked_mul(between)
                .is_none_or(|least| least >= *window)
            {
                let why = if is_sticky {
                    ", since faults with its codes last"
                } else {
                    ""
                };
                self.warn(
                    format!(
                        "reports within {gap:#} are one burst{why}: {threshold} bursts need more than \
                         the window of {window:#}"
                    ),
                    "lower the threshold or the gap, or lengthen the window",
                );
            }
        }
        let counts_jobs_once = matches!(kind, ConditionKind::Count | ConditionKind::Burst(_));
        let codes = &self.rule.matches.codes;
        let of_applications = !codes.is_empty()
            && codes
                .iter()
                .all(|code| APPLICATION_CODES.contains(&code.as_str()));
        if counts_jobs_once && of_applications && self.rule.group_by.contains(&GroupKey::Job) {
            self.warn(
                format!(
                    "errors that applications cause count once for each job: {threshold} are never \
                     reached in the group of a job"
                ),
                "count distinct nodes or GPUs of the job",
            );
        }
    }
}

/// Returns the events of the steps of a rule, or of a rule without steps.
fn all_matches(rule: &Rule) -> impl Iterator<Item = &Matches> {
    let own = rule.steps.is_empty().then_some(&rule.matches);
    own.into_iter().chain(&rule.steps)
}

/// Returns the codes of the checks that are matched. `None` if they may be of a monitor that the
/// catalogue does not know.
fn known_codes(matches: &Matches, catalog: &Catalog) -> Option<BTreeSet<String>> {
    let xids = || {
        let printed = catalog.xids().filter(|row| row.scope != "unused");
        printed.map(|row| row.code.to_string())
    };
    let sxids = || catalog.sxids().map(|row| row.code.to_string());
    let nics = || catalog.nics().iter().map(|row| row.name.to_string());
    let mut codes = BTreeSet::new();
    if matches.checks.is_empty() {
        let is_log = |agent: &String| agent == keys::SYSLOG_AGENT;
        if !matches.agents.iter().all(is_log) {
            return None;
        }
        codes.extend(xids().chain(sxids()).chain(nics()));
        codes.extend([keys::CODE_GPU_FALLEN_OFF, keys::CODE_GPU_INIT_FAILED].map(str::to_owned));
        codes.insert(keys::CODE_GPU_RESET_FAILURE.to_owned());
        if matches.agents.is_empty() {
            codes.insert(keys::CODE_DCGM_CONNECTIVITY.to_owned());
            codes.insert(keys::CODE_VALIDATION_FAILED.to_owned());
        }
    }
    for check in &matches.checks {
        match check.as_str() {
            keys::CHECK_XID => {
                codes.extend(xids());
                codes.insert(keys::CODE_GPU_RESET_FAILURE.to_owned());
            }
            keys::CHECK_SXID => codes.extend(sxids()),
            keys::CHECK_NIC_DRIVER => codes.extend(nics()),
            _ => return None,
        }
    }
    Some(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);

    fn warnings(keys: &str) -> Vec<String> {
        let text = format!(
            "[[rules]]\nname = \"r\"\nmessage = \"m\"\n{}{}{}{keys}\n",
            if keys.contains("action") {
                ""
            } else {
                "action = \"NONE\"\n"
            },
            if keys.contains("window") {
                ""
            } else {
                "window = \"24h\"\n"
            },
            if keys.contains("kind") {
                ""
            } else {
                "kind = \"count\"\nthreshold = 2\n"
            },
        );
        let rules = analysis::parse(&text, "rules.toml").unwrap();
        let found = lint(&rules, RETENTION, Catalog::builtin()).into_iter();
        let found = found.filter(|one| one.rule == "r");
        found
            .map(|one| format!("{}; {}", one.what, one.hint))
            .collect()
    }

    #[test]
    fn the_built_in_rules_are_fine() {
        let rules = analysis::built_in();
        assert_eq!(lint(&rules, RETENTION, Catalog::builtin()), []);
        let short = lint(&rules, SignedDuration::from_hours(48), Catalog::builtin());
        let names: Vec<&str> = short.iter().map(|one| one.rule.as_str()).collect();
        assert_eq!(names, ["MultipleRemediations", "RepairNotWorking"]);
    }

    #[test]
    fn what_cannot_be_meant_is_named_with_what_was_meant() {
        for (keys, expected) in [
            (
                "checks = [\"SysLogXIDError\"]",
                "did you mean 'SysLogsXIDError'?",
            ),
            (
                "agents = [\"syslog-helth-monitor\"]",
                "did you mean 'syslog-health-monitor'?",
            ),
            ("recover = [\"GpuMemWacht\"]", "did you mean 'GpuMemWatch'?"),
            (
                "agents = [\"health-events-analyzer\"]",
                "which are no input of rules",
            ),
            (
                "checks = [\"RackFault\"]",
                "which are no input of rules: RackFault",
            ),
            (
                "checks = [\"SysLogsXIDError\"]\ncodes = [\"1079\"]",
                "no code '1079'",
            ),
            (
                "codes = [\"79\", \"netdev_watchdg\"]",
                "did you mean 'netdev_watchdog'?",
            ),
            (
                "checks = [\"SysLogsXIDError\"]\ncodes = [\"79\"]\nfatal_events = false",
                "it matches none of the",
            ),
            (
                "kind = \"sequence\"\nchecks = [\"SysLogsXIDError\"]\nsteps = [{ codes = [\"79\"] }, { codes = [\"13\"], fatal_events = true }]",
                "report 2 of its steps matches none",
            ),
            (
                "codes = [\"13\"]\naction = \"RESTART_BM\"",
                "it asks for RESTART_BM because of XID 13",
            ),
            (
                "kind = \"trend\"\nthreshold = 2\nwindow = \"400h\"",
                "its two windows are 800h long",
            ),
            ("distinct = [\"node\"]", "distinct counts 'node'"),
            (
                "distinct = [\"gpu\"]\ngroup_by = [\"gpu\"]",
                "distinct counts 'gpu'",
            ),
            (
                "kind = \"burst\"\ngap = \"3m\"\nthreshold = 5\nwindow = \"12m\"",
                "5 bursts need more than the window of 12m",
            ),
            (
                "kind = \"burst\"\ngap = \"3m\"\nthreshold = 3\nwindow = \"6h\"\ncodes = [\"79\"]",
                "reports within 3h are one burst, since faults with its codes last",
            ),
            (
                "codes = [\"13\"]\ngroup_by = [\"job\"]",
                "count once for each job",
            ),
            (
                "kind = \"outlier\"\nmember = \"node\"\nfactor = 3\nsiblings = 3\nthreshold = 3\ngap = \"5m\"",
                "it compares each 'node' with its siblings, and a group has one",
            ),
            (
                "kind = \"count\"\ndistinct = [\"gpu\"]\nexclusive = true\ngap = \"5m\"\nthreshold = 2\ngroup_by = [\"gpu\"]",
                "distinct counts 'gpu'",
            ),
        ] {
            let found = warnings(keys);
            assert_eq!(found.len(), 1, "{keys}: {found:#?}");
            assert!(found[0].contains(expected), "{keys}: {found:#?}");
        }
    }

    #[test]
    fn what_can_be_meant_has_no_warning() {
        for keys in [
            "codes = [\"79\"]\naction = \"RESTART_BM\"",
            "codes = [\"13\"]\naction = \"RUN_DCGMEUD\"",
            "checks = [\"my own check\"]\ncodes = [\"my own code\"]",
            "kind = \"burst\"\ngap = \"3m\"\nthreshold = 5\nwindow = \"13m\"",
            "kind = \"burst\"\ngap = \"3m\"\nthreshold = 3\nwindow = \"7h\"\ncodes = [\"79\"]",
            "distinct = [\"node\"]\ngroup_by = [\"rack\"]",
            "distinct = [\"node\"]\ncodes = [\"13\"]\ngroup_by = [\"job\"]",
            "codes = [\"DCGM_FR_PENDING_ROW_REMAP\"]",
            "match = \"event.bit('REG0', 1)\"\ncodes = [\"74\"]",
            "window = \"720h\"",
            "agents = [\"gpuwarden\"]\nchecks = [\"NodeRepaired\"]",
        ] {
            assert_eq!(warnings(keys), [""; 0], "{keys}");
        }
    }
}
