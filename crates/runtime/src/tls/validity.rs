//! Validity period of a certificate.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_cert::Certificate;
use x509_cert::der::Decode;

use super::{TlsError, read_certificates};

/// Period during which a certificate may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// First moment of the period.
    pub from: Timestamp,
    /// Last moment of the period.
    pub until: Timestamp,
}

// === impl Validity ===

impl Validity {
    /// Returns the validity of the first certificate in a file, which is the owner's; those of
    /// its authorities follow.
    pub fn read(path: &Path) -> Result<Self, TlsError> {
        let certificates = read_certificates(path)?;
        let first = certificates.first();
        first
            .and_then(|der| Self::of(der))
            .ok_or_else(|| TlsError::Damaged {
                path: path.to_owned(),
                what: "certificate",
            })
    }

    /// Returns the validity of the first certificate in a text; `None` if there is none.
    pub fn of_pem(text: &str) -> Option<Self> {
        let first = CertificateDer::pem_slice_iter(text.as_bytes()).next()?;
        Self::of(&first.ok()?)
    }

    fn of(der: &[u8]) -> Option<Self> {
        let certificate = Certificate::from_der(der).ok()?;
        let validity = certificate.tbs_certificate().validity();
        let time = |since_epoch: Duration| {
            let seconds = i64::try_from(since_epoch.as_secs()).ok()?;
            // X.509 allows years beyond the range of `Timestamp`: the period then ends with
            // that range.
            Some(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
        };
        Some(Self {
            from: time(validity.not_before.to_unix_duration())?,
            until: time(validity.not_after.to_unix_duration())?,
        })
    }

    /// Returns the length of the period.
    pub fn whole(&self) -> SignedDuration {
        self.until.duration_since(self.from)
    }
}
