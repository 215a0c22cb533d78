//! Follows the policies in their file or `ConfigMap`. Invalid new ones never replace those in
//! effect.

use std::path::PathBuf;
use std::sync::Arc;

use cluster::Cluster;
use contract::findings::{FileError, MAX_FILE_BYTES};
use objects::ObjectPolicies;
use objects::presets::Preset;
use runtime::text_file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::PoliciesReceiver;
use crate::text_place::{Reading, TextPlace};

/// Source of the policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectsSource {
    /// Built-in policies.
    Preset(Preset),
    /// A file or `ConfigMap`.
    Place(TextPlace),
}

/// Reason why no policies could be loaded at the start.
#[derive(Debug, thiserror::Error)]
pub enum ObjectsError {
    /// The file cannot be read.
    #[error("cannot read the object policies {}", path.display())]
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

/// Follower of the policies.
pub struct ObjectsFollower {
    place: Option<TextPlace>,
    /// Text of the policies in effect.
    text: String,
    policies: watch::Sender<Option<Arc<ObjectPolicies>>>,
    error: String,
}

// === impl ObjectsFollower ===

impl ObjectsFollower {
    /// Loads the policies. A file must be valid at once.
    pub fn load(source: ObjectsSource) -> Result<Self, ObjectsError> {
        let mut follower = Self {
            place: None,
            text: String::new(),
            policies: watch::Sender::new(None),
            error: String::new(),
        };
        match source {
            ObjectsSource::Preset(preset) => follower.set(preset.text.to_owned(), preset.name)?,
            ObjectsSource::Place(TextPlace::File(path)) => {
                let text = text_file::read(&path, MAX_FILE_BYTES).map_err(|source| {
                    ObjectsError::Read {
                        path: path.clone(),
                        source,
                    }
                })?;
                follower.set(text, &path.display().to_string())?;
                follower.place = Some(TextPlace::File(path));
            }
            ObjectsSource::Place(place) => follower.place = Some(place),
        }
        Ok(follower)
    }

    /// Returns a receiver of the policies in effect.
    pub fn policies(&self) -> PoliciesReceiver {
        self.policies.subscribe()
    }

    /// Follows the policies until `cancel`.
    pub async fn run(mut self, cluster: Option<Arc<Cluster>>, cancel: CancellationToken) {
        let Some(place) = self.place.clone() else {
            cancel.cancelled().await;
            return;
        };
        let source = place.to_string();
        let take = |reading| {
            let refused = match reading {
                Reading::Text(text) if text == self.text => {
                    self.error.clear();
                    return;
                }
                Reading::Text(text) => match self.set(text, &source) {
                    Ok(()) => return,
                    Err(error) => error.to_string(),
                },
                Reading::Missing(why) | Reading::Failing(why) => why,
            };
            if refused != self.error {
                tracing::error!(
                    policies = source,
                    err = refused,
                    "the object policies cannot be loaded; those before stay in effect"
                );
                self.error = refused;
            }
        };
        place.follow(cluster, cancel, take).await;
    }

    fn set(&mut self, text: String, source: &str) -> Result<(), FileError> {
        let policies = objects::parse(&text, source)?;
        for note in &policies.notes {
            tracing::warn!("{note}");
        }
        tracing::info!(
            policies = policies.policies.len(),
            "object policies are in effect"
        );
        self.text = text;
        self.error.clear();
        self.policies.send_replace(Some(Arc::new(policies)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn changed_policies_count_and_wrong_ones_leave_those_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policies.toml");
        let preset = objects::presets::find("eks").unwrap();
        std::fs::write(&path, preset.text).unwrap();
        let source = ObjectsSource::Place(TextPlace::File(path.clone()));
        let follower = ObjectsFollower::load(source.clone()).unwrap();
        let mut policies = follower.policies();
        let count = |policies: &PoliciesReceiver| {
            policies
                .borrow()
                .as_ref()
                .map_or(0, |one| one.policies.len())
        };
        assert_eq!(count(&policies), 5);
        let cancel = CancellationToken::new();
        tokio::spawn(follower.run(None, cancel.clone()));
        std::fs::write(&path, "[[policies]]\nenabled = true\n").unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(count(&policies), 5);
        let other = objects::presets::find("node-not-ready").unwrap();
        std::fs::write(&path, other.text).unwrap();
        let changed =
            policies.wait_for(|now| now.as_ref().is_some_and(|now| now.policies.len() == 1));
        tokio::time::timeout(Duration::from_secs(60), changed)
            .await
            .unwrap()
            .unwrap();
        cancel.cancel();
        std::fs::write(&path, "policies = 1").unwrap();
        assert!(matches!(
            ObjectsFollower::load(source),
            Err(ObjectsError::Parse(_))
        ));
        let none = ObjectsSource::Place(TextPlace::File(dir.path().join("none")));
        assert!(matches!(
            ObjectsFollower::load(none),
            Err(ObjectsError::Read { .. })
        ));
    }
}
