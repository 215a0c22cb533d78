//! What is told on the nodes of the cluster, and which flags say so.

use controller::conditions::EventKind;

use super::{Mode, SettingsError};

/// `ReportSettings` say what is told on the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportSettings {
    /// A condition for each check with a fatal fault.
    pub conditions: bool,
    /// With them, a condition that sums all up.
    pub summary: bool,
    /// Kubernetes Events of faults that are not fatal; `None`: none.
    pub events: Option<EventKind>,
}

/// `ReportFlags` are the flags as given, by the command line, the environment or the file.
#[derive(Debug, Default)]
pub(super) struct ReportFlags {
    pub(super) conditions: Option<bool>,
    pub(super) summary: Option<bool>,
    pub(super) events: Option<bool>,
    pub(super) event_type: Option<String>,
}

// === impl ReportSettings ===

impl ReportSettings {
    /// Settles what is told: who acts tells, unless told otherwise; who does not act writes
    /// nothing.
    pub(super) fn resolve(flags: &ReportFlags, mode: Mode) -> Result<Self, SettingsError> {
        let event_type = match flags.event_type.as_deref() {
            None | Some("warning") => EventKind::Kubernetes,
            Some("check") => EventKind::Check,
            Some(other) => {
                return Err(SettingsError::Value {
                    name: "--node-event-type",
                    value: other.to_owned(),
                    what: "is neither warning nor check".to_owned(),
                });
            }
        };
        let acts = mode == Mode::Quarantine;
        if !acts && (flags.conditions == Some(true) || flags.events == Some(true)) {
            return Err(SettingsError::Conflict(
                "--node-conditions and --node-events write in the cluster: they need --quarantine, \
                 without --dry-run",
            ));
        }
        Ok(Self {
            conditions: flags.conditions.unwrap_or(acts),
            summary: flags.summary.unwrap_or(true),
            events: flags.events.unwrap_or(acts).then_some(event_type),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_acts_tells_and_nobody_else() {
        let resolve = |flags, mode| ReportSettings::resolve(&flags, mode);
        let acting = resolve(ReportFlags::default(), Mode::Quarantine).unwrap();
        assert_eq!(
            (acting.conditions, acting.summary, acting.events),
            (true, true, Some(EventKind::Kubernetes))
        );
        for mode in [Mode::Observe, Mode::DryRun] {
            let silent = resolve(ReportFlags::default(), mode).unwrap();
            assert_eq!((silent.conditions, silent.events), (false, None));
            for (conditions, events) in [(Some(true), None), (None, Some(true))] {
                let flags = ReportFlags {
                    conditions,
                    events,
                    ..ReportFlags::default()
                };
                let error = resolve(flags, mode).unwrap_err().to_string();
                assert!(error.contains("need --quarantine"), "{error}");
            }
        }
        let chosen = ReportFlags {
            conditions: Some(false),
            summary: Some(false),
            events: None,
            event_type: Some("check".into()),
        };
        let chosen = resolve(chosen, Mode::Quarantine).unwrap();
        assert_eq!(
            (chosen.conditions, chosen.summary, chosen.events),
            (false, false, Some(EventKind::Check))
        );
        let wrong = ReportFlags {
            event_type: Some("loud".into()),
            ..ReportFlags::default()
        };
        let error = resolve(wrong, Mode::Quarantine).unwrap_err();
        assert!(error.to_string().contains("--node-event-type \"loud\""));
    }
}
