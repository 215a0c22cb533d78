//! The controller's own certificate: its Secret, its names, and the `ConfigMap` with its
//! authorities, which agents and the webhook mount as their `--tls-ca`.

use std::sync::Arc;
use std::time::Duration;

use certificates::{CertificatePlan, Publication};
use cluster::{ApiError, Cluster, ObjectKind};
use contract::keys;
use runtime::logging::{Trouble, chain};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Name of the Secret with the certificate.
pub const SECRET: &str = "gpuwarden-controller-tls";
/// Name of the `ConfigMap`.
const NAME: &str = "gpuwarden-ca";
/// Key with the authorities in PEM form.
const KEY: &str = "ca.crt";
/// Interval for verifying the `ConfigMap`.
const INTERVAL: Duration = Duration::from_secs(30);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(2);

/// Returns the plan of a certificate for the Service `name` in `namespace`: agents connect to any
/// of the Service's DNS names.
pub fn plan(name: &str, namespace: &str, lifetime: Duration) -> CertificatePlan {
    let names = ["", ".svc", ".svc.cluster.local"];
    let names = names.map(|end| format!("{name}.{namespace}{end}"));
    CertificatePlan {
        secret: SECRET,
        authority: "gpuwarden controller",
        names: [name.to_owned()].into_iter().chain(names).collect(),
        lifetime,
        random_key: None,
    }
}

/// Keeper of the `ConfigMap` in a namespace.
#[derive(Clone)]
pub struct CaConfigMap {
    cluster: Arc<Cluster>,
    namespace: String,
}

// === impl CaConfigMap ===

impl CaConfigMap {
    /// Creates a keeper that has done nothing yet.
    pub fn new(cluster: Arc<Cluster>, namespace: &str) -> Self {
        Self {
            cluster,
            namespace: namespace.to_owned(),
        }
    }

    /// Keeps the `ConfigMap` in its intended state until `cancel`, also after its deletion.
    pub async fn run(self, mut authorities: watch::Receiver<String>, cancel: CancellationToken) {
        let keep = async {
            let mut trouble = Trouble::default();
            loop {
                let wanted = authorities.borrow_and_update().clone();
                let kept = self.keep(&wanted).await;
                let pause = if kept.is_ok() { INTERVAL } else { RETRY };
                trouble.note(kept.map_err(|error| {
                    format!("cannot update the ConfigMap {NAME}: {}", chain(&error))
                }));
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    Ok(()) = authorities.changed() => {}
                }
            }
        };
        cancel.run_until_cancelled(keep).await;
    }

    async fn keep(&self, authorities: &str) -> Result<(), ApiError> {
        let (kind, namespace) = (config_maps(), Some(self.namespace.as_str()));
        let written = match self.cluster.object(&kind, namespace, NAME).await? {
            None => {
                let object = self.object(authorities);
                self.cluster.create_object(&kind, namespace, &object).await
            }
            Some(there) if published(&there) == Some(authorities) => return Ok(()),
            Some(mut there) => {
                there["data"][KEY] = authorities.into();
                let replaced = self.cluster.replace_object(&kind, namespace, NAME, &there);
                replaced.await
            }
        };
        written.map(|_| tracing::info!("the certificate authorities are published in {NAME}"))
    }

    fn object(&self, authorities: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": NAME,
                "namespace": self.namespace,
                "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY},
            },
            "data": {KEY: authorities},
        })
    }
}

impl Publication for CaConfigMap {
    /// A kubelet updates mounted files within its sync period of one minute, and a half.
    const PROPAGATION: Duration = Duration::from_secs(120);

    async fn has(&self, authorities: &str) -> Result<bool, ApiError> {
        let there = self
            .cluster
            .object(&config_maps(), Some(&self.namespace), NAME)
            .await?;
        Ok(there.as_ref().and_then(published) == Some(authorities))
    }
}

/// Returns the authorities in a `ConfigMap`.
fn published(there: &Value) -> Option<&str> {
    there.get("data")?.get(KEY)?.as_str()
}

fn config_maps() -> ObjectKind {
    ObjectKind::new("", "v1", "configmaps")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_is_for_each_name_of_the_service() {
        let plan = plan(
            "gpuwarden-controller",
            "gpu-health",
            Duration::from_secs(10),
        );
        assert_eq!(
            plan.names,
            [
                "gpuwarden-controller",
                "gpuwarden-controller.gpu-health",
                "gpuwarden-controller.gpu-health.svc",
                "gpuwarden-controller.gpu-health.svc.cluster.local",
            ]
        );
    }
}
