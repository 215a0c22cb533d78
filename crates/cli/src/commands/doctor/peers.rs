//! Checks of the network besides the API server: the ports that others connect to, the controller
//! that an agent delivers to, and the certificates for both.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use connector::ConnectorConfig;
use jiff::Timestamp;
use model::shell;
use runtime::tls::{
    CertificateFiles, ClientCertificates, ClientTls, ServerTls, TlsError, Validity,
};
use tokio::net::{TcpListener, TcpStream};

use super::{Finding, Installation, Severity, causes};
use crate::settings::{IngestSettings, ServerCertificate, Transport};

/// Time that an agent allows for connecting.
const CONNECT: Duration = Duration::from_secs(5);
/// Divisor of a certificate's lifetime: in the last tenth the renewal is overdue, since cert-manager
/// and the kubelet renew when a third is left.
const LAST_PART: i32 = 10;

pub(super) async fn check(installation: &Installation, running: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let ingest = installation.ingest.as_ref();
    if !running {
        findings.push(port("listen", installation.process.listen).await);
        if let Some(ingest) = ingest {
            findings.push(port("grpc-listen", ingest.listen).await);
        }
    }
    findings.extend(ingest.and_then(server));
    if let Some(delivery) = &installation.delivery {
        let authority = delivery.authority.as_deref();
        findings.extend(authority.map(|it| client(it, delivery.certificate.as_ref())));
        findings.extend(delivery.token_file.as_deref().map(token));
        findings.push(controller(&delivery.controller).await);
    }
    let act = installation.act.as_ref();
    let config = act.and_then(|act| act.connector_config.as_deref());
    findings.extend(config.into_iter().flat_map(connector_config));
    findings
}

/// Checks that this user can listen on the address.
async fn port(check: &'static str, address: SocketAddr) -> Finding {
    let bound = match TcpListener::bind(address).await {
        Ok(_) => Ok(format!("{address} is free")),
        Err(error) => Err(format!("{address}: {error}")),
    };
    let port = address.port();
    Finding::tried(check, bound).fix(format!("ss -ltnp 'sport = :{port}' shows the process"))
}

/// Checks the certificate of a controller's port, unless the controller issues it itself.
fn server(ingest: &IngestSettings) -> Option<Finding> {
    let Transport::Tls { own, clients } = ingest.transport.clone() else {
        let what = "events are accepted without TLS, from anybody on this machine, for any node";
        return Some(Finding::warning("grpc-insecure", what));
    };
    let ServerCertificate::Files(own) = own else {
        return None;
    };
    let certificate = own.certificate.clone();
    let clients = clients.map_or(ClientCertificates::None, ClientCertificates::Optional);
    Some(tls(&certificate, ServerTls::load(own, clients), true))
}

/// Checks the certificates of a client: the authority that it trusts, and its own.
fn client(authority: &Path, own: Option<&CertificateFiles>) -> Finding {
    let loaded = ClientTls::load(authority.to_owned(), own.cloned());
    tls(
        own.map_or(authority, |own| &own.certificate),
        loaded,
        own.is_some(),
    )
}

/// Checks `NVSentinel`'s config.json, and the TLS of the gRPC sink that it names.
fn connector_config(path: &Path) -> Vec<Finding> {
    let config = match ConnectorConfig::read(path) {
        Ok(config) => config,
        Err(error) => return vec![Finding::problem("connector-config", causes(&error))],
    };
    let what = format!("{} can be read", path.display());
    let mut findings = vec![Finding::ok("connector-config", what)];
    let target = config.forward.as_ref();
    if let Some(target) = target.filter(|target| target.is_open_to_others()) {
        let what = format!("events, and a token if one is named, go to {target} without TLS");
        findings.push(Finding::warning("grpc-sink", what));
    } else if let Some(tls) = target.and_then(|target| target.tls.as_ref()) {
        findings.push(client(&tls.authority, tls.own.as_ref()));
    }
    findings
}

/// Checks that TLS can be set up with a certificate and the files beside it, and the dates of the
/// certificate where it is this machine's own.
fn tls<T>(file: &Path, loaded: Result<T, TlsError>, own: bool) -> Finding {
    let validity = loaded.and_then(|_| own.then(|| Validity::read(file)).transpose());
    match validity {
        Ok(Some(validity)) => {
            let found = in_time(&file.display().to_string(), validity, Timestamp::now());
            match found.result {
                Severity::Warning => found
                    .fix("check what renews it; gpuwarden reads a changed file without a restart"),
                _ => certificate(found, file),
            }
        }
        Ok(None) => Finding::ok("tls", format!("{} can be read", file.display())),
        Err(error) => certificate(Finding::problem("tls", causes(&error)), file),
    }
}

/// Compares the dates of a certificate with the time `now`.
pub(super) fn in_time(shown: &str, validity: Validity, now: Timestamp) -> Finding {
    let Validity { from, until } = validity;
    if now < from {
        Finding::problem("tls", format!("{shown} is valid from {from:.0} only"))
    } else if until < now {
        Finding::problem("tls", format!("{shown} has expired at {until:.0}"))
    } else if until.duration_since(now) < validity.whole() / LAST_PART {
        let what = format!("{shown} expires at {until:.0}, and should have been renewed by now");
        Finding::warning("tls", what)
    } else {
        Finding::ok("tls", format!("{shown} is valid until {until:.0}"))
    }
}

fn certificate(finding: Finding, file: &Path) -> Finding {
    let file = shell::word(&file.to_string_lossy());
    finding.fix(format!("openssl x509 -noout -subject -dates -in {file}"))
}

fn token(path: &Path) -> Finding {
    let shown = path.display();
    let read = match std::fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => Err(format!("{shown} is empty")),
        Ok(_) => Ok(format!("{shown} can be read")),
        Err(error) => Err(format!("{shown}: {error}")),
    };
    Finding::tried("token", read)
}

async fn controller(url: &str) -> Finding {
    let uri: http::Uri = url.parse().unwrap_or_default();
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let connected = match uri.port_u16() {
        None => Err("not an address such as https://gpuwarden.example:50051".to_owned()),
        Some(port) => match tokio::time::timeout(CONNECT, TcpStream::connect((host, port))).await {
            Ok(connected) => connected.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer within {} s", CONNECT.as_secs())),
        },
    };
    let connected = match connected {
        Ok(_) => Ok(format!("{url} can be reached")),
        Err(why) => Err(format!("{url} cannot be reached: {why}")),
    };
    Finding::tried("controller", connected).fix(format!(
        "curl -vk {} shows how far it gets",
        shell::word(url)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = client(file.path(), None);
        assert_eq!((found.check, found.result), ("tls", Severity::Problem));
        let open = IngestSettings {
            listen: "127.0.0.1:1".parse().unwrap(),
            transport: Transport::Open,
            tokens: controller::ingest::TokenRules {
                audience: String::new(),
                agents: Vec::new(),
                central: Vec::new(),
            },
        };
        assert_eq!(server(&open).unwrap().result, Severity::Warning);
    }

    #[test]
    fn how_the_grpc_sink_is_reached_is_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = ("connector-config", Severity::Ok);
        let secured = r#"https://c:1", "GRPCSinkCAPath": "/none.ca", "GRPCSinkCertPath":
            "/none.crt", "GRPCSinkKeyPath": "/none.key"#;
        for (target, expected) in [
            ("c:1", vec![read, ("grpc-sink", Severity::Warning)]),
            ("127.0.0.1:1", vec![read]),
            (secured, vec![read, ("tls", Severity::Problem)]),
            ("no target", vec![("connector-config", Severity::Problem)]),
        ] {
            let text =
                format!(r#"{{"enableGRPCSinkConnector": true, "GRPCSinkTarget": "{target}"}}"#);
            std::fs::write(file.path(), text).unwrap();
            let found = connector_config(file.path());
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
            let found = in_time("/tls.crt", validity, time(now));
            assert_eq!(found.result, result, "{now}");
            assert!(found.what.contains(text), "{found:?}");
        }
    }
}
