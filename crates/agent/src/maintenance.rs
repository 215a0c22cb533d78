//! Tells the controller which maintenance the metadata service of this machine announces, and the
//! provider that it may begin once the controller has drained the node.
//!
//! The controller has the book of all maintenances (`controller/maintenance.rs`); the agent keeps
//! nothing. While the service cannot be read, nothing is told, and what was told holds.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use clouds::metadata::MetadataService;
use connector::Header;
use contract::json::proto_timestamp;
use contract::node::node_service_client::NodeServiceClient;
use contract::node::{MaintenanceNotice, ReportMaintenanceRequest};
use futures::future::BoxFuture;
use jiff::Timestamp;
use notices::Notice;
use runtime::logging::Trouble;
use runtime::sources::{SourceHandle, SourceState};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::transport::Channel;

use crate::pods::why;

/// Interval of requests to the service. GCP warns a minute ahead of some maintenance, and Azure
/// half a minute ahead of a preemption.
const EVERY: Duration = Duration::from_secs(10);
/// Time after which notices are told again: whether they may begin changes.
const REPEAT: Duration = Duration::from_secs(30);
/// Time after which it is told again that there are none, once it was told twice: a controller that has
/// just begun does not know it.
const REPEAT_NONE: Duration = Duration::from_secs(600);
/// Timeout of a report.
const DEADLINE: Duration = Duration::from_secs(10);

/// Function that sends a report. Returns the ids of the maintenances that may begin, or the reason
/// why the report was not accepted.
pub type Tell = Arc<
    dyn Fn(ReportMaintenanceRequest) -> BoxFuture<'static, Result<Vec<String>, String>>
        + Send
        + Sync,
>;

/// Polls the metadata service, and sends reports.
pub struct MaintenanceReporter {
    /// Name of the node.
    pub node_name: String,
    /// Client of the service.
    pub service: MetadataService,
    /// Function that sends a report.
    pub tell: Tell,
    /// Entry in the process's status.
    pub source: SourceHandle,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// The last report.
#[derive(Default)]
struct LastReport {
    notices: Option<Vec<MaintenanceNotice>>,
    again_at: Option<Instant>,
    /// Maintenances that the provider was told to begin.
    begun: BTreeSet<String>,
}

/// Returns a function that sends reports to the controller at the other end of a channel.
pub fn to_controller(channel: Channel, header: Header) -> Tell {
    Arc::new(move |report| {
        let mut client = NodeServiceClient::new(channel.clone());
        let header = header();
        Box::pin(async move {
            let mut request = Request::new(report);
            if let Some(value) = header? {
                request.metadata_mut().insert("authorization", value);
            }
            request.set_timeout(DEADLINE);
            match client.report_maintenance(request).await {
                Ok(answer) => Ok(answer.into_inner().may_begin),
                Err(status) => Err(why(&status)),
            }
        })
    })
}

// === impl MaintenanceReporter ===

impl MaintenanceReporter {
    /// Polls and sends reports until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let work = async {
            let (mut last, mut trouble) = (LastReport::default(), Trouble::default());
            loop {
                trouble.note(self.poll(&mut last).await);
                tokio::time::sleep(EVERY).await;
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    /// Asks the service, and sends a report if it has changed.
    async fn poll(&mut self, last: &mut LastReport) -> Result<(), String> {
        let notices = self.service.notices(&self.node_name).await;
        let now = (self.clock)();
        let notices = match notices {
            Ok(notices) => notices,
            Err(failure) => {
                self.source.update(now, |status| {
                    status.state = SourceState::Failing;
                    status.detail = failure.to_string();
                });
                return Err(format!(
                    "the metadata service cannot be read: {failure}; retrying"
                ));
            }
        };
        self.source.update(now, |status| {
            status.state = SourceState::Following;
            status.detail = self.service.to_string();
            status.records += 1;
            status.last_record_at = Some(now);
        });
        let notices: Vec<_> = notices.into_iter().map(message).collect();
        last.begun
            .retain(|event| notices.iter().any(|notice| notice.event == *event));
        let is_new = last.notices.as_ref() != Some(&notices);
        if !is_new && last.again_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        // A controller that ended at once has forgotten the first time.
        let repeat = if notices.is_empty() && !is_new {
            REPEAT_NONE
        } else {
            REPEAT
        };
        let report = ReportMaintenanceRequest {
            node_name: self.node_name.clone(),
            notices: notices.clone(),
        };
        let may_begin = (self.tell)(report).await;
        let may_begin =
            may_begin.map_err(|why| format!("announced maintenance cannot be reported: {why}"))?;
        (last.notices, last.again_at) = (Some(notices), Some(Instant::now() + repeat));
        for event in may_begin {
            if last.begun.contains(&event) {
                continue;
            }
            let begun = self.service.begin(&event).await;
            let is_told =
                begun.map_err(|failure| format!("maintenance {event} cannot begin: {failure}"))?;
            if is_told {
                tracing::info!(
                    event,
                    "the provider was told that the maintenance may begin"
                );
            }
            last.begun.insert(event);
        }
        Ok(())
    }
}

fn message(notice: Notice) -> MaintenanceNotice {
    let (resource_type, resource_id) = notice.resource;
    MaintenanceNotice {
        event: notice.event,
        provider: notice.provider,
        resource_type,
        resource_id,
        kind: notice.kind.name().to_owned(),
        phase: notice.phase.name().to_owned(),
        word: notice.word,
        start: notice.start.map(proto_timestamp),
        end: notice.end.map(proto_timestamp),
        emergency: notice.emergency,
    }
}

#[cfg(test)]
mod tests;
