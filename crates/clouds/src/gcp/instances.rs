//! Pages of the Compute API's list of instances in all zones, with the maintenance that is announced
//! for each now.
//!
//! Form: <https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances/aggregatedList>.

use std::collections::BTreeMap;

use notices::words::{Upcoming, gcp_phase};
use notices::{Kind, Phase};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::upcoming::{notice, parts_of};
use crate::{Announced, Instance};

/// Fields that are asked for; all others would make a page several times as large.
pub(super) const FIELDS: &str = "items/*/instances(id,selfLink,resourceStatus/upcomingMaintenance,\
    scheduling/onHostMaintenance),items/*/warning/code,nextPageToken,unreachables,warning/code";
/// Codes of warnings after which instances are missing in the page.
const MISSING: [&str; 2] = ["UNREACHABLE", "PARTIAL_SUCCESS"];

/// A page of instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instances {
    /// Notices, one for each instance with a maintenance.
    pub announced: Vec<Announced>,
    /// Instances whose maintenance cannot be understood.
    pub unseen: Vec<Instance>,
    /// Number of maintenances that cannot be understood.
    pub odd: u64,
    /// True if instances are missing: a zone could not be read, or an instance has no name.
    pub partial: bool,
    /// Token of the next page; empty if this is the last one.
    pub next: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Page {
    /// Instances of each zone.
    items: BTreeMap<String, Map<String, Value>>,
    next_page_token: String,
    unreachables: Vec<Value>,
    warning: Warning,
}

/// Instances of one zone.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Scope {
    instances: Vec<Value>,
    warning: Warning,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Warning {
    code: String,
}

// === impl Instances ===

impl Instances {
    /// Parses a page. Fails if the page itself is not of the documented form.
    pub fn parse(body: &[u8]) -> Result<Self, serde_json::Error> {
        // As maps first, since a struct would be read from an array too.
        let page: Map<String, Value> = serde_json::from_slice(body)?;
        let page = Page::deserialize(Value::Object(page))?;
        let mut instances = Self {
            partial: page.warning.is_about_missing() || !page.unreachables.is_empty(),
            next: page.next_page_token,
            ..Self::default()
        };
        for scope in page.items.into_values() {
            let scope = Scope::deserialize(Value::Object(scope))?;
            instances.partial |= scope.warning.is_about_missing();
            for instance in scope.instances {
                instances.take(&instance);
            }
        }
        Ok(instances)
    }

    fn take(&mut self, value: &Value) {
        let upcoming = &value["resourceStatus"]["upcomingMaintenance"];
        if upcoming.is_null() {
            return;
        }
        let link = value["selfLink"].as_str().unwrap_or_default();
        let number = value["id"].as_str().unwrap_or_default();
        let Some((project, zone, name)) = parts_of(link) else {
            self.odd += 1;
            self.partial = true;
            return;
        };
        let instance = Instance::gcp(project, zone, name, number);
        let kind = match value["scheduling"]["onHostMaintenance"].as_str() {
            Some("MIGRATE") => Kind::Migration,
            _ => Kind::Reboot,
        };
        let number = if number.is_empty() { name } else { number };
        let notice = Upcoming::deserialize(upcoming).ok().and_then(|upcoming| {
            let phase = gcp_phase(&upcoming.maintenance_status).unwrap_or(Phase::Scheduled);
            notice(upcoming, phase, "PENDING", kind, number)
        });
        if let Some(notice) = notice {
            self.announced.push(Announced { instance, notice });
        } else {
            self.unseen.push(instance);
            self.odd += 1;
        }
    }
}

// === impl Warning ===

impl Warning {
    fn is_about_missing(&self) -> bool {
        MISSING.contains(&self.code.as_str())
    }
}

#[cfg(test)]
mod tests;
