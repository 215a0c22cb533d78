//! A certificate authority for tests, and the certificates that it signs.

use std::{fs, path::Path, time::SystemTime};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A certificate authority with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its key, in PEM form.
pub struct Certificate {
    /// Certificate in PEM form.
    pub certificate: String,
    /// Private key in PEM form.
    pub key: String,
}

/// Extended key usage of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The holder accepts connections.
    Server,
    /// The holder opens connections.
    Client,
}

// === impl Authority ===

impl Authority {
    /// Creates an authority with a new key.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        Self::valid(name, None)
    }

    /// Creates an authority with a new key, valid from the first to the second time.
    pub fn valid(name: &str, times: Option<(SystemTime, SystemTime)>) -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        if let Some((from, until)) = times {
            (params.not_before, params.not_after) = (from.into(), until.into());
        }
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        let issuer = Issuer::new(params, key);
        Ok(Self { issuer, pem })
    }

    /// Returns the authority's private key in PEM form.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Returns the authority's certificate in PEM form.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Returns a certificate with this common name, and these DNS names or addresses.
    pub fn sign(
        &self,
        purpose: Purpose,
        common_name: &str,
        names: &[&str],
    ) -> anyhow::Result<Certificate> {
        self.sign_valid(purpose, common_name, names, None)
    }

    /// Returns a certificate that is valid from the first to the second time.
    pub fn sign_valid(
        &self,
        purpose: Purpose,
        common_name: &str,
        names: &[&str],
        times: Option<(SystemTime, SystemTime)>,
    ) -> anyhow::Result<Certificate> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names)?;
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match purpose {
            Purpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Purpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        if let Some((from, until)) = times {
            (params.not_before, params.not_after) = (from.into(), until.into());
        }
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Certificate {
            certificate,
            key: key.serialize_pem(),
        })
    }
}

// === impl Certificate ===

impl Certificate {
    /// Writes `NAME.crt` and `NAME.key` into a directory. Each file is replaced atomically, as
    /// in a certificate rotation.
    pub fn write(&self, directory: &Path, name: &str) -> anyhow::Result<()> {
        for (end, text) in [("crt", &self.certificate), ("key", &self.key)] {
            let path = directory.join(format!("{name}.{end}"));
            let new = directory.join(format!("{name}.{end}.new"));
            fs::write(&new, text).with_context(|| format!("write {}", new.display()))?;
            fs::rename(&new, &path)?;
        }
        Ok(())
    }
}
