//! Follows the rules of the analysis in their file or `ConfigMap`.
//!
//! Invalid new rules never replace the old ones. Without a `ConfigMap` so far, the built-in rules
//! are in effect.

use std::path::PathBuf;
use std::sync::Arc;

use analysis::{Rule, RulesText};
use cluster::Cluster;
use contract::findings::{FileError, MAX_FILE_BYTES};
use jiff::SignedDuration;
use runtime::metrics::Metrics;
use runtime::text_file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::metrics::RulesMetrics;
use crate::text_place::{Reading, TextPlace};

/// Reason why no rules could be loaded at the start.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file cannot be read.
    #[error("cannot read the rules {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The text has findings.
    #[error(transparent)]
    Parse(#[from] FileError),
}

/// Receiver of the text of the rules in effect.
pub type RulesTextReceiver = watch::Receiver<Arc<RulesText>>;

/// Follower of the rules.
pub struct RulesFollower {
    /// `None` for the built-in rules.
    place: Option<TextPlace>,
    rules: watch::Sender<Arc<Vec<Rule>>>,
    text: watch::Sender<Arc<RulesText>>,
    error: String,
    /// Time for which events are stored.
    retention: SignedDuration,
    metrics: RulesMetrics,
}

// === impl RulesFollower ===

impl RulesFollower {
    /// Loads the rules. A file must be valid at once. `retention` is the time for which events are
    /// stored: the log names rules that look back further.
    pub fn load(
        place: Option<TextPlace>,
        retention: SignedDuration,
        metrics: &Metrics,
    ) -> Result<Self, RulesError> {
        let mut text = RulesText::default();
        if let Some(place @ TextPlace::File(path)) = &place {
            let path = path.clone();
            text.text = text_file::read(&path, MAX_FILE_BYTES)
                .map_err(|source| RulesError::Read { path, source })?;
            text.source = place.to_string();
        }
        let rules = text.parse()?;
        warn_of_windows(&rules, retention);
        Ok(Self {
            place,
            rules: watch::Sender::new(Arc::new(rules)),
            text: watch::Sender::new(Arc::new(text)),
            error: String::new(),
            retention,
            metrics: RulesMetrics::new(metrics),
        })
    }

    /// Returns a receiver of the rules in effect.
    pub fn rules(&self) -> watch::Receiver<Arc<Vec<Rule>>> {
        self.rules.subscribe()
    }

    /// Returns a receiver of their text.
    pub fn text(&self) -> RulesTextReceiver {
        self.text.subscribe()
    }

    /// Follows the rules until `cancel`.
    pub async fn run(mut self, cluster: Option<Arc<Cluster>>, cancel: CancellationToken) {
        let Some(place) = self.place.clone() else {
            cancel.cancelled().await;
            return;
        };
        let take = |reading| match reading {
            Reading::Text(text) => self.offer(text),
            Reading::Missing(why) => {
                self.metrics.read("missing");
                self.refuse(why);
            }
            Reading::Failing(why) => self.refuse(why),
        };
        place.follow(cluster, cancel, take).await;
    }

    fn offer(&mut self, text: String) {
        if text == self.text.borrow().text {
            self.error.clear();
            return;
        }
        let source = source_of(self.place.as_ref());
        let text = RulesText { source, text };
        match text.parse() {
            Ok(rules) => {
                tracing::info!(
                    rules = rules.len(),
                    "the rules of the analysis have changed"
                );
                warn_of_windows(&rules, self.retention);
                self.metrics.read("loaded");
                // The text first, so that an observer of the rules finds it.
                self.text.send_replace(Arc::new(text));
                self.rules.send_replace(Arc::new(rules));
                self.error.clear();
            }
            Err(error) => {
                self.metrics.read("rejected");
                self.refuse(error.to_string());
            }
        }
    }

    /// Reports an error once; the rules in effect stay.
    fn refuse(&mut self, error: String) {
        if error != self.error {
            let source = source_of(self.place.as_ref());
            tracing::error!(
                rules = source,
                err = error,
                "the rules of the analysis cannot be loaded; those before stay in effect"
            );
            self.error = error;
        }
    }
}

/// Returns the names of the rules that look back further than events are stored.
fn beyond(rules: &[Rule], retention: SignedDuration) -> Vec<&str> {
    let beyond = rules
        .iter()
        .filter(|rule| rule.condition.window > retention);
    beyond.map(|rule| rule.name.as_str()).collect()
}

fn warn_of_windows(rules: &[Rule], retention: SignedDuration) {
    let beyond = beyond(rules, retention);
    if !beyond.is_empty() {
        tracing::warn!(
            rules = beyond.join(", "),
            "the windows of these rules are longer than --retention ({retention:#}); where all \
             events are read again, as after a change of rules, deleted ones are missing"
        );
    }
}

fn source_of(place: Option<&TextPlace>) -> String {
    place.map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);
    const OFF: &str = "[[rules]]\nname = \"RackFault\"\nenabled = false\n";

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_counts_and_a_wrong_one_leaves_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rules.toml");
        std::fs::write(&path, OFF).unwrap();
        let metrics = Metrics::default();
        let place = Some(TextPlace::File(path.clone()));
        let follower = RulesFollower::load(place, RETENTION, &metrics).unwrap();
        let mut rules = follower.rules();
        let all = analysis::built_in().len();
        assert_eq!(rules.borrow().len(), all - 1);
        let text = follower.text();
        assert_eq!(text.borrow().text, OFF);
        let cancel = CancellationToken::new();
        tokio::spawn(follower.run(None, cancel.clone()));
        std::fs::write(&path, "[[rules]]\nname = \"RackFalut\"\n").unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(rules.borrow().len(), all - 1);
        std::fs::write(&path, "# none\n").unwrap();
        let wait = rules.wait_for(|rules| rules.len() == all);
        tokio::time::timeout(Duration::from_secs(60), wait)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(text.borrow().text, "# none\n");
        cancel.cancel();
        let text = metrics.encode();
        for (result, count) in [("rejected", 1), ("missing", 0), ("loaded", 1)] {
            let name = "gpuwarden_analysis_rules_reload_total";
            let line = format!("{name}{{result=\"{result}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[test]
    fn wrong_rules_are_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| Some(TextPlace::File(dir.path().join(name)));
        let load = |place| RulesFollower::load(place, RETENTION, &Metrics::default());
        assert!(matches!(load(place("none")), Err(RulesError::Read { .. })));
        std::fs::write(dir.path().join("bad"), "rules = 1").unwrap();
        assert!(matches!(load(place("bad")), Err(RulesError::Parse(_))));
        assert!(load(None).is_ok());
    }

    #[test]
    fn rules_that_look_back_further_than_events_are_stored_are_named() {
        let rules = analysis::built_in();
        assert_eq!(beyond(&rules, RETENTION), [""; 0]);
        let week = SignedDuration::from_hours(7 * 24 - 1);
        assert!(beyond(&rules, week).contains(&"MultipleRemediations"));
        assert!(!beyond(&rules, week).contains(&"RackFault"));
    }
}
