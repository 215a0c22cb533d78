//! Names of open enumerations. An unknown number is shown as its decimal digits.

use std::borrow::Cow;

use crate::{HealthEvent, ProcessingStrategy, RecommendedAction};

/// Returns the name of a `RecommendedAction` number, or its digits if it is unknown.
pub fn action_name(number: i32) -> Cow<'static, str> {
    match RecommendedAction::try_from(number) {
        Ok(action) => Cow::Borrowed(action.as_str_name()),
        Err(_) => Cow::Owned(number.to_string()),
    }
}

/// Returns the number of a `RecommendedAction` given by name or by decimal digits.
pub fn parse_action(text: &str) -> Option<i32> {
    RecommendedAction::from_str_name(text)
        .map(|action| action as i32)
        .or_else(|| text.parse().ok())
}

/// Returns the name of a `ProcessingStrategy` number, or its digits if it is unknown.
pub fn strategy_name(number: i32) -> Cow<'static, str> {
    match ProcessingStrategy::try_from(number) {
        Ok(strategy) => Cow::Borrowed(strategy.as_str_name()),
        Err(_) => Cow::Owned(number.to_string()),
    }
}

/// Returns the number of a `ProcessingStrategy` given by name or by decimal digits.
pub fn parse_strategy(text: &str) -> Option<i32> {
    ProcessingStrategy::from_str_name(text)
        .map(|strategy| strategy as i32)
        .or_else(|| text.parse().ok())
}

/// Returns the name of the action for remediation: the standard name, or the custom one if the
/// action is `CUSTOM`.
pub fn effective_action_name(event: &HealthEvent) -> Cow<'_, str> {
    if event.recommended_action == RecommendedAction::Custom as i32
        && !event.custom_recommended_action.is_empty()
    {
        Cow::Borrowed(&event.custom_recommended_action)
    } else {
        action_name(event.recommended_action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_the_contract() {
        let table = [
            ("NONE", 0),
            ("COMPONENT_RESET", 2),
            ("CONTACT_SUPPORT", 5),
            ("RUN_FIELDDIAG", 6),
            ("RESTART_VM", 15),
            ("RESTART_BM", 24),
            ("REPLACE_VM", 25),
            ("RUN_DCGMEUD", 26),
            ("CUSTOM", 27),
            ("UNKNOWN", 99),
        ];
        for (name, number) in table {
            assert_eq!(action_name(number), name);
            assert_eq!(parse_action(name), Some(number));
        }
        for (name, number) in [
            ("UNSPECIFIED", 0),
            ("EXECUTE_REMEDIATION", 1),
            ("STORE_ONLY", 2),
            ("STORE_AND_ANALYSE", 3),
        ] {
            assert_eq!(strategy_name(number), name);
            assert_eq!(parse_strategy(name), Some(number));
        }
    }

    #[test]
    fn unknown_numbers_are_data() {
        assert_eq!(action_name(77), "77");
        assert_eq!(parse_action("77"), Some(77));
        assert_eq!(parse_action("REBOOT_PLEASE"), None);
        assert_eq!(strategy_name(-4), "-4");
    }

    #[test]
    fn custom_action_goes_by_its_own_name() {
        let mut event = HealthEvent {
            recommended_action: 27,
            ..HealthEvent::default()
        };
        assert_eq!(effective_action_name(&event), "CUSTOM");
        event.custom_recommended_action = "RECABLE".to_owned();
        assert_eq!(effective_action_name(&event), "RECABLE");
        event.recommended_action = 2;
        assert_eq!(effective_action_name(&event), "COMPONENT_RESET");
    }
}
