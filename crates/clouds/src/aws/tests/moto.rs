//! The client of EC2 and STS against moto, which checks signatures and permissions.

use std::collections::BTreeMap;

use testkit::Component;

use super::*;
use crate::Instance;
use crate::witness::Witness;

/// Asks moto for the events of instances, with the credentials of this environment.
async fn ask(url: &str, variables: &[(&str, &str)]) -> Result<Told, Failure> {
    let config = AwsConfig {
        account_id: String::new(),
        region: "eu-west-1".to_owned(),
        poll: jiff::SignedDuration::from_mins(1),
        endpoint: url.to_owned(),
    };
    let variables = variables.iter();
    let variables = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let environment = Environment::of(variables.collect::<BTreeMap<_, _>>());
    let mut aws = Aws::new(&config, Http::new().unwrap(), environment);
    instance_status::poll(&mut aws.client, &aws.ec2).await
}

#[tokio::test]
async fn moto_gives_all_pages_to_a_role_that_may_read_them() {
    let Some(python) = testkit::require(Component::PythonGrpc) else {
        return;
    };
    let moto = Witness::start(&python, "moto_aws.py", &[], &Value::Null).await;
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let url = text(&moto.said["url"]);
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), "web identity\n").unwrap();
    let token = token.path().to_str().unwrap();
    let [reader, other] = [0, 1].map(|role| text(&moto.said["roles"][role]));
    let web = async |role: &str| {
        let variables = [
            ("AWS_WEB_IDENTITY_TOKEN_FILE", token),
            ("AWS_ROLE_ARN", role),
        ];
        ask(&url, &variables).await
    };

    let told = web(&reader).await.unwrap();
    assert_eq!((told.complete, told.odd), (true, 0));
    let found = told.announced.iter().map(|one| {
        let notice = &one.notice;
        let window = [notice.start, notice.end].map(|time| time.unwrap().as_second() - NOW);
        (
            one.instance.clone(),
            notice.event.clone(),
            notice.kind,
            window,
        )
    });
    let kinds = [
        Kind::Reboot,
        Kind::Reboot,
        Kind::Reboot,
        Kind::Replacement,
        Kind::Stop,
    ];
    let expected = kinds.iter().enumerate().map(|(number, kind)| {
        let instance = Instance::aws(&text(&moto.said["instances"][number]));
        (
            instance,
            format!("instance-event-{number}"),
            *kind,
            [3600, 3 * 3600],
        )
    });
    assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>());

    let failure = web(&other).await.unwrap_err();
    let says = "AccessDenied: User: arn:aws:sts::123456789012:assumed-role/other/gpuwarden is not authorized";
    assert!(failure.what.contains(says), "{failure}");

    let imds = [("AWS_EC2_METADATA_SERVICE_ENDPOINT", url.as_str())];
    assert_eq!(ask(&url, &imds).await, Ok(told));
    let other_secret = [
        ("AWS_ACCESS_KEY_ID", "test-key"),
        ("AWS_SECRET_ACCESS_KEY", "another"),
        ("AWS_SESSION_TOKEN", "test-session-token"),
    ];
    let failure = ask(&url, &other_secret).await.unwrap_err();
    assert!(
        failure.what.contains("status 401: AuthFailure: "),
        "{failure}"
    );
}
