//! Authority, certificate and keys, as the Secret holds them, and how the next ones are made.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use contract::keys;
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use runtime::tls::Validity;
use serde_json::{Value, json};

use crate::CertificatePlan;

/// Lifetime of an authority, in certificate lifetimes.
const AUTHORITY_LIVES: i32 = 40;
/// A certificate or authority is renewed when less than this part (one third) of its lifetime
/// is left.
const RENEW_AT: i32 = 3;
/// Allowed lag of the clients' clocks.
const CLOCKS: SignedDuration = SignedDuration::from_hours(1);
/// Published authorities: the current and the previous one.
const AUTHORITIES: usize = 2;

const AUTHORITY: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
pub(super) const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// Length of a random key, in bytes.
const RANDOM_KEY_BYTES: usize = 32;
/// Annotation of the Secret with the names of the certificate, separated by commas.
const NAMES: &str = "gpuwarden.dev/certificate-names";
const END: &str = "-----END CERTIFICATE-----";

/// Certificates and keys in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Pair {
    /// The current authority, followed by the previous one.
    pub(super) authorities: String,
    authority_key: String,
    pub(super) certificate: String,
    pub(super) key: String,
    /// Names of the certificate.
    names: BTreeSet<String>,
    /// Random key of the plan, in base64; empty if the plan names none.
    pub(super) random_key: String,
}

// === impl Pair ===

impl Pair {
    /// Reads the Secret; `None` if a part of it is missing or damaged.
    pub(super) fn of(secret: &Value, plan: &CertificatePlan) -> Option<Self> {
        let text = |key: &str| text(secret, key);
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
            random_key: plan.random_key.and_then(text).unwrap_or_default(),
            names: names.split(',').map(str::to_owned).collect(),
        })
    }

    /// Returns the Secret, to create or with `version` to replace it.
    pub(super) fn secret(
        &self,
        plan: &CertificatePlan,
        namespace: &str,
        version: Option<&str>,
    ) -> Value {
        let mut data = vec![
            (AUTHORITY, &self.authorities),
            (AUTHORITY_KEY, &self.authority_key),
            (CERTIFICATE, &self.certificate),
            (KEY, &self.key),
        ];
        data.extend(plan.random_key.map(|name| (name, &self.random_key)));
        let data = data.iter();
        let data: BTreeMap<_, _> = data
            .map(|(key, text)| (key, BASE64_STANDARD.encode(text)))
            .collect();
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": plan.secret,
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
    pub(super) fn is_good(&self, plan: &CertificatePlan, now: Timestamp) -> bool {
        let has_time =
            |pem: &str| times(pem).is_some_and(|(from, renew_at)| from <= now && now < renew_at);
        let is_whole = plan.random_key.is_none() || !self.random_key.is_empty();
        let is_whole = is_whole && self.is_for(plan);
        is_whole && has_time(&self.authorities) && has_time(&self.certificate)
    }

    fn is_for(&self, plan: &CertificatePlan) -> bool {
        plan.names.iter().all(|name| self.names.contains(name))
    }

    /// Creates the next certificate, with the authority of `before` if it is still good.
    pub(super) fn next(
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
        let params = authority_params(
            plan.authority,
            now,
            lifetime.saturating_mul(AUTHORITY_LIVES),
        );
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
            random_key: match before.map(|before| &before.random_key) {
                Some(key) if !key.is_empty() => key.clone(),
                _ if plan.random_key.is_some() => random_key()?,
                _ => String::new(),
            },
        })
    }
}

/// Returns a value of a Secret.
pub(super) fn text(secret: &Value, key: &str) -> Option<String> {
    let data = secret.get("data")?.get(key)?.as_str()?;
    String::from_utf8(BASE64_STANDARD.decode(data).ok()?).ok()
}

/// Returns a random key.
fn random_key() -> Result<String, rcgen::Error> {
    let mut bytes = [0; RANDOM_KEY_BYTES];
    let filled = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
    filled.map_err(|_| rcgen::Error::RingUnspecified)?;
    Ok(BASE64_STANDARD.encode(bytes))
}

fn authority_params(name: &str, now: Timestamp, lifetime: SignedDuration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
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
    let name = names.first().map_or("gpuwarden", String::as_str);
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
pub(super) fn times(pem: &str) -> Option<(Timestamp, Timestamp)> {
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
