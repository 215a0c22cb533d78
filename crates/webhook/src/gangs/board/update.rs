//! Contents of a gang's `ConfigMap`, computed from the state of the gang.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use preflight::config::Config;
use preflight::gang::Gang;
use preflight::roster::{GANG_ID_LABEL, MANAGED_BY, MANAGED_BY_LABEL, Member, Roster, gang_label};
use runtime::logging::Seldom;
use serde_json::{Value, json};

use super::super::few;
use super::{Board, GangKey, Known};

/// Interval between two writes for an incomplete gang. Each write reaches the kubelets of all
/// members, but only the last one lets them begin, and that one is never delayed.
const PACE: Duration = Duration::from_secs(1);

/// `ConfigMap` to write, or `None` if it is up to date, and true if it must be created.
pub(in crate::gangs) struct MapUpdate {
    pub(in crate::gangs) map: Option<Value>,
    pub(in crate::gangs) is_new: bool,
}

// === impl Board ===

impl Board {
    /// Returns the update of a gang's `ConfigMap`. `expected` is the number of members needed,
    /// 0 while it is not known yet, or the reason why it cannot be determined.
    pub(in crate::gangs) fn update_for(
        &mut self,
        key: &GangKey,
        gang: &Gang,
        expected: Result<u32, String>,
        owner: Option<Value>,
        config: &Config,
    ) -> MapUpdate {
        let Some(known) = self.gangs.get_mut(key) else {
            return MapUpdate {
                map: None,
                is_new: false,
            };
        };
        let members = known.pods.iter().filter_map(|(name, pod)| {
            Some(Member {
                pod: name.clone(),
                address: pod.address?,
                checks: Some(pod.checks.clone()),
            })
        });
        let there = known.map.as_ref().and_then(|map| map.read.as_ref());
        let data = there.and_then(|map| map.get("data").cloned());
        let data = data.unwrap_or_default();
        // Contents that do not parse were changed by somebody else and are discarded.
        let roster = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned));
        let mut roster = roster.unwrap_or_default();
        let was_settled = roster.is_settled();
        roster.gang_id = gang.id();
        roster.master_port = config.coordination.master_port;
        let count = expected.as_ref().copied().unwrap_or_default();
        let (mut roster, surplus) = roster.with(members.collect(), count);
        roster.untestable = expected.err();
        roster.started = known.started(&roster);
        known.note_surplus(surplus, &roster, &self.crowded);
        let wanted = json!(roster.data());
        let is_new = known.map.is_none();
        let nothing = MapUpdate { map: None, is_new };
        if wanted == data {
            return nothing;
        }
        let since = known.written_at.map(|at| at.elapsed());
        if !was_settled && !roster.is_settled() && since.is_some_and(|since| since < PACE) {
            let at = known.written_at.map(|at| at + PACE);
            self.delayed.extend(at.map(|at| (key.clone(), at)));
            return nothing;
        }
        known.written_at = known.map.is_some().then(Instant::now);
        let there = known.map.as_ref().and_then(|map| map.read.as_ref());
        let map = match there {
            Some(map) => {
                let mut map = Value::clone(map);
                if let Some(map) = map.as_object_mut() {
                    map.insert("data".to_owned(), wanted);
                }
                map
            }
            None => json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": key.name,
                    "namespace": key.namespace,
                    "labels": {
                        GANG_ID_LABEL: gang_label(&gang.id()),
                        MANAGED_BY_LABEL: MANAGED_BY,
                    },
                    "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
                },
                "data": wanted,
            }),
        };
        MapUpdate {
            map: Some(map),
            is_new,
        }
    }
}

// === impl Known ===

impl Known {
    /// Returns a member that has completed the gang checks. The previous one is kept while it
    /// qualifies, so that the `ConfigMap` does not change whenever another member completes.
    fn started(&self, roster: &Roster) -> Option<String> {
        let is_through = |pod: &String| self.pods.get(pod).is_some_and(|pod| pod.is_through);
        let through = roster.members.iter().map(|member| &member.pod);
        let mut through = through.filter(|pod| is_through(pod)).peekable();
        let first = through.peek().copied();
        let before = roster.started.as_ref();
        let kept = before.filter(|before| through.any(|pod| pod == *before));
        kept.or(first).cloned()
    }

    /// Stores the pods without a place in the gang, and logs the new ones.
    fn note_surplus(&mut self, surplus: Vec<Member>, roster: &Roster, line: &Seldom) {
        let names: BTreeSet<String> = surplus.into_iter().map(|member| member.pod).collect();
        let new = names.difference(&self.surplus).map(String::as_str);
        let new: Vec<&str> = new.collect();
        if !new.is_empty()
            && let Some(not_logged_before) = line.now()
        {
            tracing::warn!(
                gang = roster.gang_id,
                pods = few(&new),
                not_logged_before,
                "the gang has its {} members; these pods wait until one goes",
                roster.expected
            );
        }
        self.surplus = names;
    }
}
