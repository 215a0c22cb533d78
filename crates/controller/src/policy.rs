//! The policy as it lives: from its file or its `ConfigMap`, read again whenever that changes.
//!
//! A new policy that is wrong never costs the old one: that goes on holding, and the status says
//! what is wrong, until the source can be read again. [`quarantine`] looks at
//! all nodes when the policy changes; nothing else follows from the change itself.
//!
//! [`quarantine`]: crate::quarantine

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ConfigMapEvent};
use contract::findings::FileError;
use fleet::view::PolicyView;
use jiff::Timestamp;
use policy::{DEFAULT_POLICY, MAX_POLICY_BYTES, Policy};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::file_stamp::FileStamp;
use runtime::metrics::{Labels, Metrics};
use runtime::text_file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use trial::presets::Preset;

/// Pause between two looks at a file. A change counts once the file is the same in two looks
/// that follow one another: who writes it in place empties it first, and an empty policy
/// would give every node back.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The source of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    /// The one that is compiled in; it never changes.
    BuiltIn,
    /// A named one that is compiled in.
    Preset(&'static Preset),
    /// A file.
    File(PathBuf),
    /// A key of a `ConfigMap` of the cluster.
    ConfigMap {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The key whose value is the policy.
        key: String,
    },
}

/// The reason why there is no policy to begin with.
#[derive(Debug, thiserror::Error)]
pub enum PolicyLoadError {
    /// The file cannot be read.
    #[error("cannot read the policy {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// Its text is no policy.
    #[error(transparent)]
    Parse(#[from] FileError),
    /// A `ConfigMap` is named, and there is no cluster.
    #[error("the policy is in a ConfigMap, and no cluster is named: name one with --kubeconfig")]
    NoCluster,
}

/// The policy that holds now; `None`: its source has not given one yet, and nothing can be
/// decided.
pub type CurrentPolicy = watch::Receiver<Option<Arc<Policy>>>;

/// Keeps the policy in line with its source.
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
            Self::File(path) => write!(f, "{}", path.display()),
            Self::ConfigMap {
                namespace,
                name,
                key,
            } => write!(f, "configmap:{namespace}/{name}/{key}"),
        }
    }
}

// === impl PolicyFollower ===

impl PolicyFollower {
    /// Loads the policy. What a file says must hold at once; a `ConfigMap` is waited for, so
    /// that events are recorded also while the cluster cannot be reached.
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
            results: metrics.family(
                "gpuwarden_policy_reload",
                "Policies read after the start, by result: loaded, rejected or missing",
            ),
            cluster,
            source,
        };
        let text = match &follower.source {
            PolicySource::BuiltIn => DEFAULT_POLICY.to_owned(),
            PolicySource::Preset(preset) => preset.text.to_owned(),
            PolicySource::File(path) => {
                text_file::read(path, MAX_POLICY_BYTES).map_err(|source| PolicyLoadError::Read {
                    path: path.clone(),
                    source,
                })?
            }
            PolicySource::ConfigMap { .. } if follower.cluster.is_none() => {
                return Err(PolicyLoadError::NoCluster);
            }
            PolicySource::ConfigMap { .. } => return Ok(follower),
        };
        let policy = Policy::parse(&text, &follower.source.to_string())?;
        follower.hold(policy, text);
        Ok(follower)
    }

    /// Returns the policy that holds, as it changes.
    pub fn policy(&self) -> CurrentPolicy {
        self.policy.subscribe()
    }

    /// Returns what is shown of it, as it changes.
    pub fn view(&self) -> watch::Receiver<Arc<PolicyView>> {
        self.view.subscribe()
    }

    /// Follows the source until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        match self.source.clone() {
            PolicySource::BuiltIn | PolicySource::Preset(_) => cancel.cancelled().await,
            PolicySource::File(path) => {
                let stop = cancel.clone();
                stop.run_until_cancelled(self.follow_file(&path)).await;
            }
            PolicySource::ConfigMap {
                namespace,
                name,
                key,
            } => {
                let stop = cancel.clone();
                let following = self.follow_config_map(&namespace, &name, &key, cancel);
                stop.run_until_cancelled(following).await;
            }
        }
    }

    async fn follow_file(&mut self, path: &Path) {
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Read before the first look: a change right after the start is one, too.
        let mut taken = None;
        let mut last = None;
        loop {
            looks.tick().await;
            // Through links: a mounted `ConfigMap` is changed by changing where one points.
            let stamp = std::fs::metadata(path)
                .map(|metadata| FileStamp::of(&metadata))
                .map_err(|error| error.kind());
            let settled = last == Some(stamp);
            last = Some(stamp);
            if !settled || taken == last {
                continue;
            }
            taken = last;
            match text_file::read(path, MAX_POLICY_BYTES) {
                Ok(text) => self.offer(&text),
                Err(error) => {
                    // A file that is there may be readable at the next look.
                    taken = stamp.is_err().then_some(stamp);
                    self.missing(format!("it cannot be read: {error}"));
                }
            }
        }
    }

    async fn follow_config_map(
        &mut self,
        namespace: &str,
        name: &str,
        key: &str,
        cancel: CancellationToken,
    ) {
        let Some(cluster) = self.cluster.clone() else {
            return; // Refused when it was loaded.
        };
        let mut events = cluster.watch_config_map(namespace, name, cancel);
        while let Some(event) = events.recv().await {
            match event {
                ConfigMapEvent::Seen(map) => match map.data.get(key) {
                    Some(text) => self.offer(text),
                    None => self.missing(format!("the ConfigMap has no key {key}")),
                },
                ConfigMapEvent::Missing => {
                    self.missing("the cluster has no such ConfigMap".to_owned());
                }
                ConfigMapEvent::Failing { error, .. } => {
                    self.trouble(format!("the ConfigMap cannot be watched: {error}"));
                }
            }
        }
    }

    /// Takes a text of the source in; what is no policy changes nothing.
    fn offer(&mut self, text: &str) {
        let known = self.policy.borrow().is_some() && text == self.text;
        if known {
            if self.view.borrow().error.is_some() {
                tracing::info!(policy = %self.source, "the policy is as it was again");
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
                    "the policy has changed: all nodes are looked at"
                );
                self.hold(policy, text.to_owned());
            }
            Err(error) => {
                self.count("rejected");
                self.trouble(error.to_string());
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
        // The view first: who looks because of the policy finds it.
        self.view.send_replace(Arc::new(view));
        self.policy.send_replace(Some(Arc::new(policy)));
    }

    fn missing(&self, why: String) {
        self.count("missing");
        self.trouble(why);
    }

    /// Says what is wrong; what holds goes on holding.
    fn trouble(&self, error: String) {
        let held = self.policy.borrow().is_some();
        if self.view.borrow().error.as_ref() == Some(&error) {
            return;
        }
        let then = if held {
            "the last good policy goes on holding"
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
            let source = PolicySource::File(path.clone());
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

        /// Waits until the view is as `holds` says; the time is paused and runs ahead.
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

        // Another policy would take effect without what is misspelt in it.
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

        // As an editor does it: another file in its place.
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
        // Who means it says so.
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
            let source = PolicySource::File(dir.path().join(name));
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
        fs::write(dir.path().join("long"), "#".repeat(MAX_POLICY_BYTES + 1)).unwrap();
        assert!(matches!(load("long"), Err(PolicyLoadError::Read { .. })));
        fs::write(dir.path().join("full"), "#".repeat(MAX_POLICY_BYTES)).unwrap();
        assert!(load("full").is_ok());
    }
}
