//! The settings of the reports on the nodes of the cluster.

use controller::conditions::EventKind;

use super::amount::choice;
use super::{Mode, SettingsError};
use crate::args::ActArgs;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportSettings {
    /// True if each check with a fatal fault gets a condition.
    pub conditions: bool,
    /// True if another condition summarises these.
    pub summary: bool,
    /// Kubernetes Events of faults that are not fatal; `None`: none.
    pub events: Option<EventKind>,
}

// === impl ReportSettings ===

impl ReportSettings {
    /// Resolves the reports: by default on in a mode that writes in the cluster, and off otherwise.
    pub(super) fn resolve(flags: &ActArgs, mode: Mode) -> Result<Self, SettingsError> {
        let types = [
            ("warning", EventKind::Kubernetes),
            ("check", EventKind::Check),
        ];
        let event_type = choice("--node-event-type", flags.node_event_type.as_deref(), types)?;
        let acts = mode.writes();
        if !acts && (flags.node_conditions == Some(true) || flags.node_events == Some(true)) {
            return Err(SettingsError::Conflict(
                "--node-conditions and --node-events write in the cluster: they need --quarantine, \
                 without --dry-run",
            ));
        }
        Ok(Self {
            conditions: flags.node_conditions.unwrap_or(acts),
            summary: flags.gpu_healthy.unwrap_or(true),
            events: flags.node_events.unwrap_or(acts).then_some(event_type),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_acts_tells_and_nobody_else() {
        let resolve = |flags, mode| ReportSettings::resolve(&flags, mode);
        let acting = resolve(ActArgs::default(), Mode::Act).unwrap();
        assert_eq!(
            (acting.conditions, acting.summary, acting.events),
            (true, true, Some(EventKind::Kubernetes))
        );
        for mode in [Mode::Observe, Mode::DryRun] {
            let silent = resolve(ActArgs::default(), mode).unwrap();
            assert_eq!((silent.conditions, silent.events), (false, None));
            for (node_conditions, node_events) in [(Some(true), None), (None, Some(true))] {
                let flags = ActArgs {
                    node_conditions,
                    node_events,
                    ..ActArgs::default()
                };
                let error = resolve(flags, mode).unwrap_err().to_string();
                assert!(error.contains("need --quarantine"), "{error}");
            }
        }
        let chosen = ActArgs {
            node_conditions: Some(false),
            gpu_healthy: Some(false),
            node_event_type: Some("check".into()),
            ..ActArgs::default()
        };
        let chosen = resolve(chosen, Mode::Act).unwrap();
        assert_eq!(
            (chosen.conditions, chosen.summary, chosen.events),
            (false, false, Some(EventKind::Check))
        );
        let wrong = ActArgs {
            node_event_type: Some("loud".into()),
            ..ActArgs::default()
        };
        let error = resolve(wrong, Mode::Act).unwrap_err();
        assert!(error.to_string().contains("--node-event-type \"loud\""));
    }
}
