//! The cluster that settings name: how to connect to it, and the namespace in it.

use std::path::PathBuf;

use cluster::ConnectOptions;
use contract::keys;

use super::SettingsError;

/// File with the namespace of a pod's service account.
const POD_NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Returns how to connect to a cluster. Without a file, and with a context or outside of a pod, it
/// is looked for where kubectl looks.
pub(crate) fn connect_options(
    kubeconfig: Option<PathBuf>,
    context: Option<String>,
) -> ConnectOptions {
    let kubeconfig = kubeconfig.or_else(|| {
        if context.is_none() && in_pod() {
            return None;
        }
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
        let named = std::env::var_os("KUBECONFIG").map(PathBuf::from);
        named.or_else(home)
    });
    ConnectOptions {
        in_cluster: kubeconfig.is_none() && in_pod(),
        kubeconfig,
        context,
    }
}

/// Returns the namespace of the product's own objects: as given, else the pod's, else
/// [`keys::NAMESPACE`].
pub(crate) fn namespace(given: Option<String>) -> Result<String, SettingsError> {
    let of_pod = || {
        let variable = std::env::var("POD_NAMESPACE").ok();
        variable.or_else(|| std::fs::read_to_string(POD_NAMESPACE_FILE).ok())
    };
    let namespace = given
        .or_else(|| of_pod().map(|name| name.trim().to_owned()))
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| keys::NAMESPACE.to_owned());
    // It becomes part of a path.
    let letters = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    if namespace.len() > 63 || !namespace.bytes().all(letters) {
        let what = "is no name of a namespace";
        return Err(SettingsError::value("--namespace", namespace, what));
    }
    Ok(namespace)
}

/// Returns whether this process runs in a pod.
pub(super) fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}
