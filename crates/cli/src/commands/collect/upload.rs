//! Uploads files to a server by HTTP PUT, like NVSentinel's log collector.

use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::Full;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// Longest time for one file: the largest takes so long at ten megabits per second.
const TIME: Duration = Duration::from_secs(60);

/// Client of the server for uploads.
pub(super) struct Uploader {
    base: String,
    http: HttpClient<HttpConnector, Full<Bytes>>,
}

// === impl Uploader ===

impl Uploader {
    /// Creates an uploader to paths below `base`.
    pub(super) fn new(base: &str) -> anyhow::Result<Self> {
        // The address may contain a secret: no error quotes it.
        let uri: Uri = base
            .parse()
            .context("--upload is not an address such as http://files.example/upload")?;
        if uri.scheme_str() != Some("http") {
            bail!("--upload: only http:// is supported");
        }
        if uri.query().is_some() || uri.authority().is_some_and(|it| it.as_str().contains('@')) {
            bail!("--upload: the address must have neither a user nor a query");
        }
        Ok(Self {
            base: base.trim_end_matches('/').to_owned(),
            http: HttpClient::builder(TokioExecutor::new()).build_http(),
        })
    }

    /// Uploads a file to a path below the base.
    pub(super) async fn put(&self, place: &str, content: Vec<u8>) -> anyhow::Result<()> {
        let request =
            Request::put(format!("{}/{place}", self.base)).body(Full::new(Bytes::from(content)))?;
        let answer = tokio::time::timeout(TIME, self.http.request(request)).await;
        let answer = answer.with_context(|| format!("no answer within {} s", TIME.as_secs()))??;
        if !answer.status().is_success() {
            bail!("the server answers {}", answer.status());
        }
        Ok(())
    }
}
