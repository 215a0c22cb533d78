use runtime::tls::ClientCertificates;
use testkit::{Authority, Purpose};

use super::*;

/// Gives both ends certificates of a new authority, in `dir`.
fn rotate(dir: &Path) {
    let authority = Authority::new("ours").unwrap();
    for (purpose, name, names) in [
        (Purpose::Server, "target", ["127.0.0.1"].as_slice()),
        (Purpose::Client, "gpuwarden", &[]),
    ] {
        let signed = authority.sign(purpose, name, names).unwrap();
        signed.write(dir, name).unwrap();
    }
    std::fs::write(dir.join("ca.crt"), authority.pem()).unwrap();
}

fn pair(dir: &Path, name: &str) -> CertificateFiles {
    CertificateFiles {
        certificate: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    }
}

/// Returns the TLS of a target that requires client certificates.
fn mutual(dir: &Path) -> ServerTls {
    let clients = ClientCertificates::Required(dir.join("ca.crt"));
    ServerTls::load(pair(dir, "target"), clients).unwrap()
}

/// Returns an installation that forwards by TLS to `port`, and its directory of certificates.
fn installation(port: u16, shows: Option<&str>) -> Installation {
    let dir = tempfile::tempdir().unwrap();
    rotate(dir.path());
    let tls = TargetTls {
        authority: dir.path().join("ca.crt"),
        own: shows.map(|name| pair(dir.path(), name)),
    };
    Installation::with(dir, port, Some(tls))
}

impl Installation {
    fn failed_attempts(&self) -> u64 {
        let text = self.metrics.encode();
        let lines = text.lines();
        let of_code = lines.filter(|line| line.starts_with("gpuwarden_forward_failures_total"));
        let counts = of_code.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        counts.sum()
    }
}

impl Target {
    fn messages(&self) -> Vec<String> {
        let taken = self.taken.lock().unwrap();
        taken.iter().map(|event| event.message.clone()).collect()
    }
}

#[tokio::test]
async fn over_mutual_tls_events_arrive_also_after_all_certificates_have_changed() {
    let (listening, port) = listener().await;
    let installation = installation(port, Some("gpuwarden"));
    let dir = installation.dir.path();
    let target = Target::default();
    let (stop, served) = target.serve_by(listening, Some(mutual(dir)));
    installation.accept(&numbered(0..20)).await;
    installation.empty().await;
    assert_eq!(target.messages(), numbered(0..20));
    assert_eq!(
        installation.forwarding.status().target,
        format!("https://127.0.0.1:{port}")
    );

    // Signed by another authority, while the target is down and the installation runs.
    stop.cancel();
    served.await.unwrap();
    installation.accept(&numbered(20..40)).await;
    rotate(dir);
    let listening = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = target.serve_by(listening, Some(mutual(dir)));
    installation.empty().await;
    assert_eq!(target.messages(), numbered(0..40));
    assert_eq!(installation.forwarding.status().delivery.failing, None);
}

#[tokio::test]
async fn a_target_that_is_not_trusted_gets_nothing_and_all_once_it_is() {
    let (listening, port) = listener().await;
    let installation = installation(port, Some("gpuwarden"));
    let dir = installation.dir.path();
    let right = std::fs::read(dir.join("ca.crt")).unwrap();
    let stranger = Authority::new("theirs").unwrap();
    std::fs::write(dir.join("ca.crt"), stranger.pem()).unwrap();
    let target = Target::default();
    let own = ServerTls::load(pair(dir, "target"), ClientCertificates::None).unwrap();
    let (stop, served) = target.serve_by(listening, Some(own));
    for index in 0..10 {
        installation
            .accept(&numbered(index * 2..index * 2 + 2))
            .await;
    }
    let why = installation.failing("UnknownIssuer").await;
    assert!(why.contains("certificate"), "{why}");
    assert_eq!(installation.forwarding.status().waiting, 20);
    stop.cancel();
    served.await.unwrap();

    // A target without TLS gets nothing either.
    let listening = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (stop, served) = target.serve(listening);
    installation.failing("InvalidContentType").await;
    stop.cancel();
    served.await.unwrap();
    assert!(target.tokens.lock().unwrap().is_empty());

    std::fs::write(dir.join("ca.crt"), right).unwrap();
    let listening = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = target.serve_by(listening, Some(mutual(dir)));
    installation.empty().await;
    assert_eq!(target.messages(), numbered(0..20));
    let status = installation.forwarding.status();
    assert_eq!((status.missed, status.aside), (0, 0));
}

#[tokio::test]
async fn a_target_that_does_not_trust_us_costs_no_event() {
    let (listening, port) = listener().await;
    let installation = installation(port, Some("gpuwarden"));
    let dir = installation.dir.path();
    let ours = std::fs::read_to_string(dir.join("gpuwarden.crt")).unwrap();
    let key = std::fs::read_to_string(dir.join("gpuwarden.key")).unwrap();
    let stranger = Authority::new("theirs").unwrap();
    let foreign = stranger.sign(Purpose::Client, "gpuwarden", &[]).unwrap();
    foreign.write(dir, "gpuwarden").unwrap();
    let target = Target::default();
    let (_stop, _served) = target.serve_by(listening, Some(mutual(dir)));
    installation.accept(&numbered(0..1)).await;
    installation.failing("did not accept the connection").await;
    // Enough attempts to make an event a suspect.
    while installation.failed_attempts() < 6 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(installation.forwarding.status().delivery.suspects, 0);
    installation.accept(&numbered(1..20)).await;

    let ours = testkit::Certificate {
        certificate: ours,
        key,
    };
    ours.write(dir, "gpuwarden").unwrap();
    installation.empty().await;
    assert_eq!(target.messages(), numbered(0..20));
    let status = installation.forwarding.status();
    assert_eq!((status.missed, status.aside), (0, 0));
}

#[test]
fn files_that_cannot_be_used_are_told_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    rotate(dir);
    std::fs::write(dir.join("empty.crt"), "").unwrap();
    let (target, client) = (pair(dir, "target"), pair(dir, "gpuwarden"));
    let mixed = CertificateFiles {
        certificate: client.certificate.clone(),
        key: target.key,
    };
    for (authority, own, expected) in [
        ("none.crt", None, "cannot read "),
        ("empty.crt", None, "holds no certificate"),
        ("ca.crt", Some(pair(dir, "gone")), "gone.crt"),
        ("ca.crt", Some(mixed), "cannot be used with the key"),
    ] {
        let target = ForwardTarget {
            host: "collector".into(),
            port: 50051,
            token: None,
            tls: Some(TargetTls {
                authority: dir.join(authority),
                own,
            }),
        };
        let Err(error) = Forwarding::open(&target, dir, &Metrics::default()) else {
            panic!("{expected}: it starts");
        };
        let error = chain(&error);
        assert!(
            error.starts_with("the certificates for GRPCSinkTarget cannot be used: ")
                && error.contains(expected),
            "{error}"
        );
    }
}
