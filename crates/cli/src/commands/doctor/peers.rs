//! The neighbours besides the API server: the ports that others connect to, the controller that
//! an agent delivers to, and the certificates for both.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use model::shell;
use runtime::tls::{
    CertificateFiles, ClientCertificates, ClientTls, ServerTls, TlsError, Validity,
};
use tokio::net::{TcpListener, TcpStream};

use super::{Finding, Installation, causes};
use crate::settings::{DeliverySettings, IngestSettings, Transport};

/// The time that an agent allows for connecting.
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

/// Tries whether this user can listen there.
async fn port(check: &'static str, address: SocketAddr) -> Finding {
    let bound = TcpListener::bind(address).await;
    let bound = bound.map_err(|error| format!("{address}: {error}"));
    let why = "gpuwarden does not start where it cannot listen";
    let fix = format!("ss -ltnp 'sport = :{}' shows who does", address.port());
    Finding::tried(check, format!("{address} is free"), bound, why).fix(fix)
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
    vec![loaded(&certificate, tls), valid(&certificate)]
}

fn credentials(delivery: &DeliverySettings) -> Vec<Finding> {
    let own = delivery.certificate.as_ref();
    let mut findings = certificates(delivery.authority.as_deref(), own);
    findings.extend(delivery.token_file.as_deref().map(token));
    findings
}

/// Looks at the way of the gRPC sink to its target. A wrong file is told of elsewhere
/// ([`super::machine`]).
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

/// Looks at the certificates of a client: the authority that it trusts, and its own.
fn certificates(authority: Option<&Path>, own: Option<&CertificateFiles>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(authority) = authority {
        let tls = ClientTls::load(authority.to_owned(), own.cloned());
        findings.push(loaded(authority, tls));
    }
    findings.extend(own.map(|own| valid(&own.certificate)));
    findings
}

fn loaded<T>(file: &Path, tls: Result<T, TlsError>) -> Finding {
    let well = format!("{} and what belongs to it can be read", file.display());
    certificate(file, tls.map(|_| well).map_err(|error| causes(&error)))
}

fn valid(file: &Path) -> Finding {
    match Validity::read(file) {
        Ok(validity) => in_time(file, validity, Timestamp::now()),
        Err(error) => certificate(file, Err(causes(&error))),
    }
}

/// Compares the dates of a certificate with the time `now`.
fn in_time(file: &Path, validity: Validity, now: Timestamp) -> Finding {
    let shown = file.display();
    let Validity { from, until } = validity;
    if now >= from && now <= until && until.duration_since(now) < validity.whole() / LAST_PART {
        let what = format!("{shown} expires at {until:.0}, and should have been renewed by now");
        let why = "no event travels with an expired certificate";
        return Finding::warning("tls", what, why)
            .fix("look at what renews it; a changed file is taken up without a restart");
    }
    let in_time = if now < from {
        Err(format!("{shown} is valid from {from:.0} only"))
    } else if until < now {
        Err(format!("{shown} has expired at {until:.0}"))
    } else {
        Ok(format!("{shown} is valid until {until:.0}"))
    };
    certificate(file, in_time)
}

/// Returns the finding about a certificate: that all is well, or the problem.
fn certificate(file: &Path, looked_at: Result<String, String>) -> Finding {
    let file = shell::word(&file.to_string_lossy());
    let well = looked_at.clone().unwrap_or_default();
    Finding::tried("tls", well, looked_at, "no event travels without it")
        .fix(format!("openssl x509 -noout -subject -dates -in {file}"))
}

fn token(path: &Path) -> Finding {
    let shown = path.display();
    let read = match std::fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => Err(format!("{shown} is empty")),
        read => read.map_err(|error| format!("{shown}: {error}")),
    };
    let why = "without it the controller does not know which node reports, and refuses";
    Finding::tried("token", format!("{shown} can be read"), read, why)
        .fix("mount a projected ServiceAccount token with the audience gpuwarden there")
}

async fn controller(url: &str) -> Finding {
    let uri: http::Uri = url.parse().unwrap_or_default();
    let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16());
    let connected = match port {
        None => Err("it is no address such as https://gpuwarden.example:50051".to_owned()),
        Some(port) => connect(host.trim_matches(['[', ']']), port).await,
    };
    Finding::tried(
        "controller",
        format!("{url} can be reached"),
        connected.map_err(|why| format!("{url} cannot be reached: {why}")),
        "events stay on this node until it is reached, and its faults are not acted on",
    )
    .fix(format!(
        "curl -vk {} shows how far it gets",
        shell::word(url)
    ))
}

async fn connect(host: &str, port: u16) -> Result<(), String> {
    match tokio::time::timeout(CONNECT, TcpStream::connect((host, port))).await {
        Ok(connected) => connected.map(drop).map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", CONNECT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Severity;

    #[tokio::test]
    async fn a_port_is_free_or_taken_and_what_listens_there_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = format!("https://{address}");
        assert_eq!(port("listen", address).await.result, Severity::Problem);
        assert_eq!(controller(&url).await.result, Severity::Ok);
        drop(listener);
        assert_eq!(port("listen", address).await.result, Severity::Ok);
        let gone = controller(&url).await;
        assert_eq!(gone.result, Severity::Problem);
        assert!(gone.what.contains("refused"), "{gone:?}");
        assert_eq!(controller("not a place").await.result, Severity::Problem);
    }

    #[test]
    fn a_token_has_to_be_there_and_say_something() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(token(file.path()).what.ends_with("is empty"));
        std::fs::write(file.path(), "t").unwrap();
        assert_eq!(token(file.path()).result, Severity::Ok);
        assert_eq!(token(Path::new("/none")).result, Severity::Problem);
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
            [("tls", Severity::Problem), ("token", Severity::Problem)]
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
        assert_eq!(own_certificate(&open)[0].result, Severity::Warning);
    }

    #[test]
    fn how_the_grpc_sink_is_reached_is_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let secured = r#"https://c:1", "GRPCSinkCAPath": "/none.ca", "GRPCSinkCertPath":
            "/none.crt", "GRPCSinkKeyPath": "/none.key"#;
        for (target, expected) in [
            ("c:1", vec![("grpc-sink", Severity::Warning)]),
            ("127.0.0.1:1", vec![]),
            (secured, vec![("tls", Severity::Problem); 2]),
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
                Severity::Problem,
                "is valid from 2026-01-01T00:00:00Z only",
            ),
            (
                "2026-01-01T00:00:00Z",
                Severity::Ok,
                "is valid until 2026-04-11T00:00:00Z",
            ),
            ("2026-03-31T23:59:59Z", Severity::Ok, "is valid until"),
            (
                "2026-04-01T00:00:01Z",
                Severity::Warning,
                "expires at 2026-04-11T00:00:00Z",
            ),
            (
                "2026-04-11T00:00:01Z",
                Severity::Problem,
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
