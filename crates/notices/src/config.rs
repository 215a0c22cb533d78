//! Configuration: NVSentinel's file for its CSP health monitor (TOML), and the keys `oci`,
//! `beginOnceDrained`, `requests` and `actions` of gpuwarden's own.

mod clouds;

use std::collections::BTreeMap;

use contract::findings::{FileError, Findings, Format};
use contract::{RecommendedAction, parse_action};
use jiff::SignedDuration;
use serde::Deserialize;

use crate::book::Settings;
use crate::notice::Kind;

pub use clouds::{AwsConfig, Clouds, GcpConfig, OciConfig};

/// Default pause between two polls (seconds).
const POLL: i64 = 60;
/// Default time before the begin from which the node is out of service (minutes).
const LIMIT: i64 = 30;
/// Default time after the end until the node returns (minutes).
const DELAY: i64 = 15;
/// Default time in which a node has to be ready after that (minutes).
const READINESS: i64 = 60;
/// Largest number in the file, of any unit: more than a year of minutes.
const MAX_NUMBER: i64 = 1_000_000;

/// Configuration of the monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaintenanceConfig {
    /// Times of all maintenances.
    pub settings: Settings,
    /// Name of the cluster, for people.
    pub cluster_name: String,
    /// True if `MaintenanceRequest` objects are carried out.
    pub requests: bool,
    /// True if the provider is told that a maintenance may begin, once the node is drained.
    pub begin_once_drained: bool,
    /// Clouds whose APIs are asked.
    pub clouds: Clouds,
    /// Action that each kind recommends; `NONE` for those not listed.
    actions: BTreeMap<Kind, RecommendedAction>,
}

/// Keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    maintenance_event_poll_interval_seconds: Option<i64>,
    trigger_quarantine_workflow_time_limit_minutes: Option<i64>,
    post_maintenance_healthy_delay_minutes: Option<i64>,
    node_readiness_timeout_minutes: Option<i64>,
    #[serde(default)]
    cluster_name: String,
    #[serde(default)]
    gcp: clouds::Gcp,
    #[serde(default)]
    aws: clouds::Aws,
    /// A key of gpuwarden.
    #[serde(default)]
    oci: clouds::Oci,
    /// A key of gpuwarden.
    #[serde(default)]
    requests: bool,
    /// A key of gpuwarden.
    #[serde(default)]
    begin_once_drained: bool,
    /// A key of gpuwarden.
    #[serde(default)]
    actions: BTreeMap<String, String>,
}

// === impl MaintenanceConfig ===

impl MaintenanceConfig {
    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
        let key = "maintenanceEventPollIntervalSeconds";
        let poll = file.maintenance_event_poll_interval_seconds;
        let poll = findings.whole_number(key, poll, 10..=MAX_NUMBER, " of seconds");
        let poll = SignedDuration::from_secs(poll.unwrap_or(POLL));
        let mut minutes = |key: &str, number: Option<i64>, least: i64, default: i64| {
            let found = findings.minutes(key, number, least..=MAX_NUMBER);
            found.unwrap_or(SignedDuration::from_mins(default))
        };
        let settings = Settings {
            limit: minutes(
                "triggerQuarantineWorkflowTimeLimitMinutes",
                file.trigger_quarantine_workflow_time_limit_minutes,
                1,
                LIMIT,
            ),
            delay: minutes(
                "postMaintenanceHealthyDelayMinutes",
                file.post_maintenance_healthy_delay_minutes,
                0,
                DELAY,
            ),
            readiness: minutes(
                "nodeReadinessTimeoutMinutes",
                file.node_readiness_timeout_minutes,
                1,
                READINESS,
            ),
            missing: poll,
        };
        if file.cluster_name.is_empty() {
            findings.at_key("clusterName", "is missing: write the name of the cluster");
        }
        let clouds = Clouds {
            aws: file.aws.checked(&mut findings),
            gcp: file.gcp.checked(&mut findings),
            oci: file.oci.checked(&mut findings),
        };
        let actions = actions(&file.actions, &mut findings);
        findings.result(Self {
            settings,
            cluster_name: file.cluster_name,
            requests: file.requests,
            begin_once_drained: file.begin_once_drained,
            clouds,
            actions,
        })
    }

    /// Returns the action that a kind of maintenance recommends.
    pub fn action(&self, kind: Kind) -> RecommendedAction {
        let found = self.actions.get(&kind).copied();
        found.unwrap_or(RecommendedAction::None)
    }
}

/// Reads the action of each kind.
fn actions(
    named: &BTreeMap<String, String>,
    findings: &mut Findings<'_>,
) -> BTreeMap<Kind, RecommendedAction> {
    let mut actions = BTreeMap::new();
    for (name, action) in named {
        let key = format!("actions.{name}");
        let kinds = Kind::ALL.map(|kind| (kind.name(), kind));
        let Some(kind) = kinds.iter().find(|(known, _)| known == name) else {
            findings.unknown_key(&key, &kinds.map(|(known, _)| known));
            continue;
        };
        let number: Option<RecommendedAction> =
            parse_action(action).and_then(|number| number.try_into().ok());
        if let Some(action) = number {
            actions.insert(kind.1, action);
        } else {
            findings.refuse(
                &key,
                "write a recommended action, such as NONE or RESTART_VM",
            );
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that NVSentinel's chart writes, with both clouds off.
    const REFERENCE: &str = r#"
maintenanceEventPollIntervalSeconds = 60
triggerQuarantineWorkflowTimeLimitMinutes = 30
postMaintenanceHealthyDelayMinutes = 15
nodeReadinessTimeoutMinutes = 60
clusterName = "c"
[gcp]
enabled = false
targetProjectId = "p"
apiPollingIntervalSeconds = 60
logFilter = "logName=x"
endpointOverride = ""
[aws]
enabled = false
accountId = "1"
pollingIntervalSeconds = 60
region = "us-east-1"
endpointOverride = ""
"#;

    #[test]
    fn the_file_of_the_reference_loads_unchanged() {
        let read = MaintenanceConfig::parse(REFERENCE, "f").unwrap();
        let least = MaintenanceConfig::parse("clusterName = \"c\"", "f").unwrap();
        assert_eq!(read, least, "its values are the defaults");
        assert_eq!(read.settings.limit, SignedDuration::from_mins(30));
        assert_eq!(read.settings.missing, SignedDuration::from_mins(1));
        assert_eq!(read.action(Kind::Reboot), RecommendedAction::None);
        let own = format!("{REFERENCE}\n[actions]\nreplacement = \"REPLACE_VM\"\n");
        let read = MaintenanceConfig::parse(&own, "f").unwrap();
        assert_eq!(read.action(Kind::Replacement), RecommendedAction::ReplaceVm);
        assert_eq!(read.action(Kind::Stop), RecommendedAction::None);
        assert!(!read.begin_once_drained);
        let own = format!("beginOnceDrained = true\n{REFERENCE}");
        assert!(
            MaintenanceConfig::parse(&own, "f")
                .unwrap()
                .begin_once_drained
        );
    }

    #[test]
    fn the_clouds_that_are_enabled_are_asked() {
        let read = |text: &str| MaintenanceConfig::parse(text, "f").unwrap().clouds;
        assert_eq!(read(REFERENCE), Clouds::default());
        let both = read(&REFERENCE.replace("enabled = false", "enabled = true"));
        let minute = SignedDuration::from_mins(1);
        let aws = AwsConfig {
            account_id: "1".to_owned(),
            region: "us-east-1".to_owned(),
            poll: minute,
            endpoint: String::new(),
        };
        let gcp = GcpConfig {
            project: "p".to_owned(),
            poll: minute,
            log_filter: "logName=x".to_owned(),
            endpoint: String::new(),
        };
        assert_eq!((both.aws, both.gcp, both.oci), (Some(aws), Some(gcp), None));
        let own = "[oci]\nenabled = true\ncompartmentId = 'c'\nregion = 'eu-frankfurt-1'\n\
                   pollingIntervalSeconds = 90\nendpointOverride = 'http://127.0.0.1:1'";
        let oci = OciConfig {
            compartment_id: "c".to_owned(),
            region: "eu-frankfurt-1".to_owned(),
            poll: SignedDuration::from_secs(90),
            endpoint: "http://127.0.0.1:1".to_owned(),
        };
        assert_eq!(read(&format!("{REFERENCE}{own}")).oci, Some(oci));
    }

    #[test]
    fn each_mistake_is_named_by_its_line() {
        let other = |key: &str, value: &str| {
            let lines = REFERENCE.lines().map(|line| match line.split_once(" = ") {
                Some((name, _)) if name == key => format!("{key} = {value}"),
                _ => line.to_owned(),
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        let enabled = REFERENCE.replace("enabled = false", "enabled = true");
        let without = |line: &str| enabled.replace(line, "");
        let oci = |text: &str| format!("{REFERENCE}[oci]\nenabled = true\n{text}\n");
        let whole = "compartmentId = 'c'\nregion = 'r-1'";
        let actions = |text: &str| format!("{REFERENCE}[actions]\n{text}\n");
        for (text, line, says) in [
            (other("maintenanceEventPollIntervalSeconds", "9"), 2, "10"),
            (
                other("triggerQuarantineWorkflowTimeLimitMinutes", "0"),
                3,
                "1",
            ),
            (other("postMaintenanceHealthyDelayMinutes", "-1"), 4, "0"),
            (other("nodeReadinessTimeoutMinutes", "0"), 5, "1"),
            (other("clusterName", "\"\""), 6, "missing"),
            (other("apiPollingIntervalSeconds", "29"), 10, "30"),
            (other("pollingIntervalSeconds", "29"), 16, "30"),
            (without("targetProjectId = \"p\""), 7, "targetProjectId"),
            (without("region = \"us-east-1\""), 13, "region"),
            (enabled.replace("us-east-1", "us.evil"), 17, "region"),
            (
                enabled.replacen("Override = \"\"", "Override = \"x\"", 1),
                12,
                "https://",
            ),
            (oci("region = 'r-1'"), 19, "compartmentId"),
            (oci("compartmentId = 'c'\nregion = 'R'"), 22, "region"),
            (
                oci(&format!("{whole}\npollingIntervalSeconds = 1")),
                23,
                "30",
            ),
            (
                oci(&format!("{whole}\nendpointOverride = 'x'")),
                23,
                "https://",
            ),
            (oci(&format!("{whole}\nlogFilter = 'x'")), 23, "logFilter"),
            (actions("reset = \"NONE\""), 20, "reboot"),
            (actions("reboot = \"LATER\""), 20, "RESTART_VM"),
            (actions("reboot = \"77\""), 20, "RESTART_VM"),
        ] {
            let error = MaintenanceConfig::parse(&text, "f").unwrap_err();
            assert_eq!(error.findings.len(), 1, "{error}");
            assert_eq!(error.line, line, "{error}");
            assert!(error.findings[0].contains(says), "{error}");
        }
        assert!(MaintenanceConfig::parse("clusterNames = \"c\"", "f").is_err());
    }
}
