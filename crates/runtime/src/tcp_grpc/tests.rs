use std::path::Path;
use std::time::SystemTime;

use contract::HealthEvents;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use testkit::{Authority, Purpose};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::{Code, Request, Response, Status};

use futures::StreamExt as _;

use super::*;
use crate::tls::{CertificateFiles, ClientCertificates};

/// Service that answers with the node proven by the connection.
struct WhoAmI;

#[tonic::async_trait]
impl PlatformConnector for WhoAmI {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let peer = request.extensions().get::<TcpPeer>().unwrap();
        assert!(peer.address.ip().is_loopback());
        let node = peer.certificate.as_ref().and_then(|names| names.node());
        Err(Status::aborted(node.unwrap_or("nobody")))
    }
}

fn pair(dir: &Path, name: &str) -> CertificateFiles {
    CertificateFiles {
        certificate: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    }
}

async fn serve(tls: Option<ServerTls>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let incoming = incoming(listener, tls.map(Arc::new));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(PlatformConnectorServer::new(WhoAmI))
            .serve_with_incoming(incoming),
    );
    port
}

fn client(url: &str, tls: Option<ClientTls>) -> PlatformConnectorClient<Channel> {
    PlatformConnectorClient::new(channel(url, tls.map(Arc::new)).unwrap())
}

/// Returns the client as identified by the server, or why there is no connection. In the latter
/// case the request itself must not be what failed.
async fn ask(client: &mut PlatformConnectorClient<Channel>) -> Result<String, String> {
    let answer = client.health_event_occurred_v1(HealthEvents::default());
    let status = answer.await.unwrap_err();
    if status.code() == Code::Aborted {
        return Ok(status.message().to_owned());
    }
    let mut text = status.to_string();
    let mut source = std::error::Error::source(&status);
    let refused = source.is_some_and(is_refused);
    assert!(refused || status.code() == Code::Unavailable, "{status:?}");
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    Err(text)
}

#[tokio::test]
async fn a_certificate_of_the_authority_proves_a_name_and_nothing_else_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (ours, theirs) = (
        Authority::new("ours").unwrap(),
        Authority::new("theirs").unwrap(),
    );
    std::fs::write(dir.join("ours.crt"), ours.pem()).unwrap();
    std::fs::write(dir.join("theirs.crt"), theirs.pem()).unwrap();
    let sign = |authority: &Authority, purpose, name: &str, names: &[&str], file: &str| {
        let signed = authority.sign(purpose, name, names).unwrap();
        signed.write(dir, file).unwrap();
    };
    sign(
        &ours,
        Purpose::Server,
        "controller",
        &["localhost", "127.0.0.1"],
        "server",
    );
    sign(&ours, Purpose::Client, "system:node:n1", &[], "n1");
    sign(&theirs, Purpose::Client, "system:node:n1", &[], "foreign");
    sign(&ours, Purpose::Server, "n1", &["n1"], "serving");
    let ended = SystemTime::now() - Duration::from_secs(60);
    let times = Some((ended - Duration::from_secs(60), ended));
    let expired = ours
        .sign_valid(Purpose::Client, "system:node:n1", &[], times)
        .unwrap();
    expired.write(dir, "expired").unwrap();

    let authority = dir.join("ours.crt");
    let load = |clients| ServerTls::load(pair(dir, "server"), clients).unwrap();
    let port = serve(Some(load(ClientCertificates::Required(authority.clone())))).await;
    let url = format!("https://localhost:{port}");
    let shown = |own: Option<&str>| {
        let own = own.map(|name| pair(dir, name));
        client(&url, Some(ClientTls::load(authority.clone(), own).unwrap()))
    };
    assert_eq!(ask(&mut shown(Some("n1"))).await.unwrap(), "n1");
    for (own, reason) in [
        (None, "CertificateRequired"),
        (Some("foreign"), ""),
        (Some("expired"), ""),
        // A server certificate is not accepted from a client.
        (Some("serving"), ""),
    ] {
        let error = ask(&mut shown(own)).await.unwrap_err();
        assert!(
            error.contains(reason) && error.contains("transport error"),
            "{own:?}: {error}"
        );
    }
    // A server with an untrusted certificate or another name gets no request.
    let tls = ClientTls::load(dir.join("theirs.crt"), None).unwrap();
    let error = ask(&mut client(&url, Some(tls))).await.unwrap_err();
    assert!(error.contains("UnknownIssuer"), "{error}");
    let other = load(ClientCertificates::None);
    sign(
        &ours,
        Purpose::Server,
        "controller",
        &["elsewhere"],
        "server",
    );
    let port = serve(Some(other)).await;
    let tls = ClientTls::load(authority.clone(), None).unwrap();
    let error = ask(&mut client(&format!("https://127.0.0.1:{port}"), Some(tls))).await;
    assert!(
        error.clone().unwrap_err().contains("NotValidForName"),
        "{error:?}"
    );

    // Where certificates are optional, a client without one has no identity.
    sign(
        &ours,
        Purpose::Server,
        "controller",
        &["127.0.0.1"],
        "server",
    );
    let port = serve(Some(load(ClientCertificates::Optional(authority.clone())))).await;
    let url = format!("https://127.0.0.1:{port}");
    for (own, expected) in [(None, "nobody"), (Some("n1"), "n1")] {
        let own = own.map(|name| pair(dir, name));
        let tls = ClientTls::load(authority.clone(), own).unwrap();
        assert_eq!(ask(&mut client(&url, Some(tls))).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn a_connection_that_is_not_taken_is_told_from_one_that_breaks() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // An address without a server closes what it accepts; a connection that breaks later has
    // sent something before.
    for (says, refused) in [(b"".as_slice(), true), (b"\0\0\0\x04\0\0\0\0\0", false)] {
        let mut client = client(&url, None);
        let asked = client.health_event_occurred_v1(HealthEvents::default());
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(says).await.unwrap();
            // The request has arrived.
            let mut first = [0; 256];
            assert!(stream.read(&mut first).await.unwrap() > 0);
        };
        let (asked, ()) = tokio::join!(asked, answer);
        let status = asked.unwrap_err();
        assert_eq!(is_refused(&status), refused, "{status:?}");
    }
}

#[tokio::test]
async fn rotated_certificates_count_for_new_connections_and_old_ones_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (old, new) = (
        Authority::new("old").unwrap(),
        Authority::new("new").unwrap(),
    );
    let rotate = |authority: &Authority| {
        let server = authority
            .sign(Purpose::Server, "c", &["127.0.0.1"])
            .unwrap();
        server.write(dir, "server").unwrap();
        std::fs::write(dir.join("ca.crt"), authority.pem()).unwrap();
    };
    rotate(&old);
    let own = old
        .sign(Purpose::Client, "system:node:before", &[])
        .unwrap();
    own.write(dir, "own").unwrap();
    let ca = dir.join("ca.crt");
    let clients = ClientCertificates::Required(ca.clone());
    let port = serve(Some(ServerTls::load(pair(dir, "server"), clients).unwrap())).await;
    let url = format!("https://127.0.0.1:{port}");
    let load = || Arc::new(ClientTls::load(ca.clone(), Some(pair(dir, "own"))).unwrap());
    let kept = load();
    let mut open = PlatformConnectorClient::new(channel(&url, Some(kept.clone())).unwrap());
    assert_eq!(ask(&mut open).await.unwrap(), "before");

    rotate(&new);
    let own = new.sign(Purpose::Client, "system:node:after", &[]).unwrap();
    own.write(dir, "own").unwrap();
    assert_eq!(ask(&mut open).await.unwrap(), "before");
    // Same files, new connection: both ends use the new authority.
    let mut again = PlatformConnectorClient::new(channel(&url, Some(kept)).unwrap());
    assert_eq!(ask(&mut again).await.unwrap(), "after");
    assert_eq!(ask(&mut open).await.unwrap(), "before");
}

#[tokio::test]
async fn a_peer_that_says_nothing_holds_up_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let authority = Authority::new("ours").unwrap();
    std::fs::write(dir.join("ca.crt"), authority.pem()).unwrap();
    let server = authority
        .sign(Purpose::Server, "c", &["127.0.0.1"])
        .unwrap();
    server.write(dir, "server").unwrap();
    let tls = ServerTls::load(pair(dir, "server"), ClientCertificates::None).unwrap();
    let port = serve(Some(tls)).await;
    let mut silent = Vec::new();
    for _ in 0..QUEUE * 2 {
        silent.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    let tls = ClientTls::load(dir.join("ca.crt"), None).unwrap();
    let mut client = client(&format!("https://127.0.0.1:{port}"), Some(tls));
    assert_eq!(ask(&mut client).await.unwrap(), "nobody");
}

/// Clients that connect and send nothing keep no other address out, and use a bounded number of
/// descriptors.
#[tokio::test]
async fn peers_that_say_nothing_keep_no_other_address_out() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let authority = Authority::new("ours").unwrap();
    std::fs::write(dir.join("ours.crt"), authority.pem()).unwrap();
    let names = &["localhost", "127.0.0.1"];
    let signed = authority
        .sign(Purpose::Server, "controller", names)
        .unwrap();
    signed.write(dir, "server").unwrap();
    let tls = ServerTls::load(pair(dir, "server"), ClientCertificates::None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let mut incoming = Box::pin(incoming_up_to(listener, Some(Arc::new(tls)), 16));
    let from = |host: u8| async move {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, host], 0).into()).unwrap();
        socket.connect(to).await.unwrap()
    };
    let mut silent = Vec::new();
    for _ in 0..32 {
        silent.push(from(2).await);
    }
    // All but two of them, an eighth, are closed; those two may stay until their time is up.
    let mut open = 0;
    for stream in &mut silent {
        let read = tokio::time::timeout(Duration::from_millis(300), stream.read_u8()).await;
        open += usize::from(read.is_err());
    }
    assert_eq!(open, 2);
    let clients = ClientTls::load(dir.join("ours.crt"), None).unwrap();
    let connector = TlsConnector::from(clients.config());
    let name = ServerName::try_from("localhost").unwrap();
    let other = from(3).await;
    let (shaken, taken) = tokio::join!(connector.connect(name, other), incoming.next());
    shaken.unwrap();
    let taken = taken.unwrap().unwrap();
    assert_eq!(taken.peer.address.ip().to_string(), "127.0.0.3");
}

#[tokio::test]
async fn without_tls_only_this_machine_is_talked_to() {
    let port = serve(None).await;
    for host in ["127.0.0.1", "localhost"] {
        let mut client = client(&format!("http://{host}:{port}"), None);
        assert_eq!(ask(&mut client).await.unwrap(), "nobody");
    }
    for (url, expected) in [
        ("http://controller:50051", "without TLS"),
        ("http://10.0.0.1:50051", "without TLS"),
        ("http://localhost.example:1", "without TLS"),
        ("https://controller:50051", "is not an address"), // there is no authority to trust
        ("controller:50051", "is not an address"),
        ("ftp://controller", "is not an address"),
        ("http://127.0.0.1/path", "is not an address"),
        ("", "is not an address"),
    ] {
        let error = channel(url, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{url}: {error}");
    }
}
