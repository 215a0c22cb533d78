//! TLS certificate of the webhook: created here, stored in a Secret that all replicas share,
//! and renewed before it expires.
//!
//! It is signed by an authority of our own, which API servers learn from the registration
//! ([`crate::registration`]). A new certificate is served only after API servers can trust its
//! authority: the authority is first stored in the Secret, then registered, and then used.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cluster::{ApiError, Cluster, ObjectKind, Selection, Signal};
use contract::keys;
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use runtime::logging::{Trouble, chain};
use runtime::tls::{CertificateFiles, Validity};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::registration;

/// Name of the Secret.
pub const SECRET: &str = "gpuwarden-webhook-tls";
/// Default lifetime of a certificate.
pub const LIFETIME: Duration = Duration::from_secs(90 * 24 * 3600);
/// Lifetime of an authority, in certificate lifetimes.
const AUTHORITY_LIVES: i32 = 40;
/// A certificate or authority is renewed when less than this part (one third) of its lifetime
/// is left.
const RENEW_AT: i32 = 3;
/// Allowed lag of the API servers' clocks.
const CLOCKS: SignedDuration = SignedDuration::from_hours(1);
/// Time for API servers to receive a changed registration before its authority is relied on.
const PROPAGATION: Duration = Duration::from_secs(5);
/// Longest interval for checking the remaining lifetime.
const INTERVAL: Duration = Duration::from_secs(3600);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// Registered authorities: the current and the previous one.
const AUTHORITIES: usize = 2;

const AUTHORITY: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const GANG_KEY: &str = "gang.key";
/// Length of the HMAC key for the secrets of gangs, in bytes.
const GANG_KEY_BYTES: usize = 32;
/// Annotation of the Secret with the names of the certificate, separated by commas.
const NAMES: &str = "gpuwarden.dev/certificate-names";
const END: &str = "-----END CERTIFICATE-----";

/// Error while maintaining the certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The Secret cannot be read or written.
    #[error("the Secret {SECRET} cannot be read or written")]
    Api(#[from] ApiError),
    /// A certificate cannot be created.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    /// The files for the server cannot be written.
    #[error("cannot write below {}", path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Certificates and keys in PEM form.
#[derive(Clone, PartialEq, Eq)]
struct Pair {
    /// The current authority, followed by the previous one.
    authorities: String,
    authority_key: String,
    certificate: String,
    key: String,
    /// Names of the certificate.
    names: BTreeSet<String>,
    /// HMAC key for the secrets of gangs, in base64.
    gang_key: String,
}

/// Names and lifetime of certificates.
#[derive(Clone, Debug)]
pub struct CertificatePlan {
    /// DNS names or addresses that API servers connect to.
    pub names: Vec<String>,
    /// Lifetime of a certificate.
    pub lifetime: Duration,
}

/// Keeper of the certificate.
pub struct CertificateKeeper {
    cluster: Arc<Cluster>,
    namespace: String,
    plan: CertificatePlan,
    /// Directory of the served file.
    directory: tempfile::TempDir,
    pair: Pair,
    authorities: watch::Sender<String>,
}

// === impl CertificateKeeper ===

impl CertificateKeeper {
    /// Loads the certificate from the Secret or creates one, and writes it to a file for the
    /// server.
    pub async fn open(
        cluster: Arc<Cluster>,
        namespace: &str,
        plan: CertificatePlan,
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

    /// Returns the HMAC key for the secrets of gangs.
    pub fn gang_key(&self) -> String {
        self.pair.gang_key.clone()
    }

    /// Returns the authorities that API servers should trust, with later changes.
    pub fn authorities(&self) -> watch::Receiver<String> {
        self.authorities.subscribe()
    }

    /// Maintains the certificate until `cancel`: watches the Secret, and renews in time.
    pub async fn run(mut self, cancel: CancellationToken) {
        let secret = Selection::of_kind(&secrets(), Some(&self.namespace)).named(SECRET);
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
            self.until_registered(served).await;
        }
        if is_new {
            self.write()?;
        }
        Ok(())
    }

    /// Waits until the registration contains our authorities and API servers have received it,
    /// but no longer than the served certificate is valid.
    async fn until_registered(&self, served_until: Option<Timestamp>) {
        while served_until.is_some_and(|until| Timestamp::now() < until) {
            match registration::has(&self.cluster, &self.pair.authorities).await {
                Ok(true) => return tokio::time::sleep(PROPAGATION).await,
                Ok(false) => {}
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(
                        error,
                        "cannot check whether the new authority is registered"
                    );
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
    let kind = secrets();
    loop {
        let secret = cluster.object(&kind, Some(namespace), SECRET).await?;
        let there = secret.as_ref().and_then(Pair::of);
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
                let object = next.secret(namespace, None);
                (
                    "",
                    cluster.create_object(&kind, Some(namespace), &object).await,
                )
            }
            Some(secret) => {
                let version = secret.pointer("/metadata/resourceVersion");
                let version = version.and_then(Value::as_str).unwrap_or_default();
                let object = next.secret(namespace, Some(version));
                let replaced = cluster.replace_object(&kind, Some(namespace), SECRET, &object);
                (version, replaced.await)
            }
        };
        match written {
            Ok(secret) => {
                tracing::info!(names = ?plan.names, before = version, "a new certificate is made");
                return Ok(Pair::of(&secret).unwrap_or(next));
            }
            // Another replica stored one first.
            Err(ApiError::Conflict { .. }) => tokio::time::sleep(RETRY / 10).await,
            Err(error) => return Err(error.into()),
        }
    }
}

fn secrets() -> ObjectKind {
    ObjectKind::new("", "v1", "secrets")
}

// === impl Pair ===

impl Pair {
    fn of(secret: &Value) -> Option<Self> {
        let text = |key: &str| {
            let data = secret.get("data")?.get(key)?.as_str()?;
            String::from_utf8(BASE64_STANDARD.decode(data).ok()?).ok()
        };
        let names = secret
            .pointer("/metadata/annotations")?
            .get(NAMES)?
            .as_str()?;
        Some(Self {
            authorities: text(AUTHORITY)?,
            authority_key: text(AUTHORITY_KEY)?,
            certificate: text(CERTIFICATE)?,
            key: text(KEY)?,
            // A Secret of an older version lacks this key, but its authority is usable.
            gang_key: text(GANG_KEY).unwrap_or_default(),
            names: names.split(',').map(str::to_owned).collect(),
        })
    }

    fn secret(&self, namespace: &str, version: Option<&str>) -> Value {
        let data = [
            (AUTHORITY, &self.authorities),
            (AUTHORITY_KEY, &self.authority_key),
            (CERTIFICATE, &self.certificate),
            (KEY, &self.key),
            (GANG_KEY, &self.gang_key),
        ];
        let data = data.map(|(key, text)| (key, BASE64_STANDARD.encode(text)));
        let data: BTreeMap<_, _> = data.into();
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": SECRET,
                "namespace": namespace,
                "resourceVersion": version,
                "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY},
                "annotations": {NAMES: names.join(",")},
            },
            "data": data,
        })
    }

    /// Returns true if certificate and authority have enough time left, and all planned names
    /// are included.
    fn is_good(&self, plan: &CertificatePlan, now: Timestamp) -> bool {
        let has_time =
            |pem: &str| times(pem).is_some_and(|(from, renew_at)| from <= now && now < renew_at);
        let is_whole = !self.gang_key.is_empty() && self.is_for(plan);
        is_whole && has_time(&self.authorities) && has_time(&self.certificate)
    }

    fn is_for(&self, plan: &CertificatePlan) -> bool {
        plan.names.iter().all(|name| self.names.contains(name))
    }

    /// Creates the next certificate, with the authority of `before` if it is still good.
    fn next(
        before: Option<&Self>,
        plan: &CertificatePlan,
        now: Timestamp,
    ) -> Result<Self, rcgen::Error> {
        let lifetime = SignedDuration::try_from(plan.lifetime).unwrap_or(SignedDuration::MAX);
        let good = |pem: &str| times(pem).is_some_and(|(_, renew_at)| now < renew_at);
        let known = before.filter(|before| good(&before.authorities));
        let known = known.and_then(|before| {
            let key = KeyPair::from_pem(&before.authority_key).ok()?;
            Some((key, before.authorities.clone()))
        });
        let params = authority_params(now, lifetime.saturating_mul(AUTHORITY_LIVES));
        let (authority_key, authorities) = if let Some(known) = known {
            known
        } else {
            let key = KeyPair::generate()?;
            let new = params.self_signed(&key)?.pem();
            let older = before.map(|before| before.authorities.as_str());
            (key, bundle(&new, older.unwrap_or_default()))
        };
        let authority_pem = authority_key.serialize_pem();
        let issuer = Issuer::new(params, authority_key);
        let key = KeyPair::generate()?;
        // Keep the names of other replicas.
        let names = before.map(|before| before.names.clone());
        let mut names = names.unwrap_or_default();
        names.extend(plan.names.iter().cloned());
        let certificate = server_params(&names, now, lifetime)?.signed_by(&key, &issuer)?;
        Ok(Self {
            authorities,
            authority_key: authority_pem,
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            names,
            gang_key: match before.filter(|before| !before.gang_key.is_empty()) {
                Some(before) => before.gang_key.clone(),
                None => random_key()?,
            },
        })
    }
}

/// Returns a random key.
fn random_key() -> Result<String, rcgen::Error> {
    let mut bytes = [0; GANG_KEY_BYTES];
    let filled = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
    filled.map_err(|_| rcgen::Error::RingUnspecified)?;
    Ok(BASE64_STANDARD.encode(bytes))
}

fn authority_params(now: Timestamp, lifetime: SignedDuration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let name = "gpuwarden preflight webhook";
    params.distinguished_name.push(DnType::CommonName, name);
    set_times(&mut params, now, lifetime);
    params
}

fn server_params(
    names: &BTreeSet<String>,
    now: Timestamp,
    lifetime: SignedDuration,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.iter().cloned().collect::<Vec<_>>())?;
    let name = names.first().map_or("webhook", String::as_str);
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    set_times(&mut params, now, lifetime);
    Ok(params)
}

fn set_times(params: &mut CertificateParams, now: Timestamp, lifetime: SignedDuration) {
    let system = |at: Timestamp| std::time::SystemTime::from(at).into();
    let until = now.saturating_add(lifetime).unwrap_or(Timestamp::MAX);
    params.not_before = system(now.saturating_sub(CLOCKS).unwrap_or(Timestamp::MIN));
    params.not_after = system(until);
}

/// Returns when a certificate becomes valid, and when to renew it.
fn times(pem: &str) -> Option<(Timestamp, Timestamp)> {
    let validity = Validity::of_pem(pem)?;
    // The start was set back by the allowed clock lag.
    let whole = validity.whole().saturating_sub(CLOCKS);
    let renew_at = validity.until.checked_sub(whole / RENEW_AT).ok()?;
    Some((validity.from, renew_at))
}

/// Returns a new authority, followed by the latest of the previous ones.
fn bundle(new: &str, before: &str) -> String {
    let older = before.split_inclusive(END).filter(|one| one.contains(END));
    let older = older.take(AUTHORITIES - 1).map(str::trim);
    let mut all = vec![new.trim()];
    all.extend(older);
    all.join("\n") + "\n"
}

#[cfg(test)]
mod tests;
