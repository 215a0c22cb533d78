//! TLS certificate that a role issues itself: created here, stored in a Secret that all replicas
//! share, and renewed before it expires.
//!
//! It is signed by an authority of our own, which clients learn from a [`Publication`]: API
//! servers from the webhook's registration, agents from the controller's `ConfigMap`. A new
//! certificate is served only after clients can trust its authority: the authority is first
//! stored in the Secret, then published, and then used.

mod pair;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ObjectKind, Selection, Signal};
use jiff::Timestamp;
use runtime::logging::{Trouble, chain};
use runtime::tls::{CertificateFiles, Validity};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use pair::{Pair, times};

/// Longest interval for checking the remaining lifetime.
const INTERVAL: Duration = Duration::from_secs(3600);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(2);

/// Error while maintaining the certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The Secret cannot be read or written.
    #[error("the Secret {secret} cannot be read or written")]
    Api {
        /// Name of the Secret.
        secret: &'static str,
        /// Error of the API server.
        source: ApiError,
    },
    /// A certificate cannot be created.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    /// The files for the server cannot be written.
    #[error("cannot write below {}", path.display())]
    Write {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

/// Secret, names and lifetime of certificates.
#[derive(Clone, Debug)]
pub struct CertificatePlan {
    /// Name of the Secret.
    pub secret: &'static str,
    /// Common name of the authority. A change of it in a new version of gpuwarden would make
    /// certificates that clients with the authority of an old one do not trust.
    pub authority: &'static str,
    /// DNS names or addresses that clients connect to.
    pub names: Vec<String>,
    /// Lifetime of a certificate. Its authority lives for 40 of them.
    pub lifetime: Duration,
    /// Name of a random HMAC key that the Secret holds beside the certificate; `None` for none.
    pub random_key: Option<&'static str>,
}

/// Place where clients find the authorities that they should trust.
pub trait Publication: Send + Sync + 'static {
    /// Time for clients to receive changed authorities after their publication.
    const PROPAGATION: Duration;

    /// Returns true if exactly these authorities are published.
    fn has(&self, authorities: &str) -> impl Future<Output = Result<bool, ApiError>> + Send;
}

/// Keeper of the certificate.
pub struct CertificateKeeper<P> {
    cluster: Arc<Cluster>,
    namespace: String,
    plan: CertificatePlan,
    publication: P,
    /// Directory of the served file.
    directory: tempfile::TempDir,
    pair: Pair,
    authorities: watch::Sender<String>,
}

// === impl CertificateKeeper ===

impl<P: Publication> CertificateKeeper<P> {
    /// Loads the certificate from the Secret or creates one, and writes it to a file for the
    /// server.
    pub async fn open(
        cluster: Arc<Cluster>,
        namespace: &str,
        plan: CertificatePlan,
        publication: P,
    ) -> Result<Self, CertificateError> {
        let directory = tempfile::tempdir().map_err(|source| CertificateError::Write {
            path: std::env::temp_dir(),
            source,
        })?;
        let pair = shared(&cluster, namespace, &plan, None).await?;
        let (authorities, _) = watch::channel(pair.authorities.clone());
        let keeper = Self {
            cluster,
            namespace: namespace.to_owned(),
            plan,
            publication,
            directory,
            pair,
            authorities,
        };
        keeper.write()?;
        Ok(keeper)
    }

    /// Returns the paths of certificate and key. Both are the same file, so that they always
    /// match.
    pub fn files(&self) -> CertificateFiles {
        CertificateFiles {
            certificate: self.file(),
            key: self.file(),
        }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("tls.pem")
    }

    /// Returns the random key of the plan, in base64; empty if it names none.
    pub fn random_key(&self) -> String {
        self.pair.random_key.clone()
    }

    /// Returns the authorities that clients should trust, with later changes.
    pub fn authorities(&self) -> watch::Receiver<String> {
        self.authorities.subscribe()
    }

    /// Maintains the certificate until `cancel`: watches the Secret, and renews in time.
    pub async fn run(mut self, cancel: CancellationToken) {
        let secret = Selection::of_kind(&secrets(), Some(&self.namespace));
        let secret = secret.named(self.plan.secret);
        let mut changes = self.cluster.watch::<Value>(secret, cancel.clone());
        let keep = async {
            let mut trouble = Trouble::default();
            loop {
                let looked = self.look().await;
                let pause = match &looked {
                    Ok(()) => self.pause(),
                    Err(_) => RETRY,
                };
                trouble.note(looked.map_err(|error| chain(&error)));
                // Any change of the Secret needs a check.
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = until_changed(&mut changes) => {}
                }
            }
        };
        cancel.run_until_cancelled(keep).await;
    }

    /// Loads the certificate from the Secret, or stores one there if needed.
    async fn look(&mut self) -> Result<(), CertificateError> {
        let before = Some(&self.pair);
        let pair = shared(&self.cluster, &self.namespace, &self.plan, before).await?;
        let is_new = pair.certificate != self.pair.certificate;
        let served = Validity::of_pem(&self.pair.certificate).map(|validity| validity.until);
        let has_new_authority = pair.authorities != self.pair.authorities;
        self.pair = pair;
        if has_new_authority {
            self.authorities.send_replace(self.pair.authorities.clone());
            self.until_trusted(served).await;
        }
        if is_new {
            self.write()?;
        }
        Ok(())
    }

    /// Waits until our authorities are published and clients have received them, but no longer
    /// than the served certificate is valid.
    async fn until_trusted(&self, served_until: Option<Timestamp>) {
        let left = || {
            let left = served_until?.duration_since(Timestamp::now());
            Duration::try_from(left).ok().filter(|left| !left.is_zero())
        };
        while let Some(left) = left() {
            match self.publication.has(&self.pair.authorities).await {
                Ok(true) => return tokio::time::sleep(P::PROPAGATION.min(left)).await,
                Ok(false) => {}
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, "cannot check whether the new authority is published");
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Returns the time until the next check.
    fn pause(&self) -> Duration {
        let left = times(&self.pair.certificate).map(|(_, renew_at)| renew_at);
        let left = left.map(|at| at.duration_since(Timestamp::now()));
        let left = left.and_then(|left| Duration::try_from(left).ok());
        left.unwrap_or(RETRY)
            .clamp(Duration::from_secs(1), INTERVAL)
    }

    /// Replaces the file atomically. Its directory is private.
    fn write(&self) -> Result<(), CertificateError> {
        let (file, text) = (self.file(), self.pair.certificate.clone() + &self.pair.key);
        let new = file.with_extension("new");
        let wrote = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &file));
        wrote.map_err(|source| CertificateError::Write {
            path: self.directory.path().to_owned(),
            source,
        })
    }
}

/// Waits for a change of the Secret.
async fn until_changed(changes: &mut tokio::sync::mpsc::Receiver<Signal<Value>>) {
    loop {
        match changes.recv().await {
            Some(Signal::Applied(_) | Signal::Deleted(_)) => return,
            Some(_) => {}
            // The watch ends with the process.
            None => std::future::pending().await,
        }
    }
}

/// Returns the certificate in the Secret if it is valid for long enough. Otherwise stores one:
/// `ours` if it is still good, or a new one. If several replicas do so, the first one wins.
async fn shared(
    cluster: &Cluster,
    namespace: &str,
    plan: &CertificatePlan,
    ours: Option<&Pair>,
) -> Result<Pair, CertificateError> {
    let (kind, name) = (secrets(), plan.secret);
    let failed = |source| CertificateError::Api {
        secret: name,
        source,
    };
    loop {
        let secret = cluster.object(&kind, Some(namespace), name).await;
        let secret = secret.map_err(failed)?;
        let there = secret.as_ref().and_then(|secret| Pair::of(secret, plan));
        let now = Timestamp::now();
        if let Some(there) = there.as_ref().filter(|there| there.is_good(plan, now)) {
            return Ok(there.clone());
        }
        let next = match ours.filter(|ours| there.is_none() && ours.is_good(plan, now)) {
            Some(ours) => ours.clone(),
            None => Pair::next(there.as_ref().or(ours), plan, now)?,
        };
        let (version, written) = match &secret {
            None => {
                let object = next.secret(plan, namespace, None);
                (
                    "",
                    cluster.create_object(&kind, Some(namespace), &object).await,
                )
            }
            Some(secret) => {
                let version = secret.pointer("/metadata/resourceVersion");
                let version = version.and_then(Value::as_str).unwrap_or_default();
                let object = next.secret(plan, namespace, Some(version));
                let replaced = cluster.replace_object(&kind, Some(namespace), name, &object);
                (version, replaced.await)
            }
        };
        match written {
            Ok(secret) => {
                tracing::info!(names = ?plan.names, before = version, "a new certificate is made");
                return Ok(Pair::of(&secret, plan).unwrap_or(next));
            }
            // Another replica stored one first.
            Err(ApiError::Conflict { .. }) => tokio::time::sleep(RETRY / 10).await,
            Err(error) => return Err(failed(error)),
        }
    }
}

/// Returns the validity of the certificate in a Secret; `None` if it holds none.
pub fn validity(secret: &Value) -> Option<Validity> {
    Validity::of_pem(&pair::text(secret, pair::CERTIFICATE)?)
}

fn secrets() -> ObjectKind {
    ObjectKind::new("", "v1", "secrets")
}
