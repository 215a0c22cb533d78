use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::*;
use crate::loopback::{Asked, Reply, Server};
use crate::witness::Witness;

fn at(minute: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + 60 * minute).unwrap()
}

fn keys(variables: &[(&str, &str)], sts: &str) -> Keys {
    let variables: BTreeMap<String, String> = (variables.iter())
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    Keys::new(
        Http::new().unwrap(),
        Environment::of(variables),
        format!("{sts}/"),
    )
}

/// Returns the document of a metadata service whose key has this name, and ends at this minute.
fn document(id: &str, end: i64) -> Reply {
    let end = at(end);
    Reply::new(
        200,
        format!(
            r#"{{"Code": "Success", "AccessKeyId": "{id}", "SecretAccessKey": "s", "Token": "t", "Expiration": "{end}"}}"#
        ),
    )
}

/// A server of every place; the path says which was asked.
fn everything(asked: &Asked) -> Reply {
    match asked.target.as_str() {
        "/latest/api/token" if asked.method == "PUT" => Reply::new(200, "imds-token"),
        _ if asked.target.starts_with("/latest/")
            && asked.header("x-aws-ec2-metadata-token") != "imds-token" =>
        {
            Reply::new(401, "")
        }
        "/latest/meta-data/iam/security-credentials/" => Reply::new(200, "role"),
        "/latest/meta-data/iam/security-credentials/role" => document("IMDS", 60),
        "/pod-identity" if asked.header("authorization") == "pod-token" => document("POD", 60),
        "/" => Reply::new(
            200,
            "<AssumeRoleWithWebIdentityResponse xmlns='https://sts.amazonaws.com/doc/2011-06-15/'>
               <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>STS</AccessKeyId>
               <SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
               <Expiration>2027-01-15T09:00:00Z</Expiration></Credentials>
               </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
        ),
        _ => Reply::new(404, "no such path"),
    }
}

#[tokio::test]
async fn the_first_place_that_is_configured_counts() {
    let server = Server::start(everything).await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let shared = path(
        "shared",
        "[other]\naws_access_key_id = OTHER\naws_secret_access_key = s\n# c\n[default]\n\
         aws_access_key_id=SHARED\naws_secret_access_key = a=b\naws_session_token =\n",
    );
    let (web, pod) = (path("web", "web token+\n"), path("pod", "pod-token\n"));
    let agent = format!("{}/pod-identity", server.url);
    let mut variables = vec![
        ("AWS_ACCESS_KEY_ID", "ENV"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_SHARED_CREDENTIALS_FILE", &shared),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", &web),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &agent),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &pod),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &server.url),
    ];
    let mut found = Vec::new();
    for removed in [0, 2, 1, 2, 2] {
        variables.drain(..removed);
        let current = keys(&variables, &server.url).current(at(0)).await.unwrap();
        found.push(current);
    }
    let ids: Vec<&str> = found.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["ENV", "SHARED", "STS", "POD", "IMDS"]);
    assert_eq!((found[1].secret.as_str(), &found[1].token), ("a=b", &None));
    assert_eq!(found[2].expires, Some(at(60)));
    let asked = server.asked();
    let form = asked[0].text();
    assert!(
        form.contains("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr"),
        "{form}"
    );
    assert!(form.contains("RoleSessionName=gpuwarden"), "{form}");
    assert!(form.ends_with("WebIdentityToken=web%20token%2B"), "{form}");
    let other = [
        ("AWS_SHARED_CREDENTIALS_FILE", shared.as_str()),
        ("AWS_PROFILE", "other"),
    ];
    assert_eq!(keys(&other, "").current(at(0)).await.unwrap().id, "OTHER");
    let shown = format!("{:?}", found[2]);
    assert!(shown.contains("STS") && !shown.contains("\"s\""), "{shown}");
}

#[tokio::test]
async fn credentials_are_kept_and_renewed_shortly_before_their_end() {
    let number = Arc::new(AtomicU32::new(0));
    let next = Arc::clone(&number);
    let server = Server::start(move |_| {
        let number = next.fetch_add(1, Ordering::Relaxed);
        match number {
            2 => Reply::new(500, "down"),
            _ => document(&format!("K{number}"), 60 * i64::from(number + 1)),
        }
    })
    .await;
    let agent = format!("{}/c", server.url);
    let mut keys = keys(&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", &agent)], "");
    let mut id = async |minute| keys.current(at(minute)).await.map(|one| one.id);
    assert_eq!(id(0).await.unwrap(), "K0");
    assert_eq!(id(54).await.unwrap(), "K0");
    assert_eq!(id(55).await.unwrap(), "K1");
    // The agent fails: the old ones serve until their end.
    assert_eq!(id(116).await.unwrap(), "K1");
    assert_eq!(id(117).await.unwrap(), "K3");
    keys.forget();
    assert_eq!(keys.current(at(117)).await.unwrap().id, "K4");
    number.store(2, Ordering::Relaxed);
    let failure = keys.current(at(1000)).await.unwrap_err();
    assert!(failure.what.contains("/c: status 500: down"), "{failure}");
}

#[tokio::test]
async fn a_token_is_read_again_each_time() {
    let server = Server::start(|asked| document(asked.header("authorization"), 0)).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let agent = format!("{}/c", server.url);
    let path = file.path().to_str().unwrap();
    let variables = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.as_str()),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", path),
    ];
    let mut keys = keys(&variables, "");
    for token in ["one", "two"] {
        std::fs::write(file.path(), token).unwrap();
        assert_eq!(keys.current(at(0)).await.unwrap().id, token);
    }
}

#[tokio::test]
async fn a_place_that_cannot_be_used_is_named_and_no_secret_is_shown() {
    let server = Server::start(|asked| match asked.target.as_str() {
        "/cut" => Reply::new(200, r#"{"AccessKeyId": "A", "SecretAccessKey": "very-secret", "Tok"#),
        "/" => Reply::new(
            400,
            "<ErrorResponse><Error><Code>InvalidIdentityToken</Code><Message>no</Message></Error></ErrorResponse>",
        ),
        _ => Reply::new(404, ""),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f");
    std::fs::write(&file, "[default]\nregion = x\n").unwrap();
    let (file, missing) = (file.to_str().unwrap(), dir.path().join("missing"));
    let (missing, cut) = (missing.to_str().unwrap(), format!("{}/cut", server.url));
    let shared = "AWS_SHARED_CREDENTIALS_FILE";
    let agent = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    let web = "AWS_WEB_IDENTITY_TOKEN_FILE";
    let imds = "AWS_EC2_METADATA_SERVICE_ENDPOINT";
    let cases: [(&[(&str, &str)], &str); 9] = [
        (&[(shared, file)], "no keys of the profile \"default\""),
        (
            &[(shared, file), ("AWS_PROFILE", "p")],
            "no keys of the profile \"p\"",
        ),
        (&[(shared, missing)], "cannot read"),
        (&[(web, missing), ("AWS_ROLE_ARN", "r")], "cannot read"),
        (
            &[(web, file), ("AWS_ROLE_ARN", "r")],
            "InvalidIdentityToken",
        ),
        (&[(agent, "http://example.com/x")], "must be https"),
        (
            &[(agent, &cut)],
            "/cut: status 200: the response has no credentials",
        ),
        (&[("AWS_EC2_METADATA_DISABLED", "TRUE")], "IRSA"),
        (
            &[(imds, &server.url)],
            "the role of the instance cannot be read",
        ),
    ];
    for (variables, says) in cases {
        let failure = keys(variables, &server.url)
            .current(at(0))
            .await
            .unwrap_err();
        assert!(failure.what.contains(says), "{failure}");
        assert!(!failure.what.contains("very-secret"), "{failure}");
    }
    // The default file of a home without one is no place.
    let home = [
        ("HOME", dir.path().to_str().unwrap()),
        (imds, server.url.as_str()),
    ];
    let failure = keys(&home, "").current(at(0)).await.unwrap_err();
    assert!(failure.what.contains("role of the instance"), "{failure}");
}

/// The order of several places differs among AWS's own clients; what each place holds does not.
#[tokio::test]
async fn botocore_finds_the_same_keys_in_each_place() {
    let Some(python) = testkit::require(testkit::Component::PythonGrpc) else {
        return;
    };
    let server = Server::start(everything).await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let shared =
        "[default]\naws_access_key_id=SHARED\naws_secret_access_key = a=b\naws_session_token = t\n";
    let (shared, web) = (path("shared", shared), path("web", "token"));
    let (pod, agent) = (
        path("pod", "pod-token"),
        format!("{}/pod-identity", server.url),
    );
    let places: [&[(&str, &str)]; 5] = [
        &[
            ("AWS_ACCESS_KEY_ID", "ENV"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("AWS_SESSION_TOKEN", "t"),
        ],
        &[("AWS_SHARED_CREDENTIALS_FILE", &shared)],
        &[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", &web),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"),
            ("AWS_ROLE_SESSION_NAME", "session"),
            ("AWS_ENDPOINT_URL_STS", &server.url),
            ("AWS_REGION", "eu-west-1"),
        ],
        &[
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &agent),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &pod),
        ],
        &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &server.url)],
    ];
    let mut ours = Vec::new();
    for place in places {
        let found = keys(place, &server.url).current(at(0)).await.unwrap();
        ours.push((found.id, found.secret, found.token));
    }
    let ours_asked = server.asked();
    let places = places.map(|place| place.iter().copied().collect::<BTreeMap<_, _>>());
    let botocore = Witness::start(&python, "aws_keys.py", &[], &json!(places)).await;
    assert_eq!(botocore.said, json!(ours));
    assert_eq!(ours[2].0, "STS");
    // The request to STS has the same form.
    let theirs = server.asked().split_off(ours_asked.len());
    let form = |asked: &[Asked]| {
        let request = asked.iter().find(|one| one.target == "/").unwrap();
        let mut pairs: Vec<String> = request.text().split('&').map(str::to_owned).collect();
        pairs.sort();
        pairs
    };
    assert_eq!(form(&theirs), form(&ours_asked));
}
