//! Client of a running gpuwarden: of its HTTP API, the connector's socket and the Device API.

mod port_forward;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use console::api::{ErrorBody, StatusView};
use contract::HealthEvents;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use http::Uri;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tonic::transport::Channel;

use crate::args::{DeviceApiArgs, RemoteArgs, ServerArgs, TargetArgs};
use crate::settings::{ClientSettings, DEFAULT_PORT, Endpoint, default_data_dir};
use port_forward::PortForward;

/// Longest wait for the answer to a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of an answer.
const MAX_ANSWER: usize = 256 * 1024 * 1024;

/// Client of the HTTP API.
pub(crate) struct Client {
    base: String,
    /// Data directory that a flag or the file names: the process that answers has to use it.
    data_dir: Option<PathBuf>,
    http: HttpClient<HttpConnector, Empty<Bytes>>,
    /// Way to a controller in a cluster.
    port_forward: Option<PortForward>,
}

/// Part of a status that identifies the process.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answering {
    data_dir: PathBuf,
}

/// Answer that is read line by line.
pub(crate) struct Lines {
    body: hyper::body::Incoming,
    rest: Vec<u8>,
}

// === impl Client ===

impl Client {
    /// Creates a client of the gpuwarden that `args` name, else of the one that is found.
    pub(crate) fn new(args: &ServerArgs) -> anyhow::Result<Self> {
        let file = file(args)?;
        let (base, data_dir) = address(args, &file);
        let base = base.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().with_context(|| {
            format!("--server {base:?} is not an address such as http://127.0.0.1:2112")
        })?;
        if uri.scheme_str() != Some("http") {
            bail!("--server {base:?}: only http:// is supported; the API listens on loopback");
        }
        Ok(Self {
            base,
            data_dir,
            http: HttpClient::builder(TokioExecutor::new()).build_http(),
            port_forward: None,
        })
    }

    /// Creates a client of the controller in a cluster, if the flags or the name of this program ask
    /// for that, else as [`new`](Self::new) does.
    pub(crate) async fn remote(args: &RemoteArgs) -> anyhow::Result<Self> {
        let in_cluster =
            args.kubeconfig.is_some() || args.context.is_some() || args.namespace.is_some();
        let named = &args.server;
        let is_named = named.server.is_some() || named.data_dir.is_some() || named.config.is_some();
        if !in_cluster && (is_named || !crate::is_plugin()) {
            return Self::new(named);
        }
        let forward = PortForward::start(args).await?;
        let server = ServerArgs {
            server: Some(forward.address.clone()),
            ..ServerArgs::default()
        };
        Ok(Self {
            port_forward: Some(forward),
            ..Self::new(&server)?
        })
    }

    /// Requests a JSON document.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.get_bytes(path).await?;
        serde_json::from_slice(&body)
            .with_context(|| format!("{}{path} does not answer as gpuwarden does", self.base))
    }

    /// Requests the state of the process and of the nodes.
    pub(crate) async fn status(&self) -> anyhow::Result<StatusView> {
        self.get("/api/v1/status").await
    }

    /// Requests a whole answer.
    pub(crate) async fn get_bytes(&self, path: &str) -> anyhow::Result<Bytes> {
        tokio::time::timeout(TIMEOUT, async {
            let body = self.open(path).await?;
            let limited = http_body_util::Limited::new(body, MAX_ANSWER);
            let collected = limited.collect().await;
            collected
                .map(http_body_util::Collected::to_bytes)
                .map_err(|error| {
                    anyhow::anyhow!("{error}").context(format!("read {}{path}", self.base))
                })
        })
        .await
        .with_context(|| {
            format!(
                "{} does not answer within {} s",
                self.base,
                TIMEOUT.as_secs()
            )
        })?
    }

    /// Requests an endless stream of lines.
    pub(crate) async fn lines(&self, path: &str) -> anyhow::Result<Lines> {
        Ok(Lines {
            body: self.open(path).await?,
            rest: Vec::new(),
        })
    }

    /// Sends a request to the named process. After its end another process may listen there.
    async fn open(&self, path: &str) -> anyhow::Result<hyper::body::Incoming> {
        if let Some(named) = &self.data_dir {
            let status = self.request("/api/v1/status").await?.collect().await?;
            let status: Answering = serde_json::from_slice(&status.to_bytes())
                .with_context(|| format!("{} does not answer as gpuwarden does", self.base))?;
            if !same(named, &status.data_dir) {
                bail!(
                    "no gpuwarden runs with the data directory {}; the one that answers at {} uses {}: \
                     name that with --data-dir, or its address with --server",
                    named.display(),
                    self.base,
                    status.data_dir.display()
                );
            }
        }
        self.request(path).await
    }

    async fn request(&self, path: &str) -> anyhow::Result<hyper::body::Incoming> {
        let uri: Uri = format!("{}{path}", self.base).parse()?;
        let named = (&self.port_forward, &self.data_dir);
        let response = self.http.get(uri).await.with_context(|| match named {
            (Some(forward), _) => format!(
                "the controller {} does not answer by kubectl port-forward",
                forward.pod
            ),
            (None, Some(named)) => format!(
                "no gpuwarden runs with the data directory {}: none answers at {}; start one with \
                 'gpuwarden run', or name the address of another with --server",
                named.display(),
                self.base
            ),
            (None, None) => format!(
                "no gpuwarden answers at {}; start one with 'gpuwarden run', or name it with --server \
                 or --data-dir",
                self.base
            ),
        })?;
        let status = response.status();
        let body = response.into_body();
        if status.is_success() {
            return Ok(body);
        }
        let text = body
            .collect()
            .await
            .map(http_body_util::Collected::to_bytes)
            .unwrap_or_default();
        let error: Option<ErrorBody> = serde_json::from_slice(&text).ok();
        match error {
            Some(body) => bail!("{} ({})", body.error, body.hint),
            None => bail!("{}{path} answers {status}", self.base),
        }
    }
}

// === impl Lines ===

impl Lines {
    /// Reads the next line; `None` at the end.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.rest.extend_from_slice(&data);
                    }
                }
                None => return Ok(None),
            }
        }
    }
}

/// Sends events to the connector, like a monitor.
pub(crate) async fn send(target: &TargetArgs, events: HealthEvents) -> anyhow::Result<()> {
    let path = socket(target).await?;
    let channel = connect(&path, |endpoint| endpoint.timeout(TIMEOUT)).await;
    let channel = channel.with_context(|| {
        format!(
            "no gpuwarden listens on {}; start one with 'gpuwarden run', or name its socket with \
             --socket",
            path.display()
        )
    })?;
    let answer = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(events)
        .await;
    answer.map(drop).map_err(|status| {
        anyhow::anyhow!("{}", status.message()).context("the events were rejected")
    })
}

/// Connects to the Device API of this machine: to the given socket, else to that of the gpuwarden
/// that is named or found.
pub(crate) async fn device_api(args: &DeviceApiArgs) -> anyhow::Result<Channel> {
    let file = ClientSettings::read(args.config.as_deref())?;
    // The file's socket is ignored if a flag names another gpuwarden.
    let of_file = file.device_api.filter(|_| args.data_dir.is_none());
    let data_dir = args.data_dir.clone().or(file.data_dir);
    let path = match args.device_api.clone().or(of_file) {
        Some(path) => path,
        None => endpoint(data_dir.as_deref())
            .and_then(|found| found.device_api)
            .context(
                "no gpuwarden with a Device API runs on this machine; start one with 'gpuwarden \
                 run', or name its socket with --device-api",
            )?,
    };
    connect(&path, |endpoint| endpoint).await.with_context(|| {
        format!(
            "no Device API is served on {}; start gpuwarden with 'gpuwarden run', or name another \
             socket with --device-api",
            path.display()
        )
    })
}

/// Connects to a Unix socket.
async fn connect(
    path: &Path,
    limits: impl FnOnce(tonic::transport::Endpoint) -> tonic::transport::Endpoint,
) -> anyhow::Result<Channel> {
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix://{}", path.display()))?;
    Ok(limits(endpoint.connect_timeout(TIMEOUT)).connect().await?)
}

/// Reads the keys of the configuration file for clients.
pub(crate) fn file(args: &ServerArgs) -> anyhow::Result<ClientSettings> {
    Ok(ClientSettings::read(args.config.as_deref())?)
}

/// Returns the URL of the server: of the running one, else the one that `run` with the same flags and
/// file would use. Also returns the data directory, if flag or file name the server by it.
fn address(args: &ServerArgs, file: &ClientSettings) -> (String, Option<PathBuf>) {
    let with_scheme = |server: &String| {
        if server.contains("://") {
            server.clone()
        } else {
            format!("http://{server}")
        }
    };
    if let Some(server) = &args.server {
        return (with_scheme(server), None);
    }
    // A flag has precedence over the file.
    if args.data_dir.is_none()
        && let Some(server) = &file.server
    {
        return (with_scheme(server), None);
    }
    let named = data_dir(args, file);
    if let Some(found) = endpoint(named.as_deref()) {
        return (found.server, named);
    }
    let listen = file.listen.filter(|listen| listen.port() != 0);
    let listen = listen.map(|mut listen| {
        if listen.ip().is_unspecified() {
            listen.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        listen.to_string()
    });
    let listen = listen.unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"));
    (format!("http://{listen}"), named)
}

/// Returns the data directory that a flag, the environment or the file names.
fn data_dir(args: &ServerArgs, file: &ClientSettings) -> Option<PathBuf> {
    args.data_dir.clone().or_else(|| file.data_dir.clone())
}

/// Reads the endpoint of the running gpuwarden in the named data directory, else in the default one.
fn endpoint(named: Option<&Path>) -> Option<Endpoint> {
    match named {
        Some(named) => Endpoint::read(named),
        None => Endpoint::read(&default_data_dir().ok()?),
    }
}

/// Returns true if both paths are the same directory, with links resolved.
fn same(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let real = path.canonicalize().or_else(|_| std::path::absolute(path));
        real.unwrap_or_else(|_| path.to_owned())
    };
    real(a) == real(b)
}

/// Returns the connector's socket: the given one, else that of the gpuwarden that is named or found.
async fn socket(target: &TargetArgs) -> anyhow::Result<PathBuf> {
    let file = file(&target.server)?;
    let named = target.server.server.is_some() || target.server.data_dir.is_some();
    // The file's socket is ignored if a flag names another gpuwarden.
    let given = target
        .socket
        .clone()
        .or_else(|| file.socket.clone().filter(|_| !named));
    if let Some(socket) = given {
        let text = socket.to_string_lossy();
        return Ok(PathBuf::from(text.strip_prefix("unix://").unwrap_or(&text)));
    }
    if target.server.server.is_some() || (!named && file.server.is_some()) {
        let status = Client::new(&target.server)?.status().await?;
        return Ok(PathBuf::from(status.process.socket));
    }
    let named = data_dir(&target.server, &file);
    let found = endpoint(named.as_deref()).map(|found| found.socket);
    found.with_context(|| {
        let place = match &named {
            Some(named) => format!("the data directory {}", named.display()),
            None => "the default data directory".to_owned(),
        };
        format!(
            "no gpuwarden runs with {place}; start one with 'gpuwarden run', or name another with \
             --data-dir, --server or --socket"
        )
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn an_address_is_that_of_the_flag_the_file_or_the_running_one() {
        let running = tempfile::tempdir().unwrap();
        let written = Endpoint {
            server: "http://127.0.0.1:7".into(),
            socket: "/s".into(),
            device_api: None,
            pid: 1,
        };
        written.write(running.path()).unwrap();
        let empty = Some(PathBuf::from("/nowhere"));
        let args = |server: Option<&str>, data_dir: &Option<PathBuf>| ServerArgs {
            server: server.map(str::to_owned),
            data_dir: data_dir.clone(),
            config: None,
        };
        let file = |text: &str| -> ClientSettings { toml::from_str(text).unwrap() };
        let in_file = format!("data-dir = {:?}", running.path());
        let running = Some(running.path().to_owned());
        for (args, file, expected, named) in [
            (
                args(Some("10.0.0.1:9"), &running),
                file("server = \"http://b\""),
                "http://10.0.0.1:9",
                &None,
            ),
            (
                args(None, &running),
                file("server = \"http://b\""),
                "http://127.0.0.1:7",
                &running,
            ),
            (
                args(None, &None),
                file("server = \"b:1\""),
                "http://b:1",
                &None,
            ),
            (
                args(None, &None),
                file(&in_file),
                "http://127.0.0.1:7",
                &running,
            ),
            (
                args(None, &empty),
                file("listen = \"0.0.0.0:99\"\nquarantine = true"),
                "http://127.0.0.1:99",
                &empty,
            ),
            (
                args(None, &empty),
                file("listen = \"127.0.0.1:0\""),
                "http://127.0.0.1:2112",
                &empty,
            ),
            (
                args(None, &empty),
                file(""),
                "http://127.0.0.1:2112",
                &empty,
            ),
        ] {
            let expected = (expected.to_owned(), named.clone());
            assert_eq!(address(&args, &file), expected, "{args:?} {file:?}");
        }
    }

    /// Starts a server that answers every request as a gpuwarden with `data_dir`. Returns its URL.
    async fn another(data_dir: &Path) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let body = serde_json::json!({ "dataDir": data_dir }).to_string();
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                let body = body.clone();
                tokio::spawn(async move {
                    let mut request = Vec::new();
                    while connection.read_buf(&mut request).await.unwrap_or(0) > 0 {
                        if request.ends_with(b"\r\n\r\n") {
                            let length = body.len();
                            let answer = format!(
                                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
                            );
                            connection.write_all(answer.as_bytes()).await.unwrap();
                            request.clear();
                        }
                    }
                });
            }
        });
        format!("http://{address}")
    }

    #[tokio::test]
    async fn one_that_was_named_is_not_mistaken_for_another() {
        let own = tempfile::tempdir().unwrap();
        let foreign = tempfile::tempdir().unwrap();
        let by_link = foreign.path().join("link");
        std::os::unix::fs::symlink(own.path(), &by_link).unwrap();
        let named = |data_dir: &Path| {
            Client::new(&ServerArgs {
                data_dir: Some(data_dir.to_owned()),
                ..ServerArgs::default()
            })
            .unwrap()
        };
        // A killed process left its endpoint, and another process listens there now.
        let written = |server: String| {
            let endpoint = Endpoint {
                server,
                socket: "/s".into(),
                device_api: None,
                pid: 1,
            };
            endpoint.write(own.path()).unwrap();
        };
        let server = another(foreign.path()).await;
        written(server.clone());
        let error = named(own.path()).get_bytes("/api/v1/events").await;
        let error = error.unwrap_err().to_string();
        for part in [
            &server,
            &own.path().display().to_string(),
            &foreign.path().display().to_string(),
        ] {
            assert!(error.contains(part), "{error}");
        }
        written(another(own.path()).await);
        for data_dir in [own.path(), &by_link] {
            let answer = named(data_dir).get_bytes("/api/v1/events").await;
            assert!(answer.unwrap().starts_with(b"{\"dataDir\""));
        }
        // Nothing listens: the error names the directory.
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", nobody.local_addr().unwrap());
        drop(nobody);
        written(address);
        let error = named(own.path()).get_bytes("/api/v1/events").await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&*own.path().to_string_lossy()), "{error}");
    }

    #[tokio::test]
    async fn a_data_directory_without_one_is_named_in_the_error() {
        let empty = tempfile::tempdir().unwrap();
        let target = TargetArgs {
            node_name: None,
            socket: None,
            server: ServerArgs {
                data_dir: Some(empty.path().to_owned()),
                ..ServerArgs::default()
            },
        };
        let error = socket(&target).await.unwrap_err().to_string();
        assert!(error.contains(&*empty.path().to_string_lossy()), "{error}");
    }
}
