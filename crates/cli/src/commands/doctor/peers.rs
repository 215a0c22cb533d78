//! What it would talk to and be talked to by, besides the API server: its port, its
//! controller, and the certificates for both.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use domain::shell;
use jiff::Timestamp;
use runtime::tls::{
    CertificateFiles, ClientCertificates, ClientTls, ServerTls, TlsError, Validity,
};
use tokio::net::{TcpListener, TcpStream};

use super::{Finding, Installation, causes};
use crate::settings::{DeliverySettings, IngestSettings, Transport};

/// As long as an agent takes to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// In the last tenth of its time a certificate should have been renewed: cert-manager and the
/// kubelet do it when a third is left.
const LAST_PART: i32 = 10;

pub(super) async fn check(installation: &Installation, running: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !running {
        findings.push(port("listen", installation.process.listen).await);
    }
    if let Some(ingest) = &installation.ingest {
        if !running {
            findings.push(port("grpc-listen", ingest.listen).await);
        }
        findings.extend(own_certificate(ingest));
    }
    if let Some(delivery) = &installation.delivery {
        findings.extend(credentials(delivery));
        findings.push(controller(&delivery.controller).await);
    }
    let act = installation.act.as_ref();
    if let Some(config) = act.and_then(|act| act.connector_config.as_deref()) {
        findings.extend(sink(config));
    }
    findings
}

/// Tries whether it could listen there.
async fn port(check: &'static str, address: SocketAddr) -> Finding {
    match TcpListener::bind(address).await {
        Ok(_) => Finding::ok(check, format!("{address} is free")),
        Err(error) => Finding::problem(
            check,
            format!("{address}: {error}"),
            "gpuwarden does not start where it cannot listen",
        )
        .fix(format!(
            "ss -ltnp 'sport = :{}' shows who does",
            address.port()
        )),
    }
}

fn own_certificate(ingest: &IngestSettings) -> Vec<Finding> {
    let Transport::Tls { own, clients } = ingest.transport.clone() else {
        let what = "events are taken without TLS, from anybody on this machine, for any node";
        let why = "whoever gets to the port can have any node taken out of service";
        let fix = "--grpc-tls-cert and --grpc-tls-key in the place of --grpc-insecure";
        return vec![Finding::warning("tls", what, why).fix(fix)];
    };
    let certificate = own.certificate.clone();
    let clients = clients.map_or(ClientCertificates::None, ClientCertificates::Optional);
    let tls = ServerTls::load(own, clients);
    vec![loaded(&certificate, tls.err()), valid(&certificate)]
}

fn credentials(delivery: &DeliverySettings) -> Vec<Finding> {
    let own = delivery.certificate.as_ref();
    let mut findings = certificates(delivery.authority.as_deref(), own);
    findings.extend(delivery.token_file.as_deref().map(token));
    findings
}

/// Looks at how the gRPC sink talks to its target. What is wrong with the file that names it is
/// told elsewhere ([`super::machine`]).
fn sink(config: &Path) -> Vec<Finding> {
    let read = connector::ConnectorConfig::read(config).ok();
    let Some(target) = read.and_then(|read| read.forward) else {
        return Vec::new();
    };
    if target.is_open_to_others() {
        let what = format!("events, and a token if one is named, go to {target} without TLS");
        let why = "whoever can listen on the way reads them, and can use the token";
        let fix = "GRPCSinkTarget https://HOST:PORT and GRPCSinkCAPath in --connector-config";
        return vec![Finding::warning("grpc-sink", what, why).fix(fix)];
    }
    target.tls.map_or_else(Vec::new, |tls| {
        certificates(Some(&tls.authority), tls.own.as_ref())
    })
}

/// Looks at what is needed to connect to somebody: whom to trust, and what to show.
fn certificates(authority: Option<&Path>, own: Option<&CertificateFiles>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(authority) = authority {
        let tls = ClientTls::load(authority.to_owned(), own.cloned());
        findings.push(loaded(authority, tls.err()));
    }
    findings.extend(own.map(|own| valid(&own.certificate)));
    findings
}

fn loaded(file: &Path, error: Option<TlsError>) -> Finding {
    match error {
        None => Finding::ok(
            "tls",
            format!("{} and what belongs to it can be read", file.display()),
        ),
        Some(error) => unusable(causes(&error), file),
    }
}

fn valid(certificate: &Path) -> Finding {
    match Validity::read(certificate) {
        Ok(validity) => in_time(certificate, validity, Timestamp::now()),
        Err(error) => unusable(causes(&error), certificate),
    }
}

/// Says whether a certificate may be used at the time `now`, and for how long it will.
fn in_time(certificate: &Path, validity: Validity, now: Timestamp) -> Finding {
    let shown = certificate.display();
    let Validity { from, until } = validity;
    if now < from {
        return unusable(format!("{shown} is valid from {from:.0} only"), certificate);
    }
    if until < now {
        return unusable(format!("{shown} has expired at {until:.0}"), certificate);
    }
    // Who renews certificates does it long before; how long they live varies from hours to years.
    if until.duration_since(now) < validity.whole() / LAST_PART {
        let what = format!("{shown} expires at {until:.0}, and should have been renewed by now");
        let why = "no event travels with an expired certificate";
        return Finding::warning("tls", what, why)
            .fix("look at what renews it; a changed file is taken up without a restart");
    }
    Finding::ok("tls", format!("{shown} is valid until {until:.0}"))
}

fn unusable(what: String, file: &Path) -> Finding {
    let file = shell::word(&file.to_string_lossy());
    Finding::problem("tls", what, "no event travels without it")
        .fix(format!("openssl x509 -noout -subject -dates -in {file}"))
}

fn token(path: &Path) -> Finding {
    let shown = path.display();
    let what = match std::fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => {
            return Finding::ok("token", format!("{shown} can be read"));
        }
        Ok(_) => format!("{shown} is empty"),
        Err(error) => format!("{shown}: {error}"),
    };
    let why = "without it the controller does not know which node reports, and refuses";
    Finding::problem("token", what, why)
        .fix("mount a projected ServiceAccount token with the audience gpuwarden there")
}

async fn controller(url: &str) -> Finding {
    const WHY: &str =
        "events stay on this node until it is reached, and its faults are not acted on";
    let place = url
        .parse::<http::Uri>()
        .ok()
        .and_then(|uri| Some((uri.host()?.to_owned(), uri.port_u16()?)));
    let Some((host, port)) = place else {
        let what = format!("{url:?} is no address such as https://gpuwarden.example:50051");
        return Finding::problem("controller", what, WHY);
    };
    let connecting = TcpStream::connect((host.trim_matches(['[', ']']), port));
    let failed = match tokio::time::timeout(CONNECT, connecting).await {
        Ok(Ok(_)) => return Finding::ok("controller", format!("{url} can be reached")),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", CONNECT.as_secs()),
    };
    Finding::problem(
        "controller",
        format!("{url} cannot be reached: {failed}"),
        WHY,
    )
    .fix(format!(
        "curl -vk https://{host}:{port}/ shows how far it gets"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Outcome;

    #[tokio::test]
    async fn a_port_is_free_or_taken_and_a_controller_there_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = format!("https://{address}");
        assert_eq!(port("listen", address).await.result, Outcome::Problem);
        assert_eq!(controller(&url).await.result, Outcome::Ok);
        drop(listener);
        assert_eq!(port("listen", address).await.result, Outcome::Ok);
        let gone = controller(&url).await;
        assert_eq!(gone.result, Outcome::Problem);
        assert!(gone.what.contains("refused"), "{gone:?}");
        assert_eq!(controller("not a place").await.result, Outcome::Problem);
    }

    #[test]
    fn a_token_has_to_be_there_and_say_something() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(token(file.path()).what.ends_with("is empty"));
        std::fs::write(file.path(), "t").unwrap();
        assert_eq!(token(file.path()).result, Outcome::Ok);
        assert_eq!(token(Path::new("/none")).result, Outcome::Problem);
    }

    #[test]
    fn certificates_are_read() {
        let delivery = |authority: &Path| DeliverySettings {
            controller: "https://c:1".into(),
            authority: Some(authority.to_owned()),
            certificate: None,
            token_file: Some("/none".into()),
            outbox_size: 0,
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = credentials(&delivery(file.path()));
        assert_eq!(
            found
                .iter()
                .map(|it| (it.check, it.result))
                .collect::<Vec<_>>(),
            [("tls", Outcome::Problem), ("token", Outcome::Problem)]
        );
        let open = IngestSettings {
            listen: "127.0.0.1:1".parse().unwrap(),
            transport: Transport::Open,
            tokens: controller::ingest::TokenRules {
                audience: String::new(),
                agents: Vec::new(),
                central: Vec::new(),
            },
        };
        assert_eq!(own_certificate(&open)[0].result, Outcome::Warning);
    }

    #[test]
    fn how_the_grpc_sink_is_reached_is_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let secured = r#"https://c:1", "GRPCSinkCAPath": "/none.ca", "GRPCSinkCertPath":
            "/none.crt", "GRPCSinkKeyPath": "/none.key"#;
        for (target, expected) in [
            ("c:1", vec![("grpc-sink", Outcome::Warning)]),
            ("127.0.0.1:1", vec![]),
            (secured, vec![("tls", Outcome::Problem); 2]),
            ("no target", vec![]),
        ] {
            let text =
                format!(r#"{{"enableGRPCSinkConnector": true, "GRPCSinkTarget": "{target}"}}"#);
            std::fs::write(file.path(), text).unwrap();
            let found = sink(file.path());
            let found: Vec<_> = found.iter().map(|it| (it.check, it.result)).collect();
            assert_eq!(found, expected, "{target}");
        }
    }

    #[test]
    fn a_certificate_has_its_time() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap();
        let validity = Validity {
            from: time("2026-01-01T00:00:00Z"),
            until: time("2026-04-11T00:00:00Z"),
        };
        let table = [
            (
                "2025-12-31T23:59:59Z",
                Outcome::Problem,
                "is valid from 2026-01-01T00:00:00Z only",
            ),
            (
                "2026-01-01T00:00:00Z",
                Outcome::Ok,
                "is valid until 2026-04-11T00:00:00Z",
            ),
            ("2026-03-31T23:59:59Z", Outcome::Ok, "is valid until"),
            (
                "2026-04-01T00:00:01Z",
                Outcome::Warning,
                "expires at 2026-04-11T00:00:00Z",
            ),
            (
                "2026-04-11T00:00:01Z",
                Outcome::Problem,
                "has expired at 2026-04-11T00:00:00Z",
            ),
        ];
        for (now, result, text) in table {
            let found = in_time(Path::new("/tls.crt"), validity, time(now));
            assert_eq!(found.result, result, "{now}");
            assert!(found.what.contains(text), "{found:?}");
        }
    }
}
