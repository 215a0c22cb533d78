//! Maintenance of instances of Google Cloud: what the Compute API lists now, and what the audit log
//! of system events says about changes.
//!
//! The list is authoritative: it has every announced maintenance, and one that is over or withdrawn
//! is not in it any longer. The log adds how a maintenance ended. Where the list cannot be read,
//! since only the permission for the log was granted, the log alone tells the notices, as it does
//! in NVSentinel; then a maintenance ends only by an entry that says so.
//!
//! Permissions: `compute.instances.list` and `logging.logEntries.list`. The credentials are
//! the application default ones.

mod credentials;
pub mod entries;
pub mod instances;
mod upcoming;

use std::collections::{BTreeMap, BTreeSet};

use hyper::Method;
use jiff::{SignedDuration, Timestamp};
use notices::GcpConfig;
use serde_json::json;

use self::credentials::Credentials;
use self::entries::Entries;
use self::instances::{FIELDS, Instances};
use crate::encoding::form;
use crate::http::{Failure, Http, Request, Response};
use crate::{Announced, Answer, Environment, Instance, Since, Told};

/// Source of all notices, from the list and the log together.
const SOURCE: &str = "gcp";
/// Source whose answer says whether the list of instances can be read.
const INSTANCES: &str = "gcp-instances";
/// Source whose answer says whether the log can be read.
const LOG: &str = "gcp-log";
/// Names of the sources.
pub const SOURCES: [&str; 3] = [SOURCE, INSTANCES, LOG];

/// Time before the last look at the log from which it is read again: entries arrive late.
const OVERLAP: SignedDuration = SignedDuration::from_mins(1);
/// Age of the oldest entries that the first look at the log reads: maintenance is announced at most
/// some weeks before.
const FIRST_LOOK: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Most pages of one list: 100,000 instances or entries.
const MAX_PAGES: usize = 200;
/// Instances or entries of a page: the most that Compute allows, and below the largest response that is
/// read.
const PAGE: u32 = 500;

/// Client of one project.
#[derive(Debug)]
pub struct Gcp {
    config: GcpConfig,
    http: Http,
    credentials: Credentials,
}

// === impl Gcp ===

impl Gcp {
    /// Creates a client, without connecting.
    pub fn new(config: &GcpConfig, http: Http, environment: Environment) -> Self {
        let credentials = Credentials::new(http.clone(), environment);
        Self {
            config: config.clone(),
            http,
            credentials,
        }
    }

    /// Asks both APIs. The answer of `gcp` has all notices, and fails if both do; those of
    /// `gcp-instances` and `gcp-log` only say whether each can be read.
    pub async fn poll(&mut self, since: &Since, now: Timestamp) -> Vec<Answer> {
        let listed = self.instances(now).await;
        let first = now.saturating_sub(FIRST_LOOK);
        let start = since.get(LOG).map(|last| last.saturating_sub(OVERLAP));
        let (first, start) = (first.unwrap_or(now), start.and_then(Result::ok));
        let logged = self.entries(start.unwrap_or(first), now).await;
        let state = |failure: Option<&Failure>| match failure {
            None => Ok(Told::default()),
            Some(failure) => Err(failure.clone()),
        };
        let parts = [
            (INSTANCES, state(listed.as_ref().err())),
            (LOG, state(logged.as_ref().err())),
        ];
        let all = match (listed, logged) {
            // Both lack the same token.
            (Err(listed), Err(logged)) if listed == logged => Err(listed),
            (Err(listed), Err(logged)) => Err(Failure {
                what: format!("{listed}; {logged}"),
                retry_after: listed.retry_after.max(logged.retry_after),
            }),
            (listed, logged) => Ok(together(listed.ok(), logged.unwrap_or_default())),
        };
        [(SOURCE, all)]
            .into_iter()
            .chain(parts)
            .map(|(source, told)| Answer { source, told })
            .collect()
    }

    /// Reads all pages of the list of instances.
    async fn instances(&mut self, now: Timestamp) -> Result<Instances, Failure> {
        let mut all = Instances::default();
        for _ in 0..MAX_PAGES {
            let base = self.base("https://compute.googleapis.com");
            let (project, most) = (self.project()?, PAGE.to_string());
            let mut query = vec![("maxResults", &*most), ("fields", FIELDS)];
            query.extend(Some(("pageToken", &*all.next)).filter(|(_, token)| !token.is_empty()));
            let query = form(&query);
            let request = Request {
                method: Method::GET,
                url: format!("{base}/compute/v1/projects/{project}/aggregated/instances?{query}"),
                headers: Vec::new(),
                body: Vec::new(),
            };
            let answer = self.ask(request, now).await?;
            let page = Instances::parse(&answer.body);
            let mut page = page.map_err(|error| misunderstood(&answer, &error))?;
            all.announced.append(&mut page.announced);
            all.unseen.append(&mut page.unseen);
            all.odd += page.odd;
            all.partial |= page.partial;
            all.next = page.next;
            if all.next.is_empty() {
                return Ok(all);
            }
        }
        Err(too_many("instances"))
    }

    /// Reads all entries of the log after `start`, up to `now`.
    async fn entries(&mut self, start: Timestamp, now: Timestamp) -> Result<Entries, Failure> {
        let own = entries::default_filter();
        let filter = Some(&self.config.log_filter).filter(|filter| !filter.trim().is_empty());
        let filter = filter.unwrap_or(&own);
        let filter = format!("({filter}) AND timestamp > \"{start}\" AND timestamp <= \"{now}\"");
        let project = self.project()?.to_owned();
        let base = self.base("https://logging.googleapis.com");
        let mut all = Entries::default();
        for _ in 0..MAX_PAGES {
            let body = json!({
                "resourceNames": [format!("projects/{project}")],
                "filter": filter,
                "orderBy": "timestamp asc",
                "pageSize": PAGE,
                "pageToken": all.next,
            });
            let request = Request {
                method: Method::POST,
                url: format!("{base}/v2/entries:list"),
                headers: vec![("content-type".to_owned(), "application/json".to_owned())],
                body: body.to_string().into_bytes(),
            };
            let answer = self.ask(request, now).await?;
            let page = Entries::parse(&answer.body, now);
            let mut page = page.map_err(|error| misunderstood(&answer, &error))?;
            all.announced.append(&mut page.announced);
            all.odd += page.odd;
            all.next = page.next;
            if all.next.is_empty() {
                return Ok(all);
            }
        }
        Err(too_many("entries of the log"))
    }

    /// Sends a request with a token. One that is refused is renewed, once.
    async fn ask(&mut self, request: Request, now: Timestamp) -> Result<Response, Failure> {
        let answer = self.ask_once(&request, now).await?;
        if answer.status != 401 {
            return answer.success();
        }
        self.credentials.forget();
        self.ask_once(&request, now).await?.success()
    }

    async fn ask_once(&mut self, request: &Request, now: Timestamp) -> Result<Response, Failure> {
        let token = self.credentials.token(now).await?;
        let mut request = request.clone();
        let authorization = ("authorization".to_owned(), format!("Bearer {token}"));
        request.headers.push(authorization);
        self.http.ask(request).await
    }

    /// Returns the URL of an API without a slash at its end.
    fn base(&self, own: &str) -> String {
        let endpoint = Some(self.config.endpoint.trim_end_matches('/'));
        let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty());
        endpoint.unwrap_or(own).to_owned()
    }

    /// Returns the project, which must not change the path of a request.
    fn project(&self) -> Result<&str, Failure> {
        let project = self.config.project.as_str();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "-.:".contains(c);
        if project.is_empty() || !project.chars().all(is_part) {
            let what = format!("{project:?} is not the id of a project: write gcp.targetProjectId");
            return Err(Failure::new(what));
        }
        Ok(project)
    }
}

/// Returns what both APIs say together. `listed` is `None` if the list could not be read.
fn together(listed: Option<Instances>, logged: Entries) -> Told {
    let odd = logged.odd;
    // The newest entry about an instance says all.
    let mut newest: BTreeMap<Instance, Announced> = BTreeMap::new();
    for entry in logged.announced {
        newest.insert(entry.instance.clone(), entry);
    }
    let Some(listed) = listed else {
        return Told {
            announced: newest.into_values().collect(),
            odd,
            ..Told::default()
        };
    };
    let told = (listed.announced.iter().map(|one| &one.instance)).chain(&listed.unseen);
    let told: BTreeSet<&String> = told.flat_map(Instance::names).collect();
    let is_listed = |instance: &Instance| instance.names().iter().any(|name| told.contains(name));
    // An entry about a maintenance that is to come and is not listed is outdated already.
    let ended: Vec<Announced> = newest
        .into_values()
        .filter(|entry| listed.partial || !entry.notice.phase.is_open())
        .filter(|entry| !is_listed(&entry.instance))
        .collect();
    Told {
        announced: listed.announced.into_iter().chain(ended).collect(),
        complete: !listed.partial,
        unseen: listed.unseen,
        odd: odd + listed.odd,
    }
}

fn misunderstood(answer: &Response, error: &serde_json::Error) -> Failure {
    Failure::new(format!(
        "{}: the response is not understood: {error}",
        answer.asked
    ))
}

fn too_many(what: &str) -> Failure {
    Failure::new(format!(
        "Google Cloud has more than {MAX_PAGES} pages of {what}, which is the most that is read"
    ))
}

#[cfg(test)]
mod tests;
