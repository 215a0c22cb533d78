//! `OverrideTransformer`: changes gravity, health or recommended action of events by rules.
//!
//! The rules are NVSentinel's: the first one in the order of the file whose expression holds is
//! applied. A rule that cannot be evaluated, for example because the event lacks the metadata it
//! refers to, is skipped.

use contract::{HealthEvent, keys};
use policy::{CelRule, EventVariable, override_variable};

use super::annotate;

/// The rules of the transformer.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Rules in the order of their evaluation.
    pub rules: Vec<Override>,
}

/// A rule with its changes.
#[derive(Clone, Debug)]
pub struct Override {
    /// Name for metrics and messages.
    pub name: String,
    /// Condition of the rule.
    pub when: CelRule,
    /// New value of `isFatal`.
    pub is_fatal: Option<bool>,
    /// New value of `isHealthy`.
    pub is_healthy: Option<bool>,
    /// New value of `recommendedAction` and, with `CUSTOM`, of `customRecommendedAction`.
    pub action: Option<(i32, String)>,
}

/// Result of the rules for an event.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct OverrideResult<'a> {
    /// Name of the applied rule, and the fields with a changed value.
    pub applied: Option<(&'a str, Vec<&'static str>)>,
    /// Names of the rules that could not be evaluated, with the errors.
    pub failed: Vec<(&'a str, String)>,
}

// === impl Overrides ===

impl Overrides {
    /// Applies the first rule that holds.
    ///
    /// A changed event names the rule in its metadata, if there is room.
    pub fn apply(&self, event: &mut HealthEvent) -> OverrideResult<'_> {
        let mut outcome = OverrideResult::default();
        if self.rules.is_empty() {
            return outcome;
        }
        let variable = EventVariable::new(&override_variable(event));
        for rule in &self.rules {
            match rule.when.holds_for_event(&variable) {
                Ok(true) => {
                    let changed = rule.change(event);
                    if !changed.is_empty() {
                        annotate(event, keys::META_OVERRIDDEN_BY, &rule.name);
                    }
                    outcome.applied = Some((&rule.name, changed));
                    break;
                }
                Ok(false) => {}
                Err(why) => outcome.failed.push((&rule.name, why)),
            }
        }
        outcome
    }
}

// === impl Override ===

impl Override {
    fn change(&self, event: &mut HealthEvent) -> Vec<&'static str> {
        let mut changed = Vec::new();
        let mut set = |field: &mut bool, value: Option<bool>, name| {
            if value.is_some_and(|value| std::mem::replace(field, value) != value) {
                changed.push(name);
            }
        };
        set(&mut event.is_fatal, self.is_fatal, "isFatal");
        set(&mut event.is_healthy, self.is_healthy, "isHealthy");
        if let Some((action, custom)) = &self.action {
            let other_name = !custom.is_empty() && event.custom_recommended_action != *custom;
            if event.recommended_action != *action || other_name {
                event.recommended_action = *action;
                event.custom_recommended_action.clone_from(custom);
                changed.push("recommendedAction");
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use contract::Entity;

    use super::*;
    use crate::transform::load;

    fn event() -> HealthEvent {
        HealthEvent {
            agent: "syslog-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "SysLogsXIDError".into(),
            is_fatal: true,
            message: "NVRM: Xid 79".into(),
            recommended_action: 24,
            error_code: vec!["79".into(), "13".into()],
            entities_impacted: vec![Entity {
                entity_type: "PCI".into(),
                entity_value: "0000:b3:00".into(),
            }],
            metadata: [("gpu_model".to_owned(), "H100".to_owned())].into(),
            node_name: "n1".into(),
            ..HealthEvent::default()
        }
    }

    fn rules(rules: &[(&str, &str, &str)]) -> Overrides {
        let mut text = "enabled = true\n".to_owned();
        for (name, when, change) in rules {
            text += &format!(
                "[[rules]]\nname = '{name}'\nwhen = '''{when}'''\noverride = {{ {change} }}\n"
            );
        }
        load::overrides(&text, "overrides.toml").unwrap().0
    }

    #[test]
    fn expressions_see_the_event_as_the_documents_say() {
        let table = [
            ("event.agent == 'syslog-health-monitor'", Some(true)),
            ("event.checkName.startsWith('SysLogs')", Some(true)),
            ("event.componentClass in ['GPU', 'NIC']", Some(true)),
            ("'79' in event.errorCode", Some(true)),
            ("'48' in event.errorCode", Some(false)),
            ("size(event.errorCode) == 2", Some(true)),
            ("event.errorCode.exists(c, c == '13')", Some(true)),
            (
                "event.isFatal == true && event.isHealthy == false",
                Some(true),
            ),
            // NVSentinel requires the comparison; here the field alone is enough.
            ("event.isFatal", Some(true)),
            ("!event.isHealthy", Some(true)),
            ("event.recommendedAction == 'RESTART_BM'", Some(true)),
            ("event.nodeName.contains('n')", Some(true)),
            ("event.message != ''", Some(true)),
            ("event.metadata['gpu_model'] == 'H100'", Some(true)),
            ("event.metadata.gpu_model.startsWith('H')", Some(true)),
            ("'rack' in event.metadata", Some(false)),
            (
                "event.entitiesImpacted.exists(e, e.entityType == 'PCI')",
                Some(true),
            ),
            // Missing metadata is an error, which is counted, and not false.
            ("event.metadata['rack'] == 'r1'", None),
        ];
        for (when, expected) in table {
            let overrides = rules(&[("r", when, "isFatal = false")]);
            let outcome = overrides.apply(&mut event());
            assert_eq!(
                outcome.applied.is_some(),
                expected == Some(true),
                "{when}: {outcome:?}"
            );
            assert_eq!(
                outcome.failed.is_empty(),
                expected.is_some(),
                "{when}: {outcome:?}"
            );
        }
    }

    #[test]
    fn the_first_rule_that_holds_is_applied_and_only_what_it_changed_is_told() {
        let overrides = rules(&[
            ("broken", "event.metadata['rack'] == 'r1'", "isFatal = true"),
            ("no", "'48' in event.errorCode", "isFatal = true"),
            (
                "yes",
                "'79' in event.errorCode",
                "isFatal = false, recommendedAction = 'RESTART_BM'",
            ),
            ("late", "true", "isHealthy = true"),
        ]);
        let mut event = event();
        let outcome = overrides.apply(&mut event);
        assert_eq!(outcome.applied, Some(("yes", vec!["isFatal"])));
        assert_eq!(outcome.failed.len(), 1);
        assert_eq!(outcome.failed[0].0, "broken");
        assert!(!event.is_fatal && !event.is_healthy);
        assert_eq!(event.recommended_action, 24);
        assert_eq!(event.metadata[keys::META_OVERRIDDEN_BY], "yes");
    }

    #[test]
    fn every_field_can_be_changed_and_what_is_so_already_is_no_change() {
        let change = "isFatal = false, isHealthy = true, recommendedAction = 'CUSTOM', \
                      customRecommendedAction = 'RECABLE'";
        let overrides = rules(&[("all", "true", change)]);
        let mut event = event();
        let outcome = overrides.apply(&mut event);
        let all = vec!["isFatal", "isHealthy", "recommendedAction"];
        assert_eq!(outcome.applied, Some(("all", all)));
        assert!(!event.is_fatal && event.is_healthy);
        assert_eq!(contract::effective_action_name(&event), "RECABLE");
        assert_eq!(overrides.apply(&mut event).applied, Some(("all", vec![])));
    }

    #[test]
    fn an_event_that_no_rule_fits_is_as_it_was() {
        let overrides = rules(&[("r", "event.agent == 'other'", "isFatal = false")]);
        let mut changed = event();
        assert_eq!(overrides.apply(&mut changed), OverrideResult::default());
        assert_eq!(changed, event());
        assert_eq!(
            Overrides::default().apply(&mut changed),
            OverrideResult::default()
        );
    }
}
