use std::sync::OnceLock;

use base64::prelude::BASE64_STANDARD;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};

use super::generate::{Encoded, pem};
use super::*;

/// A key for all tests, since its generation takes long.
pub(crate) struct TestKey {
    key: RsaKey,
    encoded: Encoded,
}

// === impl TestKey ===

impl TestKey {
    pub(crate) fn get() -> &'static Self {
        static KEY: OnceLock<TestKey> = OnceLock::new();
        KEY.get_or_init(|| {
            let encoded = Encoded::new().unwrap();
            let pair = KeyPair::from_der(&encoded.private).unwrap();
            let key = RsaKey { pair };
            Self { key, encoded }
        })
    }

    pub(crate) fn pem(&self) -> String {
        self.encoded.pem()
    }

    /// Returns the public key as PKCS #1, in DER.
    pub(crate) fn public(&self) -> &[u8] {
        self.key.pair.public().as_ref()
    }

    /// Returns whether `signature` is this key's for `message`.
    pub(crate) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        has_signed(self.public(), message, signature)
    }
}

/// Returns whether `signature` is that of a public key (PKCS #1, in DER) for `message`.
pub(crate) fn has_signed(public: &[u8], message: &[u8], signature: &[u8]) -> bool {
    let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, public);
    public.verify(message, signature).is_ok()
}

#[test]
fn a_key_is_read_in_both_forms_and_signs() {
    let test = TestKey::get();
    let first = RsaKey::from_pem(&test.pem(), "k").unwrap();
    let older = pem("RSA PRIVATE KEY", &test.encoded.private);
    for key in [first, RsaKey::from_pem(&older, "k").unwrap()] {
        let signature = key.sign(b"message").unwrap();
        assert!(test.has_signed(b"message", &signature));
        assert!(!test.has_signed(b"massage", &signature));
        assert_eq!(key.sign_base64(b"m").unwrap().len(), 344);
        assert_eq!(format!("{key:?}"), "RsaKey { .. }");
    }
}

#[test]
fn a_generated_key_is_new_and_names_itself_as_others_do() {
    let (one, other) = (TestKey::get(), Generated::new().unwrap());
    assert_ne!(one.encoded.public, other.public);
    // The form of X.509: the algorithm, then the key in the form that `ring` gives.
    let public = other.key.pair.public().as_ref();
    assert!(other.public.ends_with(public));
    assert_eq!(other.public.len(), 294, "as for any key of 2048 bits");
    let again = BASE64_STANDARD.decode(other.public_base64()).unwrap();
    assert_eq!(again, other.public);
}

#[test]
fn what_is_no_key_is_named_without_its_content() {
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----";
    let damaged = pem("PRIVATE KEY", &[0x30, 3, 2, 1, 0]);
    let cut = TestKey::get().pem()[..400].to_owned();
    let ec = pem("EC PRIVATE KEY", &[0x30, 0]);
    for (text, says) in [
        ("", "no private key in PEM form"),
        ("secret", "no private key in PEM form"),
        (&*cut, "no private key in PEM form"),
        (encrypted, "is encrypted"),
        (&*damaged, "no RSA key that can sign"),
        (&*ec, "no RSA key"),
    ] {
        let failure = RsaKey::from_pem(text, "the key /k").unwrap_err();
        assert!(failure.what.starts_with("the key /k "), "{failure}");
        assert!(failure.what.contains(says), "{failure}");
        assert!(!failure.what.contains("secret"), "{failure}");
    }
}
