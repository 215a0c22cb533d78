//! Target of the gRPC sink, and its TLS: the keys `GRPCSink...` of `config.json`.
//!
//! NVSentinel has the target and the token. The certificates are an extension: its sink does not
//! support TLS.

use core::net::{IpAddr, Ipv6Addr};

use contract::findings::Findings;
use model::event::MAX_NAME_BYTES;

use super::ConnectorKeys;

/// Prefix of a target that uses TLS.
const SECURED: &str = "https://";
/// Prefixes of targets without TLS: gRPC's forms for a host name, and its form for an address.
const IN_THE_OPEN: [&str; 4] = ["dns:///", "passthrough:///", "dns:", "http://"];

/// Valid targets.
const TARGET: &str =
    "https://collector:50051, or without TLS collector:50051 or dns:///collector:50051";

/// A gRPC service that receives every event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Host name, or IP address without brackets.
    pub host: String,
    /// TCP port of the service.
    pub port: u16,
    /// Path of the file with the bearer token, as configured; may be empty.
    pub token: String,
    /// Files for TLS; `None` for a connection without TLS.
    pub tls: Option<ForwardTls>,
}

/// Paths of PEM files, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardTls {
    /// Certificates of the authority that signs the target's certificate.
    pub authority: String,
    /// Client certificate and key.
    pub own: Option<(String, String)>,
}

/// Returns true if a host is this machine by its name or address, so that data sent there stays
/// on the machine.
pub fn is_this_machine(host: &str) -> bool {
    let address = host.parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Returns true if a file for TLS is configured.
pub(super) fn names_certificates(keys: &ConnectorKeys) -> bool {
    certificates(keys).iter().any(|(_, path)| !path.is_empty())
}

/// Reads the keys.
pub(super) fn forward(keys: &ConnectorKeys, findings: &mut Findings<'_>) -> Forward {
    let target = keys.grpc_target.trim();
    let address = host_and_port(target);
    if target.is_empty() {
        findings.at_key(
            "enableGRPCSinkConnector",
            format_args!("it needs GRPCSinkTarget: {TARGET}"),
        );
    } else if address.is_none() {
        findings.refuse("GRPCSinkTarget", format_args!("write {TARGET}"));
    }
    let named = certificates(keys).map(|(key, path)| (!path.is_empty()).then_some((key, path)));
    let [authority, certificate, key] = named;
    let secured = target.starts_with(SECURED);
    if secured && authority.is_none() {
        let what = "https://... needs GRPCSinkCAPath: the file with the certificates of the \
                    authority that the target is trusted by";
        findings.at_key("GRPCSinkTarget", what);
    }
    // A configuration with certificates intends TLS, and must not send in plain text unnoticed.
    let first = named.into_iter().flatten().next();
    if let Some((first, _)) = first.filter(|_| address.is_some() && !secured) {
        findings.at_key(
            first,
            "it is for TLS: write GRPCSinkTarget as https://HOST:PORT",
        );
    }
    if let (Some((one, _)), None) | (None, Some((one, _))) = (certificate, key) {
        let what = "GRPCSinkCertPath and GRPCSinkKeyPath go together: add the other one";
        findings.at_key(one, what);
    }
    let (host, port) = address.unwrap_or_default();
    let path = |(_, path): (_, &str)| path.to_owned();
    let tls = authority.map(|authority| ForwardTls {
        authority: path(authority),
        own: certificate.map(path).zip(key.map(path)),
    });
    Forward {
        host,
        port,
        token: keys.grpc_token.trim().to_owned(),
        tls,
    }
}

fn certificates(keys: &ConnectorKeys) -> [(&'static str, &str); 3] {
    [
        ("GRPCSinkCAPath", keys.grpc_authority.trim()),
        ("GRPCSinkCertPath", keys.grpc_certificate.trim()),
        ("GRPCSinkKeyPath", keys.grpc_key.trim()),
    ]
}

fn host_and_port(target: &str) -> Option<(String, u16)> {
    let open = IN_THE_OPEN.iter();
    let address = target
        .strip_prefix(SECURED)
        .or_else(|| {
            open.into_iter()
                .find_map(|begin| target.strip_prefix(begin))
        })
        .unwrap_or(target);
    let (host, port) = address.rsplit_once(':')?;
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    let plain = |host: &&str| {
        let named = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        !host.is_empty() && host.len() <= MAX_NAME_BYTES && host.bytes().all(named)
    };
    let host = match bare {
        Some(bare) => bare.parse::<Ipv6Addr>().ok().map(|_| bare)?,
        None => Some(host).filter(plain)?,
    };
    Some((host.to_owned(), port))
}

// === impl Forward ===

impl Forward {
    /// Returns the warning that others may read the events on the way. NVSentinel's file cannot
    /// configure TLS, so plain text is not an error.
    pub(super) fn warning(&self, source: &str) -> Option<String> {
        if self.tls.is_some() || is_this_machine(&self.host) {
            return None;
        }
        let Self { host, port, .. } = self;
        let what = if self.token.is_empty() {
            "events go"
        } else {
            "events, and the token of GRPCSinkTokenPath, go"
        };
        Some(format!(
            "{source}: GRPCSinkTarget: {what} to {host} port {port} without TLS, for all to read \
             on the way; https://HOST:PORT with GRPCSinkCAPath has it"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transform::load::{ConnectorFile, connector};

    fn load(keys: &str) -> Result<ConnectorFile, String> {
        let text = format!("{{\"enableGRPCSinkConnector\": \"true\",\n{keys}}}");
        connector(&text, "c").map_err(|error| error.to_string())
    }

    fn target(target: &str) -> Result<ConnectorFile, String> {
        load(&format!(r#""GRPCSinkTarget": "{target}""#))
    }

    #[test]
    fn the_target_may_have_any_form_that_names_a_host() {
        for (written, host, port) in [
            ("collector:50051", "collector", 50051),
            ("dns:///collector.ns.svc:1", "collector.ns.svc", 1),
            ("dns:collector:1", "collector", 1),
            ("passthrough:///10.0.0.1:65535", "10.0.0.1", 65535),
            ("http://collector:1", "collector", 1),
            (" [::1]:9 ", "::1", 9),
        ] {
            let file = load(&format!(
                r#""GRPCSinkTarget": "{written}",
                "GRPCSinkConnectorMaxRetries": 3, "GRPCSinkTokenPath": " /var/token ",
                "GRPCSinkCAPath": "", "GRPCSinkCertPath": "", "GRPCSinkKeyPath": """#
            ));
            let file = file.unwrap();
            let expected = Forward {
                host: host.into(),
                port,
                token: "/var/token".into(),
                tls: None,
            };
            assert_eq!(file.forward, Some(expected), "{written}");
            let told = |said: &str| file.notes.iter().any(|note| note.contains(said));
            assert!(told("GRPCSinkConnectorMaxRetries: not used"));
        }
        for written in [
            "",
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "unix:///run/x.sock",
            "https://a",
            "https://a:1/x",
            "HTTPS://a:1",
            "dns:///https://a:1",
            "http://https://a:1",
            "a b:1",
            "::1:1",
            "[::g]:1",
            "a:1/x",
        ] {
            let error = target(written).unwrap_err();
            let expected = match written {
                "" => "c:1: enableGRPCSinkConnector: it needs GRPCSinkTarget: https".to_owned(),
                _ => format!("c:2: GRPCSinkTarget is {written:?}; write https://collector:50051"),
            };
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn what_others_can_read_on_the_way_is_said() {
        for (written, token, said) in [
            ("collector:1", "t", Some("events, and the token")),
            ("http://10.0.0.1:1", "t", Some("events, and the token")),
            (
                "[2001:db8::1]:1",
                "",
                Some("events go to 2001:db8::1 port 1"),
            ),
            ("localhost.example:1", "", Some("without TLS")),
            ("localhost:1", "t", None),
            ("127.0.0.9:1", "t", None),
            ("[::1]:1", "t", None),
            ("https://collector:1", "t", None),
        ] {
            let authority = if written.starts_with("https") {
                "ca"
            } else {
                ""
            };
            let file = load(&format!(
                r#""GRPCSinkTarget": "{written}", "GRPCSinkTokenPath": "{token}",
                "GRPCSinkCAPath": "{authority}""#
            ));
            let notes = file.unwrap().notes;
            assert_eq!(notes.len(), usize::from(said.is_some()), "{notes:?}");
            for (note, said) in notes.iter().zip(said) {
                assert!(note.contains(said), "{written}: {note}");
            }
        }
    }

    #[test]
    fn https_names_the_files_of_tls() {
        let tls = |own: &str| {
            let keys = format!(
                r#""GRPCSinkTarget": "https://[2001:db8::1]:50051", "GRPCSinkCAPath": " ca.crt "{own}"#
            );
            let forward = load(&keys).unwrap().forward.unwrap();
            assert_eq!(
                (forward.host.as_str(), forward.port),
                ("2001:db8::1", 50051)
            );
            forward.tls.unwrap()
        };
        let alone = ForwardTls {
            authority: "ca.crt".into(),
            own: None,
        };
        assert_eq!(tls(""), alone);
        let own = r#", "GRPCSinkCertPath": "/own.crt", "GRPCSinkKeyPath": "/own.key""#;
        let mutual = ForwardTls {
            own: Some(("/own.crt".into(), "/own.key".into())),
            ..alone
        };
        assert_eq!(tls(own), mutual);
        // With the sink disabled, the keys are reported as unused, as the token is.
        let off = connector(r#"{"GRPCSinkCAPath": "ca.crt"}"#, "c").unwrap();
        assert!(
            off.notes[0].contains("GRPCSinkCAPath") && off.notes[0].contains("switched off"),
            "{:?}",
            off.notes
        );
    }

    #[test]
    fn files_that_do_not_go_together_are_named_with_their_lines() {
        let table: [(&[&str], &[&str]); 5] = [
            (
                &[r#""GRPCSinkTarget": "https://a:1""#],
                &["c:2: GRPCSinkTarget: https://... needs GRPCSinkCAPath"],
            ),
            (
                &[
                    r#""GRPCSinkTarget": "https://a:1""#,
                    r#""GRPCSinkCAPath": "ca""#,
                    r#""GRPCSinkKeyPath": "key""#,
                ],
                &["c:4: GRPCSinkKeyPath: GRPCSinkCertPath and GRPCSinkKeyPath go together"],
            ),
            (
                &[
                    r#""GRPCSinkTarget": "https://a:1""#,
                    r#""GRPCSinkCertPath": "own""#,
                ],
                &[
                    "c:2: GRPCSinkTarget: https://... needs GRPCSinkCAPath",
                    "c:3: GRPCSinkCertPath: GRPCSinkCertPath and GRPCSinkKeyPath go together",
                ],
            ),
            (
                &[
                    r#""GRPCSinkTarget": "http://a:1""#,
                    r#""GRPCSinkCAPath": "ca""#,
                ],
                &["c:3: GRPCSinkCAPath: it is for TLS: write GRPCSinkTarget as https://"],
            ),
            (
                &[
                    r#""GRPCSinkTarget": "127.0.0.1:1""#,
                    r#""GRPCSinkCertPath": "own""#,
                    r#""GRPCSinkKeyPath": "key""#,
                ],
                &["c:3: GRPCSinkCertPath: it is for TLS"],
            ),
        ];
        for (keys, expected) in table {
            let error = load(&keys.join(",\n")).unwrap_err();
            let found: Vec<&str> = error.lines().collect();
            assert_eq!(found.len(), expected.len(), "{error}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.starts_with(expected), "{found}");
            }
        }
    }
}
