//! The cluster of the settings: the options for connecting to it, and the namespace in it.

use std::path::PathBuf;

use cluster::ConnectOptions;
use contract::keys;
use contract::names::{self, WrongName};

use super::SettingsError;
use crate::args::ConnectArgs;

/// File with the namespace of a pod's service account.
const POD_NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Returns the options for connecting to a cluster. Without a kubeconfig, and with a context or
/// outside of a pod, kubectl's own kubeconfig is used.
pub(crate) fn connect_options(args: ConnectArgs) -> ConnectOptions {
    let ConnectArgs {
        kubeconfig,
        context,
    } = args;
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

/// Returns the namespace of gpuwarden's own objects: the given one, else the pod's, else
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
    // The name becomes part of URL paths.
    named("--namespace", namespace, names::dns_label)
}

/// Returns the value of a flag if Kubernetes accepts it as a name.
pub(crate) fn named(
    flag: &'static str,
    value: String,
    check: fn(&str) -> Result<(), WrongName>,
) -> Result<String, SettingsError> {
    match check(&value) {
        Ok(()) => Ok(value),
        Err(error) => Err(SettingsError::value(flag, value, error.why)),
    }
}

/// Returns true if this process runs in a pod.
pub(super) fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

#[cfg(test)]
mod tests {
    use crate::args::{ActArgs, ControllerArgs, RunArgs};
    use crate::settings::resolve;

    type Set = fn(&mut ActArgs, String);

    #[test]
    fn a_flag_whose_name_kubernetes_refuses_is_an_error_of_that_flag() {
        let flags: [(&str, Set, &str, &[&str]); 3] = [
            (
                "--gpu-node-label",
                |act, text| act.gpu_node_label = Some(text),
                "example.com/gpu=true",
                &[
                    "gpu",
                    "gpu=",
                    "=true",
                    "a b=true",
                    "a=not ready!",
                    "a/b/c=d",
                ],
            ),
            (
                "--namespace",
                |act, text| act.namespace = Some(text),
                "gpuwarden-system",
                &["Gpuwarden", "a.b", "-a", "a/b"],
            ),
            (
                "--policy",
                |act, text| act.policy = Some(format!("configmap:{text}")),
                "gpuwarden/policy.v1/my_key.toml",
                &[
                    "gpuwarden",
                    "Gpuwarden/policy",
                    "a/b_c",
                    "a/b/c d",
                    "a/b/c/d",
                    "../b",
                ],
            ),
        ];
        for (flag, set, right, wrong) in flags {
            let read = |text: &str| {
                let mut run = RunArgs::default();
                run.act.kubeconfig = Some("/k".into());
                set(&mut run.act, text.to_owned());
                resolve(run).map(drop).map_err(|error| error.to_string())
            };
            assert_eq!(read(right), Ok(()), "{flag} {right}");
            for text in wrong {
                let error = read(text).unwrap_err();
                assert!(error.starts_with(&format!("{flag} ")), "{text}: {error}");
            }
        }
        for (accounts, is_right) in [
            ("a/b.c", true),
            ("A/b", false),
            ("a/b/c", false),
            ("a/b c", false),
        ] {
            let mut args = ControllerArgs::default();
            args.ingest.grpc_insecure = Some(true);
            args.ingest.agents = Some(vec![accounts.to_owned()]);
            let read = resolve(args).map(drop).map_err(|error| error.to_string());
            let refused = read.is_err_and(|error| error.starts_with("--agents "));
            assert_eq!(refused, !is_right, "{accounts}");
        }
    }
}
