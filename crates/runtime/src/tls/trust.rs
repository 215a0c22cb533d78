//! TLS of a client without certificate files: trusts the authorities of the system, every server, or none.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::{ClientTls, TlsError, provider};

/// Verifier that trusts every certificate. Signatures are checked, so the server must hold the
/// key.
#[derive(Debug)]
struct All;

// === impl ClientTls ===

impl ClientTls {
    /// Returns TLS that trusts every server; only for networks without other hosts.
    pub fn trusting_all() -> Result<Self, TlsError> {
        let make = || {
            let builder = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .map_err(TlsError::Internal)?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(All));
            Ok(builder.with_no_client_auth())
        };
        Self::new(Vec::new(), Box::new(make))
    }

    /// Returns TLS that trusts the authorities of the system, or of the file that `SSL_CERT_FILE` names.
    /// Fails if there are none.
    pub fn trusting_system() -> Result<Self, TlsError> {
        let make = || {
            let found = rustls_native_certs::load_native_certs();
            let mut roots = RootCertStore::empty();
            // Some systems have a certificate that cannot be parsed beside good ones.
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                return Err(TlsError::NoAuthorities);
            }
            let builder = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .map_err(TlsError::Internal)?
                .with_root_certificates(roots);
            Ok(builder.with_no_client_auth())
        };
        Self::new(Vec::new(), Box::new(make))
    }

    /// Returns TLS that trusts no server, for clients that never use it.
    pub fn trusting_none() -> Result<Self, TlsError> {
        let make = || {
            let builder = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .map_err(TlsError::Internal)?
                .with_root_certificates(RootCertStore::empty());
            Ok(builder.with_no_client_auth())
        };
        Self::new(Vec::new(), Box::new(make))
    }
}

// === impl All ===

impl ServerCertVerifier for All {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
