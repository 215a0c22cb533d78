//! Sections of the clouds whose APIs are asked: NVSentinel's `gcp` and `aws`, and `oci` of gpuwarden's
//! own. Unlike in NVSentinel, several may be enabled.

use contract::findings::Findings;
use jiff::SignedDuration;
use serde::Deserialize;

use super::MAX_NUMBER;

/// Default pause between two polls of an API (seconds).
const API_POLL: i64 = 60;
/// Shortest pause between two polls of an API (seconds), as in NVSentinel.
const SHORTEST_API: i64 = 30;

/// Clouds whose APIs are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clouds {
    /// AWS, if enabled.
    pub aws: Option<AwsConfig>,
    /// GCP, if enabled.
    pub gcp: Option<GcpConfig>,
    /// OCI, if enabled.
    pub oci: Option<OciConfig>,
}

/// Settings of AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsConfig {
    /// Number of the account whose instances count; empty for that of the credentials.
    pub account_id: String,
    /// Region of the instances, such as `eu-west-1`.
    pub region: String,
    /// Pause between two polls.
    pub poll: SignedDuration,
    /// URL that is asked in place of those of AWS; empty for these.
    pub endpoint: String,
}

/// Settings of GCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpConfig {
    /// Id of the project of the instances.
    pub project: String,
    /// Pause between two polls.
    pub poll: SignedDuration,
    /// Filter of log entries; empty for that of gpuwarden.
    pub log_filter: String,
    /// URL that is asked in place of those of GCP; empty for these.
    pub endpoint: String,
}

/// Settings of OCI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciConfig {
    /// OCID of the compartment of the instances.
    pub compartment_id: String,
    /// Region of the instances, such as `eu-frankfurt-1`; empty for that of the credentials.
    pub region: String,
    /// Pause between two polls.
    pub poll: SignedDuration,
    /// URL that is asked in place of those of OCI; empty for these.
    pub endpoint: String,
}

/// Section `gcp` of the file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Gcp {
    enabled: bool,
    target_project_id: String,
    api_polling_interval_seconds: Option<i64>,
    log_filter: String,
    endpoint_override: String,
}

/// Section `aws` of the file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Aws {
    enabled: bool,
    account_id: String,
    polling_interval_seconds: Option<i64>,
    region: String,
    endpoint_override: String,
}

/// Section `oci` of the file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Oci {
    enabled: bool,
    compartment_id: String,
    region: String,
    polling_interval_seconds: Option<i64>,
    endpoint_override: String,
}

// === impl Gcp ===

impl Gcp {
    pub(super) fn checked(self, findings: &mut Findings<'_>) -> Option<GcpConfig> {
        let key = "gcp.apiPollingIntervalSeconds";
        let poll = pause(findings, key, self.api_polling_interval_seconds);
        let endpoint = self.endpoint_override;
        if self.enabled {
            url(findings, "gcp.endpointOverride", &endpoint);
            needed(findings, "gcp.targetProjectId", &self.target_project_id);
        }
        self.enabled.then_some(GcpConfig {
            project: self.target_project_id,
            poll,
            log_filter: self.log_filter,
            endpoint,
        })
    }
}

// === impl Aws ===

impl Aws {
    pub(super) fn checked(self, findings: &mut Findings<'_>) -> Option<AwsConfig> {
        let key = "aws.pollingIntervalSeconds";
        let poll = pause(findings, key, self.polling_interval_seconds);
        let endpoint = self.endpoint_override;
        if self.enabled {
            url(findings, "aws.endpointOverride", &endpoint);
            needed(findings, "aws.region", &self.region);
            name(findings, "aws.region", &self.region);
        }
        self.enabled.then_some(AwsConfig {
            account_id: self.account_id,
            region: self.region,
            poll,
            endpoint,
        })
    }
}

// === impl Oci ===

impl Oci {
    pub(super) fn checked(self, findings: &mut Findings<'_>) -> Option<OciConfig> {
        let key = "oci.pollingIntervalSeconds";
        let poll = pause(findings, key, self.polling_interval_seconds);
        let endpoint = self.endpoint_override;
        if self.enabled {
            url(findings, "oci.endpointOverride", &endpoint);
            needed(findings, "oci.compartmentId", &self.compartment_id);
            name(findings, "oci.region", &self.region);
        }
        self.enabled.then_some(OciConfig {
            compartment_id: self.compartment_id,
            region: self.region,
            poll,
            endpoint,
        })
    }
}

fn pause(findings: &mut Findings<'_>, key: &str, seconds: Option<i64>) -> SignedDuration {
    let found = findings.whole_number(key, seconds, SHORTEST_API..=MAX_NUMBER, " of seconds");
    SignedDuration::from_secs(found.unwrap_or(API_POLL))
}

fn needed(findings: &mut Findings<'_>, key: &str, value: &str) {
    if value.is_empty() {
        findings.at_key(key, "is missing: the cloud is enabled");
    }
}

/// Checks the name of a region, which becomes a part of host names.
fn name(findings: &mut Findings<'_>, key: &str, value: &str) {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if !value.chars().all(is_name) {
        findings.refuse(key, "write the name of a region, such as eu-west-1");
    }
}

fn url(findings: &mut Findings<'_>, key: &str, value: &str) {
    let is_url = value.starts_with("https://") || value.starts_with("http://");
    if !value.is_empty() && !is_url {
        findings.refuse(key, "write a URL that begins with https:// or http://");
    }
}
