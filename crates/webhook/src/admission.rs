//! Admission of pods: collects the facts about a new pod and returns its injection.

use std::sync::Arc;

use preflight::config::Config;
use preflight::gang::{Gang, GangError, Size};
use preflight::inject::{Candidate, Injection, inject};
use preflight::rendezvous::RendezvousPlace;
use preflight::resources::{DevicesOfPod, claims_named};
use runtime::http_server::ReadBody;
use runtime::logging::Seldom;
use runtime::metrics::Metrics;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::discoveries::Discoveries;
use crate::facts::{self, Facts, Unknown};
use crate::metrics::WebhookMetrics;
use crate::review::{Review, Unanswered, shortened};
use crate::turns::{Turns, Work};

/// Answers admission reviews for pods. Cheap to clone.
#[derive(Clone)]
pub struct Admission {
    config: Arc<Config>,
    discoveries: Discoveries,
    facts: Facts,
    /// Rendezvous URL and the current certificate authorities, if there is a rendezvous.
    rendezvous: Option<(String, watch::Receiver<String>)>,
    /// True if the rendezvous accepts reports of checks.
    takes_reports: bool,
    turns: Turns,
    metrics: Arc<WebhookMetrics>,
    lines: Arc<Lines>,
}

/// Rate limits of log lines that the creators of pods can cause.
#[derive(Default)]
struct Lines {
    denied: Seldom,
    unchecked: Seldom,
}

/// Result for the metrics, and the answer.
type Answer = (&'static str, Value);

// === impl Admission ===

impl Admission {
    /// Creates an admission with a configuration.
    pub fn new(
        config: Arc<Config>,
        discoveries: Discoveries,
        facts: Facts,
        metrics: &Metrics,
    ) -> Self {
        Self {
            config,
            discoveries,
            facts,
            rendezvous: None,
            takes_reports: false,
            turns: Turns::default(),
            metrics: Arc::new(WebhookMetrics::new(metrics)),
            lines: Arc::default(),
        }
    }

    /// Announces a rendezvous at `url` to pods. `authorities` are those of its certificate.
    #[must_use]
    pub fn with_rendezvous(
        self,
        url: String,
        authorities: watch::Receiver<String>,
        takes_reports: bool,
    ) -> Self {
        Self {
            rendezvous: Some((url, authorities)),
            takes_reports,
            ..self
        }
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config)
    }

    #[cfg(test)]
    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    pub(crate) fn discoveries(&self) -> Discoveries {
        self.discoveries.clone()
    }

    pub(crate) fn metrics(&self) -> Arc<WebhookMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Returns what must still be listed before reviews can be answered.
    pub(crate) fn unknown(&self) -> Vec<&'static str> {
        let reasons = [
            (
                !self.facts.are_known(),
                "the device classes are not listed yet",
            ),
            (
                !self.discoveries.are_known(),
                "the PreflightConfigs are not listed yet",
            ),
        ];
        let reasons = reasons.into_iter().filter(|(holds, _)| *holds);
        reasons.map(|(_, why)| why).collect()
    }

    /// Answers a review, or fails at `until`. Nothing is written to the cluster, so a dry run
    /// gets the same answer.
    pub(crate) async fn answer(&self, body: ReadBody, until: Instant) -> Result<Value, Unanswered> {
        let began = Instant::now();
        let answering = tokio::time::timeout_at(until, self.judge(body, until));
        let answered = answering
            .await
            .unwrap_or_else(|_| Err(Unanswered::Late(began.elapsed())));
        let outcome = match &answered {
            Ok((outcome, _)) => outcome,
            Err(why) => why.outcome(),
        };
        let counter = self
            .metrics
            .injections
            .get_or_create(&[("result", outcome)]);
        counter.inc();
        self.metrics.latency.observe(began.elapsed().as_secs_f64());
        answered.map(|(_, answer)| answer)
    }

    async fn judge(&self, body: ReadBody, until: Instant) -> Result<Answer, Unanswered> {
        let mut work = Work::new(&self.turns, body);
        let this = self.clone();
        let named = work.part(move |review| {
            let is_ours = review.is_new_pod() && this.concerns(&review.namespace);
            let named = is_ours.then(|| claims_named(&review.object));
            (review.bare(), named)
        });
        let (about, named) = named.await?;
        let skipped = || ("skipped", about.changed(&Injection::default()));
        let Some(named) = named else {
            return Ok(skipped());
        };
        let namespace = &about.namespace;
        // One deadline for all requests to the cluster: after it, the pod starts unchecked and
        // is not refused.
        let known_by = facts::known_by(until);
        let claims = self.facts.claims(named, namespace, known_by);
        let claims = match work.meanwhile(claims).await? {
            Ok(claims) => claims,
            Err(why) => return Ok(self.unchecked(&about, &why)),
        };
        let this = self.clone();
        let found = work.part(move |review| {
            let devices = DevicesOfPod::of(&review.object, &this.config, &claims)?;
            Some((devices, this.gang_named(review)))
        });
        let Some((devices, gang)) = found.await? else {
            return Ok(skipped());
        };
        let (gang, warning) = work.meanwhile(self.gang(gang, known_by)).await?;
        let forbids = self.facts.forbids_host_paths(namespace, known_by);
        let forbidden_by = match work.meanwhile(forbids).await? {
            Ok(level) => level,
            Err(why) => return Ok(self.unchecked(&about, &why)),
        };
        let rendezvous = self.rendezvous.as_ref();
        let rendezvous = rendezvous.map(|(url, authorities)| RendezvousPlace {
            url: url.clone(),
            authorities: authorities.borrow().clone(),
            takes_reports: self.takes_reports,
        });
        let this = self.clone();
        let injecting = work.last(move |review| {
            let candidate = Candidate {
                pod: &review.object,
                devices: &devices,
                gang: gang.as_ref(),
                forbidden_by: forbidden_by.as_deref(),
                rendezvous: rendezvous.as_ref(),
            };
            match inject(candidate, &this.config) {
                Ok(mut injection) => {
                    injection.warnings.extend(warning);
                    let outcome = if injection.patch.is_empty() {
                        "skipped"
                    } else {
                        "injected"
                    };
                    (outcome, review.changed(&injection))
                }
                Err(refusal) => {
                    let refusal = refusal.to_string();
                    if let Some(not_logged_before) = this.lines.denied.now() {
                        let (namespace, why) = (&review.namespace, shortened(&refusal));
                        tracing::info!(not_logged_before, "a pod in {namespace} is denied: {why}");
                    }
                    ("denied", review.denied(&refusal))
                }
            }
        });
        injecting.await
    }

    /// Returns true if pods of a namespace get checks. The registration's selectors check the
    /// same, but an operator may have changed them.
    fn concerns(&self, namespace: &str) -> bool {
        let is = |names: &[String]| names.iter().any(|name| name == namespace);
        let (only, never) = (&self.config.namespaces, &self.config.excluded_namespaces);
        !is(never) && (only.is_empty() || is(only))
    }

    /// Returns the gang that a pod names.
    fn gang_named(&self, review: &Review) -> Result<Option<Gang>, GangError> {
        if !self.config.coordination.enabled {
            return Ok(None);
        }
        let by = self.discoveries.of(&review.namespace);
        Gang::of(&review.object, &review.namespace, &by)
    }

    /// Returns the gang of a pod, or a warning if the gang's object is unusable.
    async fn gang(
        &self,
        named: Result<Option<Gang>, GangError>,
        until: Instant,
    ) -> (Option<Gang>, Option<String>) {
        let gang = match named {
            Ok(Some(gang)) => gang,
            Ok(None) => return (None, None),
            Err(why) => return untested(&why.to_string()),
        };
        let by = self.discoveries.of(&gang.namespace);
        match self.facts.size_of(&gang, &by, until).await {
            Ok(Some((Size::NoGang, _))) => (None, None),
            Err(Unknown::ForGood(why)) => untested(&why),
            // An unknown size still means that the pods are scheduled together.
            Ok(_) | Err(Unknown::Now(_)) => (Some(gang), None),
        }
    }

    /// Returns an answer without checks, for facts that could not be determined. Waiting could
    /// block the pod forever.
    fn unchecked(&self, review: &Review, why: &str) -> Answer {
        // The reason contains names that the creator of the pod chose.
        let why = shortened(why);
        if let Some(not_logged_before) = self.lines.unchecked.now() {
            let namespace = &review.namespace;
            tracing::warn!(
                not_logged_before,
                "a pod in {namespace} gets no preflight checks: {why}"
            );
        }
        let unchanged = Injection {
            warnings: vec![format!("no preflight checks: {why}")],
            ..Injection::default()
        };
        ("unknown", review.changed(&unchanged))
    }
}

/// Returns no gang, and a warning that its checks are skipped.
fn untested(why: &str) -> (Option<Gang>, Option<String>) {
    let why = shortened(why);
    let warning = format!("no preflight checks of the gang: {why}");
    (None, Some(warning))
}
