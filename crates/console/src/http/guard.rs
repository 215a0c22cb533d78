//! Checks of every request, and headers of every response.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use tokio::net::TcpListener;

use super::error::Refusal;

/// True if the name in `Host` is checked.
#[derive(Clone, Copy)]
pub(super) struct CheckHost(pub(super) bool);

/// Headers of every response. The page needs its own script, style, icon and API, but nothing
/// inline, nothing from other origins, and no frame around it.
const HEADERS: [(header::HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::CACHE_CONTROL, "no-store"),
];

pub(super) async fn guard(
    State(check_host): State<CheckHost>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match check(check_host, &request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    };
    for (name, value) in HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

fn check(CheckHost(named): CheckHost, request: &Request) -> Result<(), Refusal> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Err(Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!(
                "{} is not served: the console is read-only",
                request.method()
            ),
            "Use GET. To change something, use the gpuwarden command.",
        ));
    }
    if named {
        check_host(request.headers())?;
    }
    Ok(())
}

fn check_host(headers: &HeaderMap) -> Result<(), Refusal> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err(Refusal::bad_request(
            "a request needs one Host header",
            "Send the address that gpuwarden listens on.",
        ));
    };
    let host = host.to_str().unwrap_or_default();
    let name = without_port(host);
    if name.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost") {
        return Ok(());
    }
    Err(Refusal::new(
        StatusCode::FORBIDDEN,
        format!("Host {host:?} is not a name of this console"),
        "Use its IP address or localhost. Foreign names are \
         refused so that a web page elsewhere cannot read this one.",
    ))
}

/// Returns the host of `host`, `host:port`, `[v6]` or `[v6]:port`.
fn without_port(host: &str) -> &str {
    if let Some((v6, rest)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let port = rest.strip_prefix(':').unwrap_or(rest);
        return if port.bytes().all(|b| b.is_ascii_digit()) {
            v6
        } else {
            ""
        };
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

// === impl CheckHost ===

impl CheckHost {
    /// Checks names on loopback only. Somebody else's DNS name that points to 127.0.0.1 would
    /// make their page "same origin" with ours. Beyond loopback, such a page could be served
    /// from the same network anyway.
    pub(super) fn of(listener: &TcpListener) -> Self {
        let address = listener.local_addr();
        Self(address.is_ok_and(|address| address.ip().is_loopback()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_hosts() {
        for (host, status) in [
            ("127.0.0.1:9000", None),
            ("127.0.0.1", None),
            ("[::1]:9000", None),
            ("[::1]", None),
            ("LOCALHOST:9000", None),
            ("gpu1.example.com", Some(403)),
            ("attacker.example:9000", Some(403)),
            ("localhost.attacker.example", Some(403)),
            ("127.0.0.1.attacker.example", Some(403)),
            ("[::1].attacker.example", Some(403)),
            ("localhost:9000@attacker.example", Some(403)),
            ("", Some(403)),
        ] {
            let headers = HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]);
            let answer = check_host(&headers).err().map(|r| r.status.as_u16());
            assert_eq!(answer, status, "{host}");
        }
        assert_eq!(check_host(&HeaderMap::new()).unwrap_err().status, 400);
        let mut two = HeaderMap::new();
        two.append(header::HOST, HeaderValue::from_static("localhost"));
        two.append(header::HOST, HeaderValue::from_static("attacker.example"));
        assert_eq!(check_host(&two).unwrap_err().status, 400);
    }
}
