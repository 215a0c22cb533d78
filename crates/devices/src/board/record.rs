//! A GPU on the board: the conditions of each source, and the state that consumers see.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::device::{Condition, ConditionStatus, Gpu, GpuPhase, GpuSpec, GpuStatus};
use contract::json;
use jiff::Timestamp;

use super::{Own, READY, SUM, Said};

/// A GPU with the conditions of all sources.
pub(super) struct GpuRecord {
    name: String,
    pub(super) spec: GpuSpec,
    /// Registrations by the name of their source.
    pub(super) registrations: BTreeMap<String, Registration>,
    shown: Arc<Gpu>,
}

/// Conditions of one source.
#[derive(Default)]
pub(super) struct Registration {
    /// Conditions by their types.
    pub(super) conditions: BTreeMap<String, SourceCondition>,
    /// Time of the source's last report; `None` for a source within this process, which
    /// announces its own absence.
    pub(super) last_report: Option<Timestamp>,
    /// Condition that replaces the others while the source is silent. They count again
    /// afterwards.
    pub(super) silence: Option<SourceCondition>,
}

/// A condition from its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceCondition {
    pub(super) status: ConditionStatus,
    pub(super) reason: String,
    pub(super) message: String,
    /// Time since the condition has its status, if the source reports one.
    pub(super) since: Option<Timestamp>,
}

// === impl GpuRecord ===

impl GpuRecord {
    pub(super) fn new(name: String, spec: GpuSpec) -> Self {
        Self {
            name,
            spec,
            registrations: BTreeMap::new(),
            shown: Arc::default(),
        }
    }

    /// Returns the GPU as consumers see it.
    pub(super) fn shown(&self) -> &Arc<Gpu> {
        &self.shown
    }

    /// Returns true if consumers have seen the GPU.
    pub(super) fn is_shown(&self) -> bool {
        !self.shown.resource_version.is_empty()
    }

    pub(super) fn show(&mut self, gpu: Arc<Gpu>) {
        self.shown = gpu;
    }

    /// Returns true if the driver lists the GPU, or has listed it.
    pub(super) fn is_of_driver(&self) -> bool {
        self.registrations.contains_key(Own::Nvml.source())
    }

    /// Returns true if a source keeps the GPU on the board. Sources within this process report
    /// on every GPU and keep none, except for the driver.
    pub(super) fn is_held(&self) -> bool {
        let mut sources = self.registrations.keys();
        self.is_of_driver() || sources.any(|source| !Own::is_source(source))
    }

    /// Returns the registration of a source, and creates it if needed.
    pub(super) fn registration(
        &mut self,
        source: &str,
        last_report: Option<Timestamp>,
    ) -> &mut Registration {
        let registration = self.registrations.entry(source.to_owned());
        registration.or_insert_with(|| Registration {
            last_report,
            ..Registration::default()
        })
    }

    /// Returns the new state for consumers, if it differs from the last one.
    pub(super) fn changed(&self, now: Timestamp) -> Option<Gpu> {
        let gpu = Gpu {
            name: self.name.clone(),
            spec: Some(self.spec.clone()),
            status: Some(self.status(now)),
            resource_version: self.shown.resource_version.clone(),
        };
        (gpu != *self.shown).then_some(gpu)
    }

    fn status(&self, now: Timestamp) -> GpuStatus {
        let mut conditions = Vec::new();
        for (source, registration) in &self.registrations {
            for (kind, condition) in &registration.conditions {
                let condition = registration.silence.as_ref().unwrap_or(condition);
                conditions.push(self.condition(kind, condition, source, now));
            }
        }
        let is_pending = conditions.is_empty();
        let ready = sum(&conditions);
        let phase = match ready.status {
            _ if is_pending => GpuPhase::Pending,
            ConditionStatus::True => GpuPhase::Ready,
            ConditionStatus::False => GpuPhase::NotReady,
            _ => GpuPhase::Unknown,
        };
        conditions.push(self.condition(READY, &ready, SUM, now));
        conditions.sort_by(|one, other| one.r#type.cmp(&other.r#type));
        GpuStatus {
            phase: phase.into(),
            conditions,
        }
    }

    /// Returns a condition for consumers. Its time is that of its status, and does not change
    /// with the reason.
    fn condition(
        &self,
        kind: &str,
        condition: &SourceCondition,
        source: &str,
        now: Timestamp,
    ) -> Condition {
        let status = condition.status.into();
        let shown = self.shown.status.as_ref();
        let before = shown.and_then(|shown| shown.conditions.iter().find(|one| one.r#type == kind));
        let unchanged_since = before
            .filter(|before| before.status == status)
            .and_then(|before| before.last_transition_time);
        let since = condition.since.filter(|since| *since <= now).unwrap_or(now);
        Condition {
            r#type: kind.to_owned(),
            status,
            reason: condition.reason.clone(),
            message: condition.message.clone(),
            last_transition_time: unchanged_since.or_else(|| Some(json::proto_timestamp(since))),
            source: source.to_owned(),
        }
    }
}

/// Summarises conditions: false if one is, else unknown if one is, else true.
fn sum(conditions: &[Condition]) -> SourceCondition {
    let of = |status: ConditionStatus| -> Vec<&Condition> {
        let has_status = |condition: &&Condition| condition.status() == status;
        conditions.iter().filter(has_status).collect()
    };
    let (bad, unknown) = (of(ConditionStatus::False), of(ConditionStatus::Unknown));
    let (status, named, word) = if !bad.is_empty() {
        (ConditionStatus::False, bad, "false")
    } else if !unknown.is_empty() {
        (ConditionStatus::Unknown, unknown, "unknown")
    } else if conditions.is_empty() {
        let message = "No source has reported on it yet".to_owned();
        return SourceCondition::unknown("NothingReported", message);
    } else {
        return SourceCondition {
            status: ConditionStatus::True,
            reason: "AllTrue".to_owned(),
            message: String::new(),
            since: None,
        };
    };
    let kinds: Vec<&str> = named.iter().map(|one| one.r#type.as_str()).collect();
    SourceCondition {
        status,
        reason: named
            .first()
            .map_or_else(String::new, |one| one.reason.clone()),
        message: format!("{word}: {}", kinds.join(", ")),
        since: None,
    }
}

// === impl Registration ===

impl Registration {
    pub(super) fn set(&mut self, kind: &str, condition: SourceCondition) {
        self.conditions.insert(kind.to_owned(), condition);
    }

    pub(super) fn replace(&mut self, conditions: &BTreeMap<String, SourceCondition>) {
        self.conditions.clone_from(conditions);
    }
}

// === impl SourceCondition ===

impl SourceCondition {
    pub(super) fn unknown(reason: &str, message: String) -> Self {
        Self {
            status: ConditionStatus::Unknown,
            reason: reason.to_owned(),
            message,
            since: None,
        }
    }
}

impl From<Said> for SourceCondition {
    fn from(said: Said) -> Self {
        Self {
            status: said.status,
            reason: said.reason,
            message: said.message,
            since: None,
        }
    }
}
