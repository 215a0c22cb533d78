use std::fs;

use tempfile::TempDir;

use super::*;
use crate::loopback::{Asked, Reply, Server};
use crate::rsa::tests::TestKey;

const NOW: &str = "2026-03-01T00:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn with(variables: &[(&str, &str)]) -> Credentials {
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Credentials::new(Http::new().unwrap(), Environment::of(variables.collect()))
}

/// Writes a file of credentials, and returns the source that uses it.
fn by_file(dir: &TempDir, file: &Value) -> Credentials {
    let path = dir.path().join("credentials.json");
    fs::write(&path, file.to_string()).unwrap();
    with(&[(FILE, path.to_str().unwrap())])
}

/// Returns the value of a key of a form.
fn field(asked: &Asked, key: &str) -> String {
    let pairs = asked
        .text()
        .split('&')
        .map(|pair| pair.split_once('=').unwrap());
    let (_, value) = pairs.clone().find(|(name, _)| *name == key).unwrap();
    let mut bytes = Vec::new();
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        (bytes, rest) = match (first, after) {
            (b'%', [a, b, after @ ..]) => {
                let code = u8::from_str_radix(std::str::from_utf8(&[*a, *b]).unwrap(), 16);
                bytes.push(code.unwrap());
                (bytes, after)
            }
            (byte, after) => {
                bytes.push(*byte);
                (bytes, after)
            }
        };
    }
    String::from_utf8(bytes).unwrap()
}

fn granted(token: &str) -> Reply {
    Reply::new(
        200,
        format!(r#"{{"access_token": "{token}", "expires_in": 3599, "token_type": "Bearer"}}"#),
    )
}

#[tokio::test]
async fn the_metadata_server_is_asked_once_for_each_lifetime() {
    let server = Server::start(|_| granted("from-metadata")).await;
    let host = server.url.strip_prefix("http://").unwrap();
    let mut credentials = with(&[(METADATA_HOST, host)]);
    let minutes = |count| now() + SignedDuration::from_mins(count);
    for (at, requests) in [(0, 1), (54, 1), (55, 2), (60, 2), (110, 3)] {
        let token = credentials.token(minutes(at)).await.unwrap();
        assert_eq!(token, "from-metadata");
        assert_eq!(server.asked().len(), requests, "after {at} min");
    }
    credentials.forget();
    credentials.token(minutes(110)).await.unwrap();
    let asked = server.asked();
    assert_eq!(asked.len(), 4, "a refused token is replaced");
    assert_eq!(asked[0].header("metadata-flavor"), "Google");
    let path = "/computeMetadata/v1/instance/service-accounts/default/token";
    assert_eq!(asked[0].target, path);
    assert!(!format!("{credentials:?}").contains("from-metadata"));
}

#[tokio::test]
async fn a_service_account_signs_what_its_token_endpoint_expects() {
    let server = Server::start(|_| granted("by-key")).await;
    let dir = tempfile::tempdir().unwrap();
    let token_uri = format!("{}/token", server.url);
    let mut credentials = by_file(
        &dir,
        &json!({
            "type": "service_account",
            "project_id": "p",
            "client_email": "a@p.iam.gserviceaccount.com",
            "private_key": TestKey::get().pem(),
            "private_key_id": "k1",
            "token_uri": token_uri,
        }),
    );
    assert_eq!(credentials.token(now()).await.unwrap(), "by-key");
    let asked = &server.asked()[0];
    assert_eq!(asked.method, Method::POST);
    let grant = "urn:ietf:params:oauth:grant-type:jwt-bearer";
    assert_eq!(field(asked, "grant_type"), grant);
    let assertion = field(asked, "assertion");
    let (message, signature) = assertion.rsplit_once('.').unwrap();
    let decoded = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).unwrap();
    assert!(TestKey::get().has_signed(message.as_bytes(), &decoded(signature)));
    let (header, claims) = message.split_once('.').unwrap();
    let parsed = |part: &str| serde_json::from_slice::<Value>(&decoded(part)).unwrap();
    assert_eq!(
        parsed(header),
        json!({"alg": "RS256", "typ": "JWT", "kid": "k1"})
    );
    let issued = now().as_second();
    assert_eq!(
        parsed(claims),
        json!({
            "iss": "a@p.iam.gserviceaccount.com",
            "scope": "https://www.googleapis.com/auth/logging.read https://www.googleapis.com/auth/compute.readonly",
            "aud": token_uri,
            "iat": issued,
            "exp": issued + 3600,
        })
    );
}

#[tokio::test]
async fn a_federated_identity_is_exchanged_and_may_become_a_service_account() {
    let server = Server::start(|asked| match asked.target.as_str() {
        "/subject" => Reply::new(200, r#"{"jwt": "subject-of-url"}"#),
        "/sts" => granted("federated"),
        "/sa:generateAccessToken" => Reply::new(
            200,
            r#"{"accessToken": "impersonated", "expireTime": "2026-03-01T01:00:00Z"}"#,
        ),
        _ => Reply::new(404, ""),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let subject = dir.path().join("subject");
    fs::write(&subject, "subject-of-file\n").unwrap();
    let mut file = json!({
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/o",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": format!("{}/sts", server.url),
        "credential_source": {"file": subject},
    });
    assert_eq!(
        by_file(&dir, &file).token(now()).await.unwrap(),
        "federated"
    );
    let asked = &server.asked()[0];
    assert_eq!(field(asked, "subject_token"), "subject-of-file");
    assert_eq!(field(asked, "audience"), file["audience"].as_str().unwrap());
    assert!(field(asked, "scope").contains("logging.read"));
    assert_eq!(
        field(asked, "grant_type"),
        "urn:ietf:params:oauth:grant-type:token-exchange"
    );

    file["credential_source"] = json!({
        "url": format!("{}/subject", server.url),
        "headers": {"x-key": "v"},
        "format": {"type": "json", "subject_token_field_name": "jwt"},
    });
    file["service_account_impersonation_url"] =
        json!(format!("{}/sa:generateAccessToken", server.url));
    file["service_account_impersonation"] = json!({"token_lifetime_seconds": 1800});
    let mut credentials = by_file(&dir, &file);
    assert_eq!(credentials.token(now()).await.unwrap(), "impersonated");
    let asked = server.asked();
    assert_eq!(asked[1].header("x-key"), "v");
    assert_eq!(field(&asked[2], "subject_token"), "subject-of-url");
    assert_eq!(field(&asked[2], "scope"), EXCHANGE_SCOPE);
    assert_eq!(asked[3].header("authorization"), "Bearer federated");
    let body: Value = serde_json::from_slice(&asked[3].body).unwrap();
    assert_eq!(body, json!({"scope": SCOPES, "lifetime": "1800s"}));
}

#[tokio::test]
async fn credentials_that_cannot_be_used_say_why_and_show_no_secret() {
    let server = Server::start(|asked| match asked.target.as_str() {
        "/denied" => Reply::new(400, r#"{"error": "invalid_grant"}"#),
        "/cut" => Reply::new(200, r#"{"access_token": "tok-secret", "expires"#),
        _ => Reply::new(200, r#"{"access_token": ["tok-secret"]}"#),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let account = |path: &str, key: &str| {
        json!({
            "type": "service_account",
            "client_email": "a@p",
            "private_key": key,
            "token_uri": format!("{}{path}", server.url),
        })
    };
    let key = TestKey::get().pem();
    let external = |source: Value| {
        json!({
            "type": "external_account",
            "audience": "a",
            "subject_token_type": "t",
            "token_url": format!("{}/sts", server.url),
            "credential_source": source,
        })
    };
    let as_json = json!({"type": "json", "subject_token_field_name": "jwt"});
    let path = dir.path().join("subject");
    fs::write(&path, "tok-secret").unwrap();
    for (file, says) in [
        (account("/denied", &key), "/denied: status 400: {\"error\""),
        (account("/cut", &key), "/cut: the token cannot be read"),
        (account("/odd", &key), "/odd: the token cannot be read"),
        (account("/x", "tok-secret"), "no private key in PEM form"),
        (json!({"type": "authorized_user"}), "not supported"),
        (json!({"type": "service_account"}), "missing field"),
        (json!([]), "cannot be used"),
        (external(json!({"environment_id": "aws1"})), "not supported"),
        (
            external(json!({"file": "/no/such"})),
            "cannot read /no/such",
        ),
        (
            external(json!({"file": path, "format": as_json})),
            "no JSON with the text \"jwt\"",
        ),
    ] {
        let failure = by_file(&dir, &file).token(now()).await.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
        assert!(!failure.what.contains("tok-secret"), "{failure}");
    }
    let failure = with(&[(FILE, "/no/such")]).token(now()).await.unwrap_err();
    assert!(failure.what.contains("cannot read /no/such"), "{failure}");
    let nobody = with(&[(METADATA_HOST, "127.0.0.1:1")]).token(now()).await;
    assert!(
        nobody
            .unwrap_err()
            .what
            .contains("GOOGLE_APPLICATION_CREDENTIALS")
    );
}
