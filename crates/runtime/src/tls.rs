//! TLS with certificates from files, which may be rotated while the process runs.
//!
//! The files are checked for changes at each connection, and read again if they have changed.
//! Files that cannot be used (a half-written pair) leave the last good configuration in use,
//! with a line in the log. Open connections are not affected.

mod expiry;
mod names;
mod trust;
mod validity;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

pub(crate) use expiry::described;
pub use expiry::register;
pub use names::CertificateNames;
pub use validity::Validity;

use crate::file_stamp::FileStamp;
use crate::logging::{Seldom, chain};

/// Protocol name of HTTP/2, the only one that gRPC speaks.
const ALPN: &[u8] = b"h2";
/// Largest file of certificates or of a key (bytes).
const MAX_FILE: u64 = 1024 * 1024;

/// Files of a certificate with its chain, and of its private key; both in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Path of the certificate chain.
    pub certificate: PathBuf,
    /// Path of the private key.
    pub key: PathBuf,
}

/// Reason why files cannot be used for TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A file is too large to be what it should be.
    #[error("{} has {size} bytes, at most {MAX_FILE} are read", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file (bytes).
        size: u64,
    },
    /// A file does not hold what it should.
    #[error("{} holds no {what} in PEM form", path.display())]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// Kind of the missing item.
        what: &'static str,
    },
    /// A file holds an item that cannot be parsed.
    #[error("{} holds a damaged {what}", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Kind of the damaged item.
        what: &'static str,
    },
    /// The files do not fit together.
    #[error("the certificate {} cannot be used with the key {}", certificate.display(), key.display())]
    Pair {
        /// Path of the certificate.
        certificate: PathBuf,
        /// Path of the private key.
        key: PathBuf,
        /// Error of the cryptography library.
        #[source]
        source: rustls::Error,
    },
    /// The certificates of an authority cannot be used.
    #[error("the certificate authority {} cannot be used: {what}", path.display())]
    Authority {
        /// Path of the authority's certificates.
        path: PathBuf,
        /// Description of the problem.
        what: String,
    },
    /// The system has no certificates of authorities.
    #[error(
        "this system has no certificates of authorities: install its package ca-certificates, or name a file \
         in SSL_CERT_FILE"
    )]
    NoAuthorities,
    /// The cryptography library lacks what TLS needs: a bug in this program.
    #[error("TLS cannot be set up")]
    Internal(#[source] rustls::Error),
}

/// TLS for the accepting side.
pub type ServerTls = FilesTls<ServerConfig>;

/// TLS for the connecting side.
pub type ClientTls = FilesTls<ClientConfig>;

/// Policy of a server about certificates of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Asks for no certificate.
    None,
    /// Verifies a certificate by this authority if the client shows one.
    Optional(PathBuf),
    /// Requires a certificate by this authority.
    Required(PathBuf),
}

/// Configuration made from files, and made anew when they change.
pub struct FilesTls<T> {
    files: Vec<PathBuf>,
    make: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    in_use: Mutex<InUse<T>>,
    failed: Seldom,
}

/// Last configuration that could be made.
struct InUse<T> {
    config: Arc<T>,
    /// Stamps of the files that `config` was made from.
    seen: Vec<Option<FileStamp>>,
}

// === impl FilesTls ===

impl FilesTls<ServerConfig> {
    /// Reads the files. Fails if they cannot be used now.
    pub fn load(own: CertificateFiles, clients: ClientCertificates) -> Result<Self, TlsError> {
        let mut files = vec![own.certificate.clone(), own.key.clone()];
        files.extend(clients.authority().map(|(path, _)| path.to_owned()));
        Self::new(files, Box::new(move || server_config(&own, &clients)))
    }
}

impl FilesTls<ClientConfig> {
    /// Reads the files. Fails if they cannot be used now. `authority` holds the certificates
    /// that a server must be signed by; `own` is shown to a server that asks for a certificate.
    pub fn load(authority: PathBuf, own: Option<CertificateFiles>) -> Result<Self, TlsError> {
        let mut files = vec![authority.clone()];
        if let Some(own) = &own {
            files.extend([own.certificate.clone(), own.key.clone()]);
        }
        let make = move || client_config(&authority, own.as_ref());
        Self::new(files, Box::new(make))
    }
}

impl<T> FilesTls<T> {
    fn new(
        files: Vec<PathBuf>,
        make: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    ) -> Result<Self, TlsError> {
        // Taken before the files are read, so that a change in between is found the next time.
        let seen = stamps(&files);
        let config = Arc::new(make()?);
        Ok(Self {
            files,
            make,
            in_use: Mutex::new(InUse { config, seen }),
            failed: Seldom::default(),
        })
    }

    /// Returns the configuration for a new connection.
    pub fn config(&self) -> Arc<T> {
        let stamps = stamps(&self.files);
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if stamps != in_use.seen {
            match (self.make)() {
                Ok(new) => {
                    tracing::info!(file = %self.first(), "new certificates are in use");
                    in_use.config = Arc::new(new);
                    in_use.seen = stamps;
                }
                // Read again for the next connection, since the failure may have been one of
                // reading.
                Err(error) => {
                    if let Some(not_logged_before) = self.failed.now() {
                        tracing::error!(
                            err = chain(&error),
                            not_logged_before,
                            "changed certificates cannot be used; the last good ones stay in use"
                        );
                    }
                }
            }
        }
        Arc::clone(&in_use.config)
    }

    fn first(&self) -> std::path::Display<'_> {
        self.files
            .first()
            .map_or(Path::new(""), PathBuf::as_path)
            .display()
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Option<FileStamp>> {
    let stamp = |path: &PathBuf| Some(FileStamp::of(&fs::metadata(path).ok()?));
    files.iter().map(stamp).collect()
}

fn server_config(
    own: &CertificateFiles,
    clients: &ClientCertificates,
) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Internal)?;
    let builder = match clients.authority() {
        None => builder.with_no_client_auth(),
        Some((path, required)) => {
            let roots = Arc::new(roots(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = if required {
                verifier
            } else {
                verifier.allow_unauthenticated()
            };
            let verifier = verifier.build().map_err(|error| TlsError::Authority {
                path: path.to_owned(),
                what: error.to_string(),
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let (chain, key) = read_pair(own)?;
    let config = builder.with_single_cert(chain, key);
    let mut config = config.map_err(|source| own.misfit(source))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn client_config(
    authority: &Path,
    own: Option<&CertificateFiles>,
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Internal)?
        .with_root_certificates(roots(authority)?);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let (chain, key) = read_pair(own)?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|source| own.misfit(source))?
        }
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// Returns the cryptography provider. Only this function names it.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        let added = roots.add(certificate);
        added.map_err(|error| TlsError::Authority {
            path: path.to_owned(),
            what: error.to_string(),
        })?;
    }
    Ok(roots)
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn read_pair(files: &CertificateFiles) -> Result<Pair, TlsError> {
    let chain = read_certificates(&files.certificate)?;
    expiry::add(&files.certificate);
    let what = "private key";
    let text = read(&files.key)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => TlsError::Missing {
            path: files.key.clone(),
            what,
        },
        _ => TlsError::Damaged {
            path: files.key.clone(),
            what,
        },
    })?;
    Ok((chain, key))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let what = "certificate";
    let text = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|_| TlsError::Damaged {
        path: path.to_owned(),
        what,
    })?;
    if found.is_empty() {
        return Err(TlsError::Missing {
            path: path.to_owned(),
            what,
        });
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read {
        path: path.to_owned(),
        source,
    };
    let size = fs::metadata(path).map_err(failed)?.len();
    if size > MAX_FILE {
        return Err(TlsError::TooLarge {
            path: path.to_owned(),
            size,
        });
    }
    fs::read(path).map_err(failed)
}

// === impl ClientCertificates ===

impl ClientCertificates {
    /// Returns the file of the authority, and whether a certificate is required.
    fn authority(&self) -> Option<(&Path, bool)> {
        match self {
            Self::None => None,
            Self::Optional(path) => Some((path, false)),
            Self::Required(path) => Some((path, true)),
        }
    }
}

// === impl CertificateFiles ===

impl CertificateFiles {
    fn misfit(&self, source: rustls::Error) -> TlsError {
        TlsError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests;
