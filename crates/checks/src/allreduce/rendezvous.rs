//! Asks the webhook for the gang: it answers as soon as the gang is whole, and tells its secret.

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::{Method, StatusCode};
use preflight::rendezvous::{Answer, Topology, URL_VARIABLE};
use preflight::roster::Roster;

use crate::environment::{BadVariable, Environment};
use crate::webhook::{Webhook, refusal};

/// Time for which the webhook is asked to wait (seconds).
const WAIT: u64 = 20;
/// Longest time for an answer: that, and the way.
const DEADLINE: Duration = Duration::from_secs(WAIT + 10);

/// Where a pod asks.
pub(super) struct Place(Webhook);

/// What the webhook tells.
pub(super) struct Told {
    pub(super) roster: Roster,
    /// The gang is whole without this pod.
    pub(super) full: bool,
    /// The gang's secret, once the gang is whole.
    pub(super) secret: Option<Vec<u8>>,
    /// The topology file of this machine, as far as it is known.
    pub(super) topology: Option<Topology>,
}

// === impl Place ===

impl Place {
    /// Reads where to ask; `None` where nobody is to be asked.
    pub(super) fn read(environment: &Environment) -> Result<Option<Self>, BadVariable> {
        Ok(Webhook::read(environment, URL_VARIABLE)?.map(Self))
    }

    /// Asks once. The error says why there is no answer.
    pub(super) async fn ask(&self) -> Result<Told, String> {
        let asked = tokio::time::timeout(DEADLINE, self.exchange()).await;
        let answer = asked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let answer = answer.map_err(|why| format!("{} does not say: {why}", self.0.uri()))?;
        let roster = Roster::parse(|key| answer.data.get(key).cloned());
        let secret = answer.secret.map(|secret| BASE64_STANDARD.decode(secret));
        Ok(Told {
            roster: roster.map_err(|error| error.to_string())?,
            full: answer.full,
            secret: secret.transpose().map_err(|error| error.to_string())?,
            topology: answer.topology,
        })
    }

    async fn exchange(&self) -> Result<Answer, String> {
        let wait = format!("?wait={WAIT}");
        let (status, body) = self.0.ask(Method::GET, &wait, Vec::new()).await?;
        if status != StatusCode::OK {
            return Err(refusal(status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| error.to_string())
    }
}
