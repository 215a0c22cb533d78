//! Tests of access by users of the machine on the socket, and by network clients.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use contract::device::RegisterGpuResponse;
use gpuwarden_devices::serve_tcp;
use runtime::tcp_grpc;
use runtime::tls::{CertificateFiles, ClientCertificates, ClientTls, ServerTls};
use testkit::{Authority, Purpose};
use tokio::net::TcpListener;
use tonic::Status;

use super::*;

/// User id of "nobody".
const NOBODY: u32 = 65_534;

async fn register(channel: Channel) -> Result<RegisterGpuResponse, Status> {
    let request = RegisterGpuRequest {
        name: "GPU-Aa00".to_owned(),
        provider_id: "site-monitor".to_owned(),
        ..RegisterGpuRequest::default()
    };
    let mut provider = ProviderServiceClient::new(channel);
    let answer = provider.register_gpu(request).await;
    answer.map(tonic::Response::into_inner)
}

/// Registers a GPU as nobody. The kernel takes the user from the thread.
fn register_as_nobody(socket: &Path) -> Result<RegisterGpuResponse, Status> {
    let registered = || {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(NOBODY)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async { register(channel(socket).await).await })
    };
    std::thread::scope(|scope| scope.spawn(registered).join().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_user_writes_only_where_any_provider_may() {
    if !rustix::process::geteuid().is_root() {
        return testkit::skip("root, to be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = directory.path().join("api.sock");
    let server = Server::open_to(&directory, Providers::Operators, 0o666);
    let refused = register_as_nobody(&socket).unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(
        refused.message().contains("--device-api-providers any"),
        "{refused}"
    );
    // A user who administers the machine may register.
    register(channel(&socket).await).await.unwrap();
    server.stop().await;

    let server = Server::open_to(&directory, Providers::Any, 0o666);
    assert!(register_as_nobody(&socket).unwrap().created);
    // The name belongs to that user from now on, even against root.
    let taken = register(channel(&socket).await).await.unwrap_err();
    assert_eq!(taken.code(), Code::PermissionDenied);
    server.stop().await;
}

/// The API over TCP, with certificates of its authority and of another one.
struct Network {
    directory: TempDir,
    api: DeviceApi,
    address: SocketAddr,
    cancel: CancellationToken,
    serving: JoinHandle<()>,
}

impl Network {
    async fn start(with_tls: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, authority) in [("ours", "ca.crt"), ("another", "another-ca.crt")] {
            let signing = Authority::new(name).unwrap();
            fs::write(directory.path().join(authority), signing.pem()).unwrap();
            let server = signing.sign(Purpose::Server, "n1", &["127.0.0.1"]);
            let client = signing.sign(Purpose::Client, "consumer", &[]);
            for (certificate, kind) in [(server, "server"), (client, "client")] {
                let file = format!("{name}-{kind}");
                certificate.unwrap().write(directory.path(), &file).unwrap();
            }
        }
        let clients = ClientCertificates::Required(directory.path().join("ca.crt"));
        let tls = ServerTls::load(pair(directory.path(), "ours-server"), clients).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let api = DeviceApi::new(&Metrics::default(), Timestamp::now);
        api.set_inventory(&inventory(2));
        let cancel = CancellationToken::new();
        let tls = with_tls.then(|| Arc::new(tls));
        let served = serve_tcp(listener, tls, api.clone(), cancel.clone());
        Self {
            directory,
            api,
            address,
            cancel,
            serving: tokio::spawn(async move { served.await.unwrap() }),
        }
    }

    /// Returns the channel of a client with this certificate.
    fn channel(&self, certificate: Option<&str>) -> Channel {
        let own = certificate.map(|name| pair(self.directory.path(), name));
        let authority = self.directory.path().join("ca.crt");
        let tls = Arc::new(ClientTls::load(authority, own).unwrap());
        tcp_grpc::channel(&format!("https://{}", self.address), Some(tls)).unwrap()
    }

    async fn stop(self) {
        self.cancel.cancel();
        self.serving.await.unwrap();
    }
}

fn pair(directory: &Path, name: &str) -> CertificateFiles {
    CertificateFiles {
        certificate: directory.join(format!("{name}.crt")),
        key: directory.join(format!("{name}.key")),
    }
}

#[tokio::test]
async fn whoever_has_a_certificate_reads_over_the_network_and_nobody_writes() {
    let network = Network::start(true).await;
    let known = network.channel(Some("ours-client"));
    let mut client = GpuServiceClient::new(known.clone());
    let listed = list(&mut client).await;
    assert_eq!(listed.gpus.len(), 2);
    let mut events = watch(&mut client, &listed.resource_version).await;
    let bad = Said::bad("XidError", "Critical XID error 79 detected");
    network
        .api
        .set_condition(Own::Nvml, "GPU-Aa01", bad)
        .unwrap();
    let event = next(&mut events).await;
    assert_eq!(phase(&event.gpu.unwrap()), GpuPhase::NotReady);

    let refused = register(known).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("Unix socket only"), "{refused}");

    for certificate in [None, Some("another-client")] {
        let mut client = GpuServiceClient::new(network.channel(certificate));
        let refused = client.list_gpus(ListGpusRequest {}).await.unwrap_err();
        assert!(tcp_grpc::is_refused(&refused), "{certificate:?}: {refused}");
    }
    let mut open = GpuServiceClient::new(
        tcp_grpc::channel(&format!("http://{}", network.address), None).unwrap(),
    );
    open.list_gpus(ListGpusRequest {}).await.unwrap_err();
    drop(events);
    network.stop().await;
}

#[tokio::test]
async fn without_tls_it_is_read_in_the_open_and_nobody_writes() {
    let network = Network::start(false).await;
    let url = format!("http://{}", network.address);
    let channel = tcp_grpc::channel(&url, None).unwrap();
    let mut client = GpuServiceClient::new(channel.clone());
    assert_eq!(list(&mut client).await.gpus.len(), 2);
    let refused = register(channel).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    network.stop().await;
}

/// Local readers and writers take precedence.
#[tokio::test]
async fn all_watchers_over_the_network_have_the_share_of_one_user() {
    let network = Network::start(false).await;
    let url = format!("http://{}", network.address);
    let mut watching = Vec::new();
    let most = gpuwarden_devices::MAX_WATCHERS / 8;
    let refused = loop {
        // A connection allows 256 calls.
        let channel = tcp_grpc::channel(&url, None).unwrap();
        let mut client = GpuServiceClient::new(channel);
        let mut refused = None;
        for _ in 0..200 {
            match client.watch_gpus(WatchGpusRequest::default()).await {
                Ok(stream) => watching.push(stream),
                Err(status) => refused = Some(status),
            }
        }
        if let Some(refused) = refused {
            break refused;
        }
    };
    assert_eq!(watching.len(), most);
    assert_eq!(refused.code(), Code::ResourceExhausted);
    network.stop().await;
}
