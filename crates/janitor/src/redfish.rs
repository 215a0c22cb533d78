//! Redfish provider: power-cycles a machine by its BMC, even if the node is unresponsive.
//!
//! `maintenance` builds requests and interprets responses; this module sends them. A signal is
//! recorded in an annotation of the node before it is sent, and the record is removed if the
//! BMC refuses.

mod bmc;

use std::sync::Arc;

use async_trait::async_trait;
use cluster::{ApiError, Cluster};
use jiff::{SignedDuration, Timestamp};
use maintenance::janitor::redfish::{
    ComputerSystem, Log, PowerCycleRecord, RedfishConfig, SYSTEMS, SignalEffect, entries_of,
    log_of, members_of,
};
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure};
use runtime::tls::ClientTls;
use serde_json::{Value, json};

use self::bmc::Bmc;
use crate::node::{boot_of, failure, is_ready, known_boot, node, nodes, unsent};
use crate::provider::{Provider, ProviderOpenError, Signal};

/// Node annotation with the record of the last signal.
const RECORD: &str = contract::keys::POWER_CYCLE;
/// Most pages of a log that are read.
const PAGES: usize = 20;

/// Provider that power-cycles machines by Redfish.
pub struct Redfish {
    cluster: Arc<Cluster>,
    config: RedfishConfig,
    tls: ClientTls,
}

// === impl Redfish ===

impl Redfish {
    /// Creates the provider. It connects to a BMC only when needed.
    pub fn open(cluster: Arc<Cluster>, config: RedfishConfig) -> Result<Self, ProviderOpenError> {
        let tls = match (config.insecure_skip_verify, config.authority.as_str()) {
            (true, _) => ClientTls::trusting_all(),
            // Without authorities, only plain-HTTP addresses work.
            (false, "") => ClientTls::trusting_none(),
            (false, path) => ClientTls::load(path.into(), None),
        };
        Ok(Self {
            cluster,
            config,
            tls: tls.map_err(ProviderOpenError::BmcCertificates)?,
        })
    }

    /// Writes the record of a signal to an unchanged node, or removes it.
    async fn record(
        &self,
        node: &Value,
        record: Option<&PowerCycleRecord>,
    ) -> Result<Value, ApiError> {
        let record = record.and_then(|record| serde_json::to_string(record).ok());
        let metadata = &node["metadata"];
        let change = json!({"metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {RECORD: record},
        }});
        let name = metadata["name"].as_str().unwrap_or_default();
        self.cluster.merge_object(&nodes(), name, &change).await
    }

    async fn bmc(&self, node: &str) -> Result<Bmc, ProviderFailure> {
        let address = self.config.address_of(node).ok_or_else(|| {
            let message = format!("the configuration has no address of the BMC of {node}");
            ProviderFailure::new(Class::Permanent, "INVALID_REQUEST", message)
        })?;
        Bmc::new(&address, &self.config, &self.tls).await
    }

    async fn machine(&self, bmc: &Bmc) -> Result<ComputerSystem, ProviderFailure> {
        let path = match self.config.system.as_str() {
            "" => {
                let paths = members_of(&bmc.get(SYSTEMS).await?);
                match paths.as_slice() {
                    [only] => only.clone(),
                    many => {
                        let many = many.join(", ");
                        let what = format!(
                            "{SYSTEMS} must have exactly one machine, but has [{many}]: name one with redfish.system"
                        );
                        return Err(unusable(what));
                    }
                }
            }
            path => path.to_owned(),
        };
        let mut machine = ComputerSystem::read(&bmc.get(&path).await?).map_err(unusable)?;
        if machine.says_no_types()
            && let Some(path) = &machine.action_info
        {
            let described = bmc.get(path).await?;
            machine.learn_types(&described);
        }
        Ok(machine)
    }

    /// Reads the log of a machine. A log that cannot be read provides no evidence, but does not
    /// prevent the signal.
    async fn log(&self, bmc: &Bmc, machine: &ComputerSystem) -> Log {
        let mut log = Log::default();
        let read = async {
            let Some(logs) = &machine.logs else {
                return Ok(());
            };
            let logs = members_of(&bmc.get(logs).await?);
            let Some(path) = log_of(&logs) else {
                return Ok(());
            };
            let service = bmc.get(path).await?;
            let mut next = entries_of(&service).map(str::to_owned);
            for _ in 0..PAGES {
                let Some(path) = next else { break };
                let page = bmc.get(&path).await?;
                log.read(&page);
                next = page["Members@odata.nextLink"].as_str().map(str::to_owned);
            }
            Ok::<_, ProviderFailure>(())
        };
        if let Err(failure) = read.await {
            tracing::warn!(err = failure.text(), "cannot read the log of a machine");
        }
        log
    }

    /// Determines from the record and the machine whether a signal was carried out.
    async fn found(
        &self,
        node: &Value,
        record: &PowerCycleRecord,
    ) -> Result<FoundOperation, ProviderFailure> {
        let sent = FoundOperation::Sent(record.boot_id.clone());
        if record.booted(boot_of(node)) {
            return Ok(sent);
        }
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let bmc = self.bmc(name).await?;
        let machine = self.machine(&bmc).await?;
        let log = self.log(&bmc, &machine).await;
        match record.verdict(&machine, &log, Timestamp::now()) {
            SignalEffect::Reset => Ok(sent),
            SignalEffect::NotReset => Ok(FoundOperation::NotSent),
            SignalEffect::Unknown => Ok(FoundOperation::CannotTell),
            SignalEffect::TooSoon => {
                let what = "the BMC was asked for a reset just now and does not report one yet";
                let failure = ProviderFailure::new(Class::Transient, "RESOURCE_BUSY", what);
                Err(failure.after(ASK_AGAIN))
            }
        }
    }

    /// Records a signal and sends it.
    async fn cycle(&self, signal: &Signal, node: &Value) -> Result<String, ProviderFailure> {
        let boot_id = known_boot(node)?.to_owned();
        let bmc = self.bmc(&signal.node).await?;
        let machine = self.machine(&bmc).await?;
        let reset_type = machine.reset_type().map_err(unusable)?;
        let log = self.log(&bmc, &machine).await;
        let record = PowerCycleRecord {
            operation: signal.operation.clone(),
            boot_id: boot_id.clone(),
            last_reset: machine.last_reset.clone(),
            last_boot: log.last_boot,
            at: Timestamp::now(),
        };
        let recorded = self.record(node, Some(&record)).await;
        let recorded = recorded.map_err(|error| unsent(failure(&error)))?;
        let (node, critical) = (&signal.node, format!("{:?}", log.critical));
        tracing::info!(
            node,
            reset_type,
            critical,
            "requesting a reset from the BMC"
        );
        let body = json!({"ResetType": reset_type});
        match bmc.post(&machine.target, &body).await {
            Ok(()) => Ok(boot_id),
            Err(failure) => {
                if failure.class != Class::Ambiguous {
                    // If removing the record fails, the signal counts as possibly sent and is
                    // looked up later.
                    drop(self.record(&recorded, None).await);
                }
                Err(failure)
            }
        }
    }
}

/// Delay before checking again whether a reset has happened.
const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(15);

#[async_trait]
impl Provider for Redfish {
    fn name(&self) -> &'static str {
        "redfish"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        if signal.action != Action::Reboot {
            let message = "the Redfish provider cannot terminate machines";
            return Err(ProviderFailure::new(
                Class::Permanent,
                "UNSUPPORTED_OPERATION",
                message,
            ));
        }
        let node = node(&self.cluster, &signal.node).await?;
        let Some(record) = record_of(&node, signal) else {
            return self.cycle(signal, &node).await;
        };
        match self.found(&node, &record).await? {
            FoundOperation::Sent(request) => Ok(request),
            FoundOperation::NotSent => self.cycle(signal, &node).await,
            FoundOperation::CannotTell => {
                let message = "the signal was recorded before, and the BMC does not report whether the machine was reset";
                Err(ProviderFailure::new(
                    Class::Ambiguous,
                    "AMBIGUOUS_RESULT",
                    message,
                ))
            }
        }
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let node = node(&self.cluster, &signal.node).await?;
        match record_of(&node, signal) {
            Some(record) => self.found(&node, &record).await,
            None => Ok(FoundOperation::NotSent),
        }
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
        let node = node(&self.cluster, &signal.node).await?;
        let boot_id = boot_of(&node);
        Ok(is_ready(&node) && !boot_id.is_empty() && boot_id != request_id)
    }
}

fn record_of(node: &Value, signal: &Signal) -> Option<PowerCycleRecord> {
    let annotations = &node["metadata"]["annotations"];
    PowerCycleRecord::read(annotations[RECORD].as_str(), &signal.operation)
}

/// Returns the failure for a BMC that lacks a required capability.
fn unusable(what: String) -> ProviderFailure {
    ProviderFailure::new(Class::Permanent, "UNSUPPORTED_OPERATION", what)
}
