//! The registrations by which API servers find the webhook, kept as they are to be, with the authorities of our
//! certificate in them: a `MutatingWebhookConfiguration` for pods, and a `ValidatingWebhookConfiguration` for the
//! requests of the janitor.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cluster::{ApiError, Cluster, Kind};
use contract::keys;
use maintenance::Maintenance;
use preflight::config::{Config, FailurePolicy};
use runtime::logging::{Trouble, chain};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Name of the registration for pods.
pub const NAME: &str = "gpuwarden-preflight";
/// Name of the registration for requests.
const REQUESTS_NAME: &str = "gpuwarden-requests";
/// Name of its webhook.
const REQUESTS_WEBHOOK: &str = "requests.gpuwarden.dev";
/// Name of its webhook, as NVSentinel has it.
const WEBHOOK: &str = "preflight.nvsentinel.nvidia.com";
/// Time between two looks at whether it still is as it is to be.
const LOOK: Duration = Duration::from_secs(30);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// Time for which an API server waits for an answer (seconds).
const TIMEOUT: u32 = 10;
/// The paths of the webhooks.
const PATH: &str = "/mutate";
const REQUESTS_PATH: &str = "/validate";
const GROUP: &str = "admissionregistration.k8s.io";
/// Label of every namespace: its name.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// The place at which API servers find the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A Service of the cluster.
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its port.
        port: u16,
    },
    /// An address, such as `https://127.0.0.1:8443`.
    Url(String),
}

/// The objects that API servers ask about.
pub enum Asked {
    /// New pods.
    Pods {
        /// The configuration: which pods get checks, and what becomes of them without a webhook.
        config: Arc<Config>,
        /// Goes before the configuration's word.
        failure_policy: Option<FailurePolicy>,
        /// The namespace of the webhook, whose own pods never wait for it.
        own_namespace: String,
    },
    /// Requests of the janitor. Without a webhook they come in: nobody is to wait for it who wants a node rebooted.
    Requests,
}

/// Keeps a registration.
pub struct Registration {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// The place of the webhook.
    pub place: Place,
    /// The objects that API servers ask about.
    pub asked: Asked,
    /// The authorities of our certificate, as they change.
    pub authorities: watch::Receiver<String>,
    /// Take it away at the end: nobody answers then.
    pub ends_with_us: bool,
}

// === impl Registration ===

impl Registration {
    /// Keeps it as it is to be until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut authorities = self.authorities.clone();
        let keep = async {
            let mut trouble = Trouble::default();
            loop {
                let kept = self.keep().await;
                let pause = if kept.is_ok() { LOOK } else { RETRY };
                trouble.note(kept.map_err(|error| {
                    let name = self.asked.name();
                    format!("the registration {name} cannot be kept: {}", chain(&error))
                }));
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    Ok(()) = authorities.changed() => {}
                }
            }
        };
        cancel.run_until_cancelled(keep).await;
        if self.ends_with_us
            && let Err(error) = self.remove().await
        {
            let error = chain(&error);
            let name = self.asked.name();
            tracing::warn!(error, "the registration {name} could not be taken away");
        }
    }

    async fn keep(&mut self) -> Result<(), ApiError> {
        let (kind, name) = (self.asked.kind(), self.asked.name());
        let wanted = self.wanted();
        let Some(mut there) = self.cluster.object(&kind, None, name).await? else {
            let created = self.cluster.create_object(&kind, None, &wanted).await;
            return match created {
                Ok(_) => {
                    tracing::info!("the webhook is registered as {name}");
                    Ok(())
                }
                // Another replica was first.
                Err(ApiError::Conflict { .. }) => Ok(()),
                Err(error) => Err(error),
            };
        };
        if is_as_wanted(&there["webhooks"], &wanted["webhooks"]) {
            return Ok(());
        }
        there["webhooks"] = wanted["webhooks"].clone();
        self.cluster
            .replace_object(&kind, None, name, &there)
            .await?;
        Ok(())
    }

    async fn remove(&self) -> Result<(), ApiError> {
        let (kind, name) = (self.asked.kind(), self.asked.name());
        let there = self.cluster.object(&kind, None, name).await?;
        let uid = there
            .as_ref()
            .and_then(|it| it.pointer("/metadata/uid")?.as_str());
        match uid {
            Some(uid) => self.cluster.delete_object(&kind, None, name, uid).await,
            None => Ok(()),
        }
    }

    fn wanted(&self) -> Value {
        let authorities = BASE64_STANDARD.encode(self.authorities.borrow().as_bytes());
        let path = self.asked.path();
        let client = match &self.place {
            Place::Service {
                namespace,
                name,
                port,
            } => json!({
                "service": {"namespace": namespace, "name": name, "port": port, "path": path},
                "caBundle": authorities,
            }),
            Place::Url(url) => json!({
                "url": format!("{}{path}", url.trim_end_matches('/')),
                "caBundle": authorities,
            }),
        };
        let mut webhook = self.asked.webhook();
        for (key, value) in [
            ("clientConfig", client),
            ("matchPolicy", json!("Equivalent")),
            ("sideEffects", json!("None")),
            ("admissionReviewVersions", json!(["v1"])),
            ("timeoutSeconds", json!(TIMEOUT)),
        ] {
            webhook[key] = value;
        }
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": self.asked.kind_name(),
            "metadata": {
                "name": self.asked.name(),
                "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY},
            },
            "webhooks": [webhook],
        })
    }
}

// === impl Asked ===

impl Asked {
    fn name(&self) -> &'static str {
        match self {
            Self::Pods { .. } => NAME,
            Self::Requests => REQUESTS_NAME,
        }
    }

    fn path(&self) -> &'static str {
        match self {
            Self::Pods { .. } => PATH,
            Self::Requests => REQUESTS_PATH,
        }
    }

    fn kind_name(&self) -> &'static str {
        match self {
            Self::Pods { .. } => "MutatingWebhookConfiguration",
            Self::Requests => "ValidatingWebhookConfiguration",
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Pods { .. } => kind(),
            Self::Requests => Kind::new(GROUP, "v1", "validatingwebhookconfigurations"),
        }
    }

    /// Returns what is of its own in the webhook of the registration.
    fn webhook(&self) -> Value {
        match self {
            Self::Pods {
                config,
                failure_policy,
                own_namespace,
            } => of_pods(config, *failure_policy, own_namespace),
            Self::Requests => of_requests(),
        }
    }
}

fn of_requests() -> Value {
    let rules = Maintenance::ALL.map(|kind| {
        let (group, version, plural) = kind.resource();
        json!({
            "apiGroups": [group],
            "apiVersions": [version],
            "resources": [plural],
            "operations": ["CREATE", "UPDATE"],
            "scope": "Cluster",
        })
    });
    json!({"name": REQUESTS_WEBHOOK, "rules": rules, "failurePolicy": "Ignore"})
}

fn of_pods(config: &Config, failure_policy: Option<FailurePolicy>, own_namespace: &str) -> Value {
    let policy = failure_policy.unwrap_or(config.failure_policy);
    let mut webhook = json!({
        "name": WEBHOOK,
        "rules": [{
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "resources": ["pods"],
            "operations": ["CREATE"],
            "scope": "Namespaced",
        }],
        "namespaceSelector": namespaces(config, own_namespace),
        "failurePolicy": match policy {
            FailurePolicy::Fail => "Fail",
            FailurePolicy::Ignore => "Ignore",
        },
        // Another webhook may give a pod its GPUs after us; who has its checks keeps them.
        "reinvocationPolicy": "IfNeeded",
    });
    if let Some(selector) = &config.object_selector {
        webhook["objectSelector"] = selector.clone();
    }
    webhook
}

/// Returns the selector of namespaces: the configured one, without those that never get checks.
fn namespaces(config: &Config, own_namespace: &str) -> Value {
    let mut selector = config.namespace_selector.clone();
    let mut never = config.excluded_namespaces.clone();
    never.push(own_namespace.to_owned());
    let mut more = vec![(NAMESPACE_NAME, "NotIn", never)];
    if !config.namespaces.is_empty() {
        more.push((NAMESPACE_NAME, "In", config.namespaces.clone()));
    }
    let more = more
        .into_iter()
        .map(|(key, operator, values)| json!({"key": key, "operator": operator, "values": values}));
    if let Some(selector) = selector.as_object_mut() {
        let expressions = selector.entry("matchExpressions").or_insert(Value::Null);
        if expressions.is_null() {
            *expressions = json!([]);
        }
        if let Some(expressions) = expressions.as_array_mut() {
            expressions.extend(more);
        }
    }
    selector
}

/// Returns whether API servers are told of these authorities: the registration has them.
pub(crate) async fn has(cluster: &Cluster, authorities: &str) -> Result<bool, ApiError> {
    let there = cluster.object(&kind(), None, NAME).await?;
    let wanted = BASE64_STANDARD.encode(authorities.as_bytes());
    let bundle = "/webhooks/0/clientConfig/caBundle";
    let there = there.as_ref().and_then(|it| it.pointer(bundle)?.as_str());
    Ok(there == Some(&*wanted))
}

fn kind() -> Kind {
    Kind::new(GROUP, "v1", "mutatingwebhookconfigurations")
}

/// Returns whether webhooks are as wanted. A selector that has more than that selects less.
fn is_as_wanted(there: &Value, wanted: &Value) -> bool {
    let selectors = |webhooks: &Value| {
        let all = webhooks.as_array().into_iter().flatten();
        let both = ["namespaceSelector", "objectSelector"];
        // The API server writes one that selects all where there is none.
        let of =
            |webhook: &Value, key: &str| webhook.get(key).cloned().unwrap_or_else(|| json!({}));
        let all = all.flat_map(|webhook| both.map(|key| of(webhook, key)));
        all.collect::<Vec<_>>()
    };
    contains(there, wanted) && selectors(there) == selectors(wanted)
}

/// Returns whether an object has all that is wanted; the API server adds its defaults.
fn contains(there: &Value, wanted: &Value) -> bool {
    match (there, wanted) {
        (Value::Object(there), Value::Object(wanted)) => wanted
            .iter()
            .all(|(key, value)| there.get(key).is_some_and(|there| contains(there, value))),
        (Value::Array(there), Value::Array(wanted)) => {
            there.len() == wanted.len()
                && there
                    .iter()
                    .zip(wanted)
                    .all(|(one, other)| contains(one, other))
        }
        _ => there == wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_api_server_adds_is_left() {
        let there =
            json!([{"name": "a", "matchPolicy": "Equivalent", "rules": [{"scope": "*", "x": 1}]}]);
        for (wanted, holds) in [
            (json!([{"name": "a", "rules": [{"scope": "*"}]}]), true),
            (
                json!([{"name": "a", "rules": [{"scope": "Namespaced"}]}]),
                false,
            ),
            (json!([{"name": "a", "timeoutSeconds": 10}]), false),
            (json!([]), false),
        ] {
            assert_eq!(contains(&there, &wanted), holds, "{wanted}");
        }
    }

    #[test]
    fn a_selector_that_was_narrower_is_widened() {
        let webhook = |labels: Value| json!([{"namespaceSelector": labels, "objectSelector": {}}]);
        let narrow = webhook(json!({"matchLabels": {"a": "b"}}));
        assert!(is_as_wanted(&narrow, &narrow));
        assert!(!is_as_wanted(&narrow, &webhook(json!({}))));
        // One that is not written is the API server's, which selects all.
        let unwritten = json!([{"namespaceSelector": {"matchLabels": {"a": "b"}}}]);
        assert!(is_as_wanted(&narrow, &unwritten));
        let by_object = json!([{"namespaceSelector": {"matchLabels": {"a": "b"}}, "objectSelector": {"x": "y"}}]);
        assert!(!is_as_wanted(&by_object, &unwritten));
    }

    #[tokio::test]
    async fn a_selector_of_objects_is_written_only_where_one_is_given() {
        for (given, expected) in [
            ("", None),
            ("objectSelector: {}\n", None),
            (
                "objectSelector: {matchLabels: {a: b}}\n",
                Some(json!({"matchLabels": {"a": "b"}})),
            ),
        ] {
            let config = Config::parse(&format!("image: i\n{given}"), "test");
            let registration = Registration {
                cluster: crate::server::tests::away().await,
                place: Place::Url("https://127.0.0.1:8443".to_owned()),
                asked: Asked::Pods {
                    config: Arc::new(config.expect("a configuration")),
                    failure_policy: None,
                    own_namespace: "own".to_owned(),
                },
                authorities: watch::channel(String::new()).1,
                ends_with_us: false,
            };
            let wanted = registration.wanted();
            let selector = wanted["webhooks"][0].get("objectSelector");
            assert_eq!(selector, expected.as_ref(), "{given}");
        }
    }
}
