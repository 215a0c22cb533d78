//! Whom a certificate names. It has been verified before; nothing here trusts it more.

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// Common name of a node's certificate in Kubernetes, before the node's name.
const NODE: &str = "system:node:";

/// The names in a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateNames {
    /// Common name of the subject.
    pub common_name: Option<String>,
    /// DNS names.
    pub dns_names: Vec<String>,
}

// === impl CertificateNames ===

impl CertificateNames {
    /// Reads a certificate in DER form; one that cannot be read names nobody.
    pub fn read(der: &[u8]) -> Self {
        let Ok(certificate) = Certificate::from_der(der) else {
            return Self::default();
        };
        let certificate = certificate.tbs_certificate();
        let names = certificate.get_extension::<SubjectAltName>();
        let dns_names = match names {
            Ok(Some((_, SubjectAltName(names)))) => names
                .into_iter()
                .filter_map(|name| match name {
                    GeneralName::DnsName(name) => Some(name.to_string()),
                    _ => None,
                })
                .collect(),
            _ => Vec::new(),
        };
        let common_name = certificate.subject().common_name();
        Self {
            common_name: common_name.ok().flatten().map(String::from),
            dns_names,
        }
    }

    /// Returns the node that the certificate speaks for: the one after `system:node:` in the common
    /// name, the form of Kubernetes; else its DNS name, where it has exactly one.
    pub fn node(&self) -> Option<&str> {
        let common = self.common_name.as_deref();
        let named = common.and_then(|name| name.strip_prefix(NODE));
        let named = named.or(match self.dns_names.as_slice() {
            [only] => Some(only.as_str()),
            _ => None,
        });
        named.filter(|name| !name.is_empty())
    }
}
