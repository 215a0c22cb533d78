//! Registrations of the webhook with the API server: a `MutatingWebhookConfiguration` for pods,
//! and a `ValidatingWebhookConfiguration` for the janitor's requests. Each is kept in its
//! intended state, with the current certificate authorities.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use certificates::{CertificatePlan, Publication};
use cluster::{ApiError, Cluster, ObjectKind};
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
/// Name of the webhook for requests.
const REQUESTS_WEBHOOK: &str = "requests.gpuwarden.dev";
/// Name of the webhook for pods, as in NVSentinel.
const WEBHOOK: &str = "preflight.nvsentinel.nvidia.com";
/// Interval for verifying the registration.
const INTERVAL: Duration = Duration::from_secs(30);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// Timeout of an API server for an answer, in seconds.
const TIMEOUT: u32 = 10;
/// Path of the webhook for pods.
const PATH: &str = "/mutate";
const REQUESTS_PATH: &str = "/validate";
const GROUP: &str = "admissionregistration.k8s.io";
/// Label that Kubernetes sets on every namespace to its name.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Address of the webhook, as API servers reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebhookAddress {
    /// Service in the cluster.
    Service {
        namespace: String,
        name: String,
        port: u16,
    },
    /// Base URL, such as `https://127.0.0.1:8443`.
    Url(String),
}

/// Objects that API servers ask about.
pub enum Asked {
    /// Pods at their creation.
    Pods {
        /// Configuration: which pods get checks, and the default failure policy.
        config: Arc<Config>,
        /// Overrides the failure policy of the configuration.
        failure_policy: Option<FailurePolicy>,
        /// Namespace of the webhook itself, whose pods never need its answer.
        own_namespace: String,
    },
    /// Requests of the janitor. They are allowed while no webhook answers: a reboot must not
    /// wait for it.
    Requests,
}

/// Returns the plan of the webhook's certificate for the name or address that API servers connect
/// to. The Secret also holds the key for the secrets of gangs.
pub fn certificate_plan(host: &str, lifetime: Duration) -> CertificatePlan {
    CertificatePlan {
        secret: "gpuwarden-webhook-tls",
        authority: "gpuwarden preflight webhook",
        names: vec![host.to_owned()],
        lifetime,
        random_key: Some("gang.key"),
    }
}

/// Publication of the authorities in the registration for pods.
pub struct Registered(pub Arc<Cluster>);

/// Keeper of one registration.
pub struct Registration {
    pub cluster: Arc<Cluster>,
    pub place: WebhookAddress,
    pub asked: Asked,
    /// PEM of the current certificate authorities.
    pub authorities: watch::Receiver<String>,
    /// True if the registration is deleted at shutdown, since nobody answers afterwards.
    pub ends_with_us: bool,
}

// === impl Registration ===

impl Registration {
    /// Keeps the registration in its intended state until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut authorities = self.authorities.clone();
        let keep = async {
            let mut trouble = Trouble::default();
            loop {
                let kept = self.keep().await;
                let pause = if kept.is_ok() { INTERVAL } else { RETRY };
                trouble.note(kept.map_err(|error| {
                    let name = self.asked.name();
                    format!("cannot update the registration {name}: {}", chain(&error))
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
            tracing::warn!(error, "cannot delete the registration {name}");
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
                // Another replica created it first.
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
            WebhookAddress::Service {
                namespace,
                name,
                port,
            } => json!({
                "service": {"namespace": namespace, "name": name, "port": port, "path": path},
                "caBundle": authorities,
            }),
            WebhookAddress::Url(url) => json!({
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

    fn kind(&self) -> ObjectKind {
        match self {
            Self::Pods { .. } => kind(),
            Self::Requests => ObjectKind::new(GROUP, "v1", "validatingwebhookconfigurations"),
        }
    }

    /// Returns the parts of the webhook that depend on the kind of object.
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
        // Another webhook may add GPUs to a pod after this one. A pod that has its checks keeps
        // them.
        "reinvocationPolicy": "IfNeeded",
    });
    if let Some(selector) = &config.object_selector {
        webhook["objectSelector"] = selector.clone();
    }
    webhook
}

/// Returns the configured namespace selector without the namespaces that never get checks.
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

impl Publication for Registered {
    const PROPAGATION: Duration = Duration::from_secs(5);

    async fn has(&self, authorities: &str) -> Result<bool, ApiError> {
        let there = self.0.object(&kind(), None, NAME).await?;
        let wanted = BASE64_STANDARD.encode(authorities.as_bytes());
        let bundle = "/webhooks/0/clientConfig/caBundle";
        let there = there.as_ref().and_then(|it| it.pointer(bundle)?.as_str());
        Ok(there == Some(&*wanted))
    }
}

fn kind() -> ObjectKind {
    ObjectKind::new(GROUP, "v1", "mutatingwebhookconfigurations")
}

/// Returns true if the webhooks are as intended. A selector with additional terms would select
/// less, so selectors must be equal.
fn is_as_wanted(there: &Value, wanted: &Value) -> bool {
    let selectors = |webhooks: &Value| {
        let all = webhooks.as_array().into_iter().flatten();
        let both = ["namespaceSelector", "objectSelector"];
        // The API server defaults a missing selector to one that selects everything.
        let of =
            |webhook: &Value, key: &str| webhook.get(key).cloned().unwrap_or_else(|| json!({}));
        let all = all.flat_map(|webhook| both.map(|key| of(webhook, key)));
        all.collect::<Vec<_>>()
    };
    contains(there, wanted) && selectors(there) == selectors(wanted)
}

/// Returns true if `there` contains everything in `wanted`. The API server adds defaults.
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
        // A missing selector is defaulted by the API server to one that selects everything.
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
                place: WebhookAddress::Url("https://127.0.0.1:8443".to_owned()),
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
