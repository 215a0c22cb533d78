//! One request to the API server: its turn, its timeout, its answer as it came.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::header::{DATE, RETRY_AFTER};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use kube::client::Body;

use crate::connect::Cluster;
use crate::counters::Requests;
use crate::lease::NotLeading;
use crate::pace::Urgency;

/// Longest time from the call to the whole answer, the wait for its turn not counted.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer that is read. The API server stores objects up to about 1.5 MiB.
pub(crate) const ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// An answer as far as it is needed here.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) retry_after: Option<Duration>,
    /// The server's clock.
    pub(crate) date: Option<Timestamp>,
    pub(crate) body: Vec<u8>,
}

type Failure = Box<dyn Error + Send + Sync>;

// === impl Cluster ===

impl Cluster {
    /// What was asked of the API server so far, and how much may be asked at once.
    pub fn requests(&self) -> Requests {
        Requests {
            sent: self.counters.sent.load(Ordering::Relaxed),
            throttled: self.counters.throttled.load(Ordering::Relaxed),
            failed: self.counters.failed.load(Ordering::Relaxed),
            limit: self.pace.as_ref().map_or(1, |pace| pace.limit()),
        }
    }

    /// Makes one request when its turn has come, and returns the answer, whatever it says.
    ///
    /// Under a [`Tenure`](crate::Tenure) a write is made only while it lasts, and has to end,
    /// here and in the API server, before somebody else can lead.
    pub(crate) async fn exchange(
        &self,
        urgency: Urgency,
        request: Request<Vec<u8>>,
    ) -> Result<Reply, Failure> {
        let turn = match &self.pace {
            Some(pace) => Some(pace.turn(urgency).await),
            None => None,
        };
        let (mut head, body) = request.into_parts();
        // Asked only now: the turn may have been long in coming.
        let tenure = self.tenure.as_ref().filter(|_| head.method != Method::GET);
        let limit = match tenure {
            None => REQUEST_TIMEOUT,
            Some(tenure) => {
                let limit = tenure.leave()?.min(REQUEST_TIMEOUT);
                head.uri = with_timeout(&head.uri, limit)?;
                limit
            }
        };
        self.counters.sent.fetch_add(1, Ordering::Relaxed);
        let answer = self.answer(Request::from_parts(head, Body::from(body)));
        let answer = async {
            match tenure {
                None => answer.await,
                Some(tenure) => tokio::select! {
                    () = tenure.over() => Err(NotLeading.into()),
                    answer = answer => answer,
                },
            }
        };
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(reply)) => {
                let status = reply.status.as_u16();
                match status {
                    429 => drop(self.counters.throttled.fetch_add(1, Ordering::Relaxed)),
                    500.. => drop(self.counters.failed.fetch_add(1, Ordering::Relaxed)),
                    _ => {}
                }
                match turn {
                    Some(turn) if matches!(status, 429 | 500..) => {
                        turn.overloaded(reply.retry_after);
                    }
                    Some(turn) => turn.answered(),
                    None => {}
                }
                Ok(reply)
            }
            Ok(Err(failure)) => {
                // No connection: that says nothing about how much the server can take.
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                Err(failure)
            }
            Err(_) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                if let Some(turn) = turn {
                    turn.overloaded(None);
                }
                Err(format!("no answer within {} s", limit.as_secs()).into())
            }
        }
    }

    async fn answer(&self, request: Request<Body>) -> Result<Reply, Failure> {
        let (head, body) = self.client.send(request).await?.into_parts();
        let retry_after = head
            .headers
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok());
        let date = head.headers.get(DATE).and_then(|value| value.to_str().ok());
        Ok(Reply {
            status: head.status,
            date: date.and_then(|text| Some(rfc2822::parse(text).ok()?.timestamp())),
            // The API server gives seconds, never a date.
            retry_after: retry_after
                .and_then(|text| text.parse().ok())
                .map(Duration::from_secs),
            body: Limited::new(body, ANSWER_BYTES)
                .collect()
                .await?
                .to_bytes()
                .to_vec(),
        })
    }
}

/// Asks the API server to give up by then as well: it may be working on a request whose
/// caller is gone.
fn with_timeout(uri: &Uri, limit: Duration) -> Result<Uri, Failure> {
    let separator = if uri.query().is_some() { '&' } else { '?' };
    let seconds = limit.as_secs().max(1);
    Ok(format!("{uri}{separator}timeout={seconds}s").parse()?)
}

#[cfg(test)]
mod tests {
    use domain::node::{NodeChange, NodeView};
    use tokio::time::Instant;

    use super::*;
    use crate::ApplyError;
    use crate::fake::{self, Answer};
    use crate::lease::Tenure;

    /// What is behind an error that has one cause.
    fn cause(error: &ApplyError) -> String {
        error.source().map(ToString::to_string).unwrap_or_default()
    }

    #[tokio::test]
    async fn writes_are_made_only_while_we_lead() {
        let answers = vec![
            Answer::Now(200, fake::node("n", 2).to_string()),
            Answer::Never,
            Answer::Now(200, fake::node("n", 3).to_string()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let tenure = Tenure::begin(Instant::now());
        let cluster = cluster.under(tenure.clone());
        let view = NodeView::unknown("n");
        let change = NodeChange {
            unschedulable: Some(true),
            ..NodeChange::default()
        };
        cluster.apply(&view, &change).await.unwrap();
        let [method, uri, _] = requests.recv().await.unwrap();
        // The API server gives up in time as well.
        assert_eq!((&*method, &*uri), ("PATCH", "/api/v1/nodes/n?timeout=10s"));

        // What is under way is cut off, and nothing more is begun.
        let mut call = Box::pin(cluster.apply(&view, &change));
        tokio::select! {
            _ = &mut call => panic!("an answer"),
            _ = requests.recv() => tenure.end(),
        }
        for error in [
            call.await.unwrap_err(),
            cluster.apply(&view, &change).await.unwrap_err(),
            cluster.create_event(&event()).await.unwrap_err(),
        ] {
            assert_eq!(cause(&error), "this process does not lead any more");
        }
        assert!(requests.try_recv().is_err());
        // Who does not lead may look.
        assert_eq!(cluster.node("n").await.unwrap().resource_version, "3");
        assert_eq!(requests.recv().await.unwrap()[1], "/api/v1/nodes/n");
    }

    /// The Lease is not to be lost for want of a turn.
    #[tokio::test]
    async fn a_connection_of_ones_own_is_never_slowed_down() {
        let mut answers: Vec<Answer> = (0..8).map(|_| Answer::Later("30")).collect();
        answers.push(Answer::Now(200, "{}".to_owned()));
        let (cluster, _requests) = fake::serve(answers).await;
        let own = cluster.with_own_connection().unwrap();
        let limit = Duration::from_secs(5);
        for _ in 0..8 {
            own.get_object("/api/v1/x", limit).await.unwrap_err();
        }
        own.get_object("/api/v1/x", limit).await.unwrap();
        assert_eq!((own.requests().sent, own.requests().throttled), (9, 8));
    }

    fn event() -> crate::Event {
        crate::Event {
            name: "e".into(),
            node: "n".into(),
            kind: "Warning".into(),
            reason: "r".into(),
            message: "m".into(),
            agent: "a".into(),
            count: 1,
            first_seen: jiff::Timestamp::UNIX_EPOCH,
            last_seen: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_api_servers_deadline_is_part_of_the_query() {
        for (uri, millis, expected) in [
            ("/a", 10_000, "/a?timeout=10s"),
            ("/a", 4_900, "/a?timeout=4s"),
            ("/a?b=c", 100, "/a?b=c&timeout=1s"),
        ] {
            let uri = with_timeout(&uri.parse().unwrap(), Duration::from_millis(millis));
            assert_eq!(uri.unwrap().to_string(), expected);
        }
    }
}
