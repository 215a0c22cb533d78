//! Checks of the policies over Kubernetes objects: whether they can be read, and whether the cluster
//! serves the kinds that they watch and look up. Their permissions are [`needs`](super::needs).

use cluster::Cluster;
use controller::objects::ObjectsSource;
use objects::ObjectMonitor;

use super::needs::{self, Need};
use super::{Finding, causes, text_of};

/// Returns the findings about the policies, and the permissions that they need.
pub(super) async fn check(cluster: &Cluster, source: &ObjectsSource) -> (Vec<Finding>, Vec<Need>) {
    let mut needs = Vec::new();
    let mut findings = Vec::new();
    let parsed = match source {
        ObjectsSource::Preset(preset) => {
            objects::parse(preset.text, preset.name).map_err(|error| causes(&error))
        }
        ObjectsSource::Place(place) => {
            needs.extend(needs::of_objects_map(place));
            let shown = place.to_string();
            let (text, fix) = text_of(cluster, place, "policies.toml").await;
            let parsed =
                text.and_then(|text| objects::parse(&text, &shown).map_err(|error| causes(&error)));
            let read = match &parsed {
                Ok(_) => Ok(format!("{shown} can be read")),
                Err(error) => Err(error.clone()),
            };
            let finding = Finding::tried("objects", read);
            findings.push(match fix {
                Some(fix) => finding.fix(fix),
                None => finding,
            });
            parsed
        }
    };
    let policies = parsed.map(|parsed| parsed.policies).unwrap_or_default();
    let monitor = ObjectMonitor::new(policies);
    for (sight, (watched, _)) in monitor.watched().enumerate() {
        let kind = &watched.kind;
        let served = cluster.resource_of(&kind.group, &kind.version, &kind.kind);
        match served.await {
            Ok(Some(resource)) => needs.push(needs::of_objects(watched, resource)),
            Ok(None) => {
                let policies = monitor.policies_of(sight).join(", ");
                let what = format!("the cluster has no {kind}, which policies read: {policies}");
                findings.push(Finding::warning("object-kinds", what));
            }
            // Everybody may list what the cluster serves; the other checks report the error.
            Err(_) => {}
        }
    }
    (findings, needs)
}
