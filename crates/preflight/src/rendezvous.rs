//! What a pod of a gang asks the webhook for, what it is told, and what it leaves in its termination message
//! for the webhook.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The audience of the token by which a pod says who it is.
pub const AUDIENCE: &str = "gpuwarden-preflight";
/// Variable of a check: where it asks for its gang.
pub const URL_VARIABLE: &str = "GANG_RENDEZVOUS_URL";
/// Variable of a check: the authorities of the webhook's certificate, in PEM form.
pub const AUTHORITIES_VARIABLE: &str = "GANG_RENDEZVOUS_CA";
/// Variable of a check: the file with its token.
pub const TOKEN_VARIABLE: &str = "GANG_RENDEZVOUS_TOKEN_FILE";

/// Variable of a check: where it reports, if it cannot reach the connector of its node.
pub const REPORT_VARIABLE: &str = "GPUWARDEN_REPORT_URL";
/// Path under which it does.
pub const EVENTS_PATH: &str = "/events";
/// Path under which it has itself counted.
pub const COUNTS_PATH: &str = "/counts";

/// Where pods find the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousPlace {
    /// Its address, such as `https://gpuwarden-webhook.gpuwarden.svc:8444`.
    pub url: String,
    /// The authorities of its certificate, in PEM form.
    pub authorities: String,
    /// It brings what checks report to the controller.
    pub takes_reports: bool,
}

/// What a pod is told of its gang.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The data of the gang's `ConfigMap`; empty so long as the pod has no place in it.
    #[serde(default)]
    pub data: BTreeMap<String, String>,
    /// The gang is whole without this pod.
    #[serde(default)]
    pub full: bool,
    /// The gang's secret, in base64, once the gang is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// The topology file of the pod's machine, once the gang is whole; `None` where NCCL is to look for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
}

/// What is known of the topology file of NCCL that a machine has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Topology {
    /// There is one.
    File {
        /// Its name.
        name: String,
        /// Without it nothing is to be measured.
        required: bool,
    },
    /// There is none, and nothing is to be measured; why so.
    Missing(String),
}

/// Stands in a termination message before the members of the gang that were not reached.
const NOT_REACHED: &str = "not reached from here: ";

/// Returns what a check adds to its words about members of the gang that it does not reach.
pub fn not_reached(pods: &[&str]) -> String {
    format!("{NOT_REACHED}{}", pods.join(", "))
}

/// Returns the members of the gang that a termination message says were not reached.
pub fn named_not_reached(message: &str) -> Vec<&str> {
    let named = message.rsplit_once(NOT_REACHED);
    let named = named.map_or("", |(_, named)| named).split(", ");
    named.map(str::trim).filter(|pod| !pod.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_reached_is_read_from_a_termination_message() {
        let message = format!(
            "NCCL_GANG_TIMEOUT: b is missing; {}",
            not_reached(&["b", "c-1"])
        );
        assert_eq!(named_not_reached(&message), ["b", "c-1"]);
        for message in ["", "NCCL_GANG_TIMEOUT: b is missing", NOT_REACHED] {
            assert_eq!(named_not_reached(message), [""; 0], "{message}");
        }
    }
}
