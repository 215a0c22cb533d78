//! Names in a certificate. The certificate has been verified before; this module trusts it no
//! further.

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// Prefix of the common name of a node's certificate in Kubernetes, before the name of the
/// node.
const NODE: &str = "system:node:";

/// Names that a certificate is issued for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateNames {
    /// Common name of the subject.
    pub common_name: Option<String>,
    /// DNS names among the subject's alternative names.
    pub dns_names: Vec<String>,
}

// === impl CertificateNames ===

impl CertificateNames {
    /// Reads a certificate in DER form. One that cannot be parsed yields no names.
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

    /// Returns the node that the certificate identifies: the name after `system:node:` in the
    /// common name, the form of Kubernetes; otherwise its DNS name if it has exactly one.
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
