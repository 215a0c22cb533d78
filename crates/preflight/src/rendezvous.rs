//! Protocol between a gang's pods and the webhook: variables of the checks, the webhook's
//! answer, and the part of termination messages that the webhook parses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Audience of the token that authenticates a pod to the webhook.
pub const AUDIENCE: &str = "gpuwarden-preflight";
/// Variable of a check: URL to ask for its gang.
pub const URL_VARIABLE: &str = "GANG_RENDEZVOUS_URL";
/// Variable of a check: certificate authorities of the webhook, in PEM form.
pub const AUTHORITIES_VARIABLE: &str = "GANG_RENDEZVOUS_CA";
/// Variable of a check: path of the file with its token.
pub const TOKEN_VARIABLE: &str = "GANG_RENDEZVOUS_TOKEN_FILE";

/// Variable of a check: URL for its reports, if it cannot reach the connector of its node.
pub const REPORT_VARIABLE: &str = "GPUWARDEN_REPORT_URL";
/// Path that accepts health events.
pub const EVENTS_PATH: &str = "/events";
/// Path that counts the results of checks.
pub const COUNTS_PATH: &str = "/counts";

/// Address of the rendezvous, as pods reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousPlace {
    /// Base URL, such as `https://gpuwarden-webhook.gpuwarden.svc:8444`.
    pub url: String,
    /// Certificate authorities of the webhook, in PEM form.
    pub authorities: String,
    /// True if the webhook forwards reports of checks to the controller.
    pub takes_reports: bool,
}

/// Answer to a pod that asks for its gang.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousAnswer {
    /// Data of the gang's `ConfigMap`; empty until the pod has a place in it.
    #[serde(default)]
    pub data: BTreeMap<String, String>,
    /// True if the gang is complete without this pod.
    #[serde(default)]
    pub full: bool,
    /// Secret of the gang, in base64, once the gang is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Topology file of the pod's machine, once the gang is complete; `None` leaves the
    /// detection to NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
}

/// NCCL topology file of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Topology {
    /// A file for this machine.
    File {
        /// File name, without a directory.
        name: String,
        /// True if the check must not measure without the file.
        required: bool,
    },
    /// No file exists and the check must not measure; holds the reason.
    Missing(String),
}

/// Text in a termination message before the names of the gang members that were not reached.
const NOT_REACHED: &str = "not reached from here: ";

/// Returns the part of a termination message that lists the gang members that were not reached.
pub fn not_reached(pods: &[&str]) -> String {
    format!("{NOT_REACHED}{}", pods.join(", "))
}

/// Parses the gang members that a termination message lists as not reached.
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
