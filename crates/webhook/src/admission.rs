//! What a pod that is created becomes.

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
use crate::review::{Question, Unanswered, shortened};
use crate::turns::{Turns, Work};

/// Answers the questions of API servers. Cheap to clone.
#[derive(Clone)]
pub struct Admission {
    config: Arc<Config>,
    discoveries: Discoveries,
    facts: Facts,
    /// The rendezvous, if there is one, as its authorities change.
    rendezvous: Option<(String, watch::Receiver<String>)>,
    /// Checks can report there.
    takes_reports: bool,
    turns: Turns,
    metrics: Arc<WebhookMetrics>,
    lines: Arc<Lines>,
}

/// The lines of the log that whoever creates pods can cause.
#[derive(Default)]
struct Lines {
    /// A pod is denied.
    denied: Seldom,
    /// A pod gets no checks.
    unchecked: Seldom,
}

/// What became of a pod: for the metrics, and the answer.
type Answer = (&'static str, Value);

// === impl Admission ===

impl Admission {
    /// Returns who answers by a configuration.
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
            metrics: Arc::new(WebhookMetrics::registered(metrics)),
            lines: Arc::default(),
        }
    }

    /// Tells pods of a rendezvous at `url`, whose certificate has these authorities, and whether it takes
    /// reports of checks.
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

    /// Returns the configuration.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config)
    }

    /// Returns the turns of its questions.
    #[cfg(test)]
    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Returns how gangs are known.
    pub(crate) fn discoveries(&self) -> Discoveries {
        self.discoveries.clone()
    }

    /// Returns the metrics.
    pub(crate) fn metrics(&self) -> Arc<WebhookMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Returns what is not known yet of that which answers take.
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

    /// Returns the answer to a question, if there is one by `until`. Nothing is written in the cluster for it, so that
    /// a question about a dry run has the same one.
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
        let named = work.part(move |question| {
            let is_ours = question.is_new_pod() && this.concerns(&question.namespace);
            let named = is_ours.then(|| claims_named(&question.object));
            (question.bare(), named)
        });
        let (about, named) = named.await?;
        let skipped = || ("skipped", about.changed(&Injection::default()));
        let Some(named) = named else {
            return Ok(skipped());
        };
        let namespace = &about.namespace;
        // All that the cluster is asked has one deadline: a pod that waits for it starts unchecked, and is not refused.
        let known_by = facts::known_by(until);
        let claims = self.facts.claims(named, namespace, known_by);
        let claims = match work.meanwhile(claims).await? {
            Ok(claims) => claims,
            Err(why) => return Ok(self.unchecked(&about, &why)),
        };
        let this = self.clone();
        let found = work.part(move |question| {
            let devices = DevicesOfPod::of(&question.object, &this.config, &claims)?;
            Some((devices, this.gang_named(question)))
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
        let injecting = work.last(move |question| {
            let candidate = Candidate {
                pod: &question.object,
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
                    (outcome, question.changed(&injection))
                }
                Err(refusal) => {
                    let refusal = refusal.to_string();
                    if let Some(not_logged_before) = this.lines.denied.now() {
                        let (namespace, why) = (&question.namespace, shortened(&refusal));
                        tracing::info!(not_logged_before, "a pod in {namespace} is denied: {why}");
                    }
                    ("denied", question.denied(&refusal))
                }
            }
        });
        injecting.await
    }

    /// Returns whether pods of a namespace get checks, as far as the registration's selectors, which an
    /// operator may have changed, let them come here.
    fn concerns(&self, namespace: &str) -> bool {
        let is = |names: &[String]| names.iter().any(|name| name == namespace);
        let (only, never) = (&self.config.namespaces, &self.config.excluded_namespaces);
        !is(never) && (only.is_empty() || is(only))
    }

    /// Returns the gang that a pod names.
    fn gang_named(&self, question: &Question) -> Result<Option<Gang>, GangError> {
        if !self.config.coordination.enabled {
            return Ok(None);
        }
        let by = self.discoveries.of(&question.namespace);
        Gang::of(&question.object, &question.namespace, &by)
    }

    /// Returns the gang of a pod by what it names, and what is wrong with what it says of it.
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
            // So long as nobody says otherwise, they are scheduled together.
            Ok(_) | Err(Unknown::Now(_)) => (Some(gang), None),
        }
    }

    /// Returns the answer where what it takes cannot be learnt: the pod starts unchecked, for it is not to wait
    /// for what may never be known.
    fn unchecked(&self, question: &Question, why: &str) -> Answer {
        // Names of what the pod asks for stand in it.
        let why = shortened(why);
        if let Some(not_logged_before) = self.lines.unchecked.now() {
            let namespace = &question.namespace;
            tracing::warn!(
                not_logged_before,
                "a pod in {namespace} gets no preflight checks: {why}"
            );
        }
        let unchanged = Injection {
            warnings: vec![format!("no preflight checks: {why}")],
            ..Injection::default()
        };
        ("unknown", question.changed(&unchanged))
    }
}

/// Returns that a pod is in no gang that can be tested.
fn untested(why: &str) -> (Option<Gang>, Option<String>) {
    let why = shortened(why);
    let warning = format!("no preflight checks of the gang: {why}");
    (None, Some(warning))
}
