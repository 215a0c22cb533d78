//! Follows the policy in its file or `ConfigMap`, which is read again whenever it changes.
//!
//! An invalid new policy never replaces the old one, which stays in effect while the status
//! shows the error. When the policy changes, [`quarantine`] evaluates all nodes; the change
//! itself has no other effect.
//!
//! [`quarantine`]: crate::quarantine

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cluster::Cluster;
use contract::findings::{FileError, MAX_FILE_BYTES};
use fleet::view::PolicyView;
use jiff::Timestamp;
use policy::{DEFAULT_POLICY, Policy};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::metrics::{Labels, Metrics};
use runtime::text_file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use trial::presets::Preset;

use crate::text_place::{Reading, TextPlace};

/// Source of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// The built-in default policy, which never changes.
    BuiltIn,
    /// A named built-in policy.
    Preset(&'static Preset),
    /// A file, or a key of a `ConfigMap`.
    Place(TextPlace),
}

/// Reason why no policy could be loaded at the start.
#[derive(Debug, thiserror::Error)]
pub enum PolicyLoadError {
    /// The policy file cannot be read.
    #[error("cannot read the policy {}", path.display())]
    Read {
        /// Path of the policy file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The text is not a valid policy.
    #[error(transparent)]
    Parse(#[from] FileError),
    /// The policy is in a `ConfigMap`, and there is no cluster.
    #[error("the policy is in a ConfigMap, and no cluster is named: name one with --kubeconfig")]
    NoCluster,
}

/// Receiver of the policy in effect; `None` until its source has provided one, which decisions
/// wait for.
pub type CurrentPolicy = watch::Receiver<Option<Arc<Policy>>>;

/// Follower of a policy's source.
pub struct PolicyFollower {
    source: PolicySource,
    cluster: Option<Arc<Cluster>>,
    clock: fn() -> Timestamp,
    text: String,
    policy: watch::Sender<Option<Arc<Policy>>>,
    view: watch::Sender<Arc<PolicyView>>,
    results: Family<Labels<1>, Counter>,
}

// === impl PolicySource ===

impl std::fmt::Display for PolicySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built-in default"),
            Self::Preset(preset) => write!(f, "preset:{}", preset.name),
            Self::Place(place) => place.fmt(f),
        }
    }
}

runtime::metrics! {
    /// Counts readings of the policy.
    pub(crate) struct PolicyMetrics {
        /// Policies read after the start: `loaded`, `rejected`, `missing`.
        results: Family<Labels<1>, Counter> = "gpuwarden_policy_reload" {result},
    }
}

// === impl PolicyMetrics ===

impl PolicyMetrics {
    fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first rejection sees an increase from 0.
        for result in ["loaded", "rejected", "missing"] {
            drop(own.results.get_or_create(&[("result", result)]));
        }
        own
    }
}

// === impl PolicyFollower ===

impl PolicyFollower {
    /// Loads the policy. A file must be valid at once. A `ConfigMap` is read later, so that
    /// events are recorded even while the cluster cannot be reached.
    pub fn load(
        source: PolicySource,
        cluster: Option<Arc<Cluster>>,
        clock: fn() -> Timestamp,
        metrics: &Metrics,
    ) -> Result<Self, PolicyLoadError> {
        let mut follower = Self {
            clock,
            text: String::new(),
            policy: watch::Sender::new(None),
            view: watch::Sender::new(Arc::new(PolicyView {
                source: source.to_string(),
                ..PolicyView::default()
            })),
            results: PolicyMetrics::new(metrics).results,
            cluster,
            source,
        };
        let text = match &follower.source {
            PolicySource::BuiltIn => DEFAULT_POLICY.to_owned(),
            PolicySource::Preset(preset) => preset.text.to_owned(),
            PolicySource::Place(TextPlace::File(path)) => text_file::read(path, MAX_FILE_BYTES)
                .map_err(|source| PolicyLoadError::Read {
                    path: path.clone(),
                    source,
                })?,
            PolicySource::Place(_) if follower.cluster.is_none() => {
                return Err(PolicyLoadError::NoCluster);
            }
            PolicySource::Place(_) => return Ok(follower),
        };
        let policy = Policy::parse(&text, &follower.source.to_string())?;
        follower.hold(policy, text);
        Ok(follower)
    }

    /// Returns a receiver of the policy in effect.
    pub fn policy(&self) -> CurrentPolicy {
        self.policy.subscribe()
    }

    /// Returns a receiver of the view of the policy for people.
    pub fn view(&self) -> watch::Receiver<Arc<PolicyView>> {
        self.view.subscribe()
    }

    /// Follows the source until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let PolicySource::Place(place) = self.source.clone() else {
            cancel.cancelled().await;
            return;
        };
        let cluster = self.cluster.clone();
        let take = |reading| match reading {
            Reading::Text(text) => self.offer(&text),
            Reading::Missing(why) => self.missing(why),
            Reading::Failing(why) => self.report_error(why),
        };
        place.follow(cluster, cancel, take).await;
    }

    /// Handles a text from the source; an invalid one changes nothing.
    fn offer(&mut self, text: &str) {
        let known = self.policy.borrow().is_some() && text == self.text;
        if known {
            if self.view.borrow().error.is_some() {
                tracing::info!(policy = %self.source, "the policy source is valid again, with the policy in effect");
                self.count("loaded");
                self.view.send_modify(|view| {
                    let view = Arc::make_mut(view);
                    view.error = None;
                    view.error_since = None;
                });
            }
            return;
        }
        match Policy::parse(text, &self.source.to_string()) {
            Ok(policy) => {
                self.count("loaded");
                tracing::info!(
                    policy = %self.source,
                    rule_sets = policy.rule_sets.len(),
                    "the policy has changed: all nodes are evaluated"
                );
                self.hold(policy, text.to_owned());
            }
            Err(error) => {
                self.count("rejected");
                self.report_error(error.to_string());
            }
        }
    }

    fn hold(&mut self, policy: Policy, text: String) {
        for warning in &policy.warnings {
            tracing::warn!("{warning}");
        }
        let names = |sets: &[policy::RuleSet]| -> Vec<String> {
            sets.iter().map(|set| set.name.clone()).collect()
        };
        let view = PolicyView {
            source: policy.source.clone(),
            rule_sets: names(&policy.rule_sets),
            policies: policy
                .policies
                .iter()
                .map(|named| named.name.clone())
                .collect(),
            warnings: policy.warnings.clone(),
            loaded_at: Some((self.clock)()),
            error: None,
            error_since: None,
        };
        self.text = text;
        // The view first, so that an observer of the policy finds it.
        self.view.send_replace(Arc::new(view));
        self.policy.send_replace(Some(Arc::new(policy)));
    }

    fn missing(&self, why: String) {
        self.count("missing");
        self.report_error(why);
    }

    /// Reports an error; the policy in effect stays.
    fn report_error(&self, error: String) {
        let held = self.policy.borrow().is_some();
        if self.view.borrow().error.as_ref() == Some(&error) {
            return;
        }
        let then = if held {
            "the last valid policy stays in effect"
        } else {
            "nothing is decided until there is one"
        };
        tracing::error!(policy = %self.source, err = error, "the policy cannot be loaded; {then}");
        let now = (self.clock)();
        self.view.send_modify(|view| {
            let view = Arc::make_mut(view);
            view.error = Some(error);
            view.error_since.get_or_insert(now);
        });
    }

    fn count(&self, result: &'static str) {
        self.results.get_or_create(&[("result", result)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    const GOOD: &str = "[[rule-sets]]\nname = \"a\"\n";
    const OTHER: &str = "[[rule-sets]]\nname = \"b\"\nlabel = {}\n[[policies]]\nname = \"x\"\n";

    struct Followed {
        dir: tempfile::TempDir,
        path: PathBuf,
        metrics: Metrics,
        policy: CurrentPolicy,
        view: watch::Receiver<Arc<PolicyView>>,
        cancel: CancellationToken,
    }

    impl Followed {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("p.toml");
            fs::write(&path, GOOD).unwrap();
            let metrics = Metrics::default();
            let source = PolicySource::Place(TextPlace::File(path.clone()));
            let follower = PolicyFollower::load(source, None, Timestamp::now, &metrics).unwrap();
            let (policy, view) = (follower.policy(), follower.view());
            let cancel = CancellationToken::new();
            tokio::spawn(follower.run(cancel.clone()));
            Self {
                dir,
                path,
                metrics,
                policy,
                view,
                cancel,
            }
        }

        /// Waits until the view satisfies `holds`, on a paused clock.
        async fn until(&mut self, holds: impl Fn(&PolicyView) -> bool) -> PolicyView {
            let wait = self.view.wait_for(|view| holds(view));
            let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
            PolicyView::clone(&waited.unwrap().unwrap())
        }

        fn rule_set(&self) -> String {
            self.policy.borrow().as_ref().unwrap().rule_sets[0]
                .name
                .clone()
        }
    }

    impl Drop for Followed {
        fn drop(&mut self) {
            self.cancel.cancel();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_good_one_holds_and_a_bad_one_leaves_the_old_one() {
        let mut followed = Followed::start();
        assert_eq!(followed.rule_set(), "a");

        // Without this check the policy would take effect without its misspelt key.
        let misspelt = "unhealthy-tain = true\n[[rule-sets]]\nname = \"c\"\n";
        fs::write(&followed.path, misspelt).unwrap();
        let view = followed.until(|view| view.error.is_some()).await;
        let error = view.error.unwrap();
        assert!(
            error.contains("p.toml:1: unknown key 'unhealthy-tain'; did you mean"),
            "{error}"
        );
        assert!(view.error_since.is_some());
        assert_eq!(
            (followed.rule_set(), view.rule_sets),
            ("a".into(), vec!["a".into()])
        );

        // Many editors rename a new file over the old one.
        let new = followed.dir.path().join("new");
        fs::write(&new, OTHER).unwrap();
        fs::rename(&new, &followed.path).unwrap();
        let view = followed.until(|view| view.error.is_none()).await;
        assert_eq!(followed.rule_set(), "b");
        assert_eq!(
            (view.rule_sets, view.policies),
            (vec!["b".into()], vec!["x".into()])
        );
        assert!(view.warnings[0].contains("rule-sets[0].label"));

        fs::remove_file(&followed.path).unwrap();
        let view = followed.until(|view| view.error.is_some()).await;
        assert!(view.error.unwrap().contains("cannot be read"));
        assert_eq!(followed.rule_set(), "b");

        fs::write(&followed.path, OTHER).unwrap();
        followed.until(|view| view.error.is_none()).await;
        let text = followed.metrics.encode();
        for (result, count) in [("rejected", 1), ("missing", 1), ("loaded", 2)] {
            let line = format!("gpuwarden_policy_reload_total{{result=\"{result}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_file_does_not_give_every_node_back() {
        let mut followed = Followed::start();
        fs::write(&followed.path, " \n").unwrap();
        let view = followed.until(|view| view.error.is_some()).await;
        assert!(view.error.unwrap().contains("empty"));
        assert_eq!(followed.rule_set(), "a");
        // A comment makes an empty policy explicit.
        fs::write(&followed.path, "# nothing is quarantined\n").unwrap();
        followed.until(|view| view.error.is_none()).await;
        assert!(
            followed
                .policy
                .borrow()
                .as_ref()
                .unwrap()
                .rule_sets
                .is_empty()
        );
    }

    #[test]
    fn a_file_that_is_no_policy_is_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let load = |name: &str| {
            let source = PolicySource::Place(TextPlace::File(dir.path().join(name)));
            PolicyFollower::load(source, None, Timestamp::now, &Metrics::default()).map(drop)
        };
        assert!(matches!(load("none"), Err(PolicyLoadError::Read { .. })));
        fs::write(dir.path().join("bad"), "x = [").unwrap();
        assert!(matches!(load("bad"), Err(PolicyLoadError::Parse(_))));
        fs::write(dir.path().join("empty"), "\n").unwrap();
        let error = load("empty").unwrap_err().to_string();
        assert!(error.contains("a comment in it (# no rules)"), "{error}");
        fs::write(dir.path().join("meant"), "# no rules\n").unwrap();
        assert!(load("meant").is_ok());
        fs::write(dir.path().join("long"), "#".repeat(MAX_FILE_BYTES + 1)).unwrap();
        assert!(matches!(load("long"), Err(PolicyLoadError::Read { .. })));
        fs::write(dir.path().join("full"), "#".repeat(MAX_FILE_BYTES)).unwrap();
        assert!(load("full").is_ok());
    }
}
