//! A client of a running gpuwarden: its HTTP API, and the connector's socket.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use contract::HealthEvents;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use http::Uri;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;

use crate::args::{ServerArgs, TargetArgs};
use crate::settings::{ClientSettings, DEFAULT_PORT, Endpoint, default_data_dir};

/// A request that is not answered by then is given up.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes.
const MAX_ANSWER: usize = 256 * 1024 * 1024;

/// A client of the HTTP API.
pub(crate) struct Client {
    base: String,
    http: HttpClient<HttpConnector, Empty<Bytes>>,
}

/// A stream of lines.
pub(crate) struct Lines {
    body: hyper::body::Incoming,
    rest: Vec<u8>,
}

// === impl Client ===

impl Client {
    /// A client of the gpuwarden that `args` name, or that is found.
    pub(crate) fn new(args: &ServerArgs) -> anyhow::Result<Self> {
        let base = address(args, &file(args)?);
        let base = base.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().with_context(|| {
            format!("--server {base:?} is no address such as http://127.0.0.1:2112")
        })?;
        if uri.scheme_str() != Some("http") {
            bail!("--server {base:?}: only http:// is spoken; the API listens on loopback");
        }
        Ok(Self {
            base,
            http: HttpClient::builder(TokioExecutor::new()).build_http(),
        })
    }

    /// Asks for a JSON document.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let body = self.get_bytes(path).await?;
        serde_json::from_slice(&body)
            .with_context(|| format!("{}{path} does not answer as gpuwarden does", self.base))
    }

    /// Asks for a whole answer, whatever it holds.
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

    /// Asks for a stream of lines that does not end by itself.
    pub(crate) async fn lines(&self, path: &str) -> anyhow::Result<Lines> {
        Ok(Lines {
            body: self.open(path).await?,
            rest: Vec::new(),
        })
    }

    async fn open(&self, path: &str) -> anyhow::Result<hyper::body::Incoming> {
        let uri: Uri = format!("{}{path}", self.base).parse()?;
        let response = self.http.get(uri).await.with_context(|| {
            format!(
                "no gpuwarden answers at {}; start one with 'gpuwarden run', or name it with --server \
                 or --data-dir",
                self.base
            )
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
        let said: Option<console::api::ErrorBody> = serde_json::from_slice(&text).ok();
        match said {
            Some(body) => bail!("{} ({})", body.error, body.hint),
            None => bail!("{}{path} answers {status}", self.base),
        }
    }
}

// === impl Lines ===

impl Lines {
    /// The next line; `None` at the end.
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

/// Sends events to the connector, as any monitor does.
pub(crate) async fn send(target: &TargetArgs, events: HealthEvents) -> anyhow::Result<()> {
    let path = socket(target).await?;
    let shown = path.display().to_string();
    let address = format!("unix://{shown}");
    let channel = tonic::transport::Endpoint::try_from(address)?
        .connect_timeout(TIMEOUT)
        .timeout(TIMEOUT)
        .connect()
        .await
        .with_context(|| {
            format!("no gpuwarden listens on {shown}; start one with 'gpuwarden run', or name its socket with --socket")
        })?;
    let answer = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(events)
        .await;
    answer.map(drop).map_err(|status| {
        anyhow::anyhow!("{}", status.message()).context("the events were not taken")
    })
}

/// What the configuration file says to clients.
pub(crate) fn file(args: &ServerArgs) -> anyhow::Result<ClientSettings> {
    Ok(ClientSettings::read(args.config.as_deref())?)
}

/// The address of the server: as `run` with the same flags and the same file would have it,
/// or as the running one has written down.
fn address(args: &ServerArgs, file: &ClientSettings) -> String {
    let with_scheme = |server: &String| {
        if server.contains("://") {
            server.clone()
        } else {
            format!("http://{server}")
        }
    };
    if let Some(server) = &args.server {
        return with_scheme(server);
    }
    // A flag goes before the file.
    if args.data_dir.is_none()
        && let Some(server) = &file.server
    {
        return with_scheme(server);
    }
    if let Some(found) = endpoint(args, file) {
        return found.server;
    }
    let listen = file.listen.filter(|listen| listen.port() != 0);
    let listen = listen.map(|mut listen| {
        if listen.ip().is_unspecified() {
            listen.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        listen.to_string()
    });
    format!(
        "http://{}",
        listen.unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"))
    )
}

/// What the running gpuwarden has written about itself, if it can be found.
fn endpoint(args: &ServerArgs, file: &ClientSettings) -> Option<Endpoint> {
    let named = args.data_dir.clone().or_else(|| file.data_dir.clone());
    Endpoint::read(&named.or_else(|| default_data_dir().ok())?)
}

/// The connector's socket: as given, else as the gpuwarden that is named or found says.
async fn socket(target: &TargetArgs) -> anyhow::Result<PathBuf> {
    let file = file(&target.server)?;
    let named = target.server.server.is_some() || target.server.data_dir.is_some();
    // A flag that names another gpuwarden goes before the file's word for the socket.
    let given = target
        .socket
        .clone()
        .or_else(|| file.socket.clone().filter(|_| !named));
    if let Some(socket) = given {
        let text = socket.to_string_lossy();
        return Ok(PathBuf::from(text.strip_prefix("unix://").unwrap_or(&text)));
    }
    if target.server.server.is_some() || (!named && file.server.is_some()) {
        let status: console::api::Status =
            Client::new(&target.server)?.get("/api/v1/status").await?;
        return Ok(PathBuf::from(status.socket));
    }
    let found = endpoint(&target.server, &file).map(|found| found.socket);
    found.context(
        "no running gpuwarden is found in the data directory; start one with 'gpuwarden run', or \
         name its socket with --socket",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_that_of_the_flag_the_file_or_the_running_one() {
        let running = tempfile::tempdir().unwrap();
        let written = Endpoint {
            server: "http://127.0.0.1:7".into(),
            socket: "/s".into(),
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
        for (args, file, expected) in [
            (
                args(Some("10.0.0.1:9"), &running),
                file("server = \"http://b\""),
                "http://10.0.0.1:9",
            ),
            (
                args(None, &running),
                file("server = \"http://b\""),
                "http://127.0.0.1:7",
            ),
            (args(None, &None), file("server = \"b:1\""), "http://b:1"),
            (args(None, &None), file(&in_file), "http://127.0.0.1:7"),
            (
                args(None, &empty),
                file("listen = \"0.0.0.0:99\"\nquarantine = true"),
                "http://127.0.0.1:99",
            ),
            (
                args(None, &empty),
                file("listen = \"127.0.0.1:0\""),
                "http://127.0.0.1:2112",
            ),
            (args(None, &empty), file(""), "http://127.0.0.1:2112"),
        ] {
            assert_eq!(address(&args, &file), expected, "{args:?} {file:?}");
        }
    }
}
