//! Differences between two catalogues, to show the effect of an override file.

use std::collections::BTreeSet;

use contract::{ProcessingStrategy, RecommendedAction};
use serde::Serialize;

use super::{Catalog, Changed, Nic, Nvlink5, Sxid, Xid};
use crate::limits;

/// Value of [`CatalogChange::kind`] for thresholds.
pub const GPU_LIMITS: &str = "gpu-limits";

/// A difference between two catalogues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CatalogChange {
    /// Kind of the row: `xid`, `sxid`, `nvlink5`, `dcgm`, `nic`, `cancellation` or
    /// `gpu-limits`.
    pub kind: &'static str,
    /// Code or name of the row; for `NVLink` 5 also unit, cause and status words.
    pub key: String,
    /// Name of the column that differs.
    pub field: &'static str,
    /// Value before; empty if there was no such row.
    pub before: String,
    /// Value after the change.
    pub after: String,
    /// File and line that changed the value, with the file's reason.
    pub by: String,
}

/// Collects the differences of one row.
struct RowChanges<'a> {
    kind: &'static str,
    key: String,
    changed: Option<&'a Changed>,
    out: &'a mut Vec<CatalogChange>,
}

// === impl Catalog ===

impl Catalog {
    /// Returns the changes from this catalogue to `other`, grouped by kind.
    pub fn changes_to(&self, other: &Self) -> Vec<CatalogChange> {
        let mut out = Vec::new();
        for new in other.xids.values() {
            let old = self.xids.get(&new.code);
            let mut row =
                RowChanges::of("xid", new.code.to_string(), new.changed.as_ref(), &mut out);
            row.verdict(old.map(Xid::verdict), new.verdict());
            row.field("meaning", old.map(|old| &*old.meaning), &new.meaning);
        }
        for new in other.sxids.values() {
            let old = self.sxids.get(&new.code);
            let mut row =
                RowChanges::of("sxid", new.code.to_string(), new.changed.as_ref(), &mut out);
            row.field("verdict", old.map(Sxid::shown).as_deref(), &new.shown());
            row.field("meaning", old.map(|old| &*old.meaning), &new.meaning);
        }
        // A file adds no rows, so both have the same rows in the same order.
        for (old, new) in self.nvlink5.iter().zip(&other.nvlink5) {
            let mut row = RowChanges::of("nvlink5", new.key(), new.changed.as_ref(), &mut out);
            row.verdict(Some((old.fatal, old.action)), (new.fatal, new.action));
            row.field("meaning", Some(&old.meaning), &new.meaning);
        }
        for (old, new) in self.dcgm.iter().zip(&other.dcgm) {
            let (key, changed) = (new.name.to_string(), new.changed.as_ref());
            let mut row = RowChanges::of("dcgm", key, changed, &mut out);
            row.verdict(Some((old.fatal, old.action)), (new.fatal, new.action));
            row.field("meaning", Some(&old.meaning), &new.meaning);
        }
        for new in &other.nics {
            let old = self.nics.iter().find(|old| old.name == new.name);
            let changed = new.changed.as_ref();
            let mut row = RowChanges::of("nic", new.name.to_string(), changed, &mut out);
            row.field("looked for", old.map(Nic::shown).as_deref(), &new.shown());
            row.verdict(
                old.map(|old| (old.fatal, old.action)),
                (new.fatal, new.action),
            );
        }
        let sources: BTreeSet<&String> = self
            .cancellations
            .keys()
            .chain(other.cancellations.keys())
            .collect();
        for source in sources {
            let list = |catalog: &Self| catalog.cancelled_by(source).join(", ");
            let mut row = RowChanges::of("cancellation", source.clone(), None, &mut out);
            row.field("cancels", Some(&list(self)), &list(other));
        }
        for key in &limits::KEYS {
            let changed = other.limits_changed.get(key.name);
            let mut row = RowChanges::of(GPU_LIMITS, key.name.to_owned(), changed, &mut out);
            let before = key.shown(&self.limits);
            row.field("limit", Some(&before), &key.shown(&other.limits));
        }
        out
    }
}

// === impl RowChanges ===

impl<'a> RowChanges<'a> {
    fn of(
        kind: &'static str,
        key: String,
        changed: Option<&'a Changed>,
        out: &'a mut Vec<CatalogChange>,
    ) -> Self {
        Self {
            kind,
            key,
            changed,
            out,
        }
    }

    fn verdict(&mut self, old: Option<(bool, RecommendedAction)>, new: (bool, RecommendedAction)) {
        let fatal = |verdict: (bool, RecommendedAction)| verdict.0.to_string();
        let action = |verdict: (bool, RecommendedAction)| verdict.1.as_str_name();
        self.field("fatal", old.map(fatal).as_deref(), &fatal(new));
        self.field("action", old.map(action), action(new));
    }

    fn field(&mut self, field: &'static str, before: Option<&str>, after: &str) {
        if before == Some(after) {
            return;
        }
        self.out.push(CatalogChange {
            kind: self.kind,
            key: self.key.clone(),
            field,
            before: before.unwrap_or_default().to_owned(),
            after: after.to_owned(),
            by: self.changed.map(ToString::to_string).unwrap_or_default(),
        });
    }
}

// === impl Xid ===

impl Xid {
    fn verdict(&self) -> (bool, RecommendedAction) {
        (self.fatal, self.action)
    }
}

// === impl Sxid ===

impl Sxid {
    /// Describes the verdict about lines with this code.
    pub fn shown(&self) -> String {
        match self.fixed {
            Some((true, action)) => format!("fatal, {}", action.as_str_name()),
            Some((false, action)) => format!("not fatal, {}", action.as_str_name()),
            None => "as in the line".to_owned(),
        }
    }
}

// === impl Nvlink5 ===

impl Nvlink5 {
    /// Returns the key that distinguishes the row from others of its code: unit, cause of a
    /// link that went down, status words.
    pub fn key(&self) -> String {
        let mut key = format!("{} {}", self.code, self.unit);
        if self.from_r575.reason() != 0 {
            key.push_str(&format!(" cause {}", self.from_r575.reason()));
        }
        for (index, status) in self.status.iter().enumerate() {
            let separator = if index == 0 { " status " } else { "/" };
            key.push_str(&format!("{separator}{status:#010x}"));
        }
        key
    }
}

// === impl Nic ===

impl Nic {
    /// Describes whether lines are matched, and the strategy of their events.
    pub fn shown(&self) -> String {
        if !self.enabled {
            return "no".to_owned();
        }
        match self.strategy {
            ProcessingStrategy::ExecuteRemediation => "yes".to_owned(),
            other => format!("yes, {}", other.as_str_name()),
        }
    }
}
