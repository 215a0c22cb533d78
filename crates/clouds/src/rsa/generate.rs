//! Generation of RSA keys, which `ring` does not have: primes by `crypto-primes`, the other numbers
//! by their definitions (RFC 8017, 3.2), and the encodings of key and public key. `ring` checks that the
//! numbers fit together when it reads the key.

use std::convert::Infallible;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use crypto_bigint::{BoxedUint, ConcatenatingMul as _, NonZero, Resize as _};
use crypto_primes::hazmat::{SetBits, SmallFactorsSieveFactory};
use crypto_primes::{Flavor, is_prime, sieve_and_find};
use rand_core::{TryCryptoRng, TryRng};
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::rsa::KeyPair;

use super::RsaKey;
use crate::http::Failure;

/// Public exponent of all keys.
const EXPONENT: u32 = 65_537;
/// Length of each of the two primes of a key (bits).
const PRIME_BITS: u32 = 1024;
/// Most tries to find two primes; the first one nearly always does.
const MAX_TRIES: usize = 16;
/// Object identifier 1.2.840.113549.1.1.1 (`rsaEncryption`) with its parameter, in DER.
pub(super) const ALGORITHM: [u8; 15] = [
    0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01, 0x05, 0x00,
];

/// A new key, with what others are told of it.
pub(crate) struct Generated {
    /// The key.
    pub(crate) key: RsaKey,
    /// Public key as X.509's `SubjectPublicKeyInfo`, in DER.
    pub(super) public: Vec<u8>,
}

/// Encodings of a new key, in DER.
pub(super) struct Encoded {
    /// Private key as PKCS #1.
    pub(super) private: Vec<u8>,
    /// Public key as X.509's `SubjectPublicKeyInfo`.
    pub(super) public: Vec<u8>,
}

/// Random numbers of the system, for an interface that cannot fail.
struct Random {
    system: SystemRandom,
    has_failed: bool,
}

// === impl Generated ===

impl Generated {
    /// Generates a key of 2048 bits. Takes some tenths of a second.
    pub(crate) fn new() -> Result<Self, Failure> {
        let Encoded { private, public } = Encoded::new()?;
        let pair = KeyPair::from_der(&private);
        let pair = pair.map_err(|error| Failure::new(format!("a new key is refused: {error}")))?;
        let key = RsaKey { pair };
        Ok(Self { key, public })
    }

    /// Returns the public key as PEM has it, in one line and without the lines around it.
    pub(crate) fn public_base64(&self) -> String {
        BASE64_STANDARD.encode(&self.public)
    }
}

// === impl Encoded ===

impl Encoded {
    /// Generates a key of 2048 bits.
    pub(super) fn new() -> Result<Self, Failure> {
        for _ in 0..MAX_TRIES {
            let mut random = Random {
                system: SystemRandom::new(),
                has_failed: false,
            };
            let (one, other) = (prime(&mut random), prime(&mut random));
            if random.has_failed {
                return Err(Failure::new("the system has no random numbers for a key"));
            }
            let Some((one, other)) = one.zip(other) else {
                continue;
            };
            if let Some(key) = Self::of((&one).max(&other), (&one).min(&other)) {
                return Ok(key);
            }
        }
        Err(Failure::new("no key could be generated: this is a bug"))
    }

    /// Returns the private key as a file has it: PKCS #8 in PEM.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn pem(&self) -> String {
        let octets = tagged(0x04, &self.private);
        let parts = [vec![2, 1, 0], ALGORITHM.to_vec(), octets].concat();
        pem("PRIVATE KEY", &tagged(0x30, &parts))
    }

    /// Returns the key of two primes; `None` if they do not fit.
    fn of(larger: &BoxedUint, smaller: &BoxedUint) -> Option<Self> {
        let one = BoxedUint::one_with_precision(PRIME_BITS);
        let less = [larger, smaller].map(|prime| prime.wrapping_sub(&one));
        let order = NonZero::new(less[0].concatenating_mul(&less[1])).into_option()?;
        let public = BoxedUint::from(EXPONENT).resize(2 * PRIME_BITS);
        let private = public.invert_mod(&order).into_option()?;
        let part = |less: &BoxedUint| {
            let less = NonZero::new(less.resize(2 * PRIME_BITS)).into_option()?;
            Some(integer(&private.rem(&less).to_be_bytes()))
        };
        let inverse = smaller.invert_mod(&NonZero::new(larger.clone()).into_option()?);
        let modulus = integer(&larger.concatenating_mul(smaller).to_be_bytes());
        let public = integer(&public.to_be_bytes());
        let numbers = [
            integer(&[0]),
            modulus.clone(),
            public.clone(),
            integer(&private.to_be_bytes()),
            integer(&larger.to_be_bytes()),
            integer(&smaller.to_be_bytes()),
            part(&less[0])?,
            part(&less[1])?,
            integer(&inverse.into_option()?.to_be_bytes()),
        ];
        // The first byte of a bit string is the number of bits that are not used.
        let bits = [vec![0], tagged(0x30, &[modulus, public].concat())].concat();
        let public = [ALGORITHM.to_vec(), tagged(0x03, &bits)].concat();
        Some(Self {
            private: tagged(0x30, &numbers.concat()),
            public: tagged(0x30, &public),
        })
    }
}

// === impl Random ===

impl TryRng for Random {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        let mut bytes = [0; 4];
        self.try_fill_bytes(&mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let mut bytes = [0; 8];
        self.try_fill_bytes(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        self.has_failed |= self.system.fill(bytes).is_err();
        Ok(())
    }
}

impl TryCryptoRng for Random {}

/// Returns a prime with its two highest bits set: the product of two is twice as long.
fn prime(random: &mut Random) -> Option<BoxedUint> {
    let sieve = SmallFactorsSieveFactory::new(Flavor::Any, PRIME_BITS, SetBits::TwoMsb).ok()?;
    let found = sieve_and_find(random, sieve, |_, number| is_prime(Flavor::Any, number));
    found.ok().flatten()
}

/// Returns a whole number in DER: without leading zeros, and with one if it would be negative.
fn integer(bytes: &[u8]) -> Vec<u8> {
    let start = bytes.iter().position(|byte| *byte != 0);
    let mut number = bytes
        .get(start.unwrap_or(bytes.len())..)
        .unwrap_or_default()
        .to_vec();
    if number.first().is_none_or(|byte| *byte >= 0x80) {
        number.insert(0, 0);
    }
    tagged(0x02, &number)
}

/// Returns a value in DER with its tag and length.
pub(super) fn tagged(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = value.len().to_be_bytes();
    let used = length.iter().position(|byte| *byte != 0);
    let length = length
        .get(used.unwrap_or(length.len())..)
        .unwrap_or_default();
    let mut all = vec![tag];
    match (length, u8::try_from(length.len())) {
        ([], _) => all.push(0),
        ([short], _) if *short < 0x80 => all.push(*short),
        (long, Ok(count)) => {
            all.push(0x80 | count);
            all.extend(long);
        }
        // A length has at most the bytes of a `usize`.
        (_, Err(_)) => {}
    }
    all.extend(value);
    all
}

/// Returns DER in PEM form, with lines as programs write them.
#[cfg(any(test, feature = "test-util"))]
pub(super) fn pem(what: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines = text.as_bytes().chunks(64).map(String::from_utf8_lossy);
    let lines: Vec<_> = lines.collect();
    format!(
        "-----BEGIN {what}-----\n{}\n-----END {what}-----\n",
        lines.join("\n")
    )
}
