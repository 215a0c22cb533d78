//! The metadata service of the machine, which announces the maintenance of this machine without
//! credentials.
//!
//! - AWS: `events/maintenance/scheduled` and `history`, by `IMDSv2`.
//! - Azure: `scheduledevents`. The first request makes Azure announce events, at least 15 minutes
//!   ahead for most.
//! - GCP: `maintenance-event` and `upcoming-maintenance`. A machine that asks for the first gets a
//!   warning before maintenance, of an hour with GPUs.

pub mod read;

use std::fmt;
use std::time::Duration;

use hyper::Method;
use notices::Notice;
use serde::Deserialize;
use tokio::time::Instant;

use crate::http::{Failure, Http, Request, Response};
use read::Machine;

/// Address of the service in every cloud.
pub const ADDRESS: &str = "http://169.254.169.254";
/// Most notices of a machine. A document with more is not understood.
pub const MAX_NOTICES: usize = 100;
/// Life of a token of `IMDSv2` (seconds).
const TOKEN_LIFE: u64 = 6 * 60 * 60;
/// Part of that life after which a token is renewed.
const TOKEN_USE: Duration = Duration::from_secs(TOKEN_LIFE / 2);
/// Longest id of a machine (bytes).
const MAX_ID: usize = 253;

const AZURE_EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const AZURE_NAME: &str = "/metadata/instance/compute?api-version=2021-02-01";
const EC2_ID: &str = "/latest/meta-data/instance-id";
const EC2_LISTS: [&str; 2] = [
    "/latest/meta-data/events/maintenance/scheduled",
    "/latest/meta-data/events/maintenance/history",
];
const GCP_ID: &str = "/computeMetadata/v1/instance/id";
const GCP_EVENT: &str = "/computeMetadata/v1/instance/maintenance-event";
const GCP_UPCOMING: &str = "/computeMetadata/v1/instance/upcoming-maintenance?alt=json";

/// Cloud of a metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Amazon EC2.
    Aws,
    /// Microsoft Azure.
    Azure,
    /// Google Compute Engine.
    Gcp,
}

/// Client of the metadata service; see the [module](self).
pub struct MetadataService {
    provider: Provider,
    address: String,
    http: Http,
    /// Id of the machine, once it is read.
    id: Option<String>,
    /// Token of `IMDSv2`, and the time when it was issued.
    token: Option<(String, Instant)>,
}

/// Part of Azure's description of a machine.
#[derive(Deserialize)]
struct AzureCompute {
    name: String,
}

// === impl Provider ===

impl Provider {
    /// All providers.
    pub const ALL: [Self; 3] = [Self::Aws, Self::Azure, Self::Gcp];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Azure => "azure",
            Self::Gcp => "gcp",
        }
    }
}

// === impl MetadataService ===

impl MetadataService {
    /// Creates a client of the service at `address`, such as [`ADDRESS`], without connecting.
    pub fn new(provider: Provider, address: &str) -> Result<Self, Failure> {
        Ok(Self {
            provider,
            address: address.to_owned(),
            http: Http::new()?,
            id: None,
            token: None,
        })
    }

    /// Returns all maintenance that is announced for this machine, which is the node `node`.
    pub async fn notices(&mut self, node: &str) -> Result<Vec<Notice>, Failure> {
        let id = match &self.id {
            Some(id) => id.clone(),
            None => self.read_id().await?,
        };
        let machine = Machine { node, id: &id };
        let notices = match self.provider {
            Provider::Aws => self.ec2(machine).await?,
            Provider::Azure => {
                let document = self.get(AZURE_EVENTS).await?.success()?;
                read::azure(machine, &document.body).map_err(|why| unclear(&document, &why))?
            }
            Provider::Gcp => self.gcp(machine).await?,
        };
        self.id = Some(id);
        if notices.len() > MAX_NOTICES {
            let found = notices.len();
            return Err(Failure::new(format!(
                "{}: {found} maintenances of one machine, at most {MAX_NOTICES} are taken",
                self.address
            )));
        }
        Ok(notices)
    }

    /// Tells Azure that a maintenance may begin now. Returns false in other clouds, which have no such
    /// request.
    pub async fn begin(&mut self, event: &str) -> Result<bool, Failure> {
        if self.provider != Provider::Azure {
            return Ok(false);
        }
        let body = serde_json::json!({"StartRequests": [{"EventId": event}]});
        let mut request = self.request(Method::POST, AZURE_EVENTS);
        request
            .headers
            .push(header("content-type", "application/json"));
        request.body = body.to_string().into_bytes();
        self.http.ask(request).await?.success()?;
        Ok(true)
    }

    /// Reads the id of the machine.
    async fn read_id(&mut self) -> Result<String, Failure> {
        let path = match self.provider {
            Provider::Aws => EC2_ID,
            Provider::Azure => AZURE_NAME,
            Provider::Gcp => GCP_ID,
        };
        let answer = self.get(path).await?.success()?;
        let id = match self.provider {
            Provider::Azure => answer.json::<AzureCompute>()?.name,
            _ => String::from_utf8_lossy(&answer.body).trim().to_owned(),
        };
        if id.is_empty() || id.len() > MAX_ID {
            return Err(unclear(&answer, "this is no id of a machine"));
        }
        Ok(id)
    }

    async fn ec2(&mut self, machine: Machine<'_>) -> Result<Vec<Notice>, Failure> {
        let mut notices = Vec::new();
        for list in EC2_LISTS {
            let answer = self.get(list).await?;
            // A machine that never had an event has no list.
            if answer.status == 404 {
                continue;
            }
            let answer = answer.success()?;
            let read = read::ec2(machine, &answer.body);
            notices.extend(read.map_err(|why| unclear(&answer, &why))?);
        }
        Ok(notices)
    }

    async fn gcp(&mut self, machine: Machine<'_>) -> Result<Vec<Notice>, Failure> {
        let event = self.get(GCP_EVENT).await?.success()?;
        let upcoming = self.get(GCP_UPCOMING).await?;
        // Not every type of machine has the list, and without a notice its status may be an error.
        let document = match upcoming.status {
            404 => &b""[..],
            503 if upcoming.body.trim_ascii().starts_with(b"{") => &b""[..],
            _ => &upcoming.clone().success()?.body,
        };
        let event = String::from_utf8_lossy(&event.body);
        let read = read::gcp(machine, &event, document);
        Ok(Vec::from_iter(
            read.map_err(|why| unclear(&upcoming, &why))?,
        ))
    }

    /// Reads a path. A token of `IMDSv2` that is refused is renewed, once.
    async fn get(&mut self, path: &str) -> Result<Response, Failure> {
        if self.provider != Provider::Aws {
            return self.http.ask(self.request(Method::GET, path)).await;
        }
        let is_old = |(_, since): &(String, Instant)| since.elapsed() > TOKEN_USE;
        if self.token.as_ref().is_none_or(is_old) {
            self.token = Some(self.new_token().await?);
        }
        let answer = self.http.ask(self.request(Method::GET, path)).await?;
        if answer.status != 401 {
            return Ok(answer);
        }
        self.token = Some(self.new_token().await?);
        self.http.ask(self.request(Method::GET, path)).await
    }

    async fn new_token(&self) -> Result<(String, Instant), Failure> {
        let mut request = self.request(Method::PUT, "/latest/api/token");
        let life = (
            "x-aws-ec2-metadata-token-ttl-seconds",
            TOKEN_LIFE.to_string(),
        );
        request.headers = vec![header(life.0, &life.1)];
        let answer = self.http.ask(request).await?.success()?;
        let token = String::from_utf8_lossy(&answer.body).trim().to_owned();
        Ok((token, Instant::now()))
    }

    fn request(&self, method: Method, path: &str) -> Request {
        let headers = match (self.provider, &self.token) {
            (Provider::Aws, Some((token, _))) => vec![header("x-aws-ec2-metadata-token", token)],
            (Provider::Aws, None) => Vec::new(),
            (Provider::Azure, _) => vec![header("metadata", "true")],
            (Provider::Gcp, _) => vec![header("metadata-flavor", "Google")],
        };
        Request {
            method,
            url: format!("{}{path}", self.address),
            headers,
            body: Vec::new(),
        }
    }
}

impl fmt::Display for MetadataService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.provider.name(), self.address)
    }
}

fn header(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Returns the failure of a document that cannot be understood.
fn unclear(answer: &Response, why: &str) -> Failure {
    Failure::new(format!(
        "{}: the response is not understood: {why}",
        answer.asked
    ))
}

#[cfg(test)]
mod tests;
