//! Places of credentials, and how each is read.

use std::path::{Path, PathBuf};

use hyper::{Method, Uri};
use jiff::Timestamp;
use serde::Deserialize;

use super::Credentials;
use crate::aws::xml::Element;
use crate::encoding::form;
use crate::http::{Http, Request};
use crate::{Environment, Failure};

/// Metadata service of an instance.
const IMDS: &str = "http://169.254.169.254";
/// Lifetime of a token of the metadata service (seconds); it is used at once.
const IMDS_TOKEN_SECONDS: &str = "60";
/// Name of our sessions, if the environment has none.
const SESSION: &str = "gpuwarden";
/// Hosts of agents that give credentials without TLS: of ECS, and of EKS Pod Identity.
const AGENTS: [&str; 3] = ["169.254.170.2", "169.254.170.23", "[fd00:ec2::23]"];
/// Largest file of credentials or of a token (bytes).
const MAX_FILE: usize = 1024 * 1024;

/// Credentials as agents and the metadata service have them.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: Timestamp,
}

/// Reads the credentials of the first place that is configured.
pub(super) async fn fetch(
    http: &Http,
    environment: &Environment,
    sts: &str,
) -> Result<Credentials, Failure> {
    let get = |name: &str| environment.get(name);
    if let (Some(id), Some(secret)) = (get("AWS_ACCESS_KEY_ID"), get("AWS_SECRET_ACCESS_KEY")) {
        let token = get("AWS_SESSION_TOKEN");
        return Ok(Credentials {
            id,
            secret,
            token,
            expires: None,
        });
    }
    if let Some(found) = shared(environment)? {
        return Ok(found);
    }
    if let (Some(file), Some(role)) = (get("AWS_WEB_IDENTITY_TOKEN_FILE"), get("AWS_ROLE_ARN")) {
        let session = get("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| SESSION.to_owned());
        let token = read(Path::new(&file))?;
        return web_identity(http, sts, &role, &session, token.trim()).await;
    }
    if let Some(url) = get("AWS_CONTAINER_CREDENTIALS_FULL_URI") {
        return container(http, environment, url).await;
    }
    if get("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Err(Failure::new(
            "no credentials of AWS are configured, and AWS_EC2_METADATA_DISABLED excludes those of the \
             instance: give the service account a role (IRSA or EKS Pod Identity)",
        ));
    }
    instance(http, environment).await.map_err(|failure| {
        let what =
            "no credentials of AWS are configured, and the role of the instance cannot be read";
        Failure {
            what: format!("{what}: {failure}"),
            ..failure
        }
    })
}

/// Reads the profile of the shared file; `None` without one.
fn shared(environment: &Environment) -> Result<Option<Credentials>, Failure> {
    let home = || Some(PathBuf::from(environment.get("HOME")?).join(".aws/credentials"));
    let named = environment
        .get("AWS_SHARED_CREDENTIALS_FILE")
        .map(PathBuf::from);
    let wanted = environment.get("AWS_PROFILE");
    let Some(path) = named.clone().or_else(home) else {
        return Ok(None);
    };
    if named.is_none() && !path.exists() {
        return Ok(None);
    }
    let text = read(&path)?;
    let profile = wanted.as_deref().unwrap_or("default");
    let key = |name| profile_value(&text, profile, name);
    match (key("aws_access_key_id"), key("aws_secret_access_key")) {
        (Some(id), Some(secret)) => Ok(Some(Credentials {
            id: id.to_owned(),
            secret: secret.to_owned(),
            token: key("aws_session_token").map(str::to_owned),
            expires: None,
        })),
        // The profile of a name may be one of the configuration file, which is not read.
        _ if named.is_none() && wanted.is_none() => Ok(None),
        _ => Err(Failure::new(format!(
            "{} has no keys of the profile {profile:?}: write aws_access_key_id and aws_secret_access_key",
            path.display()
        ))),
    }
}

/// Returns the value of a key in the section of a profile.
fn profile_value<'a>(text: &'a str, profile: &str, key: &str) -> Option<&'a str> {
    let mut is_in = false;
    let mut found = None;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            is_in = name.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| is_in)
            && name.trim() == key
        {
            found = Some(value.trim()).filter(|value| !value.is_empty());
        }
    }
    found
}

/// Exchanges the token of a service account for credentials of a role.
async fn web_identity(
    http: &Http,
    sts: &str,
    role: &str,
    session: &str,
    token: &str,
) -> Result<Credentials, Failure> {
    let body = form(&[
        ("Action", "AssumeRoleWithWebIdentity"),
        ("Version", "2011-06-15"),
        ("RoleArn", role),
        ("RoleSessionName", session),
        ("WebIdentityToken", token),
    ]);
    let kind = "application/x-www-form-urlencoded".to_owned();
    let request = Request {
        method: Method::POST,
        url: sts.to_owned(),
        headers: vec![("content-type".to_owned(), kind)],
        body: body.into_bytes(),
    };
    let response = http.ask(request).await?.success()?;
    let root =
        Element::parse(&response.body).map_err(|error| response.failure(&error.to_string()))?;
    let path = ["AssumeRoleWithWebIdentityResult", "Credentials"];
    let found = root.at(&path).and_then(|found| {
        let text = |name| Some(found.text_of(name)).filter(|text| !text.is_empty());
        Some(Credentials {
            id: text("AccessKeyId")?.to_owned(),
            secret: text("SecretAccessKey")?.to_owned(),
            token: Some(text("SessionToken")?.to_owned()),
            expires: Some(text("Expiration")?.parse().ok()?),
        })
    });
    // The response is not quoted: it may have secrets.
    found.ok_or_else(|| response.failure("the response has no credentials"))
}

/// Asks the agent of EKS Pod Identity, or of ECS.
async fn container(
    http: &Http,
    environment: &Environment,
    url: String,
) -> Result<Credentials, Failure> {
    if !may_be_asked(&url) {
        return Err(Failure::new(format!(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI is {url:?}: it must be https, or the address of an agent on this \
             host"
        )));
    }
    let mut headers = Vec::new();
    let token = match environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") {
        // The file is replaced every few hours.
        Some(file) => Some(read(Path::new(&file))?),
        None => environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
    };
    if let Some(token) = token {
        headers.push(("authorization".to_owned(), token.trim().to_owned()));
    }
    document(http, url, headers).await
}

/// Returns whether the token may be sent there: by TLS, or to this host.
fn may_be_asked(url: &str) -> bool {
    let Ok(url) = url.parse::<Uri>() else {
        return false;
    };
    let host = url.host().unwrap_or_default();
    let is_here = host == "localhost" || host == "[::1]" || host.starts_with("127.");
    url.scheme_str() == Some("https") || is_here || AGENTS.contains(&host)
}

/// Asks the metadata service of the instance (version 2) for the credentials of its role.
async fn instance(http: &Http, environment: &Environment) -> Result<Credentials, Failure> {
    let base = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    let base = base.unwrap_or_else(|| IMDS.to_owned());
    let base = base.trim_end_matches('/');
    let lifetime = "x-aws-ec2-metadata-token-ttl-seconds".to_owned();
    let request = Request {
        method: Method::PUT,
        url: format!("{base}/latest/api/token"),
        headers: vec![(lifetime, IMDS_TOKEN_SECONDS.to_owned())],
        body: Vec::new(),
    };
    let token = http.ask(request).await?.success()?;
    let token = String::from_utf8_lossy(&token.body).trim().to_owned();
    let headers = vec![("x-aws-ec2-metadata-token".to_owned(), token)];
    let roles = format!("{base}/latest/meta-data/iam/security-credentials/");
    let request = Request {
        method: Method::GET,
        url: roles.clone(),
        headers: headers.clone(),
        body: Vec::new(),
    };
    let named = http.ask(request).await?.success()?;
    let role = String::from_utf8_lossy(&named.body);
    let role = role.lines().next().unwrap_or_default().trim();
    if role.is_empty() {
        return Err(named.failure("the instance has no role"));
    }
    document(http, format!("{roles}{role}"), headers).await
}

/// Fetches credentials in the form of the metadata service.
async fn document(
    http: &Http,
    url: String,
    headers: Vec<(String, String)>,
) -> Result<Credentials, Failure> {
    let request = Request {
        method: Method::GET,
        url,
        headers,
        body: Vec::new(),
    };
    let response = http.ask(request).await?.success()?;
    // Neither the response nor the error is quoted: they may have secrets.
    let found: Document = serde_json::from_slice(&response.body)
        .map_err(|_| response.failure("the response has no credentials"))?;
    Ok(Credentials {
        id: found.access_key_id,
        secret: found.secret_access_key,
        token: Some(found.token),
        expires: Some(found.expiration),
    })
}

/// Reads a file, which is small and local.
fn read(path: &Path) -> Result<String, Failure> {
    let text = runtime::text_file::read(path, MAX_FILE);
    text.map_err(|error| Failure::new(format!("cannot read {}: {error}", path.display())))
}
