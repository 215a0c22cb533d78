//! The name of this node: the given one, else `NODE_NAME`, which pods have, else the host name.
//!
//! A name that no node can have is rejected here, before anything starts: its events would be
//! rejected one by one, or have no effect.

use contract::names;

use super::SettingsError;

/// Returns the name of this node, or an error for an invalid name.
pub(crate) fn node_name(given: Option<String>) -> Result<String, SettingsError> {
    let from_pod = std::env::var("NODE_NAME").ok();
    choose(given, from_pod, host::identity::host_name)
}

/// Chooses the name. An empty `from_pod` is ignored. The host name is converted to lower case, as by
/// the kubelet.
fn choose(
    given: Option<String>,
    from_pod: Option<String>,
    host: impl FnOnce() -> Option<String>,
) -> Result<String, SettingsError> {
    if let Some(given) = given {
        return checked("--node-name", given, "");
    }
    if let Some(name) = from_pod.filter(|name| !name.trim().is_empty()) {
        return checked("NODE_NAME", name, "");
    }
    let Some(host) = host() else {
        return Err(SettingsError::Conflict(
            "this machine has no host name: name the node with --node-name",
        ));
    };
    let host = host.trim().to_ascii_lowercase();
    checked("host name", host, "; name the node with --node-name")
}

fn checked(
    name: &'static str,
    value: String,
    instead: &'static str,
) -> Result<String, SettingsError> {
    let what = if value.is_empty() {
        "is empty: write the node's name in the cluster, or leave it out for the host name"
            .to_owned()
    } else {
        match names::object_name(&value) {
            Ok(()) => return Ok(value),
            Err(error) => error.why,
        }
    };
    Err(SettingsError::value(
        name,
        value,
        format!("{what}{instead}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_node_can_have_is_refused_whoever_gives_it() {
        let long = "a".repeat(254);
        for bad in [
            "", " ", "a b/..", "GPU-7", "gpu_7", "-a", "a-", "a..b", ".a", "ä", &long,
        ] {
            let error = choose(Some(bad.to_owned()), None, || None).unwrap_err();
            assert!(error.to_string().starts_with("--node-name"), "{error}");
            if !bad.trim().is_empty() {
                let error = choose(None, Some(bad.to_owned()), || None).unwrap_err();
                assert!(error.to_string().starts_with("NODE_NAME"), "{error}");
            }
        }
        for good in ["n1", "gpu-7.example.com", "7", &long[1..]] {
            let name = choose(Some(good.to_owned()), None, || None).unwrap();
            assert_eq!(name, good);
        }
    }

    #[test]
    fn the_host_name_is_the_last_resort_and_taken_in_lower_case() {
        let host = |name: &str| {
            let name = name.to_owned();
            move || Some(name)
        };
        let pod = |name: &str| Some(name.to_owned());
        assert_eq!(choose(None, pod("n1"), host("H")).unwrap(), "n1");
        assert_eq!(choose(None, pod(" "), host("GPU-7")).unwrap(), "gpu-7");
        let error = choose(None, None, host("gpu_7")).unwrap_err().to_string();
        assert!(
            error.starts_with("host name \"gpu_7\"") && error.ends_with("with --node-name"),
            "{error}"
        );
        assert!(choose(None, None, || None).is_err());
    }
}
