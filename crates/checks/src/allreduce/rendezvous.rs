//! Client of the webhook's rendezvous, which answers as soon as the gang is complete, and
//! provides its secret.

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::{Method, StatusCode};
use preflight::rendezvous::{RendezvousAnswer, Topology, URL_VARIABLE};
use preflight::roster::Roster;

use crate::environment::{BadVariable, Environment};
use crate::webhook::{Webhook, refusal};

/// Time that the webhook is asked to wait (seconds).
const WAIT: u64 = 20;
/// Time limit for an answer: that time, with a margin for the network.
const DEADLINE: Duration = Duration::from_secs(WAIT + 10);

/// Address of the rendezvous.
pub(super) struct RendezvousAddress(Webhook);

/// State of the gang, as answered by the webhook.
pub(super) struct GangState {
    pub(super) roster: Roster,
    /// True if the gang is complete without this pod.
    pub(super) full: bool,
    /// Secret of the gang, once the gang is complete.
    pub(super) secret: Option<Vec<u8>>,
    /// Topology file for this machine, if known.
    pub(super) topology: Option<Topology>,
}

// === impl RendezvousAddress ===

impl RendezvousAddress {
    /// Reads the address; `None` if no rendezvous is configured.
    pub(super) fn read(environment: &Environment) -> Result<Option<Self>, BadVariable> {
        Ok(Webhook::read(environment, URL_VARIABLE)?.map(Self))
    }

    /// Sends one request. The error is the reason why there is no answer.
    pub(super) async fn ask(&self) -> Result<GangState, String> {
        let asked = tokio::time::timeout(DEADLINE, self.exchange()).await;
        let answer = asked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        answer.map_err(|why| format!("{} gives no answer: {why}", self.0.uri()))
    }

    async fn exchange(&self) -> Result<GangState, String> {
        let wait = format!("?wait={WAIT}");
        let (status, body) = self.0.ask(Method::GET, &wait, Vec::new()).await?;
        read(status, &body)
    }
}

/// Parses an answer. The error explains why the response is none.
fn read(status: StatusCode, body: &[u8]) -> Result<GangState, String> {
    if status != StatusCode::OK {
        return Err(refusal(status, body));
    }
    let answer: RendezvousAnswer =
        serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let roster = Roster::parse(|key| answer.data.get(key).cloned());
    let secret = answer.secret.map(|secret| BASE64_STANDARD.decode(secret));
    let secret = secret
        .transpose()
        .map_err(|error| format!("the secret: {error}"))?;
    if secret.as_ref().is_some_and(Vec::is_empty) {
        return Err("the secret is empty".to_owned());
    }
    Ok(GangState {
        roster: roster.map_err(|error| error.to_string())?,
        full: answer.full,
        secret,
        topology: answer.topology,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, body: &[u8]) -> String {
        match read(StatusCode::from_u16(status).unwrap(), body) {
            Ok(_) => panic!("{} is taken", String::from_utf8_lossy(body)),
            Err(why) => why,
        }
    }

    #[test]
    fn an_answer_is_read_with_all_its_parts() {
        let text = r#"{"data": {"expected_count": "2", "peers": "a;10.0.0.1;0;x\nb;10.0.0.2;1;x",
            "master_port": "29511", "gang_id": "g", "of_later": "7"}, "secret": "c2VjcmV0", "more": []}"#;
        let answer = read(StatusCode::OK, text.as_bytes()).unwrap();
        assert_eq!(
            (answer.roster.members.len(), answer.roster.master_port),
            (2, 29511)
        );
        assert_eq!(answer.secret.as_deref(), Some(&b"secret"[..]));
        assert!(!answer.full && answer.topology.is_none());
        // A pod without a place yet gets no further data.
        let answer = read(StatusCode::OK, b"{}").unwrap();
        assert_eq!((answer.roster.expected, answer.secret), (0, None));
        let full = read(StatusCode::OK, br#"{"full": true}"#).unwrap();
        assert!(full.full);
    }

    /// The check retries on any answer that is not the webhook's.
    #[test]
    fn what_is_no_answer_is_refused_by_what_is_wrong() {
        for (body, why) in [
            (&b""[..], "EOF"),
            (b"<html>", "expected value"),
            (b"\xff\xfe", "expected value"),
            (b"[1]", "expected"),
            (b"null", "expected"),
            (br#"{"data": 7}"#, "expected a map"),
            (br#"{"data": {"peers": 7}}"#, "expected a string"),
            (
                br#"{"data": {"expected_count": "many"}}"#,
                "`expected_count` is \"many\"",
            ),
            (
                br#"{"data": {"expected_count": "-1"}}"#,
                "`expected_count` is \"-1\"",
            ),
            (
                br#"{"data": {"expected_count": "8193"}}"#,
                "`expected_count` is \"8193\"",
            ),
            (
                br#"{"data": {"master_port": "70000"}}"#,
                "`master_port` is \"70000\"",
            ),
            (
                br#"{"data": {"peers": "a;nowhere;0"}}"#,
                "the address is not an IP address",
            ),
            (
                br#"{"data": {"peers": "a;10.0.0.1;x"}}"#,
                "the rank is not a number",
            ),
            (
                br#"{"data": {"peers": "a;10.0.0.1;1"}}"#,
                "the ranks are not 0, 1, 2",
            ),
            (
                br#"{"data": {"peers": "a;10.0.0.1;0\na;10.0.0.2;1"}}"#,
                "the pod is listed twice",
            ),
            (br#"{"full": "yes"}"#, "expected a boolean"),
            (br#"{"secret": "???"}"#, "the secret: "),
            (br#"{"secret": ""}"#, "the secret is empty"),
            (br#"{"topology": {"other": 1}}"#, "unknown variant"),
            (br#"{"topology": {"file": {"name": "x"}}}"#, "missing field"),
        ] {
            let answer = refused(200, body);
            assert!(
                answer.contains(why),
                "{}: {answer}",
                String::from_utf8_lossy(body)
            );
        }
        // A long page of a proxy is cut.
        let page = "no\n".repeat(1000);
        let answer = refused(503, page.as_bytes());
        assert!(
            answer.starts_with("503 Service Unavailable: no"),
            "{answer}"
        );
        assert!(answer.len() < 300, "{answer}");
        assert!(refused(403, b"not your gang").contains("not your gang"));
    }
}
