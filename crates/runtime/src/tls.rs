//! TLS from files that may change: certificates are rotated while we run.
//!
//! The files are looked at when a connection is made; where they have changed they are
//! read again, and what cannot be used (a pair that is half written) leaves the last good
//! one in force, with a line in the log. Connections that are open go on as they are.

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

pub use names::CertificateNames;
pub use validity::Validity;

use crate::file_stamp::FileStamp;
use crate::logging::{Seldom, chain};

/// gRPC speaks HTTP/2 and nothing else.
const ALPN: &[u8] = b"h2";
/// A file of certificates or a key is smaller (bytes).
const MAX_FILE: u64 = 1024 * 1024;

/// A certificate, with those that lead to its authority, and its key; both in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificates.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// The reason why files are of no use for TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// A file is too large to be what it should be.
    #[error("{} has {size} bytes, at most {MAX_FILE} are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// A file does not hold what it should.
    #[error("{} holds no {what} in PEM form", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The thing that was looked for.
        what: &'static str,
    },
    /// A file holds something that cannot be read.
    #[error("{} holds a damaged {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The thing that was looked for.
        what: &'static str,
    },
    /// The files do not fit together.
    #[error("the certificate {} cannot be used with the key {}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error of the cryptography.
        #[source]
        source: rustls::Error,
    },
    /// The certificates of an authority cannot be used.
    #[error("the certificate authority {} cannot be used: {what}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// The problem with them.
        what: String,
    },
    /// The cryptography does not have what TLS needs: a fault of ours.
    #[error("TLS cannot be set up")]
    Internal(#[source] rustls::Error),
}

/// TLS of the side that is connected to.
pub type ServerTls = FilesTls<ServerConfig>;

/// TLS of the side that connects.
pub type ClientTls = FilesTls<ClientConfig>;

/// The certificate that a server asks of those who connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// No certificate is asked for.
    None,
    /// One of this authority is checked where one is shown.
    Optional(PathBuf),
    /// One of this authority has to be shown.
    Required(PathBuf),
}

/// A configuration that is made of files, and made anew when they change.
pub struct FilesTls<T> {
    files: Vec<PathBuf>,
    make: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    in_use: Mutex<InUse<T>>,
    failed: Seldom,
}

/// The last configuration that could be made.
struct InUse<T> {
    config: Arc<T>,
    /// The files that `config` was made of.
    seen: Vec<Option<FileStamp>>,
}

// === impl FilesTls ===

impl FilesTls<ServerConfig> {
    /// Reads the files; those that cannot be used now are an error.
    pub fn load(own: CertificateFiles, clients: ClientCertificates) -> Result<Self, TlsError> {
        let mut files = vec![own.certificate.clone(), own.key.clone()];
        files.extend(clients.authority().map(|(path, _)| path.to_owned()));
        Self::new(files, Box::new(move || server_config(&own, &clients)))
    }
}

impl FilesTls<ClientConfig> {
    /// Reads the files; those that cannot be used now are an error. `authority` has the
    /// certificates that a server is trusted by; `own` is shown to it where it asks.
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
        // Before they are read: a change in between is found the next time.
        let seen = stamps(&files);
        let config = Arc::new(make()?);
        Ok(Self {
            files,
            make,
            in_use: Mutex::new(InUse { config, seen }),
            failed: Seldom::default(),
        })
    }

    /// Returns what a new connection is made with.
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
                // Read again for the next connection: what failed may have been the reading.
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

/// Returns the cryptography that TLS uses; it is named here and nowhere else.
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
