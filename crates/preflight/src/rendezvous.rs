//! What a pod of a gang asks the webhook for, and what it is told.

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

/// Where pods find the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousPlace {
    /// Its address, such as `https://gpuwarden-webhook.gpuwarden.svc:8444`.
    pub url: String,
    /// The authorities of its certificate, in PEM form.
    pub authorities: String,
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
