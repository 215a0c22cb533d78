//! The plan of a drain: what it would do to the pods of a node, without doing it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde::Serialize;

use super::{Drain, DrainConfig, DrainMode, Fate, Gangs, PodView, Stay, fate_in_gang};

/// A pod of a node, with details for a plan that do not affect its fate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Pod, as the drain sees it.
    pub pod: PodView,
    /// Number of its GPUs; a part of a GPU counts as one.
    pub gpus: u64,
    /// Time when it started, if it has.
    pub started_at: Option<Timestamp>,
    /// Owner of the pod, as `KIND NAMESPACE/NAME`.
    pub owner: Option<String>,
    /// Gang that the pod names, as `DISCOVERER NAMESPACE/NAME`.
    pub gang: Option<String>,
    /// Disruption budget that refuses its eviction now, if any.
    pub held_by: Option<String>,
}

/// Plan of a drain. Serialised names are what `drain --plan -o json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainPlan {
    /// Name of the node.
    pub node: String,
    /// Begin of the drain; absent if none is under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Reason why all pods stay; absent if a drain is wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_by: Option<String>,
    /// Veto that holds the drain back; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub veto: Option<String>,
    /// Proposal that has the drain, and waits for an approval; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proposal: Option<String>,
    /// Kind of the custom resource that requests the drain from another program; absent if pods
    /// are evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_drain: Option<String>,
    /// Reason why it is not known which pods a disruption budget holds; absent if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budgets_unknown: Option<String>,
    /// Number of pods that would leave.
    pub leaving: usize,
    /// Number of GPUs that those have.
    pub gpus: u64,
    /// GPU-hours that those have worked since they started: the loss if they save nothing.
    pub gpu_hours: f64,
    /// Gangs and jobs with pods that would leave, by GPU-hours, the most first.
    pub groups: Vec<PlannedGroup>,
    /// The pods: those that leave first, then by GPU-hours, the most first.
    pub pods: Vec<PlannedPod>,
}

/// A pod in a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// True if it would leave.
    pub leaves: bool,
    /// Drain mode; absent if it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<DrainMode>,
    /// Next event for the pod, or why it stays, for people.
    pub what: String,
    /// Disruption budget that refuses its eviction now, for people; absent if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<String>,
    /// Number of its GPUs.
    pub gpus: u64,
    /// GPUs of the pod times the hours since it started.
    pub gpu_hours: f64,
    /// Owner of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Gang of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gang: Option<String>,
}

/// A gang, or for pods without one their owner, with pods that would leave.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedGroup {
    /// Name of the gang or owner.
    pub name: String,
    /// Pods on the node that would leave, as `NAMESPACE/NAME`.
    pub pods: Vec<String>,
    /// Drain modes of these pods: in one gang or job the gentlest counts for all.
    pub modes: BTreeSet<&'static str>,
    /// Number of their GPUs.
    pub gpus: u64,
    /// Sum of their GPU-hours.
    pub gpu_hours: f64,
}

/// Returns what the drain of a node would do to its pods now. `begun` is the begin of a drain
/// under way. An error in `drain` says why all pods stay. The plan ignores everything else that
/// affects the drain as a whole.
pub fn plan(
    node: &str,
    pods: Vec<PodFacts>,
    begun: Option<Timestamp>,
    drain: Result<Drain, String>,
    config: &DrainConfig,
    now: Timestamp,
) -> DrainPlan {
    let views = pods.iter().map(|facts| &facts.pod);
    let wanted = drain.as_ref().map(|drain| {
        let gangs = Gangs::of(views, *drain, None, config, now);
        (*drain, gangs)
    });
    let mut planned: Vec<PlannedPod> = (pods.into_iter())
        .map(|facts| {
            let fate = match &wanted {
                Ok((drain, gangs)) => Ok(fate_in_gang(&facts.pod, gangs, *drain, config, now)),
                Err(why) => Err(why.as_str()),
            };
            planned(facts, fate, now)
        })
        .collect();
    planned.sort_by(|a, b| {
        (b.leaves.cmp(&a.leaves))
            .then(b.gpu_hours.total_cmp(&a.gpu_hours))
            .then_with(|| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)))
    });
    let leaving = || planned.iter().filter(|pod| pod.leaves);
    let mut groups: BTreeMap<&str, PlannedGroup> = BTreeMap::new();
    for pod in leaving() {
        let Some(name) = pod.gang.as_deref().or(pod.owner.as_deref()) else {
            continue;
        };
        let group = groups.entry(name).or_insert_with(|| PlannedGroup {
            name: name.to_owned(),
            pods: Vec::new(),
            modes: BTreeSet::new(),
            gpus: 0,
            gpu_hours: 0.0,
        });
        group.pods.push(format!("{}/{}", pod.namespace, pod.name));
        group.modes.extend(pod.mode.map(DrainMode::name));
        group.gpus = group.gpus.saturating_add(pod.gpus);
        group.gpu_hours += pod.gpu_hours;
    }
    let mut groups: Vec<PlannedGroup> = groups.into_values().collect();
    groups.sort_by(|a, b| b.gpu_hours.total_cmp(&a.gpu_hours));
    DrainPlan {
        node: node.to_owned(),
        since: begun,
        kept_by: drain.err(),
        veto: None,
        proposal: None,
        custom_drain: None,
        budgets_unknown: None,
        leaving: leaving().count(),
        gpus: leaving().map(|pod| pod.gpus).fold(0, u64::saturating_add),
        gpu_hours: leaving().map(|pod| pod.gpu_hours).sum(),
        groups,
        pods: planned,
    }
}

/// Returns a pod in the plan. An error in `fate` says why all pods stay.
fn planned(facts: PodFacts, fate: Result<Fate, &str>, now: Timestamp) -> PlannedPod {
    let (mode, what) = match fate {
        Ok(Fate::Stays(stay)) => (None, stay.to_string()),
        Ok(Fate::Leaves(mode, next)) => (Some(mode), next.to_string()),
        Err(why) => (None, why.to_owned()),
    };
    let ended = fate == Ok(Fate::Stays(Stay::Finished));
    let worked = facts.started_at.filter(|_| !ended).map_or(0.0, |since| {
        now.duration_since(since).as_secs_f64().max(0.0) / 3600.0
    });
    // GPU counts are far below the precision of a double.
    #[allow(clippy::cast_precision_loss)]
    let gpu_hours = facts.gpus as f64 * worked;
    PlannedPod {
        namespace: facts.pod.namespace,
        name: facts.pod.name,
        leaves: mode.is_some(),
        mode,
        what,
        held_by: facts.held_by,
        gpus: facts.gpus,
        gpu_hours,
        owner: facts.owner,
        gang: facts.gang,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGUN: Drain = Drain {
        since: Timestamp::UNIX_EPOCH,
        force: false,
    };

    fn facts(title: &str, gpus: u64, hours: i64) -> PodFacts {
        let (namespace, name) = title.split_once('/').unwrap();
        PodFacts {
            pod: PodView {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                ..PodView::default()
            },
            gpus,
            started_at: Some(Timestamp::from_second(-3600 * hours).unwrap()),
            ..PodFacts::default()
        }
    }

    #[test]
    fn a_plan_says_who_leaves_who_waits_who_stays_and_what_is_at_stake() {
        let config = "[[userNamespaces]]\nname = \"web\"\nmode = \"Immediate\"\n\
                      [[userNamespaces]]\nname = \"train\"\nmode = \"AllowCompletion\"\n";
        let config = DrainConfig::parse(config, "d").unwrap();
        let gang = Some("volcano train/big".to_owned());
        let owner = Some("Job train/small".to_owned());
        let mut web = facts("web/a", 0, 5);
        web.held_by = Some("a budget".to_owned());
        let pods = vec![
            PodFacts {
                gang: gang.clone(),
                ..facts("train/big-1", 4, 10)
            },
            PodFacts {
                gang,
                owner: owner.clone(),
                ..facts("train/big-0", 4, 20)
            },
            PodFacts {
                owner,
                ..facts("train/small", 1, 1)
            },
            web,
            facts("kube-system/dcgm", 8, 1000),
            facts("other/x", 2, 3),
        ];
        let plan = plan("n1", pods, None, Ok(BEGUN), &config, Timestamp::UNIX_EPOCH);
        let planned: Vec<(String, &str, f64)> = (plan.pods.iter())
            .map(|pod| {
                (
                    format!("{}/{}", pod.namespace, pod.name),
                    pod.what.as_str(),
                    pod.gpu_hours,
                )
            })
            .collect();
        let waits = "is waited for until it has ended";
        let planned: Vec<(&str, &str, f64)> = planned
            .iter()
            .map(|(name, what, hours)| (name.as_str(), *what, *hours))
            .collect();
        assert_eq!(
            planned,
            [
                ("train/big-0", waits, 80.0),
                ("train/big-1", waits, 40.0),
                ("train/small", waits, 1.0),
                ("web/a", "is evicted, with 30 s to end", 0.0),
                (
                    "kube-system/dcgm",
                    "its namespace is one of the system's",
                    8000.0
                ),
                ("other/x", "the configuration names no mode for it", 6.0),
            ]
        );
        assert_eq!((plan.leaving, plan.gpus, plan.gpu_hours), (4, 9, 121.0));
        let groups: Vec<(&str, usize, f64)> = (plan.groups.iter())
            .map(|group| (group.name.as_str(), group.pods.len(), group.gpu_hours))
            .collect();
        assert_eq!(
            groups,
            [("volcano train/big", 2, 120.0), ("Job train/small", 1, 1.0)]
        );
        let held: Vec<&str> = plan
            .pods
            .iter()
            .filter_map(|pod| pod.held_by.as_deref())
            .collect();
        assert_eq!(held, ["a budget"]);
    }

    #[test]
    fn where_there_is_no_drain_all_pods_stay() {
        let pods = vec![facts("a/b", 8, 2)];
        let config = DrainConfig::default();
        let kept = Err("a route".to_owned());
        let plan = plan("n1", pods, None, kept, &config, Timestamp::UNIX_EPOCH);
        assert_eq!((plan.leaving, plan.gpus, plan.groups.len()), (0, 0, 0));
        assert_eq!(plan.kept_by.as_deref(), Some("a route"));
        assert_eq!(
            (plan.pods[0].leaves, plan.pods[0].what.as_str()),
            (false, "a route")
        );
    }

    #[test]
    fn a_drain_that_is_under_way_goes_on_from_its_begin() {
        let config = "deleteAfterTimeoutMinutes = 10\n\
                      [[userNamespaces]]\nname = \"*\"\nmode = \"DeleteAfterTimeout\"\n";
        let config = DrainConfig::parse(config, "d").unwrap();
        let begun = Timestamp::from_second(-700).unwrap();
        for (since, force, what) in [
            (None, false, "is waited for until 1970-01-01T00:10:00Z"),
            (Some(begun), false, "is evicted, with 30 s to end"),
            (None, true, "is evicted, with 30 s to end"),
        ] {
            let pods = vec![facts("a/b", 1, 1)];
            let since = since.unwrap_or(Timestamp::UNIX_EPOCH);
            let drain = Drain { since, force };
            let plan = plan("n1", pods, None, Ok(drain), &config, Timestamp::UNIX_EPOCH);
            assert_eq!(plan.pods[0].what, what);
        }
    }
}
