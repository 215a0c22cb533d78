use std::collections::BTreeMap;
use std::fs;

use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use hyper::Method;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};

use super::*;
use crate::http::Request;
use crate::loopback::{Asked, Reply, Server};
use crate::oci::signature::tests::signed_by;
use crate::oci::signature::{Covers, sign};
use crate::rsa::tests::TestKey;

const NOW: &str = "2026-03-01T00:00:00Z";
/// Bytes of a public key of 2048 bits in X.509's form before those of PKCS #1's.
const SPKI_HEADER: usize = 24;

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn with(variables: &[(&str, &str)]) -> Identities {
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Identities::new(
        Http::new().unwrap(),
        Environment::of(variables.collect::<BTreeMap<_, _>>()),
    )
}

/// Returns a token that ends after some minutes.
fn token(minutes: i64) -> String {
    let claims = json!({"exp": now().as_second() + minutes * 60, "iat": now().as_second()});
    format!("h.{}.s", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// Returns a certificate in PEM whose subject names a unit.
fn certificate(unit: &str) -> String {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "ocid1.instance.oc1.phx.i");
    name.push(DnType::OrganizationalUnitName, unit);
    params.distinguished_name = name;
    params
        .self_signed(&KeyPair::generate().unwrap())
        .unwrap()
        .pem()
}

/// Checks that an identity signs with the session key that was sent.
async fn signs_with(identity: &Identity, sent: &Value) {
    let server = Server::start(|_| Reply::new(200, "")).await;
    let mut request = Request {
        method: Method::GET,
        url: format!("{}/x", server.url),
        headers: Vec::new(),
        body: Vec::new(),
    };
    sign(
        &mut request,
        &identity.key,
        &identity.key_id,
        Covers::Host,
        now(),
    )
    .unwrap();
    Http::new().unwrap().ask(request).await.unwrap();
    let public = BASE64_STANDARD.decode(sent.as_str().unwrap()).unwrap();
    let signed = signed_by(&server.asked()[0], &public[SPKI_HEADER..]);
    assert_eq!(signed.unwrap().0, identity.key_id);
}

fn body(asked: &Asked) -> Value {
    serde_json::from_slice(&asked.body).unwrap()
}

#[tokio::test]
async fn an_instance_proves_itself_by_its_certificate() {
    let leaf = certificate("opc-tenant:ocid1.tenancy.oc1..t");
    let der = leaf
        .lines()
        .filter(|line| !line.starts_with('-'))
        .collect::<String>();
    let issuer = certificate("Oracle");
    let of_server = leaf.clone();
    let server = Server::start(move |asked| match asked.target.as_str() {
        "/opc/v2/instance/regionInfo" => Reply::new(
            200,
            r#"{"regionIdentifier": "us-phoenix-1", "realmDomainComponent": "oraclecloud.com",
                "realmKey": "oc1", "regionKey": "PHX"}"#,
        ),
        "/opc/v2/identity/cert.pem" => Reply::new(200, of_server.clone()),
        "/opc/v2/identity/key.pem" => Reply::new(200, TestKey::get().pem()),
        "/opc/v2/identity/intermediate.pem" => Reply::new(200, issuer.clone()),
        "/v1/x509" => Reply::new(200, json!({"token": token(20)}).to_string()),
        _ => Reply::new(404, ""),
    })
    .await;
    let base = format!("{}/opc/v2", server.url);
    let mut identities = with(&[("OCI_METADATA_BASE_URL", &base)]);
    identities.places.auth = Some(server.url.clone());
    let identity = identities.current(now()).await.unwrap();
    assert_eq!(identity.key_id, format!("ST${}", token(20)));
    assert_eq!(
        (&*identity.region, &*identity.domain),
        ("us-phoenix-1", "oraclecloud.com")
    );
    let asked = server.asked();
    assert_eq!(asked[0].header("authorization"), "Bearer Oracle");
    let request = asked.last().unwrap();
    let (key_id, headers) = signed_by(request, TestKey::get().public()).unwrap();
    let print = key_id
        .strip_prefix("ocid1.tenancy.oc1..t/fed-x509/")
        .unwrap();
    assert_eq!((print.len(), print.split(':').count()), (59, 20));
    assert!(!headers.contains(&"host".to_owned()), "{headers:?}");
    let sent = body(request);
    assert_eq!(sent["certificate"], der);
    assert_eq!(
        sent["intermediateCertificates"].as_array().unwrap().len(),
        1
    );
    signs_with(identity, &sent["publicKey"]).await;
    assert!(!format!("{identities:?}").contains(&token(20)));

    // Until five minutes before its end.
    let minutes = |count| now() + SignedDuration::from_mins(count);
    identities.current(minutes(14)).await.unwrap();
    assert_eq!(server.asked().len(), 5);
    identities.current(minutes(15)).await.unwrap();
    assert_eq!(server.asked().len(), 10);
}

#[tokio::test]
async fn a_pod_proves_itself_by_the_token_of_its_service_account() {
    let server = Server::start(|_| {
        let given = json!({"token": format!("ST${}", token(60))}).to_string();
        Reply::new(200, format!("\"{}\"", BASE64_STANDARD.encode(given)))
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (authority, account) = (dir.path().join("ca.crt"), dir.path().join("token"));
    fs::write(&authority, certificate("cluster")).unwrap();
    fs::write(&account, "of-service-account\n").unwrap();
    let mut identities = with(&[
        ("OCI_RESOURCE_PRINCIPAL_VERSION", "2.2"),
        ("OCI_RESOURCE_PRINCIPAL_REGION", "eu-frankfurt-1"),
        ("KUBERNETES_SERVICE_HOST", "fd00::1"),
        (
            "OCI_KUBERNETES_SERVICE_ACCOUNT_CERT_PATH",
            authority.to_str().unwrap(),
        ),
    ]);
    let own = identities.places.proxymux.replace(server.url.clone());
    assert_eq!(own.as_deref(), Some("https://[fd00::1]:12250"));
    identities.places.token = account;
    let identity = identities.current(now()).await.unwrap();
    assert_eq!(identity.key_id, format!("ST${}", token(60)));
    assert_eq!(identity.region, "eu-frankfurt-1");
    let asked = &server.asked()[0];
    assert_eq!(asked.target, "/resourcePrincipalSessionTokens");
    assert_eq!(asked.header("authorization"), "Bearer of-service-account");
    signs_with(identity, &body(asked)["podKey"]).await;
}

#[tokio::test]
async fn sources_come_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().to_str().unwrap();
    let config = dir.path().join(".oci/config");
    fs::create_dir(dir.path().join(".oci")).unwrap();
    fs::write(dir.path().join(".oci/key.pem"), TestKey::get().pem()).unwrap();
    let text = |user: &str| {
        format!(
            "[DEFAULT]\nuser={user}\nfingerprint=f\ntenancy=t\nregion=r\nkey_file=~/.oci/key.pem\n"
        )
    };
    fs::write(&config, text("of-home")).unwrap();
    let mut of_home = with(&[("HOME", home)]);
    let identity = of_home.current(now()).await.unwrap();
    assert_eq!((&*identity.key_id, &*identity.region), ("t/of-home/f", "r"));

    let named = dir.path().join("named");
    fs::write(&named, text("of-file")).unwrap();
    let named = named.to_str().unwrap();
    let variables = [
        ("HOME", home),
        ("OCI_CONFIG_FILE", named),
        ("OCI_RESOURCE_PRINCIPAL_VERSION", "2.2"),
    ];
    let mut by_file = with(&variables);
    assert_eq!(by_file.current(now()).await.unwrap().key_id, "t/of-file/f");

    let outside = with(&[variables[0], variables[2]])
        .current(now())
        .await
        .unwrap_err();
    assert!(
        outside.what.contains("KUBERNETES_SERVICE_HOST"),
        "{outside}"
    );
    let nobody = with(&[("OCI_METADATA_BASE_URL", "http://127.0.0.1:1")]);
    let failure = { nobody }.current(now()).await.unwrap_err();
    assert!(failure.what.contains("127.0.0.1:1"), "{failure}");
    assert!(
        failure.what.contains("there is no ~/.oci/config"),
        "{failure}"
    );
}

#[tokio::test]
async fn what_services_answer_wrongly_is_a_failure_without_secrets() {
    let leaf = certificate("opc-tenant:t");
    let nameless = certificate("nobody");
    for (path, answer, says) in [
        (
            "/instance/regionInfo",
            Reply::new(404, "none"),
            "regionInfo: status 404",
        ),
        (
            "/instance/regionInfo",
            Reply::new(200, "phx"),
            "not understood",
        ),
        (
            "/identity/cert.pem",
            Reply::new(200, ""),
            "no certificate of a tenancy",
        ),
        (
            "/identity/cert.pem",
            Reply::new(200, nameless),
            "no certificate of a tenancy",
        ),
        (
            "/identity/key.pem",
            Reply::new(200, "tok-secret"),
            "no private key",
        ),
        (
            "/v1/x509",
            Reply::new(401, "denied"),
            "/v1/x509: status 401: denied",
        ),
        (
            "/v1/x509",
            Reply::new(200, r#"{"tok": "tok-secret"}"#),
            "token cannot be read",
        ),
    ] {
        let leaf = leaf.clone();
        let server = Server::start(move |asked| match asked.target.as_str() {
            target if target == path => answer.clone(),
            "/instance/regionInfo" => Reply::new(
                200,
                r#"{"regionIdentifier": "r", "realmDomainComponent": "d"}"#,
            ),
            "/identity/key.pem" => Reply::new(200, TestKey::get().pem()),
            _ => Reply::new(200, leaf.clone()),
        })
        .await;
        let mut identities = with(&[("OCI_METADATA_BASE_URL", &server.url)]);
        identities.places.auth = Some(server.url.clone());
        let failure = identities.current(now()).await.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
        assert!(!failure.what.contains("tok-secret"), "{failure}");
    }
    let dir = tempfile::tempdir().unwrap();
    let (authority, account) = (dir.path().join("ca.crt"), dir.path().join("token"));
    fs::write(&authority, certificate("cluster")).unwrap();
    fs::write(&account, "t").unwrap();
    for (answer, says) in [
        (Reply::new(403, "tok-secret"), "enhanced cluster"),
        (Reply::new(200, "tok-secret!"), "token cannot be read"),
        (
            Reply::new(200, BASE64_STANDARD.encode("[]")),
            "token cannot be read",
        ),
    ] {
        let server = Server::start(move |_| answer.clone()).await;
        let mut identities = with(&[("OCI_RESOURCE_PRINCIPAL_VERSION", "2.2")]);
        identities.places.proxymux = Some(server.url.clone());
        identities.places.authority.clone_from(&authority);
        identities.places.token.clone_from(&account);
        let failure = identities.current(now()).await.unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
        assert!(!failure.what.contains("tok-secret"), "{failure}");
    }
}
