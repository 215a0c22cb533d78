//! Service that counts preflight checks and remembers passed ones. A check ends within minutes,
//! while the process that serves the connector stays.
//!
//! Any user of the machine may call it, as pods do: counts are for graphs, and a pass can only
//! cause a check to be skipped, if the site has enabled that.

use std::time::Instant;

use contract::preflight::preflight_service_server::{PreflightService, PreflightServiceServer};
use contract::preflight::{
    CheckResult, FindPassRequest, FindPassResponse, ReportCheckRequest, ReportCheckResponse,
};
use tonic::{Request, Response, Status};

use super::reached_by;
use crate::passes::Tested;
use crate::{Connector, Uncounted};

/// Largest request (bytes): it has a few names and numbers.
const MAX_REQUEST_BYTES: usize = 16 * 1024;

/// Service behind the connector's admission.
pub(super) struct Counting {
    connector: Connector,
}

pub(super) fn service(connector: Connector) -> PreflightServiceServer<Counting> {
    PreflightServiceServer::new(Counting { connector }).max_decoding_message_size(MAX_REQUEST_BYTES)
}

/// Returns the problem with a request.
pub(crate) fn problem(report: &ReportCheckRequest) -> Option<&'static str> {
    let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
    let wait = report.gang_wait.as_ref();
    if report.check.is_empty() {
        Some("check is empty; it must be the name of the check")
    } else if report.result == CheckResult::Unspecified as i32 {
        Some("result is not set")
    } else if !report.seconds.is_none_or(is_time) {
        Some("seconds must be a number that is not below 0")
    } else if !wait.is_none_or(|wait| is_time(wait.seconds)) {
        Some("gang_wait.seconds must be a number that is not below 0")
    } else {
        None
    }
}

// === impl Counting ===

#[tonic::async_trait]
impl PreflightService for Counting {
    async fn report_check(
        &self,
        mut request: Request<ReportCheckRequest>,
    ) -> Result<Response<ReportCheckResponse>, Status> {
        let caller = reached_by(&mut request)?;
        let report = request.into_inner();
        match self.connector.count_check(&report, &caller) {
            Ok(()) => Ok(Response::new(ReportCheckResponse {})),
            Err(Uncounted::ForeignNode(what)) => Err(Status::permission_denied(what)),
            Err(Uncounted::Invalid(what)) => Err(Status::invalid_argument(what)),
        }
    }

    async fn find_pass(
        &self,
        mut request: Request<FindPassRequest>,
    ) -> Result<Response<FindPassResponse>, Status> {
        let caller = reached_by(&mut request)?;
        let asked = request.into_inner();
        let node = self.connector.nodes.meant(&caller, &asked.node);
        let node = node.map_err(Status::permission_denied)?;
        let tested = Tested::new(node, &asked.check, &asked.gpu_uuids);
        let age = tested.and_then(|tested| self.connector.passes.age(&tested, Instant::now()));
        Ok(Response::new(FindPassResponse {
            age_seconds: age.map(|age| age.as_secs_f64()),
        }))
    }
}
