//! Follows the rules of the analysis in their file or `ConfigMap`.
//!
//! Invalid new rules never replace the old ones. Without a `ConfigMap` so far, the built-in rules
//! are in effect.

use std::path::PathBuf;
use std::sync::Arc;

use analysis::Rule;
use cluster::Cluster;
use contract::findings::{FileError, MAX_FILE_BYTES};
use runtime::text_file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

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

/// Follower of the rules.
pub struct RulesFollower {
    /// `None` for the built-in rules.
    place: Option<TextPlace>,
    rules: watch::Sender<Arc<Vec<Rule>>>,
    text: String,
    error: String,
}

// === impl RulesFollower ===

impl RulesFollower {
    /// Loads the rules. A file must be valid at once.
    pub fn load(place: Option<TextPlace>) -> Result<Self, RulesError> {
        let mut text = String::new();
        let rules = match &place {
            Some(TextPlace::File(path)) => {
                let path = path.clone();
                text = text_file::read(&path, MAX_FILE_BYTES)
                    .map_err(|source| RulesError::Read { path, source })?;
                analysis::parse(&text, &source_of(place.as_ref()))?
            }
            Some(TextPlace::ConfigMap { .. }) | None => analysis::built_in(),
        };
        Ok(Self {
            place,
            rules: watch::Sender::new(Arc::new(rules)),
            text,
            error: String::new(),
        })
    }

    /// Returns a receiver of the rules in effect.
    pub fn rules(&self) -> watch::Receiver<Arc<Vec<Rule>>> {
        self.rules.subscribe()
    }

    /// Follows the rules until `cancel`.
    pub async fn run(mut self, cluster: Option<Arc<Cluster>>, cancel: CancellationToken) {
        let Some(place) = self.place.clone() else {
            cancel.cancelled().await;
            return;
        };
        let take = |reading| match reading {
            Reading::Text(text) => self.offer(text),
            Reading::Missing(why) | Reading::Failing(why) => self.refuse(why),
        };
        place.follow(cluster, cancel, take).await;
    }

    fn offer(&mut self, text: String) {
        if text == self.text {
            self.error.clear();
            return;
        }
        match analysis::parse(&text, &source_of(self.place.as_ref())) {
            Ok(rules) => {
                tracing::info!(
                    rules = rules.len(),
                    "the rules of the analysis have changed"
                );
                self.rules.send_replace(Arc::new(rules));
                self.error.clear();
                self.text = text;
            }
            Err(error) => self.refuse(error.to_string()),
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

fn source_of(place: Option<&TextPlace>) -> String {
    place.map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const OFF: &str = "[[rules]]\nname = \"RackFault\"\nenabled = false\n";

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_counts_and_a_wrong_one_leaves_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rules.toml");
        std::fs::write(&path, OFF).unwrap();
        let follower = RulesFollower::load(Some(TextPlace::File(path.clone()))).unwrap();
        let mut rules = follower.rules();
        let all = analysis::built_in().len();
        assert_eq!(rules.borrow().len(), all - 1);
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
        cancel.cancel();
    }

    #[test]
    fn wrong_rules_are_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| Some(TextPlace::File(dir.path().join(name)));
        assert!(matches!(
            RulesFollower::load(place("none")),
            Err(RulesError::Read { .. })
        ));
        std::fs::write(dir.path().join("bad"), "rules = 1").unwrap();
        assert!(matches!(
            RulesFollower::load(place("bad")),
            Err(RulesError::Parse(_))
        ));
        assert!(RulesFollower::load(None).is_ok());
    }
}
