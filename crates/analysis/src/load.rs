//! Loading of a file of rules (TOML). All findings are reported at once, each with its line.
//!
//! The rules of a file come beside the built-in ones. One with the name of a built-in rule and
//! without `kind` changes what it names of that rule, as entries of NVSentinel's file do.

mod compared;
mod topology;

use contract::findings::{FileError, Findings, Format};
use contract::{ProcessingStrategy, RecommendedAction, parse_action};
use jiff::SignedDuration;
use policy::{CelRule, RuleKind};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::condition::{Condition, ConditionKind, Gaps};
use crate::group::{GroupKey, Topology};
use crate::place::NodePlaces;
use crate::rule::{Matches, Rule};

use topology::TopologyEntry;

/// Built-in rules.
pub const BUILT_IN: &str = include_str!("../data/rules.toml");
/// Name of the built-in rules in findings.
const BUILT_IN_SOURCE: &str = "built-in rules";
/// Longest window: events are stored for 30 days by default.
pub const MAX_WINDOW: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Largest threshold: a group keeps as many items, and a conclusion names as many events.
pub const MAX_THRESHOLD: i64 = 100;
/// Most reports of all steps of a sequence.
pub const MAX_STEPS: usize = 16;
/// Codes whose faults last: reports with them are one burst for [`STICKY_GAP`] (NVSentinel's
/// analyzer).
const STICKY: [&str; 5] = ["74", "79", "95", "109", "119"];
/// Longest time between two reports of one burst with such codes.
const STICKY_GAP: SignedDuration = SignedDuration::from_hours(3);

/// Text of rules, and the place that it comes from. Both are empty for the built-in rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RulesText {
    /// File or `ConfigMap`.
    pub source: String,
    /// Rules beside the built-in ones.
    pub text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// False to use the rules of the file only.
    #[serde(default = "on")]
    built_in: bool,
    #[serde(default)]
    topology: TopologyEntry,
    #[serde(default)]
    rules: Vec<Spanned<RuleEntry>>,
}

/// A rule as in the file. The keys behind an alias are NVSentinel's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleEntry {
    name: String,
    #[serde(alias = "evaluate_rule")]
    enabled: Option<bool>,
    /// Text for readers of the file.
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    checks: Vec<String>,
    #[serde(default)]
    codes: Vec<String>,
    fatal_events: Option<bool>,
    #[serde(rename = "match")]
    expression: Option<String>,
    #[serde(default)]
    group_by: Vec<String>,
    kind: Option<String>,
    window: Option<String>,
    threshold: Option<i64>,
    share: Option<String>,
    #[serde(default)]
    distinct: Vec<String>,
    gap: Option<String>,
    close: Option<String>,
    within: Option<String>,
    factor: Option<i64>,
    /// True to count only values that no other group has.
    exclusive: Option<bool>,
    member: Option<String>,
    /// True to look for a member without reports, beside others that have some.
    silent: Option<bool>,
    siblings: Option<i64>,
    #[serde(default)]
    steps: Vec<StepEntry>,
    #[serde(default)]
    recover: Vec<String>,
    component_class: Option<String>,
    #[serde(alias = "recommended_action")]
    action: Option<String>,
    fatal: Option<bool>,
    message: Option<String>,
    #[serde(alias = "processing_strategy")]
    strategy: Option<String>,
    /// NVSentinel's queries of its database, which the built-in rule of the name stands for.
    stage: Option<Vec<String>>,
}

/// Step of a sequence. An empty list is that of the rule.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepEntry {
    #[serde(default = "once")]
    times: i64,
    #[serde(default)]
    healthy: bool,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    checks: Vec<String>,
    #[serde(default)]
    codes: Vec<String>,
    fatal_events: Option<bool>,
    #[serde(rename = "match")]
    expression: Option<String>,
}

fn on() -> bool {
    true
}

fn once() -> i64 {
    1
}

/// Events of a rule or a step, as in the file.
struct MatchEntry<'a> {
    agents: &'a [String],
    checks: &'a [String],
    codes: &'a [String],
    fatal_events: Option<bool>,
    expression: Option<&'a str>,
}

/// Reader of one rule.
struct Reader<'a, 'f> {
    findings: &'a mut Findings<'f>,
    /// Path of the rule in the file.
    path: String,
    topology: &'a Topology,
}

/// Returns the built-in rules.
pub fn built_in() -> Vec<Rule> {
    built_in_by(&Topology::default())
}

fn built_in_by(topology: &Topology) -> Vec<Rule> {
    // A test reads them.
    let file = Findings::read::<File>(BUILT_IN, BUILT_IN_SOURCE, Format::Toml);
    let rules = file.and_then(|(file, findings)| rules_of(file, findings, topology, &[]));
    rules.unwrap_or_default()
}

/// Parses a file of rules, and returns them with the built-in ones, if the file does not switch
/// those off. `source` names the file in findings. Rules that are not enabled are checked, and left
/// out.
pub fn parse(text: &str, source: &str) -> Result<Vec<Rule>, FileError> {
    let (mut file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
    let topology = std::mem::take(&mut file.topology).read(&mut findings);
    rules_of(file, findings, &topology, &built_in_by(&topology))
}

fn rules_of(
    file: File,
    mut findings: Findings<'_>,
    topology: &Topology,
    built_in: &[Rule],
) -> Result<Vec<Rule>, FileError> {
    let mut rules: Vec<Rule> = Vec::new();
    if file.built_in {
        rules.extend(built_in.iter().cloned());
    }
    let mut names: Vec<String> = Vec::new();
    for (index, entry) in file.rules.into_iter().enumerate() {
        let entry = findings.begin_entry(entry, |entry| format!("rule '{}'", entry.name));
        if entry.name.trim().is_empty() {
            findings.wrong("a rule needs a name");
        } else if names.contains(&entry.name) {
            findings.wrong("there is another rule with this name");
        }
        names.push(entry.name.clone());
        let (name, enabled) = (entry.name.clone(), entry.enabled.unwrap_or(true));
        let known = built_in.iter().find(|rule| rule.name == entry.name);
        let mut reader = Reader {
            findings: &mut findings,
            path: format!("rules[{index}]"),
            topology,
        };
        let rule = match known {
            Some(known) if entry.kind.is_none() => reader.changed(known, &entry),
            _ => reader.rule(entry),
        };
        rules.retain(|rule| rule.name != name);
        rules.extend(rule.filter(|_| enabled));
    }
    findings.result(rules)
}

fn or_common<'a>(own: &'a [String], common: &'a [String]) -> &'a [String] {
    if own.is_empty() { common } else { own }
}

// === impl RulesText ===

impl RulesText {
    /// Parses the rules, as [`parse`] does.
    pub fn parse(&self) -> Result<Vec<Rule>, FileError> {
        if self.text.is_empty() {
            return Ok(built_in());
        }
        parse(&self.text, &self.source)
    }

    /// Returns the places that the text gives to nodes by their names; none if it has findings.
    pub fn places(&self) -> NodePlaces {
        let file = Findings::read::<File>(&self.text, &self.source, Format::Toml);
        let read = file.map(|(file, mut findings)| file.topology.read(&mut findings).nodes);
        read.unwrap_or_default()
    }
}

// === impl RuleEntry ===

impl RuleEntry {
    fn events(&self) -> MatchEntry<'_> {
        MatchEntry {
            agents: &self.agents,
            checks: &self.checks,
            codes: &self.codes,
            fatal_events: self.fatal_events,
            expression: self.expression.as_deref(),
        }
    }
}

// === impl Reader ===

impl Reader<'_, '_> {
    fn at(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    fn refuse(&mut self, key: &str, wanted: &str) {
        let at = self.at(key);
        self.findings.refuse(&at, wanted);
    }

    /// Reads a changed built-in rule.
    fn changed(&mut self, known: &Rule, entry: &RuleEntry) -> Option<Rule> {
        let mut rule = known.clone();
        if let Some(action) = &entry.action {
            rule.action = self.action(action)?;
            rule.fatal = rule.action != RecommendedAction::None;
        }
        if let Some(fatal) = entry.fatal {
            rule.fatal = fatal;
        }
        self.changed_outlier(&mut rule, entry)?;
        rule.condition.until_repaired = rule.fatal;
        if let Some(strategy) = &entry.strategy {
            rule.strategy = self.strategy(strategy)?;
        }
        if let Some(window) = &entry.window {
            rule.condition.window = self.duration("window", Some(window), "")?;
        }
        if let Some(threshold) = entry.threshold {
            rule.condition.threshold = self.threshold(Some(threshold))?;
        }
        if let Some(share) = &entry.share {
            rule.share = self.share(share, &rule.group_by, &rule.distinct);
        }
        if let Some(message) = &entry.message {
            rule.message.clone_from(message);
        }
        let others = [
            ("group_by", !entry.group_by.is_empty()),
            ("distinct", !entry.distinct.is_empty()),
            ("steps", !entry.steps.is_empty()),
            ("gap", entry.gap.is_some()),
            ("close", entry.close.is_some()),
            ("within", entry.within.is_some()),
            ("factor", entry.factor.is_some()),
            ("exclusive", entry.exclusive.is_some()),
            ("member", entry.member.is_some()),
            ("silent", entry.silent.is_some()),
            ("recover", !entry.recover.is_empty()),
            ("fatal_events", entry.fatal_events.is_some()),
            ("agents", !entry.agents.is_empty()),
            ("checks", !entry.checks.is_empty()),
            ("codes", !entry.codes.is_empty()),
            ("match", entry.expression.is_some()),
        ];
        for (key, is_given) in others {
            if is_given {
                let what = "belongs to a rule of its own; write kind too, or leave it out to change \
                            the built-in rule";
                let at = self.at(key);
                self.findings.at_key(&at, what);
            }
        }
        Some(rule)
    }

    /// Reads a rule; `None` if it has findings.
    fn rule(&mut self, entry: RuleEntry) -> Option<Rule> {
        let before = self.findings.count();
        if entry.stage.is_some() {
            let what = "queries of NVSentinel's database are not read; write kind = \"count\" for a \
                        $count of events, \"burst\" for bursts, \"solo\" for a $lookup of other \
                        faults, and what they match in checks, codes and group_by";
            let at = self.at("stage");
            self.findings.at_key(&at, what);
            return None;
        }
        let matches = self.matches("", &entry.events(), false);
        let steps = self.steps(&entry);
        let kind = self.kind(&entry);
        let is_sequence = matches!(kind, Some(ConditionKind::Sequence { .. }));
        let window = self.duration(
            "window",
            entry.window.as_ref(),
            "a rule needs one, such as 24h",
        );
        let threshold = match (&kind, entry.threshold) {
            (Some(ConditionKind::Solo { .. }), None) => Some(1),
            (Some(ConditionKind::Sequence { .. }), None) => u32::try_from(steps.len()).ok(),
            (Some(ConditionKind::Sequence { .. } | ConditionKind::Solo { .. }), Some(_)) => {
                self.refuse("threshold", "this kind has none; write times in a step");
                None
            }
            (Some(ConditionKind::Silent { .. }), _) => entry
                .siblings
                .and_then(|siblings| u32::try_from(siblings).ok()),
            (_, number) => self.threshold(number),
        };
        let close = entry.close.as_ref();
        let close = close.and_then(|close| self.duration("close", Some(close), ""));
        let group_by = self.keys("group_by", &entry.group_by);
        let distinct = self.keys("distinct", &entry.distinct);
        let share = entry.share.as_ref();
        let share = share.and_then(|share| self.share(share, &group_by, &distinct));
        let member = self.member(&entry, kind.as_ref());
        let needed = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
        let action = self.action(entry.action.as_deref().unwrap_or_default());
        let strategy = match &entry.strategy {
            Some(strategy) => self.strategy(strategy),
            None => Some(ProcessingStrategy::ExecuteRemediation),
        };
        let message = needed(entry.message);
        if message.is_none() {
            self.refuse("message", "write what the conclusion says to people");
        }
        if self.findings.count() > before {
            return None;
        }
        let action = action?;
        let is_hint = matches!(kind, Some(ConditionKind::Silent { .. }));
        let fatal = entry
            .fatal
            .unwrap_or(!is_hint && action != RecommendedAction::None);
        Some(Rule {
            name: entry.name,
            matches: matches?,
            steps: if is_sequence { steps } else { Vec::new() },
            group_by,
            distinct,
            member,
            condition: Condition {
                kind: kind?,
                threshold: threshold?,
                window: window?,
                close,
                until_repaired: fatal,
            },
            share,
            recover: entry.recover,
            component_class: entry.component_class.unwrap_or_else(|| "GPU".to_owned()),
            action,
            fatal,
            message: message?,
            strategy: strategy?,
        })
    }

    /// Reads the kind, with the keys that belong to it.
    fn kind(&mut self, entry: &RuleEntry) -> Option<ConditionKind> {
        let kinds = ["count", "burst", "sequence", "solo", "trend", "outlier"];
        let kinds = kinds.map(|kind| (kind, kind));
        let Some(kind) = &entry.kind else {
            let names = kinds.map(|(name, _)| name).join(", ");
            self.refuse("kind", &format!("write one of {names}"));
            return None;
        };
        let at = self.at("kind");
        let kind = self.findings.one_of(&at, kind, &kinds)?;
        let is_exclusive = entry.exclusive == Some(true);
        let mut gaps = vec!["burst", "solo", "outlier"];
        gaps.extend(is_exclusive.then_some("count"));
        let others: [(&str, bool, &[&str]); 10] = [
            ("gap", entry.gap.is_some(), &gaps),
            ("close", entry.close.is_some(), &["count"]),
            ("within", entry.within.is_some(), &["sequence"]),
            ("steps", !entry.steps.is_empty(), &["sequence"]),
            ("factor", entry.factor.is_some(), &["trend", "outlier"]),
            ("distinct", !entry.distinct.is_empty(), &["count"]),
            ("exclusive", entry.exclusive.is_some(), &["count"]),
            ("member", entry.member.is_some(), &["outlier"]),
            ("silent", entry.silent.is_some(), &["outlier"]),
            ("siblings", entry.siblings.is_some(), &["outlier"]),
        ];
        for (key, is_given, belongs) in others {
            if is_given && !belongs.contains(&kind) {
                let belongs = belongs.join(", ");
                self.refuse(key, &format!("it belongs to the kind {belongs}"));
            }
        }
        let gap_needed = "this kind needs one, such as 3m";
        match kind {
            "burst" => Some(ConditionKind::Burst(Gaps {
                gap: self.duration("gap", entry.gap.as_ref(), gap_needed)?,
                sticky: STICKY.map(str::to_owned).into(),
                sticky_gap: STICKY_GAP,
            })),
            "solo" => Some(ConditionKind::Solo {
                gap: self.duration("gap", entry.gap.as_ref(), gap_needed)?,
            }),
            "sequence" => {
                if entry.steps.is_empty() {
                    self.refuse("steps", "a sequence needs at least one");
                }
                let within = match &entry.within {
                    Some(within) => self.duration("within", Some(within), "")?,
                    None => MAX_WINDOW,
                };
                Some(ConditionKind::Sequence { within })
            }
            "trend" => {
                let at = self.at("factor");
                let factor = entry.factor.or(Some(2));
                let factor = self.findings.whole_number(&at, factor, 1..=1_000, "");
                let factor = u32::try_from(factor?).ok()?;
                Some(ConditionKind::Trend { factor })
            }
            "outlier" => self.outlier(entry),
            _ if is_exclusive => self.exclusive(entry),
            _ if entry.distinct.is_empty() => Some(ConditionKind::Count),
            _ => Some(ConditionKind::Distinct),
        }
    }

    /// Reads the steps, each as often as it has to be.
    fn steps(&mut self, entry: &RuleEntry) -> Vec<Matches> {
        let mut steps = Vec::new();
        for (index, step) in entry.steps.iter().enumerate() {
            let path = format!("steps[{index}].");
            let common = entry.events();
            let matches = MatchEntry {
                agents: or_common(&step.agents, common.agents),
                checks: or_common(&step.checks, common.checks),
                codes: or_common(&step.codes, common.codes),
                fatal_events: step.fatal_events.or(common.fatal_events),
                expression: step.expression.as_deref().or(common.expression),
            };
            let at = self.at(&format!("{path}times"));
            let most = MAX_STEPS.saturating_sub(steps.len()).max(1);
            let most = i64::try_from(most).unwrap_or(1);
            let times = Some(step.times);
            let times = self.findings.whole_number(&at, times, 1..=most, "");
            let times = times.and_then(|times| usize::try_from(times).ok());
            let matches = self.matches(&path, &matches, step.healthy);
            if let (Some(times), Some(matches)) = (times, matches) {
                steps.extend(std::iter::repeat_n(matches, times));
            }
        }
        steps
    }

    /// Reads which events count. `path` leads from the rule to the keys.
    fn matches(&mut self, path: &str, entry: &MatchEntry<'_>, is_healthy: bool) -> Option<Matches> {
        let expression = match entry.expression {
            Some(text) => {
                let compiled = CelRule::compile(RuleKind::HealthEvent, text);
                let at = self.at(&format!("{path}match"));
                Some(self.findings.check(&at, compiled)?)
            }
            None => None,
        };
        let codes = entry.codes.iter().cloned();
        let (others, codes): (Vec<String>, _) = codes.partition(|code| code.starts_with('!'));
        Some(Matches {
            agents: entry.agents.to_vec(),
            checks: entry.checks.to_vec(),
            codes,
            other_than: others
                .iter()
                .map(|code| code.replacen('!', "", 1))
                .collect(),
            is_healthy,
            is_fatal: entry.fatal_events,
            expression,
        })
    }

    fn keys(&mut self, list: &str, names: &[String]) -> Vec<GroupKey> {
        let mut keys = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let found = GroupKey::parse(name, self.topology);
            if found.is_none() {
                let wanted = format!("write one of {}", GroupKey::NAMES);
                self.refuse(&format!("{list}[{index}]"), &wanted);
            }
            keys.extend(found);
        }
        // The node is part of every group of one node.
        if list == "group_by" && !keys.iter().any(GroupKey::groups_nodes) {
            keys.retain(|key| *key != GroupKey::Node);
        }
        keys
    }

    fn duration(
        &mut self,
        key: &str,
        text: Option<&String>,
        needed: &str,
    ) -> Option<SignedDuration> {
        let Some(text) = text else {
            self.refuse(key, needed);
            return None;
        };
        let at = self.at(key);
        self.findings.duration(&at, text, MAX_WINDOW)
    }

    fn threshold(&mut self, number: Option<i64>) -> Option<u32> {
        if number.is_none() {
            self.refuse("threshold", "write a whole number of 1 or more");
        }
        let at = self.at("threshold");
        let number = self
            .findings
            .whole_number(&at, number, 1..=MAX_THRESHOLD, "");
        u32::try_from(number?).ok()
    }

    /// Reads a share of the nodes of a group, which only a rule that counts nodes by labels has.
    fn share(&mut self, text: &str, group_by: &[GroupKey], distinct: &[GroupKey]) -> Option<u8> {
        let by_label = |key: &GroupKey| !key.labels().is_empty();
        if group_by.is_empty() || !group_by.iter().all(by_label) || distinct != [GroupKey::Node] {
            let wanted = "it belongs to a rule with distinct = [\"node\"] that groups by rack, \
                          nvlink_domain, zone or label:KEY";
            self.refuse("share", wanted);
            return None;
        }
        let percent = text.trim().strip_suffix('%');
        let percent = percent.and_then(|number| number.trim_end().parse().ok());
        let percent = percent.filter(|percent| (1..=100).contains(percent));
        if percent.is_none() {
            self.refuse(
                "share",
                "write a part of the nodes, such as \"50%\" (1% to 100%)",
            );
        }
        percent
    }

    fn action(&mut self, name: &str) -> Option<RecommendedAction> {
        let action = parse_action(name);
        let action = action.and_then(|number| RecommendedAction::try_from(number).ok());
        if action.is_none() {
            self.refuse(
                "action",
                "write a recommended action such as CONTACT_SUPPORT",
            );
        }
        action
    }

    fn strategy(&mut self, name: &str) -> Option<ProcessingStrategy> {
        let strategies = [
            ProcessingStrategy::ExecuteRemediation,
            ProcessingStrategy::StoreOnly,
            ProcessingStrategy::StoreAndAnalyse,
        ];
        let names = strategies.map(|one| (one.as_str_name(), one));
        let at = self.at("strategy");
        self.findings.one_of(&at, name, &names)
    }
}
