//! Single devices: the slices that drivers publish, the rules that taint devices, and the claims
//! that devices are allocated to.
//!
//! The API of rules has three versions of the same shape, and a cluster may serve none of them,
//! so the cluster is asked for its versions. Watches deliver the parts of the objects that
//! [`object`] reads.

use std::sync::Arc;
use std::time::Duration;

use contract::keys;
use fleet::{DeviceInput, DeviceWatch};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind, Request};
use model::device::{Claim, DeviceTaintRule, GPU_DRIVER, RuleChange, Slice};
use model::listing::Listing;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::request::ask;
use crate::signals::{ObjectChange, apply_signal};
use crate::watch::{Selection, Signal};

mod object;

use object::{ClaimObject, RuleObject, SliceObject};

/// API group of slices, claims and rules.
const GROUP: &str = "resource.k8s.io";
/// Resource that drivers publish devices in.
const SLICES: &str = "resourceslices";
/// Resource that allocates devices to pods.
const CLAIMS: &str = "resourceclaims";
/// Versions that the cluster is asked for, in order of preference.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];
/// Events that wait for the consumer; when it is slower, the API server waits.
const QUEUE: usize = 1024;
/// Pause before a cluster is asked again for an API that it does not serve: an operator may
/// enable the API.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Pause after a temporary failure.
const RETRY: Duration = Duration::from_secs(1);
/// Failures in a row, before the first complete list, after which nodes are decided about
/// without their devices: a broken node must not stay in service for want of them.
const PATIENCE: u32 = 10;

/// Versions of the API of devices that a cluster serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceApi {
    slices: ApiResource,
    claims: ApiResource,
    rules: ApiResource,
}

/// An event of the watch of devices.
#[derive(Debug)]
pub enum DeviceEvent {
    /// Versions that the cluster serves; sent first.
    Served(Box<DeviceApi>),
    /// A change of a slice, a rule or a claim, or of the watch.
    News(DeviceInput),
}

/// Response to a list of claims.
#[derive(Deserialize)]
struct Claims {
    items: Vec<ClaimObject>,
}

/// Reason why the cluster does not serve the API.
struct Unserved {
    why: String,
    /// True if the failure may be temporary.
    passes: bool,
}

/// Progress of the watches towards complete lists of slices and rules.
#[derive(Debug, Default)]
struct Startup {
    slices: Listing<String, ()>,
    rules: Listing<String, ()>,
    claims: Listing<String, ()>,
    failures: u32,
    known: bool,
}

// === impl Cluster ===

impl Cluster {
    /// Watches the devices of GPUs, the rules of all gpuwardens, and all claims, until `cancel`
    /// is cancelled or the receiver is dropped. Must be called within a tokio runtime.
    ///
    /// Takes the permissions `list` and `watch` for all three. Without those for claims, the
    /// events do not show which pods use a device.
    pub fn watch_devices(
        self: &Arc<Self>,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<DeviceEvent> {
        let (events, receiver) = mpsc::channel(QUEUE);
        let cluster = Arc::clone(self);
        tokio::spawn(async move {
            let follow = async {
                if let Some(api) = cluster.find_device_api(&events).await {
                    cluster.follow_devices(&events, api, cancel.clone()).await;
                }
            };
            cancel.run_until_cancelled(follow).await;
        });
        receiver
    }

    /// Like [`Self::watch_devices`] if an earlier gpuwarden has left rules behind. Otherwise
    /// watches nothing, so that a cluster whose devices are not to be tainted pays for no watch.
    pub fn watch_leftover_rules(
        self: &Arc<Self>,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<DeviceEvent> {
        let (events, receiver) = mpsc::channel(QUEUE);
        let cluster = Arc::clone(self);
        tokio::spawn(async move {
            let follow = async {
                if let Some(api) = cluster.find_leftover_rules().await {
                    cluster.follow_devices(&events, api, cancel.clone()).await;
                }
            };
            cancel.run_until_cancelled(follow).await;
            // Without rules the channel stays open until the end.
            cancel.cancelled().await;
            drop(events);
        });
        receiver
    }

    /// Returns the versions that the cluster serves, if there are rules with our label and we
    /// may list them.
    async fn find_leftover_rules(&self) -> Option<DeviceApi> {
        loop {
            match self.device_api().await {
                Ok(api) => {
                    let listed = Access {
                        verb: "list",
                        group: &api.rules.group,
                        resource: &api.rules.plural,
                        namespace: None,
                        name: None,
                    };
                    // Asking costs no refusal in the audit log of a cluster that permits no list.
                    if !self.may(listed).await.unwrap_or(false) {
                        return None;
                    }
                    let rules: Api<DynamicObject> =
                        Api::all_with(self.client(Urgency::Act), &api.rules);
                    let params = ListParams::default().labels(&own_label()).limit(1);
                    let found = rules.list(&params).await;
                    return found
                        .is_ok_and(|found| !found.items.is_empty())
                        .then_some(api);
                }
                Err(Unserved { passes: false, .. }) => return None,
                Err(Unserved { passes: true, .. }) => tokio::time::sleep(ASK_AGAIN).await,
            }
        }
    }

    async fn follow_devices(
        &self,
        events: &mpsc::Sender<DeviceEvent>,
        api: DeviceApi,
        cancel: CancellationToken,
    ) {
        let slices = selection(&api.slices).with_fields(&format!("spec.driver={GPU_DRIVER}"));
        let rules = selection(&api.rules).with_labels(&own_label());
        let mut slices = self.watch::<SliceObject>(slices, cancel.clone());
        let mut rules = self.watch::<RuleObject>(rules, cancel.clone());
        let mut claims = self.watch::<ClaimObject>(selection(&api.claims), cancel);
        let mut state = Startup::default();
        if events
            .send(DeviceEvent::Served(Box::new(api)))
            .await
            .is_err()
        {
            return;
        }
        loop {
            let mut inputs = tokio::select! {
                Some(signal) = slices.recv() => {
                    let failing = state.failing(&signal);
                    let input = |name, object: Option<Arc<SliceObject>>| {
                        DeviceInput::Slice(name, object.map(|one| one.slice()))
                    };
                    let inputs = inputs(&mut state.slices, signal, SliceObject::name, input);
                    inputs.into_iter().chain(failing).collect()
                }
                Some(signal) = rules.recv() => {
                    let failing = state.failing(&signal);
                    let input = |name, object: Option<Arc<RuleObject>>| {
                        DeviceInput::Rule(name, object.map(|one| Box::new(one.rule())))
                    };
                    let inputs = inputs(&mut state.rules, signal, RuleObject::name, input);
                    inputs.into_iter().chain(failing).collect()
                }
                Some(signal) = claims.recv() => {
                    let input = |name, object: Option<Arc<ClaimObject>>| {
                        DeviceInput::Claim(name, object.map(|one| one.claim()))
                    };
                    inputs(&mut state.claims, signal, ClaimObject::name, input)
                }
                else => return,
            };
            inputs.extend(state.complete());
            for input in inputs {
                if events.send(DeviceEvent::News(input)).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Waits until the cluster serves devices and rules; `None` if the receiver was dropped.
    async fn find_device_api(&self, events: &mpsc::Sender<DeviceEvent>) -> Option<DeviceApi> {
        let (mut failures, mut reported) = (0, None);
        loop {
            let Unserved { why, passes } = match self.device_api().await {
                Ok(api) => return Some(api),
                Err(unserved) => unserved,
            };
            failures += 1;
            let patient = passes && failures < PATIENCE;
            if !patient && reported.as_ref() != Some(&why) {
                let watch = DeviceWatch::Unserved(why.clone());
                let event = DeviceEvent::News(DeviceInput::Watch(watch));
                events.send(event).await.ok()?;
                reported = Some(why);
            }
            tokio::time::sleep(if patient { RETRY } else { ASK_AGAIN }).await;
        }
    }

    /// Returns the version of slices that the cluster serves; `None` if it serves none.
    pub(crate) async fn slices_api(&self) -> Result<Option<ApiResource>, ApiError> {
        self.dra_api("ResourceSlice", SLICES).await
    }

    /// Lists the claims of a namespace, each with the pods that it is reserved for. Takes the
    /// permission `list` on claims.
    pub(crate) async fn claims_in(&self, namespace: &str) -> Result<Vec<Claim>, ApiError> {
        let Some(api) = self.dra_api("ResourceClaim", CLAIMS).await? else {
            return Ok(Vec::new());
        };
        let path = format!("/apis/{}/namespaces/{namespace}/{CLAIMS}", api.api_version);
        let request = Request::new(path).list(&ListParams::default());
        let listed: Claims = ask(&self.client(Urgency::Report), request).await?;
        Ok(listed.items.iter().map(ClaimObject::claim).collect())
    }

    async fn dra_api(&self, kind: &str, plural: &str) -> Result<Option<ApiResource>, ApiError> {
        let client = self.client(Urgency::Report);
        for version in VERSIONS {
            let group = format!("{GROUP}/{version}");
            let list = found(client.list_api_group_resources(&group).await)?;
            let mut resources = list.into_iter().flat_map(|list| list.resources);
            if resources.any(|resource| resource.name == plural) {
                let kind = GroupVersionKind::gvk(GROUP, version, kind);
                return Ok(Some(ApiResource::from_gvk_with_plural(&kind, plural)));
            }
        }
        Ok(None)
    }

    /// Returns the versions of slices, claims and rules that the cluster serves.
    async fn device_api(&self) -> Result<DeviceApi, Unserved> {
        let client = self.client(Urgency::Act);
        let mut served = Vec::new();
        for version in VERSIONS {
            let group = format!("{GROUP}/{version}");
            let list = client.list_api_group_resources(&group).await;
            let list = found(list).map_err(|error| Unserved {
                why: format!("the cluster cannot be asked what it serves: {error}"),
                passes: error.is_retryable(),
            })?;
            let resources = list.into_iter().flat_map(|list| list.resources);
            served.extend(resources.map(|resource| (version, resource.name)));
        }
        let find = |kind: &str, plural: &str| {
            let found = served.iter().find(|(_, name)| name == plural);
            let (version, _) = found.ok_or_else(|| Unserved {
                why: format!("the cluster does not serve {plural} of {GROUP}"),
                passes: false,
            })?;
            let kind = GroupVersionKind::gvk(GROUP, version, kind);
            Ok(ApiResource::from_gvk_with_plural(&kind, plural))
        };
        Ok(DeviceApi {
            slices: find("ResourceSlice", SLICES)?,
            claims: find("ResourceClaim", CLAIMS)?,
            rules: find("DeviceTaintRule", "devicetaintrules")?,
        })
    }

    /// Changes a rule, in one request, if no other client has changed it since the view of
    /// `change`. Returns the rule afterwards; `None` after its deletion.
    pub async fn change_rule(
        &self,
        api: &DeviceApi,
        change: &RuleChange,
    ) -> Result<Option<DeviceTaintRule>, ApiError> {
        let rules: Api<DynamicObject> = Api::all_with(self.client(Urgency::Act), &api.rules);
        let name = change.rule_name();
        let object = match change {
            RuleChange::Create(spec) => {
                let object = object::rule(&api.rules, &name, spec);
                let object: DynamicObject =
                    serde_json::from_value(object).map_err(ApiError::unavailable)?;
                rules.create(&PostParams::default(), &object).await?
            }
            RuleChange::Update(rule, taint) => {
                let mut patch = json!({
                    "metadata": {"resourceVersion": rule.resource_version},
                    "spec": {"taint": {"value": Value::Null, "effect": taint.effect.name()}},
                });
                if !taint.value.is_empty() {
                    patch["spec"]["taint"]["value"] = json!(taint.value);
                }
                // The API server sets the time again. Pods may tolerate the taint for a while
                // from that time on.
                if taint.effect != rule.spec.taint.effect {
                    patch["spec"]["taint"]["timeAdded"] = Value::Null;
                }
                let patch = Patch::Merge(patch);
                let params = PatchParams::default();
                rules.patch(&name, &params, &patch).await?
            }
            RuleChange::Delete(rule) => {
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        resource_version: Some(rule.resource_version.clone()),
                        ..Preconditions::default()
                    }),
                    ..DeleteParams::default()
                };
                found(rules.delete(&name, &params).await)?;
                return Ok(None);
            }
        };
        let object = serde_json::to_value(object).and_then(serde_json::from_value::<RuleObject>);
        Ok(Some(object.map_err(ApiError::unavailable)?.rule()))
    }
}

/// Returns the label selector of our rules.
fn own_label() -> String {
    format!("{}={}", keys::MANAGED_BY_LABEL, keys::MANAGED_BY)
}

/// Reads the name and content of a slice.
pub(crate) fn slice(object: DynamicObject) -> Result<(String, Slice), ApiError> {
    let object = serde_json::to_value(object).and_then(serde_json::from_value::<SliceObject>);
    let object = object.map_err(ApiError::unavailable)?;
    Ok((object.name(), object.slice()))
}

/// Applies a signal to the names of all objects of its kind. Returns an input for each change.
fn inputs<T>(
    known: &mut Listing<String, ()>,
    signal: Signal<T>,
    name: impl Fn(&T) -> String,
    input: impl Fn(String, Option<Arc<T>>) -> DeviceInput,
) -> Vec<DeviceInput> {
    let changes = apply_signal(known, signal, |object| Some((name(object), ())));
    let changes = changes.into_iter().map(ObjectChange::into_parts);
    changes.map(|(name, object)| input(name, object)).collect()
}

fn selection(resource: &ApiResource) -> Selection {
    Selection::of::<DynamicObject>(resource, None)
}

// === impl Startup ===

impl Startup {
    /// Counts a failure before the first complete lists. Returns an input once they are not to
    /// be waited for any longer.
    fn failing<T>(&mut self, signal: &Signal<T>) -> Option<DeviceInput> {
        let Signal::Failing { error, refused } = signal else {
            return None;
        };
        self.failures += 1;
        if self.known || !refused && self.failures < PATIENCE {
            return None;
        }
        let why = format!("they cannot be watched: {error}");
        Some(DeviceInput::Watch(DeviceWatch::Unserved(why)))
    }

    /// Returns an input once, when the first lists of slices and rules are complete.
    fn complete(&mut self) -> Option<DeviceInput> {
        let complete = self.slices.is_complete() && self.rules.is_complete();
        let first = complete && !self.known;
        self.known |= complete;
        first.then_some(DeviceInput::Watch(DeviceWatch::Known))
    }
}
