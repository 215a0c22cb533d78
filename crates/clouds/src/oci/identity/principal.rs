//! Tokens of instances and of pods in OKE. Both are given for a session key: a new key pair, whose
//! public half is in the request, and whose private half signs what the token is used for.
//!
//! Instances: the certificate of the instance signs the request to the auth service
//! (<https://docs.oracle.com/en-us/iaas/Content/Identity/Tasks/callingservicesfrominstances.htm>).
//! Pods: the token of the service account goes to a service of the cluster
//! (<https://docs.oracle.com/en-us/iaas/Content/ContEng/Tasks/contenggrantingworkloadaccesstoresources.htm>).
//! The forms of the requests are those of Oracle's SDKs.

use std::path::PathBuf;

use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use hyper::Method;
use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde_json::{Value, json};
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use super::{DOMAIN, Identity};
use crate::http::{Failure, Http, Request, Response};
use crate::oci::signature::{Covers, sign};
use crate::rsa::{Generated, RsaKey};
use crate::{Environment, secret_file};

/// Directory of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Port of the service of a cluster that gives tokens to pods.
const PROXYMUX_PORT: u16 = 12_250;
/// Beginnings of the part of a certificate's subject that names the tenancy.
const TENANCY: [&str; 2] = ["opc-tenant:", "opc-identity:"];
/// Lifetime of a token that does not tell its end.
const UNKNOWN_LIFETIME: SignedDuration = SignedDuration::from_mins(15);

/// Services and files that are asked for tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    /// URL of the metadata service.
    pub(super) metadata: String,
    /// URL of the auth service; `None` for the one of the region.
    pub(super) auth: Option<String>,
    /// URL of the service of the cluster; `None` outside a cluster.
    pub(super) proxymux: Option<String>,
    /// Certificates of the authorities of that service.
    pub(super) authority: PathBuf,
    /// Token of the pod's service account.
    pub(super) token: PathBuf,
    /// Region of a pod; empty if the environment tells none.
    pub(super) region: String,
}

/// Region and realm of an instance.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RegionInfo {
    region_identifier: String,
    realm_domain_component: String,
}

/// Answer with a token.
#[derive(Deserialize)]
struct Given {
    token: String,
}

// === impl Places ===

impl Places {
    /// Returns the places that the environment and OCI's conventions tell.
    pub(super) fn of(environment: &Environment) -> Self {
        let host = environment.get("KUBERNETES_SERVICE_HOST");
        // An address of IPv6 stands in brackets.
        let host = host.map(|host| {
            if host.contains(':') {
                format!("[{host}]")
            } else {
                host
            }
        });
        let authority = environment.get("OCI_KUBERNETES_SERVICE_ACCOUNT_CERT_PATH");
        let authority = authority.unwrap_or_else(|| format!("{SERVICE_ACCOUNT}/ca.crt"));
        let metadata = environment.get("OCI_METADATA_BASE_URL");
        Self {
            metadata: metadata.unwrap_or_else(|| "http://169.254.169.254/opc/v2".to_owned()),
            auth: None,
            proxymux: host.map(|host| format!("https://{host}:{PROXYMUX_PORT}")),
            authority: authority.into(),
            token: format!("{SERVICE_ACCOUNT}/token").into(),
            region: environment
                .get("OCI_RESOURCE_PRINCIPAL_REGION")
                .unwrap_or_default(),
        }
    }
}

/// Gets a token for a pod of OKE.
pub(super) async fn of_workload(places: &Places, now: Timestamp) -> Result<Identity, Failure> {
    let Some(proxymux) = &places.proxymux else {
        let what = "OCI_RESOURCE_PRINCIPAL_VERSION is set, but not KUBERNETES_SERVICE_HOST: only \
                    workload identity in a pod is supported";
        return Err(Failure::new(what));
    };
    // The service has a certificate of the cluster's own authority.
    let http = Http::trusting(places.authority.clone())?;
    let token = secret_file::read(&places.token).await?;
    let session = session_key().await?;
    let request = Request {
        method: Method::POST,
        url: format!("{proxymux}/resourcePrincipalSessionTokens"),
        headers: vec![
            (
                "authorization".to_owned(),
                format!("Bearer {}", token.trim()),
            ),
            ("content-type".to_owned(), "application/json".to_owned()),
        ],
        body: json!({"podKey": session.public_base64()})
            .to_string()
            .into(),
    };
    let answer = http.ask(request).await?;
    if answer.status == 403 {
        let says = "workload identity needs an enhanced cluster";
        return Err(answer.failure(says));
    }
    let answer = answer.success()?;
    // The JSON is in base64, which may be in quotes.
    let text = answer.body.trim_ascii();
    let text = text.strip_prefix(b"\"").unwrap_or(text);
    let text = text.strip_suffix(b"\"").unwrap_or(text);
    let given = BASE64_STANDARD
        .decode(text)
        .map_err(|_| unreadable(&answer))?;
    let given: Given = serde_json::from_slice(&given).map_err(|_| unreadable(&answer))?;
    let token = given.token.strip_prefix("ST$").unwrap_or(&given.token);
    let region = places.region.clone();
    Ok(identity(session, token, region, DOMAIN.to_owned(), now))
}

/// Gets a token for the instance of this process.
pub(super) async fn of_instance(
    http: &Http,
    places: &Places,
    now: Timestamp,
) -> Result<Identity, Failure> {
    let place: RegionInfo = metadata(http, places, "instance/regionInfo")
        .await?
        .json()?;
    let leaf = metadata(http, places, "identity/cert.pem").await?;
    let key = metadata(http, places, "identity/key.pem").await?;
    let others = metadata(http, places, "identity/intermediate.pem").await?;
    let key = RsaKey::from_pem(&String::from_utf8_lossy(&key.body), &key.asked)?;
    let leaf_der = certificates(&leaf)?.into_iter().next().unwrap_or_default();
    let tenancy = tenancy_of(&leaf_der)
        .ok_or_else(|| Failure::new(format!("{}: no certificate of a tenancy", leaf.asked)))?;
    let print = digest(&SHA1_FOR_LEGACY_USE_ONLY, &leaf_der);
    let print: Vec<String> = print
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02X}"))
        .collect();
    let others: Vec<String> = certificates(&others)?
        .iter()
        .map(|der| BASE64_STANDARD.encode(der))
        .collect();
    let session = session_key().await?;
    let body = json!({
        "certificate": BASE64_STANDARD.encode(&leaf_der),
        "publicKey": session.public_base64(),
        "intermediateCertificates": others,
    });
    let (region, domain) = (place.region_identifier, place.realm_domain_component);
    let auth = places.auth.clone();
    let auth = auth.unwrap_or_else(|| format!("https://auth.{region}.{domain}"));
    let mut request = Request {
        method: Method::POST,
        url: format!("{auth}/v1/x509"),
        headers: Vec::new(),
        body: body.to_string().into(),
    };
    let key_id = format!("{tenancy}/fed-x509/{}", print.join(":"));
    sign(&mut request, &key, &key_id, Covers::NoHost, now)?;
    let answer = http.ask(request).await?.success()?;
    let given: Given = serde_json::from_slice(&answer.body).map_err(|_| unreadable(&answer))?;
    Ok(identity(session, &given.token, region, domain, now))
}

/// Reads a value of the metadata service.
async fn metadata(http: &Http, places: &Places, path: &str) -> Result<Response, Failure> {
    let request = Request {
        method: Method::GET,
        url: format!("{}/{path}", places.metadata),
        headers: vec![("authorization".to_owned(), "Bearer Oracle".to_owned())],
        body: Vec::new(),
    };
    http.ask(request).await?.success()
}

/// Generates a session key.
async fn session_key() -> Result<Generated, Failure> {
    let generated = tokio::task::spawn_blocking(Generated::new).await;
    generated.map_err(Failure::new)?
}

fn identity(
    session: Generated,
    token: &str,
    region: String,
    domain: String,
    now: Timestamp,
) -> Identity {
    let known = end_of(token);
    let end = known.or_else(|| now.checked_add(UNKNOWN_LIFETIME).ok());
    Identity {
        key: session.key,
        key_id: format!("ST${token}"),
        region,
        domain,
        end,
    }
}

/// Returns the end of a token, which is a JWT.
fn end_of(token: &str) -> Option<Timestamp> {
    let claims = BASE64_URL_SAFE_NO_PAD
        .decode(token.split('.').nth(1)?)
        .ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    Timestamp::from_second(claims["exp"].as_i64()?).ok()
}

/// Returns the certificates of a response, in DER.
fn certificates(answer: &Response) -> Result<Vec<Vec<u8>>, Failure> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&answer.body)
        .map(|found| found.map(|certificate| certificate.to_vec()))
        .collect();
    found.map_err(|_| Failure::new(format!("{}: a damaged certificate", answer.asked)))
}

/// Returns the tenancy that a certificate names.
fn tenancy_of(der: &[u8]) -> Option<String> {
    let certificate = Certificate::from_der(der).ok()?;
    let subject = certificate.tbs_certificate().subject();
    subject.iter().find_map(|part| {
        let text = std::str::from_utf8(part.value.value()).ok()?;
        let found = TENANCY.iter().find_map(|start| text.strip_prefix(start));
        found.map(str::to_owned)
    })
}

/// Returns the failure of a response whose content is secret.
fn unreadable(answer: &Response) -> Failure {
    Failure::new(format!("{}: the token cannot be read", answer.asked))
}
