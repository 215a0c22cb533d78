//! RSA keys that sign requests and tokens: SHA-256 with PKCS #1 v1.5, as GCP and OCI take it.

mod generate;

use std::fmt;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ring::rand::SystemRandom;
use ring::rsa::KeyPair;
use ring::signature::RSA_PKCS1_SHA256;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

use crate::http::Failure;

pub(crate) use generate::Generated;

/// A private key. Its debug form shows nothing of it.
pub(crate) struct RsaKey {
    pair: KeyPair,
}

// === impl RsaKey ===

impl RsaKey {
    /// Parses a key in PEM form: PKCS #8 or PKCS #1, not encrypted, of 2048 to 4096 bits. `place`
    /// names the key in failures.
    pub(crate) fn from_pem(pem: &str, place: &str) -> Result<Self, Failure> {
        if pem.contains("ENCRYPTED") {
            let what = "is encrypted: only keys without a passphrase can be read";
            return Err(Failure::new(format!("{place} {what}")));
        }
        let der = PrivateKeyDer::from_pem_slice(pem.as_bytes());
        let der =
            der.map_err(|_| Failure::new(format!("{place} is no private key in PEM form")))?;
        let pair = match &der {
            PrivateKeyDer::Pkcs8(der) => KeyPair::from_pkcs8(der.secret_pkcs8_der()),
            PrivateKeyDer::Pkcs1(der) => KeyPair::from_der(der.secret_pkcs1_der()),
            _ => return Err(Failure::new(format!("{place} is no RSA key"))),
        };
        let pair = pair.map_err(|error| {
            Failure::new(format!("{place} is no RSA key that can sign: {error}"))
        })?;
        Ok(Self { pair })
    }

    /// Signs a message.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Failure> {
        let mut signature = vec![0; self.pair.public().modulus_len()];
        let random = SystemRandom::new();
        let signed = (self.pair).sign(&RSA_PKCS1_SHA256, &random, message, &mut signature);
        signed.map_err(|_| Failure::new("the system has no random numbers to sign with"))?;
        Ok(signature)
    }

    /// Signs a message, and returns the signature in base64.
    pub(crate) fn sign_base64(&self, message: &[u8]) -> Result<String, Failure> {
        Ok(BASE64_STANDARD.encode(self.sign(message)?))
    }
}

impl fmt::Debug for RsaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RsaKey").finish_non_exhaustive()
    }
}

/// Returns a new private key as a file has it: PKCS #8 in PEM.
#[cfg(any(test, feature = "test-util"))]
pub(crate) fn new_pem() -> Result<String, Failure> {
    Ok(generate::Encoded::new()?.pem())
}

#[cfg(test)]
pub(crate) mod tests;
