//! Signatures of requests to OCI: version 1, RSA with SHA-256.
//!
//! Form: <https://docs.oracle.com/en-us/iaas/Content/API/Concepts/signingrequests.htm>.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::{Method, Uri};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use ring::digest::{SHA256, digest};

use crate::http::{Failure, Request};
use crate::rsa::RsaKey;

/// Headers that are signed without a body. The auth service does not sign its host.
const PLAIN: [&str; 3] = ["date", "(request-target)", "host"];
/// Headers that are signed beside them with a body.
const OF_BODY: [&str; 3] = ["content-length", "content-type", "x-content-sha256"];

/// Headers that a signature covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Covers {
    /// All headers that the services of OCI ask for.
    Host,
    /// All of them but the host, as the auth service takes it.
    NoHost,
}

/// Adds the headers of a signature with `key`, whose name for OCI is `key_id`.
pub(super) fn sign(
    request: &mut Request,
    key: &RsaKey,
    key_id: &str,
    covers: Covers,
    now: Timestamp,
) -> Result<(), Failure> {
    let uri: Uri = (request.url.parse())
        .map_err(|error| Failure::new(format!("{:?} is not a URL: {error}", request.url)))?;
    let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&now);
    request
        .headers
        .push(("date".to_owned(), date.map_err(Failure::new)?));
    let mut signed: Vec<&str> = PLAIN.to_vec();
    if covers == Covers::NoHost {
        signed.retain(|name| *name != "host");
    }
    if request.method == Method::POST {
        signed.extend(OF_BODY);
        let hash = BASE64_STANDARD.encode(digest(&SHA256, &request.body));
        request.headers.extend([
            ("content-type".to_owned(), "application/json".to_owned()),
            ("x-content-sha256".to_owned(), hash),
        ]);
    }
    let value = |name: &str| match name {
        "(request-target)" => {
            let target = uri.path_and_query().map_or("/", |target| target.as_str());
            format!("{} {target}", request.method.as_str().to_lowercase())
        }
        // The client adds these two itself.
        "host" => uri.authority().map_or("", |host| host.as_str()).to_owned(),
        "content-length" => request.body.len().to_string(),
        name => {
            let mut headers = request.headers.iter();
            let found = headers.find(|(known, _)| known == name);
            found.map_or_else(String::new, |(_, value)| value.clone())
        }
    };
    let lines: Vec<String> = signed
        .iter()
        .map(|name| format!("{name}: {}", value(name)))
        .collect();
    let signature = key.sign_base64(lines.join("\n").as_bytes())?;
    let authorization = format!(
        "Signature version=\"1\",keyId=\"{key_id}\",algorithm=\"rsa-sha256\",headers=\"{}\",\
         signature=\"{signature}\"",
        signed.join(" ")
    );
    request
        .headers
        .push(("authorization".to_owned(), authorization));
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
