//! Signature Version 4 of AWS for requests without a query, in headers.
//!
//! Reference: "Create a signed AWS API request" of the IAM User Guide.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ring::{digest, hmac};

use super::credentials::Credentials;

/// Name of the algorithm.
const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// A request to be signed.
pub(super) struct Unsigned<'a> {
    /// Method, such as `POST`.
    pub(super) method: &'a str,
    /// Host, with a port other than the usual one.
    pub(super) host: &'a str,
    /// Path, percent-encoded.
    pub(super) path: &'a str,
    /// Headers that are signed beside those of the signature, with lower-case names.
    pub(super) headers: &'a [(String, String)],
    /// Body.
    pub(super) body: &'a [u8],
}

/// Service that a signature is for.
#[derive(Clone, Copy)]
pub(super) struct Scope<'a> {
    /// Region, such as `us-east-1`.
    pub(super) region: &'a str,
    /// Name of the service in signatures, such as `ec2`.
    pub(super) service: &'a str,
}

/// Returns the headers of the signature, beside those of the request.
pub(super) fn headers(
    request: &Unsigned<'_>,
    credentials: &Credentials,
    scope: Scope<'_>,
    now: Timestamp,
) -> Vec<(String, String)> {
    let time = now
        .to_zoned(TimeZone::UTC)
        .strftime("%Y%m%dT%H%M%SZ")
        .to_string();
    let mut signed = vec![("host".to_owned(), request.host.to_owned())];
    let mut added = vec![("x-amz-date".to_owned(), time.clone())];
    if let Some(token) = &credentials.token {
        added.push(("x-amz-security-token".to_owned(), token.clone()));
    }
    signed.extend(request.headers.iter().chain(&added).cloned());
    signed.sort();
    let names: Vec<&str> = signed.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(";");
    let lines = signed
        .iter()
        .map(|(name, value)| format!("{name}:{}\n", value.trim()));
    let canonical = format!(
        "{}\n{}\n\n{}\n{names}\n{}",
        request.method,
        request.path,
        lines.collect::<String>(),
        hex(digest::digest(&digest::SHA256, request.body).as_ref()),
    );
    let date = time.get(..8).unwrap_or_default();
    let Scope { region, service } = scope;
    let scope = format!("{date}/{region}/{service}/aws4_request");
    let canonical = digest::digest(&digest::SHA256, canonical.as_bytes());
    let text = format!("{ALGORITHM}\n{time}\n{scope}\n{}", hex(canonical.as_ref()));

    let secret = format!("AWS4{}", credentials.secret);
    let parts = [date, region, service, "aws4_request"];
    let key = parts
        .iter()
        .fold(secret.into_bytes(), |key, part| mac(&key, part));
    let signature = hex(&mac(&key, &text));
    let id = &credentials.id;
    let authorization = format!(
        "{ALGORITHM} Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
    );
    added.push(("authorization".to_owned(), authorization));
    added
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the signature of a request with the key, time and scope of AWS's published tests.
    fn signature(
        method: &str,
        headers: &[(&str, &str)],
        body: &str,
        token: Option<&str>,
    ) -> String {
        let credentials = Credentials {
            id: "AKIDEXAMPLE".to_owned(),
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".to_owned(),
            token: token.map(str::to_owned),
            expires: None,
        };
        let headers: Vec<(String, String)> = (headers.iter())
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let request = Unsigned {
            method,
            host: "example.amazonaws.com",
            path: "/",
            headers: &headers,
            body: body.as_bytes(),
        };
        let scope = Scope {
            region: "us-east-1",
            service: "service",
        };
        let now = "2015-08-30T12:36:00Z".parse().unwrap();
        let added = super::headers(&request, &credentials, scope, now);
        let (name, value) = added.last().unwrap();
        assert_eq!(
            (name.as_str(), added[0].1.as_str()),
            ("authorization", "20150830T123600Z")
        );
        assert!(value.contains("Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request,"));
        value.rsplit_once('=').unwrap().1.to_owned()
    }

    #[test]
    fn signatures_are_those_that_aws_publishes() {
        let form = [("content-type", "application/x-www-form-urlencoded")];
        let token = "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfp\
                     SPfIeoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPky\
                     QDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz\
                     +scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA==";
        for (found, published) in [
            (
                signature("GET", &[], "", None),
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                signature("POST", &[], "", None),
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
            (
                signature("POST", &form, "Param1=value1", None),
                "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
            ),
            (
                signature("POST", &[], "", Some(token)),
                "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
            ),
        ] {
            assert_eq!(found, published);
        }
    }
}
