//! Maintenance of instances of Oracle Cloud Infrastructure: the maintenance events of a compartment.
//!
//! The list has all events, also those that are over, so each reading is complete. Permission: the operation
//! `ListInstanceMaintenanceEvents` in the compartment; compartments within it are not read.
//! `identity.rs` lists the credentials.
//!
//! The host of the API is `iaas.REGION.oraclecloud.com`, for an instance that of its own realm. Other realms
//! need `oci.endpointOverride`.

pub mod events;
mod identity;
mod signature;

use hyper::Method;
use jiff::Timestamp;
use notices::OciConfig;

use self::events::Events;
use self::identity::{Identities, Identity};
use self::signature::{Covers, sign};
use crate::encoding::form;
use crate::http::{Failure, Http, Request, Response};
use crate::{Answer, Environment, Told};

/// Name of the source.
pub const SOURCE: &str = "oci";

/// Header with the token of the next page.
const NEXT_PAGE: &str = "opc-next-page";
/// Most pages of the list.
const MAX_PAGES: usize = 200;
/// Events of a page. Its size stays below the largest response that is read.
const PAGE: &str = "500";

/// Client of one compartment.
#[derive(Debug)]
pub struct Oci {
    config: OciConfig,
    http: Http,
    identities: Identities,
}

// === impl Oci ===

impl Oci {
    /// Creates a client, without connecting.
    pub fn new(config: &OciConfig, http: Http, environment: Environment) -> Self {
        let identities = Identities::new(http.clone(), environment);
        Self {
            config: config.clone(),
            http,
            identities,
        }
    }

    /// Asks for all maintenance events.
    pub async fn poll(&mut self, now: Timestamp) -> Vec<Answer> {
        let told = self.events(now).await.map(|events| Told {
            announced: events.announced,
            complete: !events.partial,
            unseen: events.unseen,
            odd: events.odd,
        });
        vec![Answer {
            source: SOURCE,
            told,
        }]
    }

    /// Reads all pages of the list.
    async fn events(&mut self, now: Timestamp) -> Result<Events, Failure> {
        let compartment = self.config.compartment_id.clone();
        if compartment.is_empty() {
            return Err(Failure::new(
                "there is no compartment: write oci.compartmentId",
            ));
        }
        let mut all = Events::default();
        let mut next = String::new();
        for _ in 0..MAX_PAGES {
            let mut query = vec![("compartmentId", &*compartment), ("limit", PAGE)];
            query.extend(Some(("page", &*next)).filter(|(_, token)| !token.is_empty()));
            let target = format!("20160918/instanceMaintenanceEvents?{}", form(&query));
            let answer = self.ask(&target, now).await?;
            let page = Events::parse(&answer.body).map_err(|error| {
                let what = format!("{}: the response is not understood: {error}", answer.asked);
                Failure::new(what)
            });
            let mut page = page?;
            all.announced.append(&mut page.announced);
            all.unseen.append(&mut page.unseen);
            all.odd += page.odd;
            all.partial |= page.partial;
            let token = answer.header(NEXT_PAGE).unwrap_or_default();
            token.clone_into(&mut next);
            if next.is_empty() {
                return Ok(all);
            }
        }
        Err(Failure::new(format!(
            "OCI has more than {MAX_PAGES} pages of maintenance events, which is the most that is \
             read"
        )))
    }

    /// Asks for a target below the API's URL. Credentials that are refused are renewed, once.
    async fn ask(&mut self, target: &str, now: Timestamp) -> Result<Response, Failure> {
        let answer = self.ask_once(target, now).await?;
        if answer.status != 401 {
            return answer.success();
        }
        self.identities.forget();
        self.ask_once(target, now).await?.success()
    }

    async fn ask_once(&mut self, target: &str, now: Timestamp) -> Result<Response, Failure> {
        let identity = self.identities.current(now).await?;
        let base = base(&self.config, identity)?;
        let mut request = Request {
            method: Method::GET,
            url: format!("{base}/{target}"),
            headers: vec![("accept".to_owned(), "application/json".to_owned())],
            body: Vec::new(),
        };
        sign(
            &mut request,
            &identity.key,
            &identity.key_id,
            Covers::Host,
            now,
        )?;
        self.http.ask(request).await
    }
}

/// Returns the URL of the Compute API.
fn base(config: &OciConfig, identity: &Identity) -> Result<String, Failure> {
    if !config.endpoint.is_empty() {
        return Ok(config.endpoint.trim_end_matches('/').to_owned());
    }
    let own = Some(config.region.as_str()).filter(|region| !region.is_empty());
    let region = own.unwrap_or(&identity.region);
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if region.is_empty() || !region.chars().all(is_part) {
        let what = format!("{region:?} is not a region: write oci.region, such as us-phoenix-1");
        return Err(Failure::new(what));
    }
    Ok(format!("https://iaas.{region}.{}", identity.domain))
}

#[cfg(test)]
mod tests;
